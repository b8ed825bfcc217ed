"""Multi-token prediction: upstream's MTP layers and loss, with what lies further ahead taken from the loader.

At depth k, the row of token i is given token i + k as its input and token i + k + 1 as its target. Upstream rolls the
micro-batch by one token a depth, which looks past documents and, with context parallelism, past shards. A rank's loader
reads these tokens from the document itself instead; what lies beyond it is token 0, and weighs nothing.
"""

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from megatron_wlb.adapter import compat
from megatron_wlb.adapter.data import Batch


def weights(lengths: np.ndarray, depths: int) -> list[float]:
    """What a target of each depth weighs in the loss, so that every depth weighs as much as the main loss.

    Upstream takes tokens over targets of the micro-batch, with which targets would count more where documents are
    short. This is the ratio of the whole step, and that of upstream where all micro-batches are alike.

    Args:
        lengths: int64 [documents], trained tokens of those of the step, over all data-parallel ranks.
        depths: `--mtp-num-layers`.
    """
    targets = [int(np.maximum(lengths - depth, 0).sum()) for depth in range(1, depths + 1)]
    return [float(lengths.sum()) / count if count else 0.0 for count in targets]


def rolled(batch: Batch, scales: Sequence[float]) -> Iterator[tuple[torch.Tensor, Any]]:
    """What upstream's `roll_tensor` is to return in a forward pass, call by call, on the stage with the MTP layers.

    Upstream's layers ask for the inputs of one depth after the other, tokens [1, s] and positions [1, s]; then its loss
    asks for labels [1, s] and mask [1, s], with the mask's sum. It divides by that, and multiplies by the trained
    tokens of the shard; given these, the weight of a target is what the mask says.
    """
    assert batch.tokens is not None and batch.labels is not None and batch.loss_mask is not None
    depths = range(1, len(scales) + 1)
    positions, trained = batch.metadata.positions, batch.loss_mask[:1].sum()
    for depth in depths:
        yield batch.tokens[depth : depth + 1], None
        yield ((positions + depth) * batch.loss_mask[depth].long()).unsqueeze(0), None
    for depth, scale in zip(depths, scales, strict=True):
        yield batch.labels[depth : depth + 1], None
        yield batch.loss_mask[depth : depth + 1] * scale, trained


@contextlib.contextmanager
def installed(adapt: Callable[[Any, Any], None]) -> Iterator[None]:
    """Within, upstream's MTP layers are built as `adapt(layer spec, config)` changes them, and roll nothing."""
    specs = importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
    prediction = importlib.import_module("megatron.core.transformer.multi_token_prediction")

    def adapted(original: Any) -> Any:
        def get_gpt_mtp_block_spec(config: Any, *args: Any, **kwargs: Any) -> Any:
            block = original(config, *args, **kwargs)
            for layer in block.layer_specs if block else ():
                adapt(layer, config)
            return block

        return get_gpt_mtp_block_spec

    def loaded(original: Any) -> Any:
        def roll_tensor(tensor: Any, *args: Any, packed_seq_params: Any, **kwargs: Any) -> Any:
            following, total = next(packed_seq_params.ahead)
            assert following.shape == tensor.shape and following.dtype == tensor.dtype
            return following, total

        return roll_tensor

    with (
        compat.replaced(specs, "get_gpt_mtp_block_spec", adapted, ("config",)),
        compat.replaced(prediction, "roll_tensor", loaded, ("tensor", "packed_seq_params")),
    ):
        yield
