"""Plan of a step: documents, data-parallel rank and CP shards of micro-batches."""

import atexit
import functools
import hashlib
import math
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple

import numpy as np
from msgspec import Meta

from megatron_wlb.documents import PackedBatch, Shard, ShardPlan
from megatron_wlb.job import Job
from megatron_wlb.packing.megatron import windows, without_wlb
from megatron_wlb.plan import metrics, placement
from megatron_wlb.plan.packer import PackedStep, Packer
from megatron_wlb.settings import SizeOrNone, in_range
from megatron_wlb.sharding import select

PLAN_AHEAD = 4
"""Steps by which the planner thread may be ahead of training."""
_LOOK_SECONDS = 1.0
"""How often a waiting reader checks that the planner thread is alive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchPlan:
    """One micro-batch of this data-parallel rank."""

    step: int
    first_sample: int
    """The first of the step's own samples."""
    documents: np.ndarray
    """DOCUMENT [n], in packed order."""
    shards: ShardPlan
    """Lengths include the tail padding as a last document."""

    @property
    def tokens(self) -> int:
        """Trained tokens, without padding."""
        return int(self.documents["length"].sum())

    @property
    def padded_tokens(self) -> int:
        return int(self.shards.lengths.sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """Everything that a rank needs to know about one step."""

    packed: PackedStep
    micro_batches: tuple[MicroBatchPlan, ...]
    """Micro-batches of this data-parallel rank, in pipeline order."""
    work: np.ndarray
    """Of all M micro-batches, int64 [M]."""
    original_work: np.ndarray
    """See `metrics.original_work`."""
    digests: dict[str, int]
    """`digest_of` parts of the plan that are the same on all ranks."""
    own_digest: int
    """`digest_of` the parts that ranks of one data-parallel rank share: documents, shards."""
    counted: np.ndarray | None = None
    """The result of `Planner`'s `count`."""

    def __str__(self) -> str:
        """A line for the step, and one for each micro-batch of this rank."""
        first = f"step {self.step}: {self.tokens} tokens in micro-batches of work {_words(self.work)}"
        lines = (f"{_words(m.documents['length'])} tokens, {m.shards.strategy}" for m in self.micro_batches)
        return "\n".join((first, *lines))

    @property
    def step(self) -> int:
        return self.packed.step

    @property
    def batch(self) -> PackedBatch:
        return self.packed.batch

    @property
    def digest(self) -> int:
        return digest_of(self.digests)

    @property
    def tokens(self) -> int:
        return int(self.batch.documents["length"].sum())


@in_range
def plan_step(packer: Packer, job: Job, dp_rank: SizeOrNone = 0) -> StepPlan:
    """Plan the packer's next step for a data-parallel rank. Raises StopIteration at the end."""
    return plan_packed(packer.next(), job, dp_rank)


def plan_packed(packed: PackedStep, job: Job, dp_rank: int) -> StepPlan:
    """Plan a packed step: place, shard. Raises ValueError for no data-parallel rank of the job."""
    if not 0 <= dp_rank < job.parallel.dp:
        raise ValueError(f"dp_rank is {dp_rank}; give one from 0 to {job.parallel.dp - 1}")
    batch = packed.batch
    if batch.ranks is not None and len(batch.ranks) != job.parallel.dp:
        raise ValueError(
            f"the step is packed for {len(batch.ranks)} ranks, not {job.parallel.dp}; give the packer's job"
        )
    step = divided(batch, job)
    micro_batches = []
    for documents in map(batch.micro_batch, step.in_order(dp_rank)):
        shards = select.shard(documents["length"], step.job)
        micro_batches.append(
            MicroBatchPlan(step=packed.step, first_sample=packed.first, documents=documents, shards=shards)
        )
    return StepPlan(
        packed=packed,
        micro_batches=tuple(micro_batches),
        work=step.work,
        original_work=metrics.original_work(packed.drawn, step.job),
        digests={
            "flags": digest_of(packed.step, step.job),
            "documents": digest_of(batch.documents, batch.bounds),
            "placement": digest_of(step.rows),
        },
        own_digest=digest_of(*(part for m in micro_batches for part in _agreed(m))),
    )


def step_cost(batch: PackedBatch, job: Job) -> int:
    """Return the approximate time of the costliest data-parallel rank, in work."""
    step = divided(batch, job)
    return int(placement.rank_cost(step.critical, step.job).max())


def packing_gain(batch: PackedBatch, own: np.ndarray, job: Job) -> float | None:
    """Return the time of Megatron's windows over a step's, both per work, by `step_cost`.

    `own`: DOCUMENT rows of the step's own samples. None if these have none, or Megatron's pipeline cannot run them.
    """
    if not len(own):
        return None
    try:
        alone = without_wlb(job)
    except ValueError:
        return None
    pairs = ((windows(own, alone), alone), (batch, job))
    theirs, ours = (step_cost(each, of) / job.work(each.documents["length"]).sum() for each, of in pairs)
    return float(theirs / ours)


def shard_step(
    job: Job, lengths: Sequence[np.ndarray], ranks: np.ndarray | None = None, *, size: int = 1
) -> list[list[ShardPlan]]:
    """Return every data-parallel rank's shards of a step, in pipeline order.

    Places and shards M micro-batches of documents of `lengths` (int64 [n] each), as `plan_step`; `ranks`: the
    micro-batches of each rank, int64 [dp, M / dp], if they are dealt already. Megatron alone runs `size` of them at
    once (`--micro-batch-size`). Raises ValueError if that does not divide them.
    """
    tokens = np.array([each.sum() for each in lengths])
    work = np.array([job.work(each).sum() for each in lengths])
    step = _divided(work, tokens, job, ranks)
    shards = [[select.shard(lengths[i], step.job) for i in step.in_order(rank)] for rank in range(len(step.rows))]
    if size == 1:
        return shards
    if len(shards[0]) % size:
        raise ValueError(
            f"--micro-batch-size {size} does not divide the {len(shards[0])} windows of a data-parallel rank; "
            "change it, or --global-batch-size"
        )
    return [[_joined(row[i : i + size]) for i in range(0, len(row), size)] for row in shards]


def _joined(plans: Sequence[ShardPlan]) -> ShardPlan:
    """Join windows that run at once, each sharded by itself."""
    first = np.cumsum([0, *(len(plan.lengths) for plan in plans)])

    def calls(rank: int) -> tuple[np.ndarray, ...]:
        moved = [[call.copy() for call in plan.shards[rank].calls] for plan in plans]
        for of_plan, begin in zip(moved, first, strict=False):
            for call in of_plan:
                call["document"] += begin
        return tuple(np.concatenate(of_all) for of_all in zip(*moved, strict=True))

    shards = tuple(Shard(calls=calls(rank)) for rank in range(len(plans[0].shards)))
    return replace(plans[0], lengths=np.concatenate([plan.lengths for plan in plans]), shards=shards)


class Division(NamedTuple):
    """How data-parallel ranks divide the micro-batches of a step."""

    job: Job
    """The job of the step (`Job.of_step`)."""
    work: np.ndarray
    """Of all M micro-batches, int64 [M]."""
    rows: np.ndarray
    """Micro-batches of every rank, int64 [dp, M / dp]: those that it was dealt, if memory holds them."""
    critical: np.ndarray
    """Of these, see `placement.critical_work`."""

    def in_order(self, dp_rank: int) -> np.ndarray:
        """Return the micro-batches of a rank in pipeline order, int64 [M / dp]."""
        return self.rows[dp_rank][placement.order(self.critical[dp_rank], self.job)]


def divided(batch: PackedBatch, job: Job) -> Division:
    """Divide the micro-batches of a step."""
    lengths = batch.documents["length"]
    return _divided(batch.sums(job.work(lengths)), batch.sums(lengths), job, batch.ranks)


def _divided(work: np.ndarray, tokens: np.ndarray, job: Job, rows: np.ndarray | None) -> Division:
    """Divide micro-batches of `work` and `tokens`, int64 [M] each; `rows`: those that ranks were dealt."""
    job = job.of_step(len(work), int(tokens.sum()))
    pooled = tokens * job.pooled_crossover_tokens
    if rows is None or tokens[rows].sum(axis=1).max() > job.most_rank_tokens(job.max_tokens):
        rows = placement.place(work, job, pooled, tokens)
    critical = placement.critical_work(work[rows], pooled[rows], job.parallel.pooling_ranks)
    return Division(job, work, rows, critical)


def _words(numbers: np.ndarray) -> str:
    return " ".join(map(str, numbers.tolist()))


def _agreed(micro_batch: MicroBatchPlan) -> list[Any]:
    shards = micro_batch.shards
    calls = [call for shard in shards.shards for call in shard.calls]
    return [micro_batch.documents, shards.lengths, shards.key_bounds, *calls]


def digest_of(*parts: Any) -> int:
    """Return 63 bits of arrays, and of the `repr` of other parts."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        array = isinstance(part, np.ndarray)
        digest.update(f"{part.shape} {_text(part.dtype)}".encode() if array else repr(part).encode())
        digest.update(np.ascontiguousarray(part) if array else b"")
    return int.from_bytes(digest.digest()) >> 1


@functools.cache
def _text(dtype: np.dtype[Any]) -> str:
    return repr(dtype)  # numpy takes longer to write one than to hash a micro-batch


class Planner:
    """Plans steps in a thread, at most `PLAN_AHEAD` steps ahead of training.

    Steps are kept until `release`, so that several data iterators and replays of a step read the same plan. The thread
    lives until `close`, or until the process ends.
    """

    @in_range
    def __init__(
        self,
        packer: Packer,
        job: Job,
        dp_rank: SizeOrNone,
        *,
        first_step: SizeOrNone,
        patience_seconds: Annotated[float, Meta(gt=0)] = math.inf,
        count: Callable[[PackedStep], np.ndarray | None] = lambda packed: None,
        later: Sequence[tuple[int, Job]] = (),
    ) -> None:
        """`patience_seconds`: how long `get` waits for a step. `count`: also called for every step. `later`: first
        steps of other jobs, and these."""
        self._patience_seconds, self._count, self._later = patience_seconds, count, list(later)
        self._packer, self._job, self._dp_rank = packer, job, dp_rank
        self._plans: dict[int, StepPlan] = {}
        self._wanted, self._next = first_step, first_step
        self._error: BaseException | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self.wait_seconds = 0.0
        """Seconds that readers have waited for the planner."""

    def get(self, step: int) -> StepPlan:
        """Return the plan of `step`, waiting for the planner.

        Raises RuntimeError, caused by the planner's error, if there is none, and KeyError for a released step.
        """
        begin = time.perf_counter()
        with self._changed:
            if self._thread is None:
                # Start late, so that a process that only makes a planner may be forked.
                self._thread = threading.Thread(target=self._run, name="wlb-planner", daemon=True)
                self._thread.start()
                # A thread that returns from C++ while the interpreter ends would abort the process.
                atexit.register(self.close)
            self._wanted = max(self._wanted, step)
            self._changed.notify_all()
            while not self._changed.wait_for(lambda: self._next > step or self._error is not None, _LOOK_SECONDS):
                if not self._thread.is_alive():
                    self._error = RuntimeError(
                        f"the planner's thread has ended at step {self._next}, or this process was forked since; "
                        "read plans in the process that trains"
                    )
                elif time.perf_counter() - begin > self._patience_seconds:
                    frame = sys._current_frames()[self._thread.ident or 0]
                    self._error = TimeoutError(
                        f"step {self._next} was not planned in {self._patience_seconds:.0f} s; the planner's thread is "
                        f"stuck here:\n{''.join(traceback.format_stack(frame))}"
                    )
            self.wait_seconds += time.perf_counter() - begin
            if self._next <= step and isinstance(self._error, StopIteration):
                raise RuntimeError(
                    f"the data ends before step {step}: after {self._next} steps every document has been trained; "
                    "train fewer steps, or more epochs"
                ) from self._error
            if self._next <= step:
                raise RuntimeError(f"planning failed before step {step}; see its cause above") from self._error
            return self._plans[step]

    def release(self, step: int) -> None:
        """Forget the steps before `step`."""
        with self._changed:
            for old in [s for s in self._plans if s < step]:
                del self._plans[old]

    def close(self) -> None:
        """End the planner thread after its current step; finished plans can still be read."""
        atexit.unregister(self.close)
        if self._thread is not None and not self._thread.is_alive():
            return  # maybe forked, with the lock held by a thread of the parent
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None and self._error is None:  # after an error it has ended, or is stuck
            self._thread.join()

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._closed or self._next <= self._wanted + PLAN_AHEAD)
                    if self._closed:
                        return
                if self._later and self._later[0][0] == self._next:
                    _, self._job = self._later.pop(0)
                    self._packer = self._packer.with_job(self._job)
                packed = self._packer.next()
                plan = replace(plan_packed(packed, self._job, self._dp_rank), counted=self._count(packed))
                if plan.step != self._next:
                    raise RuntimeError(
                        f"the packer is at step {plan.step}, training at step {self._next}; load the state of that step"
                    )
                with self._changed:
                    self._plans[plan.step] = plan
                    self._next += 1
                    self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()
