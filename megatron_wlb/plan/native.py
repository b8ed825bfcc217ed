"""The only switch between Python and C++: whether the native core can be loaded, and its classes if so."""

import warnings

__all__ = [
    "AVAILABLE",
    "WHY_NOT",
    "AdaptiveCore",
    "FixedCore",
    "OriginalCore",
    "WlbCore",
    "order",
    "place",
    "shard",
    "use",
]

WHY_NOT = "was not built; reinstall with a C++ compiler"
"""What keeps the native core from being AVAILABLE, where it is not, and what to do about it."""

try:
    from megatron_wlb._native import AdaptiveCore, FixedCore, OriginalCore, WlbCore, order, place, shard
except ImportError as error:
    AdaptiveCore = FixedCore = OriginalCore = WlbCore = None  # type: ignore[assignment,misc]
    order = place = shard = None  # type: ignore[assignment]
    if not isinstance(error, ModuleNotFoundError):
        WHY_NOT = f"was built but cannot be loaded ({error}); build it again, on this machine"
        warnings.warn(f"planning in Python, many times slower: the native core {WHY_NOT}", RuntimeWarning, stacklevel=2)

AVAILABLE = WlbCore is not None


def use(planner: str) -> bool:
    """Whether to plan natively as --wlb-planner says; raises ValueError where that cannot be."""
    if planner == "native" and not AVAILABLE:
        raise ValueError(f"--wlb-planner {planner}, but the native core {WHY_NOT}")
    return AVAILABLE and planner != "python"
