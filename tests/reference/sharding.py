"""The choice between shardings of a micro-batch, as csrc/sharding.cpp has it."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from megatron_wlb.documents import SEGMENT, Shard, ShardPlan
from megatron_wlb.hardware.profile import KernelModel
from megatron_wlb.sharding.routing import moved_rows
from megatron_wlb.sharding.select import RoundCosts
from tests.reference.chunks import per_document, per_sequence
from tests.reference.hybrid import hybrid
from tests.reference.rounds import in_rounds, regrouped


def choose_sharding(
    length: np.ndarray,
    cp_size: int,
    strategies: Sequence[str],
    most_shares: Sequence[float],
    kernel: KernelModel,
    costs: RoundCosts | None,
) -> tuple[object, ...]:
    """Strategy, time, SEGMENT columns, bounds of calls, and key bounds of the best sharding."""
    plans = (timed(plan, kernel) for plan in candidates(length, cp_size, strategies, most_shares, kernel))
    plan = min(plans, key=lambda plan: plan.time)
    if costs is not None:
        plan = in_rounds(plan, costs)
    elif cp_size > 1 and kernel.hidden > 0:
        plan = regrouped(plan)
    calls = [call for shard in plan.shards for call in shard.calls]
    rows = np.concatenate(calls, dtype=SEGMENT).view(np.int64).reshape(-1, 3)
    bounds = np.cumsum([0, *map(len, calls)]).tolist()
    return plan.strategy, plan.time, rows, bounds, list(plan.key_bounds)


def candidates(
    lengths: np.ndarray, cp: int, strategies: Sequence[str], most_shares: Sequence[float], kernel: KernelModel
) -> Iterator[ShardPlan]:
    """Every sharding that is compared, in the order that breaks ties."""
    if cp == 1:
        whole = np.zeros(len(lengths), SEGMENT)
        whole["document"], whole["stop"] = np.arange(len(lengths)), lengths
        yield ShardPlan(lengths=lengths, shards=(Shard(calls=(whole,)),), strategy="whole")
        return
    if "per-sequence" in strategies:
        yield per_sequence(lengths, cp)
    if "per-document" in strategies:
        yield per_document(lengths, cp)
    if "hybrid" in strategies:
        yield from (hybrid(lengths, cp, share, kernel) for share in most_shares)


def timed(plan: ShardPlan, kernel: KernelModel) -> ShardPlan:
    """The plan with its predicted time: the slowest rank, and the exchange of K and V that nothing overlaps."""
    return replace(plan, time=float(rank_work(plan, kernel).max()) + kernel.exchange * int(moved_rows(plan).max()))


def rank_work(plan: ShardPlan, kernel: KernelModel) -> np.ndarray:
    """Return the predicted attention of every rank, float64 [cp], in kernel units."""
    calls, *tiles = np.array([kernel.count_shard(shard.calls)[:3] for shard in plan.shards]).T
    launches = calls * (kernel.kv_chunks if moved_rows(plan).any() else 1)
    hidden = [kernel.count_shard(shard.calls[1:])[3] for shard in regrouped(plan).shards]
    work: np.ndarray = kernel.time(launches, *tiles, np.array(hidden))
    return work
