"""Plain-4D: concatenate the documents in order and cut at every multiple of the context window."""

import numpy as np

from megatron_wlb.plan.types import DOCUMENT, Draw, Packing


class OriginalPolicy:
    """Micro-batches of exactly `context_length` pairs; what is cut off goes on in the next micro-batch."""

    def __init__(self, *, num_micro_batches: int, context_length: int) -> None:
        self._num_micro_batches, self._context_length = num_micro_batches, context_length
        self._waiting = np.empty(0, DOCUMENT)

    def pack(self, step: int, draw: Draw) -> Packing:
        """Pack step `step` from what waits and one global batch of the stream."""
        return self.cut(draw(step + 1))

    def cut(self, arrived: np.ndarray) -> Packing:
        """The next step of what waits and the DOCUMENT rows `arrived`.

        Cuts a document only at a window; the last micro-batches stay short only if the documents do not fill the step.
        """
        documents = np.concatenate((self._waiting, arrived))
        starts = np.concatenate(([0], np.cumsum(documents["length"])))
        windows = np.arange(self._num_micro_batches + 1) * self._context_length
        cuts = np.unique(np.concatenate((starts, windows[windows < starts[-1]])))
        source = np.searchsorted(starts, cuts[:-1], side="right") - 1
        pieces = documents[source]
        pieces["offset"] += cuts[:-1] - starts[source]
        pieces["length"] = np.diff(cuts)
        bounds = np.searchsorted(cuts[:-1], windows)
        self._waiting = pieces[bounds[-1] :]
        return Packing(documents=pieces[: bounds[-1]], bounds=bounds)

    def waiting(self) -> dict[str, np.ndarray]:
        """Documents not yet packed, by the name of the place where they wait: DOCUMENT arrays."""
        return {"carry": self._waiting}

    def load_waiting(self, waiting: dict[str, np.ndarray]) -> None:
        """Take over what `waiting` gave."""
        self._waiting = waiting["carry"]
