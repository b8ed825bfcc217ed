"""Settings become the description of a job: defaults, S_max within memory, sizes that contradict each other, JSON."""

import argparse
import json
import math
import re
from dataclasses import dataclass, replace

import numpy as np
import pytest

from megatron_wlb.describe.flags import PlanSettings
from megatron_wlb.hardware.profile import Versions, load_profile
from megatron_wlb.job import MAX_TOKENS, Parallel, Recompute, differences
from megatron_wlb.model import MODELS, Matrix, Mixer, latent_sizes
from megatron_wlb.packing import POLICIES
from megatron_wlb.packing.megatron import MegatronPacking
from megatron_wlb.packing.paper import PaperPacking
from megatron_wlb.pipeline.schedule import Schedule
from megatron_wlb.pipeline.split import Split
from megatron_wlb.settings import Settings, flag_with_value, integers, setting, short
from megatron_wlb.simulate.memory import peak_bytes
from tests.jobs import MODEL, job


@dataclass(frozen=True, slots=True, kw_only=True)
class Example(Settings):
    count: int | None = setting(None, "100 % of it.", parse=int, least=1, most=9)
    kind: str = setting("a", "Which.", choices=("a", "b"))
    sizes: tuple[int, ...] = setting((1,), "Some.", parse=integers)
    fast: bool = setting(False, "Whether.")


def parsed(*words):
    parser = argparse.ArgumentParser()
    Example.add_flags(parser)
    help = " ".join(parser.format_help().split())
    assert "--wlb-count WLB_COUNT 100 % of it. --wlb-kind {a,b} Which. Default: a." in help
    return Example.from_args(parser.parse_args(words))


def test_flags_are_generated_from_settings():
    assert parsed() == Example()
    assert [Example(count=count).count for count in (1, 9)] == [1, 9]
    assert flag_with_value("log", "a b") == "--wlb-log 'a b'"
    assert integers("-3", 1) == (-3,) and short("x" * 41, 40) == "x" * 37 + "..." and short("x" * 40, 40) == "x" * 40
    given = Example(count=3, kind="b", sizes=(4, 5), fast=True)
    words = [flag_with_value(name, getattr(given, name)) for name in ("count", "kind", "sizes", "fast")]
    assert words == ["--wlb-count 3", "--wlb-kind b", "--wlb-sizes 4,5", "--wlb-fast"]
    assert parsed(*" ".join(words).split()) == given


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"count": 10}, "--wlb-count is 10; .* 1 to 9"),
        ({"count": 0}, "--wlb-count is 0; .* 1 to 9"),
        ({"count": "many"}, "1 to 9"),
        ({"kind": "c"}, "a, b"),
        ({"kind": ""}, "--wlb-kind is empty; give a value, or leave the flag out"),
    ],
)
def test_a_setting_is_checked_where_it_is_made(wrong, message):
    with pytest.raises(ValueError, match=message):
        Example(**wrong)


def test_s_max_without_a_limit_of_memory():
    sizes = {"context_length": 1008, "cp": 8}
    assert job(**sizes).max_tokens == 1264
    assert job(**sizes, settings=PlanSettings(max_tokens=1600)).max_tokens == 1600
    for wanted, message in (("auto", "give --wlb-memory-budget"), (992, "be from 1008"), (1601, "multiple of 16")):
        with pytest.raises(ValueError, match=message):
            job(**sizes, settings=PlanSettings(max_tokens=wanted))


def test_the_most_tokens_of_a_rank_by_hand():
    """Of eight windows of 64 on two ranks, whose micro-batches have up to 128."""
    sizes = {"num_micro_batches": 8, "dp": 2}
    assert job(**sizes, packing=MegatronPacking()).most_rank_tokens(64) == 8 * 64 / 2
    assert job(**sizes).most_rank_tokens(128) == (8 * 64 + 128) / 2
    assert job(**sizes, reorder=False).most_rank_tokens(128) == 8 * 64
    assert job(**sizes, packing=PaperPacking()).most_rank_tokens(128) == math.inf


def test_s_max_that_memory_limits():
    sizes = {"context_length": 1008, "cp": 8}
    room = peak_bytes(job(**sizes), 0, 4000)

    def limited(budget, **wanted):
        return job(**sizes, budget_bytes=budget, settings=PlanSettings(**wanted)).max_tokens

    assert limited(room, max_tokens="auto") == limited(room, max_tokens=4000) == 4000
    assert limited(1e18, max_tokens="auto") == MAX_TOKENS
    with pytest.raises(ValueError, match="of 4016 tokens .* give --wlb-max-tokens 4000 or auto"):
        limited(room, max_tokens=4016)
    for wanted in (None, "auto", 1008):
        with pytest.raises(ValueError, match="at most 992 tokens fit into memory, less than --seq-length 1008"):
            limited(room * 992 / 4000, max_tokens=wanted)
    with pytest.raises(ValueError, match="fit into memory"):
        job(**sizes, budget_bytes=room, settings=PlanSettings(memory_budget=2**-10))  # the user's counts before ours


def test_groups_are_short_where_memory_is_tight():
    sizes = {"num_micro_batches": 8, "global_batch_size": 8, "pp": 4, "vpp": 2, "packing": PaperPacking()}
    free = job(**sizes)
    short = replace(free, parallel=replace(free.parallel, group_size=4))
    most, least = map(peak_bytes, (free, short))
    assert (free.schedule().group, short.schedule().group) == (8, 4) and least < most
    assert job(**sizes, budget_bytes=most).parallel.group_size is None
    assert job(**sizes, budget_bytes=least) == short
    assert job(**sizes, budget_bytes=least, max_tokens=free.max_tokens).parallel.group_size == 4
    window = peak_bytes(free, max_tokens=free.least_max_tokens)
    assert window < most and job(**sizes, budget_bytes=window).parallel.group_size == 4
    assert job(**sizes, budget_bytes=window, tight=True).parallel.group_size is None
    with pytest.raises(ValueError, match="fit into memory"):
        job(**sizes | {"num_micro_batches": 6}, budget_bytes=least / 8)  # 6 cannot be interleaved in groups of 4


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_micro_batches": 0, "global_batch_size": 4}, "num_micro_batches is 0; it must be int >= 1$"),
        ({"dp": 3}, "give a multiple of 3$"),
        ({"num_micro_batches": 8, "global_batch_size": 4, "dp": 3}, r"give a multiple of 3 \(--wlb-micro-batches\)"),
        ({"num_micro_batches": 6, "dp": 2, "pp": 4, "vpp": 2}, "over 4 .* stages in groups of 4; give 8$"),
        ({"num_micro_batches": 18, "dp": 2, "pp": 4, "vpp": 2, "group_size": 4}, "groups of 4; give 16 or 24$"),
        ({"num_micro_batches": 6, "global_batch_size": 4, "dp": 2, "pp": 4, "vpp": 2}, r"give 8 \(--wlb-micro"),
        ({"num_micro_batches": 8, "vpp": 2}, "at least 2 pipeline stages"),
        ({"context_length": 60, "cp": 4}, "give a multiple of 8"),
        ({"max_tokens": 63}, "must be from 64"),
        ({"max_tokens": MAX_TOKENS + 1}, f"to {MAX_TOKENS}"),
        ({"crossover_tokens": 1 << 60}, "overflows 64 bits"),
        ({"offloaded_layers": 1, "pp": 2}, "offloaded_layers is 1; Megatron offloads neither with pipeline stages nor"),
        ({"offloaded_layers": 1, "recompute": Recompute(granularity="full")}, "offloads neither"),
        ({"cp_sharding": "wlb"}, "choose one of"),
        ({"cp_exchange": "none"}, r"cp_exchange is .none.; it must be one of shared, latents, all, ring"),
        ({"cp_exchange": "latents"}, "the model has none"),
        ({"cp_gradients": "fp16"}, "--wlb-cp-gradients is 'fp16'; choose one of fp32, model"),
    ],
)
def test_contradictions_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        job(**wrong)


@pytest.mark.parametrize(
    ("changes", "unit"),
    [({}, 1), ({"tp": 4}, 4), ({"cp": 4}, 8), ({"cp": 4, "tp": 3}, 24), ({"cp": 2, "tp": 4, "row_multiple": 16}, 128)],
)
def test_ranks_share_a_unit_of_tokens(changes, unit):
    described = job(context_length=3 * 128, **changes)
    assert described.unit_tokens == unit
    if "tp" in changes and "row_multiple" not in changes:
        without = replace(described, parallel=replace(described.parallel, sequence_parallel=False))
        assert without.unit_tokens == (2 * without.parallel.cp if without.parallel.cp > 1 else 1)


@pytest.mark.parametrize("name", POLICIES)
def test_a_job_goes_through_json(name):
    described = job(packing=POLICIES[name](), cp=2, recompute=Recompute(granularity="selective", modules=("mlp",)))
    described = described.sharded(cp_gradients="model")  # not the default
    assert [replace(described, bytes_per_value=size).cp_gradient_bytes for size in (2, 4)] == [2, 4]
    saved = json.loads(json.dumps(described.to_json()))
    assert saved["packing"]["name"] == name and saved["sharding"]["cp_gradients"] == "model"
    assert differences(saved, described.to_json()) == []
    told = replace(described, parallel=replace(described.parallel, split=Split(pipeline_model_parallel_layout="Et*8L")))
    assert differences(saved | {"crossover_tokens": "\x1b"}, told.to_json()) == [
        "parallel.split.pipeline_model_parallel_layout None -> Et*8L", "crossover_tokens   -> 32"
    ]  # fmt: skip


def test_work_may_fill_64_bits():
    """Three times that of each micro-batch of S_max, on two stages of two chunks."""
    sizes = {"num_micro_batches": 4, "pp": 2, "vpp": 2, "max_tokens": 128}
    most = (2**63 - 1) // (3 * 4 * 2 * 2 * 128) - 64
    assert job(**sizes, crossover_tokens=most).crossover_tokens == most
    with pytest.raises(ValueError, match="overflows 64 bits"):
        job(**sizes, crossover_tokens=most + 1)


def test_micro_batches_share_their_tokens_in_whole_units():
    """Five windows of 64 in three are 107 each, and 112 of ranks that share 16."""
    assert job(global_batch_size=5, num_micro_batches=3, cp=2, tp=8).least_max_tokens == 112
    assert job(global_batch_size=5, num_micro_batches=5).least_max_tokens == 64


def test_a_step_of_other_micro_batches_has_as_many_windows_as_tokens_fill():
    given = job(num_micro_batches=6, dp=2)
    assert given.of_step(6, 999) is given
    for count, tokens, windows in ((4, 3 * 64 + 63, 3), (8, 5, 1)):
        expected = replace(given, num_micro_batches=count, global_batch_size=windows)
        assert given.of_step(count, tokens) == expected


def test_a_schedule_is_of_a_ranks_micro_batches():
    sizes = {"num_micro_batches": 12, "dp": 2, "pp": 2, "group_size": 3, "overlaps_experts": True}
    given = Schedule(num_stages=2, num_chunks=2, micro_batches_per_rank=6, group_size=3, by_turns=True)
    assert job(**sizes, vpp=2).schedule() == replace(given, overlap_transfers=True)
    assert job(**sizes, vpp=2, overlap_transfers=False).schedule(3) == replace(given, micro_batches_per_rank=3)
    assert not job(pp=2).schedule().overlap_transfers  # which only virtual stages do


@pytest.mark.parametrize(
    ("given", "flags"),
    [
        ({}, ""),
        ({"granularity": "selective", "modules": ("mlp", "moe_act")}, "granularity selective modules mlp moe_act"),
        ({"granularity": "full", "method": "block", "num_layers": 0}, "granularity full method block num-layers 0"),
        ({"granularity": "full", "modules": ("mlp",)}, "granularity full"),
    ],
)
def test_recomputation_has_megatrons_flags(given, flags):
    expected = re.sub(r"(granularity|method|num-layers|modules)", r"--recompute-\1", flags)
    assert Recompute(**given).flags == expected


def test_layers_run_again_from_inputs_of_their_own_or_of_several():
    """Of stages of 3 and 5; no more of them than there are have an input in common."""
    layers = np.array([3, 5])
    for given, again, at_once in (
        ({}, [0, 0], 1),
        ({"granularity": "selective", "num_layers": 2}, [0, 0], 1),
        ({"granularity": "full", "method": "block", "num_layers": 4}, [3, 4], 1),
        ({"granularity": "full", "method": "uniform", "num_layers": 2}, [3, 5], 2),
        ({"granularity": "full", "method": "uniform", "num_layers": 9}, [3, 5], 5),
        ({"granularity": "full"}, [3, 5], 1),
    ):
        found = job(recompute=Recompute(**given)).layers_again(layers)
        assert (found[0].tolist(), found[1]) == (again, at_once)


def test_on_one_stage_as_many_layers_run_again():
    """Two of every virtual stage, whose layers are 1, 4, 3 and 2; TP alone is left."""
    layout = {"tp": 2, "cp": 2, "pp": 2, "vpp": 2, "dp": 2, "sequence_parallel": False}
    block = Recompute(granularity="full", method="block", num_layers=2)
    model, split = replace(MODEL, num_layers=10), Split(pipeline_model_parallel_layout="Et|t*3|t*4|ttL")
    given = job(**layout, model=model, split=split, recompute=block)
    alone = {"parallel": Parallel(tp=2, sequence_parallel=False), "num_micro_batches": 1, "global_batch_size": 1}
    assert given.on_one_stage() == replace(given, **alone, recompute=replace(block, num_layers=7))


def test_a_profile_that_was_measured_anew_under_its_name_is_a_change():
    mine = replace(load_profile("gb200-cudnn-9.22"), name="mine", versions=Versions(torch="2.8"))
    anew = replace(mine, forward=replace(mine.forward, tile=1.0), versions=Versions(torch="2.9"))
    saved, same, other, now = (
        json.loads(json.dumps(job(profile=each).to_json()))
        for each in (mine, mine, load_profile("gb200-cudnn-9.22"), anew)
    )
    assert differences(saved, same) == differences(saved, job(profile=mine).to_json()) == []
    assert differences(saved, other) == ["profile mine -> gb200-cudnn-9.22"]
    assert differences(saved, now)[0] == f"profile.forward.tile {mine.forward.tile} -> 1.0"
    assert differences(saved, now)[-1] == "profile.versions.torch 2.8 -> 2.9"


def test_numbers_of_numpy_are_pythons():
    four, sizes = np.int64(4), {"context_length": np.int32(64), "max_tokens": np.int64(128), "dp": np.int64(2)}
    given = job(global_batch_size=four, settings=PlanSettings(micro_batches=four, max_tokens=np.int64(64)), **sizes)
    assert json.loads(json.dumps(given.to_json()))["max_tokens"] == 128 and "np." not in repr(given)
    assert given == job(max_tokens=128, dp=2)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"hidden_size": 0}, "hidden_size is 0; it must be int >= 1$"),
        ({"kv_channels": -1}, "kv_channels is -1; it must be int >= 1$"),
        ({"num_query_groups": 3}, "is 3, which does not divide 4 attention heads; change one"),
        ({"pattern": ""}, "pattern has ' ', .*; give letters of [*]WGM-$"),
        ({"pattern": "*E"}, "pattern has 'E', .*; give letters of [*]WGM-$"),
        ({"pattern": "*-"}, "pattern has - without moe_router_topk .*; give both"),
        ({"pattern": "-*", "moe_router_topk": 2}, "pattern has - behind no layer; give it once, behind"),
        ({"pattern": "*--", "moe_router_topk": 2}, "pattern has - behind no layer; give it once, behind"),
        ({"pattern": "*x", "hybrid": True}, "pattern has 'x', .*; give letters of [*]WGM-E$"),
        ({"pattern": "*W"}, "pattern has W without window .*; give both"),
        ({"pattern": "G"}, "pattern has G without delta_net; give both"),
        ({"pattern": "*M"}, "pattern has M without mamba; give both"),
        ({"pattern": "*E", "hybrid": True}, "pattern has E without moe_router_topk .*; give both"),
    ],
)
def test_a_shape_that_is_none_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        replace(MODEL, **wrong)


LATENTS = {"kv_channels": 24, "v_head_dim": 16, "kv_lora_rank": 20, "q_lora_rank": 12, "qk_pos_emb_head_dim": 8}


@pytest.mark.parametrize(
    ("changes", "part", "matrices"),
    [
        ({}, "*", [("attention", 64 + 2 * 32, 64, "outputs"), ("attention", 64, 64, "inputs")]),
        ({"output_gate": True, "v_head_dim": 20}, "W",
         [("attention", 128 + 32 + 40, 64, "outputs"), ("attention", 64, 80, "inputs")]),
        (LATENTS, "*", [("attention", 40, 64, "rows"), ("attention", 96, 12, "outputs"),
                        ("attention", 32 + 32, 20, "outputs"), ("attention", 64, 64, "inputs")]),
        ({}, "M", [("mixer", 70, 64, "outputs"), ("mixer", 64, 30, "inputs")]),
        ({}, "-", [("mlp", 200, 64, "outputs"), ("mlp", 64, 100, "inputs")]),
        ({"dense_ffn_hidden_size": 90}, "-", [("mlp", 180, 64, "outputs"), ("mlp", 64, 90, "inputs")]),
        ({"dense_ffn_hidden_size": 90, "moe_router_topk": 3}, "E",
         [("experts", 200, 64, "outputs", 3), ("experts", 64, 100, "inputs", 3)]),
    ],
)  # fmt: skip
def test_matrices_by_hand(changes, part, matrices):
    """Four heads of 16 and two of keys on a hidden state of 64, a gated MLP of 100, and a mixer of 70 and 30."""
    mixer = Mixer(projected=70, inner=30, scan=1, kept=1)
    model = replace(MODEL, num_query_groups=2, ffn_hidden_size=100, mamba=mixer, hybrid=True)
    assert replace(model, **changes).matrices_of(part) == [Matrix(*each) for each in matrices]


def test_a_model_is_the_sum_of_its_layers():
    """Of eight, two with a window, one without, four MLPs and one mixer, whose scan counts as weights do."""
    mixer = Mixer(projected=70, inner=30, scan=5000, kept=1)
    sizes = {"pattern": "W-*-W-M-", "hybrid": True, "window": 4, "mamba": mixer, "gated_linear_unit": False}
    model = replace(MODEL, **sizes, mtp_num_layers=2)
    attention, mlp, mixed = 4 * 64 * 64, 2 * 64 * 256, 64 * (70 + 30)
    assert model.matrices == [*model.part("*"), *model.part("-"), *model.part("M")]
    weights = (3 * attention + 4 * mlp + mixed) // 8
    assert model.layer_weights == weights
    # The output layer three times, and twice a matrix that joins two hidden states.
    assert model.token_weights == weights + 5000 // 8 + (3 * 128 * 64 + 2 * 2 * 64 * 64) // (8 + 2)
    assert model.crossover_tokens == 2 * model.token_weights * 8 // (3 * 2 * 64)
    assert model.attention_layers == 3 and model.without_windows() == replace(model, pattern="*-*-*-M-")
    assert [replace(model, pattern=each).widest for each in ("W", "W*", "*")] == [4, None, None]
    alone = replace(model, pattern="-M")
    assert (alone.windows, alone.attention_layers, alone.crossover_tokens) == ((None,), 0, 1 << 24)
    mixture = replace(MODEL, moe_router_topk=2)
    assert [each.is_whole for each in (MODEL, mixture, replace(mixture, num_experts=4))] == [True, False, True]
    heads = replace(MODEL, **LATENTS)
    assert (heads.head_sizes, heads.head_size, heads.kv_values_per_rank(8), heads.kv_values_per_rank(2)) == (
        (24, 16), 20, 40, 80
    )  # fmt: skip
    of_latents = {"kv_lora_rank": 20, "qk_head_dim": 16, "qk_pos_emb_head_dim": 8, "v_head_dim": 16}
    for rank in (12, None):
        assert latent_sizes(q_lora_rank=rank, **of_latents) == LATENTS | {"q_lora_rank": rank or 0}


def test_layers_of_every_kind_are_counted_where_they_run():
    """Six layers on two stages of two chunks; Megatron numbers an MTP layer from 1 again."""
    model = replace(MODEL, num_layers=6, window=64, pattern="WW*", mtp_num_layers=1)
    layout = {"pp": 2, "vpp": 2, "split": Split(pipeline_model_parallel_layout="Et|tt|t|ttmL")}
    given = job(model=model, **layout)
    assert model.kinds == ("W", "*")
    # Layers 1; 2 and 3; 4; 5, 6 and the MTP layer.
    assert given.layers_by_kind().tolist() == [[[1, 1], [1, 2]], [[0, 0], [1, 1]]]
    assert (given.layers_by_kind().sum(axis=0) == given.layers()).all()


def test_layers_of_depths_have_the_window_of_their_number_and_experts_as_the_last_layer():
    sizes = {"num_layers": 3, "window": 64, "moe_router_topk": 2, "mtp_num_layers": 4}
    model = replace(MODEL, pattern="W-**", **sizes)
    assert model.layer_kinds == ["W-", "*", "*"] and model.depth_kinds == ["W", "*", "*", "W"]
    assert model.kinds == ("W-", "*", "W") and model.windows == (64, None)
    assert job(model=model).layers_by_kind()[:, 0, 0].tolist() == [1, 4, 2]
    assert replace(model, pattern="*W-").depth_kinds == ["*", "W", "*", "*"]
    assert replace(model, pattern="WW-", num_layers=4).depth_kinds == ["W-", "W-", "W-", "W-"]


def test_work_is_linear_beyond_a_window():
    """Two of three layers with attention see 4 keys and a query's own; a pair counts twice, but once where the window
    still grows."""
    hybrid = {"num_layers": 5, "window": 4, "pattern": "WW*--", "hybrid": True}
    given, lengths = job(model=replace(MODEL, **hybrid)), np.arange(1, 200)
    narrow, wide = (
        np.array([sum(2 * min(i, seen) for i in range(1, n + 1)) - min(n, seen) for n in lengths]) for seen in (5, 200)
    )
    exact = lengths * given.crossover_tokens + (2 * narrow + wide) / 3
    assert (given.work(lengths) == np.ceil(exact)).all()
    for each in (given, job()):
        assert each.work(lengths[9]) == each.work(lengths)[9]  # of a single length, too


def test_experts_are_a_part_of_the_crossover():
    dense = job(crossover_tokens=1 << 20)
    assert dense.pooled_crossover_tokens == 0
    model = replace(dense.model, moe_router_topk=2, padded_vocab_size=0)
    # 64 x 256 x 2 weights of experts, and 64 x 64 x 4 of attention; and an eighth of an output layer of 2,048.
    for vocabulary, part in ((0, 2 / 3), (2048, 1 / 2)):
        given = replace(dense, model=replace(model, gated_linear_unit=False, padded_vocab_size=vocabulary))
        assert given.pooled_crossover_tokens == int((1 << 20) * part)


def test_shared_experts_are_held_once_and_routed_ones_all():
    """A token goes to 2 of 8 experts of 256, and to a shared one of 512."""
    sizes = {"ffn_hidden_size": 4 * 256, "shared_ffn_hidden_size": 2 * 256, "moe_router_topk": 2}
    model = replace(MODEL, gated_linear_unit=False, **sizes)
    attention, expert = 4 * 64 * 64, 2 * 64 * 256
    assert model.held_weights_of("*") == (attention + 2 * expert, 2 * expert)
    assert replace(model, num_experts=8).held_weights_of("*") == (attention + 2 * expert, 8 * expert)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama2-7b", 6_738_415_616),
        ("llama3-8b", 8_030_261_248),
        ("llama2-70b", 68_976_648_192),
        ("llama3-405b", 405_853_388_800),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("qwen3-235b-a22b", 235_093_634_560),
        ("deepseek-v2-lite", 15_706_484_224),
        ("deepseek-v3", 671_026_404_352),
    ],
)
def test_known_models_have_as_many_parameters_as_were_published(name, parameters):
    model = MODELS[name]
    in_layers = sum(sum(model.held_weights_of(kind)) for kind in model.layer_kinds)
    norms = 2 * model.hidden_size + 2 * model.kv_channels * model.qk_layernorm + model.q_lora_rank + model.kv_lora_rank
    routers = model.layer_kinds.count("*") * model.num_experts * model.hidden_size
    beside = model.num_layers * norms + routers + model.hidden_size
    assert in_layers + beside + 2 * model.vocabulary_weights == parameters


@pytest.mark.parametrize("stages_before_dp", [False, True])
def test_ranks_are_numbered_once_and_stages_are_a_stride_apart(stages_before_dp):
    p = Parallel(tp=2, cp=3, pp=4, dp=5, ep=3, etp=1, stages_before_dp=stages_before_dp)
    number = {(s, d, c, t): p.rank(s, d, c, t) for s, d, c, t in np.ndindex(4, 5, 3, 2)}
    assert sorted(number.values()) == list(range(p.num_gpus))
    for (stage, dp, cp, tp), rank in number.items():
        assert rank - number[0, dp, cp, tp] == stage * p.stage_stride
        assert rank - number[stage, dp, 0, 0] == 2 * cp + tp
        assert p.place(rank) == (stage, dp, cp, tp)


def test_a_product_is_divided_over_the_ranks_of_its_matrix():
    """Of 12 x 5 weights of each of three experts, whose sizes are summed, over two ranks; four divide all others."""
    p, rows = Parallel(tp=4, dp=2, ep=2, etp=2), np.array([7.0])
    assert [p.dividing(Matrix(part, 1, 1, "rows")) for part in ("experts", "mlp")] == [2, 4]
    for divided, shape in (("outputs", (21, 6, 5)), ("inputs", (21, 36, 5 / 6)), ("rows", (3.5, 36, 5))):
        assert Matrix("experts", 36, 5, divided, 3).shape(rows, 2) == pytest.approx(shape)


def test_ranks_of_a_stage_that_do_not_divide_weights_have_copies():
    for tp, cp, dp, ep, etp in ((4, 2, 3, 2, 1), (4, 2, 4, 8, None), (2, 1, 4, 4, 2), (1, 2, 4, 1, None)):
        p, ranks = Parallel(tp=tp, cp=cp, dp=dp, ep=ep, etp=etp), tp * cp * dp
        assert p.copies == (ranks // tp, ranks // (ep * (etp or tp)))


def test_ranks_that_share_experts_are_whole_data_parallel_ranks():
    """As many neighbours as it takes for runs of expert-parallel ranks and data-parallel ranks to end together."""
    for tp, cp, dp, ep, etp in ((1, 1, 4, 4, None), (4, 2, 3, 2, 1), (4, 1, 3, 6, 1), (2, 3, 4, 4, None)):
        p = Parallel(tp=tp, cp=cp, dp=dp, ep=ep, etp=etp)
        assert p.pooling_ranks == next(n for n in range(1, dp + 1) if n * tp * cp % p.expert_ranks == 0)
