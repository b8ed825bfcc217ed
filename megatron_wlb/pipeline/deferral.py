"""Weight gradients that leave backward passes and fill idle time.

The backward of a linear layer is two products, and the previous stage waits only for the input gradient (zero-bubble
pipelines, Qi et al., arXiv 2401.10241). There, micro-batches are alike and the schedule is a pattern; here lengths
differ and are known, so the step is simulated.
"""

from dataclasses import dataclass

import numpy as np

from megatron_wlb.pipeline.schedule import Schedule
from megatron_wlb.pipeline.timeline import Parts, Timeline, with_parts


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightGradients:
    """The weight gradients of a step, and the memory that deferring them takes.

    Each backward pass has *parts*, a layer each, in the order of backward. Parts of a stage run in the order of their
    backward passes.
    """

    counts: np.ndarray
    """int64 [stages, chunks]: parts of a backward pass."""
    times: np.ndarray
    """float64 [stages, chunks, parts, micro-batches], which `counts` says how many of count; a part of the time of the
    backward pass."""
    held: np.ndarray
    """float64, shaped as `times`: bytes that a part holds from the end of its backward pass until it has run."""
    limit: np.ndarray
    """float64 [stages]: bytes that may be held at once. Parts run before a pass that would exceed it."""

    @classmethod
    def alike(cls, counts: np.ndarray, weights: np.ndarray) -> "WeightGradients":
        """Return equal parts of the `weights` times of passes, with memory for all.

        `weights` is float64 [stages, chunks, micro-batches].
        """
        is_part = np.arange(counts.max())[:, None] < counts[:, :, None, None]
        times = is_part * (weights / np.maximum(counts, 1)[:, :, None])[:, :, None]
        return cls(counts=counts, times=times, held=np.zeros(times.shape), limit=np.zeros(len(counts)))


def run_deferred(
    schedule: Schedule,
    forward: np.ndarray,
    backward: np.ndarray,
    transfer: np.ndarray | float,
    weights: WeightGradients,
) -> tuple[Timeline, np.ndarray]:
    """Return `timeline.run` with deferred weight gradients, and where they run.

    Parts run as `with_parts` says, what is left after the last pass of a stage. Nothing runs before a backward pass of
    the last virtual stage, which is never idle. The second result is int64 [directions, stages, chunks, micro-batches]:
    parts of the stage that have run before each pass, counted over the step.
    """
    of_passes = weights.times.sum(axis=2)
    bare = np.broadcast_to(backward, of_passes.shape) - of_passes
    return with_parts(schedule, forward, bare, transfer, _parts(schedule, weights))


def _parts(schedule: Schedule, weights: WeightGradients) -> Parts:
    """Return the parts of backward passes; forward passes have none."""
    held, count = weights.held.sum(axis=2), schedule.num_micro_batches
    passes = held.size
    is_part = np.arange(weights.times.shape[2]) < weights.counts[:, :, None, None]
    is_part = np.broadcast_to(is_part, (*held.shape, is_part.shape[-1]))
    steps = np.stack((np.zeros(held.shape), held))
    return Parts(
        bounds=np.concatenate((np.zeros(passes + 1, np.int64), np.repeat(weights.counts, count).cumsum())),
        times=weights.times.swapaxes(2, 3)[is_part],
        held=weights.held.swapaxes(2, 3)[is_part],
        needs=_needs(schedule, steps).ravel(),
        steps=steps.ravel(),
        limit=np.asarray(weights.limit, np.float64),
        urgent=2 * passes - count,
    )


def _needs(schedule: Schedule, steps: np.ndarray) -> np.ndarray:
    """Return bytes that must be free before every pass, shaped as `steps`.

    They cover the pass, and the backward passes of the last virtual stage that follow it, before which nothing runs.
    """
    needs = np.maximum(steps, 0)
    stage, chunk = schedule.num_stages - 1, schedule.num_chunks - 1
    following = 0.0
    for backward, c, i in schedule.ops(stage)[::-1].tolist():
        at = int(backward), stage, c, i
        following = max(0.0, steps[at] + following)
        if not (backward and c == chunk):
            needs[at], following = following, 0.0
    return needs
