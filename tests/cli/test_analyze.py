"""`megatron-wlb analyze`: its numbers by hand, and what they are compared with."""

import argparse
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest

from megatron_wlb import packing
from megatron_wlb.cli.analyze.report import data_entries
from megatron_wlb.cli.analyze.setup import Megatron, schemes
from megatron_wlb.describe.make import job_from_json
from megatron_wlb.describe.settings import PlanSettings, add_wlb_arguments
from megatron_wlb.job import Sharding
from megatron_wlb.packing.adaptive import arranged
from megatron_wlb.packing.wlb import WlbPacking
from megatron_wlb.plan.packer import Packer
from megatron_wlb.plan.step import shard_step
from megatron_wlb.simulate.step import simulate_step
from megatron_wlb.types import DOCUMENT, PackedBatch
from tests.adapter.datasets import write_index
from tests.cli.analyses import JOB, LARGE, RUN, C, N, analyse, setup


def windows(lengths, seed=1234):
    """Documents in one stream, shuffled and cut at every multiple of the window, and the windows shuffled."""
    rng = np.random.default_rng(seed)
    order = np.arange(len(lengths))
    rng.shuffle(order)
    out, current, room = [], [], C
    for length in lengths[order].tolist():
        while length:
            current.append(min(length, room))
            length, room = length - current[-1], room - current[-1]
            if not room:
                out.append(current)
                current, room = [], C
    places = np.arange(len(out))
    rng.shuffle(places)
    return [out[i] for i in places]


def rows_of(step):
    """DOCUMENT rows of a step's windows."""
    rows = np.zeros(sum(map(len, step)), DOCUMENT)
    rows["length"] = [*chain(*step)]
    rows["index"] = np.cumsum(rows["length"]) - rows["length"]
    return rows


def step_us(job, micro_batches):
    """A step on one H100, which `tests/simulate` has by hand."""
    one = replace(job, num_micro_batches=len(micro_batches), global_batch_size=len(micro_batches))
    return simulate_step(one, shard_step(one, [np.array(documents) for documents in micro_batches])).time


def imbalance(micro_batches, crossover):
    work = [sum(d * (d + crossover) for d in documents) for documents in micro_batches]
    return max(work) * N / sum(work)


@pytest.mark.parametrize("size", [1, 2])
def test_the_same_tokens_by_hand(tmp_path, lengths, data, size):
    """One GPU: the windows of Megatron cut by hand, and in --wlb arranged without `analyze`."""
    words = f"--wlb-micro-batches 4 --wlb-crossover 900 --steps 200 --micro-batch-size {size}"
    found = analyse(tmp_path, JOB, "--data-path", data, words)
    job = job_from_json(found["job"])
    assert found["steps"] == {"warm_up": 30, "packed": 200, "simulated": 200}
    cut = windows(lengths)
    apart = [cut[N * i : N * (i + 1)] for i in range(200)]
    ways = {
        "plain": ([[[sum(window)] for window in step] for step in apart], size),
        "thd": (apart, size),
        "ours": ([[each.tolist() for each in arranged(rows_of(step), job).lengths] for step in apart], 1),
    }
    per_token = {}
    for name, (planned, at_once) in ways.items():
        together = [[[*chain(*step[k : k + at_once])] for k in range(0, N, at_once)] for step in planned]
        times = [step_us(job, step) for step in together]
        numbers = found["schemes"][name]
        assert numbers["step_ms"] == pytest.approx(np.mean(times) / 1e3)
        assert numbers["us_per_token"] == pytest.approx(np.mean(times) / (N * C))
        of_documents = apart if name == "plain" else planned
        balance = [imbalance(step, job.crossover_tokens) for step in of_documents]
        assert numbers["imbalance"]["work_mean"] == pytest.approx(np.mean(balance))
        assert numbers["imbalance"]["dp"] == numbers["imbalance"]["cp"] == 1
        assert numbers["token_cv"] == numbers["late_steps"] == 0
        per_token[name] = sum(times) / (200 * N * C)
    assert found["schemes"]["ours"]["speedup"] == pytest.approx(per_token["plain"] / per_token["ours"])
    assert list(found["lost"]) == [f"--micro-batch-size {size}"] * (size > 1)
    assert "Both train the same tokens every step." in found["headline"]


def test_a_delay_has_its_time_at_the_work_of_the_steps_of_megatron(tmp_path, lengths, data):
    words = JOB, "--wlb-crossover 900 --wlb-packing wlb --data-path", data
    found, given = analyse(tmp_path, *words, "--steps 200"), setup(*words)
    packer = Packer(given.windows, given.job)
    steps = [[each.tolist() for each in packer.next().batch.lengths] for _ in range(230)][30:]

    def work(micro_batches):
        return sum(d * (d + 900) for d in chain(*micro_batches))

    us_per_work = sum(step_us(given.job, step) for step in steps) / sum(map(work, steps))
    per_token = work(windows(lengths)[: 200 * N]) / (200 * N * C)
    ours = found["schemes"]["ours"]
    assert ours["us_per_token"] == pytest.approx(us_per_work * per_token)
    assert ours["late_steps"] > 0 and f"Tokens run {ours['late_steps']:.2f} steps late" in found["headline"]
    assert found["delay"] is None and "time is per work" in found["facts"][1]


def test_whole_documents_run_where_they_begin(tmp_path, data):
    found = analyse(tmp_path, JOB, "--steps 8 --wlb-micro-batches 4 --wlb-documents whole --data-path", data)
    schemes = found["schemes"]
    assert schemes["ours"]["token_cv"] > 0 == schemes["plain"]["token_cv"] == schemes["ours"]["late_steps"]
    assert "Steps train whole documents." in found["headline"] and found["delay"] is None
    assert "--wlb-documents whole" in found["flags"]


def test_rows_of_conversations_take_megatron_the_time_of_full_windows(data):
    """The last conversation of a row has the padding, as in upstream."""
    job = setup(JOB, "--wlb-micro-batches 4 --data-path", data).without_wlb("thd")
    rows = [[100, 200], [C], [70], [C - 7, 3]]
    batch = PackedBatch(documents=rows_of(rows), bounds=np.array([0, 2, 3, 4, 6]))
    times = {name: Megatron(name, padded=True).simulate(job, batch).time for name in ("plain", "thd")}
    assert times["thd"] == pytest.approx(step_us(job, [[100, C - 100], [C], [C], [C - 7, 7]]))
    assert times["plain"] == pytest.approx(step_us(job, [[C]] * 4))
    assert times["thd"] > Megatron("thd").simulate(job, batch).time == pytest.approx(step_us(job, rows))


@pytest.mark.parametrize(("split", "added"), [("--split 1", True), ("--split 99,1,0", False)])
def test_flags_to_add_have_what_is_given_and_what_training_needs(data, split, added):
    """Without a validation split training refuses to evaluate."""
    words = JOB.replace("--split 1", split), "--wlb-micro-batches 4 --data-path", data
    flags = setup(*words, "--wlb-crossover 9").flags()
    assert flags.endswith("--eval-iters 0") == added and "--wlb-crossover 9" in flags
    assert "--wlb-crossover" not in setup(*words).flags()


def test_nothing_to_gain(tmp_path, capsys):
    """Documents of a full window each: all schemes are the same, and nothing is attainable."""
    write_index(tmp_path / "full.idx", np.full(300, C))
    found = analyse(tmp_path, JOB, "--steps 4 --num-gpus 2 --data-path", str(tmp_path / "full.idx"))
    for numbers in found["schemes"].values():
        assert numbers["speedup"] == pytest.approx(1) and numbers["of_limit"] == pytest.approx(1)
        assert numbers["imbalance"] == pytest.approx({"pp": 1, "dp": 1, "cp": 1, "work_mean": 1, "work_p95": 1})
        assert numbers["late_steps"] == numbers["token_cv"] == 0
    assert found["limit"]["speedup"] == pytest.approx(1)
    printed = capsys.readouterr().out
    assert printed.startswith("Close. Predicted: 1.00 times as many") and "Add to the command" not in printed
    assert "Activations alone" not in " ".join(found["facts"])
    shares = found["data"]["shares"]
    assert found["data"]["up_to"][-1] == C
    assert [values[-1] for values in shares.values()] == [1, 1, 1]


def test_where_ours_loses_no_flags_are_to_be_added(tmp_path, capsys):
    write_index(tmp_path / "full.idx", np.full(300, 16 * C))
    words = (
        f"--steps 2 {RUN} --num-layers 2 --hidden-size 4096 --num-attention-heads 32 --vocab-size 1024 --fim-data "
        f"--tensor-model-parallel-size 2 --context-parallel-size 8 --seq-length {16 * C} --global-batch-size 2 "
        f"--split 1 --wlb-micro-batches 2 --data-path {tmp_path / 'full'}"
    )
    found = analyse(tmp_path, words)
    printed = capsys.readouterr().out
    assert found["schemes"]["ours"]["speedup"] < 1
    assert printed.startswith("Do not use it. Predicted: 0.")
    assert "Add to the command:" not in printed and "Take out:" not in printed
    assert "Simulated was --wlb --attention-dropout 0" in " ".join(found["facts"])
    assert "! Left out, since training with --wlb refuses them: --fim-data." in printed


def test_overlapped_communication_counts_in_all_columns(tmp_path, long, capsys):
    """Of a run with documents apart and layers not simulated. In small models tiles cost more than they hide."""
    wide = "--hidden-size 8192 --num-attention-heads 64 --tensor-model-parallel-size 4"
    run = f"{RUN} {LARGE} {wide} {long} --sequence-parallel"
    alone = analyse(tmp_path, "--steps 8", run)
    strange = "--tp-comm-overlap --hybrid-override-pattern M* --dataloader-inter-document-masking"
    found = analyse(tmp_path, "--steps 8 --approximate", run, strange)
    assert (alone["reference"], found["lost"], found["reference"]) == ("plain", {}, "thd")
    assert list(alone["schemes"]) == ["plain", "thd", "paper", "ours"]
    for name in alone["schemes"]:
        before, after = (each["schemes"][name]["us_per_token"] for each in (alone, found))
        assert after < before
    assert found["schemes"]["thd"]["speedup"] == 1
    assert "An estimate without layers of several kinds:" in capsys.readouterr().out


def test_other_assumptions_have_speedups_of_their_own(tmp_path, long):
    """Kernels, links and the ring; the first lines have their range where it is wide."""
    found = analyse(tmp_path, "--num-gpus 16", LARGE, "--steps 8", long)
    schemes = found["schemes"]
    assert found["limit"]["us_per_token"] == min(each["limit_us_per_token"] for each in schemes.values())
    of = {reading["what"]: reading for reading in found["readings"]}
    assert {"half the bandwidth between nodes", "kernels of h100-fa2", "kernels of h100-fa3"} < of.keys()
    over = {name: found["schemes"][name]["us_per_token"] for name in ("plain", "thd", "ours")}
    assert of["a ring with the tiles of every step"]["thd"] > over["thd"] / over["ours"]
    for name in ("plain", "thd"):
        every = [over[name] / over["ours"], *(each[name] for each in of.values())]
        shown = f"{every[0]:.2f} times ({min(every):.2f} to {max(every):.2f})"
        assert (shown in found["headline"]) == (max(every) - min(every) > 0.05 * every[0])


def test_masks_of_upstream_that_do_not_hold_are_named(long):
    masked = f"{RUN} {LARGE} {long} --dataloader-inter-document-masking"
    found = setup(masked)
    assert found.megatron.name == "thd"
    assert "tokens attend to other documents, and not to all of their own" in " ".join(found.run.judged.remarks)
    alone = setup(masked.replace("--context-parallel-size 2", "--context-parallel-size 1"))
    assert alone.megatron.name == "thd" and "other documents" not in " ".join(alone.run.judged.remarks)
    ignored = setup(f"{RUN} {LARGE} {long} --reset-attention-mask")  # by TransformerEngine
    assert ignored.megatron.name == "plain" and "NVIDIA/Megatron-LM#2357" in " ".join(ignored.run.judged.remarks)


@pytest.mark.parametrize(
    ("windows", "flag", "megatron", "ours"),
    [
        (8, "", 4, 8),
        (8, "--microbatch-group-size-per-virtual-pipeline-stage 4", 4, 4),
        (6, "", 6, 6),  # more than Megatron interleaves without its flag
    ],
)
def test_megatron_interleaves_in_groups_of_its_own(windows, flag, megatron, ours, data):
    line = f"--model llama2-7b --seq-length 4096 --global-batch-size {windows} --pipeline-model-parallel-size 4"
    line += f" --num-virtual-stages-per-pipeline-rank 2 --wlb-micro-batches {windows} {flag} --split 1"
    groups = {name: job.schedule().group for name, job in schemes(setup(line, "--data-path", data)).items()}
    assert groups == {"plain": megatron, "thd": megatron, "paper": megatron, "ours": ours}


def test_the_paper_has_the_best_thresholds_of_a_grid_unless_they_are_given(tmp_path, data):
    words = JOB, "--wlb-crossover 900 --wlb-packing wlb --data-path", data
    found = setup(*words)
    tried = [WlbPacking(outlier_thresholds=each) for each in ((C // 4,), (C // 2,), (3 * C // 4,), (C // 4, C // 2))]
    assert found.paper.packing.outlier_thresholds is not None and found.job.packing == WlbPacking()
    best = found._time_per_work(found.paper)
    assert all(best <= found._time_per_work(replace(found.paper, packing=each)) for each in tried)
    report = analyse(tmp_path, "--steps 4", *words)
    entries = report["schemes"]
    thresholds = list(found.paper.packing.outlier_thresholds)
    assert (entries["paper"]["outlier_thresholds"], entries["ours"]["outlier_thresholds"]) == (thresholds, None)
    assert f"--wlb-outlier-thresholds {','.join(map(str, thresholds))}." in " ".join(report["facts"])
    given = setup(*words, "--wlb-outlier-thresholds 500,2000")
    assert given.paper.packing == given.job.packing == WlbPacking(outlier_thresholds=(500, 2000))


def test_what_it_is_compared_with_need_not_fit(data):
    """A rank may get micro-batches of S_max only by Algorithm 1, and so need more memory than by adaptive packing."""
    line = "--model llama2-7b --seq-length 131072 --global-batch-size 4 --num-gpus 64 --tensor-model-parallel-size 8"
    line += f" --context-parallel-size 2 --pipeline-model-parallel-size 4 --split 1 --data-path {data}"
    line += " --wlb-micro-batches 4 --wlb-outlier-thresholds 65536 --wlb-memory-budget 40"
    found = setup(line)
    assert found.job.max_tokens == found.paper.max_tokens == 1.25 * 131072
    found = setup(line, "--wlb-max-tokens auto")
    assert found.paper.max_tokens == 1.25 * 131072 < found.job.max_tokens


def test_ranks_that_divide_experts_wait(tmp_path, long, capsys):
    words = f"--num-gpus 16 {LARGE} --wlb-packing wlb --wlb-outlier-thresholds 16384 --steps 10 --num-experts 4 "
    words += f"--moe-ffn-hidden-size 256 {long}"
    alone, shared = (analyse(tmp_path, words, more) for more in ("", "--expert-model-parallel-size 4"))
    printed, facts = capsys.readouterr().out, " ".join(shared["facts"])
    assert "divide experts" not in " ".join(alone["facts"])
    alone, shared = alone["schemes"], shared["schemes"]
    plain, apart, ours = (shared[name]["typical_step_ms"] for name in ("plain", "thd", "ours"))
    assert apart["ep_wait"] / apart["step"] > ours["ep_wait"] / ours["step"] > 0 == plain["ep_wait"]
    shares = [f"{100 * each['ep_wait'] / each['step']:.1f} %" for each in (plain, ours)]
    assert f"2 data-parallel ranks divide experts and wait for each other in every layer: {shares[0]} of" in facts
    assert f"{shares[1]} of --wlb." in facts and "  for the slowest EP rank" in printed
    for name in ("thd", "ours"):
        assert alone[name]["typical_step_ms"]["ep_wait"] == 0
        assert alone[name]["us_per_token"] < shared[name]["us_per_token"]


def test_shares_of_work_by_hand(data, lengths):
    """Documents over the window count window by window."""
    found = data_entries(setup(JOB, "--wlb-crossover 900 --wlb-micro-batches 4 --data-path", data))
    shares = found["shares"]
    assert (found["documents"], found["tokens"]) == (len(lengths), lengths.sum())
    work = [d * 900 + (d // C) * C * C + (d % C) ** 2 for d in lengths.tolist()]
    for name, weights in (("documents", [1] * len(work)), ("tokens", lengths.tolist()), ("work", work)):
        over = sum(w for d, w in zip(lengths.tolist(), weights, strict=True) if 2048 < d <= 4096)
        assert shares[name][12] == pytest.approx(over / sum(weights))


def test_flags_to_paste_are_those_that_were_simulated(tmp_path, data):
    ours = "--wlb-packing wlb --wlb-outlier-thresholds 500,2000 --wlb-max-tokens 6144 --wlb-cp-sharding hybrid"
    found = analyse(tmp_path, JOB, "--data-path", data, ours, "--wlb-log run.jsonl --steps 2")
    args, _ = add_wlb_arguments(argparse.ArgumentParser()).parse_known_args(found["flags"].split())
    assert packing.from_args(args) == WlbPacking(outlier_thresholds=(500, 2000))
    assert (PlanSettings.from_args(args).max_tokens, args.wlb_log) == (6144, "run.jsonl")
    assert Sharding.from_args(args) == Sharding(cp_sharding="hybrid")
    ours, paper = (found["schemes"][name] for name in ("ours", "paper"))
    assert (ours["packing"], ours["longest_micro_batch_tokens"]) == ("wlb", 6144)
    # Algorithm 1 with the same thresholds in both.
    assert ours["imbalance"]["work_mean"] == paper["imbalance"]["work_mean"]
