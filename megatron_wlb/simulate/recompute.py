"""Ways to recompute activations, from the fastest to the one that takes least memory."""

import contextlib
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from megatron_wlb.job import Job, Recompute
from megatron_wlb.sharding.select import shard
from megatron_wlb.simulate.memory import largest_max_tokens, layer_bytes
from megatron_wlb.simulate.passes import pass_times, untimed

MODULES = ("layernorm", "moe_act", "mla_up_proj", "shared_experts", "mlp", "moe")
"""Values of `--recompute-modules` that free memory; core attention's kernels keep almost none."""


_WITHIN_MOE = {"moe_act", "shared_experts"}


def ways(job: Job) -> list[Recompute]:
    """Return Megatron's ways to recompute parts of a job, the fastest first, beginning with no recomputation.

    Modules come one after the other by the time that a freed byte takes. Whole layers are some of every virtual stage
    (`block`), or all of them, from a shared input (`uniform`).
    """
    if job.offloaded_layers:
        return [Recompute()]
    time, most, refused = _backward(job), int(job.decoder_layers().max()), set[str]()
    if job.schedule().by_turns:
        most, refused = 0, {"moe"}
    if job.precision == "delayed":
        refused |= {"moe_act", "layernorm"}
    found, taken, plain = [Recompute()], list[str](), time(Recompute())
    left = [name for name in MODULES if name not in refused and _freed(job, name)]
    while left:
        price = {name: (time(_selective(name)) - plain) / _freed(job, name) for name in left}
        taken.append(min(left, key=lambda name: price[name]))
        left.remove(taken[-1])
        found.append(_selective(*({*taken} - _WITHIN_MOE if "moe" in taken else taken)))
    found += [Recompute(granularity="full", method="block", num_layers=count) for count in range(1, most + 1)]
    found += [Recompute(granularity="full", method="uniform", num_layers=count) for count in range(2, most + 1)]
    return sorted(found, key=time)


def worth_trying(free: Job, budget_bytes: float) -> list[Recompute]:
    """Return the ways to recompute with which a job may be fastest within memory; `free` has no limit of it.

    The first of every kind with which windows fit, in the shortest groups, and the first with which the job's own S_max
    does in its own groups: later ones take longer without a gain.
    """
    short, found = free, dict[tuple[str | None, str | None], Recompute]()
    if free.parallel.vpp > 1 and free.parallel.group_size is None:
        with contextlib.suppress(ValueError):  # this number cannot be interleaved
            short = replace(free, parallel=replace(free.parallel, group_size=free.parallel.pp))
    for way in ways(free):
        if largest_max_tokens(replace(free, recompute=way), budget_bytes) >= free.max_tokens:
            return [*found.values(), way]
        if largest_max_tokens(replace(short, recompute=way), budget_bytes) >= free.least_max_tokens:
            found.setdefault((way.granularity, way.method), way)
    return [*found.values()]


def _selective(*modules: str) -> Recompute:
    return Recompute(granularity="selective", modules=tuple(sorted(modules)))


def _freed(job: Job, module: str) -> float:
    """Return the bytes that recomputing a module frees, of a layer of every kind."""
    again, plain = (replace(job, recompute=each) for each in (_selective(module), Recompute()))
    return sum(layer_bytes(plain, kind) - layer_bytes(again, kind) for kind in job.model.kinds)


def _backward(job: Job) -> Callable[[Recompute], float]:
    """Return a function for the time of backward of one window; by order alone if the job cannot be timed."""
    if untimed(job):
        return lambda recompute: 0.0
    plan = shard(np.array([job.context_length]), job)
    return lambda recompute: float(pass_times(replace(job, recompute=recompute), [plan]).backward.sum())
