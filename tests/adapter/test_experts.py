"""Router losses over micro-batches of unequal length, against their formulas over all tokens."""

import types

import pytest
import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.moe import router

from megatron_wlb.adapter.layers import experts
from megatron_wlb.adapter.layers.kind import Run

EXPERTS, TOPK, COEFF = 4, 2, 0.1
REDUCE = "megatron.core.transformer.moe.moe_utils.reduce_from_tensor_model_parallel_region"


def installed(trained):
    """Weigh router losses of a run that trains this share of its tokens."""
    return experts.KIND.installed(Run(trained=lambda: trained, windows=lambda: 1.0, adapt=None, clock=None))


def micro_batches():
    """Scores, and experts chosen by them, of micro-batches of 3, 40 and 11 tokens, the last 2 of each padding."""
    generator = torch.Generator().manual_seed(0)
    for tokens in (3, 40, 11):
        scores = torch.rand(tokens, EXPERTS, generator=generator)
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(1, scores.topk(TOPK).indices, True)
        padding = torch.arange(tokens) >= tokens - 2
        yield scores * ~padding[:, None], chosen & ~padding[:, None], padding


def test_a_micro_batch_of_padding_alone_has_no_balancing_loss():
    with installed(1.0):
        none = torch.zeros(EXPERTS)
        given = {"topk": TOPK, "num_experts": EXPERTS, "moe_aux_loss_coeff": COEFF, "fused": True}
        loss = router.switch_load_balancing_loss_func(
            probs=torch.zeros(3, EXPERTS), tokens_per_expert=none, total_num_tokens=none.sum(), **given
        )
    assert loss == 0


@pytest.mark.parametrize("ahead", [False, True])
def test_balancing_losses_take_shares_of_all_tokens(ahead, monkeypatch):
    """`global_aux_loss` adds up the choices of micro-batches so far, `ahead`; `aux_loss` takes those of its own."""
    monkeypatch.setattr(REDUCE, lambda counts, group: counts)
    alone = types.SimpleNamespace(size=lambda: 1)
    counted, tokens, each = torch.zeros(EXPERTS), 0, []
    with installed(1.0):
        for steps, (scores, chosen, padding) in enumerate(micro_batches(), start=1):
            counts, local, total = router.get_tokens_per_expert_and_token_count(
                routing_map=chosen, reduce_group=alone, topk=TOPK, with_padding_mask=True
            )
            assert local == total == len(scores) - 2
            counted, tokens = (counted + counts, tokens + total) if ahead else (counts, total)
            loss = router.switch_load_balancing_loss_func(
                probs=scores,
                tokens_per_expert=counted / steps if ahead else counts,
                total_num_tokens=total,
                topk=TOPK,
                num_experts=EXPERTS,
                moe_aux_loss_coeff=COEFF,
            )
            shares = counted / (TOPK * tokens)
            each.append((loss, COEFF * EXPERTS * (shares * scores[~padding].mean(dim=0)).sum()))
    for found, wanted in each:
        torch.testing.assert_close(found, wanted)


def test_every_rank_of_a_group_weighs_by_the_mean_of_its_tokens(monkeypatch):
    """Its share of the group's loss is of all tokens already."""
    monkeypatch.setattr(REDUCE, lambda counts, group: counts + 30)
    _, chosen, _ = next(micro_batches())
    with installed(1.0):
        _, local, total = router.get_tokens_per_expert_and_token_count(
            routing_map=chosen, reduce_group=types.SimpleNamespace(size=lambda: 4), topk=TOPK, with_padding_mask=True
        )
    assert (local, total) == (61 / 4, 61)


def test_bias_counts_no_padding_and_losses_are_of_the_trained_share(monkeypatch):
    given = types.SimpleNamespace(enable_expert_bias=True, local_tokens_per_expert=torch.zeros(EXPERTS))
    _, chosen, padding = list(micro_batches())[1]
    everything = chosen | padding[:, None]
    monkeypatch.setattr(router.MoEAuxLossAutoScaler, "main_loss_backward_scale", None)
    with installed(0.25):
        router.TopKRouter._apply_expert_bias(given, everything, padding_mask=padding)
        router.MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(8.0))
    torch.testing.assert_close(given.local_tokens_per_expert, chosen.sum(dim=0).float())
    assert router.MoEAuxLossAutoScaler.main_loss_backward_scale == 2


@pytest.mark.parametrize(
    ("kind", "is_first", "sequence_parallel", "whole"),
    [
        (GPTModel, True, True, True),
        (GPTModel, False, True, False),
        (torch.nn.Module, True, True, False),
        (torch.nn.Module, True, False, True),
    ],
)
def test_the_mask_of_padding_has_the_rows_that_a_model_takes(kind, is_first, sequence_parallel, whole, monkeypatch):
    """GPT divides it itself on its first stage, other models never."""
    model = kind.__new__(kind)
    model.pre_process = is_first
    config = types.SimpleNamespace(sequence_parallel=sequence_parallel)
    for name, value in (("unwrap_model", lambda model: model), ("get_model_config", lambda model: config)):
        monkeypatch.setattr(experts, name, value)
    monkeypatch.setattr(experts.mpu, "get_tensor_model_parallel_world_size", lambda: 2)
    monkeypatch.setattr(experts.mpu, "get_tensor_model_parallel_rank", lambda: 1)
    padding = torch.tensor([False, False, False, True])
    assert torch.equal(experts._rows_of(model, padding), (padding if whole else padding[2:])[None])
