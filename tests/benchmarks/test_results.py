"""What benchmarks share: goals are told and checked, and a spread has its names."""

import json

import numpy as np
import pytest

from benchmarks import results

GOALS = [results.at_most("error", 0.04, 0.05), results.at_least("speed", 1.2, 1.5)]


def test_a_missed_goal_is_told_and_fails_only_a_check(capsys):
    results.conclude(GOALS, check=False)
    told = "holds  error = 0.04 (<= 0.05)\nMISSED speed = 1.2 (>= 1.5)\n"
    assert capsys.readouterr().out == told
    results.conclude(GOALS[:1], check=True)
    with pytest.raises(SystemExit, match="1"):
        results.conclude(GOALS, check=True)
    assert capsys.readouterr().out.endswith(told)


def test_a_quick_run_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    parser = results.parser("", "soon")
    results.finish(parser.parse_args(["--quick"]), "name", settings={}, rows=[], goals=GOALS)
    assert not list(tmp_path.iterdir())
    results.finish(parser.parse_args([]), "name", settings={"steps": 1}, rows=[{"ms": 2.0}], goals=GOALS)
    data = json.loads((tmp_path / "name.json").read_text())
    assert (data["settings"], data["rows"]) == ({"steps": 1}, [{"ms": 2.0}])
    assert [goal["holds"] for goal in data["goals"]] == [True, False]


def test_a_table_shows_the_columns_of_rows(capsys):
    results.show([{"a": 1, "b": 0.5}, {"a": None}], ("a", "b"))
    assert "0.5000" in capsys.readouterr().out


def test_quick_is_taken_where_there_is_one():
    assert vars(results.parser("", "soon").parse_args(["--quick", "--check"])) == {"quick": True, "check": True}
    with pytest.raises(SystemExit):
        results.parser("").parse_args(["--quick"])


def test_a_spread_is_median_minimum_and_maximum():
    assert results.spread("ms", np.array([4, 1, 3, 9])) == {"ms": 3.5, "ms_min": 1.0, "ms_max": 9.0}


def test_a_picture_has_the_name_of_its_benchmark(tmp_path):
    figure = results.figure(2, 1)
    axis = figure.subplots()
    assert results.save(figure, "here", tmp_path) == tmp_path / "here.png"
    assert (tmp_path / "here.png").read_bytes().startswith(b"\x89PNG")
    assert [axis.spines[side].get_visible() for side in ("top", "right", "left")] == [False, False, True]
