"""Adaptive packing (ours): a waiting document runs in the first step that stays balanced with it.

Algorithm 1 of the paper decides by length thresholds which documents wait. Here nothing but balance decides. Documents
of at most an eighth of the window are *fluid*: they run in the order in which they came and level whatever the longer,
*solid* ones leave uneven. In every step the policy tries sets of solid documents of neighbouring length, places each
longest first, predicts the level after the fluid has been poured in, and takes the set that relieves the queue most
among those that stay balanced. `docs/packing.md` describes the algorithm and its guarantees.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from megatron_wlb.cost.work import document_work
from megatron_wlb.plan.packing import base
from megatron_wlb.plan.packing.adaptive_core import FORCED_STEPS, choose
from megatron_wlb.plan.types import DOCUMENT, Draw, Packing
from megatron_wlb.settings import setting

if TYPE_CHECKING:
    from megatron_wlb.job import Job

LOOK_AHEAD_BATCHES = 2
"""Global batches that are known when a step is chosen, so that long documents find partners."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptivePacking(base.Packing):
    """Settings of `AdaptivePolicy`."""

    name = "adaptive"
    help = (
        "equal work, variable length, a document waits until a step stays balanced with it, under a bound on its delay."
    )

    max_delay_steps: int = setting(
        30,
        f"Adaptive packing runs no document later than this many steps after it arrives; at least {2 * FORCED_STEPS}.",
        parse=int,
        least=2 * FORCED_STEPS,
        most=1 << 31,
    )

    def policy(self, job: "Job") -> "AdaptivePolicy":
        return AdaptivePolicy(job, self.max_delay_steps)


class AdaptivePolicy:
    """Micro-batches of equal work, N * C tokens a step, without thresholds; documents stay whole.

    No document is late by more than `max_delay_steps`.
    """

    def __init__(self, job: "Job", max_delay_steps: int) -> None:
        self._job, self._max_delay_steps = job, max_delay_steps
        self._pool = np.empty(0, DOCUMENT)  # ordered by index

    def pack(self, step: int, draw: Draw) -> Packing:
        """Pack step `step`. At the end of the data what waits runs in balanced steps."""
        # What can't be packed must not pile up for ever, so the stream waits for it.
        room = LOOK_AHEAD_BATCHES * self._job.batch_tokens - int(self._pool["length"].sum())
        self._pool = np.concatenate((self._pool, draw.more(room)))
        lengths = self._pool["length"]
        rows, bounds = choose(
            lengths,
            document_work(lengths, self._job.crossover_tokens),
            self._pool["arrival"],
            step=step,
            credit=int(lengths.sum()) - draw.ahead,
            num_micro_batches=self._job.num_micro_batches,
            max_tokens=self._job.max_tokens,
            context_length=self._job.context_length,
            max_delay_steps=self._max_delay_steps,
        )
        documents, self._pool = self._pool[rows], np.delete(self._pool, rows)
        return Packing(documents=documents, bounds=bounds)

    def waiting(self) -> dict[str, np.ndarray]:
        """Documents known and not yet packed, in the order of the stream, in one place: "pool"."""
        return {"pool": self._pool}

    def load_waiting(self, waiting: dict[str, np.ndarray]) -> None:
        """Take over what `waiting` gave."""
        self._pool = waiting["pool"]
