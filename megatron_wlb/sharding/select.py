"""Choose the sharding of a micro-batch: the one whose slowest rank the kernel model predicts to finish first."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from megatron_wlb.cost.attention import sharding_kernel
from megatron_wlb.hardware.profile import KernelModel
from megatron_wlb.job import STRATEGIES, Job
from megatron_wlb.plan import native
from megatron_wlb.sharding.chunks import per_document, per_sequence
from megatron_wlb.sharding.hybrid import hybrid
from megatron_wlb.sharding.rounds import Staging, staged, staging
from megatron_wlb.sharding.volume import moved_rows
from megatron_wlb.types import SEGMENT, Shard, ShardPlan, Stage

MOST_SHARES = (1 / 2, 1.0, 2.0, 4.0, 1 / 4, 1 / 8, 1 / 16, 1 / 32)
"""Hybrid is tried with so many times a rank's mean work as the most that a rank has of one document.

Those that often win come first, since they spare the others most of their time.
"""
EXPOSED_SHARES = (1 / 16, 1 / 4)
"""Of the time of the exchange, what may not be hidden: sharding is tried with each, and stages tell which is best."""


def shard(lengths: np.ndarray, job: Job) -> tuple[np.ndarray, ShardPlan]:
    """Shard a micro-batch with documents of `lengths` (int64 [n]) over the context-parallel ranks of a job.

    Returns the order of documents that the plan is for, int64 [n], and the plan. Its lengths end with the padding to a
    multiple of `job.unit_tokens`, if any, as a document of its own; a micro-batch without documents is a unit of
    padding. Where the job reorders, documents change places if per-sequence sharding is fastest then.
    """
    tokens, cp, kernel = int(lengths.sum()), job.parallel.cp, sharding_kernel(job)
    padding = -tokens % job.unit_tokens if tokens else job.unit_tokens
    padded = np.append(lengths, [padding] if padding else []).astype(np.int64)
    shares = EXPOSED_SHARES if job.cp_exchange == "shared" else (1,)
    exchanges = list(dict.fromkeys(share * kernel.exchange for share in shares))
    mirrors = cp > 1 and job.reorders and "per-sequence" in STRATEGIES[job.sharding.cp_sharding]
    if native.core is not None:
        tried = staging(job) if job.cp_exchange == "shared" else None
        num_mirrored = len(lengths) if mirrors else 0
        order, plan = _choose_natively(padded, cp, job.sharding.cp_sharding, kernel, exchanges, num_mirrored, tried)
        return order[: len(lengths)], plan
    order, kernels = np.arange(len(lengths)), [replace(kernel, exchange=exchange) for exchange in exchanges]
    choices = [(order, divide(padded, cp, job.sharding.cp_sharding, each)) for each in kernels]
    if mirrors:
        order = mirrored_order(lengths)
        mirrored = np.append(lengths[order], padded[len(lengths) :])
        choices.append((order, divide(mirrored, cp, "per-sequence", kernels[0])))
    if job.cp_exchange == "shared":
        choices = [(order, staged(plan, job)) for order, plan in choices]
    return min(choices, key=lambda choice: choice[1].time)


def _choose_natively(
    lengths: np.ndarray,
    cp: int,
    strategy: str,
    kernel: KernelModel,
    exchanges: Sequence[float],
    num_mirrored: int = 0,
    tried: Staging | None = None,
) -> tuple[np.ndarray, ShardPlan]:
    """What `shard` and `divide` are in C++: the order of documents, int64 [n], and the plan.

    Args:
        exchanges: in place of `kernel.exchange`; with stages it may be several, of which the best is taken.
        num_mirrored: so many documents, the first ones, change places if that is fastest.
        tried: None for a plan without stages.
    """
    order, name, time, rows, bounds, call_sets, stages = native.core.choose_sharding(
        lengths, cp, STRATEGIES[strategy], MOST_SHARES, kernel, exchanges, num_mirrored, tried
    )
    segments = rows.view(SEGMENT)[:, 0]
    calls = (segments[i:j] for i, j in itertools.pairwise(bounds))
    plan = ShardPlan(
        lengths=lengths[order],
        shards=tuple(Shard(calls=each) for each in itertools.batched(calls, len(call_sets))),
        strategy=name,
        time=time,
        call_sets=tuple(call_sets),
        stages=tuple(Stage(*each) for each in stages),
    )
    return order, plan


def divide(lengths: np.ndarray, cp: int, strategy: str, kernel: KernelModel) -> ShardPlan:
    """Divide documents of `lengths` (int64 [n], sum divisible by 2 * cp) over `cp` ranks, in the order they have.

    A single rank holds everything in one piece, whatever the strategy. `wlb` takes the better one of the paper's two
    (section 5.3), `auto` the best of per-sequence and every hybrid; on a tie the first, in the order of `candidates`.
    Deterministic, so that every rank chooses alike, in Python and C++.
    """
    if native.core is not None:
        return _choose_natively(lengths, cp, strategy, kernel, [kernel.exchange])[1]
    timed = (replace(p, time=predicted_time(p, kernel)) for p in candidates(lengths, cp, STRATEGIES[strategy], kernel))
    return min(timed, key=lambda plan: plan.time)


def candidates(lengths: np.ndarray, cp: int, strategies: tuple[str, ...], kernel: KernelModel) -> Iterator[ShardPlan]:
    """Every sharding that is compared, in the order that breaks ties."""
    if cp == 1:
        whole = np.zeros(len(lengths), SEGMENT)
        whole["document"], whole["stop"] = np.arange(len(lengths)), lengths
        yield ShardPlan(lengths=lengths, shards=(Shard(calls=(whole,)),), strategy="whole", call_sets=(0,))
        return
    if "per-sequence" in strategies:
        yield per_sequence(lengths, cp)
    if "per-document" in strategies:
        yield per_document(lengths, cp)
    if "hybrid" in strategies:
        yield from (hybrid(lengths, cp, share, kernel) for share in MOST_SHARES)


def mirrored_order(lengths: np.ndarray) -> np.ndarray:
    """Order of documents with the longest in the middle and the others by turns to its sides, int64 [n].

    Per-sequence sharding then gives every rank as much of a document's cheap beginning as of its end.
    """
    order = np.argsort(-lengths, kind="stable")
    return np.concatenate((order[1::2][::-1], order[::2]))


def rank_work(plan: ShardPlan, kernel: KernelModel) -> np.ndarray:
    """Predicted attention time of every rank, float64 [cp]; the unit is the kernel model's."""
    return _rank_work(plan, kernel, _most_moved(plan))


def predicted_time(plan: ShardPlan, kernel: KernelModel) -> float:
    """Predicted time of the slowest rank, with the exchange of K and V that nothing hides."""
    most_moved = _most_moved(plan)
    return float(_rank_work(plan, kernel, most_moved).max()) + kernel.exchange * most_moved


def _rank_work(plan: ShardPlan, kernel: KernelModel, most_moved: int) -> np.ndarray:
    calls, tiles, query_tiles = np.array([kernel.count_shard(shard.calls) for shard in plan.shards]).T
    work: np.ndarray = kernel.time(kernel.launches(calls, most_moved), tiles, query_tiles)
    return work


def _most_moved(plan: ShardPlan) -> int:
    """Rows of K and V through the busiest rank: the larger of what it takes in and what it hands out."""
    return int(moved_rows(plan).max())
