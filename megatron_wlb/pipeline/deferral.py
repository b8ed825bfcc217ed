"""Weight gradients that leave the backward pass and run where their stage would wait.

The backward of a linear layer is two products, and the stage before waits only for the one for the input (zero-bubble
pipelines, Qi et al., arXiv 2401.10241). There, all micro-batches are alike and the schedule is a pattern; here lengths
differ and are known, so that the step is played through, and what fits into a wait runs in it.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np

from megatron_wlb.pipeline.graph import graph_of
from megatron_wlb.pipeline.schedule import Schedule
from megatron_wlb.pipeline.timeline import Timeline, node_times


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
    kept: np.ndarray
    """float64 [stages, chunks, micro-batches]: bytes that a pass keeps from its forward to the end of its backward."""
    limit: np.ndarray
    """float64 [stages]: bytes that may be kept and held at once. Parts run before a pass that would exceed it."""

    @classmethod
    def alike(cls, counts: np.ndarray, weights: np.ndarray) -> "WeightGradients":
        """Equal parts of the time for weights of a pass, float64 [stages, chunks, micro-batches]; memory for all."""
        is_part = np.arange(counts.max())[:, None] < counts[:, :, None, None]
        times = is_part * (weights / counts[:, :, None])[:, :, None]
        kept = np.zeros(weights.shape)
        return cls(counts=counts, times=times, held=np.zeros(times.shape), kept=kept, limit=np.zeros(len(counts)))


def run_deferred(
    schedule: Schedule,
    forward: np.ndarray,
    backward: np.ndarray,
    transfer: np.ndarray | float,
    weights: WeightGradients,
) -> tuple[Timeline, np.ndarray]:
    """`timeline.run` with weight gradients put off, and where they run. O(passes + parts).

    Before a pass runs what has time while the stage waits for it, and what has to for the pass to have memory; after
    the last pass of a stage, the rest. Nothing runs before a backward pass of the last virtual stage, which waits for
    nobody.

    Returns the timeline and, int64 [directions, stages, chunks, micro-batches], how many parts of its stage have run
    before each pass, of all that have gone before in the step.
    """
    stages, chunks, count = schedule.num_stages, schedule.num_chunks, schedule.num_micro_batches
    shape, num = (2, stages, chunks, count), 2 * stages * chunks * count
    parts = _parts(weights)
    bare = np.broadcast_to(backward, shape[1:]) - weights.times.sum(axis=2)
    graph, times = graph_of(schedule), node_times(schedule, forward, bare, transfer)
    needs, steps, stage_of = _memory(schedule, weights), _steps(weights), np.unravel_index(np.arange(num), shape)[1]
    free, used, done = [0.0] * stages, [0.0] * stages, [0] * stages
    waiting: list[deque[tuple[float, float]]] = [deque() for _ in range(stages)]
    limit, stage_list = weights.limit.tolist(), stage_of.tolist()
    start, end, filled = np.zeros(num), np.zeros(num), np.zeros(num)
    before = np.zeros(num, np.int64)
    last = num // 2 + (num // 2 - count)  # backward passes of the last virtual stage
    ends = [0.0]
    for i, j, time, node in zip(graph.first, graph.second, times, graph.nodes.tolist(), strict=True):
        at = max(ends[i], ends[j])
        if node < num:
            stage, ready = stage_list[node], free[stage_list[node]]
            queue = waiting[stage]
            if node < last:
                while queue and (ready + queue[0][0] <= at or used[stage] + needs[node] > limit[stage]):
                    needed, held = queue.popleft()
                    ready += needed
                    used[stage] -= held
                    done[stage] += 1
            filled[node], before[node], at = ready - free[stage], done[stage], max(at, ready)
            used[stage] += steps[node]
            queue.extend(parts.get(node, ()))
            start[node], end[node], free[stage] = at, at + time, at + time
        ends.append(at + time)
    timeline = Timeline(
        schedule=schedule,
        start=start.reshape(shape),
        end=end.reshape(shape),
        filled=filled.reshape(shape),
        left=np.array([sum(time for time, _ in queue) for queue in waiting]),
    )
    return timeline, before.reshape(shape)


def _parts(weights: WeightGradients) -> dict[int, list[tuple[float, float]]]:
    """Time and bytes of the parts of every backward pass, by its number in `Graph.nodes`."""
    stages, chunks, _, count = weights.times.shape
    found = {}
    for number, (stage, chunk, i) in enumerate(np.ndindex(stages, chunks, count)):
        both = (
            each[stage, chunk, : weights.counts[stage, chunk], i].tolist() for each in (weights.times, weights.held)
        )
        found[stages * chunks * count + number] = list(zip(*both, strict=True))
    return found


def _steps(weights: WeightGradients) -> list[float]:
    """By how many bytes every pass changes what its stage keeps and holds."""
    return np.concatenate((weights.kept.ravel(), (weights.held.sum(axis=2) - weights.kept).ravel())).tolist()


def _memory(schedule: Schedule, weights: WeightGradients) -> list[float]:
    """Bytes that must be free before every pass: its own, and those of backward passes of the last virtual stage that
    follow it, before which nothing runs."""
    own = np.array(_steps(weights)).reshape(2, *weights.kept.shape)
    needs = np.maximum(own, 0)
    stage, chunk = schedule.num_stages - 1, schedule.num_chunks - 1
    following = 0.0
    for backward, c, i in schedule.ops(stage)[::-1].tolist():
        at = int(backward), stage, c, i
        following = max(0.0, own[at] + following)
        if not (backward and c == chunk):
            needs[at], following = following, 0.0
    return needs.ravel().tolist()
