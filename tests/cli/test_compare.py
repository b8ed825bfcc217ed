"""Logs of runs whose times are known, compared with predictions; scales are found again; broken logs are refused."""

import json
from dataclasses import replace

import numpy as np
import pytest
from megatron_wlb.cli.job import layout_of
from megatron_wlb.plan.workload import load_profile

from megatron_wlb.adapter import log
from megatron_wlb.cli import compare
from megatron_wlb.cli.compare import LoggedStep, Scales, explicit, fit_scales, read_log, scaled, warm
from megatron_wlb.cli.main import main
from megatron_wlb.plan.packer import Packer
from megatron_wlb.plan.packing import make_policy
from megatron_wlb.plan.step import Layout, plan_step, shard_step
from megatron_wlb.plan.stream import DocumentStream, Source
from megatron_wlb.simulate import MODELS, Job, simulate_step

FLAGS = "--model llama2-7b --num-layers 4".split()
LAYOUT = {
    "TP": 1,
    "CP": 2,
    "PP": 2,
    "VPP": 1,
    "DP": 1,
    "crossover": 50_000,
    "CP sharding": "adaptive",
    "packing": "wlb",
}
JOB = Job(model=replace(MODELS["llama2-7b"], num_layers=4), cp=2, pp=2, cp_head_groups=2)
PLANNED = {"unit_tokens": 4, "crossover_tokens": LAYOUT["crossover"], "cp_sharding": "adaptive", "balance": True}
PLACED = layout_of(JOB, **PLANNED)
KNOWN = Scales(attention=1.6, linear=0.7, uncertainty=(0.0, 0.0), is_common=False)


def micro_batches(rng):
    """Of steps that differ in how much of their work is attention."""
    longest = int(rng.integers(200, 60_000))
    return [rng.integers(1, longest, int(rng.integers(1, 4))).astype(np.int64) for _ in range(4)]


@pytest.fixture(scope="module")
def steps():
    rng = np.random.default_rng(2)
    return [micro_batches(rng) for _ in range(24)]


@pytest.fixture(scope="module")
def base(steps):
    """The job with everything in its profile."""
    profile = explicit(JOB, shard_step(steps[0], PLACED))
    return replace(JOB, hardware=replace(JOB.hardware, attention=profile))


def times(job, steps):
    return np.array([simulate_step(job, shard_step(lengths, PLACED)).time for i, lengths in enumerate(steps)])


def write(path, steps, us, first=1, layout=LAYOUT):
    """A log as a run writes it, as far as it is read."""
    lines = (
        json.dumps(
            {"step": first + i, "step_ms": float(t) / 1e3, "lengths": [m.tolist() for m in lengths], "layout": layout}
        )
        for i, (lengths, t) in enumerate(zip(steps, us, strict=True))
    )
    path.write_text("".join(line + "\n" for line in lines))
    return path


def compared(path, *flags):
    out = path.with_suffix(".compared.json")
    assert main(["compare", str(path), *FLAGS, *flags, "--json", str(out)]) == 0
    return json.loads(out.read_text())


def test_the_explicit_profile_says_the_same(steps, base):
    """But for the output layer, which runs at the rate of layers with their norms, and weighs much in a short model."""
    layers, same = (simulate_step(job, shard_step(steps[1], PLACED)).passes[0].layers for job in (JOB, base))
    for direction in range(2):
        np.testing.assert_allclose(same[direction].total, layers[direction].total)
    assert times(base, steps) == pytest.approx(times(JOB, steps), rel=0.02)
    assert base.hardware.attention.backward is not None
    assert base.hardware.attention.linear_tflops is not None


def test_scales_are_those_of_attention_and_of_the_rest(steps, base):
    one, other = (scaled(base, replace(KNOWN, attention=2.0, linear=1.0)), scaled(base, replace(KNOWN, linear=3.0)))
    plan = [shard_step(steps[0], PLACED)]
    layers, slower, longer = (simulate_step(job, plan[0]).passes[0].layers for job in (base, one, other))
    for direction in range(2):
        np.testing.assert_allclose(slower[direction].attention, 2 * layers[direction].attention)
        np.testing.assert_allclose(slower[direction].linear, layers[direction].linear)
        np.testing.assert_allclose(longer[direction].attention, 1.6 * layers[direction].attention)
        np.testing.assert_allclose(longer[direction].linear, 3 * layers[direction].linear)


def test_predictions_are_those_of_the_simulator(steps, tmp_path):
    measured = 1.25 * times(JOB, steps)
    result = compared(write(tmp_path / "run.jsonl", steps, measured))
    assert [s["step"] for s in result["steps"]] == list(range(2, 25))  # the first one warms up
    assert [s["predicted_us"] for s in result["steps"]] == pytest.approx(measured[1:] / 1.25)
    row = result["errors"]["all steps"]
    assert row["steps"] == 23
    assert (row["error_median"], row["error_p90"]) == pytest.approx((0.2, 0.2))
    assert row["correlation"] == pytest.approx(1)
    assert row["measured_us_median"] == pytest.approx(np.median(measured[1:]))


def test_recalibration_finds_the_scales_again(steps, base, tmp_path, capsys):
    noise = np.random.default_rng(3).lognormal(0, 0.01, len(steps))
    noise[[4, 11]] = 3.0  # disturbed steps: one among the fitted, one held out
    measured = times(scaled(base, KNOWN), steps) * noise
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
    assert profile.crossover_tokens == pytest.approx(profile.crossover_for(JOB.model), rel=1e-3)
    assert profile.crossover_tokens < base.hardware.attention.crossover_for(JOB.model) / 2  # about 0.7 / 1.6
    assert profile.gather_us_per_mib == old.gather_us_per_mib
    assert data["recalibrated"]["profile"] == "h100-fa2"
    assert data["recalibrated"]["steps_fitted"] == 12
    assert data["recalibrated"]["error_before"] == before
    assert data["error"]["step_time"] == after
    assert data["command"].startswith(f"megatron-wlb compare {path} --model llama2-7b")
    # Used on the same log, it predicts what it was fitted to.
    again = compared(path, "--wlb-profile", str(out))["errors"]["all steps"]
    assert again["error_median"] < 0.02


def test_steps_that_are_alike_get_one_scale(steps, base):
    plans = [shard_step(steps[3], PLACED)] * 12
    measured = np.full(12, 1.3 * simulate_step(base, plans[0]).time) * (1 + 0.01 * (np.arange(12) % 3))
    scales = fit_scales(base, plans, measured)
    assert scales.is_common
    assert scales.attention == scales.linear == pytest.approx(1.3, rel=0.05)
    assert "too alike" in compare._sentence(scales)


def test_the_first_steps_of_every_start_are_left_out():
    numbers = [1, 2, 3, 4, 3, 4, 5, 9, 10]
    steps = [LoggedStep(number=n, measured_us=1.0, lengths=[], layout=LAYOUT) for n in numbers]
    assert [s.number for s in warm(steps, 0)] == numbers
    assert [s.number for s in warm(steps, 1)] == [2, 3, 4, 4, 5, 10]
    assert [s.number for s in warm(steps, 2)] == [3, 4, 5]


@pytest.mark.parametrize("packing", ["original", "wlb"])
def test_what_a_run_logs_is_what_is_read(packing, tmp_path):
    """The log of planned steps gives back their micro-batches, and so the plan of every data-parallel rank."""
    lengths = np.random.default_rng(1).integers(1, 500, 60)
    stream = DocumentStream([Source(pairs=lengths)], seed=0, context_length=512, shuffle=False, num_epochs=1)
    data = {"num_micro_batches": 4, "context_length": 512, "max_tokens": 640, "crossover_tokens": 900}
    policy = make_policy(packing, **data, outlier_thresholds=(300,), use_native=False)
    packer = Packer(stream, policy, num_micro_batches=4, context_length=512, fingerprint="", policy_name=packing)
    job = replace(JOB, dp=2)
    kernel = job.hardware.attention.kernel(heads=32, row_bytes=2 * 32 * 128 * 2, head_groups=2)
    layout = Layout(
        dp_size=2, dp_rank=1, cp_size=2, pp_size=2, vp_size=1, unit_tokens=4, cp_sharding="adaptive", kernel=kernel,
        crossover_tokens=900, balance=packing != "original", use_native=False,
    )  # fmt: skip
    plans = [plan_step(packer, layout) for _ in range(3)]
    layout_of_run = LAYOUT | {"DP": 2, "crossover": 900, "packing": packing, "S_max": 640}
    for plan in plans:
        log.append(str(tmp_path / "log"), log.summary(plan, 1.0, 0.25, 0.0) | log.details(plan, kernel, layout_of_run))
    read = read_log(str(tmp_path / "log"))
    planned = layout_of(job, **PLANNED | {"crossover_tokens": 900, "balance": packing != "original"})
    for plan, step in zip(plans, read, strict=True):
        assert (step.number, step.measured_us) == (plan.step + 1, 250_000)
        assert step.layout == {name: layout_of_run[name] for name in LAYOUT}
        again = shard_step(step.lengths, planned)[1]
        assert [s.lengths.tolist() for s in again] == [m.shards.lengths.tolist() for m in plan.micro_batches]


def test_the_layout_is_that_of_the_log(steps, tmp_path, capsys):
    """Data-parallel ranks, crossover and sharding too, which no flag says here; flags may repeat it."""
    job = replace(JOB, dp=2)
    planned = layout_of(job, **PLANNED | {"crossover_tokens": 900, "cp_sharding": "per-document", "balance": False})
    us = [simulate_step(job, shard_step(lengths, planned)).time for lengths in steps]
    layout = LAYOUT | {"DP": 2, "crossover": 900, "CP sharding": "per-document", "packing": "original"}
    path = write(tmp_path / "run.jsonl", steps, us, layout=layout)
    result = compared(path)
    assert result["errors"]["all steps"]["error_p90"] == 0
    assert (result["layout"]["dp"], result["cp_sharding"]) == (2, "per-document")
    line = (
        "torchrun --nproc-per-node 8 pretrain_gpt.py --context-parallel-size 2 --pipeline-model-parallel-size 2 --wlb "
    )
    line += "--wlb-packing original --wlb-cp-sharding per-document --lr 3e-4 --micro-batch-size 1"
    assert compared(path, *line.split()) == result
    assert "Assumed" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--tensor-model-parallel-size 2", "--tensor-model-parallel-size is 2, and LOG was made with 1; leave it out"),
        ("--num-gpus 8", "--num-gpus is 8, and LOG was made with 4"),
        ("--nproc-per-node 8", "--num-gpus is 8, and LOG was made with 4"),
        ("--wlb-packing adaptive", "--wlb-packing is adaptive, and LOG was made with wlb"),
        ("--wlb-crossover 7", "--wlb-crossover is 7, and LOG was made with 50000"),
        ("--wlb-cp-sharding hybrid", "--wlb-cp-sharding is hybrid, and LOG was made with adaptive"),
        (
            "--num-virtual-stages-per-pipeline-rank 2",
            "--num-virtual-stages-per-pipeline-rank is 2, and LOG was made with 1",
        ),
        (
            "--num-layers-per-virtual-pipeline-stage 1",
            "--num-layers-per-virtual-pipeline-stage is 1, and LOG was made with 2",
        ),
    ],
)
def test_flags_of_another_run_are_refused(flags, message, steps, tmp_path, capsys):
    path = str(write(tmp_path / "run.jsonl", steps[:3], np.full(3, 1e6)))
    assert main(["compare", path, *FLAGS, *flags.split()]) == 2
    assert message.replace("LOG", path) in capsys.readouterr().err


def test_a_long_log_is_sampled_in_pairs(steps, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(compare, "MOST_STEPS", 8)
    path = write(tmp_path / "run.jsonl", steps, times(JOB, steps))
    numbers = [s["step"] for s in compared(path, "--skip", "0")["steps"]]
    assert len(numbers) == 8 and numbers[0] == 1 and numbers[-1] == 24
    assert [b - a for a, b in zip(numbers[::2], numbers[1::2], strict=True)] == [1] * 4
    assert "8 of the 24 steps are simulated, in pairs of neighbours" in capsys.readouterr().err


GOOD = {"step": 1, "step_ms": 5.0, "lengths": [[3, 4], [5]], "layout": LAYOUT}
BROKEN = {
    "empty": ("", "has 0 steps after --skip 1; at least 2 are needed"),
    "one step": (json.dumps(GOOD), "has 0 steps after --skip 1"),
    "text": ("hello", "not JSON (Expecting value)"),
    "half a line": (json.dumps(GOOD) + "\n" + json.dumps(GOOD)[:20], "after step 1: not JSON"),
    "nested": ("[" * 100_000, "not JSON"),
    "list": ("[1]", "line 1 is no step of a run; give the file that --wlb-log named"),
    "plan": (json.dumps({"format": "megatron-wlb-plan"}), "line 1 is no step of a run"),
    "older": (json.dumps({"step": 1, "work": [3]}), "states no step_ms, lengths or layout; log the run anew"),
    "time": (json.dumps(GOOD | {"step_ms": -1}), "step_ms is -1; it must be a time over 0"),
    "endless": (json.dumps(GOOD | {"step_ms": float("inf")}), "step_ms is inf"),
    "word": (json.dumps(GOOD | {"step_ms": "5"}), "step_ms is 5"),
    "flat": (json.dumps(GOOD | {"lengths": [3]}), "line 1: micro-batch 0 is not a list"),
    "number": (json.dumps(GOOD | {"lengths": 3}), "line 1: lengths is not a list of micro-batches"),
    "zero": (json.dumps(GOOD | {"lengths": [[0]]}), "line 1: micro-batch 0 has a document of length 0"),
    "no layout": (json.dumps({**GOOD, "layout": 3}), "line 1: layout states TP None; it must be an integer over 0"),
    "half a layout": (json.dumps({**GOOD, "layout": LAYOUT | {"DP": 0}}), "layout states DP 0; it must be an integer"),
    "packing": (json.dumps({**GOOD, "layout": LAYOUT | {"packing": "best"}}), "packing best; it must be one of origin"),
    "two layouts": (
        json.dumps(GOOD) + "\n" + json.dumps({**GOOD, "step": 2, "layout": LAYOUT | {"DP": 2, "TP": 4}}),
        "line 2: the run goes on in another layout (TP 1 to 4, DP 1 to 2); give the lines before it, or those from",
    ),
    "huge": (json.dumps(GOOD | {"lengths": [[1 << 26, 1]]}), "line 1: micro-batch 0 holds 67108865 tokens"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_logs_are_refused(name, tmp_path, capsys):
    text, message = BROKEN[name]
    path = tmp_path / "run.jsonl"
    path.write_text(text)
    out = tmp_path / "profile.json"
    assert main(["compare", str(path), *FLAGS, "--json", str(out)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not out.exists()


def test_other_refusals(steps, tmp_path, capsys):
    path = str(write(tmp_path / "run.jsonl", steps[:6], np.full(6, 1e6)))
    assert main(["compare", path, *FLAGS, "--output", str(tmp_path / "profile.json")]) == 2
    assert "has 5 steps after --skip 1; at least 8 are needed" in capsys.readouterr().err
    assert main(["compare", path, *FLAGS, "--output", "-", "--json", "-"]) == 2
    assert "both go to standard output" in capsys.readouterr().err
    assert main(["compare", str(tmp_path), *FLAGS]) == 2
    assert "Is a directory" in capsys.readouterr().err
