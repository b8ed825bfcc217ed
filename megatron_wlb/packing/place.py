"""Places documents in a given number of micro-batches, for the least time of the slowest data-parallel rank.

The step's time alone decides, as 1F1B predicts it: data-parallel ranks should take equally long, and in a
pipeline the largest micro-batch should be small for the work of the step. `docs/packing.md` describes it;
`csrc/place.cpp` has it.
"""

import heapq
from typing import NamedTuple

import numpy as np

import megatron_wlb._native as _native
from megatron_wlb.documents import PackedBatch
from megatron_wlb.job import Job
from megatron_wlb.pipeline.timeline import CostWeights, cost_weights


class Sizes(NamedTuple):
    """Micro-batches to fill, and the weights in the cost of a rank."""

    num_micro_batches: int
    ranks: int
    """They run as many micro-batches each, and wait for each other."""
    total_weight: int
    """Of a rank's work."""
    largest_weight: int
    """Of the work of its largest micro-batch."""
    max_tokens: int


def sizes(job: Job, count: int, ranks: int, weights: CostWeights) -> Sizes:
    """Return the sizes of `count` micro-batches for `ranks` data-parallel ranks."""
    # Ranks that pool work wait for each other in every layer, so all micro-batches should be equal.
    waiting = ranks if job.parallel.pooling_ranks == 1 else count
    return Sizes(count, waiting, weights.total, weights.largest, job.max_tokens)


def placed(documents: np.ndarray, job: Job, count: int, ranks: int | None = None) -> PackedBatch | None:
    """Place DOCUMENT rows in `count` micro-batches, dealt to `ranks` (None: the job's); None if they do not fit.

    Longest first to the rank and micro-batch of least cost; then documents move or swap while the costliest rank gets
    cheaper. No micro-batch is empty if there are enough documents.
    """
    ranks, lengths = job.parallel.dp if ranks is None else ranks, documents["length"]
    weights = cost_weights(job.schedule(count // ranks))
    # In groups longer than the pipeline, others fill the rounds in which the largest micro-batch is on its way, so it
    # costs warm-up and cool-down alone.
    weights = weights._replace(largest=weights.unit // job.parallel.vpp * (job.parallel.pp - 1))
    given = sizes(job, count, ranks, weights)
    rows, bounds = _native.place_documents(lengths, job.work(lengths), given)
    if len(rows) < len(documents):
        return None
    rows, bounds = _filled(rows, bounds, lengths)
    dealt = np.arange(count).reshape(given.ranks, -1) if job.parallel.pooling_ranks == 1 else None
    return PackedBatch(documents=documents[rows], bounds=bounds, ranks=dealt)


def _filled(rows: np.ndarray, bounds: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return rows and bounds without empty micro-batches: each takes the shortest document of the one with most."""
    if (np.diff(bounds) > 0).all():
        return rows, bounds
    parts = np.split(rows, bounds[1:-1])
    most = [(-len(part), i) for i, part in enumerate(parts) if len(part) > 1]
    heapq.heapify(most)
    for i in [i for i, part in enumerate(parts) if not len(part)]:
        if not most:
            break
        size, k = heapq.heappop(most)
        shortest = int(lengths[parts[k]].argmin())
        parts[i], parts[k] = parts[k][shortest : shortest + 1], np.delete(parts[k], shortest)
        if size < -2:
            heapq.heappush(most, (size + 1, k))
    return np.concatenate(parts), np.cumsum([0, *map(len, parts)], dtype=np.int64)
