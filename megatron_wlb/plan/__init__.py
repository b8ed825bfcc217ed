"""Planning: integers in, integers out, the same on every rank. Imports neither torch nor megatron.

What a training loop of one's own needs has its name here, the description of its job included; `examples/` shows how it
is used.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "DocumentIndex": "plan.dataset",
    "DocumentStream": "plan.stream",
    "Job": "job",
    "MODELS": "model",
    "MicroBatchPlan": "plan.step",
    "ModelShape": "model",
    "PackedStep": "plan.packer",
    "Packer": "plan.packer",
    "Parallel": "job",
    "Planner": "plan.step",
    "Source": "plan.stream",
    "StepPlan": "plan.step",
    "make_job": "describe",
    "make_packer": "plan.packer",
    "plan_step": "plan.step",
    "read_index": "plan.dataset",
    "trained_tokens": "plan.dataset",
}
__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    """A name of the library; looked up late, since a job is below planning and above the packing policies in it."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"megatron_wlb.{_HOMES[name]}"), name)
