"""Plain-4D: concatenate the documents in order and cut at every multiple of the context window."""

import numpy as np

from megatron_wlb.plan import native
from megatron_wlb.plan.types import DOCUMENT, Draw, Packing


class OriginalPolicy:
    """Micro-batches of exactly `context_length` pairs; what is cut off goes on in the next micro-batch.

    Args:
        num_micro_batches: N, of a global batch over all data-parallel ranks.
        context_length: C in pairs.
        use_native: run the C++ core; the Python reference gives the same pieces.
    """

    def __init__(self, *, num_micro_batches: int, context_length: int, use_native: bool = False) -> None:
        core = native.OriginalCore if use_native else PythonOriginalCore
        self._core = core(num_micro_batches, context_length)
        self._context_length = context_length
        self._waiting = np.empty(0, DOCUMENT)

    def pack(self, step: int, draw: Draw) -> Packing:
        """Pack step `step` from what waits and one global batch of the stream."""
        return self.cut(draw(step + 1))

    def cut(self, arrived: np.ndarray, *, full: bool = False) -> Packing:
        """The next step of what waits and the DOCUMENT rows `arrived`.

        Cuts a document only at a window. Where the documents do not fill the step, the last micro-batches stay short
        or, if `full` and one is full, are left out.
        """
        documents = np.concatenate((self._waiting, arrived))
        row, offset, length, bounds = self._core.cut(documents["length"])
        pieces = documents[row]
        pieces["offset"] += offset
        pieces["length"] = length
        if full:
            num_full = int(documents["length"].sum()) // self._context_length
            bounds = bounds[: num_full + 1] if num_full else bounds
        self._waiting = pieces[bounds[-1] :].copy()  # else a state would hold on to all pieces
        return Packing(documents=pieces[: bounds[-1]], bounds=bounds)

    def waiting(self) -> dict[str, np.ndarray]:
        """Documents not yet packed, by the name of the place where they wait: DOCUMENT arrays."""
        return {"carry": self._waiting}

    def load_waiting(self, waiting: dict[str, np.ndarray]) -> None:
        """Take over what `waiting` gave."""
        self._waiting = waiting["carry"]


class PythonOriginalCore:
    """Reference of `csrc/original.cpp`."""

    def __init__(self, num_micro_batches: int, context_length: int) -> None:
        self._windows = np.arange(num_micro_batches + 1) * context_length

    def cut(self, length: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Cut documents of `length` (int64 [n]) that follow one another where one of N windows begins or the last ends.

        Returns document (row), offset in it and length of each piece (int64 [pieces] each), and the bounds of the
        micro-batches (int64 [N + 1]); pieces beyond the last bound fit into no window.
        """
        starts = np.concatenate(([0], np.cumsum(length)))
        cuts = np.unique(np.concatenate((starts, self._windows[self._windows < starts[-1]])))
        row = np.searchsorted(starts, cuts[:-1], side="right") - 1
        return row, cuts[:-1] - starts[row], np.diff(cuts), np.searchsorted(cuts[:-1], self._windows)
