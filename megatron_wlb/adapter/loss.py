"""Loss of a micro-batch, and multi-token prediction by upstream's layers with tokens from the loader.

At depth k, the row of token i has token i + k as input and token i + k + 1 as target. Upstream rolls the micro-batch,
which crosses documents and shards. Here the loader reads the tokens of the document; beyond its end they are token 0
with weight 0.
"""

import contextlib
import importlib
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.rerun_state_machine import get_rerun_state_machine

from megatron_wlb.adapter import compat
from megatron_wlb.adapter.data import Batch


def weights(targets: Sequence[int]) -> list[float]:
    """Return a target's loss weight by depth: each depth weighs as the main loss does.

    `targets` are those of the main loss and of each depth, over all data-parallel ranks in a step.
    """
    return [targets[0] / count if count else 0.0 for count in targets[1:]]


def rolled(
    batch: Batch, positions: torch.Tensor, scales: Sequence[float], context_length: int
) -> Iterator[tuple[torch.Tensor, Any]]:
    """Yield the results of upstream's `roll_tensor` in a forward pass.

    Its layers ask for the inputs of each depth: tokens [1, s], then positions [1, s]; its loss for labels [1, s], then
    the mask [1, s] with its sum, by which it divides what it multiplies by the trained tokens. The sum returned is
    their number, so the mask alone is a target's weight.
    """
    assert batch.tokens is not None and batch.labels is not None and batch.loss_mask is not None
    depths = range(1, len(scales) + 1)
    trained = batch.loss_mask[:1].sum()
    for depth in depths:
        yield batch.tokens[depth : depth + 1], None
        # Beyond the end of a document any valid position will do.
        yield (positions + depth).clamp(max=context_length - 1).unsqueeze(0), None
    for depth, scale in zip(depths, scales, strict=True):
        yield batch.labels[depth : depth + 1], None
        yield batch.loss_mask[depth : depth + 1] * scale, trained


@contextlib.contextmanager
def installed(adapt: Callable[[Any, Any], None]) -> Iterator[None]:
    """Make upstream's MTP layers use specs changed by `adapt`, and roll nothing."""
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


_SPIKE = 10  # upstream's threshold: ten times the largest loss seen


def token_loss(
    args: Namespace, loss_mask: torch.Tensor | None, output: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return sum and number of the token losses, and both for the log; checks as upstream does.

    Upstream divides gradients by the sum of this number over the global batch.
    """
    assert loss_mask is not None  # the stage with the loss has the mask
    loss = torch.sum(output.view(-1).float() * loss_mask.view(-1).float())
    machine = get_rerun_state_machine()
    if args.check_for_nan_in_loss_and_grad:
        for reject, name in ((torch.isnan, "NaN"), (torch.isinf, "Inf")):
            message = f"found {name} in local forward loss calculation"
            machine.validate_result(result=loss, rejection_func=reject, message=message, tolerance=0.0, fatal=True)
    if args.check_for_spiky_loss:
        unexpected = partial(machine.is_unexpectedly_large, threshold=_SPIKE, context="loss")
        machine.validate_result(
            result=loss, rejection_func=unexpected, message="Spiky loss", tolerance=0.0, fatal=False
        )
    tokens = loss_mask.sum().to(torch.int)
    return loss, tokens, {"lm loss": torch.cat([loss.detach().view(1), tokens.detach().view(1)])}
