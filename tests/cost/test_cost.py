"""Work of documents, what the exchange of context-parallel ranks costs, and how much of it attention overlaps."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from megatron_wlb.cost.attention import (
    UNEQUAL_BACKWARD,
    UNMASKED_QUERIES,
    attention_kernels,
    exchange_model,
    exposed_exchange,
    ring_counts,
    ring_sums,
    sharding_kernel,
)
from megatron_wlb.cost.linear import loss, memory_bound, output_matrix, products
from megatron_wlb.cost.tiles import _tiled, exposed_share, gathered_bytes, overlap_adds, overlap_bytes
from megatron_wlb.documents import SEGMENT, document_work
from megatron_wlb.hardware.network import Group
from megatron_wlb.hardware.profile import FLOPS_PROFILE, KernelTimes, Profile, load_profile
from megatron_wlb.job import MAX_TOKENS, Recompute
from megatron_wlb.layers import KINDS
from megatron_wlb.layers.experts import COPY_PASSES, OVERLAP_HIDES, Experts
from megatron_wlb.model import FULL, MODELS
from megatron_wlb.sharding.select import shard
from megatron_wlb.simulate.passes import pass_times
from tests.jobs import job
from tests.reference.rounds import round_times

EXPERTS = Experts()
LLAMA2_7B = MODELS["llama2-7b"]
V3 = replace(MODELS["deepseek-v3"], num_layers=8)
MEASURED = Profile(
    name="",
    tile_rows=128,
    forward=KernelTimes(launch=20.0, tile=0.026, query_tile=0.1),
    backward=KernelTimes(launch=40.0, tile=0.065, query_tile=0.2),
    head_size=128,
    network=replace(load_profile("gb200-cudnn-9.22").network, gpus_per_node=8, link_gb_per_s=30.0),
)
NETWORK = MEASURED.network


@pytest.mark.parametrize(
    ("cp", "chosen", "cp_sharding"),
    [(2, "shared", "auto"), (16, "latents", "auto"), (16, "latents", "paper"), (32, "latents", "per-sequence")],
)
def test_latents_travel_where_that_is_predicted_to_be_faster(cp, chosen, cp_sharding):
    """DeepSeek-V3 at TP = 8: between nodes nothing hides so many bytes; a few are cheaper than to expand all again."""
    wide = {"model": V3, "tp": 8, "cp": cp, "context_length": 1 << 17, "cp_sharding": cp_sharding}
    given = job(**wide, profile=load_profile("h100-fa2"))
    assert given.cp_exchange == chosen
    other = replace(given, cp_exchange="shared" if chosen == "latents" else "latents")
    documents = np.array([1 << 16, 1 << 15, 1 << 14, 1 << 14], np.int64)
    times = [
        sum(float(layer.total[0]) for layer in pass_times(each, [shard(documents, each)]).layers)
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


def test_stages_by_hand():
    """Two ranks, two stages: what arrives late is waited for, and what leaves late, too."""
    times = np.array([[10.0, 12.0], [20.0, 20.0]])
    own, moved = np.array([3.0, 2.0]), (np.array([5.0, 30.0]), np.array([7.0, 40.0]))
    forward, backward = round_times((own, own), (times, times), moved)
    # The second begins to arrive at 5, when the first has and both ranks are free; it is there at 35.
    assert forward == 35 + 20
    # Nothing to hide the first: there at 5, the second at 35. The first leaves from 35 on, to 42, the second from 55.
    assert backward == 55 + 40
    # The first on its way for 3 before, then for all of its time and more.
    for ahead, earlier in ((3, 3), (5, 5), (9, 5)):
        _, before = round_times((own, own), (times, times), moved, prefetch=ahead)
        assert before == backward - earlier
    hidden = round_times((10 * own, 100 * own), (times, times), (moved[0] / 10, moved[1] / 10))
    assert hidden == (30 + 10 + 20, max(0.5 + 10 + 20 + 300, 0.5 + 12 + 20 + 200))


@pytest.mark.parametrize("cp", [2, 8])
def test_a_ring_waits_for_hops_that_are_longer_than_its_parts(cp):
    """CP - 1 hops of K and V forward; backward as many, and of their gradients."""
    given, rows = job(model=LLAMA2_7B, tp=8, cp=cp, cp_exchange="ring", profile=MEASURED), np.array([131072.0])
    hops = NETWORK.collective("all_gather", rows * 2 * 4 * 128 * 2, Group(size=cp, stride=8))
    short, long = hops / (cp - 1) / 2, hops
    forward, backward = exposed_exchange(given, rows, (cp * short, cp * short))
    assert forward == pytest.approx(hops - (cp - 1) * short)
    assert backward == pytest.approx(2 * hops - cp * short)
    assert exposed_exchange(given, rows, (cp * long, 2 * cp * long)) == (0, 0)


@pytest.mark.parametrize("cp", [1, 4])
def test_calls_of_a_ring_one_by_one(cp):
    """Of documents of tiles and of less: a rank's own keys by the mask, then those of each rank before or after it."""
    lengths = np.array([8 * 512, 8 * 48, 8 * 200])
    tiles, query_tiles = ring_counts(lengths, cp, 128)
    for rank in range(cp):
        expected = np.zeros(2)
        for length, of in itertools.product(lengths.tolist(), range(cp)):
            chunk = length // (2 * cp)
            if of == rank:
                own = np.array([(0, 0, 2 * chunk)], SEGMENT)
                expected += MEASURED.kernels()[0].count(own)
            else:
                queries, keys = (2 * chunk, chunk) if of < rank else (chunk, 2 * chunk)
                rows = math.ceil(queries / 128)
                expected += rows * math.ceil(keys / 128), UNMASKED_QUERIES * rows
        assert (tiles[rank], query_tiles[rank]) == tuple(expected)


@pytest.mark.parametrize("model", [LLAMA2_7B, replace(LLAMA2_7B, num_query_groups=8), V3])
@pytest.mark.parametrize("packed", [False, True])
def test_sums_of_a_ring_one_by_one(model, packed):
    """Reads and writes as TransformerEngine has them, of ranks 1 and 2 of four."""
    cp, tokens = 4, 4096.0
    given = job(model=model, tp=2, cp=cp, cp_exchange="ring", profile=MEASURED)
    q, out, kv = model.query_size / 2, model.output_size / 2, model.kv_values_per_rank(2)
    found = ring_sums(given, np.array([tokens]), np.array([packed]))
    for rank in (1, 2):
        forward = 2 * kv + (4 if packed else 2) * out
        backward, lse, seen = 2 * kv, 0.0, np.zeros(2)
        for step in range(1, cp):
            is_lower = step <= rank
            share = 1.0 if is_lower else 1 / 2
            forward += 3 * share * out + packed * (2 * kv / 2 if is_lower else 2 * q / 2)
            lse += 5 * share * model.num_attention_heads / 2
        for step in range(cp):  # each half of dQ, and what arrives of dK and dV, is a copy first
            is_lower, is_last = step >= cp - rank - 1, step == cp - 1
            halves = [1.0, 1.0] if is_lower else [0.0, 1.0]
            backward += q / 2 * sum((3 if before else 2) * half for before, half in zip(seen, halves, strict=True))
            seen += halves
            backward += (3 if step else 2) * kv * (1 if is_last or not is_lower else 1 / 2)
            if packed and not is_last:
                backward += 2 * kv / 2 if is_lower else 2 * (q + 2 * out) / 2
        for times, values in zip(found, (2 * forward + 4 * lse, 2 * backward), strict=True):
            assert times[0, rank] == pytest.approx(values * tokens / cp / 2700e3)
    fp8 = ring_sums(replace(given, fp8_attention=True), np.array([tokens]), np.array([packed]))  # sums in fp32
    np.testing.assert_allclose(fp8[1], 2 * found[1])
    alone = ring_sums(job(model=model, profile=MEASURED), np.array([tokens]), np.array([packed]))
    assert not np.any(alone)


def test_heads_of_latents_take_longer_in_backward_than_their_mean_size():
    latents, heads = (attention_kernels(job(model=each, profile=MEASURED)) for each in (V3, LLAMA2_7B))
    sizes = [each.tile / other.tile for each, other in zip(latents, heads, strict=True)]
    np.testing.assert_allclose(sizes, np.array([1, UNEQUAL_BACKWARD]) * (192 + 128) / 2 / 128)


def test_all_rows_are_gathered_before_attention_if_asked():
    given = job(model=LLAMA2_7B, tp=8, cp=2, cp_exchange="all", profile=MEASURED)
    rows, ranks = np.array([8192.0, 100.0]), Group(size=2, stride=8)
    gather = NETWORK.collective("all_gather", rows * 2 * 4 * 128 * 2, ranks)
    scatter = NETWORK.collective("reduce_scatter", rows * 2 * 4 * 128 * 4, ranks)
    none = np.zeros(2), np.zeros(2)
    assert np.array(exposed_exchange(given, rows, none)) == pytest.approx(np.array([gather, gather + scatter]))
    alone = job(cp_exchange="all", profile=MEASURED)
    assert not np.array(exposed_exchange(alone, rows, none)).any()


@pytest.mark.parametrize(("tp", "etp"), [(1, 1), (2, 2), (2, 1)])
def test_rows_travel_to_their_experts_and_back_by_hand(tp, etp):
    """One of eight rows is of the rank's own experts."""
    model = replace(LLAMA2_7B, moe_router_topk=2)
    given = job(model=model, tp=tp, etp=etp, dp=8, ep=8, num_micro_batches=8, profile=MEASURED)
    tokens, row = np.array([4096.0, 0.0]), 2 * 4096
    latency, byte = NETWORK.all_to_all(Group(size=8, stride=etp))
    sent = tokens / tp * 2 * row
    expected = 2 * (latency + sent * byte * 7 / 8)
    for name in ("all_gather", "reduce_scatter"):
        expected = expected + NETWORK.collective(name, sent * etp, Group(size=etp, stride=1))
    assert EXPERTS.exposed(given, tokens, 0) == pytest.approx(expected)
    assert not any(np.any(each.travel(given, tokens)) for each in KINDS if not each.pooled)


def test_what_passes_that_run_by_turns_hide_of_the_exchange_of_experts():
    """At most what the other pass computes."""
    given = job(model=replace(LLAMA2_7B, moe_router_topk=2), dp=8, ep=8, num_micro_batches=8, profile=MEASURED)
    tokens, overlapped = np.array([4096.0, 8192.0]), replace(given, overlaps_experts=True)
    moved, every = EXPERTS.travel(given, tokens), EXPERTS.exposed(given, tokens, 1e9)
    assert (moved == every).all() and moved[0] > 0
    assert EXPERTS.exposed(overlapped, tokens, 1e9) == pytest.approx((1 - OVERLAP_HIDES) * moved)
    assert EXPERTS.exposed(overlapped, tokens, moved[0]) == pytest.approx(moved - OVERLAP_HIDES * moved[0])


def test_copies_of_rows_are_read_and_written_by_hand():
    """In and out of the dispatcher, and by so many passes over all copies, of the hidden state and between matrices."""
    model = replace(LLAMA2_7B, moe_router_topk=2, ffn_hidden_size=3 * 1024, shared_ffn_hidden_size=1024)
    given, tokens = job(model=model, tp=2, profile=MEASURED), np.array([4096.0, 0.0])
    for fused, passes in COPY_PASSES.items():
        forward, backward = (
            2 * (2 * (1 + 2) * 4096 + passes * share * 2 * (4096 + 1024)) * tokens / 2 / 2700e3
            for share in (1 / 3, 2 / 3)
        )
        found = EXPERTS.copies(replace(given, fused_experts=fused), tokens)
        np.testing.assert_allclose(found, (forward, backward))
    assert COPY_PASSES[True] < COPY_PASSES[False]
    assert not any(np.any(each.dispatched(given, tokens, (0, 0))) for each in KINDS if not each.pooled)


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


def test_products_and_memory_traffic_by_hand():
    """Of a layer on two ranks: four products, measured or at their rate with half a wave; and all other traffic."""
    model, tokens, profile = replace(LLAMA2_7B, num_query_groups=8), np.array([8192.0]), MEASURED
    given = job(model=model, tp=2, profile=profile)
    hidden, ffn, rows, wave = 4096, 11008, 8192.0, 132 * 128 * 128 / 2
    sizes = [((1 + 2 * 8 / 32) * hidden / 2, hidden), (hidden, hidden / 2), (2 * ffn / 2, hidden), (hidden, ffn / 2)]
    found = products(given, model.matrices, tokens)
    assert found.forward == pytest.approx(sum(2 * (rows * m + wave) * k / 576e6 + 3 for m, k in sizes))
    assert found.inputs == pytest.approx(sum(2 * (rows * k + wave) * m / 576e6 + 3 for m, k in sizes))
    assert found.weights == pytest.approx(sum(2 * (m * k + wave) * rows / 576e6 + 3 for m, k in sizes))
    measured = products(replace(given, profile=replace(profile, linear_tflops=(500.0, 250.0))), model.matrices, tokens)
    flops = 2 * rows * sum(m * k for m, k in sizes)
    assert np.array(measured) == pytest.approx(np.array([[flops / 500e6], [flops / 250e6], [flops / 250e6]]))

    # Norms, residual sums, rotary embedding of Q and K, activation.
    values = 2 * 2 * hidden + 2 * 3 * hidden + 2 * (hidden + hidden / 4) + 3 * ffn
    traffic = 2 * values / 2 * rows / 2700e3
    assert np.array(memory_bound(given, FULL, tokens)) == pytest.approx(np.array([[traffic + 21], [2 * traffic + 30]]))
    # Logits become fp32, which is read five times and written three times more; backward scales and rounds.
    logits = 32000 / 2 * rows / 2700e3
    expected = np.array([[(2 + 4 + 5 * 4 + 3 * 4) * logits], [(2 * 4 + 4 + 2) * logits]])
    assert np.array(loss(given, tokens)) == pytest.approx(expected)


def test_the_exchange_of_keys_and_values_by_hand():
    """Per row, a value of K and V in bf16, and back in fp32 unless asked otherwise."""
    given = job(model=LLAMA2_7B, tp=2, cp=4, profile=MEASURED)
    latency, byte = NETWORK.all_to_all(Group(size=4, stride=2))
    found, row = exchange_model(given), 2 * 4096 / 2
    # Before it, gradients of the inputs of the MLP and of the output projection.
    ahead = 2 * (LLAMA2_7B.layer_weights - 3 * 4096**2) / 2 / 576e6
    values = found.latency, found.arrive, found.leave, found.prefetch
    assert values == pytest.approx((latency, 2 * row * byte, 4 * row * byte, ahead))
    arrive, leave = found.times(np.array([0.0, 1000.0]))
    assert arrive == pytest.approx([0, latency + 2000 * row * byte])
    assert leave == pytest.approx([0, latency + 4000 * row * byte])
    assert exchange_model(given.sharded(cp_gradients="model")).leave == found.arrive
    again = replace(given, recompute=Recompute(granularity="selective", modules=("core_attn",)))
    assert exchange_model(again).prefetch == 0
    window = given.context_length
    exposed = 2 * (latency + window * found.arrive) + latency + window * found.leave
    assert sharding_kernel(given).exchange == pytest.approx(exposed / window)


def test_the_exchange_of_latents_by_hand():
    """Of V3 on 8 x 4 ranks: 512 and 64 values of a row, of which 8 ranks send parts and gather the whole."""
    given = job(model=V3, tp=8, cp=4, cp_exchange="latents", profile=MEASURED)
    latency, byte = NETWORK.all_to_all(Group(size=4, stride=8))

    def time(name, values):
        rows = 1e6
        few, many = NETWORK.collective(name, np.array([0, 2 * values * rows]), Group(size=8, stride=1))
        return (many - few) / rows

    moved = 2 * (512 + 64) * byte / 8
    expands = 2 * 512 * 128 * (128 + 128) / 8 / 576e6
    found = exchange_model(given)
    assert found.latency == pytest.approx(latency + 2 * NETWORK.collective("all_gather", 0, Group(size=8, stride=1)))
    assert found.arrive == pytest.approx(moved + time("all_gather", 576) + time("all_gather", 512) + expands)
    backward = moved + 2 * expands + time("reduce_scatter", 512) + time("all_gather", 512) + time("all_reduce", 64)
    assert found.leave == pytest.approx(backward + expands + time("all_gather", 512)) and found.prefetch == 0
    # Latents arrive once, and are kept; keys and values arrive again in backward.
    arrive, leave = found.times(np.array(given.context_length))
    assert sharding_kernel(given).exchange == pytest.approx(float(arrive + leave) / given.context_length)


def test_tiles_by_hand():
    """100 rows of 4 ranks are tiles of 64, 32 and 4 rows; the last two start all kernels again."""
    given = job(model=LLAMA2_7B, tp=4, tp_tile_rows=64, profile=MEASURED)
    tokens, more = np.array([100.0, 64.0, 36.0]), np.array([2, 0, 1])
    hidden, ffn, half = 4096, 11008, 132 * 128 * 128 / 2
    assert np.array(_tiled(given, tokens)).tolist() == [[2, 1, 1], [4, 0, 4]]
    sizes = [(3 * hidden / 4, hidden), (hidden, hidden / 4), (2 * ffn / 4, hidden), (hidden, ffn / 4)]
    copied = 2 * 2 * tokens * (more > 0) / 4 / 2700e3
    forward = more * (sum(2 * half * k / 576e6 + 3 for _, k in sizes) + 3 * 3) + copied * (3 + 2) * hidden
    backward = more * (sum(2 * half * m / 576e6 + 3 * 2 for m, _ in sizes) + 3 * 3) + copied * (1 + 2) * hidden
    assert np.array(overlap_adds(given, FULL, tokens)) == pytest.approx(np.array([forward, backward]))


def test_tiles_restart_dense_products_alone_and_hold_what_is_gathered():
    """Experts have no user buffers. Three buffers of 64 to 8 rows; without them, ranks gather rows for a product."""
    given = job(model=replace(LLAMA2_7B, moe_router_topk=2), tp=4, tp_tile_rows=64, profile=MEASURED)
    attention = replace(given, model=replace(LLAMA2_7B, hybrid=True))  # layers of attention alone
    tokens = np.array([100.0])
    np.testing.assert_array_equal(overlap_adds(given, FULL, tokens), overlap_adds(attention, FULL, tokens))
    assert overlap_bytes(given) == 3 * (64 + 32 + 16 + 8) * 4096 * 2
    free, alone = replace(given, tp_tile_rows=0), replace(given.parallel, sequence_parallel=False)
    assert (gathered_bytes(given), gathered_bytes(free)) == (0, 4096 * 2)
    assert gathered_bytes(replace(free, parallel=alone)) == overlap_bytes(free) == 0


def test_sharding_counts_hidden_tiles_where_no_round_goes_around_them():
    """Latents are exchanged before attention, without rounds; a ring and all of it have no such mask."""
    sizes = {"model": V3, "tp": 8, "cp": 2, "profile": load_profile("h100-cudnn")}
    for exchange, hides, moves in (("latents", 1, 1), ("shared", 0, 1), ("ring", 0, 0), ("all", 0, 0)):
        kernel = sharding_kernel(job(**sizes, cp_exchange=exchange))
        assert (kernel.hidden > 0, kernel.exchange > 0) == (hides, moves)
        assert kernel.kv_chunks == (2 if exchange == "ring" else 1)
    assert (
        sharding_kernel(job(**sizes | {"model": replace(V3, window=9, pattern="W")}, cp_exchange="latents")).hidden == 0
    )


def test_user_buffers_hide_whole_tiles_inside_a_node():
    """Half of what 72 rows of 8 ranks communicate, and of 76 rows all but the last 4; between nodes nothing."""
    tokens, tiles = np.array([72.0, 76.0]), {"model": LLAMA2_7B, "tp_tile_rows": 64, "tp_overlap": 0.5}
    inside, across = (job(tp=tp, profile=MEASURED, **tiles) for tp in (8, 16))
    assert exposed_share(inside, tokens) == pytest.approx(1 - 0.5 * np.array([1, 72 / 76]))
    assert exposed_share(across, tokens).tolist() == [1, 1] and not np.any(overlap_adds(across, FULL, tokens))


def test_dispatchers_of_tokens_to_experts():
    """DeepEP sends least between nodes; gathering all rows is cheap where a token goes to many of few ranks."""
    sizes = {"model": replace(MODELS["deepseek-v3"], num_layers=4), "profile": load_profile("h100-cudnn"), "etp": 1}
    sizes["num_micro_batches"] = 64
    tokens = np.array([4096.0])

    def time(moe_dispatcher, ep):
        return float(EXPERTS.exposed(job(dp=ep, ep=ep, moe_dispatcher=moe_dispatcher, **sizes), tokens, 0)[0])

    for ep in (4, 8, 64):
        assert time("flex", ep) < time("alltoall", ep)
    assert time("allgather", 4) < time("alltoall", 4) and time("alltoall", 64) < time("allgather", 64)
    assert time("alltoall", 1) == time("flex", 1) == time("allgather", 1)


@pytest.mark.parametrize("rates", [{}, {"linear_tflops": (500.0, 400.0)}])
def test_parts_gain_by_low_precision_as_their_profile_says(rates):
    profile = replace(load_profile("gb200-cudnn-9.22"), **rates)
    model = replace(LLAMA2_7B, moe_router_topk=2)
    given, tokens = job(model=model, profile=profile), np.array([8192.0])

    def gain(part, precision="mxfp8"):
        matrices = [m for m in model.matrices if m.part == part] or [output_matrix(given)]
        bf16, low = (products(replace(given, precision=each), matrices, tokens) for each in ("bf16", precision))
        return np.array(bf16) / np.array(low)

    np.testing.assert_allclose(gain("output"), 1)
    assert (gain("attention") > 1).all() and (gain("attention") < profile.gain("mxfp8", "attention")[0]).all()
    assert (gain("experts") > 1.2).all() and (gain("experts", "tensorwise") > 1.2).all()
    np.testing.assert_allclose(gain("attention", "custom"), 1)
