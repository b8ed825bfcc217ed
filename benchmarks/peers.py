"""What others do with the same documents, from their published descriptions: packing policies, and Megatron itself."""

import heapq
import itertools
from dataclasses import dataclass, replace

import numpy as np

from megatron_wlb.cost.work import document_work
from megatron_wlb.job import Job, Packing
from megatron_wlb.packing.original import OriginalPacking
from megatron_wlb.types import DOCUMENT, Draw, PackedBatch


def as_megatron(job: Job, *, cp_exchange: str = "ring", cp_sharding: str = "per-sequence") -> Job:
    """The job by Megatron's defaults: a micro-batch for every window, as packed, interleaved in groups of as many as
    stages, and a ring of context-parallel ranks."""
    group = job.parallel.pp if job.parallel.vpp > 1 else None
    return replace(
        job.sharded(cp_sharding=cp_sharding),
        num_micro_batches=job.global_batch_size,
        parallel=replace(job.parallel, group_size=group),
        packing=OriginalPacking(),
        reorder=False,
        defer_weight_gradients=False,
        hidden_transfers=False,
        cp_exchange=cp_exchange,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class KarmarkarKarp(Packing):
    """The documents of a global batch in N sets of equal L^2 + c * L by largest differencing, as verl packs.

    The length of a micro-batch has no limit; no document is deferred.
    """

    name = "Karmarkar-Karp"

    def policy(self, job: Job) -> "_KarmarkarKarp":
        return _KarmarkarKarp(job)


class _KarmarkarKarp:
    def __init__(self, job: Job) -> None:
        self._n, self._crossover_tokens = job.num_micro_batches, job.crossover_tokens

    def pack(self, step: int, draw: Draw) -> PackedBatch:
        documents = draw.global_batch()
        work = document_work(documents["length"], self._crossover_tokens).tolist()
        count = itertools.count()  # breaks ties
        heap = []
        for i, w in enumerate(work):
            sets = [(w, [i]), *((0, []) for _ in range(self._n - 1))]
            heapq.heappush(heap, (-w, next(count), sets))
        while len(heap) > 1:
            (_, _, one), (_, _, other) = heapq.heappop(heap), heapq.heappop(heap)
            sets = [(a[0] + b[0], a[1] + b[1]) for a, b in zip(one, reversed(other), strict=True)]
            sets.sort(key=lambda s: -s[0])
            heapq.heappush(heap, (sets[-1][0] - sets[0][0], next(count), sets))
        return _packing(documents, [s[1] for s in heap[0][2]] if heap else [[]] * self._n)

    def waiting(self) -> dict[str, np.ndarray]:
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class InOrder(Packing):
    """Whole documents in order; a micro-batch is full at its share of the tokens, as in token-count schedulers."""

    name = "in order"

    def policy(self, job: Job) -> "_InOrder":
        return _InOrder(job)


class _InOrder:
    def __init__(self, job: Job) -> None:
        self._n, self._max_tokens = job.num_micro_batches, job.max_tokens
        self._waiting = np.empty(0, DOCUMENT)

    def pack(self, step: int, draw: Draw) -> PackedBatch:
        documents = np.concatenate((self._waiting, draw.global_batch()))
        micro_batches: list[list[int]] = [[] for _ in range(self._n)]
        at = tokens = i = 0
        share = -(-int(documents["length"].sum()) // self._n)
        for i, length in enumerate(documents["length"].tolist()):
            if tokens and (tokens + length > self._max_tokens or tokens + length // 2 > share):
                at, tokens = at + 1, 0
            if at == self._n:
                break
            micro_batches[at].append(i)
            tokens += length
        packed = sum(len(m) for m in micro_batches)
        self._waiting = documents[packed:]
        return _packing(documents, micro_batches)

    def waiting(self) -> dict[str, np.ndarray]:
        return {"carry": self._waiting}


def _packing(documents: np.ndarray, micro_batches: list[list[int]]) -> PackedBatch:
    order = np.array([i for m in micro_batches for i in sorted(m)], np.int64)
    bounds = np.cumsum([0, *(len(m) for m in micro_batches)], dtype=np.int64)
    return PackedBatch(documents=documents[order], bounds=bounds)
