"""Plain-4D: concatenate documents in order and cut at every context window."""

from dataclasses import dataclass

import numpy as np

from megatron_wlb.job import Job, Packing
from megatron_wlb.types import DOCUMENT, Draw, PackedBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class OriginalPacking(Packing):
    name = "original"
    help = "concatenated and cut at --seq-length, as Megatron does."
    keeps_order = True
    fixed_length = True

    def policy(self, job: Job) -> "OriginalPolicy":
        return OriginalPolicy(job)


class OriginalPolicy:
    """Micro-batches of exactly one context window; cut documents go on in the next."""

    def __init__(self, job: Job) -> None:
        self._num_micro_batches, self._context_length = job.num_micro_batches, job.context_length
        self._carry = np.empty(0, DOCUMENT)

    def pack(self, step: int, draw: Draw) -> PackedBatch:
        """Pack step `step`; at the end of the data, the last micro-batches stay short."""
        pieces, window = cut(np.concatenate((self._carry, draw.global_batch())), self._context_length)
        bounds = np.searchsorted(window, np.arange(self._num_micro_batches + 1))
        self._carry = pieces[bounds[-1] :].copy()  # else a state would hold on to all pieces
        return PackedBatch(documents=pieces[: bounds[-1]], bounds=bounds)

    def waiting(self) -> dict[str, np.ndarray]:
        return {"carry": self._carry}

    def load_waiting(self, waiting: dict[str, np.ndarray]) -> None:
        self._carry = waiting["carry"]


def cut(documents: np.ndarray, context_length: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut documents at window ends; return DOCUMENT [n], and the window of each, int64 [n]."""
    starts = np.concatenate(([0], np.cumsum(documents["length"])))
    cuts = np.sort(np.concatenate((starts, np.arange(0, starts[-1], context_length))), kind="stable")  # two runs: O(n)
    cuts = cuts[np.diff(cuts, prepend=-1) > 0]
    row = np.searchsorted(starts, cuts[:-1], side="right") - 1
    pieces = documents[row]
    pieces["offset"] += cuts[:-1] - starts[row]
    pieces["length"] = np.diff(cuts)
    return pieces, cuts[:-1] // context_length
