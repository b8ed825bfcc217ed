"""Common parts of layers whose state runs along a document: gated delta nets and Mamba layers."""

from typing import Any, ClassVar

import numpy as np

from megatron_wlb.job import Job
from megatron_wlb.layers.part import (
    Part,
    Rules,
    Tensor,
    ends_documents,
    layer_input_bytes,
    mask_bytes,
    network_of_ranks,
)
from megatron_wlb.model import Mixer


def has_linear_layers(a: Any) -> bool:
    """Whether layers have states that run along documents: gated delta nets, or layers of a hybrid model."""
    return any(getattr(a, name, None) for name in ("experimental_attention_variant", "hybrid_layer_pattern"))


def ranks_of_heads(a: Any) -> int:
    """Return ranks over which the heads of a layer are divided."""
    return int((a.tensor_model_parallel_size or 1) * (a.context_parallel_size or 1))


class LinearLayer(Part):
    taken = "scans run at the rate of memory, and no computation overlaps the exchange of their heads"
    refused: ClassVar[Rules] = {
        "FP8 and FP4 are untested in gated delta nets and Mamba layers; leave --fp8-format or --fp4-format out": (
            lambda a: has_linear_layers(a) and (a.fp8 or a.fp4)
        ),
    }
    differs: ClassVar[Rules] = {
        "states of linear layers end with the document, and without --wlb they do not here": lambda a: (
            has_linear_layers(a) and not ends_documents(a)
        ),
    }

    def names_products(self, a: Any) -> bool:
        return not has_linear_layers(a)

    def is_all_matrices(self, a: Any) -> bool:
        return not has_linear_layers(a)

    def mixer(self, job: Job) -> Mixer:
        found = job.model.mixer_of(self.letters)
        assert found is not None
        return found

    def kept(self, job: Job) -> dict[str, Tensor]:
        mixer, w = self.mixer(job), job.bytes_per_value / job.parallel.tp
        return {
            "norm": Tensor(2 * layer_input_bytes(job)),
            "dropout": Tensor(mask_bytes(job)),
            "kernels": Tensor(w * mixer.kept),
            "output": Tensor(w * mixer.inner),
        }

    # A convolution, a scan and a gated norm. Assumed: the scan takes as long as its memory.
    kernels = (5, 8)

    def values(self, job: Job) -> int:
        return 3 * (self.mixer(job).projected + self.mixer(job).inner)

    def moving(self, job: Job, tokens: np.ndarray) -> np.ndarray:
        """Return the time of the two all-to-alls by which rows go to the ranks of their heads and back, us.

        They are exposed. Rows are equally many on all context-parallel ranks.
        """
        parallel, mixer = job.parallel, self.mixer(job)
        if parallel.cp == 1:
            return np.zeros_like(tokens)
        latency, byte = network_of_ranks(job)
        moved = (mixer.projected + mixer.inner) * job.bytes_per_value / parallel.tp * (parallel.cp - 1) / parallel.cp
        return 2 * latency + tokens * moved * byte
