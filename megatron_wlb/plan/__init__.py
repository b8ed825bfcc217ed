"""Planning: integers in, integers out, the same on every rank. Imports neither torch nor megatron.

What a training loop of one's own needs has its name here; `examples/` shows how it is used.
"""

from megatron_wlb.plan.dataset import DocumentIndex, read_index
from megatron_wlb.plan.packer import PackedStep, Packer, make_packer
from megatron_wlb.plan.step import Layout, MicroBatchPlan, Planner, StepPlan, plan_step
from megatron_wlb.plan.stream import DocumentStream, Source

__all__ = [
    "DocumentIndex",
    "DocumentStream",
    "Layout",
    "MicroBatchPlan",
    "PackedStep",
    "Packer",
    "Planner",
    "Source",
    "StepPlan",
    "make_packer",
    "plan_step",
    "read_index",
]
