"""When the passes of a pipeline step begin and end: the longest path through their graph, in one sweep."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megatron_wlb import _native
from megatron_wlb.pipeline.graph import graph_of, passes_of
from megatron_wlb.pipeline.play import Parts, play
from megatron_wlb.pipeline.schedule import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Result of `run`. Times are in the unit of its arguments, from 0, the beginning of the step.

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


def run(
    schedule: Schedule,
    forward: np.ndarray,
    backward: np.ndarray | None = None,
    transfer: np.ndarray | float = 0.0,
) -> Timeline:
    """Time the passes of a pipeline step, as `play` does.

    Args:
        schedule: of the pipeline.
        forward: float [stages, chunks, micro-batches], or what broadcasts to it: time of every forward pass.
        backward: the same of backward passes; None if the schedule is forward only.
        transfer: time to send the output (or its gradient) of each micro-batch to another stage, float
            [micro-batches] or one for all.
    """
    if schedule.forward_only != (backward is None):
        state = "missing" if backward is None else "there"
        raise ValueError(
            f"forward_only is {schedule.forward_only} and backward times are {state}; give them to a schedule that is "
            "not forward only, and only to such a one"
        )
    return with_parts(schedule, forward, backward, transfer, None)[0]


def with_parts(
    schedule: Schedule,
    forward: np.ndarray,
    backward: np.ndarray | None,
    transfer: np.ndarray | float,
    parts: Parts | None,
) -> tuple[Timeline, np.ndarray]:
    """`run` with parts of passes deferred, and how many of its stage have run before each pass, shaped as `start`."""
    shape = (schedule.num_stages, schedule.num_chunks, schedule.num_micro_batches)
    passes = [np.broadcast_to(forward, shape)] + ([] if backward is None else [np.broadcast_to(backward, shape)])
    work = np.stack(passes).astype(np.float64)
    moves = np.broadcast_to(np.asarray(transfer, np.float64), work.shape)
    times = np.concatenate((work.ravel(), moves.ravel(), np.zeros(work.size)))[graph_of(schedule).nodes]
    played = play(schedule, times, parts or Parts.none(work.size, schedule.num_stages))
    start, end, filled, before = (each.reshape(work.shape) for each in played[:4])
    return Timeline(schedule=schedule, start=start, end=end, filled=filled, left=played.left), before


def makespans(schedule: Schedule, work: np.ndarray) -> np.ndarray:
    """When 1F1B ends for every order of micro-batches, int64 [K], in units of the forward of one unit of work.

    On every stage a micro-batch of work w needs w forward and 2w backward, and nothing between stages.

    Args:
        schedule: of the pipeline.
        work: of the micro-batches in K orders, int64 [K, M], not negative; all of it on all stages must fit 64 bits.
    """
    graph = passes_of(schedule)
    # Doubles, which processors compare two at a time, where they are as exact.
    exact = int(work.max()) <= (1 << 53) // (2 * len(graph.time))
    work = work.astype(np.float64 if exact else np.int64, order="C")
    ends = _native.makespans(graph.first, graph.second, graph.end, graph.time, graph.num_slots, work)
    return ends.astype(np.int64)


class CostWeights(NamedTuple):
    """About when 1F1B ends: so much for all work of a rank's micro-batches, and so much for that of the largest."""

    total: int
    largest: int
    unit: int
    """For work that is spread evenly and waits for nothing."""


def cost_weights(schedule: Schedule) -> CostWeights:
    """Weights of a data-parallel rank with M micro-batches in its pipeline of P stages with V chunks each.

    Every stage computes all of them, and waits in warm-up and cool-down for the others. With one chunk a stage that is
    P - 1 times the largest. Interleaved, P micro-batches go round through all chunks, and in each of V rounds a stage
    waits until the largest has been through all P stages, beyond what the others of its round take; these are taken to
    be alike. Warm-up and cool-down are then P - 1 times the mean. Longer groups (`Schedule.group`) shorten these
    waits; packing by less was tried, which made steps up to 1 % longer.
    """
    waits, num_chunks, num_micro_batches = schedule.num_stages - 1, schedule.num_chunks, schedule.num_micro_batches
    if num_chunks == 1:
        return CostWeights(1, waits, 1)
    scale = 8  # what is less than an eighth is left out
    largest = scale * num_chunks * waits * num_micro_batches // (num_micro_batches - 1)
    total = scale * num_chunks - (largest - scale * waits) // num_micro_batches
    return CostWeights(total, largest, scale * num_chunks)
