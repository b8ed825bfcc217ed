"""Work of documents, and the kernel model that a job's sharding goes by."""

from dataclasses import replace

import numpy as np
import pytest

from megatron_wlb.cost.attention import sharding_kernel
from megatron_wlb.hardware.network import Group
from megatron_wlb.hardware.profile import FLOPS_PROFILE, KernelTimes, Profile, load_profile
from megatron_wlb.job import MAX_TOKENS
from megatron_wlb.model import MODELS
from megatron_wlb.sharding.routing import moved_rows
from megatron_wlb.sharding.select import round_costs, shard
from megatron_wlb.types import document_work
from tests.jobs import job
from tests.reference.rounds import in_rounds

LLAMA2_7B = MODELS["llama2-7b"]
BOTH = Profile(
    name="both",
    tile_rows=128,
    forward=KernelTimes(launch=1.0, tile=2.0, query_tile=3.0),
    backward=KernelTimes(launch=10.0, tile=20.0, query_tile=30.0),
    head_size=128,
)


def test_work_is_exact_and_at_the_crossover_attention_costs_as_much_as_the_rest():
    assert document_work(np.array([1, 100, 50]), 100).tolist() == [101, 2 * 100**2, 50 * 150]
    assert document_work(np.array([MAX_TOKENS], np.int32), 1 << 20).tolist() == [MAX_TOKENS * (MAX_TOKENS + (1 << 20))]


def test_crossover_follows_the_model():
    # Per layer 4 * 4096^2 weights of attention and 3 * 4096 * 11008 of the MLP, and a 32nd of the output projection.
    weights = 4 * 4096**2 + 3 * 4096 * 11008 + 4096 * 32000 // 32
    base = LLAMA2_7B.crossover_tokens
    assert base == weights // 4096 == 50_408
    assert replace(LLAMA2_7B, padded_vocab_size=0).crossover_tokens == 49_408
    assert replace(LLAMA2_7B, num_query_groups=8).crossover_tokens < base
    assert replace(LLAMA2_7B, gated_linear_unit=False).crossover_tokens < base
    assert replace(LLAMA2_7B, ffn_hidden_size=2 * 11008).crossover_tokens == base + 3 * 11008  # two experts


def test_a_kernel_adds_up_both_directions_with_launches_for_every_part_of_a_ring():
    unsized = replace(BOTH, head_size=None)
    kernel = sharding_kernel(job(profile=unsized, tp=2, cp=2, cp_exchange="ring"))
    assert (kernel.launch, kernel.tile, kernel.query_tile, kernel.heads) == (11.0, 22.0, 33.0, 2)
    assert kernel.launches(np.array([1, 2]), np.array([5, 0])).tolist() == [2, 2]
    alone = sharding_kernel(job(profile=unsized))
    assert (alone.parts, alone.heads, alone.exchange) == (1, 4, 0.0)
    assert sharding_kernel(job(profile=unsized, cp=4)).parts == 1
    assert sharding_kernel(job(profile=FLOPS_PROFILE, cp=2)).exchange == 0


def test_an_exchanged_row_costs_what_it_does_in_a_window_of_them():
    """Twice in 16 bits and once in 32, of K and V of the key heads of a rank."""
    given = job(profile=BOTH, tp=2, cp=4, context_length=1 << 16)
    latency, byte = BOTH.network.all_to_all(Group(size=4, stride=2))
    key_values = 2 * (4 // 2) * 16
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


def test_shards_are_priced_with_the_network_of_their_profile():
    """Over slow links fewer rows move, and the sharding chosen for fast links would take longer, and vice versa."""
    profile = load_profile("h100-fa2")
    slow = replace(profile, network=replace(profile.network, link_gb_per_s=profile.network.link_gb_per_s / 10))
    near, far = (job(model=LLAMA2_7B, tp=8, cp=4, context_length=1 << 17, profile=each) for each in (profile, slow))
    lengths = np.array([40_000, 20_000, 16_000, 16_000, 8000, 8000, *[2000] * 11, 1072], np.int64)
    for_near, for_far = (shard(lengths, each)[1] for each in (near, far))
    assert moved_rows(for_far).max() < moved_rows(for_near).max()
    assert for_near.time < in_rounds(for_far, round_costs(near)).time
    assert for_far.time < in_rounds(for_near, round_costs(far)).time
