"""Self-attention with Q, K and V of the hidden state, to all of a document or in a window."""

from megatron_wlb.job import Job
from megatron_wlb.layers.part import Part, Tensor, layer_input_bytes, mask_bytes
from megatron_wlb.model import FULL, WINDOWED


class Attention(Part):
    letters = FULL + WINDOWED
    modules = ("attn",)
    kernels = (4, 6)

    def kept(self, job: Job) -> dict[str, Tensor]:
        model, tp = job.model, job.parallel.tp
        normed = model.query_size / tp + model.heads_per_rank(tp)[1] * model.kv_channels
        return self.common(job) | {"qk norms": Tensor(model.qk_layernorm * job.bytes_per_value * normed)}

    def common(self, job: Job) -> dict[str, Tensor]:
        """Return what attention keeps however it makes Q, K and V."""
        model, tp, w = job.model, job.parallel.tp, job.bytes_per_value
        return {
            "input": Tensor(layer_input_bytes(job)),
            "norm": Tensor(layer_input_bytes(job)),
            "dropout": Tensor(mask_bytes(job)),
            "q": Tensor(w * model.query_size / tp),
            "kv": Tensor(w * model.kv_values_per_rank(tp)),
            "out": Tensor(w * model.output_size / tp),
            "log-sum-exps": Tensor(4 * model.num_attention_heads / tp, ("core_attn",)),
        }

    def values(self, job: Job) -> int:
        # Rotary embedding.
        return 2 * (job.model.query_size + job.model.key_size)
