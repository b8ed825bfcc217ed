"""Multi-latent attention, and a variant that exchanges latents, not K and V.

Shapes: s local rows, T rows of this rank where tensor-parallel ranks divide the s rows, P rows visible to local
queries, H heads of this rank, D values of a query or key (the last E of them rotated), Dv values of a value, R values
of a latent.
"""

from functools import partial
from typing import Any

import torch
from megatron.core.models.common.embeddings import apply_rotary_pos_emb
from megatron.core.tensor_parallel import CheckpointWithoutOutput, mappings
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from torch.nn.functional import pad

from megatron_wlb.adapter.layers.attention import WlbCoreAttention
from megatron_wlb.adapter.layers.kind import Kind
from megatron_wlb.adapter.layers.norm import TorchNorm
from megatron_wlb.adapter.upstream.versions import upstream
from megatron_wlb.describe.megatron import row_multiple
from megatron_wlb.runtime.all_to_all import exchange_rows
from megatron_wlb.runtime.attention import AttentionOptions, attention_to_keys
from megatron_wlb.runtime.backends.protocol import owned, side_by_side
from megatron_wlb.runtime.metadata import ShardMetadata


class WlbLatentAttention(MLASelfAttention):  # type: ignore[misc]
    """Upstream's attention, with TP ranks summing gradients of the shared key part."""

    def _qkv_down_projection(self, hidden_states: Any) -> Any:
        """Return latents divided by rows over tensor-parallel ranks.

        Upstream's local layers divide latents by columns, and gather them without summing their gradient.
        """
        q, kv = super()._qkv_down_projection(hidden_states)
        if kv.shape[-1] != self.config.kv_lora_rank + self.config.qk_pos_emb_head_dim:
            kv = mappings.gather_from_tensor_model_parallel_region(kv, group=self.tp_group)
            kv = mappings.scatter_to_sequence_parallel_region(kv, group=self.tp_group)
        return q, kv


class WlbLatentCore(WlbCoreAttention):
    """Core attention to keys that latents were expanded to: `key` is the `kv` of `attention_to_keys`."""

    def _attend(self, query: Any, key: Any, value: Any, metadata: ShardMetadata, sink: Any) -> torch.Tensor:
        return attention_to_keys(query, key, metadata, self.options, sink)


class WlbLatentExchange(WlbLatentAttention):
    """Exchanges latents instead of K and V, and expands them on the receiving rank.

    A rank receives the latents, and the key part that heads share, of all rows visible to its queries. Backward expands
    them again through upstream's recomputation of `mla_up_proj`, unless the whole layer is recomputed.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._rotary = upstream().rotary
        self._queries_again: bool = self.recompute_up_proj
        self.recompute_up_proj: bool = self._queries_again or self.config.recompute_granularity != "full"
        self._row_multiple = self.tp_group.size() * row_multiple(
            self.config.fp8, self.config.fp8_recipe, self.config.fp4
        )

    def get_query_key_value_tensors(
        self,
        hidden_states: Any,
        key_value_states: Any = None,
        position_ids: Any = None,
        packed_seq_params: Any = None,
        **unused: Any,
    ) -> Any:
        """Return queries [s, H, D], all K and V `side_by_side`, None, both latents."""
        positions = self.rotary_pos_emb.get_rotary_seq_len(None, None, hidden_states, self.config, packed_seq_params)
        angles = self.rotary_pos_emb(positions)
        angles, magnitude = angles if isinstance(angles, tuple) else (angles, 1.0)  # YaRN has both
        given = {"config": self.config, "mscale": magnitude, "cp_group": self.pg_collection.cp}
        rotated = partial(apply_rotary_pos_emb, freqs=angles, **self._rotary, **given)
        q, kv = (x.squeeze(1) for x in self._qkv_down_projection(hidden_states))
        latents, shared = kv.split((self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim), dim=-1)
        if self.config.q_lora_rank is not None:
            q = self.q_layernorm(q)
        latents = self.kv_layernorm(latents)
        keys = self._exchanged(latents, shared, rotated, packed_seq_params.wlb)

        def expanded(q: Any, *keys: Any) -> tuple[Any, Any]:
            return self._queries(q, rotated), self._keys_and_values(*keys)

        if not self.recompute_up_proj:
            return *expanded(q, *keys), None, q, latents
        self.qkv_up_checkpoint = CheckpointWithoutOutput(fp8=self.config.fp8 or self.config.fp4)
        if self._queries_again:
            return *self.qkv_up_checkpoint.checkpoint(expanded, q, *keys), None, q, latents
        kv = self.qkv_up_checkpoint.checkpoint(self._keys_and_values, *keys)
        return self._queries(q, rotated), kv, None, q, latents

    def _exchanged(self, latents: Any, shared: Any, rotated: Any, metadata: Any) -> tuple[Any, Any]:
        """Return latents [P', R] and shared key parts [P, E] of all keys, from own rows' [T, R] and [T, E].

        Rows of latents are divided over tensor-parallel ranks; P' is P padded for them. Each of these ranks sends its
        columns. It has the whole gradient of a latent, but its own heads' gradient of the shared part, which is summed.
        """
        group, sizes = self.tp_group, (latents.shape[-1], shared.shape[-1])
        own = torch.cat((latents, shared), dim=-1)
        own = mappings.gather_from_sequence_parallel_region(own, tensor_parallel_output_grad=False, group=group)
        latents, shared = own.split(sizes, dim=-1)
        own = torch.cat((latents, rotated(shared[:, None])[:, 0]), dim=-1)
        own = mappings.scatter_to_tensor_model_parallel_region(pad(own, (0, -sum(sizes) % group.size())), group=group)
        rows = exchange_rows(own, metadata, self.pg_collection.cp)
        rows = mappings.gather_from_tensor_model_parallel_region(rows, group=group)
        latents, shared = rows[:, : sum(sizes)].split(sizes, dim=-1)
        latents = pad(latents, (0, 0, 0, -len(latents) % self._row_multiple))
        latents = mappings.scatter_to_sequence_parallel_region(latents, group=group)
        return owned(latents), mappings.copy_to_tensor_model_parallel_region(owned(shared), group=group)

    def _queries(self, q: Any, rotated: Any) -> Any:
        """q [T, latent or hidden size] -> queries [s, H, D]."""
        project = self.linear_q_proj if self.config.q_lora_rank is None else self.linear_q_up_proj
        q, _ = project(q)
        q = q.view(len(q), -1, self.q_head_dim)
        plain, turned = q.split((self.config.qk_head_dim, self.config.qk_pos_emb_head_dim), dim=-1)
        return torch.cat((plain, rotated(turned)), dim=-1)

    def _keys_and_values(self, latents: Any, shared: Any) -> Any:
        """Result of `_exchanged` -> K [P, H, D] and V [P, H, Dv], `side_by_side`."""
        kv, _ = self.linear_kv_up_proj(latents)
        kv = kv[: len(shared)].view(len(shared), -1, self.config.qk_head_dim + self.config.v_head_dim)
        keys, values = kv.split((self.config.qk_head_dim, self.config.v_head_dim), dim=-1)
        return side_by_side(torch.cat((keys, shared[:, None].expand(-1, kv.shape[1], -1)), dim=-1), values)


CLASSES = MLASelfAttention, WlbLatentAttention, WlbLatentExchange
"""Attention of the spec of a layer that is adapted."""


class _LatentAttention(Kind):
    def rotary(self, module: Any) -> list[Any]:
        return [module.rotary_pos_emb] if isinstance(module, MLASelfAttention) else []

    def adapt(self, layer: Any, config: Any, options: AttentionOptions) -> bool:
        if not config.multi_latent_attention:
            return False
        spec = layer.submodules.self_attention
        exchanged = (WlbLatentExchange, WlbLatentCore)
        spec.module, core = exchanged if options.exchanged_before else (WlbLatentAttention, WlbCoreAttention)
        spec.submodules.core_attention = ModuleSpec(module=core, params={"options": options})
        if config.transformer_impl == "local" and config.qk_layernorm:
            spec.submodules.q_layernorm = spec.submodules.kv_layernorm = TorchNorm
        return True


KIND = _LatentAttention()
