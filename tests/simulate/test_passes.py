"""Times of passes: hand-made costs, closed forms, and what each kind of exchange adds."""

from dataclasses import replace

import numpy as np
import pytest

from megatron_wlb.cost.attention import attention_kernels, exchange_model, ring_counts, ring_sums
from megatron_wlb.cost.linear import loss, memory_bound, output_matrix, products
from megatron_wlb.cost.tiles import overlap_adds
from megatron_wlb.documents import Keys, document_work
from megatron_wlb.hardware.network import Group
from megatron_wlb.hardware.profile import FLOPS_PROFILE, KernelTimes, load_profile
from megatron_wlb.job import Recompute
from megatron_wlb.layers.experts import OVERLAP_HIDES, Experts
from megatron_wlb.layers.mamba import mamba
from megatron_wlb.model import MODELS
from megatron_wlb.sharding.routing import moved_rows
from megatron_wlb.sharding.select import attention_times
from megatron_wlb.simulate.passes import crossover, pass_times, synchronised
from tests.reference.sharding import rank_work
from tests.simulate.shards import FREE, SMALL, TOGETHER, job, shards_of

EXPERTS = Experts()
NETWORK = load_profile("h100-fa2").network
HALF_WAVE = 132 * 128 * 128 / 2


def layer_times(given, shards):
    return pass_times(given, shards).layers


def test_a_layer_is_products_traffic_and_attention():
    """One layer, one GPU, 8192 tokens; `tests/cost` has the first two by hand."""
    given = job(model=replace(SMALL, num_layers=1))
    times, tokens = pass_times(given, shards_of(given, [[5000, 3192]])), np.array([8192.0])
    product, traffic = products(given, given.model.matrices, tokens), memory_bound(given, "*", tokens)
    attention = [
        kernel.launch + 32 * (kernel.tile * (40 * 41 / 2 + 25 * 26 / 2) + kernel.query_tile * (40 + 25))
        for kernel in attention_kernels(given)
    ]
    assert times.forward[0, 0] == pytest.approx(product.forward + traffic[0] + attention[0])
    assert times.backward[0, 0] == pytest.approx(product.inputs + product.weights + traffic[1] + attention[1])
    assert times.layers[0].exchange == times.layers[0].tensor == times.layers[0].pooled == 0


def test_attention_is_that_of_the_slowest_context_parallel_rank():
    given = job(cp=4, model=replace(TOGETHER, num_query_groups=1))
    shards = shards_of(given, [[4096, 1024, 1024, 2048], [8192]])
    forward, backward = layer_times(given, shards)
    expected, of_backward = (
        np.array([rank_work(plan, kernel) for plan in shards]) for kernel in attention_kernels(given)
    )
    np.testing.assert_allclose(forward.attention, expected)
    np.testing.assert_allclose(backward.attention, of_backward)
    np.testing.assert_allclose(forward.total, forward.linear + forward.tensor + expected.max(axis=1) + forward.exchange)
    assert forward.exchange[0] == 0 < forward.exchange[1]  # two documents are whole, and hide the one that is not


def test_a_measured_backward_and_measured_rates_are_used():
    backward = KernelTimes(launch=1.0, tile=2.0, query_tile=3.0)
    rates = {"linear_tflops": (500.0, 250.0), "attention_backward": 9.0}
    given = job(profile=replace(load_profile("h100-fa2"), backward=backward, **rates))
    times = layer_times(given, shards_of(given, [[1000]]))[1]
    assert times.attention == pytest.approx(1.0 + 32 * (2.0 * 36 + 3.0 * 8))
    assert times.linear == pytest.approx(4 * 1000 * SMALL.layer_weights / 250e6)


MOE = replace(SMALL, num_layers=4, moe_router_topk=2)
FULL = Recompute(granularity="full")
LONG = 1 << 17


@pytest.mark.parametrize(
    ("changes", "within"),
    [
        ({}, 1e-4),
        ({"tp": 8}, 0.01),
        ({"tp": 8, "cp": 4, "cp_exchange": "all"}, 0.03),
        ({"tp": 4, "pp": 2, "recompute": FULL}, 0.01),
        ({"tp": 2, "model": replace(MODELS["deepseek-v3"], num_layers=4)}, 0.01),
    ],
)
@pytest.mark.parametrize("profile", ["h100-fa2", "measured"])
def test_by_the_crossover_work_is_proportional_to_time(changes, within, profile):
    """But for what a micro-batch has once, launches and latencies, and for the exchange of context-parallel ranks."""
    shipped = load_profile("h100-fa2")
    directions = {name: replace(getattr(shipped, name), launch=0.0) for name in ("forward", "backward")}
    shipped = replace(shipped, **directions, wave_outputs=0.0, kernel_us=0.0)
    measured = replace(shipped, backward=KernelTimes(launch=0.0, tile=0.07, query_tile=0.2), linear_tflops=(500, 400))
    given = job(context_length=LONG, profile=measured if profile == "measured" else shipped, **changes)
    documents = [[LONG], [LONG // 2] * 2, [LONG // 8] * 8, [LONG // 64] * 64, [LONG // 2, *[LONG // 128] * 64]]
    passes = pass_times(given, shards_of(given, documents, "per-document"))
    times = (passes.forward + passes.backward).sum(axis=(0, 1))
    if given.parallel.cp > 1:
        times -= sum(layer.exchange for layer in passes.layers) * given.model.num_layers
    work = np.array([document_work(np.array(each), crossover(given)).sum() for each in documents])
    np.testing.assert_allclose(work / times, work[0] / times[0], within)
    by_flops = np.array([document_work(np.array(each), given.model.crossover_tokens).sum() for each in documents])
    assert np.ptp(by_flops / times) > 3 * within * by_flops[0] / times[0]


def test_experts_and_tiles_are_a_part_of_a_layer():
    """Both directions: the exchange of tokens, and what tiles add, beside products and traffic."""
    given, tokens = job(model=MOE, tp=2, dp=4, ep=4, tp_tile_rows=4096), np.array([5000.0])
    found, tiles = layer_times(given, shards_of(given, [[5000]])), overlap_adds(given, "*", tokens)
    exchanged = [EXPERTS.exposed(given, tokens, 0) + copied for copied in EXPERTS.copies(given, tokens)]
    traffic, product = memory_bound(given, "*", tokens), products(given, given.model.matrices, tokens)
    experts = products(given, [m for m in given.model.matrices if m.part == "experts"], tokens)
    # Rows of attention alone are gathered and scattered over tensor-parallel ranks.
    ranks, row_bytes = Group(size=2, stride=1), tokens * 4096 * 2
    moved = sum(NETWORK.collective(name, row_bytes, ranks) for name in ("all_gather", "reduce_scatter"))
    assert found[0].tensor == pytest.approx(moved)
    for i, (every, of_experts) in enumerate(((product.forward, experts.forward), (product.backward, experts.backward))):
        assert found[i].linear == pytest.approx(every + traffic[i] + exchanged[i] + tiles[i])
        assert found[i].pooled == pytest.approx(of_experts + exchanged[i])
    assert 0 < exchanged[0] < exchanged[1] and min(tiles) > 0


def test_experts_overlap_with_what_the_other_pass_computes():
    """A forward pass with a backward pass, and the other way, of the rank's mean micro-batch."""
    slow = replace(NETWORK, link_gb_per_s=1.0)  # so that it cannot hide all
    given = job(model=MOE, dp=16, ep=16, num_micro_batches=16, profile=replace(load_profile("h100-fa2"), network=slow))
    found, hidden = (
        layer_times(each, shards_of(each, [[5000], [2000]])) for each in (given, replace(given, overlaps_experts=True))
    )
    tokens = np.array([5000.0, 2000.0])
    dispatched = EXPERTS.exposed(given, tokens, 0)
    for own, other in ((0, 1), (1, 0)):
        rows = dispatched + EXPERTS.copies(given, tokens)[other]
        beside = float(np.mean(found[other].linear - rows + found[other].slowest))
        less = dispatched - EXPERTS.exposed(replace(given, overlaps_experts=True), tokens, beside)
        assert less[0] == pytest.approx(OVERLAP_HIDES * beside)
        assert hidden[own].total == pytest.approx(found[own].total - less)
        assert hidden[own].pooled == pytest.approx(found[own].pooled - less)


@pytest.mark.parametrize("recompute", [Recompute(), FULL])
def test_ranks_that_divide_experts_wait_in_every_layer(recompute):
    """Two ranks at a time: the slower one's attention and projections, and half of the experts' work of both."""
    given = job(model=MOE, dp=4, pp=2, ep=2, recompute=recompute)
    documents = [[[65536], [1024] * 4], [[2048] * 48, [65536]], [[8192], [8192]], [[8192], [8192]]]
    alone = [pass_times(given, shards_of(given, each)) for each in documents]
    shared = synchronised(given, alone)
    for i, direction in enumerate(("forward", "backward")):
        layers = [times.layers[i] for times in alone[:2]]
        rest = [layer.total - layer.pooled for layer in layers]
        per_layer = np.maximum(*rest) + (layers[0].pooled + layers[1].pooled) / 2
        assert rest[0].argmax() != rest[1].argmax()
        for rank in range(2):
            np.testing.assert_allclose(getattr(shared[rank], direction), np.tile(2 * per_layer, (2, 1, 1)))
            waits = 2 * (np.maximum(*rest) - rest[rank])
            np.testing.assert_allclose(shared[rank].pool_wait[i], np.tile(waits, (2, 1, 1)))
        for rank in (2, 3):
            np.testing.assert_allclose(getattr(shared[rank], direction), getattr(alone[rank], direction))
    assert (shared[0].transfer == np.maximum(alone[0].transfer, alone[1].transfer)).all()
    assert (shared[2].pool_wait == 0).all()


def test_rounds_and_rings_hide_the_exchange():
    """Two documents on all ranks: in windows all at once, else in shares in the shadow of own keys."""
    given = job(tp=2, cp=8, model=replace(TOGETHER, num_query_groups=1))
    shards = shards_of(given, [[98304, 32768]], "per-document")
    # All rows but its own come to a rank, and nothing hides them.
    whole = float(exchange_model(given).times(np.array(131072 * 7 / 8))[0])
    assert layer_times(given, shards)[0].exchange == pytest.approx(whole)
    by_ring = replace(given, cp_exchange="ring")
    (plan,) = shards_of(by_ring, [[65536] * 2])
    ring, kernel = layer_times(by_ring, [plan])[0], attention_kernels(by_ring)[0]
    assert ring.exchange == 0  # every hop is shorter than a part of the attention
    calls = kernel.time(8, *ring_counts(plan.lengths, 8, 128))
    sums = ring_sums(by_ring, np.array([131072.0]), np.array([True]))[0][0]
    np.testing.assert_allclose(ring.attention[0], calls + sums)
    (plan,) = shards_of(by_ring, [[131072]])
    calls = kernel.time(8, *ring_counts(plan.lengths, 8, 128))
    fewer = ring_sums(by_ring, np.array([131072.0]), np.array([False]))[0][0]
    np.testing.assert_allclose(layer_times(by_ring, [plan])[0].attention[0], calls + fewer)
    parts = replace(given, model=replace(given.model, pattern="*"))
    (plan,) = in_parts = shards_of(parts, [[98304, 32768]], "per-document")
    assert plan.key_bounds
    assert layer_times(parts, in_parts)[0].exchange < whole / 16


def test_a_window_sees_and_moves_what_is_in_it():
    """Of a document on all ranks; a window of all of it takes what no window takes, and layers add up by kind."""
    full = job(tp=2, cp=8, model=replace(SMALL, num_query_groups=1))
    (plan,) = shards_of(full, [[131072]])
    plan = replace(plan, key_bounds=())
    whole, near = attention_times(plan, full, 1 << 20), attention_times(plan, full, 1023)
    for i in range(2):
        np.testing.assert_allclose(whole[i], attention_times(plan, full)[i])
    assert near[1][0] == pytest.approx(float(exchange_model(full).times(np.array(2 * 1023.0))[0]))
    # 64 query tiles of a head and 64 of a tail, each with its own key tile and the 8 of the window.
    kernel = attention_kernels(full, 1023)[0]
    assert near[0][0][1] == pytest.approx(kernel.time(2, 128 * 9, 128))
    mixed = replace(full, model=replace(full.model, window=1023, pattern="WWW*"))
    alone = [pass_times(replace(mixed, model=replace(mixed.model, pattern=kind)), [plan]) for kind in "W*"]
    passes, attention = pass_times(mixed, [plan]), [each.layers[0].attention for each in alone]
    np.testing.assert_allclose(passes.forward, 3 / 4 * alone[0].forward + 1 / 4 * alone[1].forward)
    np.testing.assert_allclose(passes.layers[0].attention, 3 / 4 * attention[0] + 1 / 4 * attention[1])
    np.testing.assert_allclose(attention[0], [near[0][0]])
    assert crossover(mixed) == crossover(full)


def test_layers_without_attention_cost_by_tokens():
    """Mamba, attention and an MLP as layers of their own: two all-to-alls, and no time by lengths but in attention."""
    mixer = mamba(heads=32, head_dim=64, groups=8, state_dim=128)
    model = replace(SMALL, num_layers=6, pattern="M*-", hybrid=True, mamba=mixer)
    given = job(tp=2, cp=4, model=model)
    times = {}
    for kind in "M*-":
        alone = replace(given, model=replace(model, pattern=kind))
        times[kind] = [pass_times(alone, shards_of(alone, [lengths])) for lengths in ([65536], [4096] * 16)]
    for kind in "M-":
        long, short = times[kind]
        np.testing.assert_array_equal(long.forward, short.forward)
        assert (long.layers[0].attention == 0).all()
    rows, ranks = np.array([16384.0]), Group(size=2, stride=1)
    gather, scatter = (NETWORK.collective(name, rows * 4096 * 2, ranks) for name in ("all_gather", "reduce_scatter"))
    into = products(given, model.part("M")[:1], rows)
    exposed = 2 * gather + scatter - np.minimum(gather, into.inputs) - np.minimum(scatter, into.weights)
    assert times["M"][0].layers[1].tensor == pytest.approx(exposed)
    assert crossover(replace(given, model=replace(model, pattern="M-"))) == 1 << 24
    latency, byte = NETWORK.all_to_all(Group(size=4, stride=2))
    values = 2 * 2048 + 2 * 8 * 128 + 32 + 2048
    assert times["M"][0].layers[0].exchange == pytest.approx(2 * latency + 16384 * values * 2 / 2 * 3 / 4 * byte)
    assert times["-"][0].layers[0].exchange == 0 and times["*"][0].layers[0].attention.max() > 0
    together = pass_times(given, shards_of(given, [[65536]]))
    for direction in ("forward", "backward"):
        np.testing.assert_allclose(
            getattr(together, direction), sum(getattr(times[kind][0], direction) for kind in "M*-") / 3
        )
    assert given.work(np.array([1000])) == 1000 * (1000 + given.crossover_tokens)


def test_dense_layers_of_a_mixture_of_experts_cost_as_those_of_a_dense_model():
    experts = {"moe_router_topk": 2, "num_experts": 8, "dense_ffn_hidden_size": 3 * 4096}
    model = replace(SMALL, num_layers=6, pattern="*-**", **experts)
    given = job(tp=2, dp=2, ep=2, model=model, cuda_graphs=())

    def times(**changes):
        passes = pass_times(replace(given, model=replace(model, **changes)), shards_of(given, [[4096]]))
        return np.array([passes.forward[0, 0], passes.backward[0, 0]])

    alike = times(pattern="*", moe_router_topk=0, num_experts=0, ffn_hidden_size=3 * 4096)
    np.testing.assert_array_equal(times(pattern="*-"), alike)
    np.testing.assert_allclose(times(), (alike + 2 * times(pattern="*")) / 3)
    assert (times(pattern="*") != alike).all()


def test_masks_that_hide_tiles_cost_where_all_keys_are_there_at_once():
    """In backward of a document's second and third thirds, of 8 query tiles each. The rest begins documents.

    What is whole on a rank has a call of its own for that, with the profile of such a kernel.
    """
    sizes = {"model": replace(MODELS["deepseek-v3"], num_layers=8), "tp": 8, "cp": 2, "cp_exchange": "latents"}
    given = job(**sizes, profile=load_profile("h100-cudnn"))
    (plan,) = plans = shards_of(given, [[3072, 1024]])
    assert str(plan) == "1[0:1024] | 0[0:1024] | \n | 0[1024:2048] | 0[2048:3072]"
    forward, backward = attention_kernels(given)
    found = layer_times(given, plans)
    begins, ends = (2, 2 * 36, 2 * 8), (2, 8 * 8 + 16 * 8 + 2 * 36, 2 * 8)
    np.testing.assert_allclose(found[0].attention, [[forward.time(*begins), forward.time(*ends)]])
    np.testing.assert_allclose(found[1].attention, [[backward.time(*begins), backward.time(*ends, 2 * 28)]])
    assert backward.time(0, 0, 0, 1) == backward.heads * backward.tile and forward.hidden == 0
    (other,) = shards_of(job(**sizes), [[3072, 1024]])
    assert [len(each.calls) for each in other.shards] == [2, 2] and other.rounds == (Keys.ALL,)
    for exchange in ("ring", "all"):
        assert attention_kernels(replace(given, cp_exchange=exchange))[1].hidden == 0


def test_expanding_keys_and_values_again_is_a_product_of_backward():
    given = job(model=replace(MODELS["deepseek-v3"], num_layers=8), tp=8, cp=2, cp_exchange="latents")
    plans = shards_of(given, [[8192]])
    recomputed = replace(given, recompute=FULL)
    (forward, again), (same, whole) = (layer_times(each, plans) for each in (given, recomputed))
    assert again.linear + forward.linear - whole.linear == pytest.approx(4096 * 2 * 512 * 128 * (128 + 128) / 8 / 576e6)
    assert forward.linear == same.linear
    assert again.exchange == exchange_model(given).times(moved_rows(plans[0]).max())[1]


def test_products_hide_tensor_parallel_communication():
    """Exposed in backward: gradients of the outputs of two row-parallel matrices, and what outlasts a product."""
    given = job(tp=8, pp=2, model=replace(SMALL, ffn_hidden_size=512))
    tokens, hidden = 65536, 4096
    passes = pass_times(given, shards_of(given, [[tokens]]))
    assert passes.transfer == pytest.approx(10 + tokens * hidden * 2 / 8 / 45e3)
    gather, scatter = (
        NETWORK.collective(name, tokens * hidden * 2, Group(size=8, stride=1))
        for name in ("all_gather", "reduce_scatter")
    )
    wide = 2 * 512 / 8
    of_inputs = 2 * (tokens * hidden + HALF_WAVE) * wide / 576e6 + 3
    of_weights = 2 * (wide * hidden + HALF_WAVE) * tokens / 576e6 + 3
    assert of_inputs < gather and of_weights < scatter
    assert passes.layers[1].tensor == pytest.approx(2 * gather + gather - of_inputs + scatter - of_weights)


def test_rows_are_of_a_rank_and_travel_in_the_bytes_of_their_values():
    given = job(tp=2, cp=2, pp=2)
    half, whole = (
        pass_times(each, shards_of(each, [[8192], [4096]])) for each in (given, replace(given, bytes_per_value=4))
    )
    assert half.rows.tolist() == [4096, 2048]
    np.testing.assert_allclose(whole.transfer - NETWORK.hop_us, 2 * (half.transfer - NETWORK.hop_us))


def test_mtp_layers_run_on_the_last_stage_and_through_the_output_layer():
    model = replace(SMALL, num_layers=4, padded_vocab_size=32000)
    plain, ahead = (job(model=replace(model, mtp_num_layers=count), pp=2) for count in (0, 2))
    shards = shards_of(plain, [[4096, 4096]])
    without, given = (pass_times(each, shards) for each in (plain, ahead))
    tokens, hidden = 8192, 4096
    joining = 2 * (tokens * hidden + HALF_WAVE) * 2 * hidden / 576e6 + 3
    gradients = 2 * (tokens * 2 * hidden + HALF_WAVE) * hidden / 576e6 + 3
    gradients += 2 * (2 * hidden * hidden + HALF_WAVE) * tokens / 576e6 + 3
    rows = np.array([8192.0])
    of_output, losses = products(plain, [output_matrix(plain)], rows), loss(plain, rows)
    for i, (fewer, more) in enumerate(
        zip((without.forward, without.backward), (given.forward, given.backward), strict=True)
    ):
        layer, output = without.layers[i].total, fewer[1, 0] - 2 * without.layers[i].total
        assert output == pytest.approx((of_output.forward, of_output.backward)[i] + losses[i])
        assert (more[0] == fewer[0]).all()
        assert more[1, 0] - fewer[1, 0] == pytest.approx(2 * (layer + (gradients if i else joining) + output))
    assert ahead.layers().sum() == 6
    assert replace(model, mtp_num_layers=2).token_weights == pytest.approx(
        model.layer_weights + (3 * 32000 * 4096 + 2 * 2 * 4096**2) / 6, abs=1
    )


@pytest.mark.parametrize("vocabulary", [512, 1 << 17])
def test_tensor_parallel_ranks_at_both_ends_of_a_pipeline(vocabulary):
    """By hand: the embedding scatters, an output layer gathers, a joining matrix gathers both that it joins."""
    model = replace(SMALL, padded_vocab_size=vocabulary, mtp_num_layers=2)
    tokens, hidden, ends = 65536, 4096, []
    for network in (NETWORK, FREE):
        given = job(model=model, tp=8, pp=2, profile=replace(load_profile("h100-fa2"), network=network))
        passes = pass_times(given, shards_of(given, [[tokens]]))
        in_layers = [given.layers()[:, :, None] * layer.total for layer in passes.layers]
        ends.append([each - layers for each, layers in zip((passes.forward, passes.backward), in_layers, strict=True)])
    forward, backward = (exchanged - free for exchanged, free in zip(*ends, strict=True))
    gather, scatter = (
        NETWORK.collective(name, tokens * hidden * 2, Group(size=8, stride=1))
        for name in ("all_gather", "reduce_scatter")
    )
    # The large output layer takes so long that backward hides all that it exchanges, the small one no more than this.
    wide = vocabulary / 8
    hidden_us = min(gather, 2 * (tokens * hidden + HALF_WAVE) * wide / 576e6 + 3)
    hidden_us += min(scatter, 2 * (wide * hidden + HALF_WAVE) * tokens / 576e6 + 3)
    assert forward[0, 0] == pytest.approx(scatter)
    assert forward[1, 0] == pytest.approx(3 * gather + 2 * (3 * gather + scatter))
    assert backward[0, 0] == pytest.approx(gather)
    assert backward[1, 0] == pytest.approx(3 * (gather + scatter - hidden_us) + 2 * (2 * gather + 2 * scatter))


def test_tiles_overlap_by_themselves():
    """Of 8,192, 8,192, 4,096 and 100 rows the last do not."""
    whole, tiled = (
        layer_times(given, shards_of(given, [[20580]]))[0]
        for given in (job(tp=4), job(tp=4, tp_overlap=0.5, tp_tile_rows=8192))
    )
    assert tiled.tensor == pytest.approx(whole.tensor * (1 - 0.5 * 20480 / 20580))
    # Beyond a node there are no user buffers.
    far, near = (
        layer_times(given, shards_of(given, [[8192]]))[0]
        for given in (job(tp=16, tp_overlap=0.5, tp_tile_rows=4096), job(tp=16))
    )
    assert far.tensor == near.tensor > 0 and far.linear == near.linear


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": MODELS["llama3-405b"], "pp": 16}, "126 layers do not divide over 16 stages of 1 chunks"),
        ({"tp": 5, "context_length": 1000}, "32 attention heads do not divide over 5 ranks"),
        ({"profile": FLOPS_PROFILE}, "needs one in us"),
        ({"cp": 2}, "sharded over 1 context-parallel ranks, not 2"),
    ],
)
def test_what_cannot_be_timed_is_refused(changes, message):
    shards = shards_of(job(), [[100]])
    with pytest.raises(ValueError, match=message):
        pass_times(job(**changes), shards)
    with pytest.raises(ValueError, match="sharded over 2 context-parallel ranks, not 1"):
        pass_times(job(), [*shards, *shards_of(job(cp=2), [[100]])])


def test_models_have_the_parameters_of_their_name():
    billions = {name: (m.num_layers * m.layer_weights + 2 * m.vocabulary_weights) / 1e9 for name, m in MODELS.items()}
    expected = {"550m": 0.55, "llama2-7b": 6.74, "llama3-8b": 8.03, "30b": 30, "codellama-34b": 33.74}
    expected |= {"llama2-70b": 68.98, "llama3-405b": 405.8}
    # With experts that a token goes to.
    expected |= {"deepseek-v2-lite": 2.7, "deepseek-v3": 38.2, "qwen3-30b-a3b": 3.35, "qwen3-235b-a22b": 22.2}
    assert billions == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(("exchange", "times"), [("latents", 0), ("all", 1)])
def test_recomputed_attention_exchanges_again_unless_latents_are_kept(exchange, times):
    sizes = {"model": replace(MODELS["deepseek-v3"], num_layers=8), "tp": 8, "cp": 8, "cp_exchange": exchange}
    kept = job(**sizes, cp_sharding="per-document")
    again = replace(kept, recompute=Recompute(granularity="selective", modules=("core_attn",)))
    (forward, backward), (_, more) = (pass_times(of, shards_of(of, [[1 << 17]])).layers for of in (kept, again))
    assert forward.exchange > 0
    assert more.exchange == pytest.approx(backward.exchange + times * forward.exchange)
