"""Activation memory: Korthikanti's figure, the stages of a pipeline, and the largest S_max that fits."""

from dataclasses import replace

import pytest

from megatron_wlb.plan.memory import ActivationModel
from megatron_wlb.plan.workload import ModelShape

GPT3_SHAPE = ModelShape(
    num_layers=96,
    hidden_size=12288,
    ffn_hidden_size=4 * 12288,
    num_attention_heads=96,
    num_query_groups=96,
    kv_channels=128,
    gated_linear_unit=False,
    padded_vocab_size=51200,
)
GPT3 = ActivationModel(
    model=GPT3_SHAPE,
    dropout=True,
    bytes_per_value=2,
    tp_size=1,
    sequence_parallel=False,
    cp_size=1,
    pp_size=8,
)


def test_a_layer_keeps_34_bytes_per_value_of_the_hidden_state():
    # arXiv 2205.05198, equation 6 without the attention scores: 34 s b h, and here the log-sum-exps.
    assert GPT3.layer_bytes() == 34 * 12288 + 4 * 96
    parallel = replace(GPT3, tp_size=8, sequence_parallel=True)
    assert parallel.layer_bytes() == GPT3.layer_bytes() / 8
    # Equation 2: without sequence parallelism 10 of the 34 are kept on every rank.
    assert replace(parallel, sequence_parallel=False).layer_bytes() == 10 * 12288 + (24 * 12288 + 4 * 96) / 8
    assert GPT3.layer_input_bytes() == 2 * 12288
    assert parallel.layer_input_bytes() == 2 * 12288 / 8
    saved = replace(parallel, save_gathered_keys=True, cp_size=4)
    assert saved.layer_bytes() == parallel.layer_bytes() + 4 * 2 * 2 * 12288 / 8
    assert replace(saved, cp_size=1).layer_bytes() == parallel.layer_bytes()
    gated = replace(GPT3, model=replace(GPT3_SHAPE, gated_linear_unit=True, num_query_groups=8), dropout=False)
    assert gated.layer_bytes() == 2 * (4 * 12288 + 2 * 12288 + 2 * 8 * 128 + 3 * 4 * 12288) + 4 * 96


def test_early_stages_hold_more_micro_batches():
    assert [GPT3.in_flight(stage, 64) for stage in range(8)] == [8, 7, 6, 5, 4, 3, 2, 1]
    assert [GPT3.in_flight(stage, 3) for stage in range(8)] == [3, 3, 3, 3, 3, 3, 2, 1]
    interleaved = replace(GPT3, pp_size=4, vp_size=3)
    assert [interleaved.in_flight(stage, 64) for stage in range(4)] == [15, 13, 11, 9]
    assert interleaved.in_flight(0, 2) == 6
    assert replace(interleaved, group_size=6).in_flight(0, 64) == 19


def test_the_peak_adds_up():
    tokens = 4096
    stage = GPT3.peak_bytes(0, tokens, 64)
    assert stage == tokens * 8 * 12 * GPT3.layer_bytes()
    last = GPT3.peak_bytes(7, tokens, 64)
    assert last == tokens * (12 * GPT3.layer_bytes() + 2 * 12288 + 6 * 51200)
    assert replace(GPT3, cp_size=4).peak_bytes(0, tokens, 64) == stage / 4
    recomputed = replace(GPT3, recompute_granularity="full")
    assert recomputed.peak_bytes(0, tokens, 64) == tokens * (8 * 12 * 2 * 12288 + GPT3.layer_bytes())
    block = replace(recomputed, recompute_method="block", recompute_num_layers=5)
    kept = 5 * 2 * 12288 + 7 * GPT3.layer_bytes()
    assert block.peak_bytes(0, tokens, 64) == tokens * (8 * kept + GPT3.layer_bytes())
    assert replace(block, recompute_num_layers=12).peak_bytes(0, tokens, 64) == recomputed.peak_bytes(0, tokens, 64)
    uniform = replace(recomputed, recompute_method="uniform", recompute_num_layers=4)
    assert uniform.peak_bytes(0, tokens, 64) == tokens * (8 * 3 * 2 * 12288 + 4 * GPT3.layer_bytes())


def test_selective_recomputation_keeps_less():
    gated = replace(GPT3, model=replace(GPT3_SHAPE, gated_linear_unit=True), dropout=False)
    between, mlp = 4 * 2 * 12288, 3 * 2 * 4 * 12288
    for modules, less in (
        ({"core_attn"}, 0),
        ({"mlp"}, mlp),
        ({"moe", "moe_act"}, mlp),
        ({"moe_act"}, mlp // 3),
        ({"layernorm", "mlp"}, between // 2 + mlp),
    ):
        selective = replace(gated, recompute_granularity="selective", recompute_modules=frozenset(modules))
        assert selective.layer_bytes() == gated.layer_bytes() - less
        assert selective.peak_bytes(0, 4096, 64) == 4096 * (8 * 12 * selective.layer_bytes() + less)


@pytest.mark.parametrize("pp_size", [1, 2, 8])
@pytest.mark.parametrize("vp_size", [1, 3])
def test_the_largest_that_fits_fits_and_one_more_does_not(pp_size, vp_size):
    model = replace(GPT3, pp_size=pp_size, vp_size=vp_size, tp_size=8, sequence_parallel=True, cp_size=2)
    budget, unit = 60e9, 32
    largest = model.largest_max_tokens(budget, 16, unit)
    assert largest > 0 and largest % unit == 0
    assert max(model.peak_bytes_of_stages(largest, 16)) <= budget
    assert max(model.peak_bytes_of_stages(largest + unit, 16)) > budget
    assert model.largest_max_tokens(1e3, 16, unit) == 0
