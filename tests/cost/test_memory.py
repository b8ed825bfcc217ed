"""Activation memory: Korthikanti's figure, the stages of a pipeline, and the largest S_max that fits."""

from dataclasses import replace

import pytest

from megatron_wlb.cost.memory import largest_max_tokens, layer_bytes, layer_input_bytes, peak_bytes
from megatron_wlb.job import Parallel, Recompute
from megatron_wlb.model import ModelShape
from tests.jobs import job

GPT3_SHAPE = ModelShape(
    num_layers=96,
    hidden_size=12288,
    ffn_hidden_size=4 * 12288,
    num_attention_heads=96,
    num_query_groups=96,
    gated_linear_unit=False,
    padded_vocab_size=51200,
)
GPT3 = job(
    model=GPT3_SHAPE,
    parallel=Parallel(pp=8, sequence_parallel=False),
    num_micro_batches=64,
    context_length=4096,
    max_tokens=4096,
    hidden_dropout=True,
)


def in_parallel(given, **sizes):
    return replace(given, parallel=replace(given.parallel, **sizes))


def test_a_layer_keeps_34_bytes_per_value_of_the_hidden_state():
    # arXiv 2205.05198, equation 6 without the attention scores: 34 s b h, and here the log-sum-exps.
    assert layer_bytes(GPT3) == 34 * 12288 + 4 * 96
    parallel = in_parallel(GPT3, tp=8, sequence_parallel=True)
    assert layer_bytes(parallel) == layer_bytes(GPT3) / 8
    # Equation 2: without sequence parallelism 10 of the 34 are kept on every rank.
    assert layer_bytes(in_parallel(parallel, sequence_parallel=False)) == 10 * 12288 + (24 * 12288 + 4 * 96) / 8
    assert layer_input_bytes(GPT3) == 2 * 12288
    assert layer_input_bytes(parallel) == 2 * 12288 / 8
    saved = replace(in_parallel(parallel, cp=4), save_gathered_kv=True)
    assert layer_bytes(saved) == layer_bytes(parallel) + 4 * 2 * 2 * 12288 / 8
    assert layer_bytes(in_parallel(saved, cp=1)) == layer_bytes(parallel)
    gated = replace(GPT3, model=replace(GPT3_SHAPE, gated_linear_unit=True, num_query_groups=8), hidden_dropout=False)
    assert layer_bytes(gated) == 2 * (4 * 12288 + 2 * 12288 + 2 * 8 * 128 + 3 * 4 * 12288) + 4 * 96


def test_the_peak_adds_up():
    def at(stage, **changes):
        return peak_bytes(replace(GPT3, **changes), stage)

    kept = layer_bytes(GPT3)
    assert at(0) == 4096 * 8 * 12 * kept
    assert at(7) == 4096 * (12 * kept + 2 * 12288 + 6 * 51200)
    assert at(0, num_micro_batches=3) == 4096 * 3 * 12 * kept
    assert peak_bytes(GPT3, 0, 512) == at(0) / 8 == peak_bytes(in_parallel(GPT3, cp=8), 0)
    assert peak_bytes(in_parallel(GPT3, vpp=3), 0) == 4096 * (14 + 2 * 8 + 1) * 4 * kept
    edges = in_parallel(replace(GPT3, model=replace(GPT3_SHAPE, num_layers=94)), edge_layers=1)
    assert peak_bytes(edges, 1) == peak_bytes(GPT3, 1)
    full = Recompute(granularity="full")
    assert at(0, recompute=full) == 4096 * (8 * 12 * 2 * 12288 + kept)
    block = replace(full, method="block", num_layers=5)
    assert at(0, recompute=block) == 4096 * (8 * (5 * 2 * 12288 + 7 * kept) + kept)
    assert at(0, recompute=replace(block, num_layers=12)) == at(0, recompute=full)
    uniform = replace(full, method="uniform", num_layers=4)
    assert at(0, recompute=uniform) == 4096 * (8 * 3 * 2 * 12288 + 4 * kept)


@pytest.mark.parametrize(
    ("modules", "less"),
    [
        (("core_attn",), 0),
        (("mlp",), 3 * 2 * 4 * 12288),
        (("moe", "moe_act"), 3 * 2 * 4 * 12288),
        (("moe_act",), 2 * 4 * 12288),
        (("layernorm", "mlp"), 2 * 2 * 12288 + 3 * 2 * 4 * 12288),
    ],
)
def test_selective_recomputation_keeps_less(modules, less):
    gated = replace(GPT3, model=replace(GPT3_SHAPE, gated_linear_unit=True), hidden_dropout=False)
    selective = replace(gated, recompute=Recompute(granularity="selective", modules=modules))
    assert layer_bytes(selective) == layer_bytes(gated) - less
    assert peak_bytes(selective, 0) == 4096 * (8 * 12 * layer_bytes(selective) + less)


@pytest.mark.parametrize(("pp", "vpp"), [(1, 1), (2, 1), (8, 1), (2, 3), (8, 3)])
def test_the_largest_that_fits_fits_and_one_more_does_not(pp, vpp):
    given = in_parallel(GPT3, pp=pp, vpp=vpp, tp=8, sequence_parallel=True, cp=2)
    largest, unit = largest_max_tokens(given, 60e9), given.unit_tokens
    assert largest > 0 and largest % unit == 0
    assert max(peak_bytes(given, stage, largest) for stage in range(pp)) <= 60e9
    assert max(peak_bytes(given, stage, largest + unit) for stage in range(pp)) > 60e9
    assert largest_max_tokens(given, 1e3) == 0
