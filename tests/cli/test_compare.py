"""Logs of runs whose times are known, compared with predictions; scales are found again; broken logs are refused."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from megatron_wlb.cli import compare
from megatron_wlb.cli.compare import LoggedStep, complete_profile, fit_scales, read_log, scale, warm
from megatron_wlb.cli.main import main
from megatron_wlb.describe.make import make_job
from megatron_wlb.hardware.profile import FLOPS_PROFILE, load_profile
from megatron_wlb.job import Parallel
from megatron_wlb.model import MODELS
from megatron_wlb.packing.original import OriginalPacking
from megatron_wlb.packing.wlb import WlbPacking
from megatron_wlb.plan.packer import make_packer
from megatron_wlb.plan.step import plan_step, shard_step
from megatron_wlb.plan.stream import DocumentStream, Source
from megatron_wlb.simulate import shares, simulate_step
from megatron_wlb.simulate.passes import crossover
from tests.cli.commands import refusal

JOB = make_job(
    model=replace(MODELS["llama2-7b"], num_layers=4),
    parallel=Parallel(cp=2, pp=2),
    context_length=65536,
    global_batch_size=4,
    crossover_tokens=50_000,
    default_profile="h100-fa2",
)


def micro_batches(rng):
    """Micro-batches of a step; steps differ in how much of their work is attention."""
    longest = int(rng.integers(200, 60_000))
    return [rng.integers(1, longest, int(rng.integers(1, 4))).astype(np.int64) for _ in range(4)]


@pytest.fixture(scope="module")
def steps():
    rng = np.random.default_rng(2)
    return [micro_batches(rng) for _ in range(24)]


@pytest.fixture(scope="module")
def base(steps):
    """The job with everything in its profile."""
    return replace(JOB, profile=complete_profile(JOB, shard_step(JOB, steps[0])))


def times(job, steps, ran=JOB):
    return np.array([simulate_step(job, shard_step(ran, lengths)).time for lengths in steps])


def entry(job=JOB, number=1, us=5000.0, lengths=((3, 4), (5,))):
    """A line as a run writes it, as far as it is read."""
    lengths = [[int(n) for n in each] for each in lengths]
    return {"step": number, "step_ms": float(us) / 1e3, "lengths": lengths, "job": job.to_json()}


def write(path, steps, us, job=JOB):
    entries = (entry(job, 1 + i, t, lengths) for i, (lengths, t) in enumerate(zip(steps, us, strict=True)))
    path.write_text("".join(json.dumps(each) + "\n" for each in entries))
    return path


def compared(path, *flags):
    out = path.with_suffix(".compared.json")
    assert main(["compare", str(path), *flags, "--json", str(out)]) == 0
    return json.loads(out.read_text())


def test_the_explicit_profile_says_the_same(steps, base):
    """But for the output layer, which runs at the rate of layers with their norms, and weighs less in a long model."""
    layers, same = (simulate_step(job, shard_step(JOB, steps[1])).passes[0].layers for job in (JOB, base))
    for direction in range(2):
        np.testing.assert_allclose(same[direction].total, layers[direction].total)
    longer, its_base = (replace(job, model=replace(job.model, num_layers=8)) for job in (JOB, base))
    assert times(its_base, steps, longer) == pytest.approx(times(longer, steps, longer), rel=0.01)
    assert base.profile.backward is not None
    assert base.profile.linear_tflops is not None


def test_scales_are_those_of_attention_and_of_the_rest(steps, base):
    """Of attention but for adding parts up, which takes what the memory takes."""
    one, other = scale(base, 2.0, 1.0), scale(base, 1.6, 3.0)
    shards = shard_step(JOB, steps[0])
    layers, slower, longer = (simulate_step(job, shards).passes[0].layers for job in (base, one, other))
    for direction in range(2):
        np.testing.assert_allclose(slower[direction].attention, 2 * layers[direction].attention, rtol=0.03)
        np.testing.assert_allclose(slower[direction].linear, layers[direction].linear)
        np.testing.assert_allclose(longer[direction].attention, 1.6 * layers[direction].attention, rtol=0.03)
        np.testing.assert_allclose(longer[direction].linear, 3 * layers[direction].linear)


def test_predictions_are_those_of_the_simulator(steps, tmp_path):
    measured = 1.25 * times(JOB, steps)
    result = compared(write(tmp_path / "run.jsonl", steps, measured))
    assert result["job"] == json.loads(json.dumps(JOB.to_json()))
    assert [s["step"] for s in result["steps"]] == list(range(2, 25))  # the first one warms up
    assert [s["predicted_us"] for s in result["steps"]] == pytest.approx(measured[1:] / 1.25)
    row = result["errors"]["all steps"]
    assert row["steps"] == 23
    assert (row["error_median"], row["error_p90"]) == pytest.approx((0.2, 0.2))
    assert row["correlation"] == pytest.approx(1)
    assert row["measured_us_median"] == pytest.approx(np.median(measured[1:]))


def test_steps_in_the_words_of_a_report(steps, tmp_path, capsys):
    """Shares are compared on the steps of which the run told its own; what it could not tell is a dash."""
    measured = 1.25 * times(JOB, steps)
    path = write(tmp_path / "run.jsonl", steps, measured)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[3]["measured"] = {"busy": 0.5, "bubble": 0.3, "exchange": None, "waiting": 0.2}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = compared(path)["in_words"]
    parts = shares(simulate_step(JOB, shard_step(JOB, steps[3])))
    tokens = sum(int(lengths.sum()) for step in steps[1:] for lengths in step)
    assert found["measured"] == lines[3]["measured"] | {
        "us_per_token": pytest.approx(measured[1:].sum() / tokens),
        "tokens_per_second_and_gpu": pytest.approx(1e6 * tokens / measured[1:].sum() / 4),
    }
    assert {name: found["predicted"][name] for name in parts} == pytest.approx(parts)
    assert re.search(r"^exchange, % of a step +- +\d+\.\d$", capsys.readouterr().out, re.M)
    lines[3]["measured"] = {"busy": "much"}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "line 4: Expected `float | null`, got `str` - at `$.measured[...]`" in refusal(capsys, "compare", str(path))


def test_the_job_is_that_of_the_log(steps, tmp_path, capsys):
    """Steps are placed and sharded as the run did it; times are of the profile that is asked for, or has a unit."""
    ran = replace(JOB, packing=OriginalPacking(), parallel=replace(JOB.parallel, dp=2), profile=FLOPS_PROFILE)
    ran = ran.sharded(cp_sharding="per-document")
    us = times(replace(ran, profile=JOB.profile), steps, ran)
    path = write(tmp_path / "run.jsonl", steps, us, ran)
    result = compared(path)
    assert result["errors"]["all steps"]["error_p90"] == 0
    assert result["job"]["parallel"]["dp"] == 2
    assert "counts attended pairs; times are predicted by profile h100-fa2." in capsys.readouterr().err
    assert compared(path, "--wlb-profile", "h100-fa2") == result
    assert "counts attended pairs" not in capsys.readouterr().err
    assert "one in us" in refusal(capsys, "compare", str(path), "--wlb-profile", "flops")


def test_recalibration_finds_the_scales_again(steps, base, tmp_path, capsys):
    noise = np.random.default_rng(3).lognormal(0, 0.01, len(steps))
    noise[[4, 11]] = 3.0  # disturbed steps: one among the fitted, one held out
    measured = times(scale(base, 1.6, 0.7), steps) * noise
    out = tmp_path / "better.json"
    path = write(tmp_path / "run.jsonl", steps, measured)
    result = compared(path, "--skip", "0", "--output", str(out))
    assert result["scales"]["attention"] == pytest.approx(1.6, rel=0.05)
    assert result["scales"]["linear"] == pytest.approx(0.7, rel=0.05)
    assert not result["scales"]["is_common"]
    before, after = result["errors"]["held-out steps"], result["errors"]["held-out steps, recalibrated"]
    assert before["steps"] == after["steps"] == 12
    assert after["error_median"] < 0.02 < before["error_median"]
    assert "attention x 1." in capsys.readouterr().out

    profile, data = load_profile(str(out)), json.loads(out.read_text())
    old = load_profile("h100-fa2")
    assert profile.name == "better"
    assert profile.forward.tile == pytest.approx(1.6 * old.forward.tile, rel=0.06)
    assert profile.backward.tile == pytest.approx(2.5 * profile.forward.tile, rel=1e-3)
    assert crossover(replace(JOB, profile=profile)) < crossover(base) / 2  # about 0.7 / 1.6
    assert data["recalibrated"]["job"]["profile"]["name"] == "h100-fa2"
    assert data["recalibrated"]["scales"]["steps_fitted"] == 12
    assert data["recalibrated"]["error_before"] == before
    assert data["error"]["step_time"] == after
    assert data["command"].startswith(f"megatron-wlb compare {path} --skip 0")
    # Used on the same log, it predicts what it was fitted to.
    again = compared(path, "--wlb-profile", str(out))["errors"]["all steps"]
    assert again["error_median"] < 0.02


def test_steps_that_are_alike_get_one_scale(steps, base):
    shards = [shard_step(JOB, steps[3])] * 12
    measured = np.full(12, 1.3 * simulate_step(base, shards[0]).time) * (1 + 0.01 * (np.arange(12) % 3))
    scales = fit_scales(base, shards, measured)
    assert scales.is_common
    assert scales.attention == scales.linear == pytest.approx(1.3, rel=0.05)
    assert "too alike" in compare._sentence(scales)


def test_the_first_steps_of_every_start_are_left_out():
    numbers = [1, 2, 3, 4, 3, 4, 5, 9, 10]
    steps = [LoggedStep(n, 1.0, [], JOB, {}) for n in numbers]
    assert [s.number for s in warm(steps, 0)] == numbers
    assert [s.number for s in warm(steps, 1)] == [2, 3, 4, 4, 5, 10]
    assert [s.number for s in warm(steps, 2)] == [3, 4, 5]


@pytest.mark.parametrize("packing", [OriginalPacking(), WlbPacking(outlier_thresholds=(300,))])
def test_what_a_run_logs_is_what_is_read(packing, tmp_path):
    """The log of planned steps gives back their micro-batches, and so the plan of every data-parallel rank."""
    log = pytest.importorskip("megatron_wlb.adapter.log")
    lengths = np.random.default_rng(1).integers(1, 500, 60)
    job = replace(
        JOB, packing=packing, parallel=replace(JOB.parallel, dp=2), context_length=512, max_tokens=640,
        crossover_tokens=900,
    )  # fmt: skip
    stream = DocumentStream([Source(lengths=lengths)], seed=0, context_length=512, shuffle=False, num_epochs=1)
    packer = make_packer(stream, job, fingerprint="")
    plans = [plan_step(packer, job, dp_rank=1) for _ in range(3)]
    for plan in plans:
        log.append(str(tmp_path / "log"), log.summary(plan, 1.0, 0.25, 0.0) | log.details(plan, job))
    for plan, step in zip(plans, read_log(str(tmp_path / "log")), strict=True):
        assert (step.number, step.measured_us, step.job) == (plan.step + 1, 250_000, job)
        again = shard_step(step.job, step.lengths)[1]
        assert [s.lengths.tolist() for s in again] == [m.shards.lengths.tolist() for m in plan.micro_batches]


def test_a_long_log_is_sampled_in_pairs(steps, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(compare, "MOST_STEPS", 8)
    path = write(tmp_path / "run.jsonl", steps, times(JOB, steps))
    numbers = [s["step"] for s in compared(path, "--skip", "0")["steps"]]
    assert len(numbers) == 8 and numbers[0] == 1 and numbers[-1] == 24
    assert [b - a for a, b in zip(numbers[::2], numbers[1::2], strict=True)] == [1] * 4
    assert "8 of the 24 steps are simulated, in pairs of neighbours" in capsys.readouterr().err


GOOD = entry()
OTHER = entry(replace(JOB, parallel=replace(JOB.parallel, dp=2, tp=4)), number=2)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "LOG has 0 steps after --skip 1; at least 2 are needed, log more steps"),
        ([GOOD], "LOG has 0 steps after --skip 1"),
        (["hello"], "LOG, line 1: JSON is malformed: invalid character (byte 0); give the file that --wlb-log named"),
        ([GOOD, json.dumps(GOOD)[:20]], "LOG, line 2: JSON is malformed"),
        (["[" * 100_000], "line 1: Expected `object`, got `array`"),
        ([json.dumps(GOOD).replace("5.0", "[" * 100_000)], "line 1: Expected `float`, got `array` - at `$.step_ms`"),
        ([json.dumps(GOOD)[:-1] + ', "new": ' + "[" * 100_000], "line 1: "),
        ([{"step": 1, "work": [3]}], "line 1: Object missing required field `step_ms`"),
        ([GOOD | {"step_ms": -1}], "line 1: Expected `float` > 0.0 - at `$.step_ms`"),
        ([GOOD | {"step_ms": 1e12}], "line 1: Expected `float` < 1000000000000.0 - at `$.step_ms`"),
        ([GOOD | {"step_ms": float("inf")}], "line 1: JSON is malformed"),
        ([GOOD | {"step_ms": 10**400}], "line 1: Number out of range - at `$.step_ms`"),
        ([GOOD | {"step_ms": "5"}], "line 1: Expected `float`, got `str` - at `$.step_ms`"),
        ([GOOD | {"lengths": [3]}], "line 1: Expected `array`, got `int` - at `$.lengths[0]`"),
        ([GOOD | {"lengths": [[0]]}], "line 1: Expected `int` >= 1 - at `$.lengths[0][0]`"),
        ([GOOD | {"lengths": [[True]]}], "line 1: Expected `int`, got `bool` - at `$.lengths[0][0]`"),
        ([GOOD | {"lengths": [[1 << 26, 1]]}], "micro-batch 0 holds 67108865 tokens; it must be at most 67108864"),
        ([GOOD | {"job": 3}], "line 1: not the description of a job: Expected `object`, got `int`; give what this"),
        ([GOOD | {"job": GOOD["job"] | {"crossover_tokens": 0}}], "not the description of a job: crossover_tokens is 0"),
        ([GOOD | {"job": GOOD["job"] | {"packing": {"name": "ilp"}}}], "job: its packing is {'name': 'ilp'}, none of"),
        (
            [GOOD, OTHER],
            "LOG, line 2: the run goes on as another job (parallel.tp 1 -> 4, parallel.dp 1 -> 2); give the lines "
            "before it, or those from it on, as a file of their own",
        ),
    ],
)
def test_broken_logs_are_refused(lines, message, tmp_path, capsys):
    path = tmp_path / "run.jsonl"
    path.write_text("".join((e if isinstance(e, str) else json.dumps(e)) + "\n" for e in lines))
    error = refusal(capsys, "compare", str(path), "--json", str(tmp_path / "times.json"))
    assert message.replace("LOG", str(path)) in error
    assert list(tmp_path.iterdir()) == [path]


def test_other_refusals(steps, base, tmp_path, capsys, monkeypatch):
    path = str(write(tmp_path / "run.jsonl", steps[:6], np.full(6, 1e6)))
    message = refusal(capsys, "compare", path, "--output", str(tmp_path / "profile.json"))
    assert "has 5 steps after --skip 1; at least 8 are needed" in message
    assert "both go to standard output" in refusal(capsys, "compare", path, "--output", "-", "--json", "-")
    assert "Is a directory" in refusal(capsys, "compare", str(tmp_path))
    monkeypatch.setattr(compare, "scale", lambda job, *scales: job)
    with pytest.raises(ValueError, match="the times of 2 steps do not depend on what is scaled"):
        fit_scales(base, [shard_step(JOB, lengths) for lengths in steps[:2]], np.ones(2))
