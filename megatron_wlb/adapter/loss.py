"""Loss of a micro-batch by upstream's weights, and multi-token prediction with tokens from the loader.

At depth k, the row of token i has token i + k as input and token i + k + 1 as target. Upstream rolls the micro-batch,
which crosses shards. Here the loader reads the tokens that follow; behind the window, or the document, they are token 0
with weight 0.
"""

import contextlib
import importlib
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from megatron.core.rerun_state_machine import get_rerun_state_machine

from megatron_wlb.adapter.data import Batch
from megatron_wlb.adapter.upstream.replaced import replaced


def weights(counts: np.ndarray, windows: int | None, *, per_token: bool) -> np.ndarray:
    """Return a target's weight by depth and micro-batch of origin, float32 [1 + depths, micro-batches].

    Upstream takes the mean loss of every micro-batch, and then the mean of these (`per_token`: one mean over all
    targets); a depth of multi-token prediction weighs as the main loss does. Here losses are summed and divided by the
    trained targets of the step, so a weight is that number over micro-batches times targets of its own. `counts`, int64
    [slots, 1 + depths]: of samples, `windows` to a micro-batch; None: of anything, all of which weigh the same.
    """
    size = len(counts) if windows is None else windows
    targets = np.add.reduceat(counts, np.arange(0, len(counts), size), axis=0).astype(float)
    total, means = targets[:, :1], targets
    if not per_token and windows is not None:
        total, means = total.sum(), len(targets) * targets  # divided once, so that a digest has the same weights
    return np.divide(total, means, out=np.zeros_like(targets), where=targets > 0).T.astype(np.float32)


def rolled(
    batch: Batch, positions: torch.Tensor, weights: torch.Tensor | None, context_length: int, depths: int
) -> Iterator[tuple[torch.Tensor, Any]]:
    """Yield the results of upstream's `roll_tensor` in a forward pass.

    Its layers ask for the inputs of each depth: tokens [1, s], then positions [1, s]; its loss for labels [1, s], then
    the mask [1, s] with its sum, by which it divides what it multiplies by the trained tokens. The sum returned is
    their number, so the mask alone is a target's weight: `weights` [1 + depths, s] or 1.
    """
    assert batch.tokens is not None and batch.labels is not None and batch.loss_mask is not None
    trained = batch.loss_mask[:1].sum()
    for depth in range(1, depths + 1):
        yield batch.tokens[depth : depth + 1], None
        # Beyond the end of a document any valid position will do.
        yield (positions + depth).clamp(max=context_length - 1).unsqueeze(0), None
    for depth in range(1, depths + 1):
        yield batch.labels[depth : depth + 1], None
        mask = batch.loss_mask[depth : depth + 1]
        yield mask if weights is None else mask * weights[depth : depth + 1], trained


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
            if tensor.dtype == torch.bool:  # padding stays where it is
                return tensor, None
            following, total = next(packed_seq_params.ahead)
            assert following.shape == tensor.shape and following.dtype == tensor.dtype
            return following, total

        return roll_tensor

    with (
        replaced(specs, "get_gpt_mtp_block_spec", adapted, ("config",)),
        replaced(prediction, "roll_tensor", loaded, ("tensor", "packed_seq_params")),
    ):
        yield


_SPIKE = 10  # upstream's threshold: ten times the largest loss seen


def token_loss(
    args: Namespace,
    loss_mask: torch.Tensor | None,
    weights: torch.Tensor | None,
    output: torch.Tensor,
    *,
    reports_weighted: bool = False,
    seen: Callable[[torch.Tensor], None] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return sum and number of the token losses, and both for the log; checks as upstream does.

    `weights` [s] of targets count in the sum, and in the log only if it `reports_weighted`; None: all are 1. `seen` is
    given what multiplies losses, float32 [s]. Upstream divides gradients by the sum of this number over the global
    batch.
    """
    assert loss_mask is not None  # the stage with the loss has the mask
    mask = loss_mask.view(-1).float()
    losses = output.view(-1).float() * mask
    loss = torch.sum(losses if weights is None else losses * weights)
    said = (loss if reports_weighted else torch.sum(losses)).detach()
    if seen is not None:
        seen(mask if weights is None else mask * weights)
    machine = get_rerun_state_machine()
    if args.check_for_nan_in_loss_and_grad:
        for reject, name in ((torch.isnan, "NaN"), (torch.isinf, "Inf")):
            message = f"found {name} in local forward loss calculation"
            machine.validate_result(result=loss, rejection_func=reject, message=message, tolerance=0.0, fatal=True)
    if args.check_for_spiky_loss:
        unexpected = partial(machine.is_unexpectedly_large, threshold=_SPIKE, context="loss")
        machine.validate_result(
            result=loss / loss_mask.sum().clamp(min=1),
            rejection_func=unexpected,
            message="Spiky loss",
            tolerance=0.0,
            fatal=False,
        )
    tokens = loss_mask.sum().to(torch.int)
    return loss, tokens, {"lm loss": torch.cat([said.view(1), tokens.detach().view(1)])}
