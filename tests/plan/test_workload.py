"""Work of documents, the kernel model against counting tiles one by one, and calibration profiles."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_wlb.config import MAX_TOKENS
from megatron_wlb.plan.workload import (
    FLOPS_PROFILE,
    KernelModel,
    crossover_from_flops,
    document_work,
    load_profile,
    shipped_profiles,
)

LLAMA2_7B = {
    "num_layers": 32,
    "hidden_size": 4096,
    "ffn_hidden_size": 11008,
    "num_attention_heads": 32,
    "num_query_groups": 32,
    "kv_channels": 128,
    "gated_linear_unit": True,
    "padded_vocab_size": 32000,
}


def test_attention_costs_as_much_as_the_rest_at_the_crossover():
    assert document_work(np.array([1, 100, 50]), 100).tolist() == [101, 2 * 100**2, 50 * 150]


def test_work_is_exact_for_the_longest_document():
    assert document_work(np.array([MAX_TOKENS], np.int32), 1 << 20).tolist() == [MAX_TOKENS * (MAX_TOKENS + (1 << 20))]


def test_crossover_of_llama2_7b():
    # Per layer 4 * 4096^2 weights of attention and 3 * 4096 * 11008 of the MLP, and a 32nd of the output projection.
    weights = 4 * 4096**2 + 3 * 4096 * 11008 + 4096 * 32000 // 32
    assert crossover_from_flops(**LLAMA2_7B) == weights // 4096 == 50_408
    assert crossover_from_flops(**(LLAMA2_7B | {"padded_vocab_size": 0})) == 49_408


def test_crossover_follows_the_model():
    base = crossover_from_flops(**LLAMA2_7B)
    assert crossover_from_flops(**(LLAMA2_7B | {"num_query_groups": 8})) < base
    assert crossover_from_flops(**(LLAMA2_7B | {"gated_linear_unit": False})) < base
    assert crossover_from_flops(**(LLAMA2_7B | {"active_experts": 2})) > base


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
def test_launch_time_counts_tiles(segments, tile_rows, heads):
    kernel = KernelModel(name="", tile_rows=tile_rows, launch=1.0, tile=1e3, query_tile=1e9, heads=heads)
    starts, stops = np.array(segments, np.int64).reshape(-1, 2).T
    tiles, query_tiles = count_tiles(segments, tile_rows)
    expected = 1.0 + heads * (1e3 * tiles + 1e9 * query_tiles) if segments else 0.0
    assert kernel.launch_time(starts, stops) == expected


def test_flops_profile_counts_attended_pairs():
    starts, stops = np.array([0, 5]), np.array([4, 7])
    assert FLOPS_PROFILE.kernel.launch_time(starts, stops) == (1 + 2 + 3 + 4) + (6 + 7)


def test_shipped_profiles_load():
    assert shipped_profiles() == ["flops", "h100-fa2"]
    assert load_profile("flops") is FLOPS_PROFILE
    profile = load_profile("h100-fa2")
    assert profile.kernel == KernelModel(name="h100-fa2", tile_rows=128, launch=19.8, tile=0.0260, query_tile=0.104)
    assert profile.crossover_tokens is None


def profile(**changes):
    kernel = {"tile_rows": 64, "launch": 3, "tile": 0.5, "query_tile": 0.25}
    return {"name": "mine", "kernel": kernel | changes.pop("kernel", {})} | changes


def test_a_profile_from_a_file(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(profile(crossover_tokens=40_000, device="anything")))
    loaded = load_profile(str(path))
    assert loaded.crossover_tokens == 40_000
    assert loaded.kernel.launch_time(np.array([0]), np.array([65])) == 3 + 0.5 * 3 + 0.25 * 2


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
        json.dumps(profile(kernel={"name": "again"})),
        json.dumps(profile(kernel={"unknown": 1})),
        json.dumps(profile(kernel={"launch": "3"})),
        json.dumps(profile(kernel={"launch": -1})),
        json.dumps(profile(kernel={"tile": float("nan")})),
        json.dumps(profile(kernel={"tile": float("inf")})),
        json.dumps(profile(kernel={"launch": 0, "tile": 0, "query_tile": 0})),
        json.dumps(profile(kernel={"tile_rows": 0})),
        json.dumps(profile(kernel={"tile_rows": 1.5})),
        json.dumps(profile(kernel={"heads": 0})),
        json.dumps(profile(crossover_tokens=0)),
        json.dumps(profile(crossover_tokens=1.5)),
        json.dumps(profile(crossover_tokens="50000")),
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
