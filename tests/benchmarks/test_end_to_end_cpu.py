"""The arithmetic of the benchmark of real training, and that it runs. How long anything takes is not looked at."""

import json

import numpy as np
import pytest

from benchmarks.end_to_end_cpu import (
    LAYOUTS,
    Costs,
    Size,
    compare,
    critical_path,
    even_path,
    fit,
    measure,
    over_layout,
    planned_work,
    summarise,
)
from benchmarks.training_cpu import warm, write_dataset

RANKS_BY_TURNS = np.array([[3.0, 1.0], [1.0, 3.0]])  # [ranks, micro-batches]


def test_critical_path():
    busy = np.array([[3.0, 1.0], [1.0, 1.0]])
    assert critical_path("DP=2", busy) == critical_path("CP=2", busy) == 4
    assert even_path("DP=2", busy) == even_path("CP=2", busy) == 3
    assert critical_path("DP=2", RANKS_BY_TURNS) == 4
    assert critical_path("CP=2", RANKS_BY_TURNS) == 6
    # A pipeline of two stages: micro-batches of 6 and 3, forward a third. The second stage begins after 2 and takes 9;
    # meanwhile 1 is idle, until the forward of 3 has come; the first stage ends 2 after that.
    assert critical_path("PP=2", np.array([[6.0, 3.0], [6.0, 3.0]])) == pytest.approx(14)
    assert critical_path("PP=2", np.array([[8.0, 3.0], [4.0, 3.0]])) == pytest.approx(14)
    assert even_path("PP=2", np.array([[6.0, 3.0], [6.0, 3.0]])) == pytest.approx(3 * 4.5)
    # A third of the work put off fills what both stages would wait for, but for the first forward of the other.
    assert critical_path("PP=2", np.full((2, 4), 3.0), np.ones((2, 4))) == pytest.approx(3 * 4 + 1)
    # With virtual stages half a micro-batch goes through the other stage alone.
    assert even_path("PP=2 VPP=2", np.array([[6.0, 3.0], [6.0, 3.0]])) == pytest.approx(2.5 * 4.5)


def total(seconds: float, critical: float, even: float, tokens: float = 1.0) -> dict[str, float]:
    return {
        "seconds": seconds,
        "critical": critical,
        "even": even,
        "tokens": tokens,
        "other": 0.5,
        "model critical": 6.0,
        "model even": 5.0,
    }


def test_gains():
    plain = total(10, 9, 6)
    assert compare(plain, plain)["fraction"] == 0
    assert compare(plain, plain)["imbalance"] == 1.5
    assert compare(plain, plain)["imbalance by model"] == 1.2
    assert compare(plain, plain)["attainable by model"] == pytest.approx(10 / (1 + 7.5))
    assert compare(plain, plain)["other_computing"] == 0.05
    assert compare(plain, plain)["no_computing"] == pytest.approx(0.05)
    perfect = compare(plain, total(7, 6, 6))
    assert perfect["fraction"] == pytest.approx(1)
    assert perfect["attainable"] == perfect["speedup_per_work"] == perfect["speedup_in_tokens"] == pytest.approx(10 / 7)
    assert perfect["speedup_by_cpu_time"] == pytest.approx(9.5 / 6.5)
    assert perfect["fraction_by_cpu_time"] == pytest.approx(1)
    half = compare(plain, total(10 / (1 + 0.5 * 3 / 7), 7, 6))
    assert half["fraction"] == pytest.approx(0.5)
    # Whole documents, of twice the work for the same tokens, in balance: slower by token, faster by work.
    whole = compare(plain, total(14, 12, 12))
    assert whole["speedup_in_tokens"] == pytest.approx(10 / 14)
    assert whole["speedup_per_work"] == pytest.approx(20 / 14)


def test_layouts_are_compared_by_planned_work():
    dp = {"seconds": 10.0, "critical": 8.0, "other": 1.0, "work": 100, "model critical": 6.0, "model ideal": 4.0}
    cp = {"seconds": 6.0, "critical": 5.0, "other": 0.4, "work": 90, "model critical": 30.0, "model ideal": 30.0}
    found = over_layout(dp, cp)
    assert found["over_plain_dp"] == pytest.approx(10 / 100 / (6 / 90))
    assert found["over_plain_dp_by_cpu_time"] == pytest.approx(9 / 100 / (5.4 / 90))
    assert found["over_plain_dp_computing"] == pytest.approx(8 / 100 / (5 / 90))
    assert found["over_plain_dp by model"] == 1.5


def test_fit_finds_what_micro_batches_cost():
    rng = np.random.default_rng(0)
    rows, pairs, kernel = (rng.integers(1, 1000, (5, 2)) * scale for scale in (1, 1000, 1))
    by_pairs = 7.0 * rows + 0.02 * pairs

    def steps(busy):
        columns = {"busy": busy, "rows": rows, "pairs": pairs, "kernel_us": kernel}
        return [{name: column[i].tolist() for name, column in columns.items()} for i in range(5)]

    assert fit(steps(by_pairs)).crossover == 350
    assert fit(steps(7.0 * rows + 2.0 * kernel)).row == pytest.approx(3.5)
    with pytest.raises(ValueError, match="no longer for more attention"):
        fit(steps(7.0 * rows - 1e-9 * pairs))


def test_summary():
    def rounds(*busy_and_seconds):
        return [
            [
                [
                    {
                        "tokens": 8,
                        "work": 4,
                        "late": 2,
                        "group": None,
                        "seconds": s,
                        "other": 0,
                        "busy": [b],
                        "weights": [0.0],
                    }
                    | {"rows": [4], "pairs": [b], "kernel_us": [0]}
                ]
                for b in busy
            ]
            for busy, s in busy_and_seconds
        ]

    measured = {"plain": rounds(((3, 1), 4), ((6, 2), 8)), "even": rounds(((2, 2), 3), ((4, 4), 6))}
    work = {"plain": 10.0, "even": 12.0}
    plain, even = summarise(LAYOUTS[0], measured, {"exact": Costs(crossover=0, row=1.0)}, work, measured["plain"])
    assert (plain["method"], even["method"]) == ("plain", "even")
    assert even["fraction"] == pytest.approx(1)
    assert even["speedup_in_tokens_min"] == even["speedup_in_tokens_max"] == pytest.approx(4 / 3)
    assert even["speedup_per_work"] == pytest.approx(4 / 3)
    assert (plain["work_per_token"], even["work_per_token"]) == (1, 1.2)
    assert even["speedup_per_token"] == pytest.approx(4 / 3 / 1.2)
    assert (plain["imbalance"], even["imbalance"]) == (1.5, 1)
    assert plain["imbalance by exact"] == 1.5
    assert plain["share_error_p90"] == even["share_error_p90"] == 0
    assert (plain["tokens"], plain["seconds"]) == (16, 12)
    assert plain["late_steps"] == 0.25
    assert even["computing_gain"] == even["computing_gain by exact"] == pytest.approx(1.5)
    assert even["over_plain_dp"] == pytest.approx(4 / 3)
    assert plain["over_plain_dp by exact"] == 1 and even["over_plain_dp by exact"] == pytest.approx(1.5)


def test_planned_work_of_whole_documents_and_of_windows(monkeypatch):
    """Documents of half a window and one token: whole they fit once into a window, cut they fill it."""
    monkeypatch.setattr("benchmarks.end_to_end_cpu.PLANNED_STEPS", 50)
    lengths = np.full(400, 33 + 1)
    layout = LAYOUTS[0]
    whole = planned_work(lengths, layout, layout.methods["wlb"], 64, 10)
    assert whole == 10 + 33
    cut = planned_work(lengths, layout, layout.methods["plain"], 64, 10)
    assert 10 + 16 < cut < whole


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_real_runs_are_measured(layout, tmp_path):
    warm()
    dataset = write_dataset(tmp_path, np.random.default_rng(0).integers(2, 100, 200))
    method = "plain" if layout.name == "CP=2" else list(layout.methods)[-1]  # ranks of the former are not alike
    layout = layout._replace(methods={method: f"{layout.methods[method]} --wlb-log {tmp_path / 'log'}"})
    ((first, second),) = measure(layout, Size(window=64, steps=2, rounds=1), dataset, "flops", 50)[method]
    log = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()][1:]  # the first warms up
    assert [entry["step"] for entry in log] == [101, 102]
    assert [step["tokens"] for step in first] == [step["tokens"] for step in second] == [e["tokens"] for e in log]
    for a, b, entry in zip(first, second, log, strict=True):
        own = entry["num_micro_batches"] // layout.ranks
        for step in (a, b):
            assert len(step["busy"]) == len(step["rows"]) == len(step["pairs"]) == len(step["kernel_us"]) == own
            assert all(busy > 0 for busy in step["busy"])
            assert step["other"] > 0
            assert (
                sum(step["busy"]) + step["other"] <= step["seconds"] + 0.01
            )  # CPU time of one thread is no more than what passes
        if layout.name == "CP=2":
            assert a["rows"] == b["rows"] == [entry["padded_tokens"] // 2]
            assert a["pairs"] == b["pairs"]
            cp_work = [a["kernel_us"][0], b["kernel_us"][0]]
            assert cp_work == entry["micro_batches"][0]["cp_work"] == entry["micro_batches"][0]["cp_work_per_sequence"]
            assert cp_work[0] != cp_work[1]
        else:
            ranks = (a, b) if layout.name == "DP=2" else (a,)
            rows, pairs = (sum(sum(step[key]) for step in ranks) for key in ("rows", "pairs"))
            if layout.name.startswith("CP"):
                rows *= 2
            assert 0 <= rows - entry["tokens"] <= 2 * entry["num_micro_batches"]  # padding
            assert pairs + 50 * entry["tokens"] == sum(entry["work"]) == a["work"] == b["work"]
            late = sum(max(0, int(steps)) * tokens for steps, tokens in entry["delays_tokens"].items())
            assert a["late"] == b["late"] == late
