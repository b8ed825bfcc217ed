"""The only switch between Python and C++: the native core where it can be loaded, else None.

Fast paths ask `native.core is not None` when they run, so that tests and benchmarks switch by setting it.
"""

import warnings
from typing import Any

WHY_NOT = "was not built; reinstall with a C++ compiler"
"""What keeps the native core from being loaded, where it is not, and what to do about it."""

core: Any
try:
    from megatron_wlb import _native as core
    from megatron_wlb._native import choose_adaptive, choose_sharding, makespans, place, place_wlb, play  # noqa: F401  # or stale
except ImportError as error:
    core = None
    if not isinstance(error, ModuleNotFoundError):
        WHY_NOT = f"was built but cannot be loaded ({error}); build it again, on this machine"
        warnings.warn(f"planning in Python, many times slower: the native core {WHY_NOT}", RuntimeWarning, stacklevel=2)
