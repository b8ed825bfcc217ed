"""Activation memory: Korthikanti's figure, the stages of a pipeline, and the largest S_max that fits."""

from dataclasses import replace

import numpy as np
import pytest

from megatron_wlb.job import Parallel, Recompute
from megatron_wlb.layers.delta_net import gated_delta_net
from megatron_wlb.layers.mamba import mamba
from megatron_wlb.model import DELTA_NET, FULL, MAMBA, MODELS, ModelShape
from megatron_wlb.packing.adaptive import AdaptivePacking
from megatron_wlb.packing.paper import PaperPacking
from megatron_wlb.pipeline.split import Split
from megatron_wlb.plan.step import shard_step
from megatron_wlb.simulate.memory import (
    attention_backward_bytes,
    depth_bytes,
    gpu_weights,
    held_bytes,
    kept_bytes,
    largest_max_tokens,
    layer_bytes,
    layer_input_bytes,
    mlp_backward_bytes,
    most_kept,
    one_document,
    peak_bytes,
    running_bytes,
    step_peak_bytes,
    tensors,
    weight_bytes,
)
from tests.jobs import job, packer

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


def test_layers_of_every_kind_keep_their_own():
    """Attention three times and an MLP; if all of them run again, they keep inputs, and one of the larger kind."""
    hybrid = in_parallel(replace(GPT3, model=replace(GPT3_SHAPE, num_layers=8, pattern="**-*", hybrid=True)), pp=2)
    attention, mlp = (layer_bytes(hybrid, kind) for kind in "*-")
    again = replace(hybrid, recompute=Recompute(granularity="full"))
    kept, inputs = (kept_bytes(each, 0) for each in (hybrid, again))
    running, more = (running_bytes(each, 0) for each in (hybrid, again))
    assert attention < mlp and kept.tolist() == [3 * attention + mlp + 4 * 128]
    assert inputs.tolist() == [4 * 2 * 12288 + 4 * 128] and more - running == mlp


def test_a_layer_keeps_34_bytes_per_value_of_the_hidden_state():
    # arXiv 2205.05198, equation 6 without the attention scores: 34 s b h, and here the log-sum-exps.
    assert layer_bytes(GPT3) == 34 * 12288 + 4 * 96
    parallel = in_parallel(GPT3, tp=8, sequence_parallel=True)
    assert layer_bytes(parallel) == layer_bytes(GPT3) / 8
    # Equation 2: without sequence parallelism 10 of the 34 are kept on every rank.
    assert layer_bytes(in_parallel(parallel, sequence_parallel=False)) == 10 * 12288 + (24 * 12288 + 4 * 96) / 8
    assert layer_input_bytes(GPT3) == 2 * 12288
    assert layer_input_bytes(parallel) == 2 * 12288 / 8
    gated = replace(GPT3, model=replace(GPT3_SHAPE, gated_linear_unit=True, num_query_groups=8), hidden_dropout=False)
    assert layer_bytes(gated) == 2 * (4 * 12288 + 2 * 12288 + 2 * 8 * 128 + 3 * 4 * 12288) + 4 * 96
    normed = replace(gated, model=replace(gated.model, qk_layernorm=True))
    assert layer_bytes(normed) == layer_bytes(gated) + 2 * (12288 + 8 * 128)


def test_the_peak_adds_up():
    def at(stage, **changes):
        return peak_bytes(replace(GPT3, **changes), stage)

    kept = layer_bytes(GPT3)
    # The gradient of the layer's output, and those before and after the activation; attention needs less by then.
    more = 2 * 12288 + 2 * 2 * 4 * 12288
    rotary = 4 * 128
    assert at(0) == 4096 * (8 * (12 * kept + rotary) + more)
    assert at(7) == 4096 * (12 * kept + rotary + more + 2 * 2 * 12288 + 6 * 51200)
    assert at(0, num_micro_batches=3, global_batch_size=3) == 4096 * (3 * (12 * kept + rotary) + more)
    assert peak_bytes(GPT3, 0, 512) == at(0) / 8
    interleaved = in_parallel(replace(GPT3, overlap_transfers=False), vpp=3)
    group = interleaved.schedule().group
    assert group == 13
    # Eight stages keep the last eight tensors that they have sent, and the first one those that wait for their group.
    waiting = (group - 8) * 2 * 12288
    assert peak_bytes(interleaved, 0) == 4096 * ((14 + 2 * group + 1) * (4 * kept + rotary) + waiting + more)
    sent = peak_bytes(replace(interleaved, overlap_transfers=True), 0) - peak_bytes(interleaved, 0)
    assert sent == 4096 * 8 * 2 * 12288
    uneven = in_parallel(GPT3, split=Split(decoder_first_pipeline_num_layers=5))
    assert at(1) + 4096 * 7 * kept == peak_bytes(uneven, 1)
    assert weight_bytes(uneven) - weight_bytes(GPT3) == 18 * GPT3_SHAPE.layer_weights
    # An empty gradient of each shape: Q, K and V, their projection, the MLP, and of the output layer.
    empty = 2 * (4 + 8) * 12288**2
    on_stage = 12 * 12 * 12288**2 * (6 + 12) + 4 * 4096 * 128 + empty
    assert weight_bytes(GPT3, 1) == on_stage
    assert weight_bytes(GPT3, 0) == on_stage + 51200 * 12288 * (6 + 12)
    assert weight_bytes(GPT3, 7) == on_stage + 51200 * 12288 * (2 + 6 + 12)
    assert (
        weight_bytes(in_parallel(GPT3, tp=8, cp=2), 1)
        == (on_stage - 4 * 4096 * 128 - 6 * 12 * 12 * 12288**2) / 8 + 4 * 4096 * 128
    )
    ahead = replace(GPT3, model=replace(GPT3_SHAPE, mtp_num_layers=1))
    assert at(7, model=ahead.model) - at(7) == 4096 * depth_bytes(ahead)
    # Its layer, the joining matrix, and where it is not with the embedding of the first stage another one.
    for pp, embedding in ((8, 51200 * 12288), (1, 0)):
        given, plain = (gpu_weights(in_parallel(each, pp=pp))[0, -1] for each in (ahead, GPT3))
        assert given - plain == (12 + 2) * 12288**2 + embedding
    on_eight = in_parallel(GPT3, tp=8, sequence_parallel=True)
    running = running_bytes(on_eight, 7) - running_bytes(on_eight, 1)
    assert running == 2 * 2 * 12288 / 8 + 2 * 12288 + 6 * 51200 / 8  # before and after a norm, gathered, and logits
    whole = in_parallel(on_eight, sequence_parallel=False)  # with nothing to gather
    assert running_bytes(whole, 7) - running_bytes(whole, 1) == 2 * 2 * 12288 + 6 * 51200 / 8
    # Of a depth three inputs of norms and two outputs, joined, its layer and its logits.
    assert depth_bytes(ahead) == 5 * 2 * 12288 + kept + 6 * 51200
    # User buffers of tiles of 4,096 to 512 rows, three of each; what is gathered lies in them, not beside them.
    gathering = in_parallel(replace(GPT3, tp_tile_rows=4096), tp=8, sequence_parallel=True)
    assert mlp_backward_bytes(gathering) == 2 * 12288 / 8 + 2 * 2 * 4 * 12288 / 8
    assert mlp_backward_bytes(replace(gathering, tp_tile_rows=0)) == 2 * 12288 / 8 + 2 * 2 * 12288
    tiled = replace(GPT3, tp_tile_rows=4096)
    assert weight_bytes(tiled) - weight_bytes(GPT3) == 3 * 7680 * GPT3_SHAPE.hidden_size * 2
    two = in_parallel(GPT3, split=Split(pipeline_model_parallel_layout="E(t*6|)*7t*12|(t*6|)*6t*5|tL"), vpp=2)
    assert kept_bytes(two, 7).tolist() == [12 * kept + rotary, kept + rotary]
    six = Recompute(granularity="full", method="block", num_layers=6)
    assert kept_bytes(replace(two, recompute=six), 7).tolist() == [
        6 * kept + 6 * 2 * 12288 + rotary,
        2 * 12288 + rotary,
    ]
    full = Recompute(granularity="full")
    assert at(0, recompute=full) == 4096 * (8 * (12 * 2 * 12288 + rotary) + kept + more)
    uniform = replace(full, method="uniform", num_layers=4)
    assert at(0, recompute=uniform) == 4096 * (8 * (3 * 2 * 12288 + rotary) + 4 * kept + more)
    assert at(0, recompute=replace(uniform, num_layers=12)) == at(0, recompute=replace(uniform, num_layers=99))
    seven = at(
        0, recompute=replace(uniform, num_layers=7)
    )  # an input of seven layers, and one of the five that are left
    assert seven == 4096 * (8 * (2 * 2 * 12288 + rotary) + 7 * kept + more)


@pytest.mark.parametrize(
    ("groups", "gradients", "more"),
    [
        # dK and dV in fp32 of all keys, and 1 + 3 rows of them that leave and 1.5 that come back.
        (96, "fp32", 4 * 4 + 4 + 4 * (3 + 1.5)),
        # The same in bf16, with casts of all keys, in which those that come back have room.
        (96, "model", 4 * 4 + 4 + 2 * (3 + 4)),
        # Of few key heads, the kernel: K and V received, and for every query head; Q is 6 times K and V of a row, of
        # one head if there are fewer than ranks.
        (8, "fp32", 4 * 4 + 2 * 4 + 2 * 4 * (1 + 12) + (2 + 4) * 6 / 2),
        (2, "fp32", 4 * 4 + 2 * 4 + 2 * 4 * (1 + 12) + (2 + 4) * 6 / 2),
    ],
)
def test_backward_of_attention_by_hand(groups, gradients, more):
    """GPT-3 on 8 x 4 ranks: three rows of K and V arrive for every own one, half of which go to three ranks."""
    given = replace(GPT3, model=replace(GPT3_SHAPE, num_query_groups=groups))
    given = in_parallel(given, tp=8, cp=4, sequence_parallel=True).sharded(cp_gradients=gradients)
    row, q, kv = 2 * 12288 / 8, 12288 / 8, 2 * max(groups, 8) * 128 / 8
    held = row + 2 * (2 * q + kv)
    assert attention_backward_bytes(given) == held + more * kv
    again = replace(given, recompute=Recompute(granularity="selective", modules=("core_attn",)))
    assert attention_backward_bytes(again) == held + more * kv + 2 * (q + kv) + 4 * 12
    assert one_document(given, 64) == (2 * 64 * 4 / 4096,) * 2
    alone = (2 + 4) * q + 2 * (kv if groups == 96 else kv + 2 * q)
    assert attention_backward_bytes(in_parallel(given, cp=1)) == held + alone
    # In the MLP its gradient and two tensors of all ranks' rows, while K and V arrive; in attention the MLP is gone:
    # input, mask, norm, and four rows before and after the activation.
    in_mlp, of_mlp = (1 + 2 * 8) * row + 2 * 4 * kv, (1 + 1 / 2 + 1 + 4 + 4) * row
    assert running_bytes(given, 0) == max(in_mlp, held + more * kv - of_mlp)


def test_an_empty_gradient_is_kept_of_every_shape():
    """Of a square MLP two in all; of experts on fewer tensor-parallel ranks, of their own; of the output layer."""
    square = replace(GPT3_SHAPE, ffn_hidden_size=12288)
    experts = replace(GPT3_SHAPE, ffn_hidden_size=8 * 12288, moe_router_topk=2)
    on_four = {"tp": 4, "etp": 2, "sequence_parallel": True}
    for model, layout, stage, shapes in (
        (square, {}, 1, 4 * 12288**2),
        (square, {"tp": 4}, 7, (3 + 1 + 1) * 12288**2 / 4 + 51200 * 12288 / 4),
        (experts, on_four, 1, 4 * 12288**2 / 4 + 2 * 8 * 12288**2 / (2 * 2)),
    ):
        given = in_parallel(replace(GPT3, model=model), **layout)
        rotary = 4 * 4096 * 128
        assert weight_bytes(given, stage) == held_bytes(given)[stage] + rotary + 2 * shapes


def test_keys_and_values_arrive_while_an_mlp_goes_back():
    """If it needs more memory than attention; latents are there, and of core attention that runs again nothing is."""
    core = Recompute(granularity="selective", modules=("core_attn",))
    large = [replace(MODELS[name], num_layers=8, ffn_hidden_size=1 << 22) for name in ("llama2-7b", "deepseek-v3")]
    dense = replace(large[1], moe_router_topk=0, dense_ffn_hidden_size=0, pattern=FULL)
    latents = {"model": dense, "cp_exchange": "latents"}
    for changes, arrives in (({}, 2 * 4 * 4 * 256), ({"recompute": core}, 0), ({"cp": 1}, 0), (latents, 0)):
        given = job(**{"model": large[0], "tp": 8, "cp": 4, "pp": 2} | changes)
        assert running_bytes(given, 0) == mlp_backward_bytes(given) + arrives


@pytest.mark.parametrize(("model", "rotated"), [("llama2-7b", 128), ("deepseek-v3", 64)])
def test_a_longer_window_adds_a_row_of_the_rotary_table_a_token(model, rotated):
    short, long = (job(model=MODELS[model], context_length=length) for length in (4096, 8192))
    assert weight_bytes(long) - weight_bytes(short) == 4096 * 4 * rotated


def test_what_attention_keeps_of_latents_by_hand():
    """V3 on 8 x 4 ranks, 16 heads each: latents of 1536 for Q and of 512 for K and V, and 64 rotated values."""
    given = job(model=replace(MODELS["deepseek-v3"], qk_layernorm=True), tp=8, cp=4, cp_exchange="latents")
    kept = {name: tensor.bytes for name, tensor in tensors(given, FULL).items()}
    row, keys = 2 * 7168 / 8, 16 * (128 + 64 + 128)
    # Own latents of Q before and after a norm; all of K and V after theirs, with the part that heads share, to expand
    # them again; sines and cosines in fp32.
    latents = 2 * (2 * 1536 + 4 * 512) / 8 + 2 * 4 * 64 + 2 * 2 * 2 * 64
    expected = {"input": row, "norm": row, "dropout": 0, "q": 2 * 16 * 192, "out": 2 * 16 * 128, "log-sum-exps": 4 * 16}
    assert kept == expected | {"kv": 0, "latents": latents}
    shared = {name: each.bytes for name, each in tensors(replace(given, cp_exchange="shared"), FULL).items()}
    assert shared["kv"] == 2 * keys and shared["latents"] == 2 * (2 * 1536 + 2 * 512) / 8 + 2 * 2 * 2 * 64
    # Backward holds gradients, K and V again, theirs in fp32, and on top runs a kernel with dQ in fp32 of half of Q.
    held, every = row + 2 * (16 * 192 + 16 * 128 + keys), 4 * keys
    kernel = (2 + 4) * 16 * 192 / 2 + 2 * every
    assert attention_backward_bytes(given) == held + 2 * every + 4 * every + kernel
    again = replace(given, recompute=Recompute(granularity="full"))  # all of the layer, with K and V
    assert attention_backward_bytes(again) == held + 4 * every + kernel


def test_recomputed_up_projections_drop_keys_and_values_that_nothing_joins():
    """Upstream on one context-parallel rank: Q, K and V, which backward holds again. A ring and --wlb join K and V."""
    again = Recompute(granularity="selective", modules=("mla_up_proj",))
    q, kv = 2 * 16 * 192, 2 * 16 * (192 + 128)
    for ring, cp, freed in ((True, 1, q + kv), (True, 4, q), (False, 1, q)):
        given = job(model=MODELS["deepseek-v3"], tp=8, cp=cp, cp_exchange="ring" if ring else "shared")
        less = replace(given, recompute=again)
        assert layer_bytes(given) - layer_bytes(less) == freed
        held = attention_backward_bytes(less) - attention_backward_bytes(given)
        assert held == (q + kv if freed > q else 0)


def test_dense_layers_of_a_mixture_of_experts_keep_and_weigh_as_those_of_a_dense_model():
    """Three dense layers before five with experts, of which the first stage of two has one."""
    dense = replace(GPT3_SHAPE, num_layers=8)
    experts = {"moe_router_topk": 2, "num_experts": 16, "ffn_hidden_size": 3 * 4096, "dense_ffn_hidden_size": 4 * 12288}
    model = replace(dense, pattern="*-*-*-*****", **experts)
    given, alike = (in_parallel(replace(GPT3, model=shape), pp=2) for shape in (model, dense))
    assert layer_bytes(given, "*-") == layer_bytes(alike) != layer_bytes(given, "*")
    kept, of_dense = (kept_bytes(each, 0) for each in (given, alike))
    assert kept - of_dense == layer_bytes(given, "*") - layer_bytes(alike)
    one, few = model.held_weights_of("*")
    assert model.held_weights_of("*-") == (12 * 12288**2, 0) == dense.held_weights_of("*")
    assert gpu_weights(given)[:, 0].tolist() == [3 * 12 * 12288**2 + one + model.vocabulary_weights, few]


def test_what_linear_layers_keep_by_hand():
    """By head sizes, as `benchmarks.memory` finds it of the kernels of flash-linear-attention."""
    on_four = job(tp=4)

    def kept(letter, **mixer):
        given = replace(on_four, model=replace(on_four.model, pattern=letter, **mixer))
        return sum(tensor.bytes for tensor in tensors(given, letter).values())

    norm, q, v = 2 * on_four.model.hidden_size / 4, 2048, 4096
    rows = 2 * q + 2 * v + 2 * 32
    of_net = rows + 2 * q + 2 * 4096 + v + 64 * 32 + (v + v + 2 * 2 * v) + v
    net = gated_delta_net(key_heads=16, value_heads=32, key_dim=128, value_dim=128)
    assert kept(DELTA_NET, delta_net=net) == 2 * (norm + of_net / 4)
    of_mamba = (2 * 4096 + 2 * 8 * 128 + 64) + 2 * 4096 + 4096
    ssm = mamba(heads=64, head_dim=64, groups=8, state_dim=128)
    assert kept(MAMBA, mamba=ssm) == 2 * (norm + of_mamba / 4)
    alike = gated_delta_net(key_heads=32, value_heads=32, key_dim=128, value_dim=128)
    assert alike.kept == (4 * v + 2 * 32) + 2 * v + v + 64 * 32 + 6 * v  # nothing is repeated


@pytest.mark.parametrize(("tp", "etp", "largest"), [(1, 1, 3), (4, 4, 12), (4, 1, 4)])
def test_experts_hold_rows_as_sent_in_backward(tp, etp, largest):
    """By hand, of top 3 with an activation of 5 values for every 2 of the hidden state."""
    model = replace(GPT3_SHAPE, moe_router_topk=3, ffn_hidden_size=5 * 6144)
    given = in_parallel(replace(GPT3, model=model), tp=tp, etp=etp, sequence_parallel=tp > 1)
    row = 2 * 12288 / tp
    # Gradients of the output, and of the rows as sent; and twice the largest: what experts are sent, once for each of
    # their tensor-parallel ranks, or all rows of sequence-parallel ranks.
    assert mlp_backward_bytes(given) == row * (1 + 3 + 2 * largest)
    dropped = replace(given, recompute=Recompute(granularity="selective", modules=("moe_act",)))
    assert mlp_backward_bytes(dropped) - mlp_backward_bytes(given) == row * 5 / 2


def test_offloaded_layers_are_not_counted():
    alone = in_parallel(GPT3, pp=1)
    offloaded = replace(alone, offloaded_layers=90)
    assert peak_bytes(alone, 0) - peak_bytes(offloaded, 0) == 4096 * 90 * layer_bytes(GPT3)
    with pytest.raises(ValueError, match="offloaded_layers is 96; it must be less than 96"):
        replace(alone, offloaded_layers=96)


def peak(given, tokens):
    fullest = max(peak_bytes(given, stage, tokens) for stage in range(given.parallel.pp))
    assert peak_bytes(given, max_tokens=tokens) == fullest
    return fullest


def check_largest(given, budget):
    largest, unit = largest_max_tokens(given, budget), given.unit_tokens
    assert largest % unit == 0 and peak(given, largest) <= budget < peak(given, largest + unit)


@pytest.mark.parametrize("packing", [PaperPacking(), AdaptivePacking()], ids=lambda packing: packing.name)
@pytest.mark.parametrize("count", [8, 16, 64])
def test_the_largest_micro_batch_that_fits(packing, count):
    """Also of small micro-batches, of which a step with steady tokens cannot hold as many of S_max as are in flight."""
    given = in_parallel(replace(GPT3, packing=packing, num_micro_batches=count, global_batch_size=8), pp=8)
    given = replace(given, max_tokens=2 * given.context_length)
    for tokens in (6000, 50_000):
        check_largest(given, peak(given, tokens) * 1.001)
    interleaved = in_parallel(given, vpp=3, tp=8, sequence_parallel=True, cp=2)
    check_largest(interleaved, 60e9)
    assert largest_max_tokens(interleaved, 1e3) == 0
    every = replace(given, packing=PaperPacking())
    assert (peak(given, 50_000) < peak(every, 50_000)) == packing.steady_tokens


@pytest.mark.parametrize("delay", [0, 20])
@pytest.mark.parametrize(("dp", "vpp", "count"), [(1, 2, 32), (2, 2, 64), (4, 1, 16), (4, 2, 64)])
def test_no_stage_keeps_more_than_is_predicted(dp, vpp, count, delay):
    """In the order of 1F1B, of few long documents and many of far less work a token."""
    windows, longest = 4 * dp, 640
    given = job(
        pp=4, vpp=vpp, dp=dp, global_batch_size=windows, num_micro_batches=count, context_length=512,
        max_tokens=longest, crossover_tokens=1, packing=AdaptivePacking(max_delay_steps=delay),
    )  # fmt: skip
    lengths = np.random.default_rng(0).permutation(np.repeat([512, 362, 256, 181, 5], [30, 30, 30, 30, 44_000]))
    running, kept = packer(given, lengths), np.zeros(4)
    for _ in range(30):
        batch = running.next().batch
        ranks = shard_step(given, batch.lengths, batch.ranks)
        for tokens in (np.array([int(plan.lengths.sum()) for plan in plans]) for plans in ranks):
            assert tokens[tokens > 1].sum() <= given.most_rank_tokens(longest)  # the rest is padding
            for stage in range(4):
                ops = given.schedule().ops(stage)
                passes = np.where(ops["backward"], -1, 1) * tokens[ops["micro_batch"]]
                kept[stage] = max(kept[stage], passes.cumsum().max())
    most = np.array([most_kept(given, stage, longest, np.ones(vpp)) for stage in range(4)])
    assert (kept <= most).all() and (kept > most / (2 if delay else 3)).all()
    # Which is less than if all passes in flight had the longest micro-batch, wherever micro-batches are many.
    if vpp == 2:
        assert most[0] < given.schedule().in_flight(0, np.ones(2)) * longest


def test_the_peak_of_a_step_is_of_its_own_micro_batches():
    given = in_parallel(job(model=replace(MODELS["llama2-7b"], num_layers=8)), pp=4)
    even, alone = np.full(4, 1000.0), [(0.0, 0.0)] * 4
    kept, (first, last) = kept_bytes(given, 0), (running_bytes(given, stage) for stage in (0, 3))
    assert step_peak_bytes(given, 0, even, alone) == 1000 * (4 * kept[0] + first)
    assert step_peak_bytes(given, 3, even, alone) < 1000 * (kept[0] + last)  # logits are gone before layers go back
    uneven = np.array([1.0, 1.0, 1.0, 1000.0])
    assert step_peak_bytes(given, 0, uneven, alone) < step_peak_bytes(given, 0, even, alone)
    # Of passes that run by turns, the forward pass fills as the backward pass frees, but for a layer of 2.
    overlapped = replace(in_parallel(given, vpp=2), parallel=replace(given.parallel, vpp=2), overlaps_experts=True)
    before, kept, running = (
        replace(overlapped, overlaps_experts=False),
        kept_bytes(overlapped, 0),
        running_bytes(overlapped, 0),
    )
    assert running == running_bytes(before, 0) + layer_bytes(overlapped)
    eight = np.full(8, 1000.0)
    assert step_peak_bytes(overlapped, 0, eight, alone * 2) == 1000 * (
        overlapped.schedule(8).in_flight(0, kept) + running
    )
    # At the loss, the last stage has what it sends: of as many micro-batches as stages, all recomputed.
    recomputed = replace(in_parallel(given, vpp=2), recompute=Recompute(granularity="full", num_layers=1))
    late, at_once = (
        step_peak_bytes(replace(recomputed, overlap_transfers=sends), 3, even, alone) for sends in (True, False)
    )
    assert late - at_once == 4 * 1000 * layer_input_bytes(given)


def test_tied_embeddings_are_one_matrix_on_one_stage():
    """Divided by tensor parallelism, with a weight, its gradient, and a share of its optimizer."""
    for tp, pp, dp in ((1, 1, 1), (4, 1, 2), (4, 2, 2)):
        given = job(model=replace(MODELS["llama2-7b"], num_layers=4), tp=tp, pp=pp, dp=dp)
        for divided in (True, False):
            apart, tied = (held_bytes(given, divided=divided, tied=each) for each in (False, True))
            matrix = given.model.vocabulary_weights / tp * (6 + 12 / (dp if divided else 1))
            assert (apart - tied).tolist() == pytest.approx([matrix] if pp == 1 else [0, 0])


def test_a_stage_of_few_layers_is_fullest_at_its_output():
    """Logits in bf16 and their softmax in fp32 count whole; nothing else grows with a vocabulary."""
    one_layer = replace(MODELS["llama2-7b"], num_layers=1)
    peaks = [
        step_peak_bytes(job(model=replace(one_layer, padded_vocab_size=size)), 0, np.array([100.0]), [(0.0, 0.0)])
        for size in (1 << 18, 1 << 19)
    ]
    assert peaks[1] - peaks[0] == 100 * (2 + 4) * (1 << 18)
