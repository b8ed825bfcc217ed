"""Multi-latent attention: Q, K and V expanded from latents, which context-parallel ranks may exchange instead."""

import math
from typing import Any, ClassVar

import numpy as np

from megatron_wlb.hardware.network import Group
from megatron_wlb.job import FP32, Job
from megatron_wlb.layers.attention import Attention, ExchangeModel
from megatron_wlb.layers.part import Adaptation, Again, Rules, Tensor, network_of_ranks, rates
from megatron_wlb.model import FULL, latent_sizes

_SIZES = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")


class LatentAttention(Attention):
    exchanges = ("shared", "latents")
    refused: ClassVar[Rules] = {
        "--hybrid-layer-pattern with --multi-latent-attention is untested; leave one of them out": lambda a: (
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

    adapted = (
        Adaptation(
            lambda a, given: a.multi_latent_attention and a.apply_rope_fusion,
            {"apply_rope_fusion": False},
            "the fused kernel of latent attention counts rows of whole documents",
        ),
    )

    def sizes(self, a: Any, sizes: dict[str, Any]) -> dict[str, Any]:
        return latent_sizes(**{name: getattr(a, name) for name in _SIZES}) if a.multi_latent_attention else {}

    def names_products(self, a: Any) -> bool:
        return not a.multi_latent_attention

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
        return super().values(job) + 2 * sum(job.model.compressed)  # their norms

    def again(self, job: Job, dropped: set[str]) -> Again:
        found = Again()
        if "layernorm" in dropped:
            found = found._replace(values=2.0 * job.model.hidden_size, kernels=1)
        if "mla_up_proj" in dropped:
            matrices, values = tuple(job.model.part(FULL)[1:-1]), found.values + self.values(job)
            found = Again(matrices=matrices, values=values, kernels=found.kernels + 2)
        return found

    def exchange(self, job: Job) -> ExchangeModel:
        """Return the exchange of latents, of which each tensor-parallel rank sends a part.

        These ranks gather parts, and rows to expand; in backward they scatter and gather gradients of latents, and sum
        gradients of the key part that heads share.
        """
        if job.cp_exchange != "latents":
            return super().exchange(job)
        latency, byte = network_of_ranks(job)
        latent, shared = job.model.kv_lora_rank, job.model.qk_pos_emb_head_dim
        network, tensor = job.profile.network, Group(size=job.parallel.tp, stride=1)

        def time(collective: str, values: int) -> float:
            moved = np.array([0, values * job.bytes_per_value])
            return float(np.diff(network.collective(collective, moved, tensor))[0])

        moved = (latent + shared) * job.bytes_per_value * byte / job.parallel.tp
        forward, backward = self._expansion(job)
        gathered = time("all_gather", latent)
        again = forward + gathered if job.expands_again else 0.0
        # Latents need one collective more in forward and three in backward: two on average.
        return ExchangeModel(
            latency=latency + 2 * float(network.collective("all_gather", 0, tensor)),
            arrive=moved + time("all_gather", latent + shared) + gathered + forward,
            leave=moved + again + backward + time("reduce_scatter", latent) + gathered + time("all_reduce", shared),
            prefetch=0.0,
        )

    @staticmethod
    def _expansion(job: Job) -> tuple[float, float]:
        """Return us to expand K and V of a row from latents, forward and backward."""
        flops = 2 * math.prod(job.model.projections[2]) / job.parallel.tp / 1e6
        forward, backward = rates(job)
        return flops / forward, 2 * flops / backward

    def expands_us(self, job: Job) -> float:
        return self._expansion(job)[0] if job.expands_again else 0.0

    def rotary_bytes(self, job: Job) -> int:
        return FP32 * job.model.qk_pos_emb_head_dim

    def looked_up_bytes(self, job: Job) -> int:
        return 0  # sines and cosines are a layer's own
