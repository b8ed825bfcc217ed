"""Balance of a step, before and after packing, and its delays."""

import numpy as np

from megatron_wlb.job import Job
from megatron_wlb.packing.original import cut
from megatron_wlb.types import PackedBatch, document_work


def imbalance(work: np.ndarray) -> float:
    """Return max * M / total of work [M]: 1 is perfect (paper, section 7.4)."""
    total = float(work.sum())
    return float(work.max()) * len(work) / total if total else 1.0


def original_work(drawn: np.ndarray, job: Job) -> np.ndarray:
    """Return the work of micro-batches of original packing, int64 [<= N].

    `drawn` are DOCUMENT rows in stream order: the first N windows that they fill, or the one that they begin.
    """
    pieces, window = cut(drawn, job.context_length)
    full = int(drawn["length"].sum()) // job.context_length
    bounds = np.searchsorted(window, np.arange(min(max(1, full), job.global_batch_size) + 1))
    return PackedBatch(documents=pieces, bounds=bounds).sums(document_work(pieces["length"], job.crossover_tokens))


def delays(packing: PackedBatch, step: int) -> dict[int, int]:
    """Return tokens of the step by delay in steps; negative if read ahead."""
    late = step - packing.documents["arrival"]
    first = int(late.min(initial=0))
    tokens = np.bincount(late - first, weights=packing.documents["length"])
    return {first + int(i): int(tokens[i]) for i in np.flatnonzero(tokens)}
