"""Adaptive packing (ours): micro-batches of variable length for the least time of a step.

Algorithm 1 of the paper makes micro-batches of equal work. Here nothing but the step's time decides, as 1F1B predicts
it: data-parallel ranks should take equally long, and in a pipeline the largest micro-batch should be small for the work
of the step. By default every document runs in its own step (`arranged`). Under a bound on its delay, a document may
wait for a step that loses little time with it: those of at most an eighth of a mean micro-batch are *fluid*, run in
order of arrival, and level what the longer, *solid* ones leave uneven; every step takes the set of solid documents of
neighbouring length that loses least time and defers least. `docs/packing.md` describes the algorithm and its
guarantees; `csrc/adaptive.cpp` has it.
"""

import contextlib
import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

import megatron_wlb._native as _native
from megatron_wlb.documents import DOCUMENT, Draw, PackedBatch, Policy
from megatron_wlb.job import Job, Packing
from megatron_wlb.pipeline.timeline import cost_weights
from megatron_wlb.settings import integers

LOOK_AHEAD_BATCHES = 4
"""Global batches that are known when a step is chosen, so that long documents find partners."""
FORCED_STEPS = _native.FORCED_STEPS
"""A document is forced this many steps before the bound on its delay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptivePacking(Packing):
    """Settings of adaptive packing."""

    name = "adaptive"
    help = (
        "the least predicted time of a step, variable length; every document in its own step, so that every step "
        "trains what Megatron's would. adaptive:D: a document may wait for a step that loses little time with it, at "
        f"most D steps, {2 * FORCED_STEPS} or more."
    )
    steady_tokens = True

    max_delay_steps: int = 0

    def __post_init__(self) -> None:
        if self.max_delay_steps and not 2 * FORCED_STEPS <= self.max_delay_steps <= 1 << 31:
            raise ValueError(
                f"give a delay from {2 * FORCED_STEPS}, half of which place what is late, to {1 << 31} steps, or none"
            )

    @classmethod
    def of(cls, parameter: str) -> "AdaptivePacking":
        return cls(max_delay_steps=integers(parameter, 1)[0]) if parameter else cls()

    @property
    def parameter(self) -> str:
        return str(self.max_delay_steps or "")

    @property
    def delays(self) -> bool:
        return self.max_delay_steps > 0

    def most_step_tokens(self, job: Job) -> int | None:
        if not self.delays:
            return job.batch_tokens
        # The limit of its tokens, or its target and half a fluid document.
        half = 1 / (2 * _native.FLUID_SHARE * job.num_micro_batches)
        return math.ceil((1 + max(_native.TOKEN_BAND, _native.TOKEN_REPAY + half)) * job.batch_tokens)

    def policy(self, job: Job) -> "StepPolicy | DelayPolicy":
        return DelayPolicy(job, self.max_delay_steps) if self.delays else StepPolicy(job)


class StepPolicy(Policy):
    """All documents of a step's own samples, in that step."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def pack(self, step: int, draw: Draw) -> PackedBatch:
        """Arrange the step's own samples. Raises ValueError if memory does not hold them."""
        return arranged(draw.own(), self._job)


class DelayPolicy:
    """Micro-batches for the least time of a step of N * C tokens, under a bound on delay."""

    def __init__(self, job: Job, max_delay_steps: int) -> None:
        self._job, self._pool = job, np.empty(0, DOCUMENT)  # ordered by index
        self._sizes = _sizes(job, job.num_micro_batches) | {
            "batch_tokens": job.batch_tokens,
            "max_delay_steps": max_delay_steps,
        }

    def pack(self, step: int, draw: Draw) -> PackedBatch:
        """Pack step `step`; at the end of the data, what waits runs at little loss."""
        # What can't be packed must not pile up for ever, so samples wait for it.
        room = LOOK_AHEAD_BATCHES * self._sizes["batch_tokens"] - int(self._pool["length"].sum())
        self._pool = np.concatenate((self._pool, draw.more(room)))
        lengths = self._pool["length"]
        work, credit = self._job.work(lengths), int(lengths.sum()) - draw.ahead
        rows, bounds = _native.choose_adaptive(lengths, work, self._pool["arrival"], step, credit, **self._sizes)
        documents, self._pool = self._pool[rows], np.delete(self._pool, rows)
        return PackedBatch(documents=documents, bounds=bounds)

    def waiting(self) -> dict[str, np.ndarray]:
        return {"pool": self._pool}

    def load_waiting(self, waiting: dict[str, np.ndarray]) -> None:
        self._pool = waiting["pool"]


def arranged(documents: np.ndarray, job: Job) -> PackedBatch:
    """Arrange DOCUMENT rows, all of them, in about the job's M micro-batches.

    There are fewer micro-batches for fewer documents, so that none is empty if that can be, and more where documents
    do not fit. Raises ValueError if they fit no number of them, which cannot be from one a document on.
    """
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


def placed(documents: np.ndarray, job: Job, count: int, ranks: int | None = None) -> PackedBatch | None:
    """Place DOCUMENT rows in `count` micro-batches, dealt to `ranks` (None: the job's); None if they do not fit.

    Longest first to the rank and micro-batch of least cost; then documents move or swap while the costliest rank gets
    cheaper (`csrc/adaptive.cpp`). No micro-batch is empty if there are enough documents.
    """
    lengths = documents["length"]
    sizes = _sizes(job, count, ranks)
    # In groups longer than the pipeline, others fill the rounds in which the largest micro-batch is on its way, so it
    # costs warm-up and cool-down alone. A delay, which can avoid such a micro-batch, counts all rounds.
    sizes["largest_weight"] = sizes["unit_weight"] // job.parallel.vpp * (job.parallel.pp - 1)
    rows, bounds = _native.choose_adaptive(
        lengths,
        job.work(lengths),
        np.zeros(len(documents), np.int64),
        FORCED_STEPS + 1,  # all are forced
        0,
        **sizes,
        batch_tokens=max(1, int(lengths.sum())),
        max_delay_steps=FORCED_STEPS + 1,
    )
    if len(rows) < len(documents):
        return None
    rows, bounds = _filled(rows, bounds, lengths)
    dealt = np.arange(count).reshape(sizes["ranks"], -1) if job.parallel.expert_dp_ranks == 1 else None
    return PackedBatch(documents=documents[rows], bounds=bounds, ranks=dealt)


def _filled(rows: np.ndarray, bounds: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return rows and bounds without empty micro-batches: each takes the shortest document of the one with most."""
    if (np.diff(bounds) > 0).all():
        return rows, bounds
    parts = np.split(rows, bounds[1:-1])
    most = [(-len(part), i) for i, part in enumerate(parts) if len(part) > 1]
    heapq.heapify(most)
    for i in [i for i, part in enumerate(parts) if not len(part)]:
        if not most:
            break
        size, k = heapq.heappop(most)
        shortest = int(lengths[parts[k]].argmin())
        parts[i], parts[k] = parts[k][shortest : shortest + 1], np.delete(parts[k], shortest)
        if size < -2:
            heapq.heappush(most, (size + 1, k))
    return np.concatenate(parts), np.cumsum([0, *map(len, parts)], dtype=np.int64)


def _sizes(job: Job, count: int, ranks: int | None = None) -> dict[str, Any]:
    ranks = job.parallel.dp if ranks is None else ranks
    weights = cost_weights(job.schedule(count // ranks))
    return {
        "num_micro_batches": count,
        # Ranks that divide experts wait for each other in every layer, so all micro-batches should be alike.
        "ranks": ranks if job.parallel.expert_dp_ranks == 1 else count,
        "total_weight": weights.total,
        "largest_weight": weights.largest,
        "unit_weight": weights.unit,
        "max_tokens": job.max_tokens,
        "crossover_tokens": job.crossover_tokens,
    }
