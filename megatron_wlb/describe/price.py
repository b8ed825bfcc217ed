"""Prices: the time that a run loses with the features that --wlb switches off, or has a slower form of."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from megatron_wlb.describe.megatron import of_megatron
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


_SIMULATED = {
    "overlaps_experts": "the overlap of experts' all-to-all",
    "tp_overlap": "the overlap of tensor-parallel communication",
    "moe_dispatcher": "the dispatcher of tokens",
    "recompute": "offloading of activations, in whose place they are recomputed,",
    "cuda_graphs": "CUDA graphs",
    "fp8_attention": "attention in FP8",
}
"""Features that are a field of a job, by the field."""


def alone(job: Job, a: Any, *, cp_sharding: str = "per-document") -> Job:
    """Return the job as Megatron alone trains it, with the features of its arguments `a`."""
    return replace(without_wlb(job, cp_sharding=cp_sharding), **of_megatron(a, job))


def prices(job: Job, a: Any, time: Callable[[Job], float]) -> list[Price]:
    """Return the prices of the features of Megatron's arguments `a` that a job of --wlb lacks.

    `time` returns us of the same steps by Megatron alone with a job's features.
    """
    megatron, found = alone(job, a), []
    whole = time(megatron)
    lacks = {name: value for name in _SIMULATED if (value := getattr(job, name)) != getattr(megatron, name)}
    for name, value in lacks.items():
        slower = time(replace(megatron, **{name: value})) / whole
        found.append(Price(_SIMULATED[name], slower, SIMULATED))
    if a.use_megatron_fsdp or a.use_torch_fsdp2:
        more = (held_bytes(job) - divided_bytes(job)).max() / 2**30
        # FSDP moves weights for every pass, and the simulator hides that in Megatron's favor; --wlb moves them once.
        why = f"no time is lost, since weights travel once a step; they and their gradients take {more:.1f} GiB more"
        found.append(Price("FSDP", 1.0, why))
    if a.fine_grained_activation_offloading and "recompute" not in lacks:
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
