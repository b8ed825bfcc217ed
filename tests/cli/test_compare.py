"""Logs of runs whose times are known, compared with predictions; broken logs are refused."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from megatron_wlb.cli import compare
from megatron_wlb.cli.compare import LoggedStep, warm
from megatron_wlb.cli.main import main
from megatron_wlb.describe.make import make_job
from megatron_wlb.hardware.profile import FLOPS_PROFILE
from megatron_wlb.job import Parallel
from megatron_wlb.model import MODELS
from megatron_wlb.packing.original import OriginalPacking
from megatron_wlb.plan.step import shard_step
from megatron_wlb.simulate.step import shares, simulate_step
from tests.cli.commands import refusal

JOB = make_job(
    model=replace(MODELS["llama2-7b"], num_layers=4),
    parallel=Parallel(cp=2, pp=2),
    context_length=65536,
    global_batch_size=4,
    crossover_tokens=50_000,
    default_profile="h100-cudnn",
)


@pytest.fixture(scope="module")
def steps():
    """Micro-batches of steps that differ in how much of their work is attention."""
    rng = np.random.default_rng(2)

    def micro_batches():
        longest = int(rng.integers(200, 60_000))
        return [rng.integers(1, longest, int(rng.integers(1, 4))).astype(np.int64) for _ in range(4)]

    return [micro_batches() for _ in range(24)]


def times(job, steps, ran=JOB):
    return np.array([simulate_step(job, shard_step(ran, lengths)).time for lengths in steps])


def entry(job=JOB, number=1, us=5000.0, lengths=((3, 4), (5,))):
    """A line as a run writes it, as far as it is read."""
    lengths = [[int(n) for n in each] for each in lengths]
    return {"step": number, "step_ms": float(us) / 1e3, "lengths": lengths, "job": job.to_json()}


def write(path, entries):
    path.write_text("".join((e if isinstance(e, str) else json.dumps(e)) + "\n" for e in entries))
    return path


def logged(path, steps, us, job=JOB):
    return write(path, [entry(job, 1 + i, t, lengths) for i, (lengths, t) in enumerate(zip(steps, us, strict=True))])


def compared(path, *flags):
    out = path.with_suffix(".compared.json")
    assert main(["compare", str(path), *flags, "--json", str(out)]) == 0
    return json.loads(out.read_text())


def test_predictions_are_those_of_the_simulator(steps, tmp_path):
    measured = 1.25 * times(JOB, steps)
    result = compared(logged(tmp_path / "run.jsonl", steps, measured))
    assert result["job"] == json.loads(json.dumps(JOB.to_json()))
    assert [s["step"] for s in result["steps"]] == list(range(2, 25))  # the first one warms up
    assert [s["predicted_us"] for s in result["steps"]] == pytest.approx(measured[1:] / 1.25)
    row = result["errors"]
    assert row["steps"] == 23
    assert (row["error_median"], row["error_p90"]) == pytest.approx((0.2, 0.2))
    assert row["correlation"] == pytest.approx(1)
    assert row["measured_us_median"] == pytest.approx(np.median(measured[1:]))


def test_steps_in_the_words_of_a_report(steps, tmp_path, capsys):
    """Shares are compared on the steps of which the run told its own; what it could not tell is a dash."""
    measured = 1.25 * times(JOB, steps)
    path = logged(tmp_path / "run.jsonl", steps, measured)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[3]["measured"] = {"busy": 0.5, "bubble": 0.3, "exchange": None, "waiting": 0.2}
    found = compared(write(path, lines))["in_words"]
    parts = shares(simulate_step(JOB, shard_step(JOB, steps[3])))
    tokens = sum(int(lengths.sum()) for step in steps[1:] for lengths in step)
    assert found["measured"] == lines[3]["measured"] | {
        "us_per_token": pytest.approx(measured[1:].sum() / tokens),
        "tokens_per_second_and_gpu": pytest.approx(1e6 * tokens / measured[1:].sum() / 4),
    }
    assert {name: found["predicted"][name] for name in parts} == pytest.approx(parts)
    assert re.search(r"^exchange, % of a step +- +\d+\.\d$", capsys.readouterr().out, re.M)


def test_the_job_is_that_of_the_log(steps, tmp_path, capsys):
    """Steps are placed and sharded as the run did it; times are of the profile that is asked for, or has a unit."""
    ran = replace(JOB, packing=OriginalPacking(), parallel=replace(JOB.parallel, dp=2), profile=FLOPS_PROFILE)
    ran = ran.sharded(cp_sharding="per-document")
    us = times(replace(ran, profile=JOB.profile), steps, ran)
    path = logged(tmp_path / "run.jsonl", steps, us, ran)
    result = compared(path)
    assert result["errors"]["error_p90"] == 0
    assert result["job"]["parallel"]["dp"] == 2
    assert "counts attended pairs; times are predicted by profile h100-cudnn." in capsys.readouterr().err
    assert compared(path, "--wlb-profile", "h100-cudnn") == result
    assert "counts attended pairs" not in capsys.readouterr().err
    assert "one in us" in refusal(capsys, "compare", str(path), "--wlb-profile", "flops")


def test_micro_batches_run_where_packing_dealt_them(steps, tmp_path):
    """Which its log says, and placing them anew would not find."""
    ran, ranks = replace(JOB, parallel=replace(JOB.parallel, dp=2)), np.array([[3, 0], [1, 2]])
    us = [simulate_step(ran, shard_step(ran, lengths, ranks)).time for lengths in steps]
    lines = [entry(ran, 1 + i, t, lengths) for i, (lengths, t) in enumerate(zip(steps, us, strict=True))]
    path = write(tmp_path / "run.jsonl", lines)
    assert compared(path)["errors"]["error_p90"] > 0
    write(path, [line | {"ranks": ranks.tolist()} for line in lines])
    assert compared(path)["errors"]["error_p90"] == 0


def test_the_first_steps_of_every_start_are_left_out():
    numbers = [1, 2, 3, 4, 3, 4, 5, 9, 10]
    steps = [LoggedStep(n, 1.0, [], None, JOB, {}) for n in numbers]
    assert [s.number for s in warm(steps, 0)] == numbers
    assert [s.number for s in warm(steps, 1)] == [2, 3, 4, 4, 5, 10]
    assert [s.number for s in warm(steps, 2)] == [3, 4, 5]


def test_a_long_log_is_sampled(steps, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(compare, "MOST_STEPS", 8)
    path = logged(tmp_path / "run.jsonl", steps, times(JOB, steps))
    assert [s["step"] for s in compared(path, "--skip", "0")["steps"]] == [1, 4, 7, 10, 14, 17, 20, 24]
    assert "8 of the 24 steps are simulated, evenly spread" in capsys.readouterr().err


GOOD = entry()
OTHER = entry(replace(JOB, parallel=replace(JOB.parallel, dp=2, tp=4)), number=2)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "LOG has 0 steps after --skip 1; give the log of more steps"),
        ([GOOD], "LOG has 0 steps after --skip 1"),
        (["hello"], "LOG, line 1: JSON is malformed: invalid character (byte 0); give the file that --wlb-log named"),
        ([GOOD, json.dumps(GOOD)[:20]], "LOG, line 2: JSON is malformed"),
        ([json.dumps(GOOD)[:-1] + ', "new": ' + "[" * 100_000], "line 1: "),
        ([{"step": 1, "work": [3]}], "line 1: Object missing required field `step_ms`"),
        ([GOOD | {"step_ms": -1}], "line 1: Expected `float` > 0.0 - at `$.step_ms`"),
        ([GOOD | {"step_ms": 1e12}], "line 1: Expected `float` < 1000000000000.0 - at `$.step_ms`"),
        ([GOOD | {"ranks": [[0], [0]]}], "line 1: its ranks do not run each of 2 micro-batches once"),
        ([GOOD | {"lengths": [[0]]}], "line 1: Expected `int` >= 1 - at `$.lengths[0][0]`"),
        ([GOOD | {"lengths": [[1 << 26, 1]]}], "micro-batch 0 holds 67108865 tokens; it must be at most 67108864"),
        ([GOOD | {"job": 3}], "line 1: not the description of a job: Expected `object`, got `int`; give what this"),
        ([GOOD | {"step": -1}], "`int` >= 1 - at `$.step`"),
        ([GOOD | {"job": GOOD["job"] | {"crossover_tokens": 0}}], "description of a job: crossover_tokens is 0"),
        ([GOOD | {"job": GOOD["job"] | {"packing": {"name": "ilp"}}}], "job: its packing is {'name': 'ilp'}, none of"),
        (
            [GOOD, OTHER],
            "LOG, line 2: the run goes on as another job (parallel.tp 1 -> 4, parallel.dp 1 -> 2); give the lines "
            "before it, or those from it on, as a file of their own",
        ),
    ],
)
def test_broken_logs_are_refused(lines, message, tmp_path, capsys):
    path = write(tmp_path / "run.jsonl", lines)
    error = refusal(capsys, "compare", str(path), "--json", str(tmp_path / "times.json"))
    assert message.replace("LOG", str(path)) in error
    assert list(tmp_path.iterdir()) == [path]


def test_a_line_without_end_is_not_read(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(compare, "MOST_OF_A_LINE", 99)
    path = write(tmp_path / "run.jsonl", [GOOD])
    assert "line 1 has over 0 MiB, the limit; give the file" in refusal(capsys, "compare", str(path))
