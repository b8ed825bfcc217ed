"""Multi-latent attention: Q, K and V expanded from latents, which context-parallel ranks may exchange instead."""

from typing import Any, ClassVar

from megatron_wlb.job import Job
from megatron_wlb.layers.attention import Attention
from megatron_wlb.layers.part import Again, Rules, Tensor
from megatron_wlb.model import FULL, latent_sizes

_SIZES = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")


class LatentAttention(Attention):
    refused: ClassVar[Rules] = {
        "--hybrid-layer-pattern with --multi-latent-attention has not been tried; leave one of them out": lambda a: (
            a.hybrid_layer_pattern and a.multi_latent_attention
        ),
        (
            "--position-embedding-type yarn with --multi-latent-attention, whose layers rotate by themselves; give "
            "rope, and --rope-type yarn"
        ): lambda a: a.multi_latent_attention and a.position_embedding_type == "yarn",
        (
            "--multi-latent-attention with --tensor-model-parallel-size over 1 and without --sequence-parallel has "
            "gradients of latents that upstream does not sum over ranks, or twice; give --sequence-parallel"
        ): lambda a: a.multi_latent_attention and a.tensor_model_parallel_size > 1 and not a.sequence_parallel,
    }

    def sizes(self, a: Any, sizes: dict[str, Any]) -> dict[str, Any]:
        return latent_sizes(**{name: getattr(a, name) for name in _SIZES}) if a.multi_latent_attention else {}

    def kept(self, job: Job) -> dict[str, Tensor]:
        model, p, w = job.model, job.parallel, job.bytes_per_value
        found, norms = self.common(job), 2 if model.qk_layernorm else 1
        seen = p.cp if job.cp_exchange == "latents" else 1
        # Where latents follow, the norm is no part of a linear layer.
        found["norm"] = found["norm"]._replace(modules=("layernorm",))
        found["q"] = found["q"]._replace(modules=("mla_up_proj",))
        # Upstream recomputes Q, K and V of latents alike. `--wlb` and a ring keep K and V as they joined them.
        joined = p.cp > 1 or job.cp_exchange != "ring"
        kv_bytes = 0 if job.expands_again else seen * found["kv"].bytes
        found["kv"] = Tensor(kv_bytes, () if joined else ("mla_up_proj",))
        # Latents before and after their norms, of all keys if they are exchanged; and the layer's sines and cosines. If
        # latents are expanded again, the key part that heads share is kept instead of the norms' outputs.
        kv = (1 if job.expands_again else norms) * seen * model.kv_lora_rank
        rotated = (4 + (p.cp if job.expands_again else 0)) * model.qk_pos_emb_head_dim
        return found | {"latents": Tensor(w * ((norms * model.q_lora_rank + kv) / p.sequence_ranks + rotated))}

    def values(self, job: Job) -> int:
        return super().values(job) + 2 * job.model.latent_size  # their norms

    def again(self, job: Job, dropped: set[str]) -> Again:
        found = Again()
        if "layernorm" in dropped:
            found = found._replace(values=2.0 * job.model.hidden_size, kernels=1)
        if "mla_up_proj" in dropped:
            matrices, values = tuple(job.model.part(FULL)[1:-1]), found.values + self.values(job)
            found = Again(matrices=matrices, values=values, kernels=found.kernels + 2)
        return found
