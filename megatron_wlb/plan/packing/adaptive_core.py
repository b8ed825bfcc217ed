"""What a step of adaptive packing runs: `choose`, the plain reference of `csrc/adaptive.cpp`."""

import heapq
import math
from dataclasses import dataclass

import numpy as np

from megatron_wlb.plan import native

# The numbers were searched on four samples of F2 at N = 4, and serve for everything; csrc/adaptive.cpp has them, too.
FORCED_STEPS = 6
"""A document is forced this many steps before the bound on its delay. Forced documents fill at least half of N * S_max
per step, and what waits is at most LOOK_AHEAD_BATCHES * N * C tokens and a window: 6 steps run all of it."""
TOLERANCE = 0.003
"""A step is balanced if its largest micro-batch has at most 1 + TOLERANCE times the mean work."""
AGE_TOLERANCE = 0.008
"""Added to the tolerance for every step that the oldest document of the step is late."""
RATIO_LIMIT = 1.045
"""Age relaxes the balance no further than this ratio."""
TOKEN_BAND = 0.07
"""A step holds at most 1 + TOKEN_BAND times N * C tokens."""
TOKEN_REPAY = 0.0125
"""Share of N * C by which a step makes up for earlier ones."""
FULL = 0.9
"""A step is full with this share of the tokens that it should hold."""
IMBALANCE_PRICE = 8.0
"""Imbalance of 1 weighs as much as this many global batches released."""
TOKEN_PRICE = 3.0
"""A global batch too many or too few weighs as much as this many released."""


def choose(
    lengths: np.ndarray,
    work: np.ndarray,
    arrivals: np.ndarray,
    *,
    step: int,
    credit: int,
    num_micro_batches: int,
    max_tokens: int,
    context_length: int,
    max_delay_steps: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Choose and place the documents of a step; in C++ where there is a native core, to the same result to the bit.

    Args:
        lengths: of the documents that wait, in the order of the stream, int64 [n].
        work: int64 [n].
        arrivals: the steps in which they arrived, int64 [n].
        step: the step.
        credit: tokens that are owed to earlier steps.
        num_micro_batches: N.
        max_tokens: S_max, at least the longest document.
        context_length: C.
        max_delay_steps: the bound on delays.

    Returns their rows, ordered by micro-batch and within it (int64 [m]), and the bounds of micro-batches
    (int64 [N + 1]).
    """
    sizes = (num_micro_batches, max_tokens, context_length, max_delay_steps)
    if native.core is not None:
        choice: tuple[np.ndarray, np.ndarray] = native.core.choose_adaptive(
            lengths, work, arrivals, step, credit, *sizes
        )
        return choice
    columns = (lengths.tolist(), work.tolist(), arrivals.tolist())
    pool = [_Document(*row) for row in zip(range(len(lengths)), *columns, strict=True)]
    return _Step(pool, step, *sizes).choose(credit)


@dataclass(frozen=True, slots=True)
class _Document:
    index: int
    length: int
    work: int
    arrival: int


class _Bins:
    """N micro-batches under construction: work and tokens of each, the lightest first."""

    def __init__(self, size: int) -> None:
        self.work, self.tokens = [0] * size, [0] * size
        self.order = [(0, i) for i in range(size)]  # a heap; every bin once
        self.total_work, self.total_tokens, self.largest = 0, 0, 0

    def copy(self) -> "_Bins":
        other = _Bins(0)
        other.work, other.tokens, other.order = list(self.work), list(self.tokens), list(self.order)
        other.total_work, other.total_tokens, other.largest = self.total_work, self.total_tokens, self.largest
        return other

    def lightest(self) -> int:
        return self.order[0][1]

    def add_to_lightest(self, document: _Document) -> None:
        i = self.order[0][1]
        self.work[i] += document.work
        self.tokens[i] += document.length
        heapq.heapreplace(self.order, (self.work[i], i))
        self.total_work += document.work
        self.total_tokens += document.length
        self.largest = max(self.largest, self.work[i])


@dataclass(frozen=True, slots=True)
class _Fluid:
    """The fluid documents that wait, as one liquid, and how much of it a step takes."""

    tokens: int
    density: float
    """Work per token."""
    target: int
    """Tokens that the step should hold."""
    limit: int
    """Tokens that the step may hold."""

    def poured(self, solid_tokens: int) -> int:
        """Tokens of fluid that join `solid_tokens`."""
        return min(max(0, self.target - solid_tokens), self.tokens)


class _Step:
    """A step that is being packed from `pool`, the documents that wait; ties go to the smaller index."""

    def __init__(
        self,
        pool: list[_Document],
        step: int,
        num_micro_batches: int,
        max_tokens: int,
        context_length: int,
        max_delay_steps: int,
    ) -> None:
        self._pool, self._step = pool, step
        self._n, self._max_tokens, self._context_length = num_micro_batches, max_tokens, context_length
        self._max_delay_steps = max_delay_steps
        self._batch_tokens = num_micro_batches * context_length

    def choose(self, credit: int) -> tuple[np.ndarray, np.ndarray]:
        forced = [d for d in self._pool if self._is_forced(d)]
        rest = [d for d in self._pool if not self._is_forced(d)]
        fluid = [d for d in rest if 8 * d.length <= self._context_length]
        solid = sorted((d for d in rest if 8 * d.length > self._context_length), key=lambda d: (-d.length, d.index))
        bins = _Bins(self._n)
        for document in sorted(forced, key=lambda d: (-d.length, d.index)):
            if bins.tokens[bins.lightest()] + document.length <= self._max_tokens:
                bins.add_to_lightest(document)
        liquid = self._liquid(fluid, credit)
        released = self._release(solid, bins, liquid)
        documents = forced + [solid[r] for r in released]
        tokens = bins.total_tokens + sum(solid[r].length for r in released)
        target = tokens + liquid.poured(tokens)
        for document in fluid:
            over = tokens + document.length - target
            if over > 0 and over > target - tokens:
                break
            tokens += document.length
            documents.append(document)
        return self._place(documents)

    def _is_forced(self, document: _Document) -> bool:
        return self._step - document.arrival >= self._max_delay_steps - FORCED_STEPS

    def _liquid(self, fluid: list[_Document], credit: int) -> _Fluid:
        tokens, work = sum(d.length for d in fluid), sum(d.work for d in fluid)
        repay, band = int(TOKEN_REPAY * self._batch_tokens), int(TOKEN_BAND * self._batch_tokens)
        # `target` sees to it that training is not ahead of its tokens, where documents allow; else the limit does.
        limit = self._batch_tokens + min(band, self._batch_tokens + credit)
        return _Fluid(
            tokens=tokens,
            density=float(work) / float(tokens) if tokens else 0.0,
            target=self._batch_tokens + max(-repay, min(repay, credit)),
            limit=max(self._batch_tokens - repay, limit),
        )

    def _release(self, solid: list[_Document], forced: _Bins, fluid: _Fluid) -> list[int]:
        """Places in `solid` of the documents that run in this step.

        Where documents are so alike that no set of at most the first's work fills the step, sets may be heavier.
        """
        best, full, fallback = self._search(solid, forced, fluid, capped=True)
        if best is None and full < 1.0:
            best, _, fallback = self._search(solid, forced, fluid, capped=False)
        return fallback if best is None else best

    def _search(
        self, solid: list[_Document], forced: _Bins, fluid: _Fluid, *, capped: bool
    ) -> tuple[list[int] | None, float, list[int]]:
        """The best balanced set, if any; and how full a step the set nearest to balance makes, and that set.

        A set begins at some document and takes every following (shorter) one that fits; if `capped`, without making a
        micro-batch heavier than its first document or than the mean. Every so often on the way the set is judged: if
        the step would be balanced, it competes by what it relieves; if not, the one nearest to balance is kept for a
        step that would otherwise be too short.
        """
        starts = max(8, min(len(solid), 200_000 // max(1, len(solid))))
        stride, every = max(1, len(solid) // starts), max(1, self._n // 16)
        best: tuple[float, list[int]] | None = None
        fallback: tuple[tuple[float, float], list[int]] | None = None
        for start in [*range(0, len(solid), stride), len(solid)]:
            bins, rows, relief, oldest = forced.copy(), [], 0.0, 0
            cap = solid[start].work * (1 + TOLERANCE) if start < len(solid) and capped else math.inf
            for r in range(start, len(solid) + 1):
                last = r == len(solid)
                if not last:
                    document = solid[r]
                    if not self._fits(document, bins, cap, fluid):
                        continue
                    bins.add_to_lightest(document)
                    rows.append(r)
                    age = max(0, self._step - document.arrival)
                    oldest = max(oldest, age)
                    relief += document.length * (age + 1.0)
                if not last and len(rows) % every:
                    continue
                full, ratio = self._judge(bins, fluid)
                if full == 1.0 and ratio <= min(1 + TOLERANCE + AGE_TOLERANCE * oldest, RATIO_LIMIT):
                    value = relief / self._batch_tokens - IMBALANCE_PRICE * (ratio - 1)
                    value -= TOKEN_PRICE * abs(max(bins.total_tokens, fluid.target) / self._batch_tokens - 1)
                    if best is None or value > best[0]:
                        best = (value, list(rows))
                if fallback is None or (-full, ratio) < fallback[0]:
                    fallback = ((-full, ratio), list(rows))
        assert fallback is not None  # the empty set was judged
        return best and best[1], -fallback[0][0], fallback[1]

    def _fits(self, document: _Document, bins: _Bins, cap: float, fluid: _Fluid) -> bool:
        i, tokens = bins.lightest(), bins.total_tokens + document.length
        if tokens > fluid.limit or bins.tokens[i] + document.length > self._max_tokens:
            return False
        work = bins.work[i] + document.work
        mean = (float(bins.total_work + document.work) + fluid.density * fluid.poured(tokens)) / self._n
        return work <= cap or work <= mean * (1 + TOLERANCE)

    def _judge(self, bins: _Bins, fluid: _Fluid) -> tuple[float, float]:
        """How full the step is (1 is enough), and its largest micro-batch over the mean once the fluid is in."""
        poured = fluid.poured(bins.total_tokens)
        full = min(1.0, (bins.total_tokens + poured) / (fluid.target * FULL))
        mean = (float(bins.total_work) + fluid.density * poured) / self._n
        if mean == 0.0:
            return full, 1.0
        lacking, short = 0.0, 0
        for work, tokens in zip(bins.work, bins.tokens, strict=True):
            # The most work that this micro-batch can hold once it is filled up to S_max.
            most = work + fluid.density * (self._max_tokens - tokens)
            if most < mean:
                lacking += mean - most
                short += 1
        level = mean + lacking / (self._n - short) if short < self._n else 2.0 * mean
        return full, max(float(bins.largest), level) / mean

    def _place(self, documents: list[_Document]) -> tuple[np.ndarray, np.ndarray]:
        """Longest first (forced ones before all) into the lightest micro-batch with room; then refine."""
        micro_batches: list[list[_Document]] = [[] for _ in range(self._n)]
        work, tokens = [0] * self._n, [0] * self._n
        for document in sorted(documents, key=lambda d: (not self._is_forced(d), -d.length, d.index)):
            room = [i for i in range(self._n) if tokens[i] + document.length <= self._max_tokens]
            if not room:
                continue
            i = min(room, key=lambda i: (work[i], i))
            micro_batches[i].append(document)
            work[i] += document.work
            tokens[i] += document.length
        self._refine(micro_batches, work, tokens)
        order = [d.index for m in micro_batches for d in sorted(m, key=lambda d: d.index)]
        bounds = np.cumsum([0, *(len(m) for m in micro_batches)], dtype=np.int64)
        return np.array(order, np.int64), bounds

    def _refine(self, micro_batches: list[list[_Document]], work: list[int], tokens: list[int]) -> None:
        """Move a document from the heaviest micro-batch to one of the four lightest, or swap two, while it helps."""
        for _ in range(200):
            heavy = max(range(self._n), key=lambda i: (work[i], -i))
            if float(work[heavy]) * self._n <= float(sum(work)) * 1.0002:
                return
            lightest = sorted(range(self._n), key=lambda i: (work[i], i))[:4]
            exchange = self._best_exchange(heavy, lightest, micro_batches, work, tokens)
            if exchange is None:
                return
            light, a, b = exchange
            down = micro_batches[heavy].pop(a)
            up = micro_batches[light].pop(b) if b >= 0 else None
            micro_batches[light].append(down)
            if up is not None:
                micro_batches[heavy].append(up)
            for i, sign in ((heavy, -1), (light, 1)):
                work[i] += sign * (down.work - (up.work if up else 0))
                tokens[i] += sign * (down.length - (up.length if up else 0))

    def _best_exchange(
        self, heavy: int, lightest: list[int], micro_batches: list[list[_Document]], work: list[int], tokens: list[int]
    ) -> tuple[int, int, int] | None:
        """(micro-batch, place in the heavy one, place in the other or -1) of the exchange with the lowest maximum."""
        best, exchange = work[heavy], None
        for light in lightest:
            gap = work[heavy] - work[light]
            if light == heavy:
                continue
            for a, down in enumerate(micro_batches[heavy]):
                for b in range(-1, len(micro_batches[light])):
                    up = micro_batches[light][b] if b >= 0 else None
                    shifted = down.work - (up.work if up else 0)
                    longer = down.length - (up.length if up else 0)
                    if not 0 < shifted < gap or tokens[light] + longer > self._max_tokens:
                        continue
                    if tokens[heavy] - longer > self._max_tokens:
                        continue
                    largest = max(work[heavy] - shifted, work[light] + shifted)
                    if largest < best:
                        best, exchange = largest, (light, a, b)
        return exchange
