"""Plain-4D: Megatron's own micro-batches, one for every sample, in its order."""

from dataclasses import dataclass, replace

import numpy as np

from megatron_wlb.documents import Draw, PackedBatch, Policy
from megatron_wlb.job import Job, Packing
from megatron_wlb.layers import attention_of
from megatron_wlb.pipeline.schedule import nearest_counts


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronPacking(Packing):
    name = "megatron"
    help = "Megatron's own windows in its order, one a micro-batch."
    keeps_order = True
    fixed_length = True

    def policy(self, job: Job) -> "MegatronPolicy":
        return MegatronPolicy(job)


def without_wlb(job: Job, *, cp_sharding: str = "per-document") -> Job:
    """Return the job as Megatron alone trains it: a micro-batch for every window, as packed.

    Context-parallel ranks exchange K and V by a ring, or gather them where upstream's ring cannot serve the model.
    Virtual stages run in the job's groups, or in Megatron's default of as many as stages.
    """
    parallel, each = job.parallel, job.global_batch_size // job.parallel.dp
    group = (parallel.group_size or parallel.pp) if parallel.vpp > 1 else None
    if group and each not in nearest_counts(each, parallel.pp, group):
        group = None
    return replace(
        job.sharded(cp_sharding=cp_sharding),
        num_micro_batches=job.global_batch_size,
        max_tokens=job.context_length,
        parallel=replace(parallel, group_size=group),
        packing=MegatronPacking(),
        reorder=False,
        overlap_transfers=False,
        tp_tile_rows=0,
        cp_exchange="all" if attention_of(job.model).no_ring(job.model) else "ring",
    )


def in_samples(documents: np.ndarray, job: Job) -> PackedBatch | None:
    """Return DOCUMENT rows of a step in Megatron's order, equally many samples a micro-batch; else None."""
    each, rest = divmod(job.global_batch_size, job.num_micro_batches)
    if rest or not len(documents):
        return None
    batch = windows(documents, job, each)
    fits = batch.bounds[-1] == len(documents) and batch.sums(documents["length"]).max() <= job.max_tokens
    return batch if fits and (np.diff(batch.bounds) > 0).all() else None


def windows(documents: np.ndarray, job: Job, each: int = 1) -> PackedBatch:
    """Return DOCUMENT rows of a step in Megatron's order, `each` samples a micro-batch; without samples it is empty."""
    sample = documents["index"] // job.context_length
    first = sample[0] if len(sample) else 0
    bounds = np.searchsorted(sample, first + each * np.arange(job.num_micro_batches + 1))
    return PackedBatch(documents=documents, bounds=bounds)


class MegatronPolicy(Policy):
    """A micro-batch for each sample of the step."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def pack(self, step: int, draw: Draw) -> PackedBatch:
        """Pack step `step`; at the end of the data, the last micro-batches stay empty."""
        return windows(draw.own(), self._job)
