"""What a step of adaptive packing runs, as csrc/adaptive.cpp has it, whose comments say why."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megatron_wlb._native import (
    EVEN,
    EXCHANGES,
    FLUID_SHARE,
    FORCED_STEPS,
    FULL,
    LIGHTEST,
    TOKEN_BAND,
    TOKEN_REPAY,
    WAIT_PRICE,
)


class Sizes(NamedTuple):
    """What a step is packed for; csrc/adaptive.h says what they are."""

    num_micro_batches: int
    ranks: int
    total_weight: int
    largest_weight: int
    unit_weight: int
    max_tokens: int
    batch_tokens: int
    crossover_tokens: int
    max_delay_steps: int


def choose(
    lengths: np.ndarray, work: np.ndarray, arrivals: np.ndarray, step: int, credit: int, **sizes: int
) -> tuple[np.ndarray, np.ndarray]:
    """Rows of a step's documents, ordered by micro-batch and within it, and the bounds of micro-batches."""
    columns = (lengths.tolist(), work.tolist(), arrivals.tolist())
    pool = [_Document(*row) for row in zip(range(len(lengths)), *columns, strict=True)]
    return _Step(pool, step, Sizes(**sizes)).choose(credit)


@dataclass(frozen=True, slots=True)
class _Document:
    index: int
    length: int
    work: int
    arrival: int


def _longest_first(documents: Iterable[_Document]) -> list[_Document]:
    return sorted(documents, key=lambda d: (-d.length, d.index))


class _Bins:
    """Micro-batches under construction, of every rank: work and tokens of each."""

    def __init__(self, sizes: Sizes) -> None:
        each = sizes.num_micro_batches // sizes.ranks
        self._sizes = sizes
        self.work = [[0] * each for _ in range(sizes.ranks)]
        self.tokens = [[0] * each for _ in range(sizes.ranks)]
        self.cost = [0] * sizes.ranks
        """As `placement.rank_cost` has it."""
        self.total_work, self.total_tokens = 0, 0
        self.alike = 0.0
        """Sum of length * work over the documents; see `_Step._judged`."""

    def copy(self) -> "_Bins":
        other = _Bins(self._sizes)
        other.work, other.tokens = ([list(each) for each in lists] for lists in (self.work, self.tokens))
        other.cost, other.alike = list(self.cost), self.alike
        other.total_work, other.total_tokens = self.total_work, self.total_tokens
        return other

    def next(self) -> tuple[int, int]:
        rank = self.cost.index(min(self.cost))
        return rank, self.work[rank].index(min(self.work[rank]))

    def next_with_room(self, length: int) -> tuple[int, int] | None:
        room = self._sizes.max_tokens - length
        ranks = [r for r, tokens in enumerate(self.tokens) if min(tokens) <= room]
        if not ranks:
            return None
        rank = min(ranks, key=lambda r: (self.cost[r], r))
        fitting = (i for i, tokens in enumerate(self.tokens[rank]) if tokens <= room)
        return rank, min(fitting, key=lambda i: (self.work[rank][i], i))

    def add(self, document: _Document, rank: int, i: int) -> None:
        self.change(rank, i, document.work, document.length)
        self.total_work += document.work
        self.total_tokens += document.length
        self.alike += float(document.length) * float(document.work)

    def change(self, rank: int, i: int, work: int, tokens: int) -> None:
        self.work[rank][i] += work
        self.tokens[rank][i] += tokens
        self.cost[rank] = self.cost_of(self.work[rank])

    def cost_of(self, works: Sequence[int]) -> int:
        return self._sizes.total_weight * sum(works) + self._sizes.largest_weight * max(works)

    def cost_after(self, here: tuple[int, int], there: tuple[int, int], work: int) -> int:
        """Of the costlier one of two ranks, once so much work has gone from a micro-batch to another."""
        works = {rank: list(self.work[rank]) for rank, _ in (here, there)}
        works[here[0]][here[1]] -= work
        works[there[0]][there[1]] += work
        return max(map(self.cost_of, works.values()))


@dataclass(frozen=True, slots=True)
class _Fluid:
    tokens: int
    arrived: int
    density: float
    target: int
    limit: int

    def poured(self, solid_tokens: int) -> int:
        """Tokens of fluid that join `solid_tokens`."""
        return min(max(0, self.target - solid_tokens), self.tokens)


class _Set(NamedTuple):
    documents: list[_Document]
    full: float
    loss: float
    value: float


class _Step:
    """A step that is being packed from `pool`, the documents that wait; ties go to the smaller index."""

    def __init__(self, pool: list[_Document], step: int, sizes: Sizes) -> None:
        self._pool, self._step, self._sizes = pool, step, sizes

    def choose(self, credit: int) -> tuple[np.ndarray, np.ndarray]:
        forced = [d for d in self._pool if self._is_forced(d)]
        rest = [d for d in self._pool if not self._is_forced(d)]
        solid = _longest_first(d for d in rest if not self._is_fluid(d))
        fluid = [d for d in rest if self._is_fluid(d)]
        bins, liquid = _Bins(self._sizes), self._liquid(fluid, credit)
        forced = self._within(_longest_first(forced), liquid.limit)
        for document in forced:
            rank, i = bins.next()
            if bins.tokens[rank][i] + document.length <= self._sizes.max_tokens:
                bins.add(document, rank, i)
        released = self._release(rest, solid, bins, liquid)
        tokens = bins.total_tokens + sum(d.length for d in released)
        poured = _first(fluid, tokens, tokens + liquid.poured(tokens))
        return self._place([*forced, *released, *poured])

    def _within(self, documents: list[_Document], limit: int) -> list[_Document]:
        fitting, tokens = [], 0
        for document in documents:
            if tokens + document.length <= limit:
                tokens += document.length
                fitting.append(document)
        return fitting

    def _is_forced(self, document: _Document) -> bool:
        return self._step - document.arrival >= self._sizes.max_delay_steps - FORCED_STEPS

    def _is_fluid(self, document: _Document) -> bool:
        return FLUID_SHARE * self._sizes.num_micro_batches * document.length <= self._sizes.batch_tokens

    def _liquid(self, fluid: list[_Document], credit: int) -> _Fluid:
        tokens, work, batch = sum(d.length for d in fluid), sum(d.work for d in fluid), self._sizes.batch_tokens
        repay, band = int(TOKEN_REPAY * batch), int(TOKEN_BAND * batch)
        return _Fluid(
            tokens=tokens,
            arrived=sum(d.length for d in fluid if d.arrival <= self._step),
            density=float(work) / float(tokens) if tokens else 0.0,
            target=batch + max(-repay, min(repay, credit)),
            limit=max(batch - repay, batch + min(band, batch + credit)),
        )

    def _release(self, rest: list[_Document], solid: list[_Document], forced: _Bins, fluid: _Fluid) -> list[_Document]:
        ahead = [d for d in _first(rest, forced.total_tokens, fluid.target) if not self._is_fluid(d)]
        tried = [self._judge(forced.copy(), fluid, _longest_first(ahead), math.inf, only_last=True)]
        if tried[0].full == 1.0 and tried[0].loss <= EVEN:
            return tried[0].documents
        tried += self._neighbours(solid, forced, fluid, capped=True)
        if max(each.full for each in tried) < 1.0:
            tried += self._neighbours(solid, forced, fluid, capped=False)
        return max(tried, key=lambda each: (each.full, each.value)).documents

    def _neighbours(self, solid: list[_Document], forced: _Bins, fluid: _Fluid, *, capped: bool) -> list[_Set]:
        starts = max(8, min(len(solid), 200_000 // max(1, len(solid))))
        sets = []
        for start in [*range(0, len(solid), max(1, len(solid) // starts)), len(solid)]:
            cap = float(solid[start].work) if start < len(solid) and capped else math.inf
            sets.append(self._judge(forced.copy(), fluid, solid[start:], cap))
        return sets

    def _judge(
        self, bins: _Bins, fluid: _Fluid, documents: Sequence[_Document], cap: float, *, only_last: bool = False
    ) -> _Set:
        every = max(1, self._sizes.num_micro_batches // 16)
        best: _Set | None = None
        chosen: list[_Document] = []
        relief = 0.0
        for k, document in enumerate([*documents, None]):
            if document is not None:
                place = self._fitting(document, bins, cap, fluid)
                if place is None:
                    continue
                bins.add(document, *place)
                chosen.append(document)
                if document.arrival <= self._step:
                    relief += float(document.length) * float(self._step - document.arrival + 1)
            if k < len(documents) and (only_last or len(chosen) % every):
                continue
            full, loss, value = self._judged(bins, fluid, relief)
            if best is None or (full, value) > (best.full, best.value):
                best = _Set(list(chosen), full, loss, value)
        assert best is not None  # the last one
        return best

    def _fitting(self, document: _Document, bins: _Bins, cap: float, fluid: _Fluid) -> tuple[int, int] | None:
        (rank, i), tokens = bins.next(), bins.total_tokens + document.length
        if tokens > fluid.limit or bins.tokens[rank][i] + document.length > self._sizes.max_tokens:
            return None
        work = float(bins.work[rank][i] + document.work)
        poured = fluid.density * float(fluid.poured(tokens))
        mean = (float(bins.total_work + document.work) + poured) / self._sizes.num_micro_batches
        return (rank, i) if work <= cap or work <= mean else None

    def _judged(self, bins: _Bins, fluid: _Fluid, relief: float) -> tuple[float, float, float]:
        sizes = self._sizes
        poured = fluid.poured(bins.total_tokens)
        tokens, work = bins.total_tokens + poured, float(bins.total_work) + fluid.density * float(poured)
        full = min(1.0, float(tokens) / (float(fluid.target) * FULL))
        clustered = float(sizes.total_weight) * (work / sizes.ranks)
        clustered += float(sizes.largest_weight) * (bins.alike / float(max(1, tokens)))
        lost = self._filled(bins, fluid, fluid.density * float(poured)) - max(clustered, self._even(work))
        unit = float(sizes.unit_weight) * float(sizes.crossover_tokens) * (float(sizes.batch_tokens) / sizes.ranks)
        relief += float(min(poured, fluid.arrived))
        return full, lost / unit, WAIT_PRICE * (relief / float(sizes.batch_tokens)) - lost / unit

    def _even(self, work: float) -> float:
        sizes = self._sizes
        total, largest = float(sizes.total_weight), float(sizes.largest_weight)
        return total * (work / sizes.ranks) + largest * (work / sizes.num_micro_batches)

    def _filled(self, bins: _Bins, fluid: _Fluid, work: float) -> float:
        sizes, each = self._sizes, len(bins.work[0])
        per_work, per_largest = float(sizes.total_weight), float(sizes.largest_weight)
        spread = per_work + per_largest / each  # once all of a rank's micro-batches are alike
        cost = float(max(bins.cost))
        for _ in range(8):
            lacking, slope = work, 0.0
            for works, tokens in zip(bins.work, bins.tokens, strict=True):
                largest, total = float(max(works)), float(sum(works))
                if cost <= (per_work * each + per_largest) * largest:
                    more, gain = (cost - per_largest * largest) / per_work - total, 1.0 / per_work
                else:
                    more, gain = cost / spread - total, 1.0 / spread
                most = fluid.density * float(each * sizes.max_tokens - sum(tokens))
                if more >= most:
                    lacking -= most
                else:
                    lacking -= more
                    slope += gain
            if lacking <= 0.0:
                return cost
            if slope == 0.0:
                return 2.0 * cost  # the fluid has no room
            cost += lacking / slope
        return cost

    def _place(self, documents: list[_Document]) -> tuple[np.ndarray, np.ndarray]:
        bins = _Bins(self._sizes)
        held: list[list[list[_Document]]] = [[[] for _ in works] for works in bins.work]
        for document in sorted(documents, key=lambda d: (not self._is_forced(d), -d.length, d.index)):
            place = bins.next_with_room(document.length)
            if place is not None:
                bins.add(document, *place)
                held[place[0]][place[1]].append(document)
        self._refine(held, bins)
        micro_batches = [sorted(each, key=lambda d: d.index) for of_rank in held for each in of_rank]
        order = [d.index for each in micro_batches for d in each]
        return np.array(order, np.int64), np.cumsum([0, *map(len, micro_batches)], dtype=np.int64)

    def _refine(self, held: list[list[list[_Document]]], bins: _Bins) -> None:
        sizes = self._sizes
        least = self._even(float(bins.total_work))
        for _ in range(EXCHANGES):
            worst = bins.cost.index(max(bins.cost))
            if float(bins.cost[worst]) <= 1.0002 * least:
                return
            heavy = bins.work[worst].index(max(bins.work[worst]))
            others = sorted((r for r in range(sizes.ranks) if r != worst), key=lambda r: (bins.cost[r], r))[:LIGHTEST]
            here, lightest = (worst, heavy), [(r, bins.work[r].index(min(bins.work[r]))) for r in others]
            if sizes.largest_weight:
                inside = sorted(range(len(bins.work[worst])), key=lambda i: (bins.work[worst][i], i))
                lightest += [(worst, i) for i in inside[:LIGHTEST] if i != heavy]
            best, exchange = bins.cost[worst], None
            for rank, i in lightest:
                for a, down in enumerate(held[worst][heavy]):
                    for b in range(-1, len(held[rank][i])):
                        up = held[rank][i][b] if b >= 0 else None
                        work, tokens = down.work - (up.work if up else 0), down.length - (up.length if up else 0)
                        if work <= 0 or not self._have_room(bins, here, (rank, i), tokens):
                            continue
                        cost = bins.cost_after(here, (rank, i), work)
                        if cost < best:
                            best, exchange = cost, (rank, i, a, b)
            if exchange is None:
                return
            rank, i, a, b = exchange
            down = held[worst][heavy].pop(a)
            moved = [held[rank][i].pop(b)] if b >= 0 else []
            held[rank][i].append(down)
            held[worst][heavy] += moved
            work, tokens = (getattr(down, name) - sum(getattr(d, name) for d in moved) for name in ("work", "length"))
            bins.change(worst, heavy, -work, -tokens)
            bins.change(rank, i, work, tokens)

    def _have_room(self, bins: _Bins, here: tuple[int, int], there: tuple[int, int], tokens: int) -> bool:
        most = self._sizes.max_tokens
        return bins.tokens[there[0]][there[1]] + tokens <= most and bins.tokens[here[0]][here[1]] - tokens <= most


def _first(documents: Iterable[_Document], tokens: int, target: int) -> list[_Document]:
    taken = []
    for document in documents:
        over = tokens + document.length - target
        if over > 0 and over > target - tokens:
            break
        tokens += document.length
        taken.append(document)
    return taken
