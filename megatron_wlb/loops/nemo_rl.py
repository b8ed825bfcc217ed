"""NeMo-RL 7ea279ab: its packer of sequences."""

import contextlib
import importlib
from typing import Any

from megatron_wlb.job import Job
from megatron_wlb.loops.patch import divided, replaced

MODULE = "nemo_rl.data.packing.algorithms"


def balanced(job: Job) -> contextlib.ExitStack:
    """Balance the batches that NeMo-RL packs (`sequence_packing`) by the job's work, in the driver's process.

    All ranks get as many micro-batches as their pipelines are predicted to need least time for, in the order of the
    plan, whatever the packing algorithm that NeMo-RL is told. The job's data-parallel ranks are NeMo-RL's. Raises
    RuntimeError if NeMo-RL's function is another.
    """

    def make(original: Any) -> Any:
        class Packer(importlib.import_module(MODULE).SequencePacker):  # type: ignore[misc]
            def _pack_implementation(self, sequence_lengths: list[int]) -> list[list[int]]:
                ranks = divided(sequence_lengths, job, self.bin_capacity, dp=self.bin_count_multiple or 1)
                # NeMo-RL deals micro-batches to ranks in turn.
                return [rows for each in zip(*ranks, strict=True) for rows in each]

        def get_packer(algorithm: Any, *args: Any, **kwargs: Any) -> Any:
            return Packer(*args, **kwargs)

        return get_packer

    parameters = "algorithm bin_capacity collect_metrics min_bin_count bin_count_multiple"
    return replaced(MODULE, "get_packer", parameters, make)
