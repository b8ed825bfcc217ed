"""The jobs are the paper's, schemes run the same documents, and the benchmark runs. Speeds are not looked at."""

from dataclasses import fields, replace

import numpy as np
import pytest

from benchmarks.paper import __main__ as paper
from benchmarks.paper import balance, report, setups, speed
from benchmarks.paper.run import (
    BALANCE,
    BLOCKS,
    OURS,
    PLAIN,
    WLB,
    Outcome,
    gain_share,
    outcomes,
    pack,
    simulate,
    speedup,
)
from benchmarks.paper.setups import BIG, CALIBRATION, SEVEN_128, TABLE_1, check_calibration, clipped, pieces
from megatron_wlb.cost.attention import attention_kernels
from megatron_wlb.sharding import shard
from megatron_wlb.simulate.passes import pass_times


def test_table_1_is_the_papers():
    gpus = {case.name: case.job.parallel.num_gpus for case in TABLE_1}
    assert gpus == {
        "550M-64K": 32,
        "550M-128K": 32,
        "7B-64K": 32,
        "7B-128K": 64,
        "30B-64K": 64,
        "30B-128K": 128,
        "70B-64K": 256,
        "70B-128K": 256,
    }
    assert [case.job.num_micro_batches for case in TABLE_1] == [8, 4, 4, 4, 4, 4, 4, 4]
    assert BIG.job.parallel.num_gpus == 8192 and BIG.job.num_micro_batches == 64
    assert all(case.job.parallel.vpp > 1 and case.window == (65536, 131072)[i % 2] for i, case in enumerate(TABLE_1))


def test_the_loader_cuts_at_every_window():
    cut, whole = pieces(clipped, 65536, 3), clipped(65536, 3)
    assert cut.sum() == whole.sum()
    ends = set(np.cumsum(cut).tolist())
    assert ends >= set(range(65536, int(whole.sum()), 65536)) and ends >= set(np.cumsum(whole).tolist())
    assert cut.min() >= 1


def test_the_calibration_is_that_of_the_simulator(monkeypatch):
    check_calibration()
    other = tuple(
        ("linear_tflops", 500.0, "") if name == "linear_tflops" else (name, *rest) for name, *rest in CALIBRATION
    )
    monkeypatch.setattr(setups, "CALIBRATION", other)
    with pytest.raises(ValueError, match="states linear_tflops 500.0, the simulator has 550.0"):
        check_calibration()


def test_the_crossover_is_where_attention_takes_as_long_as_all_else():
    length = SEVEN_128.job.crossover_tokens // 32 * 32
    _, plan = shard(np.array([length]), SEVEN_128.job.sharded(cp_sharding="per-document"))
    times = pass_times(SEVEN_128.job, SEVEN_128.hardware, [plan]).layers
    attention = sum(t.attention.mean() for t in times)
    assert attention == pytest.approx(sum((t.total - t.attention.max(axis=1))[0] for t in times), rel=0.03)


def test_speedups_and_their_errors():
    work = np.ones(64)
    plain = Outcome(work=work, times=np.full(64, 2.0))
    assert speedup(Outcome(work=work, times=np.full(64, 1.6)), plain) == (pytest.approx(1.25), pytest.approx(0))
    times = np.repeat(np.tile([1.0, 3.0], BLOCKS // 2), 4)
    ratio, error = speedup(Outcome(work=work, times=times), plain)
    assert ratio == pytest.approx(1)
    assert error == pytest.approx(np.std(2 / times[::4], ddof=1) / 4)
    assert gain_share(1.33, 1.40) == pytest.approx(0.825)


@pytest.fixture(scope="module")
def seven():
    case = replace(SEVEN_128, thresholds=(0.25, 0.5))
    return case, outcomes(case, {"WLB-LLM": WLB, "ours, balance alone": BALANCE, "ours": OURS}, 20)


def test_schemes_run_the_same_documents_and_none_beats_its_limit(seven):
    _, (by_scheme, limits) = seven
    work = {name: one.work.sum() for name, one in by_scheme.items()}
    assert max(work.values()) < 1.15 * min(work.values())
    plain = by_scheme["Plain-4D"]
    balance_limit, limit = (speedup(one, plain)[0] for one in (limits.balance, limits.everything))
    ratios = {name: speedup(one, plain)[0] for name, one in by_scheme.items()}
    assert 1 < ratios["WLB-LLM"] < ratios["ours, balance alone"] < ratios["ours"] < limit
    assert 1 < balance_limit < limit
    assert (limits.balance.times < plain.times).all() and (limits.everything.times < limits.balance.times).all()


def test_ours_differs_from_balance_alone_by_the_exchange(seven):
    case, _ = seven
    packing = pack(case, OURS, 12)[0][0].packing
    ours, alone = simulate(case, OURS, packing), simulate(case, BALANCE, packing)
    assert sum(p.layers[0].exchange.sum() for p in ours.passes) < sum(p.layers[0].exchange.sum() for p in alone.passes)
    assert simulate(case, PLAIN, packing).time > alone.time


def test_variations_change_one_thing():
    def assumptions(case):
        values = {f.name: getattr(part, f.name) for part in (case, case.job, case.hardware) for f in fields(part)}
        return {name: values[name] for name in values.keys() - {"job", "hardware", "crossover_tokens"}}  # that follow

    base = assumptions(SEVEN_128)
    for name, case in speed.variations(SEVEN_128).items():
        changed = {key for key, value in assumptions(case).items() if value != base[key]}
        none = name == "as calibrated" or name.startswith("550M of")  # which is another model
        assert len(changed - {"model"} if name.startswith("edges") else changed) == (not none), name
    small = speed.variations(TABLE_1[0])["550M of 16 layers, width 1536"].job.model
    weights = small.num_layers * small.layer_weights + 2 * small.vocabulary_weights
    assert weights / 1e9 == pytest.approx(0.55, rel=0.02)


def test_slower_attention_takes_longer():
    slow = setups.slower_attention(SEVEN_128, 1.5)
    for fast, slower in zip(attention_kernels(SEVEN_128.job), attention_kernels(slow.job), strict=True):
        assert (slower.launch, slower.tile) == pytest.approx((1.5 * fast.launch, 1.5 * fast.tile))
    assert slow.hardware == SEVEN_128.hardware and slow.job.crossover_tokens < SEVEN_128.job.crossover_tokens


def test_llama_3_is_near_what_was_published():
    assert speed.llama3_tflops() == pytest.approx({"8192 GPUs": 430, "16384 GPUs": 400}, rel=0.05)


@pytest.mark.full
def test_every_figure_has_its_rows_table_and_picture(tmp_path):
    rows, gpus = paper.run(replace(paper.QUICK, other_models=6, packing=12, gpus=2, layer=4, sensitivity=6))
    assert {r["figure"] for r in rows} == {"12", "13", "14", "1, 4", "15", "table 2", "sensitivity"}
    assert {r["label"] for r in rows} == {"simulated"}
    lines = report.compare(rows)
    stated = [line["paper"] for line in lines if line.get("paper") is not None]
    # Figure 1; all of Table 2, twice; three averages and a case of Figure 12; Figures 13, 14 and 15.
    assert len(stated) == 1 + 2 * 11 + 4 + 4 + 2 + 4, stated
    empty = {line["what"] for line in lines if line.get("reproduced") is None and line.get("ours") is None}
    assert empty == {f"ms (measured), solver, {k} global batches" for k in (1, 2, 4)}
    assert gpus.keys() == {"Plain-4D", "WLB-LLM", "ours"} and gpus["ours"].shape == (4, 16, 16)
    assert report.draw(rows, gpus, tmp_path).stat().st_size > 10_000
    paper.show(rows)
    names = [goal.name.split(",")[0] for goal in paper.goals(rows)]
    assert names == ["figure 12"] * 2 + ["7B-128K", "largest standard error"]


def test_a_layer_is_never_slower_by_the_better_sharding():
    layer_ms = {(r["window"], r["scheme"]): r["layer_ms"] for r in balance.figure_15(8)}
    for window in (65536, 131072):
        best = min(layer_ms[window, "per-sequence"], layer_ms[window, "per-document"])
        assert layer_ms[window, "optimal of the two"] <= best
        assert layer_ms[window, "limit of balance"] <= layer_ms[window, "per-sequence"]
