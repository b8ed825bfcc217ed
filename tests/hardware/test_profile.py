"""Profiles: the kernel model against counting tiles one by one, files that hold one, and files that do not."""

import json
from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_wlb.documents import SEGMENT
from megatron_wlb.hardware.network import H100_NETWORK
from megatron_wlb.hardware.profile import (
    FLOPS_PROFILE,
    GPUS,
    KernelModel,
    KernelTimes,
    Profile,
    Versions,
    generations,
    gpu_of,
    load_profile,
    shipped_profiles,
)


def count_tiles(segments, tile_rows, window=1 << 20):
    """Tiles with a visible key, query tiles, and hidden tiles, of causal segments [start, stop), one at a time.

    Tiles before the first key of a tile's first query do not count.
    """
    tiles = query_tiles = hidden = 0
    for start, stop in segments:
        for first_row in range(start, stop, tile_rows):
            end = min(first_row + tile_rows, stop)
            query_tiles += 1
            seen = [key < end and key + tile_rows > first_row - window for key in range(0, stop, tile_rows)]
            tiles, hidden = tiles + sum(seen), hidden + len(seen) - sum(seen)
    return tiles, query_tiles, hidden


def call(segments):
    return np.array([(d, *s) for d, s in enumerate(segments)], SEGMENT)


@given(
    st.lists(st.tuples(st.integers(0, 200), st.integers(0, 200)).map(lambda s: (s[0], sum(s))), max_size=8),
    st.integers(1, 70),
    st.integers(1, 4),
    st.integers(0, 250),
)
def test_the_kernel_model_counts_tiles(segments, tile_rows, heads, window):
    kernel = KernelModel(tile_rows=tile_rows, launch=1.0, tile=1e3, query_tile=1e9, hidden=0.5, heads=heads)
    counts = kernel.count(call(segments))
    *expected, hidden = count_tiles(segments, tile_rows)
    assert counts == tuple(expected)
    assert kernel.time(2, *counts) == 2.0 + heads * (1e3 * counts[0] + 1e9 * counts[1])
    # The mask of whole documents is aligned to the top left.
    whole = [(0, stop) for _, stop in segments]
    is_late = any(start for start, _ in segments)
    launches, *twice, paid = kernel.count_shard((call(segments), call(whole), call([])))
    assert (launches, paid) == (2 * bool(segments), is_late * hidden)
    assert twice == [sum(pair) for pair in zip(counts, kernel.count(call(whole)), strict=True)]
    near = replace(kernel, window=window)
    assert near.count(call(segments)) == count_tiles(segments, tile_rows, window)[:2]
    assert near.count_shard((call(segments),))[3] == 0
    assert kernel.time(2, *counts, paid) == kernel.time(2, *counts) + heads * 0.5 * paid


def test_a_backward_that_was_not_measured_takes_as_much_longer_as_it_has_products():
    forward = KernelTimes(launch=1.0, tile=2.0, query_tile=3.0, hidden=4.0)
    profile = Profile(name="", tile_rows=128, forward=forward, head_size=64)
    backward = profile.kernels(head_size=128)[1]
    assert (backward.launch, backward.tile, backward.query_tile, backward.hidden) == (2.5, 10.0, 15.0, 20.0)
    assert replace(profile, attention_backward=3.0).kernels()[1].tile == 6.0
    own = KernelTimes(launch=5.0, tile=6.0, query_tile=7.0, hidden=8.0)
    given = replace(profile, backward=own, fp8=(own, forward))
    of_forward, of_own = (
        KernelModel(tile_rows=128, heads=3, kv_chunks=4, **asdict(each.scaled(2.0)) | {"launch": each.launch})
        for each in (forward, own)
    )
    assert given.kernels(heads=3, head_size=128, kv_chunks=4) == (of_forward, of_own)
    assert given.kernels(heads=3, head_size=128, kv_chunks=4, fp8=True) == (of_own, of_forward)


def test_a_product_by_hand():
    """Of 40 x 30 outputs and half a wave, at twice the rate; operands of 70 x 20 values are quantized."""
    profile = replace(load_profile("h100-fa2"), wave_outputs=1000.0, kernel_us=5.0, assumed_tflops=100.0)
    assert profile.product(40, 30, 20) == pytest.approx(5 + 2 * (1200 + 500) * 20 / 100e6)
    quantized = 3 * 70 * 20 / 2700e3
    assert profile.product(40, 30, 20, 2.0, 3.0) == pytest.approx(5 + 2 * 1700 * 20 / 200e6 + quantized)
    with pytest.raises(ValueError, match="memory_gib is 0.0; it must be"):
        replace(profile, memory_gib=0.0)
    alike = KernelTimes(launch=1.0, tile=2.0, query_tile=1.0)
    assert replace(profile, forward=alike, backward=alike, linear_tflops=(1.0, 2.0)).rates == (1.0, 2.0)
    assert profile.rates == (100.0, 100.0)


def test_a_profile_says_where_it_differs_from_a_run():
    profile = replace(
        load_profile("h100-fa2"), backend="aten", versions=Versions(python="3.12", torch="2.8", cuda="12")
    )
    run = {"head_size": 128, "dtype": "bf16", "backend": "aten", "versions": Versions(torch="2.8", cudnn="91900")}
    assert profile.differences(**run) == ""
    others = {"head_size": 64, "dtype": "fp32", "backend": "te", "versions": Versions(torch="2.9", cuda="13")}
    assert profile.differences(**others) == (
        "head size 128, not 64, dtype bf16, not fp32, backend aten, not te, torch 2.8, not 2.9, cuda 12, not 13"
    )
    assert FLOPS_PROFILE.differences(**others) == ""


def test_shipped_profiles_load(tmp_path):
    assert {name.split("-")[0] for name in shipped_profiles()[1:]} == set(GPUS)
    assert load_profile("flops") is FLOPS_PROFILE
    (tmp_path / "flops.json").write_text(
        '{"name": "flops", "tile_rows": 1, "forward": {"launch": 1, "tile": 1, "query_tile": 0}}'
    )
    assert not load_profile(str(tmp_path / "flops.json")).counts_pairs
    assert load_profile("h100-fa2") == Profile(
        name="h100-fa2",
        tile_rows=128,
        forward=KernelTimes(launch=23.55, tile=0.0256, query_tile=0.0),
        backward=KernelTimes(launch=138.6, tile=0.06486, query_tile=0.04896),
        head_size=128,
        dtype="bf16",
        device="NVIDIA H100",
        gains=(("delayed", 1.9, 2.01), ("tensorwise", 1.9, 3.2), ("blockwise", 1.9, 5.58)),
    )


@pytest.mark.parametrize("name", shipped_profiles()[1:])
def test_a_shipped_profile_is_of_the_gpu_in_its_name(name):
    profile, gpu = load_profile(name), name.split("-")[0]
    assert (profile.name, gpu_of(profile.device)) == (name, gpu)
    assert [of for of in (*GPUS, None) if name in generations(of)] == [gpu]
    assert profile.network.gpus_per_node == (72 if gpu.startswith("gb") else 8)
    assert (profile.forward.hidden, profile.backward.hidden > 0) == (0, gpu in ("h100", "h200") and "cudnn" in name)
    newer = load_profile(GPUS[gpu])
    assert newer.memory_gib == profile.memory_gib and newer.memory_gb_per_s == profile.memory_gb_per_s


@pytest.mark.parametrize(
    ("device", "gpu"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA GB200", "gb200"),
        ("rehearsed B200", "b200"),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA H2000", None),
        ("NVIDIA H800", None),
    ],
)
def test_a_gpu_is_known_by_its_name(device, gpu):
    assert gpu_of(device) == gpu


def test_a_profile_says_of_which_runs_it_is_not():
    hopper, blackwell = load_profile("h100-cudnn"), load_profile("b200-cudnn-2025")
    assert hopper.misfit("NVIDIA H100 PCIe", "delayed") == hopper.misfit(None, "bf16") == ""
    of_another = "is of NVIDIA H100, and the run's device is NVIDIA B200: take b200-cudnn-2025"
    assert of_another in hopper.misfit("NVIDIA B200", "bf16")
    assert "measure it by megatron-wlb profile" in hopper.misfit("NVIDIA H800", "bf16")
    assert "no rate of mxfp8, which counts as bf16, unlike the profiles of b200, gb200, gb300" in hopper.misfit(
        None, "mxfp8"
    )
    assert blackwell.misfit("b200", "mxfp8") == FLOPS_PROFILE.misfit("NVIDIA B200", "mxfp8") == ""
    assert blackwell.misfit(None, "custom").endswith("has no rate of custom, which counts as bf16.")
    mine = replace(hopper, device="NVIDIA L40S")
    assert mine.misfit("NVIDIA L40S", "bf16") == "" != mine.misfit("NVIDIA H100", "bf16")


def test_low_precision_speeds_up_products_and_quantizes_their_operands():
    profile = load_profile("b200-cudnn-2025")
    assert profile.gain("bf16", "mlp") == profile.gain("mxfp8", "output") == profile.gain("custom", "mlp") == (1, 0)
    assert profile.gain("tensorwise", "experts") == profile.gain("tensorwise", "mlp")
    assert profile.gain("nvfp4", "experts") == profile.gain("mxfp8", "experts") == profile.gain("mxfp8", "mlp")
    large, small = (1 << 15, 1 << 14, 1 << 14), (1 << 13, 1 << 10, 1 << 10)

    def faster(shape, precision):
        return profile.product(*shape) / profile.product(*shape, *profile.gain(precision, "mlp"))

    rate, quantized = profile.gain("mxfp8", "mlp")
    assert faster(small, "mxfp8") < faster(large, "mxfp8") < rate < faster(large, "nvfp4")
    rows, columns, inner = large
    alone = profile.product(*large, rate)
    assert profile.product(*large, rate, quantized) - alone == pytest.approx(
        quantized * (rows * inner + inner * columns) / profile.memory_gb_per_s / 1e3
    )


def test_attention_is_in_fp8_only_if_asked_for_and_measured():
    measured, other = load_profile("gb200-cudnn-9.22"), load_profile("b200-cudnn-2025")
    assert measured.kernels(fp8=True)[0].tile < measured.kernels()[0].tile
    assert other.fp8 is None and other.kernels(fp8=True) == other.kernels()


FORWARD = {"launch": 3, "tile": 0.5, "query_tile": 0.25}
MINE = {"name": "mine", "tile_rows": 64, "forward": FORWARD}
NETWORK = {"name": "slow"} | {name: [[8], [1], [10]] for name in ("all_gather", "reduce_scatter", "all_reduce")}


def test_a_profile_from_a_file(tmp_path):
    path = tmp_path / "mine.json"
    network = NETWORK | {"all_gather": [[2, 8], [1, 2], [30, 40]], "link_gb_per_s": 5, "source": "NCCL"}
    path.write_text(json.dumps(MINE | {"linear_tflops": [3, 2.5], "network": network, "device": "anything"}))
    loaded = load_profile(str(path))
    assert loaded.rates == (3, 2.5) and loaded.backward is None
    kernel, _ = loaded.kernels()
    assert kernel.time(1, *kernel.count(call([(0, 65)]))) == 3 + 0.5 * 3 + 0.25 * 2
    assert (loaded.network.name, loaded.network.link_gb_per_s, loaded.network.hop_us) == ("slow", 5, 10)
    assert loaded.network.all_gather.gb_per_s == (30, 40)
    path.write_text(json.dumps(MINE))
    assert load_profile(str(path)).network == H100_NETWORK


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("", "truncated"),
        (MINE | {"forward": FORWARD | {"launch": -1}}, "forward.launch is -1; it must be float >= 0.0"),
        (MINE | {"forward": dict.fromkeys(FORWARD, 0)}, "its kernel times are all 0; give at least one"),
        (MINE | {"tile_rows": 96}, "tile_rows is 96; it must be a power of two up to 65536"),
        (MINE | {"tile_rows": 1 << 17}, "tile_rows is 131072; it must be int <= 65536"),
        (MINE | {"tile_rows": 0}, "tile_rows is 0; it must be int >= 1"),
        (MINE | {"head_size": 0}, "head_size is 0; it must be int >= 1"),
        (MINE | {"linear_tflops": [1, 0]}, r"linear_tflops\[1\] is 0; it must be float >= 1e-06"),
        (
            MINE | {"linear_tflops": [1, 1], "forward": FORWARD | {"tile": 0}},
            "go with kernel times whose tile is over 0",
        ),
        (MINE | {"memory_gb_per_s": 0}, "memory_gb_per_s is 0; it must be float >= 1e-06"),
        (MINE | {"gains": [["delayed", 0, 2]]}, r"gains\[0\]\[1\] is 0; it must be float >= 1e-06"),
        (MINE | {"gains": [["delayed", 1.9, -1]]}, r"gains\[0\]\[2\] is -1; it must be float >= 0.0"),
        (MINE | {"fp8": [FORWARD, FORWARD | {"tile": -1}]}, r"fp8\[1\].tile is -1; it must be float >= 0.0"),
        (MINE | {"name": "x\x1b]0;y\n"}, r"name is 'x\\x1b\]0;y\\n'; it must be text without control characters; give"),
        (MINE | {"tile_row": 64}, "its field tile_row is not one that this release reads; correct or remove it; give"),
        (MINE | {"fp8": [FORWARD, FORWARD | {"tyle": 1}]}, r"its field fp8.1.tyle is not one"),
        (MINE | {"network": NETWORK | {"hops_us": 1}}, "its field network.hops_us is not one"),
        (MINE | {"versions": {"pytorch": "2.9.0"}}, "its field versions.pytorch is not one"),
        (MINE | {"versions": {"torch": 2.9}}, "versions.torch is 2.9; it must be str | None, got float"),
        (MINE | {"network": {"name": "x"}}, r"missing required field `all_gather` - at `\$.network`"),
    ],
)
def test_what_is_not_a_profile_is_refused(tmp_path, content, why):
    path = tmp_path / "broken.json"
    path.write_text(json.dumps(content) if content else "")
    with pytest.raises(ValueError, match=f"(?s)broken.json is not a megatron_wlb profile: .*{why}"):
        load_profile(str(path))


def test_attention_that_takes_twice_as_long_does_so_in_fp8():
    one, two = (KernelTimes(launch=n, tile=n, query_tile=n) for n in (1.0, 2.0))
    given = Profile(name="mine", tile_rows=128, forward=one, backward=two, fp8=(one, two))
    twice = given.with_attention(2.0)
    assert twice == replace(given, forward=two, backward=two.scaled(2.0), fp8=(two, two.scaled(2.0)))
    assert replace(given, backward=None, fp8=None).with_attention(2.0) == replace(twice, backward=None, fp8=None)
