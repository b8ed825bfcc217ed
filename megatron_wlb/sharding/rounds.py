"""Rounds of a micro-batch's attention: K and V of each travel during the last one.

Documents that are whole on a rank need no exchange and go first. The others go in up to three sets, or some key heads
after others; or the one with most work, or all of them, in parts: every rank its own keys first, then shares of all
others as they arrive. `csrc/rounds.cpp` chooses the fastest by prediction: little should travel before there is
anything to compute, and little leave when nothing is left to compute. This file times chosen rounds.
"""

import itertools
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from megatron_wlb.cost.attention import attention_kernels
from megatron_wlb.cost.exchange import ExchangeModel, exchange_model, round_times
from megatron_wlb.hardware.profile import KernelModel
from megatron_wlb.job import Job
from megatron_wlb.sharding.routing import OWN
from megatron_wlb.sharding.volume import Held
from megatron_wlb.types import ShardPlan

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
class RoundCosts:
    """Which rounds a job tries, and what they cost."""

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
def round_costs(job: Job) -> RoundCosts:
    """Return the costs of a job; without a unit of time, documents go together."""
    together, (forward, backward) = job.profile.counts_pairs, attention_kernels(job)
    return RoundCosts(
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


class Load(NamedTuple):
    """What a round asks of each rank."""

    calls: np.ndarray
    """int64 [cp]: attention calls."""
    tiles: np.ndarray
    """float64 [2, cp]: tiles and query tiles, see `KernelModel`."""
    merged: np.ndarray
    """int64 [cp]: query tiles that are added to what other parts have."""
    rows: np.ndarray
    """float64 [2, cp]: rows of K and V that arrive, and that leave, once for every rank that needs them."""


def attention_times(plan: ShardPlan, job: Job) -> tuple[list[np.ndarray], list[float]]:
    """Return predicted attention times of a layer, in us: forward, backward.

    First the kernels of every rank, float64 [cp] each; then the time that the exchange adds to the slowest rank, each.
    """
    costs, held = round_costs(job), Held(plan)
    loads = Loads(held, costs.forward)
    own: list[Load] = [loads.of(np.arange(0))]
    during: list[Load] = []
    for round in plan.rounds:
        calls = (zip(shard.calls, plan.call_sets, strict=True) for shard in plan.shards)
        of_set = [call["document"] for call, number in itertools.chain(*calls) if number == round.document_set]
        documents = np.unique(np.concatenate(of_set))
        exchanged = round.keys != OWN and held.is_shared[documents].any()
        (during if exchanged else own).append(loads.of(documents, round.heads, round.keys, costs.num_heads))
    busy, took = times(own, during, costs, held)
    return busy, [end - float(each.max()) for each, end in zip(busy, took, strict=True)]


def times(
    own: list[Load], during: list[Load], costs: RoundCosts, held: Held
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
    ahead = costs.exchange.ahead * int(held.lengths.sum() // held.cp)
    forward, backward = round_times(before, each, moved, kept=costs.kept, ahead=ahead)
    busy = [first + rounds.sum(axis=0) for first, rounds in zip(before, each, strict=True)]
    return busy, (float(forward), float(backward))


class Loads:
    """What documents ask of the ranks of a plan."""

    def __init__(self, held: Held, kernel: KernelModel) -> None:
        self._held, self._kernel, self._rows = held, kernel, held.rows()
        self.tiles = held.by_rank(np.stack(kernel.tiles(held.segments), axis=1))
        """int64 [documents, 2, cp]."""
        self._pieces = held.by_rank(np.stack((1 - held.tails, held.tails), axis=1))

    def of(
        self,
        documents: np.ndarray,
        heads: tuple[int, int] | None = None,
        keys: tuple[float, float] | None = None,
        num_heads: int = 1,
    ) -> Load:
        """Of some documents, int64 [n], in one round; `keys` are those of `Round`."""
        held, nothing = self._held, np.zeros(self._held.cp, np.int64)
        share = 1.0 if heads is None else (heads[1] - heads[0]) / num_heads
        if keys is None:
            calls = (self._pieces[documents].sum(axis=0) > 0).sum(axis=0)
            tiles, moved = (share * each[documents].sum(axis=0) for each in (self.tiles, self._rows))
            return Load(calls, tiles, nothing, moved)
        segments, ranks, tails = held.of_documents(documents)
        rows, tile = segments["stop"] - segments["start"], self._kernel.tile_rows
        calls, tiles = nothing.copy(), np.zeros((2, held.cp))
        if keys == OWN:
            calls[ranks] = 1
            segments["start"], segments["stop"] = 0, rows
            np.add.at(tiles.T, ranks, np.stack(self._kernel.tiles(segments), axis=1))
            return Load(calls, tiles, nothing, np.zeros((2, held.cp)))
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
        return Load(calls, tiles, tiles[1].astype(np.int64), (high - low) * self._rows[documents].sum(axis=0))
