"""Timeline of a rank's passes, and of weight gradients if it defers them."""

from collections.abc import Sequence

import numpy as np

from megatron_wlb.job import Job
from megatron_wlb.pipeline.timeline import Timeline, WeightGradients, run, run_deferred
from megatron_wlb.simulate import memory
from megatron_wlb.simulate.passes import Passes, deferrable_weights, pass_times, untimed
from megatron_wlb.types import ShardPlan, document_work


def undeferrable(job: Job) -> str:
    """Why a job cannot defer weight gradients; "" if it can."""
    if job.parallel.pp == 1:
        return "a single pipeline stage is never idle"
    if job.model.mtp_num_layers:
        return "weight gradients of layers for multi-token prediction cannot be deferred"
    try:
        job.layers()
    except ValueError as error:
        return str(error)
    return ""


def part_counts(job: Job) -> np.ndarray:
    """Return deferrable parts of virtual stages, output layer too: int64 [pp, vpp]."""
    counts = job.layers()
    counts[-1, -1] += 1
    return counts


def timeline_of(job: Job, passes: Passes) -> Timeline:
    """Return the timeline of a data-parallel rank's passes, in us."""
    if job.defer_weight_gradients:
        return _deferred(job, passes)[0]
    return run(job.schedule(len(passes.rows)), passes.forward, passes.backward, passes.transfer)


def weight_gradients_before(job: Job, shards: Sequence[ShardPlan]) -> np.ndarray:
    """Return parts (layers, output layer) that ran before each pass: int64 [2, stages, chunks, M].

    Placed by predicted times, or by work if the job cannot be timed.
    """
    if untimed(job):
        # A layer's forward takes the work of its documents. The part linear in tokens is the products with weights.
        tokens = np.array([plan.lengths.sum() for plan in shards])
        work = np.array([document_work(plan.lengths, job.crossover_tokens).sum() for plan in shards])
        layer = tokens * float(job.crossover_tokens)
        output = layer * (job.model.vocabulary_weights / job.model.layer_weights)
        forward = job.layers()[:, :, None] * work.astype(np.float64)
        forward[-1, -1] += output
        weights = _weight_gradients(
            job, tokens / job.parallel.cp, layer * (deferrable_weights(job) / job.model.layer_weights), output
        )
        return run_deferred(job.schedule(len(shards)), forward, 2 * forward, 0.0, weights)[1]
    return _deferred(job, pass_times(job, shards))[1]


def _deferred(job: Job, passes: Passes) -> tuple[Timeline, np.ndarray]:
    weights = _weight_gradients(job, passes.rows, *passes.weights)
    schedule = job.schedule(len(passes.rows))
    return run_deferred(schedule, passes.forward, passes.backward, passes.transfer, weights)


def _weight_gradients(job: Job, rows: np.ndarray, layer: np.ndarray, output: np.ndarray) -> WeightGradients:
    counts = part_counts(job)
    held_of_layer, held_of_output = memory.weight_gradient_bytes(job)
    parts = (*counts.shape, int(counts.max()), 1)
    is_part = np.arange(parts[2])[:, None] < counts[:, :, None, None]
    is_output = np.zeros(parts, bool)
    is_output[-1, -1, 0] = True
    return WeightGradients(
        counts=counts,
        times=is_part * np.where(is_output, output, layer),
        held=is_part * np.where(is_output, held_of_output, held_of_layer) * rows,
        limit=memory.deferral_limits(job, rows),
    )
