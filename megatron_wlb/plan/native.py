"""The only switch between Python and C++: whether the native core was built, and its classes if so."""

__all__ = ["AVAILABLE", "WlbCore"]

try:
    from megatron_wlb._native import WlbCore
except ImportError:
    WlbCore = None  # type: ignore[assignment,misc]

AVAILABLE = WlbCore is not None
