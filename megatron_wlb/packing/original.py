"""Plain-4D: Megatron's own micro-batches, one for every sample, in its order."""

from dataclasses import dataclass

import numpy as np

from megatron_wlb.documents import Draw, PackedBatch, Policy
from megatron_wlb.job import Job, Packing


@dataclass(frozen=True, slots=True, kw_only=True)
class OriginalPacking(Packing):
    name = "megatron"
    help = "Megatron's own windows in its order, one a micro-batch."
    keeps_order = True
    fixed_length = True

    def policy(self, job: Job) -> "OriginalPolicy":
        return OriginalPolicy(job)


class OriginalPolicy(Policy):
    """A micro-batch for each sample of the step."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def pack(self, step: int, draw: Draw) -> PackedBatch:
        """Pack step `step`; at the end of the data, the last micro-batches stay empty."""
        documents = draw.own()
        sample = documents["index"] // self._job.context_length
        first = sample[0] if len(sample) else 0
        bounds = np.searchsorted(sample, first + np.arange(self._job.num_micro_batches + 1))
        return PackedBatch(documents=documents, bounds=bounds)
