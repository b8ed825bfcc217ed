"""A dense MLP."""

from collections.abc import Mapping
from typing import ClassVar

from megatron_wlb.job import Job
from megatron_wlb.layers.part import LAUNCHES_US, Again, Part, Tensor, layer_input_bytes, mask_bytes
from megatron_wlb.model import MLP


class Mlp(Part):
    letters = MLP
    modules: ClassVar[Mapping[str, float]] = {"mlp": LAUNCHES_US}
    kernels = (3, 4)

    def kept(self, job: Job) -> dict[str, Tensor]:
        # The norm before is part of the MLP; no other part of it can be recomputed alone.
        values = job.bytes_per_value * job.model.ffn_size_of(MLP) / job.parallel.tp
        return {
            "input": Tensor(layer_input_bytes(job)),
            "dropout": Tensor(mask_bytes(job)),
            "norm": Tensor(layer_input_bytes(job), ("mlp",)),
            "before activation": Tensor((2 if job.model.gated_linear_unit else 1) * values, ("mlp",)),
            "activation": Tensor(values, ("mlp",)),
        }

    def values(self, job: Job) -> int:
        return job.model.ffn_size_of(self.letters) * (3 if job.model.gated_linear_unit else 2)

    def again(self, job: Job, dropped: set[str]) -> Again:
        if "mlp" not in dropped:
            return Again()
        values = 2.0 * job.model.hidden_size + self.values(job)
        return Again(matrices=tuple(job.model.part(MLP)), values=values, kernels=2)
