"""Every benchmark runs, and writes a result file with the fields of the kept one, which documents quote."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import results

ROOT = Path(__file__).parents[2]
FIELDS = ["benchmark", "commit", "date", "device", "versions", "settings", "rows", "goals"]


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.full)


@pytest.mark.parametrize(
    ("module", "options", "name"),
    [
        ("cp_balance", "--quick", "cp_balance"),
        ("documents", "--quick", "documents"),
        ("dynamic_cp", "--quick", "dynamic_cp"),
        ("gpu.cp_attention", "--quick --device cpu --minutes 0.1", "cp_attention_cpu"),
        ("paper", "--quick", "paper"),
        ("placement", "--quick", "placement"),
        ("start", "--quick", "start"),
        ("step_time", "--quick", "step_time"),
        slow("closed_batches", "--quick", "closed_batches"),
        slow("convergence", "--quick --seeds 2 --logs {}/logs", "convergence"),
        slow("end_to_end_cpu", "--quick", "end_to_end_cpu"),
        slow("packing", "--quick", "packing"),
        slow("sft_cpu", "--quick", "sft_cpu"),
        slow("simulator", "--quick", "simulator"),
    ],
    ids=lambda value: value if "." in value or "-" not in value else "",
)
def test_it_runs(module, options, name, tmp_path):
    command = [sys.executable, "-m", f"benchmarks.{module}", *options.format(tmp_path).split(), "--output", tmp_path]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    found = json.loads((tmp_path / f"{name}.json").read_text())
    assert list(found) == FIELDS and found["benchmark"] == module.split(".")[-1]
    assert found["rows"] and not any("failed" in row for row in found["rows"])
    for goal in found["goals"]:
        assert goal["holds"] == (
            goal["value"] <= goal["goal"] if goal["direction"] == "<=" else goal["value"] >= goal["goal"]
        )
        assert ("holds  " if goal["holds"] else "MISSED ") + goal["name"] in run.stdout
    kept = results.FOLDER / f"{name}.json"
    if kept.exists():
        before = json.loads(kept.read_text())
        assert {key for row in found["rows"] for key in row} <= {key for row in before["rows"] for key in row}
        assert found["settings"].keys() <= before["settings"].keys()


def test_a_missed_goal_is_told_and_fails_only_a_check(capsys):
    goals = [results.at_most("error", np.float64(0.04), 0.05), results.at_least("speed", 1.2, 1.5)]
    results.conclude(goals, check=False)
    told = "holds  error = 0.04 (<= 0.05)\nMISSED speed = 1.2 (>= 1.5)\n"
    assert capsys.readouterr().out == told
    results.conclude(goals[:1], check=True)
    with pytest.raises(SystemExit, match="1"):
        results.conclude(goals, check=True)


def test_a_quick_run_writes_nothing_unless_it_is_told_where(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "FOLDER", tmp_path / "kept")
    for words, written in (
        (["--quick"], None),
        (["--quick", "--output", str(tmp_path)], tmp_path),
        ([], tmp_path / "kept"),
    ):
        args = results.parser("", "soon").parse_args(words)
        results.finish(args, "name", settings={}, rows=[{"ms": 2.0}], goals=[])
        found = list(tmp_path.rglob("name.json"))
        assert found == ([written / "name.json"] if written else [])
        for path in found:
            path.unlink()
