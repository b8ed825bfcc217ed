"""Balanced packing, pipelining and context parallelism (WLB-LLM) for Megatron-LM.

A training loop of your own finds all that it needs here; `examples/` shows how to use it.
"""

try:
    from megatron_wlb._native import choose_sharding, makespans, node_ends, place, place_documents  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"megatron_wlb plans in C++, and that is missing, of another version or for another machine ({error}); "
        "reinstall: pip install . (needs a C++17 compiler)"
    ) from error

from megatron_wlb.describe.flags import PlanSettings
from megatron_wlb.describe.make import make_job
from megatron_wlb.job import Job, Parallel
from megatron_wlb.model import MODELS, ModelShape
from megatron_wlb.packing import POLICIES
from megatron_wlb.plan.closed import balance
from megatron_wlb.plan.dataset import DocumentIndex, read_index
from megatron_wlb.plan.packer import PackedStep, Packer
from megatron_wlb.plan.samples import Samples, Windows, windows
from megatron_wlb.plan.step import MicroBatchPlan, Planner, StepPlan, plan_step

__version__ = "0.2.0"

__all__ = [
    "MODELS",
    "POLICIES",
    "DocumentIndex",
    "Job",
    "MicroBatchPlan",
    "ModelShape",
    "PackedStep",
    "Packer",
    "Parallel",
    "PlanSettings",
    "Planner",
    "Samples",
    "StepPlan",
    "Windows",
    "balance",
    "make_job",
    "plan_step",
    "read_index",
    "windows",
]
