"""Losses of micro-batches of unequal length."""

from types import SimpleNamespace

import numpy as np
import pytest
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


@pytest.mark.parametrize(
    ("windows", "per_token", "weights"),
    [
        (2, False, [[11 / 10, 11 / 12], [11 / 10, 11 / 6]]),
        (2, True, [[1, 1], [1, 2]]),
        (3, True, [[1, 1], [1, 2]]),  # the last micro-batch has one
        (1, False, [[11 / 16, 11 / 4, 0, 11 / 24], [11 / 16, 11 / 4, 0, 11 / 12]]),
        (None, False, [[1], [11 / 8]]),
    ],
)
def test_weights_by_hand(windows, per_token, weights):
    """Of the main loss and of a token further ahead, of four samples with 11 targets, one of them with none."""
    counts = np.array([[4, 4], [1, 1], [0, 0], [6, 3]])
    found = loss.weights(counts, windows, per_token=per_token)
    assert found.dtype == np.float32 and found == pytest.approx(np.array(weights))


@pytest.mark.parametrize("weighted", [False, True])
def test_a_loss_by_hand(weighted, monkeypatch):
    """Its sum by weights, the number of its targets, and for the log the plain sum unless the weighted one is asked."""
    monkeypatch.setattr(loss, "get_rerun_state_machine", lambda: None)
    args = SimpleNamespace(check_for_nan_in_loss_and_grad=False, check_for_spiky_loss=False)
    mask, output, weights, seen = (
        torch.tensor([[1.0, 0, 1]]),
        torch.tensor([[2.0, 8, 3]]),
        torch.tensor([3.0, 5, 7]),
        [],
    )
    total, count, said = loss.token_loss(args, mask, weights, output, reports_weighted=weighted, seen=seen.append)
    assert (float(total), int(count), said["lm loss"].tolist()) == (27, 2, [27 if weighted else 5, 2])
    assert [each.tolist() for each in seen] == [[3, 0, 7]]
    plain, *_ = loss.token_loss(args, mask, None, output, seen=seen.append)
    assert (float(plain), seen[1].tolist()) == (5, [1, 0, 1])
