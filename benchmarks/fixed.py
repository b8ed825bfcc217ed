"""Fixed-4D: greedy packing of k global batches into windows (paper, section 3.2).

torchrun ... -m benchmarks.fixed CHECKOUT/pretrain_gpt.py FLAGS --wlb --wlb-packing fixed
"""

import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from megatron_wlb.documents import DOCUMENT, Draw, PackedBatch, document_work
from megatron_wlb.job import Job, Packing
from megatron_wlb.packing import POLICIES

Pieces = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Document (row), length and window of each piece: int64 [pieces] each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedPacking(Packing):
    """Settings of `FixedPolicy`."""

    name = "fixed"
    help = "the paper's baseline, greedy under the window over K global batches (fixed:K)."
    fixed_length = True

    global_batches: int = 1

    @classmethod
    def of(cls, parameter: str) -> "FixedPacking":
        return cls(global_batches=int(parameter)) if parameter else cls()

    @property
    def parameter(self) -> str:
        return str(self.global_batches) if self.global_batches > 1 else ""

    @property
    def same_steps(self) -> bool:
        return self.global_batches == 1

    def policy(self, job: Job) -> "WindowPolicy":
        return FixedPolicy(job, self.global_batches)


class WindowPolicy(ABC):
    """Micro-batches of exactly one context window C, planned for k steps at once.

    Every k-th step takes the oldest k * N * C tokens that wait, cuts the last document there, and packs them into k * N
    windows (`_place`). Each N neighbours make a step. Pieces of a document run in its order, up to k - 1 steps early
    and up to k late. A state of another number of micro-batches regroups its plan if that makes whole steps, else plans
    again.
    """

    def __init__(self, job: Job, global_batches: int) -> None:
        self._job, self._global_batches = job, global_batches
        self._carry = np.empty(0, DOCUMENT)  # ordered by index
        self._planned, self._bounds = np.empty(0, DOCUMENT), np.zeros(1, np.int64)  # micro-batches of steps to come

    def pack(self, step: int, draw: Draw) -> PackedBatch:
        """Pack step `step`: as planned, or plan k steps if none is left."""
        if len(self._bounds) == 1:
            tokens = self._global_batches * self._job.batch_tokens
            self._carry = np.concatenate((self._carry, draw.more(tokens - int(self._carry["length"].sum()))))
            self._plan(tokens)
        n = self._job.num_micro_batches
        bounds, later = self._bounds[: n + 1], self._bounds[n:]
        now, self._planned = self._planned[: later[0]], self._planned[later[0] :]
        self._bounds = later - later[0]
        return PackedBatch(documents=now, bounds=bounds)

    def _plan(self, tokens: int) -> None:
        documents, self._carry = _split(self._carry, tokens)
        num_steps = max(1, -(-int(documents["length"].sum()) // self._job.batch_tokens))
        num_windows = num_steps * self._job.num_micro_batches
        row, length, window = self._place(documents["length"], num_windows)
        pieces = documents[row]
        pieces["length"] = length
        pieces = pieces[np.argsort(window, kind="stable")]
        # Which part of its document a piece is, is decided only now that it is known in which order the pieces run.
        order = np.argsort(pieces["index"], kind="stable")
        starts = np.cumsum(pieces["length"][order]) - pieces["length"][order]
        begins = np.flatnonzero(np.diff(pieces["index"][order], prepend=-1))
        pieces["offset"][order] += starts - np.repeat(starts[begins], np.diff(begins, append=len(order)))
        self._planned = pieces
        self._bounds = np.concatenate(([0], np.cumsum(np.bincount(window, minlength=num_windows))))

    @abstractmethod
    def _place(self, lengths: np.ndarray, num_windows: int) -> Pieces:
        """Return pieces of documents of `lengths`, in windows numbered as they run."""

    def waiting(self) -> dict[str, np.ndarray]:
        planned = {f"planned{i}": self._planned[slice(*bounds)] for i, bounds in enumerate(pairwise(self._bounds))}
        return {"carry": self._carry, **planned}

    def load_waiting(self, waiting: dict[str, np.ndarray]) -> None:
        planned = [waiting[f"planned{i}"] for i in range(len(waiting) - 1)]
        self._carry, self._planned = waiting["carry"], np.concatenate((np.empty(0, DOCUMENT), *planned))
        self._bounds = np.cumsum([0, *map(len, planned)], dtype=np.int64)
        if len(planned) % self._job.num_micro_batches:
            # Whole documents again, from all their pieces.
            pieces = np.sort(np.concatenate((self._planned, self._carry)), order=["index", "offset"])
            self._carry = pieces[np.flatnonzero(np.diff(pieces["index"], prepend=-1))]
            number = np.unique(pieces["index"], return_inverse=True)[1]
            self._carry["length"] = np.bincount(number, pieces["length"])
            self._planned, self._bounds = self._planned[:0], self._bounds[:1]


class FixedPolicy(WindowPolicy):
    """Balances attention work (`fill_windows`); runs the heaviest micro-batch first."""

    def _place(self, lengths: np.ndarray, num_windows: int) -> Pieces:
        room, empty = np.full(num_windows, self._job.context_length), np.zeros(num_windows, np.int64)
        row, length, window = fill_windows(lengths, room, empty)
        work = empty.copy()
        np.add.at(work, window, document_work(length, self._job.crossover_tokens))
        return row, length, np.argsort(np.argsort(-work, kind="stable"))[window]


def fill_windows(lengths: np.ndarray, room: np.ndarray, work: np.ndarray) -> Pieces:
    """Pack longest first into the window of least attention work d^2 with room; ties go to the lower index.

    A document that fits nowhere whole is cut into as few pieces as the room allows. O(n * windows). `lengths`, int64
    [n], together at most the `room`, tokens that still fit into each window; `work` is their sum of d^2 so far. Returns
    the pieces in the order of placement.
    """
    room, work = room.copy(), work.copy()
    pieces = []
    for row in np.argsort(-lengths, kind="stable").tolist():
        left = int(lengths[row])
        while left:
            fits = np.flatnonzero(room >= left)
            window = int(fits[work[fits].argmin()] if len(fits) else room.argmax())
            length = min(left, int(room[window]))
            pieces.append((row, length, window))
            room[window] -= length
            work[window] += length * length
            left -= length
    columns = np.array(pieces, np.int64).reshape(-1, 3)
    return columns[:, 0], columns[:, 1], columns[:, 2]


def _split(documents: np.ndarray, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    ends = np.cumsum(documents["length"])
    cut = int(np.searchsorted(ends, tokens, side="right"))
    first, rest = documents[:cut].copy(), documents[cut:].copy()
    taken = tokens - int(first["length"].sum())
    if len(rest) and taken:
        first = np.concatenate((first, rest[:1]))
        first["length"][-1] = taken
        rest["offset"][0] += taken
        rest["length"][0] -= taken
    return first, rest


def main() -> None:
    """Train with this policy as one of `--wlb-packing`."""
    if cut := {"--sft", "--mtp-num-layers"} & set(sys.argv):
        raise SystemExit(f"--wlb-packing fixed cuts what {cut.pop()} needs whole; leave that out")
    from megatron_wlb import run  # before megatron is imported

    POLICIES[FixedPacking.name] = FixedPacking
    run.main()


if __name__ == "__main__":
    main()
