"""`megatron-wlb analyze`: its numbers by hand, and what they are compared with."""

import json
import re
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest

from megatron_wlb.cli.analyze.lengths import documents_of
from megatron_wlb.cli.analyze.report import Reading
from megatron_wlb.cli.analyze.table import CLEAR, verdict
from megatron_wlb.documents import PackedBatch
from megatron_wlb.hardware.profile import profile_file
from megatron_wlb.plan.alone import activation_bytes, other_sizes
from megatron_wlb.plan.packer import Packer
from megatron_wlb.plan.step import shard_step
from megatron_wlb.simulate.step import simulate_step
from tests.adapter.datasets import write_index
from tests.cli.analyses import JOB, LARGE, MODEL, RUN, C, N, analyse, report, setup
from tests.packing.steps import documents


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


def step_us(job, micro_batches):
    """A step on one H100, which `tests/simulate` has by hand."""
    one = replace(job, num_micro_batches=len(micro_batches), global_batch_size=len(micro_batches))
    return simulate_step(one, shard_step(one, [np.array(documents) for documents in micro_batches])).time


def imbalance(micro_batches, crossover):
    work = [sum(d * (d + crossover) for d in documents) for documents in micro_batches]
    return max(work) * N / sum(work)


def test_layers_of_several_kinds(data):
    """Windows are simulated, for Megatron by gathered keys; a hybrid model says where it needs little balance."""
    near = f"{LARGE} --num-gpus 8 --data-path {data} --split 1 --window-size 255,0 --window-attn-skip-freq 2"
    given = setup(near)
    assert given.without_wlb().job.cp_exchange == "all" and any("no sliding windows" in note for note in given.notes)
    hybrid = setup(f"{LARGE} --num-gpus 8 --data-path {data} --split 1 --hybrid-layer-pattern M-*-|M-M-")
    assert hybrid.job.decoder_layers().ravel().tolist() == [4, 4]
    half = f"windows of {hybrid.job.crossover_tokens:,} tokens"
    assert any(note.startswith("Only 1 of 8 layers have attention") and half in note for note in hybrid.notes)
    assert any(note.startswith("Assumed of gated delta nets and Mamba layers") for note in hybrid.notes)
    windows = f"--seq-length {1 << 17} --global-batch-size 2 --wlb-micro-batches 2 --hybrid-layer-pattern *-*-|*-*-"
    full = setup(f"{LARGE} --num-gpus 8 --data-path {data} --split 1 {windows}")
    assert full.job.crossover_tokens < 1 << 17 and not any(note.startswith("Only") for note in full.notes)


def test_what_megatron_alone_has_is_taken_by_its_flags(data):
    """Transfers that overlap everywhere, and attention in FP8, of which some profiles have no times."""
    words = f"{JOB} --wlb-micro-batches 4 --data-path {data} --num-layers 4 --pipeline-model-parallel-size 2"
    for flag, overlaps in (("", False), ("--overlap-p2p-communication-warmup-flush", True)):
        assert setup(words, flag).without_wlb().job.overlap_transfers is overlaps
    fp8 = "--fp8-format hybrid --fp8-dot-product-attention --gpu"
    for gpu, noted in (("gb200", False), ("b200", True)):
        notes = setup(words, fp8, gpu).notes
        assert any("has no attention in FP8; Megatron's is timed in bf16" in note for note in notes) is noted


@pytest.mark.parametrize("size", [1, 2])
def test_the_same_tokens_by_hand(tmp_path, lengths, data, size):
    """One GPU, where nothing waits: the windows of Megatron cut by hand, which --wlb keeps."""
    words = f"--wlb-micro-batches 4 --micro-batch-size {size}"
    found = analyse(tmp_path, JOB, "--data-path", data, words, "--steps 200")
    job = setup(JOB, "--data-path", data, words).job
    assert found["steps"] == {"warm_up": 30, "packed": 200, "simulated": 200}
    cut = windows(lengths)
    apart = [cut[N * i : N * (i + 1)] for i in range(200)]
    ways = {
        "plain": ([[[sum(window)] for window in step] for step in apart], size),
        "thd": (apart, found["schemes"]["thd"]["micro_batch_size"]),
        "ours": (apart, 1),
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
        assert sum(numbers["parts_ms"].values()) == pytest.approx(numbers["step_ms"])
    assert found["schemes"]["ours"]["speedup"] == pytest.approx(per_token["thd"] / per_token["ours"])


def test_what_another_micro_batch_size_brings_is_not_credited_to_wlb(tmp_path, capsys):
    """A pipeline of two micro-batches of four windows waits; the gain is over the best size, whatever the run's is."""
    write_index(tmp_path / "short.idx", np.random.default_rng(0).integers(2, 300, 3000))
    model = "--num-layers 4 --hidden-size 4096 --num-attention-heads 32 --vocab-size 32000 --swiglu"
    words = f"--steps 8 --wlb-micro-batches 64 {RUN} {model} --seq-length 1024 --global-batch-size 64"
    words += f" --pipeline-model-parallel-size 2 --split 1 --data-path {tmp_path / 'short.idx'}"
    four, one = (analyse(tmp_path, words, f"--micro-batch-size {size}") for size in (4, 1))
    assert four["schemes"]["thd"] == one["schemes"]["thd"] and four["schemes"]["ours"] == one["schemes"]["ours"]
    assert four["best_size"] > 1.05 and f"{four['best_size']:.2f} times as fast as 4 does" in four["headline"]
    said = re.findall(r"^(Use it|No clear gain|Do not use it)\. .*", capsys.readouterr().out, re.MULTILINE)
    assert len(said) == 2 and said[0] == said[1]
    four, one = (each["schemes"]["plain"] for each in (four, one))
    assert (four["num_micro_batches"], one["num_micro_batches"]) == (16, 64)
    # The first stage has two micro-batches in flight: of four windows each, or of one.
    assert four["activation_gib"] == pytest.approx(4 * one["activation_gib"], rel=1e-3)


def test_sizes_of_micro_batches_that_are_tried(data):
    """Those that divide the windows of a rank, fit memory, and are groups that upstream interleaves."""

    def tried(*words):
        found = setup(f"{JOB} --wlb-micro-batches 16 --data-path {data}", *words)
        alone = found.without_wlb()
        return [*other_sizes(alone.job, alone.micro_batch_size, found.run.budget or 0.0)]

    assert tried("--global-batch-size 16 --micro-batch-size 4") == [[2, 1], [8, 16]]
    assert tried("--global-batch-size 24 --micro-batch-size 2 --wlb-micro-batches 24") == [[1], [4, 8]]
    assert tried("--global-batch-size 16 --optimizer sgd --micro-batch-size 4") == [[2, 1], []]
    stages = "--global-batch-size 16 --pipeline-model-parallel-size 2 --num-layers 4"
    assert tried(stages, "--num-virtual-stages-per-pipeline-rank 2") == [[], [2, 4, 8]]
    alone = setup(f"{JOB} --wlb-micro-batches 16 --global-batch-size 16 --data-path {data}").without_wlb()
    enough = 1.01 * activation_bytes(alone.job, 2) / 2**30
    assert tried("--global-batch-size 16", f"--wlb-memory-budget {enough}")[1] == [2]


def test_a_delay_has_its_time_at_the_work_of_the_steps_of_megatron(tmp_path, lengths, data):
    words = JOB, "--wlb-packing paper --data-path", data
    found, given = analyse(tmp_path, *words, "--steps 200"), setup(*words)
    packer = Packer(given.samples, given.job)
    steps = [[each.tolist() for each in packer.next().batch.lengths] for _ in range(230)][30:]

    def work(micro_batches):
        return sum(d * (d + given.job.crossover_tokens) for d in chain(*micro_batches))

    us_per_work = sum(step_us(given.job, step) for step in steps) / sum(map(work, steps))
    per_token = work(windows(lengths)[: 200 * N]) / (200 * N * C)
    ours = found["schemes"]["ours"]
    assert ours["us_per_token"] == pytest.approx(us_per_work * per_token)
    assert ours["late_steps"] > 0 and found["delay"] is None


def test_rows_of_conversations_take_megatron_the_time_of_full_windows(data):
    """The last conversation of a row has the padding, as in upstream."""
    thd = setup(JOB, "--wlb-micro-batches 4 --data-path", data).without_wlb()
    job = thd.job
    rows = [[100, 200], [C], [70], [C - 7, 3]]
    batch = PackedBatch(documents=documents([*chain(*rows)]), bounds=np.array([0, 2, 3, 4, 6]))
    padded = thd._replace(padded=True)
    plain, time = (scheme.simulate(batch).time for scheme in (padded._replace(crosses=True), padded))
    assert time == pytest.approx(step_us(job, [[100, C - 100], [C], [C], [C - 7, 7]]))
    assert plain == pytest.approx(step_us(job, [[C]] * 4))
    assert time > thd.simulate(batch).time == pytest.approx(step_us(job, rows))


def test_flags_to_add_are_those_that_were_given(data):
    """Beside --wlb; what auto chose is said apart, and a run that evaluates without validation data is told."""
    given = "--wlb --wlb-packing paper:500,2000 --wlb-cp-sharding hybrid --wlb-max-tokens 6144"
    found = setup(JOB, "--data-path", data, given, "--wlb-log run.jsonl")
    assert (found.flags(), found.pins()) == (f"{given} --wlb-log run.jsonl", "")
    words = JOB.replace("--split 1", "--split 99,1,0"), "--data-path", data, "--wlb-memory-budget 1"
    found = setup(*words, "--wlb-max-tokens auto")
    assert found.flags() == "--wlb --wlb-max-tokens auto --wlb-memory-budget 1.0" and not found.run.screened.remarks
    assert found.pins() == f"--wlb-micro-batches {found.job.num_micro_batches} --wlb-max-tokens {found.job.max_tokens}"
    run = f"--num-gpus 1 {RUN} {JOB} --bf16 --wlb --data-path {data}"
    (remark,) = setup(run).run.screened.remarks
    assert remark == "The data have no validation split; with --wlb the run needs --eval-iters 0."
    found = setup(run, "--eval-iters 0 --attention-dropout 0.1")
    assert found.flags() == "--wlb --attention-dropout 0" and not found.run.screened.remarks
    late = setup(*words, "--wlb-packing adaptive:20 --wlb-micro-batches 4 --wlb-max-tokens auto")
    assert late.flags().startswith("--wlb --wlb-packing adaptive:20 --wlb-micro-batches 4 --wlb-max-tokens auto ")
    assert late.pins() == f"--wlb-max-tokens {late.job.max_tokens}"


def test_nothing_to_gain(tmp_path, capsys):
    """Documents of a full window each: all schemes are the same."""
    write_index(tmp_path / "full.idx", np.full(300, C))
    words = f"{JOB} --wlb-micro-batches 4 --steps 4 --num-gpus 2 --optimizer sgd --data-path {tmp_path}/full.idx"
    found = analyse(tmp_path, words)
    for numbers in found["schemes"].values():
        assert numbers["speedup"] == pytest.approx(1)
        assert numbers["imbalance"] == pytest.approx({"pp": 1, "dp": 1, "cp": 1, "work_mean": 1, "work_p95": 1})
        assert numbers["late_steps"] == numbers["token_cv"] == 0
    assert "Add to the command" not in capsys.readouterr().out
    shares = found["data"]["shares"]
    assert found["data"]["up_to"][-1] == C
    assert [values[-1] for values in shares.values()] == [1, 1, 1]


def test_several_windows_are_tried_as_training_does(tmp_path):
    """By what an 80 GiB GPU leaves; where that is not known, a run of several windows is not advised against."""
    write_index(tmp_path / "short.idx", np.random.default_rng(0).integers(2, 700, 400))
    words = f"{RUN} {MODEL} --seq-length 1024 --global-batch-size 64 --micro-batch-size 4 --split 1 --bf16"
    run = words, "--data-path", str(tmp_path / "short.idx")
    found = setup(*run)
    assert found.job == setup(f"--wlb-memory-budget {found.run.budget / 2**30!r}", *run).job
    assert found.job.num_micro_batches < 64 and f"--wlb-micro-batches {found.job.num_micro_batches}" in found.pins()
    unknown = setup(*run, "--optimizer sgd")
    assert unknown.job.num_micro_batches >= 64 and unknown.of_run.micro_batch_size == 4
    assert verdict(report(unknown, 0.5)) == ("No clear gain", "close")
    assert verdict(report(found, 0.5)) == ("Do not use it", "loss")


def test_a_gain_is_clear_if_large_certain_and_under_all_assumptions(data):
    job = setup(JOB, "--data-path", data)

    def said(speedup, error=0.0, least=1.01, waiting=0.006):
        readings = [Reading("half the bandwidth", 1.0, least), Reading("other kernels", 1.0, 1.3)]
        return verdict(report(job, speedup, error=error, readings=readings, waiting=waiting))[0]

    assert said(1 + CLEAR + 1e-9) == said(1.2, error=0.09) == "Use it"
    assert said(1 + CLEAR - 1e-9) == said(1.2, error=0.11) == said(1.2, least=0.99) == "No clear gain"
    assert said(0.9) == "Do not use it" and said(0.9, error=0.06) == said(0.996) == "No clear gain"
    assert said(1.2, waiting=0.004) == said(1.01, waiting=0.004) == "Nothing to balance"


def test_overlapped_communication_counts_in_all_columns(tmp_path, long):
    """In small models tiles cost more than they hide."""
    wide = "--hidden-size 8192 --num-attention-heads 64 --tensor-model-parallel-size 4"
    run = f"{RUN} {LARGE} {wide} {long} --sequence-parallel"
    alone = analyse(tmp_path, "--steps 8", run)
    found = analyse(tmp_path, "--steps 8", run, "--tp-comm-overlap --dataloader-inter-document-masking")
    assert (alone["scheme_of_run"], found["scheme_of_run"]) == ("plain", "thd")
    for name in alone["schemes"]:
        before, after = (each["schemes"][name]["us_per_token"] for each in (alone, found))
        assert after < before
    assert alone["schemes"]["thd"]["speedup"] == 1


def test_what_a_profile_was_measured_with_is_said(tmp_path, data):
    versions = {"torch": "2.8.0", "cuda": "12.8", "cudnn": None}
    stated = json.loads(profile_file("h100-fa2").read_text()) | {"versions": versions}
    (tmp_path / "mine.json").write_text(json.dumps(stated))
    words = f"--steps 2 --wlb-profile {tmp_path / 'mine.json'} --num-gpus 1"
    found = analyse(tmp_path, words, JOB, "--data-path", data)
    assert found["profile"]["versions"] == {"torch": "2.8.0", "cuda": "12.8"}
    said = "profile h100-fa2 (NVIDIA H100), measured with torch 2.8.0, cuda 12.8. Its errors"
    assert any(said in fact for fact in found["facts"])


def test_masks_of_upstream_that_do_not_hold_are_named(long):
    masked = f"{RUN} {LARGE} {long} --dataloader-inter-document-masking"
    found = setup(masked)
    assert found.masks_documents
    assert "tokens attend to other documents, and not to all of their own" in " ".join(found.run.screened.remarks)
    alone = setup(masked.replace("--context-parallel-size 2", "--context-parallel-size 1"))
    assert alone.masks_documents and "other documents" not in " ".join(alone.run.screened.remarks)


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
    found = setup(line, "--data-path", data)
    alone = [found.without_wlb(crosses=crosses).job.schedule().group for crosses in (True, False)]
    assert (*alone, found.job.schedule().group) == (megatron, megatron, ours)


def test_shares_of_work_by_hand(data, lengths):
    """Documents over the window count window by window."""
    given = setup(JOB, "--wlb-micro-batches 4 --data-path", data)
    found, crossover = documents_of(given), given.job.crossover_tokens
    shares = found.shares
    assert (found.documents, found.tokens) == (len(lengths), lengths.sum())
    work = [d * crossover + (d // C) * C * C + (d % C) ** 2 for d in lengths.tolist()]
    for name, weights in (("documents", [1] * len(work)), ("tokens", lengths.tolist()), ("work", work)):
        over = sum(w for d, w in zip(lengths.tolist(), weights, strict=True) if 2048 < d <= 4096)
        assert shares[name][12] == pytest.approx(over / sum(weights))
