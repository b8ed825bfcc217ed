"""Makes a `Job` from settings, and fills in the rest."""

import contextlib
import math
from dataclasses import replace
from typing import Annotated, Any

import numpy as np
from msgspec import Meta

from megatron_wlb.describe.flags import PlanSettings
from megatron_wlb.hardware.profile import load_profile
from megatron_wlb.job import MAX_TOKENS, Job, Packing, Parallel, Sharding
from megatron_wlb.layers import attention_of
from megatron_wlb.model import ModelShape
from megatron_wlb.packing import DEFAULT_POLICY, POLICIES
from megatron_wlb.packing.megatron import without_wlb
from megatron_wlb.settings import Count, Size, in_range, within
from megatron_wlb.sharding.select import shard
from megatron_wlb.simulate.memory import largest_max_tokens, peak_bytes
from megatron_wlb.simulate.passes import crossover
from megatron_wlb.simulate.recompute import ways

EXCHANGE_GAIN = 0.01
"""By so much another exchange has to be faster: documents of other lengths change as much."""


@in_range
def make_job(
    *,
    model: ModelShape,
    context_length: Size,
    global_batch_size: Size,
    parallel: Parallel | None = None,
    packing: Packing | None = None,
    sharding: Sharding | None = None,
    settings: PlanSettings | None = None,
    default_profile: str = "flops",
    budget_bytes: Annotated[float, Meta(ge=-(1 << 60), le=1 << 60)] | None = None,
    tight: bool = False,
    **given: Any,
) -> Job:
    """Build the job that settings describe, filling in the rest.

    `context_length` is the window C in tokens, `global_batch_size` N, the windows that a step trains on average.
    `default_profile` and `budget_bytes` (memory for activations, below 0 where weights alone take more; None: no limit)
    apply where settings name none, and `tight` where they name no S_max: it is then the least instead of the default.
    `given` are other fields of `Job`, which take precedence. Raises ValueError for contradictory settings, for an S_max
    that does not fit memory, and for windows that do not fit it with Megatron alone either.
    """
    settings, parallel = settings or PlanSettings(), parallel or Parallel()
    if settings.budget_bytes is not None:
        budget_bytes = settings.budget_bytes
    window, windows = context_length, global_batch_size
    count = given.pop("num_micro_batches", windows if settings.micro_batches == "auto" else settings.micro_batches)
    count = within("num_micro_batches", count, Count)
    given = {name: within(name, value, Job.__annotations__.get(name, Any)) for name, value in given.items()}
    fields: dict[str, Any] = {
        "model": model,
        "parallel": parallel,
        "context_length": window,
        "global_batch_size": windows,
        "num_micro_batches": count,
        "packing": POLICIES[DEFAULT_POLICY]() if packing is None else packing,
        "sharding": sharding or Sharding(),
        **given,
    }
    if "profile" not in fields:
        fields["profile"] = load_profile(settings.profile or default_profile)

    def asked() -> Job:
        """Return the job as settled so far, to predict times and memory with."""
        whole = -(-windows // max(1, count)) * window
        return Job(**{"crossover_tokens": model.crossover_tokens, "max_tokens": whole, **fields})

    if "cp_exchange" not in fields:
        fields["cp_exchange"] = _cp_exchange(asked())
    if "crossover_tokens" not in fields:
        fields["crossover_tokens"] = crossover(asked())
    if budget_bytes is not None:
        fields["parallel"] = _grouped(asked(), given.get("max_tokens", settings.max_tokens), budget_bytes, tight=tight)
    if "max_tokens" not in fields:
        fields["max_tokens"] = _max_tokens(asked(), settings.max_tokens, budget_bytes, tight=tight)
    return Job(**fields)


def _cp_exchange(job: Job) -> str:
    """Return how K and V are exchanged: the first way of the model's attention, or one that is faster for documents of
    halved lengths."""
    attention = attention_of(job.model)
    first, *others = attention.exchanges
    if not others or job.parallel.cp == 1 or job.profile.counts_pairs or job.offloaded_layers:
        return first
    halves = [job.context_length >> i for i in range(1, job.context_length.bit_length()) if job.context_length >> i]
    lengths = np.array([*halves, job.context_length - sum(halves)], np.int64)

    def time(cp_exchange: str) -> float:
        tried = replace(job, cp_exchange=cp_exchange)
        return shard(lengths, tried).time + attention.expands_us(tried) * job.context_length / job.parallel.cp

    return next((each for each in others if time(each) < (1 - EXCHANGE_GAIN) * time(first)), first)


def _grouped(job: Job, wanted: int | str | None, budget_bytes: float, *, tight: bool) -> Parallel:
    """Return the layout, in short groups if memory has no room for longer ones."""
    parallel = job.parallel
    least = wanted if isinstance(wanted, int) else job.least_max_tokens if tight else default_max_tokens(job)
    if parallel.vpp > 1 and parallel.group_size is None and largest_max_tokens(job, budget_bytes) < least:
        with contextlib.suppress(ValueError):  # this number cannot be interleaved
            return replace(job, parallel=replace(parallel, group_size=parallel.pp)).parallel
    return parallel


def _holds_windows(job: Job, budget_bytes: float) -> bool:
    """Whether Megatron alone fits memory, in groups of as many micro-batches as stages."""
    return peak_bytes(without_wlb(job)) <= budget_bytes


def _too_long(job: Job, fitting: int, budget_bytes: float) -> str:
    """Return why a job does not fit memory, and the least recomputation or the budget with which it does."""
    least = job.least_max_tokens
    what = "--seq-length" if least == job.context_length else "the mean micro-batch of"
    needed = {way: peak_bytes(replace(job, recompute=way), max_tokens=least) for way in ways(job)}
    remedy = next((f"with {way.flags} they do" for way, need in needed.items() if need <= budget_bytes), None)
    if remedy is None:
        way, need = min(needed.items(), key=lambda each: each[1])
        remedy = (
            f"use more context, pipeline or tensor parallelism; with {way.flags}, which takes least, it needs "
            f"--wlb-memory-budget {math.ceil(need / 2**30 * 10) / 10}"
        )
    return (
        f"micro-batches of at most {fitting} tokens fit into memory, less than {what} {least}, and Megatron's own do "
        f"not fit either; {remedy}"
    )


def default_max_tokens(job: Job) -> int:
    """Return S_max if neither settings nor memory determine it."""
    most = MAX_TOKENS // job.unit_tokens * job.unit_tokens
    return min(math.ceil(1.25 * job.least_max_tokens / job.unit_tokens) * job.unit_tokens, most)


def _max_tokens(job: Job, wanted: int | str | None, budget_bytes: float | None, *, tight: bool) -> int:
    fitting, least = None, job.least_max_tokens
    if budget_bytes is not None:
        fitting = largest_max_tokens(job, budget_bytes)
        if fitting < least == job.context_length and _holds_windows(job, budget_bytes):
            fitting = least  # the exchange of K and V takes a little more than a ring
        if fitting < least:
            raise ValueError(_too_long(job, fitting, budget_bytes))
    if wanted == "auto":
        if fitting is None:
            raise ValueError("--wlb-max-tokens auto needs to know the memory: give --wlb-memory-budget in GiB")
        return min(fitting, MAX_TOKENS // job.unit_tokens * job.unit_tokens)
    if wanted is None:
        default = least if tight else default_max_tokens(job)
        return default if fitting is None else min(default, fitting)
    assert isinstance(wanted, int)
    if fitting is not None and wanted > fitting:
        raise ValueError(
            f"micro-batches of {wanted} tokens (S_max) need more memory for activations than there is; give "
            f"--wlb-max-tokens {fitting} or auto, recompute activations, or raise --wlb-memory-budget"
        )
    return wanted
