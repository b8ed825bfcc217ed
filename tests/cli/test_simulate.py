"""Plan files on simulated jobs: timed by the simulator, and refused where they are broken."""

import io
import json
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_wlb.cli.main import main
from megatron_wlb.cost.work import document_work
from megatron_wlb.describe.make import make_job
from megatron_wlb.job import Job, Parallel
from megatron_wlb.model import MODELS
from megatron_wlb.packing.adaptive import AdaptivePacking
from megatron_wlb.plan.step import shard_step
from megatron_wlb.simulate import balanced_time, simulate_step
from megatron_wlb.simulate.memory import H100_BYTES
from tests.cli.commands import refusal, write_json

N, C = 8, 4096
LAYOUT = "--tensor-model-parallel-size 2 --context-parallel-size 2 --pipeline-model-parallel-size 2"
FLAGS = f"--model llama2-7b {LAYOUT} --num-gpus 16 --num-virtual-stages-per-pipeline-rank 2".split()
JOB = make_job(
    model=MODELS["llama2-7b"],
    parallel=Parallel(tp=2, cp=2, pp=2, vpp=2, dp=2),
    context_length=C,
    global_batch_size=N,
    max_tokens=5120,
    crossover_tokens=50_000,
    packing=AdaptivePacking(),
    default_profile="h100-fa2",
    device_bytes=H100_BYTES,
    hidden_dropout=True,
)
HEADER = {
    "format": "megatron-wlb-plan",
    "version": 2,
    "policy": "wlb",
    "windows": 2,
    "micro_batches": 2,
    "context_length": 100,
    "max_tokens": 150,
    "crossover": 50,
    "documents": 9,
}
STEP = {"step": 0, "micro_batches": [[[0, 0, 100], [1, 0, 20]], [[2, 0, 90]]]}
SUMMARY = {"summary": {}, "waiting": []}


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plan")
    lengths = np.random.default_rng(5).lognormal(6, 1.2, 800).astype(int).clip(2, C).tolist()
    flags = f"--global-batch-size {N} --seq-length {C} --wlb-max-tokens 5120 --wlb-packing adaptive".split()
    out = folder / "plan.jsonl"
    assert main(["plan", write_json(folder, lengths), *flags, "--wlb-crossover", "50000", "--output", str(out)]) == 0
    return out


def simulated(plan_file, tmp_path, *flags):
    out = tmp_path / "times.json"
    assert main(["simulate", str(plan_file), *flags, "--json", str(out)]) == 0
    return json.loads(out.read_text())


def write(path, *entries):
    path.write_text("".join((e if isinstance(e, str) else json.dumps(e)) + "\n" for e in entries))
    return path


def test_times_are_those_of_the_simulator(plan_file, tmp_path):
    result = simulated(plan_file, tmp_path, *FLAGS)
    assert Job.from_json(result["job"]) == JOB
    entries = [json.loads(line) for line in plan_file.read_text().splitlines()][1:-1]
    assert [e["step"] for e in result["steps"]] == [e["step"] for e in entries]
    for planned, got in list(zip(entries, result["steps"], strict=True))[:3]:
        lengths = [np.array([d[2] for d in m], np.int64) for m in planned["micro_batches"]]
        work = np.array([document_work(each, 50_000).sum() for each in lengths])
        step = simulate_step(JOB, shard_step(JOB, lengths))
        assert got["time_us"] == pytest.approx(step.time)
        assert got["limit_us"] == pytest.approx(balanced_time(step))
        assert got["tokens"] == sum(map(sum, lengths))
        assert got["imbalance"] == pytest.approx(work.max() / work.mean())
        assert sum(got["breakdown_us"].values()) == pytest.approx(step.time)
        assert 1 <= got["cp_imbalance"] < 2


def test_what_is_printed_and_written(plan_file, tmp_path, capsys):
    result = simulated(plan_file, tmp_path, *FLAGS)
    out = capsys.readouterr().out
    mean = result["mean"]
    assert re.search(rf"^step +{mean['time_us'] / 1e3:.2f} +100.0%", out, re.M)
    assert re.search(rf"^limit of balance +{mean['limit_us'] / 1e3:.2f} +{mean['of_limit']:.1%}", out, re.M)
    assert (
        f"on 16 GPUs, simulated with profile h100-fa2: {mean['of_limit']:.1%} of the speed at the limit of balance"
        in out
    )
    edge = len(result["steps"]) // 10
    assert result["left_out"] == edge > 0
    middle = result["steps"][edge:-edge]
    assert mean["time_us"] == pytest.approx(np.mean([e["time_us"] for e in middle]))
    assert f"step {max(middle, key=lambda e: e['time_us'])['step']}, the slowest, ms" in out
    assert main(["simulate", str(plan_file), *FLAGS, "--json", "-"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) == result
    assert "limit of balance" in printed.err


def test_uneven_plans_are_slower_and_further_from_their_limit(tmp_path):
    def times(name, *micro_batches):
        step = {"step": 0, "micro_batches": [[[i, 0, n] for n in m] for i, m in enumerate(micro_batches)]}
        header = HEADER | {"windows": 4, "micro_batches": 4, "context_length": 65536, "max_tokens": 65536}
        plan = write(tmp_path / name, header, step, SUMMARY)
        return simulated(plan, tmp_path, "--model", "llama2-7b", "--pipeline-model-parallel-size", "4")["mean"]

    even, uneven = times("even", *[[32768]] * 4), times("uneven", [65536], [32768], [16384, 8192], [8192])
    assert even["tokens"] == uneven["tokens"]
    assert even["of_limit"] == pytest.approx(1)
    assert uneven["of_limit"] < 0.95
    assert uneven["breakdown_us"]["imbalance"] > 0
    total = sum(n * (n + 50) for n in (65536, 32768, 16384, 8192, 8192))
    assert uneven["imbalance"] == pytest.approx(4 * 65536 * 65586 / total)


def test_waiting_of_ranks_that_divide_experts_is_printed(tmp_path, capsys):
    micro_batches = [[[i, 0, n]] for i, n in enumerate((65536, 512, 65536, 8192))]
    step = {"step": 0, "micro_batches": micro_batches}
    header = HEADER | {
        "windows": 4,
        "micro_batches": 4,
        "context_length": 65536,
        "max_tokens": 65536,
        "policy": "original",
    }
    plan = write(tmp_path / "plan", header, step, SUMMARY)
    flags = "--model llama2-7b --num-gpus 2 --num-experts 4 --expert-model-parallel-size 2".split()
    mean = simulated(plan, tmp_path, *flags)["mean"]
    wait = mean["breakdown_us"]["ep_wait"] / mean["time_us"]
    assert wait > 0.1
    printed = " ".join(capsys.readouterr().out.split())
    assert f"2 data-parallel ranks divide experts and wait for each other {wait:.1%} of the time" in printed
    assert "waiting for the slowest EP rank" in printed


def test_a_trace_of_any_step(plan_file, tmp_path):
    result = simulated(plan_file, tmp_path, *FLAGS, "--trace", str(tmp_path / "0.json"))
    simulated(plan_file, tmp_path, *FLAGS, "--trace", str(tmp_path / "3.json"), "--trace-step", "3")
    for number in (0, 3):
        events = json.loads((tmp_path / f"{number}.json").read_text())["traceEvents"]
        spans = [e for e in events if e["ph"] == "X"]
        end = max(e["ts"] + e["dur"] for e in spans)
        assert end == pytest.approx(result["steps"][number]["time_us"], abs=0.01)
        assert {(e["pid"], e["tid"]) for e in spans} == {(rank, stage) for rank in range(2) for stage in range(2)}


def test_standard_input_and_a_part_of_the_steps(plan_file, tmp_path, monkeypatch):
    whole = simulated(plan_file, tmp_path, *FLAGS)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(plan_file.read_bytes())))
    assert simulated("-", tmp_path, *FLAGS, "--steps", "2")["steps"] == whole["steps"][:2]


def test_a_launch_line_says_the_rest(plan_file, tmp_path, capsys):
    line = (
        "torchrun --nproc-per-node 8 --nnodes 2 pretrain_gpt.py --num-layers 32 --hidden-size 4096 --ffn-hidden-size "
        f"11008 --num-attention-heads 32 --swiglu --vocab-size 32000 {LAYOUT} --num-virtual-stages-per-pipeline-rank 2 "
        f"--seq-length {C} --global-batch-size {N} --wlb --wlb-packing adaptive --profile --profile-step-start 4 "
        "--data-path corpus --attention-backend flash --bf16 --cp-comm-type a2a"
    )
    (tmp_path / "train.sh").write_text(line)
    expected = simulated(plan_file, tmp_path, *FLAGS)
    for words in (line.split(), ["--launch", str(tmp_path / "train.sh")]):
        capsys.readouterr()
        assert simulated(plan_file, tmp_path, *words) == expected
        assert "- Not simulated, and so without effect on these numbers: --cp-comm-type.\n" in capsys.readouterr().err


def step_of(*micro_batches):
    return STEP | {"micro_batches": [*micro_batches]}


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([], "PLAN ends without a summary, as if it were cut off; give what `megatron-wlb plan` wrote"),
        ([HEADER, STEP], "PLAN ends without a summary, as if it were cut off"),
        (["hello"], "PLAN, line 1: not JSON (Expecting value); give what `megatron-wlb plan` wrote"),
        (["\ud800"], "line 1: not JSON"),
        (["[1]"], "line 1: a JSON list, where an object should be"),
        ([{"format": "megatron-wlb-tune", "version": 1}], "line 1: no header of megatron-wlb-plan version 2"),
        ([HEADER | {"version": 1}], "no header of megatron-wlb-plan version 2"),
        ([HEADER | {"crossover": 0}], "crossover is 0; it must be an integer from 1 to"),
        ([HEADER | {"micro_batches": True}], "micro_batches is true; it must be"),
        ([{k: v for k, v in HEADER.items() if k != "max_tokens"}], "max_tokens is null; it must be"),
        ([HEADER | {"policy": ["x"] * 30}], 'policy is ["x", "x"'),
        ([HEADER, SUMMARY], "PLAN holds no step; plan more documents"),
        ([HEADER, json.dumps(STEP)[:-9]], "line 2: not JSON"),
        ([HEADER, "9" * 5000], "line 2: not JSON"),
        ([HEADER, "[" * 100_000], "line 2: not JSON"),
        ([HEADER, STEP | {"step": 1}], "line 2: it is not step 0 of the plan"),
        ([HEADER, step_of([])], "1 micro-batches, where the plan has 2 a step"),
        ([HEADER, step_of([], [])], "all micro-batches are empty"),
        ([HEADER, step_of([1, 2], [])], "micro-batch 0 is not a list of [document, offset, length]"),
        ([HEADER, step_of([], [[1, 2]])], "micro-batch 1 is not a list of [document, offset"),
        ([HEADER, step_of([[0, 0, 0]], [])], "a document of length 0; it must be from 1 to 100"),
        ([HEADER, step_of([[0, 0, 10**30]], [])], "a document of length 1000000"),
        ([HEADER, step_of([[0, 0, 1.5]], [])], "a document of length 1.5; it must be"),
        ([HEADER, step_of([[0, 0, 99]] * 2, [])], "micro-batch 0 holds 198 tokens; it must be at most 150"),
    ],
)
def test_broken_plans_are_refused(entries, message, tmp_path, capsys):
    plan = tmp_path / "plan"
    text = "".join((e if isinstance(e, str) else json.dumps(e)) + "\n" for e in entries)
    plan.write_bytes(text.encode(errors="surrogatepass"))
    error = refusal(capsys, "simulate", str(plan), "--model", "llama2-7b", "--json", str(tmp_path / "times.json"))
    assert message.replace("PLAN", str(plan)) in error
    assert [path.name for path in tmp_path.iterdir()] == ["plan"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--seq-length 64", "--seq-length is 64, and PLAN was made with 100; leave it out, or change"),
        ("--global-batch-size 8", "--global-batch-size is 8, and PLAN was made with 2"),
        ("--wlb-packing original", "--wlb-packing is original, and PLAN was made with wlb"),
        ("--wlb-crossover 51", "--wlb-crossover is 51, and PLAN was made with 50"),
        ("--num-gpus 3", "2 micro-batches a step cannot be shared by 3 data-parallel ranks"),
        ("--context-parallel-size 4", "which 4 context-parallel and 1 tensor-parallel ranks cannot share"),
        ("--pipeline-model-parallel-size 5", "32 layers do not divide over 5 stages of 1 chunks"),
        ("--tensor-model-parallel-size 3", "3 tensor-parallel ranks cannot share"),
        ("--num-virtual-stages-per-pipeline-rank 2", "2 model chunks need at least 2 pipeline stages"),
        (
            "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2",
            "2 micro-batches a step, 2 of a data-parallel rank, cannot be interleaved over 4 pipeline stages",
        ),
        ("--wlb-profile flops", "needs one in us"),
        ("--trace-step 1", "--trace-step is for --trace"),
        ("--trace /nowhere/trace.json", "--trace /nowhere/trace.json: its folder does not exist"),
        ("--trace trace.json --trace-step 7", "--trace-step 7: PLAN has 1 steps from 0; give one of them"),
    ],
)
def test_wrong_flags_are_refused(flags, message, tmp_path, capsys):
    plan = str(write(tmp_path / "plan", HEADER, STEP, SUMMARY))
    assert message.replace("PLAN", plan) in refusal(capsys, "simulate", plan, "--model", "llama2-7b", *flags.split())


def test_no_plan(tmp_path, capsys):
    assert "No such file" in refusal(capsys, "simulate", str(tmp_path / "none"), "--model", "llama2-7b")
