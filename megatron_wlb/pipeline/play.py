"""A pipeline step played through, node by node of its graph, with deferred parts in the place of waiting."""

from typing import NamedTuple

import numpy as np

from megatron_wlb import _native
from megatron_wlb.pipeline.graph import graph_of
from megatron_wlb.pipeline.schedule import Schedule


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
        """Nothing is deferred."""
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
    waits for it, and those that must for it to have memory. O(nodes + parts): 2 ms for 65,536 passes.

    Args:
        schedule: of the pipeline.
        times: of the nodes of its graph, float64 [n].
        parts: what its passes defer.
    """
    graph, num_stages = graph_of(schedule), schedule.num_stages
    passes, per_stage = graph.num_passes, schedule.num_chunks * schedule.num_micro_batches
    return Played(*_native.play(graph, times, passes, num_stages, per_stage, parts))
