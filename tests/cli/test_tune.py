"""The rows that tune prints, judged by their flags and by planning the held-out documents again."""

import argparse
import json
import re
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from megatron_wlb.cli.plan import UnflushedStream
from megatron_wlb.cli.tune import Result

from megatron_wlb.cli.main import main
from megatron_wlb.describe.flags import add_wlb_arguments
from megatron_wlb.job import Job
from megatron_wlb.micro_batches import predictions
from megatron_wlb.packing import from_args
from megatron_wlb.packing.adaptive import AdaptivePacking
from megatron_wlb.plan.packer import make_packer
from megatron_wlb.plan.step import plan_step, shard_step
from megatron_wlb.plan.stream import DocumentStream, Source
from megatron_wlb.simulate import simulate_step
from tests.adapter.datasets import write_index
from tests.cli.commands import process, refusal, write_json

N, C = 4, 64
FLAGS = f"--global-batch-size {N} --seq-length {C} --wlb-crossover 30 --wlb-profile flops".split()
SMALL = [*FLAGS, "--wlb-max-tokens", "72", "--steps", "60"]
COLUMNS = {"time": 2, "late_steps": 2, "token_cv": 3}


def make_lengths(num_documents=1500, seed=5):
    """About 80 steps."""
    return np.random.default_rng(seed).lognormal(2.1, 1.1, num_documents).astype(int).clip(1, C).tolist()


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """(folder, lengths, what was written)"""
    folder = tmp_path_factory.mktemp("tune")
    lengths = make_lengths()
    outputs = ["--json", str(folder / "rows.json"), "--picture", str(folder / "front.png")]
    assert main(["tune", write_json(folder, lengths), *FLAGS, "--wlb-max-tokens", "96", *outputs]) == 0
    return folder, lengths, json.loads((folder / "rows.json").read_text())


def test_rows_are_a_sorted_front(tuned):
    rows = tuned[2]["rows"]
    points = [
        [*(round(r["held_out"][name], digits) for name, digits in COLUMNS.items()), r["max_tokens"]] for r in rows
    ]
    assert len(rows) > 3
    assert {row["policy"] for row in rows} == {"wlb", "adaptive"}
    assert points == sorted(points)
    assert min(row["held_out"]["time"] for row in rows) >= 1
    for a in points:
        for b in points:
            assert a is b or any(x > y for x, y in zip(a, b, strict=True))
    assert (tuned[0] / "front.png").read_bytes().startswith(b"\x89PNG")


def test_numbers_are_those_of_plan(tuned, tmp_path):
    """Of both halves, with the flags that are recommended."""
    _, lengths, written = tuned
    (_, middle), (begin, stop) = written["documents"]["fit"], written["documents"]["held_out"]
    assert 0 < middle == begin < stop <= len(lengths)
    for half, documents in (("fit", lengths[:middle]), ("held_out", lengths[begin:stop])):
        assert sum(documents) // (N * C) >= 20
        source = write_json(tmp_path, documents)
        for row in written["rows"]:
            words = [*FLAGS, *row["flags"].split(), "--no-flush", "--output", str(tmp_path / "plan")]
            assert main(["plan", source, *words]) == 0
            summary = json.loads((tmp_path / "plan").read_text().splitlines()[-1])["summary"]
            for name in set(summary) - {"waiting_documents", "empty_documents"}:
                assert row[half][name] == summary[name]


def test_flags_are_those_of_training(tuned):
    parser = add_wlb_arguments(argparse.ArgumentParser())
    for row in tuned[2]["rows"]:
        args = parser.parse_args(["--wlb", *row["flags"].split()])
        packing = from_args(args)
        assert (packing.name, args.wlb_max_tokens) == (row["policy"], row["max_tokens"])
        assert args.wlb_micro_batches == (N if row["policy"] == "adaptive" else "auto")
        if row["policy"] == "wlb":
            assert packing.outlier_thresholds == tuple(row["outlier_thresholds"])
        else:
            assert packing.max_delay_steps == row["max_delay_steps"]


def test_table_and_limit(tuned, tmp_path, capsys):
    """The table has the rows of the file, whole; the same input gives the same bytes; --max-late holds."""
    source = write_json(tmp_path, tuned[1])
    outputs = []
    for _ in range(2):
        assert main(["tune", source, *SMALL, "--max-late", "0.4", "--json", "-"]) == 0
        outputs.append(capsys.readouterr())
    assert outputs[0] == outputs[1]
    rows = json.loads(outputs[0].out)["rows"]
    lines = outputs[0].err.splitlines()
    assert lines[0].split() == "time late at most token CV S_max / C micro-batches packing".split()
    flags = [line for line in lines if "--wlb-packing" in line]
    for number, (row, line, flag_line) in enumerate(zip(rows, lines[1:], flags, strict=False), 1):
        assert flag_line == f"{number}: {row['flags']}"
        assert line.split()[:2] == [str(number), f"{row['held_out']['time']:.2f}"]
        assert len(line) <= 100
        assert row["held_out"]["late_steps"] <= 0.4 and row["fit"]["late_steps"] <= 0.4
    assert len(flags) == len(rows)


def test_the_data_of_a_run(tmp_path, capsys):
    """Tunings are those for the same documents in the order in which training shuffles them."""
    lengths = np.array(make_lengths())
    write_index(tmp_path / "data.idx", lengths + 1)
    stream = DocumentStream([Source(lengths=lengths)], seed=7, context_length=C)
    source = write_json(tmp_path, stream.take(int(lengths.sum()))["length"].tolist())
    outputs = []
    for words in ([source], ["--data-path", str(tmp_path / "data"), "--split", "1", "--seed", "7"]):
        assert main(["tune", *words, *SMALL, "--json", "-"]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]


PIPELINE = "--num-gpus 8 --pipeline-model-parallel-size 4".split()
"""Two data-parallel ranks of four stages."""


@pytest.mark.parametrize("profile", ["flops", "h100-fa2"])
def test_time_is_that_of_training_in_its_layout(tmp_path, profile, monkeypatch):
    """By work or simulated, with as many micro-batches as auto takes."""
    monkeypatch.setattr("megatron_wlb.cli.tune.MAX_QUEUES", 1)
    lengths = [1024 * d for d in make_lengths(1000)]
    sizes = f"--global-batch-size {N} --seq-length {1024 * C} --wlb-profile {profile} --model llama2-7b".split()
    words = [write_json(tmp_path, lengths), *sizes, *PIPELINE, "--wlb-max-tokens", str(1024 * C), "--steps", "40"]
    assert main(["tune", *words, "--json", str(tmp_path / "rows")]) == 0
    written = json.loads((tmp_path / "rows").read_text())
    job = Job.from_json(written["job"])
    assert (job.parallel.pp, job.parallel.dp, job.num_micro_batches) == (4, 2, N)
    fit, held_out = (np.array(lengths[slice(*written["documents"][half])]) for half in ("fit", "held_out"))

    def time(row, documents):
        tuning = replace(
            job, num_micro_batches=row["micro_batches"], max_tokens=row["max_tokens"], packing=packing_of(row)
        )
        packer = make_packer(stream(documents, UnflushedStream), tuning)
        total = work = 0
        for _ in range(row["held_out"]["steps"]):
            planned = plan_step(packer, tuning)
            each = [planned.packing.micro_batch(i)["length"] for i in range(row["micro_batches"])]
            timed = profile != "flops"
            total += simulate_step(tuning, shard_step(tuning, each)).time if timed else planned.cost
            work += int(planned.work.sum())
        return total / work

    def stream(documents, kind=DocumentStream):
        epochs = None if kind is DocumentStream else 1
        sources = [Source(lengths=documents)]
        return kind(sources, seed=0, context_length=1024 * C, shuffle=False, num_epochs=epochs)

    rows = written["rows"]
    assert {row["policy"] for row in rows} == {"wlb", "adaptive"}
    quickest, *others = [time(row, held_out) / row["held_out"]["time"] for row in rows]
    assert others == pytest.approx([quickest] * len(others), rel=1e-9)
    adaptive = replace(job, packing=AdaptivePacking())
    best, tried = predictions(adaptive, partial(replace, adaptive), lambda: stream(fit), memory_known=False)
    assert len(tried) > 1 and best.num_micro_batches > N
    assert {row["micro_batches"] for row in rows if row["policy"] == "adaptive"} == {best.num_micro_batches}


def test_what_the_run_sets_of_a_policy_does_not_stop_the_sweep(tmp_path):
    """Nor does it bind it."""
    source, both = write_json(tmp_path, make_lengths()), []
    for flags in ("", "--wlb-packing wlb --wlb-outlier-thresholds 20,30"):
        assert main(["tune", source, *SMALL, *flags.split(), "--json", str(tmp_path / "rows")]) == 0
        both.append(json.loads((tmp_path / "rows").read_text()))
    assert both[0] == both[1]


def packing_of(row):
    args = add_wlb_arguments(argparse.ArgumentParser()).parse_args(["--wlb", *row["flags"].split()])
    return from_args(args)


def test_documents_that_never_run_do_not_flatter(tmp_path):
    """Six full windows in a half: under any threshold they would wait for ten more, and what runs is balanced."""
    lengths = [C if i % 1000 == 500 else 3 for i in range(15_000)]
    flags = ["--global-batch-size", "16", *FLAGS[2:], "--wlb-max-tokens", "80", "--steps", "40"]
    assert main(["tune", write_json(tmp_path, lengths), *flags, "--json", str(tmp_path / "rows")]) == 0
    assert {row["policy"] for row in json.loads((tmp_path / "rows").read_text())["rows"]} == {"adaptive"}


@pytest.mark.parametrize(
    ("lengths", "flags", "message"),
    [
        (
            [C] * 100,
            "",
            r"holds 100 documents of 6400 tokens, 12 steps in a half, .* at least 10368 tokens, about 162 ",
        ),
        ([C] * 1000, "--wlb-max-tokens 63", "--wlb-max-tokens 63 is under --seq-length 64"),
        ([C] * 1000, "--steps 39", "must be an integer from 40"),
        ([C] * 1000, "--max-late x", "invalid float value"),
        ([C] * 1000, "--picture front.jpg", "must end in .png"),
        ([C] * 1000, "--json no/such/rows", "--json no/such/rows: the folder .* does not exist"),
    ],
)
def test_errors(tmp_path, capsys, lengths, flags, message):
    assert re.search(message, refusal(capsys, "tune", write_json(tmp_path, lengths), *FLAGS, *flags.split()))


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (None, "documents wait for over half of the fit steps whatever the tuning; give more documents"),
        (
            Result(None, 1.0, SimpleNamespace(late_steps=0.5)),
            "no tuning keeps --max-late 0; the fit steps reach 0.500, give more than",
        ),
    ],
)
def test_nothing_to_recommend(tmp_path, capsys, monkeypatch, result, message):
    monkeypatch.setattr("megatron_wlb.cli.tune.run_half", lambda lengths, job: result)
    arguments = [write_json(tmp_path, make_lengths()), *SMALL, "--max-late", "0", "--json", str(tmp_path / "rows")]
    assert message in refusal(capsys, "tune", *arguments)
    assert not (tmp_path / "rows").exists()


def test_without_torch(tmp_path):
    done = process("tune", write_json(tmp_path, make_lengths()), *SMALL, without=("torch",))
    assert (done.returncode, "--wlb-packing adaptive" in done.stdout) == (0, True)
