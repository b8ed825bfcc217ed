"""The only switch between Python and C++: whether the native core was built, and its classes if so."""

__all__ = ["AVAILABLE", "AdaptiveCore", "FixedCore", "OriginalCore", "WlbCore", "order", "place", "shard"]

try:
    from megatron_wlb._native import AdaptiveCore, FixedCore, OriginalCore, WlbCore, order, place, shard
except ImportError:
    AdaptiveCore = FixedCore = OriginalCore = WlbCore = None  # type: ignore[assignment,misc]
    order = place = shard = None  # type: ignore[assignment]

AVAILABLE = WlbCore is not None
