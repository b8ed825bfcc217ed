"""Packs samples step by step, and keeps the waiting documents in between."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_wlb.documents import DOCUMENT, PackedBatch
from megatron_wlb.job import Job
from megatron_wlb.packing import state as saved
from megatron_wlb.plan.samples import Samples
from megatron_wlb.settings import SizeOrNone, in_range


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedStep:
    """Micro-batches of one step, and where the packer is after it."""

    step: int
    batch: PackedBatch
    drawn: np.ndarray
    """Pieces that the step drew, in their order: DOCUMENT [n]."""
    first: int
    """The first of the step's own samples, which are due in this step in Megatron's order."""
    position: dict[str, Any]
    """The packer's state without the waiting documents."""
    waiting: dict[str, np.ndarray]
    """Pieces drawn and not yet packed, by place: DOCUMENT arrays, never written to."""

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self.waiting.values()))

    @property
    def state(self) -> dict[str, Any]:
        """State for `Packer.load_state`, as JSON types; computed on each access."""
        return saved.make(self.position, self.waiting)


class Packer:
    """Packs step after step; a policy draws as many samples as it needs.

    The samples of step t are N from `first_sample` on, as in Megatron. If all documents of a step would wait, it draws
    the next N as well. Raises ValueError if the samples and the job have different windows, and, where none may wait,
    for a step without a document: a resumed run would begin elsewhere.
    """

    @in_range
    def __init__(self, samples: Samples, job: Job, *, first_sample: SizeOrNone = 0, step: SizeOrNone = 0) -> None:
        if samples.context_length != job.context_length:
            raise ValueError(
                f"the samples have windows of {samples.context_length} tokens, the job of {job.context_length}; give "
                "both the same context_length"
            )
        self._samples, self._job, self._policy = samples, job, job.packing.policy(job)
        self.step = step
        """The step that `next` plans."""
        self._first = first_sample  # of that step
        self._drawn = first_sample  # the next sample that is drawn

    def next(self) -> PackedStep:
        """Pack the next step. Raises StopIteration at the end of the data, once no document waits."""
        draw = _Draw(self._samples, self.step, self._first, self._drawn, self._job.global_batch_size)
        while True:
            if draw.exhausted and not self.num_waiting:
                raise StopIteration
            if len((batch := self._policy.pack(self.step, draw)).documents):
                break
            if self._job.packing.same_steps and not draw.exhausted:
                raise self._empty(draw.first)
            draw.first += self._job.global_batch_size
        self._drawn, first = draw.drawn, draw.first
        self._first = min(first + self._job.global_batch_size, self._drawn)
        self.step += 1
        waiting = self._policy.waiting()
        for rows in waiting.values():
            rows.flags.writeable = False
        return PackedStep(
            step=self.step - 1,
            batch=batch,
            drawn=draw.rows,
            first=first,
            position=self._position(),
            waiting=waiting,
        )

    def check(self) -> None:
        """Raise ValueError if a later step has no document, as `next` would when it gets there."""
        size = self._job.global_batch_size
        for first in range(self._first, len(self._samples) - size + 1, size):
            if not len(self._samples.documents(first, first + size)):
                raise self._empty(first)

    def _empty(self, first: int) -> ValueError:
        return ValueError(
            f"no document begins, or is trained, in the {self._job.global_batch_size} samples from {first} on; give a "
            "larger --global-batch-size, or leave no rows out"
        )

    def with_job(self, job: Job) -> "Packer":
        """Return the packer that goes on from here with another job, of another N."""
        packer = Packer(self._samples, job)
        packer.load_state(self.state())
        return packer

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._policy.waiting().values()))

    def state(self) -> dict[str, Any]:
        """Return everything `load_state` needs, as JSON types."""
        return saved.make(self._position(), self._policy.waiting())

    def _position(self) -> dict[str, Any]:
        return {
            "policy": self._job.packing.name,
            "context_length": self._job.context_length,
            "step": self.step,
            "first_sample": self._first,
            "drawn_samples": self._drawn,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue after the step of `state`, also with another number of micro-batches or samples a step.

        Raises ValueError, before anything changes, for a state that is damaged, of another version, window or policy.
        """
        saved.check(state)
        for name, value in (("policy", self._job.packing.name), ("context_length", self._job.context_length)):
            if state[name] != value:
                flag = {"policy": "--wlb-packing", "context_length": "--seq-length"}[name]
                raise ValueError(
                    f"the packer state was saved with {flag} {state[name]}, this run has {value}; resume with the same"
                )
        self._policy.load_waiting(saved.waiting(state))
        self.step, self._first, self._drawn = (state[name] for name in ("step", "first_sample", "drawn_samples"))


class _Draw:
    """The samples in one step: takes token counts, returns pieces with arrival."""

    def __init__(self, samples: Samples, step: int, first: int, drawn: int, batch_size: int) -> None:
        self._samples, self._step, self._batch_size = samples, step, batch_size
        self.first, self.drawn = first, drawn
        self.rows = np.empty(0, DOCUMENT)

    @property
    def exhausted(self) -> bool:
        return self._samples.order is None and self.drawn >= len(self._samples)

    @property
    def early_tokens(self) -> int:
        return (self.drawn - self.first) * self._samples.context_length

    def own(self, most_tokens: int | None = None) -> np.ndarray:
        due = self.first + self._batch_size - self.drawn
        if most_tokens is not None:
            due = min(due, -(-most_tokens // self._samples.context_length))
        return self._take(max(0, due))

    def more(self, tokens: int) -> np.ndarray:
        found, taken = [np.empty(0, DOCUMENT)], 0
        while taken < tokens and not self.exhausted:
            found.append(self._take(-(-(tokens - taken) // self._samples.context_length)))
            taken += int(found[-1]["length"].sum())
        return np.concatenate(found)

    def _take(self, count: int) -> np.ndarray:
        stop = self.drawn + count
        if self._samples.order is None:
            stop = min(stop, len(self._samples))
        rows = self._samples.documents(self.drawn, stop)
        # At the earliest in this step: samples fall behind if documents do not fit their steps.
        late = (rows["index"] // self._samples.context_length - self.first) // self._batch_size
        rows["arrival"] = self._step + np.maximum(late, 0)
        self.drawn, self.rows = stop, np.concatenate((self.rows, rows))
        return rows
