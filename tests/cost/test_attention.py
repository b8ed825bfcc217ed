"""Work of documents, the kernel model against counting tiles one by one, and calibration profiles."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_wlb.cost.attention import attention_kernels, sharding_kernel
from megatron_wlb.cost.exchange import exchange_model
from megatron_wlb.cost.work import document_work
from megatron_wlb.describe.settings import PlanSettings
from megatron_wlb.hardware.network import Group, load_network
from megatron_wlb.hardware.profile import (
    FLOPS_PROFILE,
    KernelModel,
    KernelTimes,
    Profile,
    load_profile,
    shipped_profiles,
)
from megatron_wlb.job import MAX_TOKENS, Recompute
from megatron_wlb.model import MODELS
from megatron_wlb.sharding.select import shard
from megatron_wlb.sharding.volume import moved_rows
from megatron_wlb.simulate.passes import H100, pass_times
from megatron_wlb.types import SEGMENT
from tests.jobs import job

LLAMA2_7B = MODELS["llama2-7b"]
V3 = replace(MODELS["deepseek-v3"], num_layers=8)


def test_attention_costs_as_much_as_the_rest_at_the_crossover():
    assert document_work(np.array([1, 100, 50]), 100).tolist() == [101, 2 * 100**2, 50 * 150]


def test_work_is_exact_for_the_longest_document():
    assert document_work(np.array([MAX_TOKENS], np.int32), 1 << 20).tolist() == [MAX_TOKENS * (MAX_TOKENS + (1 << 20))]


def test_crossover_of_llama2_7b():
    # Per layer 4 * 4096^2 weights of attention and 3 * 4096 * 11008 of the MLP, and a 32nd of the output projection.
    weights = 4 * 4096**2 + 3 * 4096 * 11008 + 4096 * 32000 // 32
    assert LLAMA2_7B.crossover_tokens == weights // 4096 == 50_408
    assert replace(LLAMA2_7B, padded_vocab_size=0).crossover_tokens == 49_408


def test_crossover_follows_the_model():
    base = LLAMA2_7B.crossover_tokens
    assert replace(LLAMA2_7B, num_query_groups=8).crossover_tokens < base
    assert replace(LLAMA2_7B, gated_linear_unit=False).crossover_tokens < base
    two_experts = replace(LLAMA2_7B, ffn_hidden_size=2 * 11008).crossover_tokens
    assert two_experts == base + 3 * 11008


def count_tiles(segments, tile_rows):
    """Tiles with a visible key, and query tiles, of causal segments [start, stop), one tile at a time."""
    tiles = query_tiles = 0
    for start, stop in segments:
        for first_row in range(start, stop, tile_rows):
            end = min(first_row + tile_rows, stop)
            query_tiles += 1
            tiles += sum(first_key < end for first_key in range(0, stop, tile_rows))
    return tiles, query_tiles


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 200), st.integers(0, 200)).map(lambda s: (s[0], sum(s))), max_size=8),
    st.integers(1, 70),
    st.integers(1, 4),
)
def test_the_kernel_model_counts_tiles(segments, tile_rows, heads):
    kernel = KernelModel(tile_rows=tile_rows, launch=1.0, tile=1e3, query_tile=1e9, heads=heads)
    counts = kernel.count(call(segments))
    assert counts == count_tiles(segments, tile_rows)
    assert kernel.time(2, *counts) == 2.0 + heads * (1e3 * counts[0] + 1e9 * counts[1])


def call(segments):
    return np.array([(d, *s) for d, s in enumerate(segments)], SEGMENT)


def test_flops_profile_counts_attended_pairs():
    kernel = sharding_kernel(job(cp=2, profile=FLOPS_PROFILE))
    assert kernel.time(2, *kernel.count(call([(0, 4), (5, 7)]))) == kernel.heads * ((1 + 2 + 3 + 4) + (6 + 7))
    assert kernel.exchange == 0


BOTH = Profile(
    name="both",
    tile_rows=128,
    forward=KernelTimes(launch=1.0, tile=2.0, query_tile=3.0),
    backward=KernelTimes(launch=10.0, tile=20.0, query_tile=30.0),
)


def test_a_kernel_adds_up_both_directions_with_launches_for_every_part_of_a_ring():
    kernel = sharding_kernel(job(profile=BOTH, tp=2, cp=2, cp_exchange="ring"))
    assert (kernel.launch, kernel.tile, kernel.query_tile, kernel.heads) == (11.0, 22.0, 33.0, 2)
    assert kernel.launches(np.array([1, 2]), np.array([5, 0])).tolist() == [2, 2]
    alone = sharding_kernel(job(profile=BOTH))
    assert (alone.parts, alone.heads, alone.exchange) == (1, 4, 0.0)
    assert sharding_kernel(job(profile=BOTH, cp=4)).parts == 1


def test_a_backward_that_was_not_measured_takes_as_much_longer_as_it_has_products():
    _, backward = attention_kernels(job(profile=replace(BOTH, backward=None)))
    assert (backward.launch, backward.tile, backward.query_tile) == (2.5, 5.0, 7.5)
    assert attention_kernels(job(profile=replace(BOTH, backward=None)), 3.0)[1].tile == 6.0


def test_an_exchanged_row_costs_what_it_does_in_a_window_of_them():
    """Twice in 16 bits and once in 32, of K and V of the key heads of a rank."""
    given = job(profile=BOTH, tp=2, cp=4, context_length=1 << 16)
    ranks, network, key_values = Group(size=4, stride=2), load_network(), 2 * (4 // 2) * 16
    latency, byte = network.all_to_all(ranks)
    arrive, leave = (latency + (1 << 16) * size * key_values * byte for size in (2, 4))
    assert sharding_kernel(given).exchange == pytest.approx((2 * arrive + leave) / 2**16)
    halved = given.sharded(cp_gradients="model")
    assert sharding_kernel(halved).exchange == pytest.approx(3 * arrive / 2**16)
    in_fp32 = replace(given, bytes_per_value=4)
    assert sharding_kernel(in_fp32) == sharding_kernel(in_fp32.sharded(cp_gradients="model"))
    saved = given.sharded(save_gathered_kv=True)
    assert sharding_kernel(saved).exchange == pytest.approx((arrive + leave) / 2**16)
    for exchange in ("all", "ring"):
        assert sharding_kernel(replace(given, cp_exchange=exchange)).exchange == 0, "the same for every sharding"


MEASURED = Profile(
    name="",
    tile_rows=128,
    forward=KernelTimes(launch=20.0, tile=0.026, query_tile=0.1),
    backward=KernelTimes(launch=40.0, tile=0.065, query_tile=0.2),
    linear_tflops=(500.0, 400.0),
    head_size=128,
)


def test_kernels_and_exchange_of_latent_attention():
    """Products of 192 values and of 128 take as long as of 160 and 160; K and V of a head are 320 values."""
    latent = job(model=V3, tp=8, cp=8, profile=MEASURED, cp_exchange="shared")
    plain = replace(latent, model=replace(latent.model, kv_channels=128, v_head_dim=0, kv_lora_rank=0))
    for of_latent, of_plain in zip(attention_kernels(latent), attention_kernels(plain), strict=True):
        assert (of_latent.tile, of_latent.query_tile) == pytest.approx(
            (1.25 * of_plain.tile, 1.25 * of_plain.query_tile)
        )
        assert (of_latent.launch, of_latent.heads) == (of_plain.launch, 16)
    one, two = (exchange_model(each, load_network()) for each in (latent, plain))
    assert (one.arrive, one.leave) == pytest.approx((two.arrive * 320 / 256, two.leave * 320 / 256))


@pytest.mark.parametrize(
    ("cp", "chosen", "cp_sharding"),
    [(2, "shared", "auto"), (16, "latents", "auto"), (16, "latents", "wlb"), (32, "latents", "per-sequence")],
)
def test_latents_travel_where_that_is_predicted_to_be_faster(cp, chosen, cp_sharding):
    """DeepSeek-V3 at TP = 8: between nodes nothing hides so many bytes; a few are cheaper than to expand all again."""
    settings = PlanSettings(cp_sharding=cp_sharding)
    wide = {"model": V3, "tp": 8, "cp": cp, "context_length": 1 << 17, "settings": settings}
    given = job(**wide, profile=load_profile("h100-fa2"))
    assert given.cp_exchange == chosen
    other = replace(given, cp_exchange="shared" if chosen == "latents" else "latents")
    documents = np.array([1 << 16, 1 << 15, 1 << 14, 1 << 14], np.int64)
    times = [
        sum(float(layer.total[0]) for layer in pass_times(each, H100, [shard(documents, each)[1]]).layers)
        for each in (given, other)
    ]
    assert times[0] < times[1]


@pytest.mark.parametrize(
    "changes", [{"profile": FLOPS_PROFILE}, {"offloaded_layers": 2}, {"cp": 1}, {"model": LLAMA2_7B}]
)
def test_keys_and_values_travel_where_latents_cannot(changes):
    """By a profile without a unit of time, with layers that are offloaded, on one rank, and where there are none."""
    wide = {"model": V3, "tp": 8, "cp": 16, "context_length": 1 << 17, "profile": load_profile("h100-fa2")}
    assert job(**wide).cp_exchange == "latents"
    assert job(**wide | changes).cp_exchange == "shared"


def test_costs_of_latents_by_hand():
    """512 + 64 values of 16 bits come once, an eighth to each rank of 8, and so do gradients; K and V are expanded
    twice. Within the node an eighth of a row is there already."""
    given = job(model=V3, tp=8, cp=8, profile=replace(MEASURED, linear_tflops=None), cp_exchange="latents")
    network, inside = load_network(), load_network().node
    latency, byte = network.all_to_all(Group(size=8, stride=8))
    moved, product = 576 * 2 * byte / 8, 2 * 512 * 128 * (128 + 128) / 8 / 550e6
    gather, scatter, reduce = (
        7 / 8 * 2e-3 / inside[name][8][1] for name in ("all_gather", "reduce_scatter", "all_reduce")
    )
    arrive = moved + (576 + 512) * gather + product
    leave = moved + 2 * product + 512 * (gather + scatter) + 64 * 2 * reduce
    again = product + 512 * gather
    model = exchange_model(given, network)
    assert (model.arrive, model.leave, model.ahead) == pytest.approx((arrive, leave + again, 0))
    assert model.latency == pytest.approx(latency + 2 * inside["all_gather"][8][0])
    for kept in ({"save_gathered_kv": True}, {"recompute": Recompute(granularity="full", method="uniform")}):
        assert exchange_model(replace(given, **kept), network).leave == pytest.approx(leave)
    asked = replace(
        given, recompute=Recompute(granularity="selective", modules=("mla_up_proj",)), save_gathered_kv=True
    )
    assert exchange_model(asked, network) == model
    alone = replace(given, parallel=replace(given.parallel, tp=1))
    _, byte = network.all_to_all(Group(size=8, stride=1))
    assert exchange_model(alone, network).arrive == pytest.approx(576 * 2 * byte + 8 * product)


def test_passes_of_latents_by_hand():
    """Nothing hides them; a rank expands its own rows again, too."""
    given = job(model=V3, tp=8, cp=8, profile=replace(MEASURED, linear_tflops=None), cp_exchange="latents")
    plan = shard(np.array([64]), given)[1]
    forward, backward = pass_times(given, H100, [plan]).layers
    kept = pass_times(given.sharded(save_gathered_kv=True), H100, [plan]).layers[1]
    assert backward.linear - kept.linear == pytest.approx(8 * 2 * 512 * 128 * (128 + 128) / 8 / 550e6)
    exchange = exchange_model(given, load_network()).times(moved_rows(plan).max())
    assert [forward.exchange[0], backward.exchange[0]] == pytest.approx([float(each) for each in exchange])


def test_a_profile_says_where_it_differs_from_a_run():
    profile = replace(MEASURED, dtype="bf16", backend="aten")
    assert profile.differences(head_size=128, dtype="bf16", backend="aten") == ""
    assert (
        profile.differences(head_size=64, dtype="bf16", backend="te") == "head size 128, not 64, backend aten, not te"
    )
    assert FLOPS_PROFILE.differences(head_size=64, dtype="fp32", backend="cpu") == ""


def test_shipped_profiles_load():
    assert shipped_profiles() == ["flops", "h100-fa2"]
    assert load_profile("flops") is FLOPS_PROFILE
    profile = load_profile("h100-fa2")
    assert profile.tile_rows == 128
    assert profile.forward == KernelTimes(launch=23.55, tile=0.0256, query_tile=0.0)
    assert profile.backward is None
    assert profile.linear_tflops is None
    assert (
        profile.differences(head_size=64, dtype="fp32", backend="cpu") == "head size 128, not 64, dtype bf16, not fp32"
    )


TIMES = {"launch": 3, "tile": 0.5, "query_tile": 0.25}


def profile(**changes):
    kernel = {"tile_rows": 64, "forward": TIMES | changes.pop("forward", {}), "backward": None}
    return {"name": "mine", "kernel": kernel | changes.pop("kernel", {})} | changes


def test_a_profile_from_a_file(tmp_path):
    path = tmp_path / "mine.json"
    known = {"linear_tflops": {"forward": 3, "backward": 2.5}}
    path.write_text(json.dumps(profile(**known, us_per_mib={"gather": 2}, device="anything")))
    loaded = load_profile(str(path))
    assert loaded.linear_tflops == (3, 2.5)
    kernel, _ = loaded.kernels()
    assert kernel.time(1, *kernel.count(call([(0, 65)]))) == 3 + 0.5 * 3 + 0.25 * 2


def test_a_profile_that_does_not_exist():
    with pytest.raises(
        ValueError, match="^no profile 'a100': give a JSON file or one of the shipped profiles flops, h1"
    ):
        load_profile("a100")


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"name": "x", "kernel": 3}',
        json.dumps({"name": "x"}),
        json.dumps(profile(forward={"unknown": 1})),
        json.dumps(profile(forward={"launch": "3"})),
        json.dumps(profile(forward={"launch": -1})),
        json.dumps(profile(forward={"tile": float("nan")})),
        json.dumps(profile(forward={"tile": float("inf")})),
        json.dumps(profile(forward={"launch": 0, "tile": 0, "query_tile": 0})),
        json.dumps(profile(kernel={"forward": None})),
        json.dumps(profile(kernel={"backward": {"tile": 1}})),
        json.dumps(profile(kernel={"tile_rows": 96})),
        json.dumps(profile(kernel={"tile_rows": 1 << 17})),
        json.dumps(profile(kernel={"tile_rows": 0})),
        json.dumps(profile(kernel={"tile_rows": 1.5})),
        json.dumps(profile(kernel={"head_size": "128"})),
        json.dumps(profile(linear_tflops={"forward": 1})),
        json.dumps(profile(linear_tflops={"forward": 1, "backward": 0})),
        json.dumps(profile(linear_tflops={"forward": 1, "backward": 1}, forward={"tile": 0})),
    ],
)
def test_what_is_not_a_profile_is_refused(tmp_path, content):
    path = tmp_path / "broken.json"
    path.write_text(content)
    with pytest.raises(ValueError, match="broken.json is not a megatron_wlb profile"):
        load_profile(str(path))


def test_a_binary_file_is_not_a_profile(tmp_path):
    path = tmp_path / "broken.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="is not a megatron_wlb profile"):
        load_profile(str(path))
