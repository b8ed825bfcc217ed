"""A pipeline step played through, node by node of its graph, with what was put off in the place of waiting."""

from collections import deque
from typing import NamedTuple

import numpy as np

from megatron_wlb.pipeline.graph import graph_of
from megatron_wlb.pipeline.schedule import Schedule
from megatron_wlb.plan import native


class Parts(NamedTuple):
    """Weight gradients that passes leave to their stage, which runs them in order, and the memory that this takes."""

    bounds: np.ndarray
    """int64 [passes + 1]: where those of every pass begin, and the number of all."""
    times: np.ndarray
    """float64 [parts]."""
    held: np.ndarray
    """float64 [parts]: bytes from the end of its pass until a part has run."""
    needs: np.ndarray
    """float64 [passes]: bytes that must be free before a pass. Parts run until they are."""
    steps: np.ndarray
    """float64 [passes]: bytes by which a pass changes what its stage keeps and holds."""
    limit: np.ndarray
    """float64 [stages]: bytes."""
    urgent: int
    """Before passes from this number on nothing runs."""

    @classmethod
    def none(cls, passes: int, stages: int) -> "Parts":
        """Nothing is put off."""
        nothing, zeros = np.zeros(0), np.zeros(passes)
        return cls(np.zeros(passes + 1, np.int64), nothing, nothing, zeros, zeros, np.zeros(stages), passes)


class Played(NamedTuple):
    """When everything runs. Arrays of passes are float64 [passes] unless stated otherwise."""

    start: np.ndarray
    end: np.ndarray
    filled: np.ndarray
    """Time in parts between a pass and the one before it on the same stage."""
    before: np.ndarray
    """int64: parts of its stage that have run before a pass."""
    left: np.ndarray
    """float64 [stages]: time in parts after the last pass."""


def play(schedule: Schedule, times: np.ndarray, parts: Parts) -> Played:
    """Begin every node when those that it waits for have ended. Before a pass, parts run that have time while its stage
    waits for it, and those that must for it to have memory. O(nodes + parts): 2 ms for 65,536 passes, 0.1 s in Python.

    Args:
        schedule: of the pipeline.
        times: of the nodes of its graph, float64 [n].
        parts: what its passes put off.
    """
    graph, num_stages = graph_of(schedule), schedule.num_stages
    passes, per_stage = graph.num_passes, schedule.num_chunks * schedule.num_micro_batches
    if native.core is not None:
        return Played(*native.core.play(graph, times, passes, num_stages, per_stage, parts))
    bounds, needs, steps, limit = (each.tolist() for each in (parts.bounds, parts.needs, parts.steps, parts.limit))
    queued = list(zip(parts.times.tolist(), parts.held.tolist(), strict=True))
    free, used, done = [0.0] * num_stages, [0.0] * num_stages, [0] * num_stages
    waiting: list[deque[tuple[float, float]]] = [deque() for _ in range(num_stages)]
    start, end, filled = np.zeros(passes), np.zeros(passes), np.zeros(passes)
    before, ends = np.zeros(passes, np.int64), [0.0]
    nodes = zip(*(each.tolist() for each in (graph.first, graph.second, times, graph.nodes)), strict=True)
    for i, j, time, node in nodes:
        at = max(ends[i], ends[j])
        if node < passes:
            stage = node // per_stage % num_stages
            ready, queue = free[stage], waiting[stage]
            if node < parts.urgent:
                while queue and (ready + queue[0][0] <= at or used[stage] + needs[node] > limit[stage]):
                    needed, held = queue.popleft()
                    ready += needed
                    used[stage] -= held
                    done[stage] += 1
            filled[node], before[node], at = ready - free[stage], done[stage], max(at, ready)
            used[stage] += steps[node]
            queue.extend(queued[bounds[node] : bounds[node + 1]])
            start[node], end[node], free[stage] = at, at + time, at + time
        ends.append(at + time)
    left = np.zeros(num_stages)
    for stage, queue in enumerate(waiting):
        for needed, _ in queue:
            left[stage] += needed
    return Played(start, end, filled, before, left)
