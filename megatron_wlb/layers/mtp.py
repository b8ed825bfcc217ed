"""Multi-token prediction: a layer after the decoder, on the last stage, for every token beyond the next (a depth).

It embeds the tokens so far ahead, joins them with the hidden states before it by a matrix, and runs the output layer.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from megatron_wlb.job import Job
from megatron_wlb.layers.part import Part, Rules, Tensor, layer_input_bytes


class Mtp(Part):
    """All of a depth but its layer and the output layer."""

    letters = ""
    modules: ClassVar[Mapping[str, float]] = {}
    kernels = (0, 0)
    refused: ClassVar[Rules] = {
        "--mtp-num-layers with --experimental-attention-variant or --hybrid-layer-pattern fails in upstream, or is "
        "untested; leave it out": lambda a: (
            a.mtp_num_layers and (a.experimental_attention_variant or a.hybrid_layer_pattern)
        ),
    }

    def sizes(self, a: Any, sizes: dict[str, Any]) -> dict[str, Any]:
        return {} if a.mtp_num_layers is None else {"mtp_num_layers": a.mtp_num_layers}

    def weights(self, job: Job) -> int:
        """Return the weights of all depths on the last stage, which embeds, too; with one stage it does anyway."""
        model = job.model
        embeds = model.depths > 0 and job.parallel.pp > 1
        return model.depths * model.joining.weights + embeds * model.vocabulary_weights

    def kept(self, job: Job) -> dict[str, Tensor]:
        # Inputs of three norms, and the outputs of two of them joined.
        return {"norms": Tensor(5 * layer_input_bytes(job))}

    def gathered_us(self, gather: np.ndarray, scatter: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the time in which tensor-parallel ranks gather and scatter rows of a depth, forward and backward, us.

        Forward scatters its embedding, and gathers both hidden states that it joins, and their sum. `gather`,
        `scatter`: of the rows of a hidden state.
        """
        return 3 * gather + scatter, 2 * gather + 2 * scatter
