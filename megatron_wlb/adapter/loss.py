"""A micro-batch's loss, before division by the global batch's tokens."""

from argparse import Namespace
from functools import partial
from typing import Any

import torch
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.utils import to_local_if_dtensor

_SPIKE = 10  # upstream's threshold: ten times the largest loss seen


def token_loss(
    args: Namespace, loss_mask: torch.Tensor | None, output: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return sum and number of the token losses, and both for the log.

    Checks as upstream does; upstream divides gradients by the sum of this number over the global batch.
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


def scale_sharded(original: Any) -> Any:
    """Return `scale_gradients` for torch-FSDP2, to scale per token; upstream's own does nothing.

    FSDP2 has averaged gradients over its ranks, which each train a part of the global batch. Multiplying by the number
    of ranks turns the mean into a sum.
    """

    def scale_gradients(self: Any, scaling_factor: torch.Tensor) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                to_local_if_dtensor(parameter.grad).mul_(scaling_factor * self.process_group.size())

    return scale_gradients
