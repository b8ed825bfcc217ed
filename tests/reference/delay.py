"""Which documents a step with a delay runs, as csrc/delay.cpp has it, whose comments say why."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megatron_wlb.packing.delay import Limits
from megatron_wlb.packing.place import Sizes
from tests.reference.place import Bins, Document, even_cost, longest_first, place_in_order

FORCED_STEPS, FILLER_SHARE = 10, 8
EVEN, WAIT_PRICE, FULL = 0.002, 0.1, 0.9
TOKEN_BAND, TOKEN_REPAY = 0.07, 0.0125


def release(
    lengths: np.ndarray,
    work: np.ndarray,
    arrivals: np.ndarray,
    step: int,
    credit: int,
    sizes: Sizes,
    limits: Limits,
) -> tuple[np.ndarray, np.ndarray]:
    """Rows of a step's documents, ordered by micro-batch and within it, and the bounds of micro-batches."""
    columns = (lengths.tolist(), work.tolist(), arrivals.tolist())
    pool = [Document(*row) for row in zip(range(len(lengths)), *columns, strict=True)]
    return _Step(pool, step, sizes, limits).choose(credit)


@dataclass(frozen=True, slots=True)
class _Filler:
    tokens: int
    arrived: int
    density: float
    target: int
    limit: int

    def filled(self, large_tokens: int) -> int:
        """Tokens of filler that join `large_tokens`."""
        return min(max(0, self.target - large_tokens), self.tokens)


class _Candidate(NamedTuple):
    documents: list[Document]
    full: float
    loss: float
    value: float


class _Step:
    """A step that is being packed from `pool`, the documents that wait; ties go to the smaller index."""

    def __init__(self, pool: list[Document], step: int, sizes: Sizes, limits: Limits) -> None:
        self._pool, self._step, self._sizes, self._limits = pool, step, sizes, limits

    def choose(self, credit: int) -> tuple[np.ndarray, np.ndarray]:
        forced = [d for d in self._pool if self._is_forced(d)]
        rest = [d for d in self._pool if not self._is_forced(d)]
        large = longest_first(d for d in rest if not self._is_filler(d))
        filler = [d for d in rest if self._is_filler(d)]
        bins, waiting = Bins(self._sizes), self._all_of(filler, credit)
        forced = self._within(longest_first(forced), waiting.limit)
        for document in forced:
            rank, i = bins.next()
            if bins.tokens[rank][i] + document.length <= self._sizes.max_tokens:
                bins.add(document, rank, i)
        released = self._large_of(rest, large, bins, waiting)
        tokens = bins.total_tokens + sum(d.length for d in released)
        filled = _first(filler, tokens, tokens + waiting.filled(tokens))
        return place_in_order([*forced, *longest_first([*released, *filled])], self._sizes)

    def _within(self, documents: list[Document], limit: int) -> list[Document]:
        fitting, tokens = [], 0
        for document in documents:
            if tokens + document.length <= limit:
                tokens += document.length
                fitting.append(document)
        return fitting

    def _is_forced(self, document: Document) -> bool:
        return self._step - document.arrival >= self._limits.max_delay_steps - FORCED_STEPS

    def _is_filler(self, document: Document) -> bool:
        return FILLER_SHARE * self._sizes.num_micro_batches * document.length <= self._limits.batch_tokens

    def _all_of(self, filler: list[Document], credit: int) -> _Filler:
        tokens, work, batch = sum(d.length for d in filler), sum(d.work for d in filler), self._limits.batch_tokens
        repay, band = int(TOKEN_REPAY * batch), int(TOKEN_BAND * batch)
        return _Filler(
            tokens=tokens,
            arrived=sum(d.length for d in filler if d.arrival <= self._step),
            density=float(work) / float(tokens) if tokens else 0.0,
            target=batch + max(-repay, min(repay, credit)),
            limit=max(batch - repay, batch + min(band, batch + credit)),
        )

    def _large_of(self, rest: list[Document], large: list[Document], forced: Bins, filler: _Filler) -> list[Document]:
        upcoming = [d for d in _first(rest, forced.total_tokens, filler.target) if not self._is_filler(d)]
        tried = [self._best_from(forced.copy(), filler, longest_first(upcoming), math.inf, only_last=True)]
        if tried[0].full == 1.0 and tried[0].loss <= EVEN:
            return tried[0].documents
        tried += self._runs(large, forced, filler, capped=True)
        if max(each.full for each in tried) < 1.0:
            tried += self._runs(large, forced, filler, capped=False)
        return max(tried, key=lambda each: (each.full, each.value)).documents

    def _runs(self, large: list[Document], forced: Bins, filler: _Filler, *, capped: bool) -> list[_Candidate]:
        starts = max(8, min(len(large), 200_000 // max(1, len(large))))
        sets = []
        for start in [*range(0, len(large), max(1, len(large) // starts)), len(large)]:
            cap = float(large[start].work) if start < len(large) and capped else math.inf
            sets.append(self._best_from(forced.copy(), filler, large[start:], cap))
        return sets

    def _best_from(
        self, bins: Bins, filler: _Filler, documents: Sequence[Document], cap: float, *, only_last: bool = False
    ) -> _Candidate:
        every = max(1, self._sizes.num_micro_batches // 16)
        best: _Candidate | None = None
        chosen: list[Document] = []
        relief = 0.0
        for k, document in enumerate([*documents, None]):
            if document is not None:
                place = self._fitting(document, bins, cap, filler)
                if place is None:
                    continue
                bins.add(document, *place)
                chosen.append(document)
                if document.arrival <= self._step:
                    relief += float(document.length) * float(self._step - document.arrival + 1)
            if k < len(documents) and (only_last or len(chosen) % every):
                continue
            full, loss, value = self._judged(bins, filler, relief)
            if best is None or (full, value) > (best.full, best.value):
                best = _Candidate(list(chosen), full, loss, value)
        assert best is not None  # the last one
        return best

    def _fitting(self, document: Document, bins: Bins, cap: float, filler: _Filler) -> tuple[int, int] | None:
        (rank, i), tokens = bins.next(), bins.total_tokens + document.length
        if tokens > filler.limit or bins.tokens[rank][i] + document.length > self._sizes.max_tokens:
            return None
        work = float(bins.work[rank][i] + document.work)
        filled = filler.density * float(filler.filled(tokens))
        mean = (float(bins.total_work + document.work) + filled) / self._sizes.num_micro_batches
        return (rank, i) if work <= cap or work <= mean else None

    def _judged(self, bins: Bins, filler: _Filler, relief: float) -> tuple[float, float, float]:
        sizes, limits = self._sizes, self._limits
        filled = filler.filled(bins.total_tokens)
        tokens, work = bins.total_tokens + filled, float(bins.total_work) + filler.density * float(filled)
        full = min(1.0, float(tokens) / (float(filler.target) * FULL))
        clustered = float(sizes.total_weight) * (work / sizes.ranks)
        clustered += float(sizes.largest_weight) * (bins.work_weighted_tokens / float(max(1, tokens)))
        lost = self._cost_once_filled(bins, filler, filler.density * float(filled)) - max(
            clustered, even_cost(work, sizes)
        )
        unit = float(limits.unit_weight) * float(limits.crossover_tokens) * (float(limits.batch_tokens) / sizes.ranks)
        relief += float(min(filled, filler.arrived))
        return full, lost / unit, WAIT_PRICE * (relief / float(limits.batch_tokens)) - lost / unit

    def _cost_once_filled(self, bins: Bins, filler: _Filler, work: float) -> float:
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
                most = filler.density * float(each * sizes.max_tokens - sum(tokens))
                if more >= most:
                    lacking -= most
                else:
                    lacking -= more
                    slope += gain
            if lacking <= 0.0:
                return cost
            if slope == 0.0:
                return 2.0 * cost  # the filler has no room
            cost += lacking / slope
        return cost


def _first(documents: Iterable[Document], tokens: int, target: int) -> list[Document]:
    taken = []
    for document in documents:
        over = tokens + document.length - target
        if over > 0 and over > target - tokens:
            break
        tokens += document.length
        taken.append(document)
    return taken
