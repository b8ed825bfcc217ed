"""In which rounds the attention of a micro-batch runs, as csrc/rounds.cpp has it."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from megatron_wlb.cost.attention import Directions
from megatron_wlb.documents import Keys, RoundKeys, Shard, ShardPlan
from megatron_wlb.hardware.profile import KernelModel
from megatron_wlb.sharding.routing import Ownership as _Ownership
from megatron_wlb.sharding.select import RoundCosts


class Ownership(_Ownership):
    """Which rank of a plan holds which pieces."""

    def __init__(self, plan: ShardPlan) -> None:
        super().__init__(plan)
        sizes = [len(call) for shard in plan.shards for call in shard.calls]
        per_rank = len(plan.shards[0].calls)
        is_tail = (per_rank > 1) & (np.arange(len(sizes)) % per_rank == per_rank - 1)
        self.tails = np.repeat(is_tail, sizes).astype(np.int64)
        """int64 [n]: 1 in tail calls, the last ones of a rank."""

    def of_documents(self, documents: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return segments of documents, the ranks that hold them, and which are tails."""
        (found,) = np.nonzero(np.isin(self.segments["document"], documents))
        return self.segments[found], self.ranks[found], self.tails[found]

    def by_rank(self, values: np.ndarray) -> np.ndarray:
        """Return sums of values [n, x] of segments, int64 [documents, x, cp]."""
        sums = np.zeros((len(self.lengths), self.cp, values.shape[1]), np.int64)
        np.add.at(sums, (self.segments["document"], self.ranks), values)
        return sums.swapaxes(1, 2)


class Load(NamedTuple):
    """What a round asks of each rank."""

    calls: np.ndarray
    """int64 [cp]: attention calls."""
    tiles: np.ndarray
    """float64 [3, cp]: tiles, query tiles and hidden tiles, see `KernelModel`."""
    merged: np.ndarray
    """int64 [cp]: query tiles that are added to what other rounds have."""
    rows: np.ndarray
    """float64 [2, cp]: rows of K and V that arrive, and that leave, once for every rank that needs them."""


def times(
    own: list[Load], during: list[Load], costs: RoundCosts, held: Ownership
) -> tuple[list[np.ndarray], tuple[float, float]]:
    """Return kernels of every rank, forward and backward, and times with the exchange.

    Kernels are float64 [cp] us each, times in us.
    """

    def kernels(load: Load) -> list[np.ndarray]:
        both = (costs.forward, costs.backward)
        return [k.time(load.calls, *load.tiles) + k.heads * (costs.merge * load.merged) for k in both]

    before = kernels(Load(*(np.sum(values, axis=0) for values in zip(*own, strict=True))))
    if not during:
        return before, (float(before[0].max()), float(before[1].max()))
    each = [np.stack(direction) for direction in zip(*map(kernels, during), strict=True)]
    moved = costs.exchange.times(np.array([load.rows.max() for load in during]))
    prefetch = costs.exchange.prefetch * int(held.lengths.sum() // held.cp)
    forward, backward = round_times(before, each, moved, prefetch=prefetch)
    busy = [first + rounds.sum(axis=0) for first, rounds in zip(before, each, strict=True)]
    return busy, (float(forward), float(backward))


class Loads:
    """What documents ask of the ranks of a plan."""

    def __init__(self, held: Ownership, kernel: KernelModel) -> None:
        self._held, self._kernel, self._rows = held, kernel, held.rows()
        self._pieces = held.by_rank(np.stack((1 - held.tails, held.tails), axis=1))

    def of(self, documents: np.ndarray, of: RoundKeys) -> Load:
        """Of documents on several ranks, int64 [n], in one round."""
        held, nothing = self._held, np.zeros(self._held.cp, np.int64)
        if of is Keys.SHARED:
            calls = (self._pieces[documents].sum(axis=0) > 0).sum(axis=0)
            return Load(calls, self._at_once(documents), nothing, self._rows[documents].sum(axis=0))
        segments, ranks, tails = held.of_documents(documents)
        rows, tile = segments["stop"] - segments["start"], self._kernel.tile_rows
        calls, tiles = nothing.copy(), np.zeros((3, held.cp))
        if of is Keys.OWN:
            calls[ranks] = 1
            segments["start"], segments["stop"] = 0, rows
            np.add.at(tiles[:2].T, ranks, np.stack(self._kernel.tiles(segments), axis=1))
            return Load(calls, tiles, nothing, np.zeros((2, held.cp)))
        low, high = of
        # A tail comes after the head of the same rank and document, if there is one.
        place = segments["document"] * held.cp + ranks
        head_rows = np.zeros(len(held.lengths) * held.cp, np.int64)
        head_rows[place[tails == 0]] = rows[tails == 0]
        before = head_rows[place] * tails
        visible = ((segments["start"] - before) * (high - low)).astype(np.int64) + before * (low == 0)
        # Rows without keys interrupt a call.
        call, sees = 2 * ranks + tails, visible > 0
        begins = sees & ~(np.append(False, sees[:-1]) & (np.diff(call, prepend=-1) == 0))
        np.add.at(calls, ranks, begins)
        query_tiles = -(-rows // tile) * sees
        np.add.at(tiles[:2].T, ranks, np.stack((query_tiles * -(-visible // tile), query_tiles), axis=1))
        return Load(calls, tiles, tiles[1].astype(np.int64), (high - low) * self._rows[documents].sum(axis=0))

    def _at_once(self, documents: np.ndarray) -> np.ndarray:
        """Return tiles with all keys, of which a call hides some if not all of its segments begin their documents."""
        segments, ranks, tails = self._held.of_documents(documents)
        tiles, call = np.zeros((3, self._held.cp)), 2 * ranks + tails
        is_late = np.bincount(call, segments["start"]) > 0
        hidden = self._kernel.hidden_tiles(segments) * is_late[call]
        np.add.at(tiles.T, ranks, np.stack((*self._kernel.tiles(segments), hidden), axis=1))
        return tiles


def round_times(
    own: Sequence[np.ndarray], times: Sequence[np.ndarray], moved: Directions, *, prefetch: float = 0.0
) -> Directions:
    """Return us of attention in rounds, forward and backward, float64 [...] each.

    Documents that are whole on a rank run first in forward and last in backward. K and V of a round begin to arrive
    when every rank begins the round before; its gradients leave when all ranks have ended it. A rank waits for them
    after it has run the next round, and for all at the end. Trailing rounds without time and rows are ignored.

    Args:
        own: forward and backward time of documents that are whole on a rank, float64 [..., cp] each.
        times: forward and backward time of every round with an exchange, float64 [..., rounds, cp] each.
        moved: times in which K and V arrive and gradients leave, float64 [..., rounds] each.
        prefetch: time in us by which backward's first K and V are prefetched.
    """
    arrive, leave = (np.moveaxis(each, -1, 0) for each in moved)
    forward, backward = (np.moveaxis(each, -2, 0) for each in times)
    here = arrive[0]
    free = np.broadcast_to(own[0], forward[0].shape)
    for i, took in enumerate(forward):
        begin = np.maximum(free, here[..., None])
        if i + 1 < len(forward):
            here = np.maximum(here, begin.max(axis=-1)) + arrive[i + 1]
        free = begin + took
    done = free.max(axis=-1)

    here = channel = np.maximum(arrive[0] - prefetch, 0)
    free, last = np.zeros_like(free), np.zeros_like(here)
    for i, took in enumerate(backward):
        begin = np.maximum(free, here[..., None])
        if i + 1 < len(backward):
            began = np.maximum(channel, begin.max(axis=-1)) + arrive[i + 1]
            here, channel = (np.where(arrive[i + 1] > 0, began, before) for before in (here, channel))
        free = np.maximum(begin + took, np.where(leave[i] > 0, last, 0)[..., None])
        last = channel = np.maximum(channel, free.max(axis=-1)) + leave[i]
    return done, np.maximum((free + own[1]).max(axis=-1), channel)


def in_rounds(plan: ShardPlan, costs: RoundCosts) -> ShardPlan:
    """The plan with its calls and rounds in the order of the least predicted time, forward and backward together.

    That is its `time` then. Documents and rows stay on the ranks where they are. Of a tie the first rounds win.
    """
    held = Ownership(plan)
    loads, (shared,) = Loads(held, costs.forward), np.nonzero(held.is_shared)
    whole = _of_whole(held, costs.forward)

    def time(of: ShardPlan) -> float:
        rounds = [each for each in of.rounds if each is not Keys.WHOLE]
        own = [loads.of(shared, each) for each in rounds if each is Keys.OWN]
        during = [loads.of(shared, each) for each in rounds if each is not Keys.OWN]
        return sum(times([whole, *own], during, costs, held)[1])

    tried = [regrouped(plan, bounds) for bounds in ((), *(costs.key_bounds if len(shared) else ()))]
    return min((replace(each, time=time(each)) for each in tried), key=lambda each: each.time)


def _of_whole(held: Ownership, kernel: KernelModel) -> Load:
    """What all documents that are whole on a rank ask of it, in a single call."""
    first = ~held.is_shared[held.segments["document"]] & (held.segments["start"] == 0)
    segments, ranks = held.segments[first], held.ranks[first]
    segments["stop"] = held.lengths[segments["document"]]
    tiles = np.zeros((3, held.cp))
    np.add.at(tiles[:2].T, ranks, np.stack(kernel.tiles(segments), axis=1))
    calls = (np.bincount(ranks, minlength=held.cp) > 0).astype(np.int64)
    return Load(calls, tiles, np.zeros(held.cp, np.int64), np.zeros((2, held.cp)))


def regrouped(plan: ShardPlan, key_bounds: Sequence[float] = ()) -> ShardPlan:
    """The plan with the calls that attention in rounds has, and `key_bounds`."""
    held = Ownership(plan)
    shared = held.is_shared[held.segments["document"]]
    kept = shared | (held.segments["start"] == 0)
    segments, is_whole = held.segments[kept], ~shared[kept]
    segments["stop"][is_whole] = plan.lengths[segments["document"][is_whole]]
    call = held.ranks[kept] * 3 + np.where(is_whole, 0, 1 + held.tails[kept])
    order = np.lexsort((segments["document"], call))
    bounds = np.searchsorted(call[order], np.arange(len(plan.shards) * 3 + 1))
    calls = (segments[order[i:j]] for i, j in itertools.pairwise(bounds))
    shards = tuple(Shard(calls=each) for each in itertools.batched(calls, 3))
    return replace(plan, shards=shards, key_bounds=tuple(key_bounds))
