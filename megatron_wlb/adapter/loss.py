"""The loss of a micro-batch, to be divided by the tokens of the global batch (`--calculate-per-token-loss`)."""

from argparse import Namespace
from functools import partial
from typing import Any

import torch
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.utils import to_local_if_dtensor

_SPIKE = 10  # upstream calls a loss spiky at ten times the largest seen


def token_loss(
    args: Namespace, loss_mask: torch.Tensor | None, output: torch.Tensor, *, divisor: int | None = None
) -> tuple[torch.Tensor, Any, Any]:
    """Sum of the token losses, and their number: upstream divides gradients by its sum over the global batch.

    `divisor` takes the place of the number there, not in the loss that is reported.
    """
    assert loss_mask is not None  # the stage with the loss has the mask
    loss = torch.sum(output.view(-1).float() * loss_mask.view(-1).float())
    tokens = loss_mask.sum().to(torch.int)
    return (
        check_loss(args, loss),
        tokens if divisor is None else torch.full_like(tokens, divisor),
        {"lm loss": torch.cat([loss.detach().view(1), tokens.detach().view(1)])},
    )


def check_loss(args: Namespace, loss: torch.Tensor) -> torch.Tensor:
    """Upstream's checks of a micro-batch's loss; returns it."""
    if args.check_for_nan_in_loss_and_grad:
        for reject, name in ((torch.isnan, "NaN"), (torch.isinf, "Inf")):
            get_rerun_state_machine().validate_result(
                result=loss,
                rejection_func=reject,
                message=f"found {name} in local forward loss calculation",
                tolerance=0.0,
                fatal=True,
            )
    if args.check_for_spiky_loss:
        machine = get_rerun_state_machine()
        machine.validate_result(
            result=loss,
            rejection_func=partial(machine.is_unexpectedly_large, threshold=_SPIKE, context="loss"),
            message="Spiky loss",
            tolerance=0.0,
            fatal=False,
        )
    return loss


def scale_sharded(original: Any) -> Any:
    """`scale_gradients` of torch-FSDP2, which upstream leaves empty: its gradients would not be per token.

    FSDP2 has averaged over its ranks, each a part of the global batch, so their number goes back in.
    """

    def scale_gradients(self: Any, scaling_factor: torch.Tensor) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                to_local_if_dtensor(parameter.grad).mul_(scaling_factor * self.process_group.size())

    return scale_gradients
