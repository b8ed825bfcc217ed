"""What a step of adaptive packing runs: settings and the plain reference of `csrc/adaptive.cpp`."""

import heapq
import math
from dataclasses import dataclass

import numpy as np

from megatron_wlb.config import SHORTEST_DELAY_BOUND

FORCED_STEPS = SHORTEST_DELAY_BOUND // 2
"""A document is forced this many steps before the bound on its delay. Forced documents fill at least half of N * S_max
per step, and what waits is at most LOOK_AHEAD_BATCHES * N * C tokens and a window: 6 steps run all of it."""
CATCH_UP = 0.9
"""Low displacement: share of N * C that a step holds at least, once a global batch is owed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveSettings:
    """What the core is told; `packing.adaptive.settings` makes them."""

    num_micro_batches: int
    max_tokens: int
    context_length: int
    constant_tokens: bool
    max_delay_steps: int
    tolerance: float
    """A step is balanced if its largest micro-batch has at most 1 + tolerance times the mean work."""
    age_tolerance: float
    """Added to the tolerance for every step that the oldest document of the step is late."""
    ratio_limit: float
    """Age relaxes the balance no further than this ratio."""
    token_band: float
    """A step holds at most 1 + token_band times N * C tokens."""
    token_repay: float
    """Constant tokens: share of N * C by which a step makes up for earlier ones. Else: that a step may lack."""
    imbalance_price: float
    """Imbalance of 1 weighs as much as this many global batches released."""
    token_price: float
    """A global batch too many or too few weighs as much as this many released."""


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
    """Constant tokens: tokens that the step should hold."""
    floor: int
    """Low displacement: tokens that the step must hold."""
    limit: int
    """Tokens that the step may hold."""
    constant: bool

    def poured(self, solid_tokens: int) -> int:
        """Tokens of fluid that join `solid_tokens`."""
        if self.constant:
            return min(max(0, self.target - solid_tokens), self.tokens)
        return min(max(0, self.limit - solid_tokens), self.tokens)


class PythonAdaptiveCore:
    """Reference of `csrc/adaptive.cpp`. Documents are (index, length, work, arrival); ties go to the smaller index."""

    def __init__(self, settings: AdaptiveSettings) -> None:
        self._s = settings
        self._n = settings.num_micro_batches
        self._batch_tokens = self._n * settings.context_length
        self._pool: list[_Document] = []  # ordered by index

    def add(self, index: np.ndarray, length: np.ndarray, work: np.ndarray, arrival: np.ndarray) -> None:
        """Documents join those that wait (int64 [n] each, indices above all known ones).

        Raises ValueError if a document is longer than S_max.
        """
        if (length > self._s.max_tokens).any():
            raise ValueError(f"a document of {length.max()} tokens exceeds max_tokens {self._s.max_tokens}; raise it")
        columns = (index.tolist(), length.tolist(), work.tolist(), arrival.tolist())
        self._pool += [_Document(*row) for row in zip(*columns, strict=True)]

    def step(self, step: int, credit: int) -> tuple[np.ndarray, np.ndarray]:
        """Choose and place the documents of a step; `credit` tokens are owed to earlier steps.

        Returns their indices ordered by micro-batch (int64 [m]) and the bounds (int64 [N + 1]).
        """
        forced = [d for d in self._pool if self._is_forced(d, step)]
        fluid = [d for d in self._pool if not self._is_forced(d, step) and 8 * d.length <= self._s.context_length]
        solid = [d for d in self._pool if not self._is_forced(d, step) and 8 * d.length > self._s.context_length]
        solid.sort(key=lambda d: (-d.length, d.index))
        bins = _Bins(self._n)
        for document in sorted(forced, key=lambda d: (-d.length, d.index)):
            if bins.tokens[bins.lightest()] + document.length <= self._s.max_tokens:
                bins.add_to_lightest(document)
        liquid = self._liquid(fluid, credit)
        released = self._release(solid, bins, liquid, step)
        chosen = forced + [solid[r] for r in released]
        tokens = bins.total_tokens + sum(solid[r].length for r in released)
        target = tokens + liquid.poured(tokens)
        for document in fluid:
            over = tokens + document.length - target
            if over > 0 and over > target - tokens:
                break
            tokens += document.length
            chosen.append(document)
        return self._place(chosen, step)

    def _is_forced(self, document: _Document, step: int) -> bool:
        return step - document.arrival >= self._s.max_delay_steps - FORCED_STEPS

    def _liquid(self, fluid: list[_Document], credit: int) -> _Fluid:
        tokens, work = sum(d.length for d in fluid), sum(d.work for d in fluid)
        repay = int(self._s.token_repay * self._batch_tokens)
        floor = self._batch_tokens - repay
        limit = self._batch_tokens + int(self._s.token_band * self._batch_tokens)
        if not self._s.constant_tokens and credit > self._batch_tokens:
            floor = int(CATCH_UP * self._batch_tokens)
        # How far training may be ahead of its tokens; with constant tokens `target` sees to it, where documents allow.
        ahead = self._batch_tokens if self._s.constant_tokens else 0
        limit = max(floor, min(limit, self._batch_tokens + ahead + credit))
        return _Fluid(
            tokens=tokens,
            density=float(work) / float(tokens) if tokens else 0.0,
            target=self._batch_tokens + max(-repay, min(repay, credit)),
            floor=floor,
            limit=limit,
            constant=self._s.constant_tokens,
        )

    def _release(self, solid: list[_Document], forced: _Bins, fluid: _Fluid, step: int) -> list[int]:
        """Places in `solid` of the documents that run in this step.

        Where documents are so alike that no set of at most the first's work fills the step, sets may be heavier.
        """
        best, full, fallback = self._search(solid, forced, fluid, step, capped=True)
        if best is None and full < 1.0:
            best, _, fallback = self._search(solid, forced, fluid, step, capped=False)
        return fallback if best is None else best

    def _search(
        self, solid: list[_Document], forced: _Bins, fluid: _Fluid, step: int, *, capped: bool
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
            bins, chosen, relief, oldest = forced.copy(), [], 0.0, 0
            cap = solid[start].work * (1 + self._s.tolerance) if start < len(solid) and capped else math.inf
            for r in range(start, len(solid) + 1):
                last = r == len(solid)
                if not last:
                    document = solid[r]
                    if not self._fits(document, bins, cap, fluid):
                        continue
                    bins.add_to_lightest(document)
                    chosen.append(r)
                    age = max(0, step - document.arrival)
                    oldest = max(oldest, age)
                    relief += document.length * (age + 1.0)
                if not last and len(chosen) % every:
                    continue
                full, ratio = self._judge(bins, fluid)
                if full == 1.0 and ratio <= min(
                    1 + self._s.tolerance + self._s.age_tolerance * oldest, self._s.ratio_limit
                ):
                    value = relief / self._batch_tokens - self._s.imbalance_price * (ratio - 1)
                    value -= self._s.token_price * self._token_error(bins, fluid)
                    if best is None or value > best[0]:
                        best = (value, list(chosen))
                if fallback is None or (-full, ratio) < fallback[0]:
                    fallback = ((-full, ratio), list(chosen))
        assert fallback is not None  # the empty set was judged
        return best and best[1], -fallback[0][0], fallback[1]

    def _fits(self, document: _Document, bins: _Bins, cap: float, fluid: _Fluid) -> bool:
        i, tokens = bins.lightest(), bins.total_tokens + document.length
        if tokens > fluid.limit or bins.tokens[i] + document.length > self._s.max_tokens:
            return False
        work = bins.work[i] + document.work
        mean = (float(bins.total_work + document.work) + fluid.density * fluid.poured(tokens)) / self._n
        return work <= cap or work <= mean * (1 + self._s.tolerance)

    def _judge(self, bins: _Bins, fluid: _Fluid) -> tuple[float, float]:
        """How full the step is (1 is enough), and its largest micro-batch over the mean once the fluid is in."""
        poured = fluid.poured(bins.total_tokens)
        needed = fluid.target * 0.9 if fluid.constant else float(fluid.floor)
        full = min(1.0, (bins.total_tokens + poured) / needed)
        mean = (float(bins.total_work) + fluid.density * poured) / self._n
        if mean == 0.0:
            return full, 1.0
        lacking, short = 0.0, 0
        for work, tokens in zip(bins.work, bins.tokens, strict=True):
            # The most work that this micro-batch can hold once it is filled up to S_max.
            most = work + fluid.density * (self._s.max_tokens - tokens)
            if most < mean:
                lacking += mean - most
                short += 1
        level = mean + lacking / (self._n - short) if short < self._n else 2.0 * mean
        return full, max(float(bins.largest), level) / mean

    def _token_error(self, bins: _Bins, fluid: _Fluid) -> float:
        return abs(max(bins.total_tokens, fluid.target) / self._batch_tokens - 1)

    def _place(self, chosen: list[_Document], step: int) -> tuple[np.ndarray, np.ndarray]:
        """Longest first (forced ones before all) into the lightest micro-batch with room; then refine."""
        micro_batches: list[list[_Document]] = [[] for _ in range(self._n)]
        work, tokens = [0] * self._n, [0] * self._n
        placed = set()
        for document in sorted(chosen, key=lambda d: (not self._is_forced(d, step), -d.length, d.index)):
            room = [i for i in range(self._n) if tokens[i] + document.length <= self._s.max_tokens]
            if not room:
                continue
            i = min(room, key=lambda i: (work[i], i))
            micro_batches[i].append(document)
            work[i] += document.work
            tokens[i] += document.length
            placed.add(document.index)
        self._refine(micro_batches, work, tokens)
        self._pool = [d for d in self._pool if d.index not in placed]
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
            found = self._best_exchange(heavy, lightest, micro_batches, work, tokens)
            if found is None:
                return
            light, a, b = found
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
        best, found = work[heavy], None
        for light in lightest:
            gap = work[heavy] - work[light]
            if light == heavy:
                continue
            for a, down in enumerate(micro_batches[heavy]):
                for b in range(-1, len(micro_batches[light])):
                    up = micro_batches[light][b] if b >= 0 else None
                    shifted = down.work - (up.work if up else 0)
                    longer = down.length - (up.length if up else 0)
                    if not 0 < shifted < gap or tokens[light] + longer > self._s.max_tokens:
                        continue
                    if tokens[heavy] - longer > self._s.max_tokens:
                        continue
                    largest = max(work[heavy] - shifted, work[light] + shifted)
                    if largest < best:
                        best, found = largest, (light, a, b)
        return found
