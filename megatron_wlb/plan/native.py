"""The only switch between Python and C++: whether the native core was built, and its classes if so."""

__all__ = ["AVAILABLE", "AdaptiveCore", "WlbCore"]

try:
    from megatron_wlb._native import AdaptiveCore, WlbCore
except ImportError:
    AdaptiveCore = WlbCore = None  # type: ignore[assignment,misc]

AVAILABLE = WlbCore is not None
