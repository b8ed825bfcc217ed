"""The model: upstream's GPT with WLB attention and rotary embeddings."""

import copy
import inspect
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm.mamba_mixer import MambaMixer
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from megatron.core.utils import divide

from megatron_wlb.adapter.errors import one_line
from megatron_wlb.adapter.latent import WlbLatentAttention, WlbLatentExchange
from megatron_wlb.adapter.linear import GatedDeltaNet, WlbGatedDeltaNet
from megatron_wlb.runtime.attention import AttentionOptions, attention_to_keys, context_parallel_attention, send_ahead
from megatron_wlb.runtime.backends.protocol import owned
from megatron_wlb.runtime.metadata import ShardMetadata


@dataclass
class WlbPackedSeqParams(PackedSeqParams):
    """Carries a micro-batch's shard through upstream's layers and recomputation."""

    wlb: ShardMetadata | None = None
    ahead: Iterator[Any] | None = None
    """Iterator of `loss.rolled`, for a stage with MTP layers."""

    def __post_init__(self) -> None:
        self.qkv_format = "sbhd"  # rows keep their order, so rotary embeddings apply row by row
        if self.wlb is not None and self.wlb.packed is not None:
            self.seq_idx = self.wlb.packed.documents()


_CORES = "DotProductAttention", "TEDotProductAttention", "WlbCoreAttention"


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
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        window = config.window_size[0] if windowed and config.window_size[0] >= 0 else None
        self.options = replace(options, scale=softmax_scale, window=window)
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

        Multi-latent attention omits the 1. If latents are exchanged, `key` is the `kv` of `attention_to_keys`.
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
        if self.options.latents:
            out = attention_to_keys(query, key, metadata, self.options, sink)
            return out.reshape(out.shape[0], 1, -1)
        assert value is not None
        q, k, v = (x.flatten(0, -3) for x in (query, key, value))
        out = context_parallel_attention(q, k, v, metadata, self._cp_group, self.options, sink)
        self.last = None if out.grad_fn is None else weakref.ref(out.grad_fn)
        return out.reshape(out.shape[0], 1, -1)

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


def configure(model: Any, *, options: AttentionOptions, context_length: int) -> Any:
    """Build WLB attention (with `options`) and positions into the config `model`."""
    if hasattr(model, "hybrid_stack_spec"):
        model.hybrid_stack_spec = _stack_spec(model.hybrid_stack_spec, model.transformer, options)
    else:
        model.transformer_layer_spec = partial(_layer_spec, given=model.transformer_layer_spec, options=options)
    model.transformer.variable_seq_lengths = True
    model.transformer.overlap_p2p_comm_warmup_flush = model.transformer.overlap_p2p_comm  # `Job.overlap_transfers`
    model.pre_wrap_hooks += [partial(_follow_positions, max_positions=context_length), _one_layout, _send_ahead]
    return model


def _layer_spec(config: Any, vp_stage: int | None = None, *, given: Any, options: AttentionOptions) -> Any:
    """Return the spec of --spec (`given`) or upstream's; core attention and norms of local layers are replaced."""
    if given is None:
        from megatron.training.models.gpt import default_layer_spec  # from 0.19 on

        spec = default_layer_spec(config, vp_stage)
    elif isinstance(given, ModuleSpec) or not callable(given):
        spec = copy.deepcopy(given)
    else:  # called as upstream does
        takes_stage = "vp_stage" in inspect.signature(given).parameters
        spec = given(config, vp_stage=vp_stage) if takes_stage else given(config)
    transformer = getattr(config, "transformer", config)  # Bridge's providers are it
    if config.transformer_impl == "local" and isinstance(spec, ModuleSpec):
        # Only a spec of the whole block selects the final norm.
        count = get_num_layers_to_build(transformer, vp_stage=vp_stage)
        spec = TransformerBlockSubmodules(layer_specs=[spec] * count)
    with one_line():  # what a function makes was not known before
        for layer in spec.layer_specs if isinstance(spec, TransformerBlockSubmodules) else [spec]:
            _adapt(layer, transformer, options)
    if config.transformer_impl == "local":
        spec.layer_norm = TorchNorm
    return spec


def _stack_spec(given: Any, config: Any, options: AttentionOptions) -> Any:
    """Return the spec of a hybrid stack, of --spec (`given`) or upstream's, with our attention and gated delta nets."""
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec  # from 0.18 on

    spec = copy.copy(hybrid_stack_spec if given is None else given)
    check_stack(spec)
    spec.submodules = copy.copy(spec.submodules)
    for name in ("attention_layer", "gdn_layer"):
        layer = copy.deepcopy(getattr(spec.submodules, name))
        _adapt_attention(layer, config, options, linear=True)
        setattr(spec.submodules, name, layer)
    return spec


def check_stack(spec: Any) -> None:
    """Raise ValueError for another spec than one of Megatron's hybrid stack with its own Mamba layers and attention."""
    mixer = getattr(getattr(spec, "submodules", None), "mamba_layer", None)
    found = getattr(getattr(getattr(mixer, "submodules", None), "mixer", None), "module", None)
    if found is not MambaMixer:
        raise ValueError(
            f"--wlb: --spec names {getattr(found, '__name__', 'no Mamba layers')}, and --hybrid-layer-pattern wants "
            "layers with Megatron's MambaMixer; leave one of them out"
        )
    check_layer(spec.submodules.attention_layer)


def adapt_mtp(layer: Any, config: Any, options: AttentionOptions) -> None:
    """Adapt the spec of one of upstream's MTP layers."""
    _adapt(layer.submodules.mtp_model_layer, config, options)
    if config.transformer_impl == "local":
        layer.submodules.enorm = layer.submodules.hnorm = layer.submodules.layer_norm = TorchNorm


def foreign_core(layer: Any) -> str:
    """Return the name of a core attention in the spec of a layer that is not Megatron's, "" if it is."""
    core = layer.submodules.self_attention.submodules.core_attention
    core = getattr(core, "func", getattr(core, "module", core))
    name = getattr(core, "__name__", repr(core))
    package = getattr(core, "__module__", "").partition(".")[0]
    return "" if package.startswith("megatron") and name in _CORES else name


def check_layer(layer: Any) -> None:
    """Raise ValueError for the spec of a layer without Megatron's own self-attention and core attention."""
    found = getattr(getattr(layer.submodules, "self_attention", None), "module", None)
    inherits = getattr(found, "forward", None) is SelfAttention.forward
    if not inherits and found not in (MLASelfAttention, WlbLatentAttention, WlbLatentExchange):
        raise ValueError(
            f"--wlb: --spec names a layer with {getattr(found, '__name__', 'no self-attention')}, without the forward "
            "pass of Megatron's SelfAttention or MLASelfAttention; leave one of them out"
        )
    if core := foreign_core(layer):
        raise ValueError(
            f"--wlb has a core attention of its own, and that of the layer is {core}, not Megatron's "
            "DotProductAttention; leave --wlb out, or --spec or the flag that names it"
        )


def _adapt(layer: Any, config: Any, options: AttentionOptions) -> None:
    _adapt_attention(layer, config, options, linear=config.experimental_attention_variant is not None)
    if config.transformer_impl == "local":
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = TorchNorm


def _adapt_attention(layer: Any, config: Any, options: AttentionOptions, *, linear: bool) -> None:
    """Adapt what mixes the rows of a layer; `linear`: it may be a gated delta net."""
    spec: Any = getattr(layer.submodules, "self_attention", None)
    if linear and getattr(spec, "module", None) in (GatedDeltaNet, WlbGatedDeltaNet):
        spec.module = WlbGatedDeltaNet
        return
    check_layer(layer)
    attention = spec.submodules
    if config.multi_latent_attention:
        attention.core_attention = ModuleSpec(module=WlbCoreAttention, params={"options": options})
        spec.module = WlbLatentExchange if options.latents else WlbLatentAttention
    else:
        attention.core_attention = partial(WlbCoreAttention, options=options)
        given = spec.module
        if not issubclass(given, WlbSelfAttention):
            spec.module = type(given.__name__, (WlbSelfAttention, given), {})
    if config.transformer_impl == "local" and config.qk_layernorm:
        key = "kv_layernorm" if config.multi_latent_attention else "k_layernorm"
        attention.q_layernorm = TorchNorm
        setattr(attention, key, TorchNorm)


class TorchNorm:
    """Makes torch's norm, as upstream's wrapper does, which refuses sequence parallelism; specs want a class."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> torch.nn.Module:  # type: ignore[misc]
        norm = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
        module = norm(hidden_size, eps=eps)
        for parameter in module.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return module


def _follow_positions(chunks: list[GPTModel], *, max_positions: int) -> list[GPTModel]:
    if rotary := [chunk.rotary_pos_emb for chunk in chunks if getattr(chunk, "rotary_pos_emb", None) is not None]:
        _rotate_by_position(rotary, max_positions)
    latent = [m.rotary_pos_emb for chunk in chunks for m in chunk.modules() if isinstance(m, MLASelfAttention)]
    if latent:
        _rotate_by_position(latent, max_positions, rows_only=True)
    return chunks


def _one_layout(chunks: list[GPTModel]) -> list[GPTModel]:
    """Give the embedding's output [s, 1, h] the strides of a layer's output.

    Otherwise torch would compile fusions for both layouts, and once more for experts, which return views.
    """
    for chunk in chunks:
        if (embedding := getattr(chunk, "embedding", None)) is not None:
            embedding.register_forward_hook(lambda module, inputs, output: output.squeeze(1).unsqueeze(1))
    return chunks


def _send_ahead(chunks: list[GPTModel]) -> list[GPTModel]:
    """Prefetch the first K and V when the backward of a layer begins.

    All ranks of the group reach this point in the same order. With one connection to the device, the next collective is
    queued only when attention itself begins.
    """

    def watch(layer: Any, inputs: Any, output: Any) -> None:
        last = layer.self_attention.core_attention.last
        if last is not None:
            output[0].register_hook(lambda gradient: send_ahead(last()))

    for chunk in chunks:
        for layer in chunk.decoder.layers:
            if hasattr(getattr(layer, "self_attention", None), "core_attention"):
                layer.register_forward_hook(watch)
    return chunks


def _rotate_by_position(embeddings: list[Any], max_positions: int, rows_only: bool = False) -> None:
    """Make rotary embeddings, all alike, look up positions instead of rows.

    Upstream passes the result of `get_rotary_seq_len` to `forward`. A row is [1, 1, D], or [1, D] with `rows_only`:
    multi-latent attention drops the batch dimension.
    """
    tables: dict[torch.device, Any] = {}

    def get_rotary_seq_len(
        inference_context: Any, transformer: Any, transformer_input: Any, transformer_config: Any, packed: Any = None
    ) -> torch.Tensor:
        positions: torch.Tensor = packed.wlb.positions
        return positions

    def forward(positions: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if positions.device not in tables:
            tables[positions.device] = embeddings[0].get_emb(max_positions)
        table = tables[positions.device]
        rows, *magnitude = table if isinstance(table, tuple) else (table,)  # YaRN has both
        rows = rows.index_select(0, positions)
        rows = rows.squeeze(1) if rows_only else rows
        return (rows, *magnitude) if magnitude else rows

    for rotary in embeddings:
        rotary.get_rotary_seq_len, rotary.forward = get_rotary_seq_len, forward
