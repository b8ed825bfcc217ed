"""Choose the sharding of a micro-batch: the one whose slowest rank the kernel model predicts to finish first."""

import itertools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from megatron_wlb.config import CP_SHARDINGS
from megatron_wlb.plan import native
from megatron_wlb.plan.sharding.exchange import num_sent
from megatron_wlb.plan.sharding.hybrid import hybrid
from megatron_wlb.plan.sharding.per_document import per_document
from megatron_wlb.plan.sharding.per_sequence import per_sequence
from megatron_wlb.plan.types import SEGMENT, Shard, ShardPlan
from megatron_wlb.plan.workload import KernelModel

LONG_SHARES = (0, 1, 2, 3, 4, 5)
"""Hybrid is tried with documents of at least 2^-k of a rank's tokens as the long ones."""
STRATEGIES = {
    "per-sequence": ("per-sequence",),
    "per-document": ("per-document",),
    "hybrid": ("per-document", "hybrid"),  # per-document is hybrid with everything long
    "paper": ("per-sequence", "per-document"),
    "adaptive": ("per-sequence", "per-document", "hybrid"),
}
assert tuple(STRATEGIES) == CP_SHARDINGS


def rank_work(plan: ShardPlan, kernel: KernelModel) -> np.ndarray:
    """Predicted attention time of every rank, float64 [cp_size]; the unit is the kernel model's."""
    return np.array([shard_work(shard, kernel) for shard in plan.shards])


def shard_work(shard: Shard, kernel: KernelModel) -> float:
    """Predicted attention time of one rank: one kernel launch per colour with rows."""
    return float(kernel.time(*kernel.count_shard(shard.colours)))


def predicted_time(plan: ShardPlan, kernel: KernelModel) -> float:
    """Of the slowest rank, with the exchange of K and V that nothing hides."""
    exchanged = num_sent(plan) * len(plan.shards) if len(plan.shards) > 1 else 0
    return float(rank_work(plan, kernel).max()) + kernel.exchange * exchanged


def shard(lengths: np.ndarray, cp_size: int, strategy: str, kernel: KernelModel, *, use_native: bool) -> ShardPlan:
    """Shard documents of `lengths` (int64 [n], sum divisible by 2 * cp_size) over `cp_size` ranks.

    A single rank holds everything in one piece, whatever the strategy. `paper` takes the better one of the paper's two
    (section 5.3), `adaptive` the best of all; on a tie the first of `STRATEGIES`, since it makes fewer fragments.
    Deterministic, so that every rank chooses alike, in Python and C++.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"unknown sharding {strategy!r}; choose one of {', '.join(STRATEGIES)}")
    if cp_size == 1:
        return _whole(lengths)
    tried = STRATEGIES[strategy]
    if use_native:
        name, time, columns, bounds = native.shard(lengths, cp_size, tried, LONG_SHARES, kernel)
        segments = columns.view(SEGMENT)[:, 0]
        colours = [segments[i:j] for i, j in itertools.pairwise(bounds)]
        shards = tuple(Shard(colours=(colours[2 * r], colours[2 * r + 1])) for r in range(cp_size))
        return ShardPlan(lengths=lengths, shards=shards, strategy=name, time=time)
    timed = (replace(p, time=predicted_time(p, kernel)) for p in candidates(lengths, cp_size, tried, kernel))
    return min(timed, key=lambda plan: plan.time)


def candidates(
    lengths: np.ndarray, cp_size: int, strategies: tuple[str, ...], kernel: KernelModel
) -> Iterator[ShardPlan]:
    """Every sharding that is compared, in the order that breaks ties."""
    if "per-sequence" in strategies:
        yield per_sequence(lengths, cp_size)
    if "per-document" in strategies:
        yield per_document(lengths, cp_size)
    if "hybrid" in strategies:
        share = int(lengths.sum()) // cp_size
        for num_long in sorted({int((lengths >= max(1, share >> k)).sum()) for k in LONG_SHARES}):
            plan = hybrid(lengths, cp_size, num_long, kernel)
            if plan is not None:
                yield plan


def mirrored_order(lengths: np.ndarray) -> np.ndarray:
    """Order of documents with the longest in the middle and the others by turns to its sides, int64 [n].

    Per-sequence sharding then gives every rank as much of a document's cheap beginning as of its end.
    """
    order = np.argsort(-lengths, kind="stable")
    return np.concatenate((order[1::2][::-1], order[::2]))


def _whole(lengths: np.ndarray) -> ShardPlan:
    colour = np.zeros(len(lengths), SEGMENT)
    colour["document"], colour["stop"] = np.arange(len(lengths)), lengths
    return ShardPlan(lengths=lengths, shards=(Shard(colours=(colour,)),), strategy="whole")
