"""Makes a `Job` from settings and fills in what they leave open, for training and for commands."""

import contextlib
import dataclasses
import math
from dataclasses import dataclass, replace
from operator import index
from typing import Any, Literal

import numpy as np

from megatron_wlb.cost.attention import load_profile
from megatron_wlb.cost.exchange import expansion
from megatron_wlb.cost.memory import DEVICE_SHARE, largest_max_tokens, weight_bytes
from megatron_wlb.cost.passes import crossover
from megatron_wlb.job import MAX_TOKENS, Job, Parallel
from megatron_wlb.model import ModelShape
from megatron_wlb.plan.deferral import undeferrable
from megatron_wlb.plan.packing import DEFAULT_POLICY, POLICIES
from megatron_wlb.plan.packing.base import Packing
from megatron_wlb.plan.sharding.select import Sharding, shard
from megatron_wlb.settings import integer_or_auto, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings(Sharding):
    """What planning goes by, besides the packing policy. Lengths are in trained tokens."""

    micro_batches: int | Literal["auto"] = setting(
        "auto",
        "M: micro-batches of a step over all data-parallel ranks, for the same tokens a step; more of them empty the "
        "pipeline's bubble, fewer make delay needless. auto: with adaptive packing as many as are predicted to take "
        "least time for the first documents of the run, else --global-batch-size.",
        parse=integer_or_auto,
        word="auto",
        least=1,
        most=1 << 20,
    )
    max_tokens: int | Literal["auto"] | None = setting(
        None,
        "S_max: longest micro-batch in tokens, bounded by memory; at least --seq-length. auto: the largest whose "
        "activations fit --wlb-memory-budget. Default: 1.25 times --seq-length, or 1.25 times the mean micro-batch if "
        "that is longer.",
        parse=integer_or_auto,
        word="auto",
        least=1,
        most=MAX_TOKENS,
    )
    memory_budget: float | None = setting(
        None,
        "GiB that the activations of a pipeline stage may take, as predicted from S_max. Default: on GPUs with Adam "
        "nine tenths of the device's memory less weights and optimizer, else no limit.",
        parse=float,
        least=2**-10,
        most=1 << 10,
    )
    crossover: int | None = setting(
        None,
        "Document length at which attention costs as much as everything else in a layer. Default: by the predicted "
        "times of the model with --wlb-profile; by its FLOPs where that is flops.",
        parse=int,
        least=1,
        most=1 << 35,
    )
    defer_weight_gradients: str = setting(
        "auto",
        "Products for weight gradients of linear layers leave the backward passes of a pipeline and run where the plan "
        "of the step has their stage wait. auto: where there is a pipeline and its layers can.",
        choices=("auto", "on", "off"),
    )
    profile: str | None = setting(
        None,
        "Kernel times of the device: a shipped profile or a JSON file. Default: h100-fa2 on GPUs, flops (counts "
        "attended pairs) without.",
    )


def make_job(
    *,
    model: ModelShape,
    context_length: int,
    global_batch_size: int,
    parallel: Parallel | None = None,
    packing: Packing | None = None,
    settings: PlanSettings | None = None,
    default_profile: str = "flops",
    budget_bytes: float | None = None,
    device_bytes: float | None = None,
    **rest: Any,
) -> Job:
    """The job that settings describe, with everything settled that they leave open.

    Args:
        model: what is trained.
        context_length: the context window C in tokens.
        global_batch_size: N, the context windows of tokens that a step trains on average.
        parallel: the parallel layout; default: one rank.
        packing: the packing policy with its settings; default: `DEFAULT_POLICY`.
        settings: what planning goes by; default: the defaults.
        default_profile: where the settings name none.
        budget_bytes: memory for activations where the settings name none; None: no limit.
        device_bytes: memory of a GPU; where no budget is known, it bounds what is held for weight gradients, no more.
        rest: other fields of `Job`, which count before what the settings say.

    Raises ValueError for settings that contradict each other, and for an S_max that memory has no room for.
    """
    settings = settings or PlanSettings()
    profile = load_profile(settings.profile or default_profile)
    windows = index(global_batch_size)
    count = windows if settings.micro_batches == "auto" else settings.micro_batches
    count = index(rest.get("num_micro_batches", count))
    fields: dict[str, Any] = {
        "crossover_tokens": settings.crossover or 1,  # until times can be asked
        "packing": POLICIES[DEFAULT_POLICY]() if packing is None else packing,
        **{f.name: getattr(settings, f.name) for f in dataclasses.fields(Sharding)},
        "profile": profile,
        "num_micro_batches": count,
        "max_tokens": -(-windows // max(1, count)) * context_length,  # until memory has been asked
    }
    job = Job(
        model=model,
        parallel=parallel or Parallel(),
        context_length=index(context_length),  # of NumPy's integers, too, which JSON does not take
        global_batch_size=windows,
        **fields | rest,
    )
    if "cp_exchange" not in rest:
        job = replace(job, cp_exchange=_cp_exchange(job))
    if "crossover_tokens" not in rest and settings.crossover is None:
        job = replace(job, crossover_tokens=crossover(job))
    if settings.memory_budget is not None:
        budget_bytes = settings.memory_budget * 2**30
    known, why = budget_bytes, undeferrable(job)
    if known is None and device_bytes is not None and not why and not model.moe_router_topk:
        known = DEVICE_SHARE * device_bytes - weight_bytes(job)
    if known is not None:
        job = replace(job, activation_bytes=max(0, int(known)))
    if "defer_weight_gradients" not in rest and settings.defer_weight_gradients != "off":
        if why and settings.defer_weight_gradients == "on":
            raise ValueError(f"--wlb-defer-weight-gradients on, and {why}; give auto")
        job = replace(job, defer_weight_gradients=not why)
    if budget_bytes is not None:
        job = _grouped(job, rest.get("max_tokens", settings.max_tokens), budget_bytes)
    if "max_tokens" in rest:
        return job
    return replace(job, max_tokens=_max_tokens(job, settings.max_tokens, budget_bytes))


def _cp_exchange(job: Job) -> str:
    """shared, or latents where attention is predicted to take less time with them, for a window of documents each as
    long as all shorter ones together."""
    if not job.model.kv_lora_rank or job.parallel.cp == 1 or job.profile.counts_pairs or job.offloaded_layers:
        return "shared"
    halves = [job.context_length >> i for i in range(1, job.context_length.bit_length()) if job.context_length >> i]
    lengths = np.array([*halves, job.context_length - sum(halves)], np.int64)

    def time(cp_exchange: str) -> float:
        tried = replace(job, cp_exchange=cp_exchange)
        again = expansion(tried)[0] * job.context_length / job.parallel.cp if tried.expands_again else 0.0
        return shard(lengths, tried)[1].time + again

    return min(("shared", "latents"), key=time)


def _grouped(job: Job, wanted: int | str | None, budget_bytes: float) -> Job:
    """The job, in groups of as many micro-batches as stages where memory has no room for longer ones."""
    parallel = job.parallel
    least = wanted if isinstance(wanted, int) else default_max_tokens(job)
    if parallel.vpp > 1 and parallel.group_size is None and largest_max_tokens(job, budget_bytes) < least:
        with contextlib.suppress(ValueError):  # so many cannot be interleaved
            return replace(job, parallel=replace(parallel, group_size=parallel.pp))
    return job


def default_max_tokens(job: Job) -> int:
    """S_max where neither settings nor memory say."""
    return math.ceil(1.25 * job.least_max_tokens / job.unit_tokens) * job.unit_tokens


def _max_tokens(job: Job, wanted: int | str | None, budget_bytes: float | None) -> int:
    """S_max as wanted, or its default; a multiple of the job's unit."""
    fitting = None if budget_bytes is None else largest_max_tokens(job, budget_bytes)
    least = job.least_max_tokens
    if fitting is not None and fitting < least:
        what = "--seq-length" if least == job.context_length else "the mean micro-batch of"
        raise ValueError(
            f"micro-batches of at most {fitting} tokens fit into memory, less than {what} {least}; recompute "
            "activations, use more micro-batches, pipeline, context or tensor parallelism, or raise --wlb-memory-budget"
        )
    if wanted == "auto":
        if fitting is None:
            raise ValueError("--wlb-max-tokens auto needs to know the memory: give --wlb-memory-budget in GiB")
        return min(fitting, MAX_TOKENS // job.unit_tokens * job.unit_tokens)
    if wanted is None:
        wanted = default_max_tokens(job)
    assert isinstance(wanted, int)
    if wanted < least:
        why = f"under --seq-length {least}: a document of a full window would fit nowhere"
        if least > job.context_length:
            why = f"too little for {job.num_micro_batches} micro-batches to hold the tokens of a step"
        raise ValueError(f"--wlb-max-tokens {wanted} is {why}; give at least {least}")
    if fitting is not None and wanted > fitting:
        raise ValueError(
            f"micro-batches of {wanted} tokens (S_max) need more memory for activations than there is; give "
            f"--wlb-max-tokens {fitting} or auto, recompute activations, or raise --wlb-memory-budget"
        )
    return wanted
