"""What is computed from measurements: differences and their tests, critical paths, fits, speed-ups."""

import copy
import json

import numpy as np
import pytest
from scipy import stats

from benchmarks import convergence_report, results
from benchmarks.critical_path import critical_path, even_path, fit


@pytest.fixture
def logs():
    """Four seeds, of the variants three; fixed-8 loses 1 %, delay differs by noise alone."""
    one = json.loads((results.FOLDER / "convergence/whole_documents/original-1.json").read_text())
    changes = {
        "original": (0, 0, 0, 0),
        "original-shuffled": (-0.4, 0, 0.5),
        "paper": (-1, 0.2, 1),
        "delay": (0.1, 0, -0.1),
        "fixed-8": (0.9, 1.0, 1.1),
    }
    made = []
    for variant, percents in changes.items():
        for seed, percent in enumerate(percents, 1):
            copied = copy.deepcopy(one) | {"variant": variant, "seed": seed}
            copied["validation"][-1]["all"] = (5 + seed / 10) * (1 + percent / 100)
            made.append(copied)
    return made


def test_convergence_is_compared_by_seed(logs):
    rows = {row["variant"]: row for row in convergence_report.compare(logs)}
    assert "difference_percent" not in rows["original"] and rows["original"]["seeds"] == [1, 2, 3, 4]
    worse = rows["fixed-8"]
    assert worse["difference_of_seeds"] == pytest.approx([0.9, 1.0, 1.1])
    low, high = stats.ttest_1samp([0.9, 1.0, 1.1], 0).confidence_interval(0.95)
    mean, half = worse["difference_percent"], worse["difference_half_width"]
    assert (mean - half, mean + half) == pytest.approx((low, high))
    sentences = convergence_report.verdicts(list(rows.values()))
    for sentence, verdict in zip(sentences, ("open", "open", "equivalent", "worse"), strict=True):
        assert f"`: {verdict}" in sentence and "3 seeds" in sentence
    goals = {goal["name"]: goal["holds"] for goal in convergence_report.goals(list(rows.values()))}
    narrow = "half of the 95 % interval of the difference to original, percent of the loss"
    alike = "p of the two one-sided tests within 0.5 % of original"
    held = {"original-shuffled": False, "paper": False, "delay": True, "fixed-8": True}
    expected = {f"{name}: {narrow}": holds for name, holds in held.items()}
    assert goals == expected | {f"paper: {alike}": False, f"delay: {alike}": True}
    page = convergence_report.page({"settings": settings(logs), "rows": list(rows.values())})
    assert "| `paper` | 3 |" in page and "end 0.45 % apart" in page and "so there are not enough yet" in page
    few = [log for log in logs if log["seed"] < 3 and (log["seed"] == 1 or log["variant"] != "paper")]
    assert [row["variant"] for row in convergence_report.compare(few)] == [name for name in rows if name != "paper"]


def settings(logs):
    return {key: logs[0][key] for key in ("scale", "corpus", "parameters")} | {"runs": logs}


def test_runs_of_other_settings_are_not_compared(logs, tmp_path):
    logs[1]["corpus"] = {"digest": "another"}
    for log in logs:
        (tmp_path / f"{log['variant']}-{log['seed']}.json").write_text(json.dumps(log))
    with pytest.raises(ValueError, match="differ in their corpus"):
        convergence_report.read(tmp_path)


def test_critical_path():
    busy = np.array([[3.0, 1.0], [1.0, 1.0]])  # [ranks, micro-batches]
    assert critical_path("DP=2", busy) == critical_path("CP=2", busy) == 4
    assert even_path("DP=2", busy) == even_path("CP=2", busy) == 3
    by_turns = np.array([[3.0, 1.0], [1.0, 3.0]])
    assert (critical_path("DP=2", by_turns), critical_path("CP=2", by_turns)) == (4, 6)
    # A pipeline of two stages: micro-batches of 6 and 3, forward a third. The second stage begins after 2 and takes 9;
    # meanwhile 1 is idle, until the forward of 3 has come; the first stage ends 2 after that.
    assert critical_path("PP=2", np.array([[6.0, 3.0], [6.0, 3.0]])) == pytest.approx(14)
    assert critical_path("PP=2", np.array([[8.0, 3.0], [4.0, 3.0]])) == pytest.approx(14)
    assert even_path("PP=2", np.array([[6.0, 3.0], [6.0, 3.0]])) == pytest.approx(3 * 4.5)
    # With virtual stages half a micro-batch goes through the other stage alone.
    assert even_path("PP=2 VPP=2", np.array([[6.0, 3.0], [6.0, 3.0]])) == pytest.approx(2.5 * 4.5)


def test_fit_finds_the_costs_of_micro_batches():
    rng = np.random.default_rng(0)
    rows, pairs, kernel = (rng.integers(1, 1000, (5, 2)) * scale for scale in (1, 1000, 1))

    def steps(busy):
        columns = {"busy": busy, "rows": rows, "pairs": pairs, "kernel_us": kernel}
        return [{name: column[i].tolist() for name, column in columns.items()} for i in range(5)]

    assert fit(steps(7.0 * rows + 0.02 * pairs)).crossover == 350
    assert fit(steps(7.0 * rows + 2.0 * kernel)).row == pytest.approx(3.5)
    with pytest.raises(ValueError, match="no longer for more attention"):
        fit(steps(7.0 * rows - 1e-9 * pairs))
