"""Algorithm 1 of the paper (section 4.3): variable-length greedy packing with multi-level outlier queues."""

from collections.abc import Sequence

import numpy as np

from megatron_wlb.plan import native
from megatron_wlb.plan.types import DOCUMENT, Draw, Packing
from megatron_wlb.plan.workload import document_work

LATE_STEPS = 30
"""A document that did not fit and arrived longer ago is placed before all others."""
BACKLOG_STEPS = 2
"""The stream waits once what did not fit would fill so many steps."""


class WlbPolicy:
    """Micro-batches of equal work and variable length up to `max_tokens`.

    Where documents fit badly (most of them over half of `max_tokens`, say), steps hold less than arrives, and the
    algorithm as it stands would let what does not fit grow for ever and its shortest documents never run. So the stream
    waits, and the latest come first; where steps hold what arrives, both do nothing.

    Args:
        num_micro_batches: N, of a global batch over all data-parallel ranks.
        max_tokens: S_max in pairs; at least the longest document.
        outlier_thresholds: L_1 < L_2 < ...; a document of L_i <= d < L_{i+1} waits in queue i.
        crossover_tokens: Lc of the work model.
        use_native: run the C++ core; the Python reference gives the same plans to the bit.
    """

    def __init__(
        self,
        *,
        num_micro_batches: int,
        max_tokens: int,
        outlier_thresholds: Sequence[int],
        crossover_tokens: int,
        use_native: bool,
    ) -> None:
        core = native.WlbCore if use_native else PythonWlbCore
        self._core = core(num_micro_batches, max_tokens, list(outlier_thresholds))
        self._num_micro_batches, self._max_tokens = num_micro_batches, max_tokens
        self._crossover_tokens = crossover_tokens
        self._waiting = np.empty(0, DOCUMENT)  # ordered by index

    def pack(self, step: int, draw: Draw) -> Packing:
        """Pack step `step` from what waits and one global batch of the stream; documents stay whole.

        At the end of the data the outliers leave their queues, the longest first, up to one a micro-batch in a step.
        """
        room = self._room()
        if room >= -draw.ahead(step + 1):
            arrived = draw(step + 1)
        else:
            arrived = draw.more(room)
            draw.forgo(step + 1)
        if draw.exhausted:
            self._release_outliers()
        late = self._waiting["index"][self._waiting["arrival"] + LATE_STEPS < step]
        known = np.concatenate((self._waiting, arrived))
        work = document_work(arrived["length"], self._crossover_tokens)
        order, bounds = self._core.step(
            arrived["index"].copy(), arrived["length"].copy(), work, late_before=int(late.max(initial=-1)) + 1
        )
        chosen = np.searchsorted(known["index"], order)
        self._waiting = np.delete(known, chosen)
        return Packing(documents=known[chosen], bounds=bounds)

    def _room(self) -> int:
        """Pairs that may be drawn."""
        remained = np.searchsorted(self._waiting["index"], self._core.waiting()[1])
        return BACKLOG_STEPS * self._num_micro_batches * self._max_tokens - int(self._waiting["length"][remained].sum())

    def _release_outliers(self) -> None:
        rows = self._waiting
        ready = np.isin(rows["index"], self._core.waiting()[1])
        longest = np.lexsort((rows["index"], -rows["length"], ready))  # outliers first, the longest of them before
        ready[longest[: self._num_micro_batches]] = True
        self._load(rows, ready)

    def waiting(self) -> dict[str, np.ndarray]:
        """Documents not yet packed, by queue ("queue0" ...) and "remained", each in its order: DOCUMENT arrays."""
        queues, remained = self._core.waiting()
        names = [*(f"queue{i}" for i in range(len(queues))), "remained"]
        return {
            name: self._waiting[np.searchsorted(self._waiting["index"], indices)]
            for name, indices in zip(names, [*queues, remained], strict=True)
        }

    def load_waiting(self, waiting: dict[str, np.ndarray]) -> None:
        """Take over what `waiting` gave; documents return to the queue that the present thresholds name."""
        remained = waiting["remained"]["index"]
        rows = np.concatenate(list(waiting.values()))
        self._waiting = rows[np.argsort(rows["index"])]
        self._load(rows, np.isin(rows["index"], remained))

    def _load(self, rows: np.ndarray, remained: np.ndarray) -> None:
        work = document_work(rows["length"], self._crossover_tokens)
        self._core.load(rows["index"].copy(), rows["length"].copy(), work, remained)


class PythonWlbCore:
    """Reference of `csrc/wlb.cpp`. Documents are (index, length, work) integers; ties go to the smaller index.

    Two readings of the paper's text: queues are looked at after every document, as Algorithm 1 is indented, so that
    none can grow beyond N documents; and a micro-batch may hold exactly S_max (equation 2), where the algorithm's
    line 23 says less than, which would never place a document of S_max tokens.
    """

    def __init__(self, num_micro_batches: int, max_tokens: int, outlier_thresholds: list[int]) -> None:
        self._n, self._max_tokens, self._thresholds = num_micro_batches, max_tokens, outlier_thresholds
        self._queues: list[list[tuple[int, int, int]]] = [[] for _ in outlier_thresholds]
        self._remained: list[tuple[int, int, int]] = []

    def step(
        self, index: np.ndarray, length: np.ndarray, work: np.ndarray, late_before: int = 0
    ) -> tuple[np.ndarray, np.ndarray]:
        """One pass of the loop of Algorithm 1 over one global batch (int64 [n] each, index ascending).

        What remained of an index below `late_before` is placed first. Returns the indices of the packed documents
        ordered by micro-batch (int64 [m]) and the bounds (int64 [N + 1]).
        Raises ValueError if a document is longer than S_max.
        """
        self._check(length)
        late = [d for d in self._remained if d[0] < late_before]
        documents = [d for d in self._remained if d[0] >= late_before]
        self._remained = []
        for document in zip(index.tolist(), length.tolist(), work.tolist(), strict=True):
            level = self._level(document[1])
            if level < 0:
                documents.append(document)
                continue
            queue = self._queues[level]
            queue.append(document)
            if len(queue) >= self._n:
                documents.extend(queue[: self._n])
                del queue[: self._n]
        packed: list[list[int]] = [[] for _ in range(self._n)]
        tokens, load = [0] * self._n, [0] * self._n
        for document in (*sorted(late, key=_longest_first), *sorted(documents, key=_longest_first)):
            lightest, shortest = load.index(min(load)), tokens.index(min(tokens))
            for target in (lightest, shortest):
                if tokens[target] + document[1] <= self._max_tokens:
                    packed[target].append(document[0])
                    tokens[target] += document[1]
                    load[target] += document[2]
                    break
            else:
                self._remained.append(document)
        bounds = np.cumsum([0, *(len(p) for p in packed)], dtype=np.int64)
        return np.array([i for p in packed for i in p], np.int64), bounds

    def waiting(self) -> tuple[list[np.ndarray], np.ndarray]:
        """Indices in each queue, oldest first, and of the remained documents, in order."""
        queues = [np.array([d[0] for d in q], np.int64) for q in self._queues]
        return queues, np.array([d[0] for d in self._remained], np.int64)

    def load(self, index: np.ndarray, length: np.ndarray, work: np.ndarray, remained: np.ndarray) -> None:
        """Replace all waiting documents (order kept): `remained` (bool [n]) run next, outliers queue up.

        Raises ValueError if a document is longer than S_max.
        """
        self._check(length)
        self._queues = [[] for _ in self._thresholds]
        self._remained = []
        for document, ready in zip(
            zip(index.tolist(), length.tolist(), work.tolist(), strict=True), remained.tolist(), strict=True
        ):
            level = self._level(document[1])
            (self._remained if ready or level < 0 else self._queues[level]).append(document)

    def _check(self, length: np.ndarray) -> None:
        if (length > self._max_tokens).any():
            raise ValueError(f"a document of {length.max()} tokens exceeds max_tokens {self._max_tokens}; raise it")

    def _level(self, length: int) -> int:
        """The queue of a document, -1 for none."""
        return sum(length >= threshold for threshold in self._thresholds) - 1


def _longest_first(document: tuple[int, int, int]) -> tuple[int, int]:
    return -document[1], document[0]
