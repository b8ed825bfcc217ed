"""Multi-token prediction with tokens from the loader.

At depth k, the row of token i has token i + k as input and token i + k + 1 as target. Upstream rolls the micro-batch,
which crosses shards. Here the loader reads the tokens that follow; behind the window, or the document, they are token 0
with weight 0.
"""

import contextlib
import importlib
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from megatron_wlb.adapter.data import Batch
from megatron_wlb.adapter.layers.kind import Kind, Run
from megatron_wlb.adapter.layers.norm import TorchNorm
from megatron_wlb.adapter.upstream.means import means_over
from megatron_wlb.adapter.upstream.replaced import replaced
from megatron_wlb.adapter.upstream.versions import upstream


def adapt_mtp(layer: Any, config: Any, adapt: Callable[[Any, Any], None]) -> None:
    """Adapt the spec of one of upstream's MTP layers, and by `adapt` the spec of the layer inside."""
    adapt(layer.submodules.mtp_model_layer, config)
    if config.transformer_impl == "local":
        layer.submodules.enorm = layer.submodules.hnorm = layer.submodules.layer_norm = TorchNorm


def rolled(
    batch: Batch, positions: torch.Tensor, weights: torch.Tensor | None, context_length: int
) -> Iterator[tuple[torch.Tensor, Any]]:
    """Yield the results of upstream's `roll_tensor` in a forward pass.

    Its layers ask for the inputs of each depth: tokens [1, s], then positions [1, s]; its loss for labels [1, s], then
    the mask [1, s] with its sum, by which it divides a product with the trained tokens. The sum returned is
    their number, so the mask alone is a target's weight: `weights` [1 + depths, s] or 1.
    """
    assert batch.tokens is not None and batch.labels is not None and batch.loss_mask is not None
    depths, trained = len(batch.labels) - 1, batch.loss_mask[:1].sum()
    for depth in range(1, depths + 1):
        yield batch.tokens[depth : depth + 1], None
        # Beyond the end of a document any valid position will do.
        yield (positions + depth).clamp(max=context_length - 1).unsqueeze(0), None
    for depth in range(1, depths + 1):
        yield batch.labels[depth : depth + 1], None
        mask = batch.loss_mask[depth : depth + 1]
        yield mask if weights is None else mask * weights[depth : depth + 1], trained


@contextlib.contextmanager
def _installed(run: Run) -> Iterator[None]:
    """Make upstream's MTP layers use adapted specs, roll nothing, and log means over the micro-batches that ran."""
    specs = importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
    prediction = importlib.import_module("megatron.core.transformer.multi_token_prediction")

    def adapted(original: Any) -> Any:
        def get_gpt_mtp_block_spec(config: Any, *args: Any, **kwargs: Any) -> Any:
            block = original(config, *args, **kwargs)
            for layer in block.layer_specs if block else ():
                adapt_mtp(layer, config, run.adapt)
            return block

        return get_gpt_mtp_block_spec

    def loaded(original: Any) -> Any:
        def roll_tensor(tensor: Any, *args: Any, packed_seq_params: Any, **kwargs: Any) -> Any:
            if tensor.dtype == torch.bool:  # padding stays where it is
                return tensor, None
            following, total = next(packed_seq_params.depth_inputs)
            assert following.shape == tensor.shape and following.dtype == tensor.dtype
            return following, total

        return roll_tensor

    with (
        replaced(specs, "get_gpt_mtp_block_spec", adapted, ("config",)),
        replaced(prediction, "roll_tensor", loaded, ("tensor", "packed_seq_params")),
        replaced(prediction.MTPLossLoggingHelper, "track_mtp_metrics", means_over(run.windows), ("loss_scale",)),
    ):
        yield


class _Hidden:
    """Packed sequences of the running node, while upstream asserts that it has none."""

    state: Any = None
    """Its state, which gets them back."""
    packed: Any = None


@contextlib.contextmanager
def _overlapped() -> Iterator[None]:
    """Let MTP layers take packed sequences."""
    callables = importlib.import_module(upstream().nodes[0])
    predicting = importlib.import_module("megatron.core.transformer.multi_token_prediction").MultiTokenPredictionLayer
    hidden = _Hidden()

    def built(original: Any) -> Any:
        def build_mtp_layer_callables(layer: Any) -> Any:
            (attend, *others), weights = original(layer)

            def attended(node: Any, rows: Any) -> Any:
                hidden.state, hidden.packed = node.chunk_state, node.chunk_state.packed_seq_params
                hidden.state.packed_seq_params = None
                return attend(node, rows)

            return [attended, *others], weights

        return build_mtp_layer_callables

    def embedded(original: Any) -> Any:
        def _get_embeddings(self: Any, *, packed_seq_params: Any = None, **given: Any) -> Any:
            return original(self, packed_seq_params=packed_seq_params or hidden.packed, **given)

        return _get_embeddings

    def joined(original: Any) -> Any:
        def _concat_embeddings(self: Any, *args: Any) -> Any:
            """Called after upstream has looked, and before the layer inside."""
            if hidden.packed is not None:
                hidden.state.packed_seq_params, hidden.packed = hidden.packed, None
            return original(self, *args)

        return _concat_embeddings

    with (
        replaced(callables, "build_mtp_layer_callables", built, ("layer",)),
        replaced(predicting, "_get_embeddings", embedded, ("hidden_states", "packed_seq_params")),
        replaced(predicting, "_concat_embeddings", joined, ("hidden_states", "decoder_input")),
    ):
        yield


class _Mtp(Kind):
    def applies(self, args: Namespace) -> bool:
        return bool(args.mtp_num_layers)

    def installed(self, run: Run) -> contextlib.AbstractContextManager[None]:
        return _installed(run)

    def adapt_given(self, arguments: Mapping[str, Any], config: Any, adapt: Callable[[Any, Any], None]) -> None:
        for layer in getattr(arguments.get("mtp_block_spec"), "layer_specs", ()):
            adapt_mtp(layer, config, adapt)

    def depths(self, args: Namespace) -> int:
        return args.mtp_num_layers or 0


class _Overlapped(Kind):
    """In upstream's combined schedule, beside `overlap`."""

    def applies(self, args: Namespace) -> bool:
        return bool(args.mtp_num_layers and args.overlap_moe_expert_parallel_comm)

    def installed(self, run: Run) -> contextlib.AbstractContextManager[None]:
        return _overlapped()


KIND, OVERLAPPED = _Mtp(), _Overlapped()
