"""Planning: integers in, integers out, the same on every rank. Imports neither torch nor megatron.

What a training loop of one's own needs has its name here; `examples/` shows how it is used.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "DocumentIndex": "dataset",
    "DocumentStream": "stream",
    "MicroBatchPlan": "step",
    "PackedStep": "packer",
    "Packer": "packer",
    "Planner": "step",
    "Source": "stream",
    "StepPlan": "step",
    "make_packer": "packer",
    "plan_step": "step",
    "read_index": "dataset",
}
__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    """A name of the library; looked up late, since a job is below planning and above the packing policies in it."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
