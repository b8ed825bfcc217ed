"""Choose the sharding of a micro-batch: the one whose slowest rank the kernel model predicts to finish first."""

import numpy as np

from megatron_wlb.config import CP_SHARDINGS
from megatron_wlb.plan.sharding.per_document import per_document
from megatron_wlb.plan.sharding.per_sequence import per_sequence
from megatron_wlb.plan.types import SEGMENT, Shard, ShardPlan
from megatron_wlb.plan.workload import KernelModel


def rank_work(plan: ShardPlan, kernel: KernelModel) -> np.ndarray:
    """Predicted attention time of every rank, float64 [cp_size]; the unit is the kernel model's."""
    return np.array([shard_work(shard, kernel) for shard in plan.shards])


def shard_work(shard: Shard, kernel: KernelModel) -> float:
    """Predicted attention time of one rank: one kernel launch per colour."""
    return float(sum(kernel.launch_time(c["start"], c["stop"]) for c in shard.colours))


def shard(lengths: np.ndarray, cp_size: int, strategy: str, kernel: KernelModel) -> ShardPlan:
    """Shard documents of `lengths` (int64 [n], sum divisible by 2 * cp_size) over `cp_size` ranks.

    A single rank holds everything in one piece, whatever the strategy. `adaptive` takes the sharding with the smaller
    predicted maximum over ranks, per-sequence on a tie, since it makes fewer fragments (paper, section 5.3).
    Deterministic, so that every rank chooses alike.
    """
    if strategy not in CP_SHARDINGS:
        raise ValueError(f"unknown sharding {strategy!r}; choose one of {', '.join(CP_SHARDINGS)}")
    if cp_size == 1:
        return _whole(lengths)
    if strategy == "per-sequence":
        return per_sequence(lengths, cp_size)
    if strategy == "per-document":
        return per_document(lengths, cp_size)
    plans = (per_sequence(lengths, cp_size), per_document(lengths, cp_size))
    return min(plans, key=lambda plan: float(rank_work(plan, kernel).max()))


def _whole(lengths: np.ndarray) -> ShardPlan:
    colour = np.zeros(len(lengths), SEGMENT)
    colour["document"], colour["stop"] = np.arange(len(lengths)), lengths
    return ShardPlan(lengths=lengths, shards=(Shard(colours=(colour,)),), strategy="whole")
