"""The model: upstream's GPT with WLB attention and rotary embeddings."""

import copy
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

from megatron_wlb.adapter import layers
from megatron_wlb.adapter.errors import one_line
from megatron_wlb.adapter.layers.norm import TorchNorm
from megatron_wlb.runtime.attention import AttentionOptions, send_ahead
from megatron_wlb.runtime.metadata import ShardMetadata


@dataclass
class WlbPackedSeqParams(PackedSeqParams):
    """Carries a micro-batch's shard through upstream's layers and recomputation."""

    wlb: ShardMetadata | None = None
    depth_inputs: Iterator[Any] | None = None
    """Iterator of `layers.mtp.rolled`, for a stage with MTP layers."""

    def __post_init__(self) -> None:
        self.qkv_format = "sbhd"  # rows keep their order, so rotary embeddings apply row by row
        if self.wlb is not None and self.wlb.packed is not None:
            self.seq_idx = self.wlb.packed.documents()


def configure(model: Any, *, options: AttentionOptions, context_length: int) -> Any:
    """Build WLB attention (with `options`) and positions into the config `model`."""
    if hasattr(model, "hybrid_stack_spec"):
        from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec  # from 0.18 on

        given = hybrid_stack_spec if model.hybrid_stack_spec is None else model.hybrid_stack_spec
        model.hybrid_stack_spec = layers.adapt_stack(given, model.transformer, options)
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
            layers.adapt(layer, transformer, options)
    if config.transformer_impl == "local":
        spec.layer_norm = TorchNorm
    return spec


def _follow_positions(chunks: list[GPTModel], *, max_positions: int) -> list[GPTModel]:
    if rotary := [chunk.rotary_pos_emb for chunk in chunks if getattr(chunk, "rotary_pos_emb", None) is not None]:
        _rotate_by_position(rotary, max_positions)
    if of_layers := [rotary for chunk in chunks for module in chunk.modules() for rotary in layers.rotary(module)]:
        _rotate_by_position(of_layers, max_positions, rows_only=True)
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
    """Make rotary embeddings, all equal, look up positions instead of rows.

    Upstream passes the result of `get_rotary_seq_len` to `forward`. A row is [1, 1, D], or [1, D] with `rows_only`:
    layers with their own drop the batch dimension.
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
