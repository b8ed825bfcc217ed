"""Settings become the description of a job: defaults, S_max within memory, sizes that contradict each other, JSON."""

import argparse
import json
import math
from dataclasses import dataclass, replace

import numpy as np
import pytest

from megatron_wlb.describe.flags import PlanSettings
from megatron_wlb.hardware.profile import Versions, load_profile
from megatron_wlb.job import MAX_TOKENS, Parallel, Recompute, differences
from megatron_wlb.model import MODELS
from megatron_wlb.packing import POLICIES
from megatron_wlb.packing.megatron import MegatronPacking
from megatron_wlb.packing.paper import PaperPacking
from megatron_wlb.pipeline.split import Split
from megatron_wlb.settings import Settings, flag_with_value, integers, setting
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
    parser.format_help()
    return Example.from_args(parser.parse_args(words))


def test_flags_are_generated_from_settings():
    assert parsed() == Example()
    given = Example(count=3, kind="b", sizes=(4, 5), fast=True)
    words = [flag_with_value(name, getattr(given, name)) for name in ("count", "kind", "sizes", "fast")]
    assert words == ["--wlb-count 3", "--wlb-kind b", "--wlb-sizes 4,5", "--wlb-fast"]
    assert parsed(*" ".join(words).split()) == given


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"count": 10}, "--wlb-count is 10; .* 1 to 9"),
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
    saved = json.loads(json.dumps(described.to_json()))
    assert saved["packing"]["name"] == name and saved["sharding"]["cp_gradients"] == "model"
    assert differences(saved, described.to_json()) == []


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
        ({"pattern": ""}, "pattern has ' ', .*; give letters of [*]WGM$"),
        ({"pattern": "*-"}, "pattern has '-', .*; give letters of [*]WGM$"),
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


def test_layers_of_every_kind_are_counted_where_they_run():
    """Six layers on two stages of two chunks; Megatron numbers an MTP layer from 1 again."""
    model = replace(MODEL, num_layers=6, window=64, pattern="WW*", mtp_num_layers=1)
    layout = {"pp": 2, "vpp": 2, "split": Split(pipeline_model_parallel_layout="Et|tt|t|ttmL")}
    given = job(model=model, **layout)
    assert model.kinds == ("W", "*")
    # Layers 1; 2 and 3; 4; 5, 6 and the MTP layer.
    assert given.layers_by_kind().tolist() == [[[1, 1], [1, 2]], [[0, 0], [1, 1]]]
    assert (given.layers_by_kind().sum(axis=0) == given.layers()).all()


def test_work_is_linear_beyond_a_window():
    """Two of three layers see 4 keys and a query's own; a pair counts twice, but once where the window still grows."""
    given, lengths = job(model=replace(MODEL, num_layers=3, window=4, pattern="WW*")), np.arange(1, 200)
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
    # 64 x 256 x 2 weights of experts, and 64 x 64 x 4 of attention.
    assert replace(dense, model=replace(model, gated_linear_unit=False)).pooled_crossover_tokens == (1 << 20) * 2 // 3


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
    ],
)
def test_known_models_have_as_many_parameters_as_were_published(name, parameters):
    model = MODELS[name]
    in_layers = model.num_layers * sum(model.held_weights_of("*"))
    norms = 2 * model.hidden_size + 2 * model.kv_channels * model.qk_layernorm
    routers = model.num_experts * model.hidden_size
    beside = model.num_layers * (norms + routers) + model.hidden_size
    assert in_layers + beside + 2 * model.vocabulary_weights == parameters


@pytest.mark.parametrize("stages_before_dp", [False, True])
def test_ranks_are_numbered_once_and_stages_are_a_stride_apart(stages_before_dp):
    p = Parallel(tp=2, cp=3, pp=4, dp=5, stages_before_dp=stages_before_dp)
    number = {(s, d, c, t): p.rank(s, d, c, t) for s, d, c, t in np.ndindex(4, 5, 3, 2)}
    assert sorted(number.values()) == list(range(p.num_gpus))
    for (stage, dp, cp, tp), rank in number.items():
        assert rank - number[0, dp, cp, tp] == stage * p.stage_stride
        assert rank - number[stage, dp, 0, 0] == 2 * cp + tp
        assert p.place(rank) == (stage, dp, cp, tp)


def test_ranks_of_a_stage_that_do_not_divide_weights_have_copies():
    for tp, cp, dp, ep, etp in ((4, 2, 3, 2, 1), (4, 2, 4, 8, None), (2, 1, 4, 4, 2), (1, 2, 4, 1, None)):
        p, ranks = Parallel(tp=tp, cp=cp, dp=dp, ep=ep, etp=etp), tp * cp * dp
        assert p.copies == (ranks // tp, ranks // (ep * (etp or tp)))


def test_ranks_that_share_experts_are_whole_data_parallel_ranks():
    """As many neighbours as it takes for runs of expert-parallel ranks and data-parallel ranks to end together."""
    for tp, cp, dp, ep, etp in ((1, 1, 4, 4, None), (4, 2, 3, 2, 1), (4, 1, 3, 6, 1), (2, 3, 4, 4, None)):
        p = Parallel(tp=tp, cp=cp, dp=dp, ep=ep, etp=etp)
        assert p.pooling_ranks == next(n for n in range(1, dp + 1) if n * tp * cp % p.expert_ranks == 0)
