"""A pipeline step played through, and longest paths through 1F1B, as csrc/pipeline.cpp has them."""

from collections import deque

import numpy as np

from megatron_wlb.pipeline.graph import Graph
from megatron_wlb.pipeline.timeline import Parts


def play(
    graph: Graph, times: np.ndarray, passes: int, num_stages: int, per_stage: int, parts: Parts
) -> tuple[np.ndarray, ...]:
    """What `_native.play` returns; `per_stage` passes of one direction are on each stage."""
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
    return start, end, filled, before, left


def makespans(
    first: np.ndarray, second: np.ndarray, end: np.ndarray, time: np.ndarray, num_slots: int, work: np.ndarray
) -> np.ndarray:
    """When the last pass ends, int64 [K], for K orders of work [K, M] on the passes of a `PassGraph`."""
    ends = np.zeros((num_slots, len(work)), np.int64)
    for i, j, slot, of in zip(first, second, end, time, strict=True):
        ends[slot] = np.maximum(ends[i], ends[j]) + (1 + of % 2) * work[:, of // 2].astype(np.int64)
    return ends[end[-1]]
