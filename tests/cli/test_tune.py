"""The rows that tune prints, judged by their flags and by planning the held-out documents again."""

import argparse
import json
import re
import subprocess
import sys

import numpy as np
import pytest

from megatron_wlb.cli.main import main
from tests.cli.refusals import refusal
from tests.cli.test_plan import ROOT, write_json

N, C = 4, 64
FLAGS = f"--global-batch-size {N} --seq-length {C} --wlb-crossover 30".split()
TOLERANCES = ("balance_tolerance", "age_tolerance")
COLUMNS = {"imbalance_mean": 4, "late_steps": 3, "token_cv": 3}


def make_lengths(num_documents=1500, seed=5):
    """About 80 steps."""
    return np.random.default_rng(seed).lognormal(2.1, 1.1, num_documents).astype(int).clip(1, C).tolist()


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """(folder, lengths, what was written)"""
    folder = tmp_path_factory.mktemp("tune")
    lengths = make_lengths()
    source = write_json(folder, lengths)
    picture = ["--picture", str(folder / "front.png")]
    assert main(["tune", source, *FLAGS, "--wlb-max-tokens", "96", "--json", str(folder / "rows.json"), *picture]) == 0
    return folder, lengths, json.loads((folder / "rows.json").read_text())


def objectives(row):
    return [round(row["held_out"][name], digits) for name, digits in COLUMNS.items()] + [row["max_tokens"]]


def test_rows_are_a_sorted_front(tuned):
    rows = tuned[2]["rows"]
    points = [objectives(row) for row in rows]
    assert len(rows) > 3
    assert {row["policy"] for row in rows} == {"wlb", "adaptive"}
    assert points == sorted(points)
    for a in points:
        for b in points:
            assert a is b or any(x > y for x, y in zip(a, b, strict=True))


def test_held_out_numbers_are_those_of_plan(tuned, tmp_path):
    _, lengths, written = tuned
    (_, middle), (begin, stop) = written["documents"]["fit"], written["documents"]["held_out"]
    assert 0 < middle == begin < stop <= len(lengths)
    for half, documents in (("fit", lengths[:middle]), ("held_out", lengths[begin:stop])):
        assert sum(documents) // (N * C) >= 20
        source = write_json(tmp_path, documents)
        for row in written["rows"]:
            flags = ["--wlb-packing", row["policy"], "--wlb-max-tokens", str(row["max_tokens"])]
            if row["policy"] == "wlb":
                flags += ["--wlb-outlier-thresholds", ",".join(map(str, row["outlier_thresholds"]))]
            else:
                flags += ["--wlb-packing-mode", row["mode"], "--wlb-max-delay-steps", str(row["max_delay_steps"])]
                for name in TOLERANCES:
                    flags += [f"--wlb-{name.replace('_', '-')}", str(row[name])] if name in row else []
            assert main(["plan", source, *FLAGS, *flags, "--no-flush", "--output", str(tmp_path / "plan")]) == 0
            summary = json.loads((tmp_path / "plan").read_text().splitlines()[-1])["summary"]
            for name in set(summary) - {"waiting_documents", "empty_documents"}:
                assert row[half][name] == summary[name]


def test_flags_are_those_of_training(tuned):
    pytest.importorskip("torch")
    from megatron_wlb.adapter.arguments import add_wlb_arguments, config_from_args

    parser = add_wlb_arguments(argparse.ArgumentParser())
    for row in tuned[2]["rows"]:
        config = config_from_args(parser.parse_args(["--wlb", *row["flags"].split()]))
        assert (config.packing, config.max_tokens) == (row["policy"], row["max_tokens"])
        if row["policy"] == "wlb":
            assert config.outlier_thresholds == tuple(row["outlier_thresholds"])
        else:
            assert (config.packing_mode, config.max_delay_steps) == (row["mode"], row["max_delay_steps"])
            assert [getattr(config, name) for name in TOLERANCES] == [row.get(name) for name in TOLERANCES]


def test_tolerances_are_named_where_they_are_not_those_of_the_mode(tuned):
    own = {"constant-tokens": (0.003, 0.008), "low-displacement": (0.015, 0.035)}
    rows = [row for row in tuned[2]["rows"] if row["policy"] == "adaptive"]
    assert any(name in row for row in rows for name in TOLERANCES)
    for row in rows:
        for name, value in zip(TOLERANCES, own[row["mode"]], strict=True):
            assert row.get(name) != value
            assert (f"--wlb-{name.replace('_', '-')} {row.get(name)} " in row["flags"]) == (name in row)


def test_picture(tuned):
    assert (tuned[0] / "front.png").read_bytes().startswith(b"\x89PNG")


def test_table_and_limit(tuned, tmp_path, capsys):
    """The table has the rows of the file, whole; the same input gives the same bytes; --max-late holds."""
    source = write_json(tmp_path, tuned[1])
    outputs = []
    for _ in range(2):
        arguments = [*FLAGS, "--wlb-max-tokens", "72", "--steps", "60", "--max-late", "0.4", "--json", "-"]
        assert main(["tune", source, *arguments]) == 0
        outputs.append(capsys.readouterr())
    assert outputs[0] == outputs[1]
    rows = json.loads(outputs[0].out)["rows"]
    lines = [line for line in outputs[0].err.splitlines() if "--wlb-packing" in line]
    for row, line in zip(rows, lines, strict=True):
        assert line.rstrip().endswith(row["flags"])
        assert line.split()[0] == f"{row['held_out']['imbalance_mean']:.4f}"
        assert row["held_out"]["late_steps"] <= 0.4 and row["fit"]["late_steps"] <= 0.4


def test_documents_that_never_run_do_not_flatter(tmp_path):
    """Six full windows in a half: under any threshold they would wait for ten more, and what runs is balanced."""
    lengths = [C if i % 1000 == 500 else 3 for i in range(15_000)]
    flags = ["--global-batch-size", "16", "--seq-length", str(C), "--wlb-max-tokens", "80", "--steps", "40"]
    assert main(["tune", write_json(tmp_path, lengths), *flags, "--json", str(tmp_path / "rows")]) == 0
    assert {row["policy"] for row in json.loads((tmp_path / "rows").read_text())["rows"]} == {"adaptive"}


@pytest.mark.parametrize(
    ("lengths", "flags", "message"),
    [
        (
            [C] * 100,
            [],
            r"holds 100 documents of 6400 tokens, 12 steps in a half, .* at least 10368 tokens, about 162 ",
        ),
        ([C] * 1000, ["--wlb-max-tokens", "63"], "--wlb-max-tokens 63 is under --seq-length 64"),
        ([C] * 1000, ["--steps", "39"], "must be an integer from 40"),
        ([C] * 1000, ["--max-late", "x"], "invalid float value"),
        ([C] * 1000, ["--picture", "front.jpg"], "must end in .png"),
        ([C] * 1000, ["--json", "no/such/rows"], "--json no/such/rows: the folder .* does not exist"),
        (
            make_lengths(),
            ["--max-late", "0", "--wlb-max-tokens", "72"],
            "no tuning keeps --max-late 0; the fit steps reach",
        ),
    ],
)
def test_errors(tmp_path, capsys, lengths, flags, message):
    assert re.search(message, refusal(capsys, "tune", write_json(tmp_path, lengths), *FLAGS, *flags))


def test_without_torch(tmp_path):
    code = "import sys; sys.modules['torch'] = None; from megatron_wlb.cli.main import main; sys.exit(main())"
    arguments = ["tune", write_json(tmp_path, make_lengths()), *FLAGS, "--wlb-max-tokens", "80", "--steps", "40"]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert "--wlb-packing adaptive" in done.stdout
