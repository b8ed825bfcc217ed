"""Adaptive packing with a delay (ours): a document may wait for a step that loses little time with it.

Documents of at most an eighth of a mean micro-batch are *filler*: they run in order of arrival, and level out the
longer, *large* ones. Every step takes the run of large documents of similar length that loses least time and
defers least. `docs/packing.md` describes the steps and their guarantees; `csrc/delay.cpp` has them.
"""

import math
from typing import NamedTuple

import numpy as np

import megatron_wlb._native as _native
from megatron_wlb.documents import DOCUMENT, Draw, PackedBatch
from megatron_wlb.job import Job
from megatron_wlb.packing.place import sizes
from megatron_wlb.pipeline.timeline import cost_weights

LOOK_AHEAD_BATCHES = 4
"""Global batches that are known when a step is chosen, so that long documents find partners."""
LEAST_DELAY, MOST_DELAY = 2 * _native.FORCED_STEPS, 1 << 31
"""Bounds that a job may set, in steps. Half of the least one places late documents: each is forced so many steps before
its bound."""


class Limits(NamedTuple):
    """Tokens and steps by which documents are chosen, and the weight of work that is spread evenly."""

    unit_weight: int
    batch_tokens: int
    crossover_tokens: int
    max_delay_steps: int


def check_delay(steps: int) -> None:
    """Raise ValueError unless the bound can be kept."""
    if not LEAST_DELAY <= steps <= MOST_DELAY:
        raise ValueError(
            f"give a delay from {LEAST_DELAY}, half of which place late documents, to {MOST_DELAY} steps, or none"
        )


def most_step_tokens(job: Job) -> int:
    """Return the most tokens of a step with a delay: its limit, or its target and half a filler document."""
    half = 1 / (2 * _native.FILLER_SHARE * job.num_micro_batches)
    return math.ceil((1 + max(_native.TOKEN_BAND, _native.TOKEN_REPAY + half)) * job.batch_tokens)


class DelayPolicy:
    """Micro-batches for the least time of a step of N * C tokens, under a bound on delay."""

    def __init__(self, job: Job, max_delay_steps: int) -> None:
        self._job, self._pool = job, np.empty(0, DOCUMENT)  # ordered by index
        # Unlike `placed`, all rounds wait for the largest micro-batch: a step can do without such a one.
        weights = cost_weights(job.schedule())
        self._sizes = sizes(job, job.num_micro_batches, job.parallel.dp, weights)
        self._limits = Limits(weights.unit, job.batch_tokens, job.crossover_tokens, max_delay_steps)

    def pack(self, step: int, draw: Draw) -> PackedBatch:
        """Pack step `step`; at the end of the data, waiting documents run at little loss."""
        # Documents that fit badly must not pile up for ever, so samples wait for them.
        room = LOOK_AHEAD_BATCHES * self._job.batch_tokens - int(self._pool["length"].sum())
        self._pool = np.concatenate((self._pool, draw.more(room)))
        lengths = self._pool["length"]
        work, credit = self._job.work(lengths), int(lengths.sum()) - draw.early_tokens
        rows, bounds = _native.release_documents(
            lengths, work, self._pool["arrival"], step, credit, self._sizes, self._limits
        )
        documents, self._pool = self._pool[rows], np.delete(self._pool, rows)
        return PackedBatch(documents=documents, bounds=bounds)

    def waiting(self) -> dict[str, np.ndarray]:
        return {"pool": self._pool}

    def load_waiting(self, waiting: dict[str, np.ndarray]) -> None:
        self._pool = waiting["pool"]
