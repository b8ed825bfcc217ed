"""Self-attention over context-parallel shards."""

import weakref
from argparse import Namespace
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from megatron.core.utils import divide

from megatron_wlb.adapter.layers.kind import Kind
from megatron_wlb.adapter.layers.norm import TorchNorm
from megatron_wlb.runtime.attention import AttentionOptions, context_parallel_attention
from megatron_wlb.runtime.backends.protocol import owned
from megatron_wlb.runtime.metadata import ShardMetadata

_CORES = "DotProductAttention", "TEDotProductAttention"


def keys_before(args: Any) -> list[int | None]:
    """Return the keys that a query sees before its own in every layer, by arguments; None: all of its document."""
    return [_keys_before(args, layer) for layer in range(1, args.num_layers + 1)]


def _keys_before(given: Any, layer: int) -> int | None:
    window = given.window_size
    has = is_layer_window_attention(window, given.window_attn_skip_freq, layer)
    return window[0] if has and window[0] >= 0 else None


def attended_squares(args: Namespace, lengths: np.ndarray) -> float:
    """Return twice the token pairs of attention, averaged over all layers."""
    exact = lengths.astype(np.float64)
    squares, near = (exact**2).sum(), [keys for keys in keys_before(args) if keys is not None]
    if near:
        beyond = np.maximum(exact - (near[0] + 1), 0)
        squares -= len(near) / args.num_layers * (beyond**2).sum()
    return float(squares)


class WlbCoreAttention(MegatronModule):
    """Core attention over context-parallel shards, with upstream's signature."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        options: AttentionOptions,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        **unused: Any,
    ) -> None:
        super().__init__(config=config)
        if attention_type != "self":
            raise ValueError(f"--wlb supports self attention, not {attention_type} attention; leave --wlb out")
        self.options = replace(options, scale=softmax_scale, window=_keys_before(config, layer_number))
        self._cp_group, self._tp_group = pg_collection.cp, pg_collection.tp
        self._add_sink()
        self.last: weakref.ref[Any] | None = None
        """Graph node of the last call; None if it has none and will be recomputed."""

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **unused: Any,
    ) -> torch.Tensor:
        """query [s, 1, Hq, D], key [s, 1, Hkv, D], value [s, 1, Hkv, Dv] -> [s, 1, Hq * Dv].

        Some layers omit the 1.
        """
        metadata = getattr(packed_seq_params, "wlb", None)
        if metadata is None:
            raise ValueError(
                "this model was built with --wlb and needs its batches; the batch carries no shard, train by pretrain()"
                " or leave --wlb out"
            )
        sink = self.softmax_offset
        if sink is None and self.config.softmax_type == "off-by-one":
            sink = query.new_zeros(query.shape[-2])
        out = self._attend(query, key, value, metadata, sink)
        return out.reshape(out.shape[0], 1, -1)

    def _attend(self, query: Any, key: Any, value: Any, metadata: ShardMetadata, sink: Any) -> torch.Tensor:
        q, k, v = (x.flatten(0, -3) for x in (query, key, value))
        out = context_parallel_attention(q, k, v, metadata, self._cp_group, self.options, sink)
        self.last = None if out.grad_fn is None else weakref.ref(out.grad_fn)
        return out

    def _add_sink(self) -> None:
        """Register sink scores of this rank's heads, under upstream's name."""
        self.register_parameter("softmax_offset", None)
        if self.config.softmax_type != "learnable":
            return
        heads = divide(self.config.num_attention_heads, self._tp_group.size())
        device = "cpu" if self.config.use_cpu_initialization else torch.cuda.current_device()
        self.softmax_offset = torch.nn.Parameter(torch.empty(heads, dtype=self.config.params_dtype, device=device))
        set_tensor_model_parallel_attributes(self.softmax_offset, is_parallel=True, dim=0, stride=1)
        if self.config.perform_initialization:
            self.config.init_method(self.softmax_offset)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> Any:
        """Return the sharded sinks, as upstream's core attention does."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self._tp_group,
            dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )


class WlbSelfAttention(SelfAttention):  # type: ignore[misc]
    """Upstream's self-attention; recomputation saves Q, K and V, not the projection."""

    def _checkpointed_attention_forward(self, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        return super()._checkpointed_attention_forward(owned(query), owned(key), owned(value), *args, **kwargs)


def foreign_core(layer: Any) -> str:
    """Return the name of a core attention in the spec of a layer that is neither Megatron's nor ours, "" if it is."""
    core = layer.submodules.self_attention.submodules.core_attention
    core = getattr(core, "func", getattr(core, "module", core))
    name = getattr(core, "__name__", repr(core))
    package = getattr(core, "__module__", "").partition(".")[0]
    # Without TransformerEngine, megatron-core has mocks in the place of its classes.
    known = package in ("megatron_wlb", "unittest") or (package == "megatron" and name in _CORES)
    return "" if known else name


class _Attention(Kind):
    stack_layer = "attention_layer"

    def adapt(self, layer: Any, config: Any, options: AttentionOptions) -> bool:
        spec = layer.submodules.self_attention
        spec.submodules.core_attention = partial(WlbCoreAttention, options=options)
        if not issubclass(spec.module, WlbSelfAttention):
            spec.module = type(spec.module.__name__, (WlbSelfAttention, spec.module), {})
        if config.transformer_impl == "local" and config.qk_layernorm:
            spec.submodules.q_layernorm = spec.submodules.k_layernorm = TorchNorm
        return True


KIND = _Attention()
