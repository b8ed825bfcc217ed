"""Losses of micro-batches of unequal length."""

from types import SimpleNamespace

import torch

from megatron_wlb.adapter import loss


def test_a_loss_is_spiky_by_its_mean_over_tokens(monkeypatch):
    """Upstream compares sums over micro-batches, which are equally long there."""
    seen = []
    machine = SimpleNamespace(
        validate_result=lambda *, result, **_: seen.append(float(result)),
        is_unexpectedly_large=lambda *_, **__: False,
    )
    monkeypatch.setattr(loss, "get_rerun_state_machine", lambda: machine)
    args = SimpleNamespace(check_for_nan_in_loss_and_grad=False, check_for_spiky_loss=True)
    for tokens in (4, 400):
        mask = torch.ones(1, tokens)
        mask[0, 0] = 0
        total, count, _ = loss.token_loss(args, mask, None, torch.full((1, tokens), 2.5))
        assert (float(total), int(count)) == (2.5 * (tokens - 1), tokens - 1)
    assert seen == [2.5, 2.5]
