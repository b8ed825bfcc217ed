"""Weight gradients that leave the backward pass and run where their stage would wait.

The backward of a linear layer is two products, and the stage before waits only for the one for the input (zero-bubble
pipelines, Qi et al., arXiv 2401.10241). There, all micro-batches are alike and the schedule is a pattern; here lengths
differ and are known, so that the step is played through, and what fits into a wait runs in it.
"""

from dataclasses import dataclass

import numpy as np

from megatron_wlb.pipeline.play import Parts
from megatron_wlb.pipeline.schedule import Schedule
from megatron_wlb.pipeline.timeline import Timeline, with_parts


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightGradients:
    """The products for weights of a step, and the memory that putting them off takes.

    Those of a backward pass are *parts*: a layer each, in the order of backward. Parts of a stage run in the order of
    their backward passes.
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
        """Equal parts of the time for weights of a pass, float64 [stages, chunks, micro-batches]; memory for all."""
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
    """`timeline.run` with deferred weight gradients, and where they run, as `play` says.

    What is left runs after the last pass of a stage. Nothing runs before a backward pass of the last virtual stage,
    which waits for nobody.

    Returns the timeline and, int64 [directions, stages, chunks, micro-batches], how many parts of its stage have run
    before each pass, of all that have gone before in the step.
    """
    of_passes = weights.times.sum(axis=2)
    bare = np.broadcast_to(backward, of_passes.shape) - of_passes
    return with_parts(schedule, forward, bare, transfer, _parts(schedule, weights))


def _parts(schedule: Schedule, weights: WeightGradients) -> Parts:
    """Those of every backward pass; forward passes have none."""
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
    """Bytes that must be free before every pass, shaped as `steps`: its own, and those of backward passes of the last
    virtual stage that follow it, before which nothing runs."""
    needs = np.maximum(steps, 0)
    stage, chunk = schedule.num_stages - 1, schedule.num_chunks - 1
    following = 0.0
    for backward, c, i in schedule.ops(stage)[::-1].tolist():
        at = int(backward), stage, c, i
        following = max(0.0, steps[at] + following)
        if not (backward and c == chunk):
            needs[at], following = following, 0.0
    return needs
