"""Times of the passes of a pipeline step, and weight gradients that fill its idle time.

The backward of a linear layer is two products, and the previous stage waits only for the input gradient (zero-bubble
pipelines, Qi et al., arXiv 2401.10241). Here lengths differ and are known, so the step is simulated.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megatron_wlb import _native
from megatron_wlb.pipeline.graph import graph_of, passes_of
from megatron_wlb.pipeline.schedule import Schedule


class Parts(NamedTuple):
    """Weight gradients that passes leave to their stage, and the memory they take."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Times from the beginning of the step, in the unit of the input.

    Arrays are float64 [directions, stages, chunks, micro-batches]; direction 0 is forward, 1 backward.
    """

    schedule: Schedule
    start: np.ndarray
    end: np.ndarray
    filled: np.ndarray
    """Time in deferred weight gradients, right after the pass before on the same stage."""
    left: np.ndarray
    """float64 [stages]: the same after the last pass."""

    @property
    def ends(self) -> np.ndarray:
        """When every stage has nothing left to do, float64 [stages]."""
        return self.end.max(axis=(0, 2, 3)) + self.left

    @property
    def makespan(self) -> float:
        return float(self.ends.max())

    @property
    def busy(self) -> np.ndarray:
        """Time in passes and in what they defer, float64 [stages]."""
        return (self.end - self.start + self.filled).sum(axis=(0, 2, 3)) + self.left

    def weight_gradients(self, stage: int) -> np.ndarray:
        """When deferred ones run on a stage: begin and duration, float64 [n, 2]."""
        ops = self.schedule.ops(stage)
        at = (ops["backward"].astype(int), stage, ops["chunk"], ops["micro_batch"])
        begins = np.concatenate(([0.0], self.end[at]))
        durations = np.append(self.filled[at], self.left[stage])
        return np.stack((begins, durations), axis=1)[durations > 0]


def makespans(schedule: Schedule, work: np.ndarray) -> np.ndarray:
    """Return the end of 1F1B for every order of micro-batches, int64 [K].

    `work`, int64 [K, M], not negative; a micro-batch needs it in forward and twice in backward on every stage, and
    nothing between stages. All of it on all stages must fit 64 bits.
    """
    graph = passes_of(schedule)
    # Doubles, which processors compare two at a time, where they are as exact.
    exact = int(work.max()) <= (1 << 53) // (2 * len(graph.time))
    work = work.astype(np.float64 if exact else np.int64, order="C")
    ends = _native.makespans(graph.first, graph.second, graph.end, graph.time, graph.num_slots, work)
    return ends.astype(np.int64)


class CostWeights(NamedTuple):
    """Weights of all work and of the largest micro-batch in the end of 1F1B."""

    total: int
    largest: int
    unit: int
    """For work that is spread evenly and waits for nothing."""


def cost_weights(schedule: Schedule) -> CostWeights:
    """Return the weights of a data-parallel rank's M micro-batches.

    Every stage computes all of them, and waits in warm-up and cool-down for the others: with one chunk a stage, P - 1
    times the largest. Interleaved, P micro-batches go round through all V chunks, and in each of V rounds a stage waits
    until the largest has been through all P stages; warm-up and cool-down are P - 1 times the mean.
    """
    waits, num_chunks, num_micro_batches = schedule.num_stages - 1, schedule.num_chunks, schedule.num_micro_batches
    if num_chunks == 1:
        return CostWeights(1, waits, 1)
    scale = 8  # what is less than an eighth is left out
    largest = scale * num_chunks * waits * num_micro_batches // (num_micro_batches - 1)
    total = scale * num_chunks - (largest - scale * waits) // num_micro_batches
    return CostWeights(total, largest, scale * num_chunks)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightGradients:
    """The weight gradients of a step, and the memory that deferring them takes.

    Each backward pass has *parts*, a layer each, in the order of backward; those of a stage run in the order of passes.
    """

    counts: np.ndarray
    """int64 [stages, chunks]: parts of a backward pass."""
    times: np.ndarray
    """float64 [stages, chunks, parts, micro-batches], of which `counts` count; part of the backward pass."""
    held: np.ndarray
    """Shaped as `times`: bytes that a part holds from the end of its backward pass until it has run."""
    limit: np.ndarray
    """float64 [stages]: bytes that may be held at once."""

    @classmethod
    def alike(cls, counts: np.ndarray, weights: np.ndarray) -> "WeightGradients":
        """Return equal parts of `weights` [stages, chunks, micro-batches], with memory for all."""
        is_part = np.arange(counts.max())[:, None] < counts[:, :, None, None]
        times = is_part * (weights / np.maximum(counts, 1)[:, :, None])[:, :, None]
        return cls(counts=counts, times=times, held=np.zeros(times.shape), limit=np.zeros(len(counts)))


def run(schedule: Schedule, forward: np.ndarray, backward: np.ndarray, transfer: np.ndarray | float = 0.0) -> Timeline:
    """Time the passes of a pipeline step. O(nodes): 2 ms for 65,536 passes.

    `forward` and `backward` broadcast to float [stages, chunks, micro-batches]; `transfer` is the time to send a
    micro-batch's output or gradient to another stage, [micro-batches] or one for all.
    """
    counts = np.zeros((schedule.num_stages, schedule.num_chunks), np.int64)
    nothing = np.zeros((*counts.shape, 0, schedule.num_micro_batches))
    none = WeightGradients(counts=counts, times=nothing, held=nothing, limit=np.zeros(len(counts)))
    return run_deferred(schedule, forward, backward, transfer, none)[0]


def run_deferred(
    schedule: Schedule,
    forward: np.ndarray,
    backward: np.ndarray,
    transfer: np.ndarray | float,
    weights: WeightGradients,
) -> tuple[Timeline, np.ndarray]:
    """Return `run` with deferred weight gradients, and parts that ran before each pass.

    A node begins when the nodes it waits for have ended. Before a pass, parts run that have time while its stage waits
    for it, and those that must for it to have memory; nothing before a backward pass of the last virtual stage, which
    is never idle. The second result is int64 [directions, stages, chunks, micro-batches], counted over the stage and
    the step.
    """
    of_passes = weights.times.sum(axis=2)
    work = np.stack([np.broadcast_to(each, of_passes.shape) for each in (forward, backward)]).astype(np.float64)
    work[1] -= of_passes
    moves = np.broadcast_to(np.asarray(transfer, np.float64), work.shape)
    graph, per_stage = graph_of(schedule), schedule.num_chunks * schedule.num_micro_batches
    times = np.concatenate((work.ravel(), moves.ravel(), np.zeros(work.size)))[graph.nodes]
    parts = _parts(schedule, weights)
    *played, left = _native.play(graph, times, work.size, schedule.num_stages, per_stage, parts)
    start, end, filled, before = (each.reshape(work.shape) for each in played)
    return Timeline(schedule=schedule, start=start, end=end, filled=filled, left=left), before


def _parts(schedule: Schedule, weights: WeightGradients) -> Parts:
    held, count = weights.held.sum(axis=2), schedule.num_micro_batches
    passes = held.size
    is_part = np.arange(weights.times.shape[2]) < weights.counts[:, :, None, None]
    is_part = np.broadcast_to(is_part, (*held.shape, is_part.shape[-1]))
    steps = np.stack((np.zeros(held.shape), held))
    return Parts(
        bounds=np.concatenate((np.zeros(passes + 1, np.int64), np.repeat(weights.counts, count).cumsum())),
        times=weights.times.swapaxes(2, 3)[is_part],
        held=weights.held.swapaxes(2, 3)[is_part],
        needs=(_needs(schedule, steps) if held.any() else steps).ravel(),
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
