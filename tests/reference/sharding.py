"""The choice between shardings of a micro-batch, as csrc/sharding.cpp has it."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from megatron_wlb.hardware.profile import KernelModel
from megatron_wlb.sharding.routing import moved_rows
from megatron_wlb.sharding.select import RoundCosts
from megatron_wlb.types import SEGMENT, Shard, ShardPlan
from tests.reference.chunks import per_document, per_sequence
from tests.reference.hybrid import hybrid
from tests.reference.rounds import in_rounds


def choose_sharding(
    length: np.ndarray,
    cp_size: int,
    strategies: Sequence[str],
    most_shares: Sequence[float],
    kernel: KernelModel,
    exchanges: Sequence[float],
    num_mirrored: int,
    costs: RoundCosts | None,
) -> tuple[object, ...]:
    """Order, strategy, time, SEGMENT columns, bounds of calls, sets of calls, and rounds of the best sharding."""
    order, choices = np.arange(len(length)), []
    for exchange in exchanges:
        priced = replace(kernel, exchange=exchange)
        plans = (timed(plan, priced) for plan in candidates(length, cp_size, strategies, most_shares, kernel))
        choices.append((order, min(plans, key=lambda plan: plan.time)))
    if num_mirrored:
        mirrored = np.concatenate((mirrored_order(length[:num_mirrored]), order[num_mirrored:]))
        plan = per_sequence(length[mirrored], cp_size)
        choices.append((mirrored, timed(plan, replace(kernel, exchange=exchanges[0]))))
    if costs is not None:
        choices = [(order, in_rounds(plan, costs)) for order, plan in choices]
    order, plan = min(choices, key=lambda choice: choice[1].time)
    calls = [call for shard in plan.shards for call in shard.calls]
    rows = np.concatenate(calls, dtype=SEGMENT).view(np.int64).reshape(-1, 3)
    bounds = np.cumsum([0, *map(len, calls)]).tolist()
    return order, plan.strategy, plan.time, rows, bounds, list(plan.call_sets), [tuple(each) for each in plan.rounds]


def candidates(
    lengths: np.ndarray, cp: int, strategies: Sequence[str], most_shares: Sequence[float], kernel: KernelModel
) -> Iterator[ShardPlan]:
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
        yield from (hybrid(lengths, cp, share, kernel) for share in most_shares)


def timed(plan: ShardPlan, kernel: KernelModel) -> ShardPlan:
    """The plan with its predicted time: the slowest rank, and the exchange of K and V that nothing overlaps."""
    return replace(plan, time=float(rank_work(plan, kernel).max()) + kernel.exchange * int(moved_rows(plan).max()))


def mirrored_order(lengths: np.ndarray) -> np.ndarray:
    """Order of documents with the longest in the middle and the others by turns to its sides, int64 [n].

    Per-sequence sharding then gives every rank as much of a document's cheap beginning as of its end.
    """
    order = np.argsort(-lengths, kind="stable")
    return np.concatenate((order[1::2][::-1], order[::2]))


def rank_work(plan: ShardPlan, kernel: KernelModel) -> np.ndarray:
    """Return the predicted attention of every rank, float64 [cp], in kernel units."""
    calls, tiles, query_tiles = np.array([kernel.count_shard(shard.calls) for shard in plan.shards]).T
    launches = calls * (kernel.parts if moved_rows(plan).any() else 1)
    work: np.ndarray = kernel.time(launches, tiles, query_tiles)
    return work
