"""Balance of a step, before and after packing, and how late its documents are."""

import numpy as np

from megatron_wlb.documents import PackedBatch
from megatron_wlb.job import Job


def imbalance(work: np.ndarray) -> float:
    """Return max * M / total of work [M]: 1 is perfect (paper, section 7.4)."""
    total = float(work.sum())
    return float(work.max()) * len(work) / total if total else 1.0


def original_work(drawn: np.ndarray, job: Job) -> np.ndarray:
    """Return the work of Megatron's micro-batches, int64 [samples]: DOCUMENT rows sample by sample."""
    sample = drawn["index"] // job.context_length
    begins = np.flatnonzero(np.diff(sample, prepend=-1))
    return np.add.reduceat(job.work(drawn["length"]), begins) if len(drawn) else np.empty(0, np.int64)


def lateness(packing: PackedBatch, step: int) -> tuple[int, int]:
    """Return the steps by which tokens of a step are late, summed, and of the latest, below 0 if all are early."""
    late = step - packing.documents["arrival"]
    return int((np.maximum(late, 0) * packing.documents["length"]).sum()), int(late.max()) if len(late) else 0
