"""Adaptive packing (ours): micro-batches of variable length for the least time of a step.

Algorithm 1 of the paper makes micro-batches of equal work. Here the step's time alone decides (`packing.place`). Every
document runs in its own step; under a bound on its delay, it may wait (`packing.delay`).
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from megatron_wlb.documents import Draw, PackedBatch, Policy
from megatron_wlb.job import Job, Packing
from megatron_wlb.packing.delay import LEAST_DELAY, DelayPolicy, check_delay, most_step_tokens
from megatron_wlb.packing.megatron import in_samples
from megatron_wlb.packing.place import placed
from megatron_wlb.settings import integers


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptivePacking(Packing):
    """Settings of adaptive packing."""

    name = "adaptive"
    help = (
        "the least predicted time of a step, variable length; every document in its own step, so that every step "
        "trains what Megatron's would. adaptive:D: a document may wait for a step that loses little time with it, at "
        f"most D steps, {LEAST_DELAY} or more."
    )
    steady_tokens = True

    max_delay_steps: int = 0

    def __post_init__(self) -> None:
        if not self.same_steps:
            check_delay(self.max_delay_steps)

    @classmethod
    def of(cls, parameter: str) -> "AdaptivePacking":
        return cls(max_delay_steps=integers(parameter, 1)[0]) if parameter else cls()

    @property
    def parameter(self) -> str:
        return str(self.max_delay_steps or "")

    @property
    def same_steps(self) -> bool:
        return self.max_delay_steps == 0

    def most_step_tokens(self, job: Job) -> int:
        return job.batch_tokens if self.same_steps else most_step_tokens(job)

    def policy(self, job: Job) -> Policy | DelayPolicy:
        return StepPolicy(job) if self.same_steps else DelayPolicy(job, self.max_delay_steps)


class StepPolicy(Policy):
    """All documents of a step's own samples, in that step."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def pack(self, step: int, draw: Draw) -> PackedBatch:
        """Arrange the step's own samples. Raises ValueError if memory does not hold them."""
        return arranged(draw.own(), self._job)


def arranged(documents: np.ndarray, job: Job) -> PackedBatch:
    """Arrange DOCUMENT rows, all of them, in about the job's M micro-batches.

    Where no rank and no stage waits for a micro-batch, each has equally many whole samples: equal tokens need the least
    memory and fill tiles of rows. There are fewer micro-batches for fewer documents, so that none is empty if that can
    be, and more where documents do not fit. Raises ValueError if they fit no number of them, which cannot be from one a
    document on.
    """
    if job.parallel.dp == job.parallel.pp == 1 and (own := in_samples(documents, job)) is not None:
        return replace(own, ranks=np.arange(len(own)).reshape(1, -1))
    for count in _counts(job, len(documents)):
        if (batch := placed(documents, job, count)) is not None:
            return batch
    raise ValueError(
        f"{len(documents)} documents of {int(documents['length'].sum())} tokens fit into no number of micro-batches of "
        f"{job.max_tokens} tokens that {job.parallel.pp} stages can run; raise --wlb-max-tokens"
    )


def _counts(job: Job, documents: int) -> Iterator[int]:
    """Yield numbers of micro-batches to try: the job's own, or the largest for so few documents; then more of them."""
    ranks, first = job.parallel.dp, job.num_micro_batches
    if documents < first:
        first = next((n for n in range(documents // ranks * ranks, 0, -ranks) if _runs(job, n)), first)
    last = max(job.num_micro_batches, 2 * documents) + ranks * job.parallel.pp  # one document in each fits in any case
    return (n for n in range(first, last + 1, ranks) if _runs(job, n))


def _runs(job: Job, count: int) -> bool:
    """Whether the pipeline can run so many micro-batches."""
    with contextlib.suppress(ValueError):
        job.schedule(count // job.parallel.dp)
        return True
    return False
