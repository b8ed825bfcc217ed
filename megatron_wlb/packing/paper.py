"""Algorithm 1 of the paper (section 4.3): greedy packing with outlier queues."""

from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from megatron_wlb.documents import DOCUMENT, Draw, PackedBatch
from megatron_wlb.job import Job, Packing
from megatron_wlb.settings import integers

LATE_STEPS = 30
"""A document that did not fit and arrived longer ago is placed before all others."""
BACKLOG_STEPS = 2
"""Samples wait once the documents that did not fit would fill so many steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperPacking(Packing):
    """Settings of `PaperPolicy`."""

    name = "paper"
    help = (
        "Algorithm 1 of WLB-LLM: equal work, variable length, very long documents wait until each micro-batch gets "
        "one. paper:L_1,L_2,...: documents of L_i <= length < L_{i+1} wait in queue i; by default a half and three "
        "quarters of --seq-length."
    )

    outlier_thresholds: tuple[int, ...] | None = None

    @classmethod
    def of(cls, parameter: str) -> "PaperPacking":
        return cls(outlier_thresholds=integers(parameter)) if parameter else cls()

    @property
    def parameter(self) -> str:
        return ",".join(map(str, self.outlier_thresholds or ()))

    @property
    def same_steps(self) -> bool:
        return False

    def __post_init__(self) -> None:
        thresholds = self.outlier_thresholds or (1,)
        if thresholds[0] < 1 or list(thresholds) != sorted(set(thresholds)):
            raise ValueError("give lengths of at least 1 in increasing order, such as paper:32768,65536")

    def policy(self, job: Job) -> "PaperPolicy":
        default = tuple(sorted({max(2, quarters * job.context_length // 4) for quarters in (2, 3)}))
        return PaperPolicy(job, default if self.outlier_thresholds is None else self.outlier_thresholds)


class PaperPolicy:
    """Micro-batches of equal work and variable length up to S_max, whole documents.

    Queues are checked after every document, as Algorithm 1 is indented, so none grows beyond M documents. If documents
    fit badly, steps hold less than arrives, and the algorithm alone would let the rest grow for ever. So the samples
    wait, and the latest come first; if steps hold all that arrives, both do nothing.
    """

    def __init__(self, job: Job, thresholds: tuple[int, ...]) -> None:
        self._job, self._thresholds = job, thresholds
        self._queues = [np.empty(0, DOCUMENT) for _ in thresholds]
        self._remained = np.empty(0, DOCUMENT)

    def pack(self, step: int, draw: Draw) -> PackedBatch:
        """Pack step `step` from waiting documents and the step's own samples.

        At the end of the data, outliers leave their queues, the longest first, up to one a micro-batch in a step.
        """
        n, max_tokens = self._job.num_micro_batches, self._job.max_tokens
        arrived = draw.own(BACKLOG_STEPS * n * max_tokens - int(self._remained["length"].sum()))
        if draw.exhausted:
            rows = np.concatenate((np.empty(0, DOCUMENT), *self._queues))
            longest = longest_first(rows, np.zeros(len(rows), bool))[:n]
            self._load(rows=np.delete(rows, longest), remained=np.concatenate((self._remained, rows[longest])))
        documents = np.concatenate((self._remained, *self._released(arrived)))
        late = np.zeros(len(documents), bool)
        late[: len(self._remained)] = self._remained["arrival"] + LATE_STEPS < step
        documents = documents[longest_first(documents, late)]
        work = self._job.work(documents["length"])
        micro_batch = assign(documents["length"], work, n, max_tokens)
        remained = documents[micro_batch == n]
        self._remained = remained[np.argsort(remained["index"], kind="stable")]
        order = np.argsort(micro_batch, kind="stable")
        bounds = np.searchsorted(micro_batch[order], np.arange(n + 1))
        return PackedBatch(documents=documents[order[: bounds[-1]]], bounds=bounds)

    def _released(self, arrived: np.ndarray) -> list[np.ndarray]:
        """Return documents that need not wait: short ones, and M of each full queue."""
        level = np.searchsorted(self._thresholds, arrived["length"], side="right")
        released = [arrived[level == 0]]
        for i, queue in enumerate(self._queues):
            queue = np.concatenate((queue, arrived[level == i + 1]))
            count = len(queue) // self._job.num_micro_batches * self._job.num_micro_batches
            released.append(queue[:count])
            self._queues[i] = queue[count:]
        return released

    def waiting(self) -> dict[str, np.ndarray]:
        return {f"queue{i}": queue for i, queue in enumerate(self._queues)} | {"remained": self._remained}

    def load_waiting(self, waiting: dict[str, np.ndarray]) -> None:
        queues = [rows for name, rows in waiting.items() if name != "remained"]
        self._load(rows=np.concatenate((np.empty(0, DOCUMENT), *queues)), remained=waiting["remained"])

    def _load(self, *, rows: np.ndarray, remained: np.ndarray) -> None:
        rows = np.sort(rows, order="index")
        level = np.searchsorted(self._thresholds, rows["length"], side="right")
        self._queues = [rows[level == i + 1] for i in range(len(self._thresholds))]
        self._remained = np.sort(np.concatenate((remained, rows[level == 0])), order="index")


def longest_first(documents: np.ndarray, late: np.ndarray) -> np.ndarray:
    """Return the order of DOCUMENT [n]: late (bool [n]), then longest, then index."""
    return np.lexsort((documents["index"], -documents["length"], ~late))


def assign(lengths: np.ndarray, work: np.ndarray, num_micro_batches: int, max_tokens: int) -> np.ndarray:
    """Return the micro-batch of each document, int64 [n], or M if it fits nowhere.

    Documents go one after the other to the micro-batch of least work (lines 17 to 25 of Algorithm 1); if it has no
    room, to the shortest. Ties go to the lower index. A micro-batch may hold exactly S_max (equation 2); line 23 says
    less than, which would never place a document of S_max tokens.
    """
    tokens, load, micro_batches = [0] * num_micro_batches, [0] * num_micro_batches, []
    by_tokens, by_load = ([(0, i) for i in range(num_micro_batches)] for _ in range(2))
    for length, amount in zip(lengths.tolist(), work.tolist(), strict=True):
        i = _least(by_load, load)
        if tokens[i] + length > max_tokens:
            i = _least(by_tokens, tokens)
        if tokens[i] + length > max_tokens:
            i = num_micro_batches
        else:
            tokens[i] += length
            load[i] += amount
            heappush(by_tokens, (tokens[i], i))
            heappush(by_load, (load[i], i))
        micro_batches.append(i)
    return np.array(micro_batches, np.int64)


def _least(heap: list[tuple[int, int]], values: list[int]) -> int:
    """Return the index of the least of `values`, which only grow; drops old entries."""
    while heap[0][0] != values[heap[0][1]]:
        heappop(heap)
    return heap[0][1]
