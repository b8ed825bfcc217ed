"""What a run writes beside what upstream writes: its log, TensorBoard, W&B, names in a trace."""

import gzip
import json
import math
import re
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from benchmarks.lengths import f2
from megatron_wlb import files
from megatron_wlb.adapter import clock, forecast, report
from megatron_wlb.cli.main import main
from megatron_wlb.describe.arguments import MegatronArguments
from megatron_wlb.describe.flags import RunSettings
from megatron_wlb.documents import PackedBatch
from megatron_wlb.hardware.profile import load_profile, profile_file
from megatron_wlb.packing.adaptive import AdaptivePacking
from megatron_wlb.plan.micro_batches import Prediction, predictions
from megatron_wlb.plan.step import shard_step
from megatron_wlb.runtime.backends import Choice
from megatron_wlb.sharding.select import shard
from megatron_wlb.simulate.step import TIME_SHARES, shares, simulate_step
from tests.adapter.training import ADAM, BY_DOCUMENT, CP2, PP2, entries, train
from tests.cli import analyses
from tests.cli.commands import refusal
from tests.jobs import job, samples
from tests.packing.steps import documents
from tests.simulate.shards import FREE, SMALL

MEASURED = {"busy": 0.75, "bubble": 0.2, "exchange": 0.0, "waiting": 0.05}
FLAGS = [*ADAM, "--train-iters", "4"]


@pytest.fixture(scope="module")
def run(dataset, tmp_path_factory):
    """A run of four steps on four ranks, and the folder of what it wrote: board, log and prints."""
    folder = tmp_path_factory.mktemp("run")
    stated = json.loads(profile_file("h100-fa2").read_text()) | {"versions": {"torch": "2.0", "cudnn": "91900"}}
    (folder / "mine.json").write_text(json.dumps(stated))
    flags = f"{CP2} {PP2} {BY_DOCUMENT} --wlb-profile {folder / 'mine.json'} --tensorboard-dir {folder / 'board'}"
    return train(4, dataset, *flags.split(), *FLAGS, log=folder / "log", prints=folder / "prints"), folder


def test_scalars_of_tensorboard_are_those_of_the_log(run):
    entries, folder = run[0]["log"], run[1]
    events = EventAccumulator(str(folder / "board")).Reload()
    found = {tag: [e.value for e in events.Scalars(tag)] for tag in events.Tags()["scalars"] if tag.startswith("wlb/")}

    numbers = "loss tokens num_micro_batches imbalance imbalance_original delay_mean_steps delay_max_steps step_ms"
    for name in f"{numbers} waiting_documents plan_wait_ms predicted_ms tokens_per_second_per_gpu".split():
        assert found[f"wlb/{name}"] == pytest.approx([entry[name] for entry in entries], rel=1e-6)
    assert found["wlb/num_micro_batches"] == [8] * 4
    for how in ("predicted", "measured"):
        for name in TIME_SHARES:
            assert found[f"wlb/{how}/{name}"] == pytest.approx([e[how][name] for e in entries], rel=1e-6, abs=1e-9)
    assert found["wlb/sharding/per_document"] == [1.0] * 4


def test_the_start_says_what_is_predicted_of_the_first_steps(run):
    """Over Megatron alone; no feature was switched off, so nothing is taken from it."""
    (line,) = re.findall(r"^> wlb: predicted .*$", (run[1] / "prints").read_text(), re.MULTILINE)
    assert re.fullmatch(
        r"> wlb: predicted (\d+\.\d\d) times as fast as Megatron with intra-document attention, "
        r"--micro-batch-size 1[.]( Do not .*)?",
        line,
    )


def test_the_start_says_what_a_profile_was_measured_with(run):
    """As far as the run has that, too: on a CPU no cuDNN."""
    measured = f"head size 128, not 8, dtype bf16, not fp32, torch 2.0, not {torch.__version__}"
    assert f"profile h100-fa2 (measured with {measured})\n" in (run[1] / "prints").read_text()


def test_what_is_predicted_is_net_of_what_is_switched_off(capsys):
    """By the arguments before `adapt`; a layout and a recomputation that are faster come after it."""
    profile, lengths = load_profile("h100-fa2"), np.random.default_rng(0).integers(20, 4096, 2000)
    given = job(model=SMALL, profile=profile, context_length=4096, num_micro_batches=8, pp=4, packing=AdaptivePacking())
    data = SimpleNamespace(samples=samples(lengths, context_length=4096), first_sample=0)
    described = SimpleNamespace(settings=SimpleNamespace(micro_batches=8), budget=None)
    for before, said in ((MegatronArguments(), False), (MegatronArguments(cuda_graph_impl="local"), True)):
        forecast.tell(given, described, before, data)
        printed = capsys.readouterr().out
        assert ("without CUDA graphs a step takes 1.00 times" in printed) == ("Net: " in printed) == said
        assert printed.count("> wlb: ") == 1
    data.first_sample = len(data.samples)
    forecast.tell(given, described, MegatronArguments(), data)
    assert not capsys.readouterr().out  # there is no step left
    data.first_sample, data.samples = 0, samples(lengths, context_length=64)
    forecast.tell(given, described, MegatronArguments(), data)
    assert "> wlb: its gain is not predicted: the samples have windows of 64 tokens, the" in capsys.readouterr().out


def test_what_is_predicted_is_over_megatron_at_its_best_micro_batch_size(capsys):
    """Two data-parallel ranks wait for each other less if their micro-batches have several windows."""
    profile, lengths = load_profile("h100-fa2"), np.random.default_rng(0).integers(20, 4096, 2000)
    given = job(
        model=SMALL, profile=profile, context_length=4096, num_micro_batches=16, dp=2, packing=AdaptivePacking()
    )
    data = SimpleNamespace(samples=samples(lengths, context_length=4096), first_sample=0)
    said = {}
    for budget in (1.0, 1e15):
        described = SimpleNamespace(settings=SimpleNamespace(micro_batches=8), budget=budget)
        forecast.tell(given, described, MegatronArguments(), data)
        gain, size = re.findall(r"predicted ([\d.]+) times .*, --micro-batch-size (\d+)[.]", capsys.readouterr().out)[0]
        said[int(size)] = float(gain)
    assert said.keys() == {1, max(said)} and max(said) > 1 and said[max(said)] < said[1]


def test_the_start_names_what_is_faster_on_the_same_gpus(capsys):
    """7B on 64 GPUs within their memory: one window a stage wants more context parallelism, and nothing recomputed."""
    flags = (
        "--model llama2-7b --seq-length 131072 --num-gpus 64 --tensor-model-parallel-size 8 --context-parallel-size 2"
    )
    flags += " --context-parallel-size 2"
    stages = "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 8 --mock-data --vocab-size 32000"
    full = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    lengths = np.minimum(f2(20_000, 0, 131072), 131072)
    data = SimpleNamespace(samples=samples(lengths, context_length=131072), first_sample=0)
    said = {}
    for windows, more in ((4, ""), (32, full)):
        run = analyses.run(flags, stages, "--global-batch-size", windows, more).on_device()
        best, _ = predictions(run.job(), run.job, data.samples, memory_known=True)
        forecast.tell(best, run, run.arguments, data)
        said[windows, more] = [line for line in capsys.readouterr().out.splitlines() if "Megatron" not in line]
    wider = (
        r"> wlb: with --context-parallel-size \d --pipeline-model-parallel-size [12].* on the same GPUs this run is .*"
    )
    assert re.fullmatch(wider, said[4, ""][0]) and len(said[4, ""]) == 1
    assert re.fullmatch(r"> wlb: without recomputation on the same GPUs .* 1\.\d\d times as fast", said[32, full][0])


def test_the_line_says_where_the_time_of_a_step_goes(run):
    lines = [line for line in (run[1] / "prints").read_text().splitlines() if line.startswith(" wlb step")]
    for entry, line in zip(run[0]["log"], lines, strict=True):
        assert sum(entry["predicted"].values()) == pytest.approx(1) == sum(entry["measured"].values())
        assert entry["measured"]["exchange"] > 0 and entry["measured"]["bubble"] > 0
        assert line == report.line(entry)


def test_flags_of_one_rank_decide_for_all(dataset, tmp_path):
    """What is measured is told by collective calls: of the last rank, which reports, whatever the others have."""
    log = tmp_path / "log"
    last = {1: ["--wlb-log", str(log), "--tensorboard-dir", str(tmp_path / "board")]}
    train(2, dataset, *CP2.split(), *FLAGS, "--log-interval", "4", flags_of_rank=last)
    assert [entry["step"] for entry in entries(log)] == [1, 2, 3, 4]
    for flag, what in (
        ("--wlb-digest", "--wlb-digest"),
        ("--eod-mask-loss", "train loss mask"),
        ("--micro-batch-size 2", "train micro-batch size"),
    ):
        with pytest.raises(RuntimeError, match=f"rank 1 differs from rank 0 in .*{what}.*; check"):
            train(2, dataset, *CP2.split(), *FLAGS, flags_of_rank={1: flag.split()})


def test_a_loss_that_is_no_number_is_null(tmp_path):
    report.append(str(tmp_path / "log"), {"loss": math.nan, "step": 1})
    assert json.loads((tmp_path / "log").read_text(), parse_constant=pytest.fail) == {"loss": None, "step": 1}


def test_the_log_is_what_compare_reads(run, tmp_path, capsys):
    entries, out = run[0]["log"], tmp_path / "compared.json"
    for entry in entries:
        assert sum(map(sum, entry["lengths"])) == entry["tokens"]
        assert len(entry["lengths"]) == len(entry["work"]) == 8
    folder = run[1]
    assert main(["compare", str(folder / "board"), str(folder / "log"), "--skip", "2", "--json", str(out)]) == 0
    compared = json.loads(out.read_text())
    assert compared["ratio"] == pytest.approx(1) and compared["loss_difference"] < 1e-6
    for rows in compared["steps"]:
        assert [row[0] for row in rows] == [3, 4]
        assert [row[2] for row in rows] == pytest.approx([e["step_ms"] / 1e3 for e in entries[2:]])
    rates = [e["tokens_per_second_per_gpu"] for e in entries]
    assert rates == pytest.approx([1e3 * e["tokens"] / e["step_ms"] / 4 for e in entries])
    assert main(["compare", str(folder / "prints"), str(folder / "log"), "--skip", "2", "--json", str(out)]) == 0
    assert json.loads(out.read_text())["loss_difference"] < 1e-6
    capsys.readouterr()
    assert "and profile h100-fa2 is of NVIDIA H100" in refusal(capsys, "compare", str(folder / "log"), "--skip", "2")


def test_steps_that_fp16_skips_are_noted(dataset, tmp_path):
    """The scale overflows until it has been halved often enough."""
    flags = "--fp16 --initial-loss-scale 1e18 --hysteresis 1 --train-iters 2 --tensorboard-dir".split()
    log = train(1, dataset, *flags, str(tmp_path / "board"), log=tmp_path / "log", prints=tmp_path / "prints")["log"]
    assert [entry["skipped"] for entry in log] == [True, True]
    theirs = re.findall(r"number of skipped iterations: +(\d+) ", (tmp_path / "prints").read_text())
    assert theirs == ["1", "2"]  # the first line of a start is cleared with the second
    assert [e.value for e in EventAccumulator(str(tmp_path / "board")).Reload().Scalars("wlb/skipped")] == [1, 1]


def test_nothing_is_written_or_measured_without_a_writer(dataset, tmp_path, monkeypatch):
    monkeypatch.setattr(clock, "_seconds", lambda *ends: pytest.fail("measured a pass"))
    monkeypatch.setattr(report, "_predicted", lambda *step: pytest.fail("simulated a step"))
    rarely = *FLAGS, "--log-interval", "5", "--wlb-profile", "h100-fa2"
    train(1, dataset, *rarely)
    with pytest.raises(Exception, match="measured a pass"):
        train(1, dataset, *rarely, "--tensorboard-dir", str(tmp_path))


def test_wandb_gets_the_same():
    logged = []
    wandb = SimpleNamespace(log=lambda values, step: logged.append((values, step)))
    plan = SimpleNamespace(micro_batches=[SimpleNamespace(shards=SimpleNamespace(strategy="hybrid"))])
    entry = {"tokens": 1, "digest": "ab", "predicted": None, "predicted_ms": None, "measured": MEASURED}
    report._write_scalars(None, wandb, 7, plan, entry)
    ((values, step),) = logged
    assert step == 7
    shares = {f"wlb/measured/{name}": share for name, share in MEASURED.items()}
    assert values == {"wlb/tokens": 1, "wlb/sharding/hybrid": 1.0} | shares


def test_traces_name_micro_batches_and_what_they_wait_for(dataset, tmp_path, monkeypatch):
    """Of upstream's profiler, and of nsys by upstream's ranges."""
    flags = f"{CP2} --profile --nvtx-ranges --use-pytorch-profiler --profile-step-start 2 --profile-step-end 3"
    board, log = tmp_path / "board", tmp_path / "log.jsonl"
    ranges = tmp_path / "ranges"
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: files.append(str(ranges), f"{name}\n".encode(), ""))
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: None)
    flags += f" --train-iters 3 --num-layers 2 --tensorboard-dir {board}"
    run = train(2, dataset, *ADAM, *flags.split(), log=log)
    events = json.loads(gzip.decompress((tmp_path / "torch_profile/rank-0.json.gz").read_bytes()))["traceEvents"]
    names = {e["name"] for e in events if e["name"].startswith("wlb")}
    padded = [-(-m["tokens"] // 4) * 4 for m in run["log"][1]["micro_batches"]]  # upstream counts from 1
    assert names == {f"wlb train step 1: {tokens // 2} of {tokens} tokens" for tokens in padded}
    named = Counter(name for name in ranges.read_text().splitlines() if name.startswith("wlb"))
    passes = 2 * len(run["log"][1]["micro_batches"])  # of both ranks, which profile one step
    assert named["wlb forward"] == named["wlb backward"] == passes and named["wlb plan"] == 2
    assert named["wlb attention"] >= passes <= named["wlb attention backward"] and named["wlb exchange"] > 0


@pytest.mark.parametrize("layout", [{"dp": 2}, {"pp": 4, "dp": 2}, {"pp": 2, "vpp": 2, "cp": 2}], ids=str)
def test_what_is_measured_of_a_simulated_step_is_what_was_predicted(layout):
    """Of its passes as a `Clock` sees them, which does not see transfers between stages."""
    profile = replace(load_profile("h100-fa2"), network=FREE)
    ours = job(**layout, num_micro_batches=16, profile=profile, packing=AdaptivePacking())
    lengths = [np.array([16 * (1 + i % 4)] * (1 + i % 3)) for i in range(16)]
    step = simulate_step(ours, shard_step(ours, lengths))
    passes = np.stack([np.mean([getattr(p, way).mean(-1) for p in step.passes], 0) for way in ("forward", "backward")])
    predicted, span = shares(step), max(line.makespan for line in step.timelines)
    assert list(predicted) == list(TIME_SHARES) == ["busy", "bubble", "exchange", "waiting"]
    assert sum(predicted.values()) == pytest.approx(1)
    exchange = predicted["exchange"] * step.time
    measured = clock.measured_shares(ours, passes, exchange, span, step.time)
    assert list(measured) == list(predicted)
    assert sum(measured.values()) == pytest.approx(1)
    assert measured == pytest.approx(predicted, abs=1e-9)


def test_what_is_measured_is_the_mean_over_ranks_of_each_chunk(monkeypatch):
    """On the first of two stages, forward chunk by chunk, and backward from the last one; a step ends on the last rank.

    Three other ranks have twice the time of this one.
    """
    collectives = []

    def all_reduce(tensor, op=dist.ReduceOp.SUM):
        collectives.append(op)
        tensor.mul_(3) if op == dist.ReduceOp.SUM else tensor.add_(0.5)

    monkeypatch.setattr(clock.dist, "all_reduce", all_reduce)
    monkeypatch.setattr(clock.dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(clock.mpu, "get_pipeline_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(clock, "measured_shares", lambda *given: given)
    monkeypatch.setattr(clock, "_now", iter([7.0, 2.0, 9.0]).__next__)
    watch = clock.Clock()
    watch.begin()
    assert watch.shares(1.0) is None and not collectives  # not measured
    watch.begin()
    watch.measure(given := job(pp=2, vpp=2, num_micro_batches=4, dp=2))
    watch._spans["forward"] = [[(0, each)] for each in (1, 2, 10, 20)]
    watch._spans["backward"] = [[(0, each)] for each in (30, 40, 3)] + [[(0, 1), (6, 9)]]
    watch._spans["exchange"] = [[(0, 1)], [(5, 9)]]
    of_job, passes, *times = watch.shares(100.0)
    assert (of_job, times) == (given, [3.75, 7.5, 100.0])
    assert passes.tolist() == [[[2.25, 22.5], [0, 0]], [[5.25, 52.5], [0, 0]]]
    assert watch.shares(None) is None and collectives == [dist.ReduceOp.SUM, dist.ReduceOp.MAX] * 2
    watch.begin()
    assert watch.shares(1.0) is None


def test_times_on_a_gpu_are_those_of_events_that_have_ended(monkeypatch):
    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at, self.ended = next(ticks), False

        def query(self):
            return self.ended

        def synchronize(self):
            self.ended = True

        def elapsed_time(self, other):
            assert other.ended
            return other.at - self.at

    ticks = iter([500.0, 3000.0])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    began, ended = clock._now(), clock._now()
    assert [clock._seconds(began, ended) for _ in range(2)] == [2.5, 2.5]


def reporter(monkeypatch, given=None, rank=1, **changes):
    """A report of this job on one of two ranks; `changes` are of Megatron's arguments."""
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    args = {"tensorboard_dir": "board", "tensorboard_log_interval": 4, "wandb_project": "", "log_interval": 3}
    args = SimpleNamespace(params_dtype=torch.bfloat16, **args | changes)
    return report.Report(args, RunSettings(log=changes.get("wlb_log")), ["said before"])


@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        ({}, [3, 4, 6, 8, 9, 12]),
        ({"tensorboard_dir": None}, [3, 6, 9, 12]),
        ({"tensorboard_dir": None, "wandb_project": "mine"}, [3, 4, 6, 8, 9, 12]),
        ({"wlb_log": "log"}, [*range(1, 13)]),
    ],
)
def test_a_step_is_measured_if_a_line_a_scalar_or_the_log_wants_it(changes, steps, monkeypatch):
    made = reporter(monkeypatch, **changes)
    monkeypatch.setattr(torch.distributed, "broadcast_object_list", lambda wanted, rank: setattr(made, "of", rank))
    made.begin(None, None, (), None)
    assert [step for step in range(1, 13) if made._wants(step)] == steps and made.of == 1  # as the last rank has it


def test_an_entry_by_hand(monkeypatch):
    made, rows = reporter(monkeypatch), documents(np.array([4, 6]))
    rows["arrival"] = (5, 9)
    plan = SimpleNamespace(step=7, digest=0xAB, tokens=10, work=np.array([2, 4, 6]), original_work=np.array([8, 4]))
    plan.batch, plan.packed = PackedBatch(documents=rows, bounds=np.array([0, 1, 2])), SimpleNamespace(num_waiting=2)
    made._job, made._waited = job(dp=2, cp=2), 2.0
    made._plans = SimpleNamespace(wait_seconds=3.5, gain=lambda of: 1.25 * (of is plan))
    made._predicted = SimpleNamespace(result=lambda: (2500.0, {"busy": 1.0}))
    entry = {"step": 8, "plan": "00000000000000ab", "loss": 0.5, "tokens": 10, "num_micro_batches": 3}
    entry |= {"imbalance_original": 4 / 3, "imbalance": 1.5, "gain_by_work": 1.25, "delay_mean_steps": 0.8}
    entry |= {"delay_max_steps": 2, "waiting_documents": 2, "step_ms": 500.0, "tokens_per_second_per_gpu": 5.0}
    entry |= {"plan_wait_ms": 1500.0, "predicted_ms": 2.5, "predicted": {"busy": 1.0}, "measured": MEASURED}
    assert made._entry(plan, 0.5, 0.5, MEASURED) == entry
    made._predicted = None
    again = entry | {"plan_wait_ms": 0.0, "predicted_ms": None, "predicted": None, "measured": None}
    assert made._entry(plan, 0.5, 0.5, None) == again
    start, end = (
        "wlb step      8 | loss 0.500000 | tokens 10 in 3 micro-batches",
        "waiting 2 documents | tokens/s/GPU 5.0",
    )
    middle = " | delay mean 0.80 max 2 steps | "
    gain = " | predicted by work: 1.250 times as fast as Megatron's windows"
    shares = " | predicted busy 100 % | measured busy 75, bubble 20, exchange 0, waiting 5 %"
    assert report.line(entry) == f" {start}{gain}{middle}{end}{shares}"
    gain = " | predicted by work: no gain over Megatron's windows"
    assert report.line(again | {"gain_by_work": 0.9996}) == f" {start}{gain}{middle}{end}"
    assert report.line(again | {"gain_by_work": None}) == f" {start}{middle}{end}"


def test_the_start_by_hand(monkeypatch):
    """Of a profile without the run's precision, then of one without times, by which nothing is foretold."""
    monkeypatch.setattr(report.memory, "peak_bytes", lambda job, stage: (1 + stage) * 3 * 2**29)
    shape = {"pp": 2, "vpp": 2, "num_micro_batches": 6, "group_size": 3, "global_batch_size": 4, "max_tokens": 80}
    timed = job(**shape, packing=AdaptivePacking(), profile=load_profile("a100-fa2"), precision="delayed")
    data = SimpleNamespace(samples=samples([30] * 40, [60] * 40), first_sample=8, remark="strange")

    def said(given, rank):
        made = reporter(monkeypatch, rank=rank)
        made._job, made._tried = given, [Prediction(job(), 1.0, 0.0), Prediction(given, 0.9126, 0.0)]
        made.start(data, Choice(name="cpu", refused=(("te", "no"),)), "described")
        assert made._said.pop(0) == "said before"
        return [line.removeprefix("> wlb: ") for line in made._said], made._forecast

    (warning, *lines), foretold = said(timed, 0)
    assert warning.startswith("warning: Profile a100-fa2 (NVIDIA A100) has no rate of delayed") and lines == [
        "strange",
        "55 samples of 2 datasets, from 8 on; --wlb-packing adaptive into 6 micro-batches per step in groups of 3 for "
        "4 windows of 64 tokens, S_max 80, crossover 32 tokens, CP sharding auto",
        "--wlb-micro-batches auto chose 6; predicted time of a step by its micro-batches: 4: 1.000, 6: 0.913",
        "activations by stage, predicted peak with as many micro-batches of S_max tokens as a rank can hold: 1.50, 3.00"
        " GiB",
        "attention backend cpu (te: no), profile a100-fa2 (measured with head size 128, not 16)",
    ]
    assert foretold.args[:2] == (timed, "described") and foretold.args[3] is data and said(timed, 1)[1] is None
    data.remark = ""
    (first, chosen, *_, last), foretold = said(job(packing=AdaptivePacking()), 0)
    assert (
        first.startswith("55 samples")
        and "in groups" not in first
        and last == ("attention backend cpu (te: no), profile flops")
    )
    assert foretold is None and re.search(r"micro-batches \(assumed to follow work, since profile flops .*\): ", chosen)


def test_a_step_is_predicted_with_the_micro_batches_that_its_ranks_have():
    """Of two long and two short ones: a rank with both long ones takes longer than one of each."""
    given = job(dp=2, context_length=8192, profile=load_profile("h100-fa2"), packing=AdaptivePacking())
    lengths = [np.array([length]) for length in (8192, 8192, 256, 256)]

    def predicted(ranks):
        rows = documents(np.concatenate(lengths))
        return report._predicted(given, PackedBatch(documents=rows, bounds=np.arange(5), ranks=np.array(ranks)))

    uneven, even = predicted([[0, 1], [2, 3]]), predicted([[0, 2], [1, 3]])
    step = simulate_step(given, [[shard(lengths[i], given) for i in rank] for rank in ([0, 1], [2, 3])])
    assert uneven == (step.time, shares(step)) and uneven[0] > even[0]
