"""In which stages the attention of a micro-batch runs, so that K and V of each travel while the one before computes.

Documents that are whole on a rank need no exchange and go first. The others go in up to three sets, or together but
some key heads after the other; or the one with most work, or all of them, go in parts, every rank its own keys first,
then shares of all others as they arrive. Whichever is predicted to be fastest is taken: little travels before there is
anything to compute, and little leaves when nothing is left to compute.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np

from megatron_wlb.cost.attention import attention_kernels
from megatron_wlb.cost.exchange import ExchangeModel, exchange_model, stage_times
from megatron_wlb.hardware.profile import KernelModel
from megatron_wlb.job import Job
from megatron_wlb.sharding.routing import OWN
from megatron_wlb.sharding.volume import Held
from megatron_wlb.types import Shard, ShardPlan, Stage

EDGES = (0, 1, 2)
"""How many of the shared documents are tried as a set of their own, before and after the others."""
SHARES = (
    (0.0, 1.0),
    (0.0, 1 / 4, 1.0),
    (0.0, 1 / 16, 1 / 4, 1.0),
    (0.0, 1 / 8, 7 / 8, 1.0),
    (0.0, 1 / 2, 1.0),
    (0.0, 1 / 4, 1 / 2, 3 / 4, 1.0),
    (0.0, 1 / 8, 3 / 8, 5 / 8, 7 / 8, 1.0),
)
"""Where the parts begin and end in which the keys of other ranks are tried to arrive, of documents in parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Staging:
    """Which stages a job tries, and what they cost."""

    forward: KernelModel
    backward: KernelModel
    exchange: ExchangeModel
    merge: float
    """To add one tile of queries of a head, in us, to what other parts have: read twice and written once."""
    kept: bool
    """K and V that forward has got need not travel again."""
    num_heads: int
    """Key heads of a rank."""
    edges: tuple[int, ...]
    """See `EDGES`; the first one is 0."""
    shares: tuple[tuple[float, ...], ...]
    """See `SHARES`."""


@lru_cache(maxsize=16)
def staging(job: Job) -> Staging:
    """What a job tries. By a profile without a unit of time, all shared documents go together."""
    together, (forward, backward) = job.profile.counts_pairs, attention_kernels(job)
    return Staging(
        forward=forward,
        backward=backward,
        exchange=exchange_model(job),
        merge=3
        * job.bytes_per_value
        * job.model.value_channels
        * forward.tile_rows
        / job.profile.memory_gb_per_s
        / 1e3,
        kept=job.sharding.save_gathered_kv,
        num_heads=1 if together else job.model.heads_per_rank(job.parallel.tp)[1],
        edges=(0,) if together else EDGES,
        shares=() if together or job.windowed else SHARES,
    )


class _Load(NamedTuple):
    """What a stage asks of each rank."""

    calls: np.ndarray
    """int64 [cp]: attention calls."""
    tiles: np.ndarray
    """float64 [2, cp]: tiles and query tiles, see `KernelModel`."""
    merged: np.ndarray
    """int64 [cp]: query tiles that are added to what other parts have."""
    rows: np.ndarray
    """float64 [2, cp]: rows of K and V that arrive, and that leave, once for every rank that needs them."""


class _Way(NamedTuple):
    """A stage that is tried: shared documents [first, stop), those with little work first."""

    first: int
    stop: int
    heads: tuple[int, int] | None = None
    keys: tuple[float, float] | None = None


def staged(plan: ShardPlan, job: Job) -> ShardPlan:
    """The plan with its calls and stages in the order of the least predicted time, forward and backward together.

    That is its `time` then. Documents and rows stay on the ranks where they are. The reference of `csrc/stages.cpp`.
    """
    held, tried = Held(plan), staging(job)
    sets = held.is_shared.astype(np.int64)
    loads = _Loads(held, tried.forward)
    (shared,) = np.nonzero(held.is_shared)
    shared = shared[np.argsort(loads.tiles[shared, 0].sum(axis=1), kind="stable")]
    load = cache(lambda way: loads.of(shared[way.first : way.stop], way.heads, way.keys, tried.num_heads))
    ways = list(_ways(len(shared), tried)) if len(shared) else [[]]
    whole, nothing, most = loads.of_whole(), loads.of(shared[:0]), max(map(len, ways))
    with_own = cache(lambda way: _sum([whole, load(way)]))
    own, during = [], []
    for way in ways:
        alone = [with_own(each) for each in way if each.keys == OWN]
        loaded = [load(each) for each in way if each.keys != OWN]
        own.append(alone[0] if alone else whole)
        during.append(loaded + [nothing] * (most - len(loaded)))
    forward, backward = _times(own, during, tried, plan)[1]
    both = forward + backward
    best = ways[int(np.argmin(both))]
    numbers = {bounds: number for number, bounds in enumerate(dict.fromkeys(way[:2] for way in best), 1)}
    for (first, stop), number in numbers.items():
        sets[shared[first:stop]] = number
    stages = [Stage(numbers[way[:2]], way.heads, way.keys) for way in best]
    return replace(regrouped(plan, sets, stages), time=float(both.min()))


def _ways(num_shared: int, tried: Staging) -> Iterator[list[_Way]]:
    """Stages that are compared; of a tie the first wins."""
    num_heads = tried.num_heads
    for before, after in itertools.product(tried.edges, tried.edges):
        if before + after < num_shared or before == after == 0:
            cuts = (0, before, num_shared - after, num_shared)
            yield [_Way(first, stop) for first, stop in itertools.pairwise(cuts) if first < stop]
    for some in (1, num_heads // 2):
        for inner in ((some,), (some, num_heads - some)):
            bounds = list(itertools.pairwise((0, *inner, num_heads)))
            if all(first < stop for first, stop in bounds):
                yield [_Way(0, num_shared, heads) for heads in bounds]
    for first, shares in itertools.product(dict.fromkeys((num_shared - 1, 0)), tried.shares):
        arriving = [_Way(first, num_shared, keys=keys) for keys in itertools.pairwise(shares)]
        yield [_Way(first, num_shared, keys=OWN), *([_Way(0, first)] if first else []), *arriving]


def attention_times(plan: ShardPlan, job: Job) -> tuple[list[np.ndarray], list[float]]:
    """Predicted attention of a layer, forward and backward: kernels of every rank, float64 [cp] us each, and what the
    exchange adds to the slowest rank's, us each."""
    costs = staging(job)
    held = Held(plan)
    loads = _Loads(held, costs.forward)
    own: list[_Load] = []
    during: list[_Load] = []
    for stage in plan.stages:
        calls = (zip(shard.calls, plan.call_sets, strict=True) for shard in plan.shards)
        of_set = [call["document"] for call, number in itertools.chain(*calls) if number == stage.document_set]
        documents = np.unique(np.concatenate(of_set))
        exchanged = stage.keys != OWN and held.is_shared[documents].any()
        (during if exchanged else own).append(loads.of(documents, stage.heads, stage.keys, costs.num_heads))
    busy, took = _times([_sum([*own, loads.of(documents[:0])])], [during], costs, plan)
    return [each[0] for each in busy], [float(end[0] - each[0].max()) for each, end in zip(busy, took, strict=True)]


def _times(
    own: list[_Load], during: list[list[_Load]], costs: Staging, plan: ShardPlan
) -> tuple[list[np.ndarray], Sequence[np.ndarray]]:
    """Kernels of every rank, forward and backward, float64 [ways, cp] us each, and the time of attention with the
    exchange, float64 [ways] each: of what needs none, and of stages that do, as many for every way."""

    def times(loads: list[_Load]) -> list[np.ndarray]:
        calls, tiles = np.array([load.calls for load in loads]), np.stack([load.tiles for load in loads], axis=1)
        merging = costs.merge * np.array([load.merged for load in loads])
        return [kernel.time(calls, *tiles) + kernel.heads * merging for kernel in (costs.forward, costs.backward)]

    before, (num_ways, num_stages) = times(own), (len(during), len(during[0]))
    if not num_stages:
        return before, [each.max(axis=1) for each in before]
    loads = list(itertools.chain.from_iterable(during))
    shape = num_ways, num_stages, -1
    each = [took.reshape(shape) for took in times(loads)]
    busiest = np.array([load.rows.max() for load in loads]).reshape(num_ways, num_stages)
    moved = costs.exchange.times(busiest)
    ahead = costs.exchange.ahead * int(plan.lengths.sum() // len(plan.shards))
    busy = [first + stages.sum(axis=1) for first, stages in zip(before, each, strict=True)]
    return busy, stage_times(before, each, moved, kept=costs.kept, ahead=ahead)


def _sum(loads: Sequence[_Load]) -> _Load:
    return _Load(*(np.sum(values, axis=0) for values in zip(*loads, strict=True)))


class _Loads:
    """What documents ask of the ranks of a plan."""

    def __init__(self, held: Held, kernel: KernelModel) -> None:
        self._held, self._kernel, self._rows = held, kernel, held.rows()
        self.tiles = held.by_rank(np.stack(kernel.tiles(held.segments), axis=1))
        """int64 [documents, 2, cp]."""
        self._pieces = held.by_rank(np.stack((1 - held.tails, held.tails), axis=1))

    def of_whole(self) -> _Load:
        """Of all documents that are whole on a rank, in a single call."""
        held = self._held
        first = ~held.is_shared[held.segments["document"]] & (held.segments["start"] == 0)
        segments, ranks = held.segments[first], held.ranks[first]
        segments["stop"] = held.lengths[segments["document"]]
        tiles = np.zeros((2, held.cp))
        np.add.at(tiles.T, ranks, np.stack(self._kernel.tiles(segments), axis=1))
        calls = (np.bincount(ranks, minlength=held.cp) > 0).astype(np.int64)
        return _Load(calls, tiles, np.zeros(held.cp, np.int64), np.zeros((2, held.cp)))

    def of(
        self,
        documents: np.ndarray,
        heads: tuple[int, int] | None = None,
        keys: tuple[float, float] | None = None,
        num_heads: int = 1,
    ) -> _Load:
        """Of some documents, int64 [n], in one stage; `keys` are those of `Stage`."""
        held, nothing = self._held, np.zeros(self._held.cp, np.int64)
        share = 1.0 if heads is None else (heads[1] - heads[0]) / num_heads
        if keys is None:
            calls = (self._pieces[documents].sum(axis=0) > 0).sum(axis=0)
            tiles, moved = (share * each[documents].sum(axis=0) for each in (self.tiles, self._rows))
            return _Load(calls, tiles, nothing, moved)
        segments, ranks, tails = held.of_documents(documents)
        rows, tile = segments["stop"] - segments["start"], self._kernel.tile_rows
        calls, tiles = nothing.copy(), np.zeros((2, held.cp))
        if keys == OWN:
            calls[ranks] = 1
            segments["start"], segments["stop"] = 0, rows
            np.add.at(tiles.T, ranks, np.stack(self._kernel.tiles(segments), axis=1))
            return _Load(calls, tiles, nothing, np.zeros((2, held.cp)))
        low, high = keys
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
        np.add.at(tiles.T, ranks, np.stack((query_tiles * -(-visible // tile), query_tiles), axis=1))
        return _Load(calls, tiles, tiles[1].astype(np.int64), (high - low) * self._rows[documents].sum(axis=0))


def regrouped(plan: ShardPlan, sets: np.ndarray, stages: list[Stage] | None = None) -> ShardPlan:
    """The plan with calls by sets of documents, and `stages` (default: one for every set) after that of set 0.

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
    others = stages or [Stage(number) for number in np.unique(sets[sets > 0]).tolist()]
    return replace(
        plan,
        shards=tuple(Shard(calls=each) for each in itertools.batched(calls, num_calls)),
        call_sets=tuple((i + 1) // 2 for i in range(num_calls)),
        stages=(*([Stage(0)] if (sets == 0).any() else []), *others),
    )
