"""In which rounds the attention of a micro-batch runs, as csrc/rounds.cpp has it."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import numpy as np

from megatron_wlb.hardware.profile import KernelModel
from megatron_wlb.sharding.rounds import Load, Loads, RoundCosts, times
from megatron_wlb.sharding.routing import OWN
from megatron_wlb.sharding.volume import Held
from megatron_wlb.types import Round, Shard, ShardPlan


class _Way(NamedTuple):
    """A round that is tried: shared documents [first, stop), those with little work first."""

    first: int
    stop: int
    heads: tuple[int, int] | None = None
    keys: tuple[float, float] | None = None


def in_rounds(plan: ShardPlan, costs: RoundCosts) -> ShardPlan:
    """The plan with its calls and rounds in the order of the least predicted time, forward and backward together.

    That is its `time` then. Documents and rows stay on the ranks where they are.
    """
    held = Held(plan)
    sets, loads = held.is_shared.astype(np.int64), Loads(held, costs.forward)
    (shared,) = np.nonzero(held.is_shared)
    shared = shared[np.argsort(loads.tiles[shared, 0].sum(axis=1), kind="stable")]
    load = cache(lambda way: loads.of(shared[way.first : way.stop], way.heads, way.keys, costs.num_heads))
    whole, ways = _of_whole(held, costs.forward), list(_ways(len(shared), costs)) if len(shared) else [[]]

    def time(way: list[_Way]) -> float:
        own = [load(each) for each in way if each.keys == OWN]
        during = [load(each) for each in way if each.keys != OWN]
        return sum(times([whole, *own], during, costs, held)[1])

    took = [time(way) for way in ways]
    best = ways[int(np.argmin(took))]
    numbers = {bounds: number for number, bounds in enumerate(dict.fromkeys(way[:2] for way in best), 1)}
    for (first, stop), number in numbers.items():
        sets[shared[first:stop]] = number
    rounds = [Round(numbers[way[:2]], way.heads, way.keys) for way in best]
    return replace(regrouped(plan, sets, rounds), time=min(took))


def _ways(num_shared: int, costs: RoundCosts) -> Iterator[list[_Way]]:
    """Stages that are compared; of a tie the first wins."""
    num_heads = costs.num_heads
    for before, after in itertools.product(costs.edges, costs.edges):
        if before + after < num_shared or before == after == 0:
            cuts = (0, before, num_shared - after, num_shared)
            yield [_Way(first, stop) for first, stop in itertools.pairwise(cuts) if first < stop]
    for some in (1, num_heads // 2):
        for inner in ((some,), (some, num_heads - some)):
            bounds = list(itertools.pairwise((0, *inner, num_heads)))
            if all(first < stop for first, stop in bounds):
                yield [_Way(0, num_shared, heads) for heads in bounds]
    for first, shares in itertools.product(dict.fromkeys((num_shared - 1, 0)), costs.shares):
        arriving = [_Way(first, num_shared, keys=keys) for keys in itertools.pairwise(shares)]
        yield [_Way(first, num_shared, keys=OWN), *([_Way(0, first)] if first else []), *arriving]


def _of_whole(held: Held, kernel: KernelModel) -> Load:
    """What all documents that are whole on a rank ask of it, in a single call."""
    first = ~held.is_shared[held.segments["document"]] & (held.segments["start"] == 0)
    segments, ranks = held.segments[first], held.ranks[first]
    segments["stop"] = held.lengths[segments["document"]]
    tiles = np.zeros((2, held.cp))
    np.add.at(tiles.T, ranks, np.stack(kernel.tiles(segments), axis=1))
    calls = (np.bincount(ranks, minlength=held.cp) > 0).astype(np.int64)
    return Load(calls, tiles, np.zeros(held.cp, np.int64), np.zeros((2, held.cp)))


def regrouped(plan: ShardPlan, sets: np.ndarray, rounds: list[Round] | None = None) -> ShardPlan:
    """The plan with calls by sets of documents, and `rounds` (default: one for every set) after that of set 0.

    `sets` (int64 [documents]) has the set of each document: 0 for those that are whole on a rank, which make up a
    single call there, from 1 on for those whose heads and tails are calls of their own.
    """
    held = Held(plan)
    in_set = sets[held.segments["document"]]
    kept = (in_set > 0) | (held.segments["start"] == 0)
    segments, in_set = held.segments[kept], in_set[kept]
    whole = in_set == 0
    segments["stop"][whole] = plan.lengths[segments["document"][whole]]
    num_calls = 1 + 2 * int(sets.max())
    call = held.ranks[kept] * num_calls + np.where(whole, 0, 2 * in_set - 1 + held.tails[kept])
    order = np.lexsort((segments["document"], call))
    bounds = np.searchsorted(call[order], np.arange(len(plan.shards) * num_calls + 1))
    calls = (segments[order[i:j]] for i, j in itertools.pairwise(bounds))
    others = rounds or [Round(number) for number in np.unique(sets[sets > 0]).tolist()]
    return replace(
        plan,
        shards=tuple(Shard(calls=each) for each in itertools.batched(calls, num_calls)),
        call_sets=tuple((i + 1) // 2 for i in range(num_calls)),
        rounds=(*([Round(0)] if (sets == 0).any() else []), *others),
    )
