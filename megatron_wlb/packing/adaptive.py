"""Adaptive packing (ours): defer a document to a step that it costs little time.

Algorithm 1 of the paper defers by length thresholds, and makes micro-batches of equal work. Here nothing but the step's
time decides, as 1F1B predicts it: data-parallel ranks should take equally long, and in a pipeline the largest
micro-batch should be small for the work of the step. If documents can run in order, they do. Otherwise those of at most
an eighth of a mean micro-batch are *fluid*: they run in order of arrival, and level what the longer, *solid* ones leave
uneven. Every step tries sets of solid documents of neighbouring length, and takes the set that loses least time and
defers least. `docs/packing.md` describes the algorithm and its guarantees; `csrc/adaptive.cpp` has it.
"""

import math
from dataclasses import dataclass

import numpy as np

from megatron_wlb import _native
from megatron_wlb.job import Job, Packing
from megatron_wlb.pipeline.timeline import cost_weights
from megatron_wlb.settings import setting
from megatron_wlb.types import DOCUMENT, Draw, PackedBatch, document_work

LOOK_AHEAD_BATCHES = 4
"""Global batches that are known when a step is chosen, so that long documents find partners."""
FORCED_STEPS = _native.FORCED_STEPS
"""A document is forced this many steps before the bound on its delay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptivePacking(Packing):
    """Settings of `AdaptivePolicy`."""

    name = "adaptive"
    help = (
        "the least predicted time of a step, variable length, a document waits for a step that loses little time with "
        "it, under a bound on its delay."
    )

    steady_tokens = True

    max_delay_steps: int = setting(
        30,
        f"Adaptive packing runs no document later than this many steps after it arrives; at least {2 * FORCED_STEPS}.",
        parse=int,
        least=2 * FORCED_STEPS,
        most=1 << 31,
    )

    def most_step_tokens(self, job: Job) -> int:
        return most_tokens(job.batch_tokens, job.num_micro_batches)

    def policy(self, job: Job) -> "AdaptivePolicy":
        return AdaptivePolicy(job, self.max_delay_steps)


class AdaptivePolicy:
    """Micro-batches for the least time of a step of N * C tokens, under a bound on delay."""

    def __init__(self, job: Job, max_delay_steps: int) -> None:
        self._pool = np.empty(0, DOCUMENT)  # ordered by index
        p, count = job.parallel, job.num_micro_batches
        weights = cost_weights(job.schedule())
        self._sizes = {
            "num_micro_batches": count,
            # Ranks that divide experts wait for each other in every layer, so all micro-batches should be alike.
            "ranks": p.dp if p.expert_dp_ranks == 1 else count,
            "total_weight": weights.total,
            "largest_weight": weights.largest,
            "unit_weight": weights.unit,
            "max_tokens": job.max_tokens,
            "batch_tokens": job.batch_tokens,
            "crossover_tokens": job.crossover_tokens,
            "max_delay_steps": max_delay_steps,
        }

    def pack(self, step: int, draw: Draw) -> PackedBatch:
        """Pack step `step`; at the end of the data, what waits runs at little loss."""
        # What can't be packed must not pile up for ever, so the stream waits for it.
        room = LOOK_AHEAD_BATCHES * self._sizes["batch_tokens"] - int(self._pool["length"].sum())
        self._pool = np.concatenate((self._pool, draw.more(room)))
        lengths = self._pool["length"]
        work, credit = document_work(lengths, self._sizes["crossover_tokens"]), int(lengths.sum()) - draw.ahead
        rows, bounds = _native.choose_adaptive(lengths, work, self._pool["arrival"], step, credit, **self._sizes)
        documents, self._pool = self._pool[rows], np.delete(self._pool, rows)
        return PackedBatch(documents=documents, bounds=bounds)

    def waiting(self) -> dict[str, np.ndarray]:
        return {"pool": self._pool}

    def load_waiting(self, waiting: dict[str, np.ndarray]) -> None:
        self._pool = waiting["pool"]


def most_tokens(batch_tokens: int, num_micro_batches: int) -> int:
    """Return the most tokens of a step: its limit, or its target and half a fluid one."""
    half = 1 / (2 * _native.FLUID_SHARE * num_micro_batches)
    return math.ceil((1 + max(_native.TOKEN_BAND, _native.TOKEN_REPAY + half)) * batch_tokens)
