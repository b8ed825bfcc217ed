"""Loss of a micro-batch by upstream's weights."""

from argparse import Namespace
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from megatron.core.rerun_state_machine import get_rerun_state_machine


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
    if not per_token:
        total, means = total.sum(), len(targets) * targets  # divided once, so that a digest has the same weights
    return np.divide(total, means, out=np.zeros_like(targets), where=targets > 0).T.astype(np.float32)


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
    given the factors of losses, float32 [s]. Upstream divides gradients by the sum of this number over the global
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
