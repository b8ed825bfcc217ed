"""Packs the document stream step by step, and keeps the state in between."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_wlb.job import Job
from megatron_wlb.plan import state as saved
from megatron_wlb.plan.stream import DocumentStream
from megatron_wlb.types import DOCUMENT, PackedBatch

IDENTITY = {
    "datasets": "datasets (--data-path)",
    "split": "--split of [first document, documents]",
    "weights": "blend weights (--data-path)",
    "context_length": "--seq-length",
    "policy": "--wlb-packing",
}
"""What determines the order of documents, besides the seed: parts of a packer's identity, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedStep:
    """Micro-batches of one step, and the packer's state after it."""

    step: int
    batch: PackedBatch
    drawn: np.ndarray
    """Documents that the step drew from the stream, in its order: DOCUMENT [n]."""
    header: dict[str, Any]
    """The state without the waiting documents."""
    waiting: dict[str, np.ndarray]
    """Documents drawn and not yet packed, by place: DOCUMENT arrays, never written to."""

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self.waiting.values()))

    @property
    def state(self) -> dict[str, Any]:
        """State for `Packer.load_state`, as JSON types; computed on each access."""
        return saved.make(self.header, self.waiting)


class Packer:
    """Packs step after step; a policy draws what it needs from the stream.

    A document arrives in the step whose global batch of N * C tokens it begins in. If all documents of a step would
    wait, it moves on by another global batch.
    """

    def __init__(self, stream: DocumentStream, job: Job) -> None:
        self._stream, self._policy = stream, job.packing.policy(job)
        self._global_batch_size, self._batch_tokens = job.global_batch_size, job.batch_tokens
        self.identity: dict[str, Any] = {
            "datasets": [source.fingerprint for source in stream.sources],
            "split": [[source.first, len(source.lengths)] for source in stream.sources],
            "weights": [float(source.weight) for source in stream.sources],
            "context_length": job.context_length,
            "policy": job.packing.name,
        }
        """Values of `IDENTITY`; a state with others is refused."""
        self.step = 0
        """The step that `next` plans."""
        self._base = (0, 0)  # a step, and the stream position where its global batch begins

    @property
    def finished(self) -> bool:
        """Whether the data is at its end and nothing waits."""
        return self._drained and self._stream.ended

    @property
    def _drained(self) -> bool:
        return self._stream.exhausted and not any(map(len, self.waiting().values()))

    def next(self) -> PackedStep:
        """Plan the next step. Raises StopIteration if `finished`."""
        if self._drained:
            if not self._stream.begin_epoch():
                raise StopIteration("every document has been packed")
            self._base = (self.step, self._stream.position)  # what the epoch's last steps lacked is not made up for
        draw = _Draw(self._stream, self.step, self._base, self._batch_tokens)
        while not len((batch := self._policy.pack(self.step, draw)).documents):
            draw.base = draw.base[0], draw.base[1] + self._batch_tokens
        self._base = draw.base
        self.step += 1
        header, waiting = self._header(), self.waiting()
        return PackedStep(step=self.step - 1, batch=batch, drawn=draw.drawn(), header=header, waiting=waiting)

    def waiting(self) -> dict[str, np.ndarray]:
        return self._policy.waiting()

    def state(self) -> dict[str, Any]:
        """Return everything `load_state` needs, as JSON types."""
        return saved.make(self._header(), self.waiting())

    def _header(self) -> dict[str, Any]:
        return {
            **self.identity,
            "global_batch_size": self._global_batch_size,
            "step": self.step,
            "base": list(self._base),
            "stream": self._stream.state(),
        }

    def begin_at(self, step: int) -> None:
        """Call the first step `step`; before any step, for data that begin again."""
        self.step, self._base = step, (step, self._stream.position)

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue after the step of `state`, also with another number of micro-batches.

        Raises ValueError, before anything changes, for a state that is damaged, of another version, or of another
        dataset, split, blend, context window, policy, seed or order.
        """
        saved.check(state)
        if len(state["datasets"]) != len(self.identity["datasets"]):
            raise ValueError(
                f"the packer state was saved with {len(state['datasets'])} datasets, this run has "
                f"{len(self.identity['datasets'])} (--data-path); resume with as many"
            )
        for i, (before, now) in enumerate(zip(state["datasets"], self.identity["datasets"], strict=True)):
            if before != now:
                raise ValueError(
                    f"the packer state was saved with another dataset {i} of the blend (--data-path): its documents "
                    "have other lengths or tokens; resume with the same files"
                )
        for name, value in self.identity.items():
            if state[name] != value:
                raise ValueError(
                    f"the packer state was saved with {IDENTITY[name]} {state[name]}, this run has {value}; "
                    "resume with the same"
                )
        self._stream.load_state(state["stream"])
        self._policy.load_waiting(saved.waiting(state))
        self.step = state["step"]
        base_step, position = state["base"]
        if state["global_batch_size"] != self._global_batch_size:
            # Tokens read ahead stay so; global batches have another size from here on.
            position += (self.step - base_step) * state["global_batch_size"] * state["context_length"]
            base_step = self.step
        self._base = (base_step, position)


class _Draw:
    """The stream in one step: takes token counts, returns documents with arrival."""

    def __init__(self, stream: DocumentStream, step: int, base: tuple[int, int], batch_tokens: int) -> None:
        self._stream, self._step, self._batch_tokens = stream, step, batch_tokens
        self.base = base
        """A step, and the stream position where its global batch begins."""
        self._rows = [np.empty(0, DOCUMENT)]

    @property
    def exhausted(self) -> bool:
        return self._stream.exhausted

    @property
    def ahead(self) -> int:
        step, position = self.base
        return self._stream.position - position - (self._step - step) * self._batch_tokens

    def global_batch(self, most_tokens: int | None = None) -> np.ndarray:
        if self.ahead < 0:
            self.base = self._step, self._stream.position
        due = self._batch_tokens - self.ahead
        return self.more(due if most_tokens is None else min(due, most_tokens))

    def more(self, tokens: int) -> np.ndarray:
        step, position = self.base
        begin = self._stream.position
        rows = self._stream.take(begin + tokens)
        starts = begin + np.cumsum(rows["length"]) - rows["length"]
        # At the earliest in this step: the stream falls behind if documents do not fit their steps.
        rows["arrival"] = np.maximum(self._step, step + (starts - position) // self._batch_tokens)
        self._rows.append(rows)
        return rows

    def drawn(self) -> np.ndarray:
        return np.concatenate(self._rows)


def make_packer(stream: DocumentStream, job: Job) -> Packer:
    """Return a packer of `stream` with the policy of a job. Raises ValueError if windows differ."""
    if stream.context_length != job.context_length:
        raise ValueError(
            f"the stream cuts documents at {stream.context_length} tokens, the job at {job.context_length}; give both "
            "the same context_length"
        )
    return Packer(stream, job)
