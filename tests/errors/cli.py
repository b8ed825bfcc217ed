"""Errors of the commands but `analyze`, and of their flags."""

import io
import json
import sys
from types import SimpleNamespace

import numpy as np
import torch

from megatron_wlb.cli import compare, profile, tune
from megatron_wlb.cli.simulate import PlanFile
from megatron_wlb.plan import document_log, native
from megatron_wlb.plan.workload import KernelTimes
from megatron_wlb.runtime import backends
from tests.cli.test_compare import GOOD, LAYOUT
from tests.cli.test_lengths import write_parquet
from tests.cli.test_simulate import HEADER, STEP, SUMMARY
from tests.errors.case import At, Case, command
from tests.plan.test_document_log import packer

DATA = "{}/x.json --global-batch-size 4 --seq-length 64 --wlb-crossover 30"
PLAN = f"plan {DATA} --output {{}}/plan"
TUNE = f"tune {DATA} --wlb-max-tokens 72"
COMPARE = "compare {}/run.jsonl --model llama2-7b"
SIMULATE = "simulate {}/plan --model llama2-7b"
PROFILE = "profile --hidden-size 64 --num-attention-heads 4 --device cpu --backend cpu --quick --output {}/x.json"
AUDIT = "audit {}/log --state {}/state"


def planned(flags, lengths=(5, 6)):
    return command(f"{PLAN} {flags}", {"x.json": list(lengths)})


def without_pyarrow(at: At):
    write_parquet(at.folder / "x.parquet", length=[1])
    at.patch.setitem(sys.modules, "pyarrow", None)
    command(PLAN.replace("x.json", "x.parquet"))(at)


def without_native(call):
    def patched(at: At):
        at.patch.setattr(native, "AVAILABLE", False)
        call(at)

    return patched


def tuned(flags, result):
    """Where every tuning comes to `result`."""

    def call(at: At):
        at.patch.setattr(tune, "run_half", lambda *arguments, **sizes: result)
        command(f"{TUNE} {flags}", {"x.json": [64] * 400})(at)

    return call


def logged(*entries):
    text = "".join((e if isinstance(e, str) else json.dumps(e)) + "\n" for e in entries)

    def call(at: At):
        (at.folder / "run.jsonl").write_text(text)
        compare.read_log(str(at.folder / "run.jsonl"))

    return call


def another_log(at: At):
    """No step depends on what is scaled."""
    at.patch.setattr(compare, "scaled", lambda job, scales: None)
    at.patch.setattr(compare, "simulate_step", lambda job, plan: SimpleNamespace(time=1.0))
    compare.fit_scales(None, [[], []], np.ones(2))


def plan_file(*entries):
    text = "".join((e if isinstance(e, str) else json.dumps(e)) + "\n" for e in entries)
    return lambda at: list(PlanFile(io.StringIO(text), "plan").steps(None))


def of_plan(line, what):
    return f"plan, line {line}: {what}; give what `megatron-wlb plan` wrote"


def simulated(flags, plan=SIMULATE):
    return command(f"{plan} {flags}", {"plan": "".join(json.dumps(e) + "\n" for e in (HEADER, STEP, SUMMARY))})


def measured(flags="", **replacements):
    """`profile` with parts of it replaced."""

    def call(at: At):
        for name, value in replacements.items():
            at.patch.setattr(profile, name, value)
        command(f"{PROFILE} {flags}")(at)

    return call


def out_of_memory(*arguments):
    raise torch.OutOfMemoryError


def of_no_dtype(at: At):
    at.patch.setattr(backends, "get_backend", lambda *given: SimpleNamespace(name="te", dtypes=()))
    measured()(at)


def constant_times(at: At):
    at.patch.setattr(profile, "fit", lambda counts, us: KernelTimes(launch=1.0, tile=0.0, query_tile=0.0))
    shards = [plan.shards[rank] for plan, rank in profile.shapes(512)]
    profile.fit_directions(shards, np.ones((len(shards), 2)), 1, (128,))


def without_torch(at: At):
    at.patch.setitem(sys.modules, "torch", None)
    profile._torch()


def without_gpu(at: At):
    at.patch.setattr(torch.cuda, "is_available", lambda: False)
    profile._device("cuda")


def audited(step):
    """A log of steps 0 and 1, and a state that says `step`."""

    def call(at: At):
        made = packer("wlb", [np.random.default_rng(2).integers(1, 150, 300)])
        for _ in range(2):
            done = made.next()
            document_log.append(at.folder / "log", done.step, done.packing)
        command(AUDIT, {"state": made.state() | {"step": step}})(at)

    return call


CASES: list[Case] = [
    # main.py
    (
        "megatron-wlb plan: error: <pyarrow> is not installed; pip install 'megatron-wlb[analysis]'",
        without_pyarrow,
    ),
    (
        "megatron-wlb plan: error: argument --global-batch-size: <'0'> must be an integer from <1 to 1048576>; see "
        "megatron-wlb plan --help",
        planned("--global-batch-size 0"),
    ),
    # plan.py
    (
        "…x.json holds <11> tokens, under one global batch of <4 x 64>, of which --no-flush makes no step; leave it "
        "out or give more documents",
        planned("--no-flush"),
    ),
    (
        "every document waits, so <--no-flush> leaves no step; leave it out or give more documents",
        planned("--no-flush --wlb-outlier-thresholds 1,33,63,64", [64, 63, 33, 64, 32]),
    ),
    *(
        (
            "--wlb-planner <native>, but the native core was not built; reinstall with a C++ compiler",
            without_native(call),
        )
        for call in (planned("--wlb-planner native"), tuned("--wlb-planner native", None))
    ),
    (
        "the work of <4> micro-batches of 67108864 tokens at a crossover of 34359738368 overflows <64 bits>; lower one "
        "of them",
        planned(f"--wlb-crossover {1 << 35} --wlb-max-tokens {1 << 26}"),
    ),
    (
        "--output <…/no/plan>: the folder …/no does not exist; create it or name another",
        planned("--output {}/no/plan"),
    ),
    # tune.py
    (
        "…x.json holds <100> documents of 6400 tokens, 12 steps in a half, where <20> are needed; give at least … "
        "tokens, about … documents like these",
        command(TUNE, {"x.json": [64] * 100}),
    ),
    (
        "documents wait for over half of the <fit> steps whatever the tuning; give more documents",
        tuned("", None),
    ),
    (
        "no tuning keeps --max-late <0>; the fit steps reach <0.500>, give more than that",
        tuned("--max-late 0", SimpleNamespace(late_steps=0.5)),
    ),
    (
        "--picture <front.jpg> must end in <.png> and be in a folder that exists",
        tuned("--picture front.jpg", None),
    ),
    # compare.py
    (
        "--output and --json both go to <standard output>; name a file for one of them",
        command(f"{COMPARE} --output - --json -"),
    ),
    (
        "…run.jsonl has <0> steps after --skip 1; at least <2> are needed, log more steps",
        command(COMPARE, {"run.jsonl": ""}),
    ),
    ("<…run.jsonl>: not JSON (Expecting value); give the file that --wlb-log named", logged("hello")),
    ("<…run.jsonl, line 1> is no step of a run; give the file that --wlb-log named", logged("[1]")),
    (
        "<…run.jsonl, line 1> states no step_ms, lengths or layout; log the run anew",
        logged({"step": 1}),
    ),
    ("…run.jsonl, line 1: step_ms is <-1>; it must be <a time over 0>", logged(GOOD | {"step_ms": -1})),
    (
        "…run.jsonl, line 1: lengths is not a list of micro-batches but <3>; log the run anew",
        logged(GOOD | {"lengths": 3}),
    ),
    (
        "…run.jsonl, line 1: micro-batch 0 is not a list but <3>; give the lengths of its documents",
        logged(GOOD | {"lengths": [3]}),
    ),
    (
        "…run.jsonl, line 1: micro-batch 0 has a document of length <0>; it must be from <1 to 67108864>",
        logged(GOOD | {"lengths": [[0]]}),
    ),
    (
        "…run.jsonl, line 1: micro-batch 0 holds <67108865> tokens; it must be at most <67108864>",
        logged(GOOD | {"lengths": [[1 << 26, 1]]}),
    ),
    (
        "…run.jsonl, line 1: layout states DP <0>; it must be <an integer over 0>",
        logged(GOOD | {"layout": LAYOUT | {"DP": 0}}),
    ),
    (
        "…run.jsonl, line 2: the run goes on in another layout (<DP 1 to 2>); give the lines before it, or those from "
        "it on, as a file of their own",
        logged(GOOD, GOOD | {"layout": LAYOUT | {"DP": 2}}),
    ),
    (
        "the times of <2> steps do not depend on what is scaled; give the log of this job, and its flags",
        another_log,
    ),
    # simulate.py
    ("--trace-step is for <--trace>; name its file", simulated("--trace-step 1")),
    (
        "--trace </nowhere/trace.json>: its folder does not exist; create it or name another",
        simulated("--trace /nowhere/trace.json"),
    ),
    (
        "--trace-step <7>: …plan has <1> steps from 0; give one of them",
        simulated("--trace {}/trace.json --trace-step 7"),
    ),
    (
        of_plan("<1>", "no header of <megatron-wlb-plan version 1>"),
        plan_file({"format": "megatron-wlb-tune", "version": 1}),
    ),
    (
        of_plan(1, "crossover is <0>; it must be an integer from <1 to 34359738368>"),
        plan_file(HEADER | {"crossover": 0}),
    ),
    (of_plan(1, 'policy is <"best">; it must be one of <original, …>'), plan_file(HEADER | {"policy": "best"})),
    (of_plan("<2>", "it is not step <0> of the plan"), plan_file(HEADER, STEP | {"step": 1})),
    (
        of_plan(2, "<1> micro-batches, where the plan has <2> a step"),
        plan_file(HEADER, STEP | {"micro_batches": [[]]}),
    ),
    (of_plan("<2>", "all micro-batches are empty"), plan_file(HEADER, STEP | {"micro_batches": [[], []]})),
    ("<plan> holds no step; plan more documents", plan_file(HEADER, SUMMARY)),
    (
        of_plan(2, "micro-batch <1> is not <a list of [document, offset, length]>"),
        plan_file(HEADER, STEP | {"micro_batches": [[], [[1, 2]]]}),
    ),
    (
        of_plan(2, "micro-batch 0 has a document of length <0>; it must be from <1 to 100>"),
        plan_file(HEADER, STEP | {"micro_batches": [[[0, 0, 0]], []]}),
    ),
    (
        of_plan(2, "micro-batch 0 holds <198> tokens, over max_tokens <150> of the plan"),
        plan_file(HEADER, STEP | {"micro_batches": [[[0, 0, 99]] * 2, []]}),
    ),
    (of_plan(1, "not JSON (<Expecting value>)"), plan_file("hello")),
    (
        of_plan("<3>", "the file ends where <a step, or the summary> should be, as if it were cut off"),
        plan_file(HEADER, STEP),
    ),
    (of_plan(1, "a JSON <list>, where <a header> should be"), plan_file("[1]")),
    # job.py
    (
        "--wlb-packing is <original>, and …plan was made with <wlb>; leave it out, or change it",
        simulated("--wlb-packing original"),
    ),
    (
        "--account-for-embedding-in-pipeline-split and --account-for-loss-in-pipeline-split are simulated <together> "
        "only; give both or none",
        simulated("--account-for-loss-in-pipeline-split"),
    ),
    (
        "--num-layers-per-virtual-pipeline-stage <3> x 2 pipeline stages do not divide <32> layers; change one of them",
        simulated("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3"),
    ),
    (
        "no <--num-layers, --hidden-size, --num-attention-heads>: give the sizes of the model, or --model",
        simulated("", plan="simulate {}/plan"),
    ),
    (
        "--num-attention-heads <3> does not divide --hidden-size <100>; change one, or give --kv-channels",
        simulated("--num-layers 2 --hidden-size 100 --num-attention-heads 3 --vocab-size 9", plan="simulate {}/plan"),
    ),
    (
        "--num-query-groups <5> does not divide <32> attention heads; change one of them",
        simulated("--num-query-groups 5"),
    ),
    # profile.py
    ("attention backend te does not run <fp32>; choose another --dtype", of_no_dtype),
    (
        "out of <device memory>; give --quick, or a smaller model",
        measured(shapes=lambda longest: [None], linear_times=lambda *given: (1, 1), attention_times=out_of_memory),
    ),
    (
        "<attention> took no longer for more tiles; run without --quick, or while nothing else runs",
        constant_times,
    ),
    ("<torch> is not installed; pip install 'megatron-wlb[train]'", without_torch),
    ("--device cuda, but torch <…> finds none; install a driver or choose cpu", without_gpu),
    (
        "--num-query-groups <3> does not divide <4> attention heads; change one of them",
        measured("--group-query-attention --num-query-groups 3"),
    ),
    (
        "--num-attention-heads <5> does not divide --hidden-size <64>; change one, or give --kv-channels",
        measured("--num-attention-heads 5"),
    ),
    # audit.py
    ("<…state> is not JSON: …; give iter_XXXXXXX.wlb.json", command(AUDIT, {"state": "{"})),
    (
        "<…state> is not a packer state: its format is <None>, not 'megatron-wlb-packer-state'; give "
        "iter_XXXXXXX.wlb.json of a checkpoint",
        command(AUDIT, {"state": "{}"}),
    ),
    ("…log has no step before step <0> of …state; name a later state", audited(0)),
    (
        "…log ends with step <1>, before step <12> of …state; name an earlier state, or the whole log",
        audited(13),
    ),
]
