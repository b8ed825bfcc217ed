"""Prices: the time that a run loses with the features that --wlb switches off, or has a slower form of."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from megatron_wlb.describe.megatron import graphs_of, recompute_of, tp_overlap
from megatron_wlb.job import Job
from megatron_wlb.packing.megatron import without_wlb
from megatron_wlb.simulate.memory import GRADIENT_BYTES, OPTIMIZER_BYTES, WEIGHT_BYTES, gpu_weights, held_bytes

SIMULATED = "simulated"


class Price(NamedTuple):
    """A feature that Megatron alone has."""

    feature: str
    times: float
    """Times as long a step takes without it."""
    source: str


class _Simulated(NamedTuple):
    """A feature that is a field of a job."""

    feature: str
    field: str
    value: Callable[[Any, Job], Any]
    """Its value in the job of Megatron alone, by Megatron's arguments and the job of --wlb."""


_SIMULATED = (
    _Simulated(
        "the overlap of experts' all-to-all",
        "overlaps_experts",
        lambda a, job: a.overlap_moe_expert_parallel_comm and (job.parallel.pp == 1 or job.parallel.vpp > 1),
    ),
    _Simulated(
        "the overlap of tensor-parallel communication",
        "tp_overlap",
        lambda a, job: job.tp_overlap or (tp_overlap(job.parallel.tp) if a.tp_comm_overlap else 0.0),
    ),
    _Simulated(
        "the dispatcher of tokens",
        "moe_dispatcher",
        lambda a, job: (job.model.is_mixture and a.moe_token_dispatcher_type) or job.moe_dispatcher,
    ),
    _Simulated(
        "offloading of activations, in whose place they are recomputed,", "recompute", lambda a, job: recompute_of(a)
    ),
    _Simulated("CUDA graphs", "cuda_graphs", lambda a, job: graphs_of(a)),
    _Simulated("attention in FP8", "fp8_attention", lambda a, job: a.fp8_dot_product_attention),
)


def alone(job: Job, a: Any, *, cp_sharding: str = "per-document") -> Job:
    """Return the job as Megatron alone trains it, with the features of its arguments `a`."""
    given = {each.field: each.value(a, job) for each in _SIMULATED}
    return replace(without_wlb(job, cp_sharding=cp_sharding), **given)


def prices(job: Job, a: Any, time: Callable[[Job], float]) -> list[Price]:
    """Return the prices of the features of Megatron's arguments `a` that a job of --wlb lacks.

    `time` returns us of the same steps by Megatron alone with a job's features.
    """
    megatron, found = alone(job, a), []
    whole = time(megatron)
    for each in _SIMULATED:
        mine, theirs = getattr(job, each.field), getattr(megatron, each.field)
        if mine != theirs:
            slower = time(replace(megatron, **{each.field: mine})) / whole
            found.append(Price(each.feature, slower, SIMULATED))
    if a.use_megatron_fsdp or a.use_torch_fsdp2:
        more = (held_bytes(job) - divided_bytes(job)).max() / 2**30
        # FSDP moves weights for every pass, and the simulator hides that in Megatron's favor; --wlb moves them once.
        why = f"no time is lost, since weights travel once a step; they and their gradients take {more:.1f} GiB more"
        found.append(Price("FSDP", 1.0, why))
    if a.fine_grained_activation_offloading and job.recompute == megatron.recompute:
        found.append(Price("offloading of activations", 1.0, "no time is predicted; they stay in GPU memory"))
    return found


def sentence(balance: float, speedup: float, found: Sequence[Price]) -> str:
    """Return the gain of balance, its cost and the net gain; `speedup` is over Megatron alone."""

    def cost(each: Price) -> str:
        if each.source == SIMULATED:
            return f"without {each.feature} a step takes {each.times:.2f} times as long ({each.source})"
        return f"without {each.feature}: {each.source}"

    return f"Balance brings {balance:.2f}; {'; '.join(map(cost, found))}. Net: {speedup:.2f}."


def divided_bytes(job: Job) -> Any:
    """Return bytes of weights, gradients and optimizer that FSDP divides over data-parallel ranks, float64 [pp]."""
    pairs = zip(gpu_weights(job), job.parallel.copies, strict=True)
    return sum(weights * (WEIGHT_BYTES + GRADIENT_BYTES + OPTIMIZER_BYTES) / copies for weights, copies in pairs)
