"""What recomputation takes: products, traffic and exchanges of the modules that run again, counted by hand."""

from dataclasses import replace

import numpy as np
import pytest

from megatron_wlb.cost.linear import products
from megatron_wlb.hardware.network import Group
from megatron_wlb.job import Recompute
from megatron_wlb.layers import part_of
from megatron_wlb.model import MODELS, Matrix
from megatron_wlb.pipeline.split import Split
from megatron_wlb.simulate.memory import depth_bytes, kept_bytes, layer_bytes, peak_bytes
from megatron_wlb.simulate.passes import crossover, pass_times
from megatron_wlb.simulate.recompute import MODULES, ways, worth_trying
from tests.simulate.shards import FREE, SMALL, job, shards_of

ROWS = np.array([4096.0])
LATENTS = replace(MODELS["deepseek-v3"], num_layers=4, pattern="*", padded_vocab_size=0)
EXPERTS = replace(MODELS["qwen3-30b-a3b"], num_layers=4, padded_vocab_size=0)


def selective(*modules):
    return Recompute(granularity="selective", modules=modules)


def traffic(given, values, kernels):
    """us of reading and writing `values` of every row, and of starting kernels."""
    profile, tp = given.profile, given.parallel.tp
    return 2 * values * ROWS[0] / tp / profile.memory_gb_per_s / 1e3 + kernels * profile.kernel_us


def added(given, *modules):
    """What recomputing modules adds to forward and backward of the layers, and its pooled part, us a layer."""
    plain, again = (
        pass_times(each, shards_of(each, [[4096 * each.parallel.cp]]))
        for each in (given, replace(given, recompute=selective(*modules)))
    )
    np.testing.assert_array_equal(plain.forward, again.forward)
    (total, pooled) = (
        float(getattr(again.layers[1], name)[0] - getattr(plain.layers[1], name)[0]) for name in ("total", "pooled")
    )
    whole = float((again.backward - plain.backward).sum())
    assert whole == pytest.approx(total * given.model.num_layers)
    return total, pooled


def test_an_mlp_runs_again_with_its_norm_and_what_ranks_exchange():
    given = job(model=SMALL, tp=4)
    into, out = Matrix("mlp", 2 * 11008, 4096, "outputs"), Matrix("mlp", 4096, 11008, "inputs")
    ranks, network = Group(size=4, stride=1), given.profile.network
    moved = sum(network.collective(name, 4096 * 4096 * 2, ranks) for name in ("all_gather", "reduce_scatter"))
    by_hand = products(given, [into, out], ROWS).forward[0] + traffic(given, 2 * 4096 + 3 * 11008, 2) + moved
    assert added(given, "mlp") == (pytest.approx(by_hand), 0)
    # A layer without experts or latents has none of these.
    assert added(given, "moe", "moe_act", "layernorm", "shared_experts", "mla_up_proj") == (0, 0)


def test_core_attention_runs_again_with_the_exchange():
    given = job(model=SMALL, cp=2)
    (times, _) = pass_times(given, shards_of(given, [[8192]])).layers
    # Nothing is sent ahead of it, so some more of the exchange is exposed in backward.
    assert added(given, "core_attn")[0] > float(times.slowest[0] + times.exchange[0])
    free = replace(given, profile=replace(given.profile, network=FREE))
    (times, _) = pass_times(free, shards_of(free, [[8192]])).layers
    assert added(free, "core_attn")[0] == pytest.approx(float(times.slowest[0]))
    ring = replace(given, cp_exchange="ring")
    (times, _) = pass_times(ring, shards_of(ring, [[8192]])).layers
    assert added(ring, "core_attn")[0] == pytest.approx(float(times.slowest[0] + times.exchange[0]))


def test_experts_run_again_as_a_whole_or_in_parts():
    given = job(model=EXPERTS, tp=2, dp=4, ep=4)
    into, out = Matrix("experts", 2 * 8 * 768, 2048, "outputs", 8), Matrix("experts", 2048, 8 * 768, "inputs", 8)
    of_experts = products(given, [into, out], ROWS).forward[0] + part_of(given.model, "E").travel(given, ROWS)[0]
    activation, norm = traffic(given, 3 * 8 * 768, 1), traffic(given, 2 * 2048, 1)
    assert added(given, "moe") == (pytest.approx(of_experts + activation), pytest.approx(of_experts))
    assert added(given, "moe_act") == (pytest.approx(activation), 0)
    assert added(given, "layernorm") == (pytest.approx(norm), 0)
    assert added(given, "moe", "moe_act") == added(given, "moe")  # no part runs twice
    assert added(given, "mlp", "shared_experts", "mla_up_proj") == (0, 0)


def test_latents_are_expanded_again_and_one_of_nine_experts_is_shared():
    given = job(model=LATENTS, ep=4, dp=4)
    of_queries = Matrix("attention", 128 * 192, 1536, "outputs")
    of_keys = Matrix("attention", 128 * (128 + 128), 512, "outputs")
    rotated = 2 * (128 * 192 + 128 * 192 + 1536 + 512 + 64)
    by_hand = products(given, [of_queries, of_keys], ROWS).forward[0] + traffic(given, rotated, 2)
    assert added(given, "mla_up_proj")[0] == pytest.approx(by_hand)
    into, out = Matrix("experts", 2 * 9 * 2048, 7168, "outputs", 8), Matrix("experts", 7168, 9 * 2048, "inputs", 8)
    shared = products(given, [into, out], ROWS).forward[0] / 9 + traffic(given, 3 * 2048, 1)
    assert added(given, "shared_experts")[0] == pytest.approx(shared)
    assert added(given, "layernorm")[0] == pytest.approx(2 * traffic(given, 2 * 7168, 1))  # before latents and experts


def test_shared_experts_and_norms_drop_what_they_compute_again():
    given = job(model=LATENTS)

    def dropped(*modules):
        return layer_bytes(given) - layer_bytes(replace(given, recompute=selective(*modules)))

    assert dropped("shared_experts") == 2 * 3 * 2048
    assert dropped("moe_act") == 2 * 8 * 2048
    assert dropped("layernorm") == 2 * 2 * 7168


def test_modules_are_dropped_by_selective_recomputation_alone():
    given = job(model=SMALL)
    for granularity, drops in ((None, False), ("full", False), ("selective", True)):
        again = replace(given, recompute=Recompute(granularity=granularity, modules=("mlp",)))
        assert (layer_bytes(again) < layer_bytes(given)) == drops


def test_a_depth_that_runs_again_keeps_two_inputs_and_its_logits():
    given = job(model=replace(SMALL, padded_vocab_size=512, mtp_num_layers=1), recompute=Recompute(granularity="full"))
    assert depth_bytes(given) == 2 * 2 * SMALL.hidden_size + (2 + 4) * 512


@pytest.mark.parametrize(
    ("recompute", "layers"),
    [
        (Recompute(granularity="full"), 8),
        (Recompute(granularity="full", method="uniform", num_layers=2), 8),
        (Recompute(granularity="full", method="block", num_layers=1), 4),
        (Recompute(granularity="full", method="block", num_layers=0), 0),
        (Recompute(granularity="full", method="block"), 0),
        (Recompute(granularity="full", method="block", num_layers=9), 8),
    ],
)
def test_so_many_layers_of_a_virtual_stage_run_again(recompute, layers):
    """Eight layers on two stages of two virtual stages; block counts in each of the four."""
    given = job(model=SMALL, pp=2, vpp=2)
    plain, again = (
        pass_times(each, shards_of(each, [[8192, 1024], [512] * 4]))
        for each in (given, replace(given, recompute=recompute))
    )
    np.testing.assert_allclose(
        (again.backward - plain.backward).sum(axis=(0, 1)), layers * plain.layers[0].total, atol=1e-6
    )
    assert np.ptp(again.backward - plain.backward, axis=(0, 1)) == pytest.approx(0, abs=1e-6)
    # Their mean over all layers is what `breakdown` shows.
    np.testing.assert_allclose(8 * (again.layers[1].total - plain.layers[1].total), layers * plain.layers[0].total)


def test_layers_for_mtp_run_again_with_all_others():
    given = job(model=replace(MODELS["llama2-7b"], num_layers=8, mtp_num_layers=1), pp=4)
    block = replace(given, recompute=Recompute(granularity="full", method="block", num_layers=1))
    plain, again = (pass_times(each, shards_of(each, [[8192]])) for each in (given, block))
    np.testing.assert_allclose(
        (again.backward - plain.backward)[:, 0, 0] / plain.layers[0].total[0], [1, 1, 1, 2], rtol=1e-9
    )


def test_fewer_layers_cost_less_and_keep_more():
    given = job(model=SMALL, pp=2)
    blocks = [
        replace(given, recompute=Recompute(granularity="full", method="block", num_layers=count)) for count in range(5)
    ]
    times = [float(pass_times(each, shards_of(each, [[8192]])).backward.sum()) for each in blocks]
    kept = [float(kept_bytes(each, 0).sum()) for each in blocks]
    assert np.diff(times) == pytest.approx(times[1] - times[0]) and times[1] > times[0]
    assert np.diff(kept) == pytest.approx(kept[1] - kept[0]) and kept[1] < kept[0]
    # Documents weigh as in a layer of which so much runs again.
    assert crossover(blocks[0]) == crossover(given)
    assert crossover(blocks[4]) == crossover(replace(given, recompute=Recompute(granularity="full")))


def test_ways_are_those_that_megatron_has_the_fastest_first():
    def names(given):
        return [way.flags.replace("--recompute-", "") for way in ways(given)]

    assert names(job(model=SMALL, pp=2, vpp=4)) == [
        "", "granularity selective modules mlp", "granularity full method block num-layers 1"
    ]  # fmt: skip
    given = job(model=LATENTS, ep=4, dp=4)
    found = ways(given)
    assert set(found[-1].modules) <= {*MODULES} - {"mlp"} or found[-1].granularity == "full"
    times = [
        float(pass_times(replace(given, recompute=way), shards_of(given, [[1 << 17]])).backward.sum()) for way in found
    ]
    assert times == sorted(times) and found[0] == Recompute()
    modules = [set(way.modules) for way in found]
    assert {"layernorm", "moe"} <= set().union(*modules) and not any(each >= {"moe", "moe_act"} for each in modules)
    # By the time that a byte takes; shared experts alone take less time than up-projections, of few bytes.
    assert modules[1:4] == [{"layernorm"}, {"layernorm", "moe_act"}, {"layernorm", "moe_act", "mla_up_proj"}]
    assert sum(way.method == "uniform" for way in found) == 3 and sum(way.method == "block" for way in found) == 4
    overlapped = ways(replace(given, overlaps_experts=True))
    assert {way.granularity for way in overlapped} == {None, "selective"}
    assert "moe" not in set().union(*(way.modules for way in overlapped))
    for overlaps, refused in ((False, {"layernorm", "moe_act"}), (True, {"layernorm", "moe_act", "moe"})):
        changed = replace(given, precision="delayed", overlaps_experts=overlaps)
        delayed = set().union(*(way.modules for way in ways(changed)))
        assert delayed & {"layernorm", "moe_act", "moe"} == {"layernorm", "moe_act", "moe"} - refused
        assert "mla_up_proj" in delayed
    assert ways(replace(given, offloaded_layers=1)) == [Recompute()]
    # A layer of each stage is faster than all MLPs; one of six layers may run up to six again.
    split = Split(decoder_first_pipeline_num_layers=2)
    uneven = names(job(model=SMALL, pp=2, split=split, context_length=1 << 14))
    assert uneven[1].endswith("block num-layers 1") and sum(" block " in each for each in uneven) == 6
    hybrid = job(model=replace(SMALL, pattern="*-", hybrid=True))
    assert "granularity selective modules mlp" in names(hybrid)


def test_ways_are_worth_trying_up_to_the_first_that_needs_no_shorter_micro_batches():
    """Of every kind the first in which windows fit, if need be in the shortest groups; here S_max is two windows."""
    sizes = {"model": SMALL, "pp": 2, "context_length": 1 << 14, "max_tokens": 1 << 15, "num_micro_batches": 8}
    free, grouped = job(**sizes), job(**sizes, vpp=2)

    def needs(given, way, tokens):
        return peak_bytes(replace(given, recompute=way), max_tokens=tokens)

    def tried(given, budget):
        return worth_trying(given, 1.001 * budget)

    nothing, one, mlp, two, three, four, *_ = ways(free)
    assert [each.num_layers for each in (one, two, three, four)] == [1, 2, 3, 4] and mlp.modules == ("mlp",)
    assert tried(free, needs(free, nothing, 1 << 15)) == [nothing]
    assert tried(free, needs(free, nothing, 1 << 14)) == [nothing, one, mlp, three]
    assert tried(free, needs(free, two, 1 << 14)) == [mlp, two, four]
    assert tried(free, needs(free, four, 1 << 14) / 2) == []
    short = replace(grouped, parallel=replace(grouped.parallel, group_size=2))
    enough = needs(short, nothing, 1 << 14)
    assert grouped.schedule().group == 3 and enough < needs(grouped, nothing, 1 << 14)
    assert tried(grouped, enough)[0] == nothing


def test_layers_that_do_not_divide_have_a_crossover():
    """Such a job is planned by work, whatever is recomputed; its stages are not known here."""
    uneven = job(model=replace(SMALL, num_layers=7), pp=2)
    block = Recompute(granularity="full", method="block", num_layers=1)
    assert crossover(replace(uneven, recompute=block)) > 0
