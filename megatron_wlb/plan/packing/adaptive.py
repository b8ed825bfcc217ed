"""Adaptive packing (ours): a waiting document runs in the first step that stays balanced with it.

Algorithm 1 of the paper decides by length thresholds which documents wait. Here nothing but balance decides. Documents
of at most an eighth of the window are *fluid*: they run in the order in which they came and level whatever the longer,
*solid* ones leave uneven. In every step the policy tries sets of solid documents of neighbouring length, places each
longest first, predicts the level after the fluid has been poured in, and takes the set that relieves the queue most
among those that stay balanced. `docs/packing.md` describes the algorithm and its guarantees.
"""

import heapq
import math
from dataclasses import dataclass

import numpy as np

from megatron_wlb.config import MAX_TOLERANCE, PACKING_MODES, SHORTEST_DELAY_BOUND
from megatron_wlb.plan import native
from megatron_wlb.plan.types import DOCUMENT, Draw, Packing
from megatron_wlb.plan.workload import document_work

LOOK_AHEAD_BATCHES = 2
"""Constant tokens: global batches that are known when a step is chosen, so that long documents find partners."""
FORCED_STEPS = SHORTEST_DELAY_BOUND // 2
"""A document is forced this many steps before the bound on its delay. Forced documents fill at least half of N * S_max
per step, and what waits is at most LOOK_AHEAD_BATCHES * N * C tokens and a window: 6 steps run all of it."""
TOLERANCES = {"constant-tokens": (0.003, 0.008), "low-displacement": (0.015, 0.035)}
"""Of each mode: tolerance and age tolerance."""

CATCH_UP = 0.9
"""Low displacement: share of N * C that a step holds at least, once a global batch is owed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveSettings:
    """What the core is told; see `settings`."""

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


def settings(
    *,
    num_micro_batches: int,
    max_tokens: int,
    context_length: int,
    mode: str,
    max_delay_steps: int,
    balance_tolerance: float | None = None,
    age_tolerance: float | None = None,
) -> AdaptiveSettings:
    """Settings of a mode; its numbers were searched on four samples of F2 at N = 4, and serve for everything.

    `constant-tokens` keeps N * C tokens a step and reads ahead; `low-displacement` runs documents when they come, and
    lets tokens vary with S_max. Tolerances that are None are the mode's own. Raises ValueError for another mode, for a
    bound on the delay that cannot be held, and for tolerances that are not from 0 to MAX_TOLERANCE.
    """
    if mode not in PACKING_MODES:
        raise ValueError(f"unknown mode {mode!r} of adaptive packing; choose one of {', '.join(PACKING_MODES)}")
    if max_delay_steps < SHORTEST_DELAY_BOUND:
        raise ValueError(
            f"max_delay_steps is {max_delay_steps}; adaptive packing can guarantee {SHORTEST_DELAY_BOUND} or more, "
            "give at least that"
        )
    given = {"balance_tolerance": balance_tolerance, "age_tolerance": age_tolerance}
    for name, value in given.items():
        if value is not None and not 0 <= value <= MAX_TOLERANCE:
            raise ValueError(f"{name} is {value}; it must be from 0 to {MAX_TOLERANCE:g}")
    tolerance, per_step = (
        own if value is None else value for own, value in zip(TOLERANCES[mode], given.values(), strict=True)
    )
    constant = mode == "constant-tokens"
    return AdaptiveSettings(
        num_micro_batches=num_micro_batches,
        max_tokens=max_tokens,
        context_length=context_length,
        constant_tokens=constant,
        max_delay_steps=max_delay_steps,
        tolerance=tolerance,
        age_tolerance=per_step,
        ratio_limit=max(1.045 if constant else 1.2, 1 + tolerance),
        token_band=0.07 if constant else max_tokens / context_length - 1,
        token_repay=0.0125 if constant else 0.6,
        imbalance_price=8.0 if constant else 12.0,
        token_price=3.0 if constant else 0.0,
    )


class AdaptivePolicy:
    """Micro-batches of equal work, without thresholds; no document is late by more than `max_delay_steps`.

    Args:
        num_micro_batches: N, of a global batch over all data-parallel ranks.
        max_tokens: S_max in pairs; at least `context_length`.
        context_length: C in pairs, the longest document.
        crossover_tokens: Lc of the work model.
        mode: constant-tokens or low-displacement.
        max_delay_steps: a guarantee, at least 12.
        balance_tolerance: how far the largest micro-batch may be above the mean, as a share of it; None: the mode's.
        age_tolerance: added to that for every step that the oldest document of the step is late; None: the mode's.
        use_native: run the C++ core; the Python reference gives the same plans to the bit.
    """

    def __init__(
        self,
        *,
        num_micro_batches: int,
        max_tokens: int,
        context_length: int,
        crossover_tokens: int,
        mode: str,
        max_delay_steps: int,
        balance_tolerance: float | None = None,
        age_tolerance: float | None = None,
        use_native: bool,
    ) -> None:
        chosen = settings(
            num_micro_batches=num_micro_batches,
            max_tokens=max_tokens,
            context_length=context_length,
            mode=mode,
            max_delay_steps=max_delay_steps,
            balance_tolerance=balance_tolerance,
            age_tolerance=age_tolerance,
        )
        self._settings = chosen
        self._core = native.AdaptiveCore(chosen) if use_native else PythonAdaptiveCore(chosen)
        self._batch_tokens = num_micro_batches * context_length
        self._crossover_tokens = crossover_tokens
        self._waiting = np.empty(0, DOCUMENT)  # ordered by index

    def pack(self, step: int, draw: Draw) -> Packing:
        """Pack step `step`; documents stay whole. At the end of the data what waits runs in balanced steps."""
        self._draw(draw, self._room() if self._settings.constant_tokens else -draw.ahead(step + 1))
        # Enough fluid for the shortest step, so that solid documents need not run for want of tokens.
        while not self._settings.constant_tokens and self._room() > 0:
            lacking = (1 - self._settings.token_repay) * self._batch_tokens - self._fluid_tokens()
            if not self._draw(draw, round(lacking)):
                break
        credit = int(self._waiting["length"].sum()) - draw.ahead(step)
        order, bounds = self._core.step(step, credit)
        chosen = np.searchsorted(self._waiting["index"], order)
        documents = self._waiting[chosen]
        self._waiting = np.delete(self._waiting, chosen)
        return Packing(documents=documents, bounds=bounds)

    def _room(self) -> int:
        """Tokens that may be drawn: what can't be packed must not pile up for ever, so the stream waits for it."""
        return LOOK_AHEAD_BATCHES * self._batch_tokens - int(self._waiting["length"].sum())

    def _draw(self, draw: Draw, tokens: int) -> int:
        rows = draw.more(min(tokens, self._room()))
        self._add(rows)
        return len(rows)

    def _fluid_tokens(self) -> int:
        lengths = self._waiting["length"]
        return int(lengths[8 * lengths <= self._settings.context_length].sum())

    def _add(self, rows: np.ndarray) -> None:
        if len(rows):
            self._waiting = np.concatenate((self._waiting, rows))
            work = document_work(rows["length"], self._crossover_tokens)
            self._core.add(rows["index"].copy(), rows["length"].copy(), work, rows["arrival"].copy())

    def waiting(self) -> dict[str, np.ndarray]:
        """Documents known and not yet packed, in the order of the stream: DOCUMENT arrays."""
        return {"pool": self._waiting}

    def load_waiting(self, waiting: dict[str, np.ndarray]) -> None:
        """Take over what `waiting` of any policy gave."""
        rows = np.concatenate(list(waiting.values()))
        self._waiting = np.empty(0, DOCUMENT)
        self._core = type(self._core)(self._settings)
        self._add(rows[np.argsort(rows["index"])])


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
