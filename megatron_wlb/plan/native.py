"""The only switch between Python and C++: whether the native core was built, and its classes if so."""

__all__ = ["AVAILABLE", "AdaptiveCore", "FixedCore", "OriginalCore", "WlbCore", "shard"]

try:
    from megatron_wlb._native import AdaptiveCore, FixedCore, OriginalCore, WlbCore, shard
except ImportError:
    AdaptiveCore = FixedCore = OriginalCore = WlbCore = shard = None  # type: ignore[assignment,misc]

AVAILABLE = WlbCore is not None
