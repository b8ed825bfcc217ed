"""Plan files, read back and checked by what the format promises, not by the code that wrote them."""

import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest

from megatron_wlb.cli.main import main
from megatron_wlb.describe.make import make_job
from megatron_wlb.hardware.profile import load_profile
from megatron_wlb.model import MODELS
from megatron_wlb.packing import DEFAULT_POLICY, POLICIES
from tests.adapter.datasets import write_index
from tests.cli.commands import ROOT, process, refusal, write_json
from tests.cli.test_lengths import write_parquet

N, C, S = 4, 64, 80
SIZES = f"--global-batch-size {N} --seq-length {C} --wlb-crossover 30".split()
FLAGS = [*SIZES, "--wlb-max-tokens", str(S)]
METRICS = {
    "steps", "middle_steps", "tokens", "imbalance_mean", "imbalance_p95", "ratio_to_bound", "late_steps",
    "spread_steps", "max_delay_steps", "token_cv", "long_share_mean", "long_share_std", "waiting_documents",
    "empty_documents",
}  # fmt: skip


def make_lengths(num_documents=400, seed=3):
    """Log-normal with a tail of several windows, and some empty documents."""
    lengths = np.random.default_rng(seed).lognormal(2.3, 1.3, num_documents).astype(int).clip(0, 300)
    lengths[:2] = (0, 300)
    return lengths.tolist()


@pytest.fixture
def source(tmp_path):
    return write_json(tmp_path, make_lengths())


def plan(output, *words):
    assert main(["plan", *map(str, words), "--output", str(output)]) == 0
    return output.read_text()


def packed(source, output, policy=DEFAULT_POLICY, *flags):
    return plan(output, source, *FLAGS, "--wlb-packing", policy, *flags)


def read(text):
    header, *steps, last = [json.loads(line) for line in text.splitlines()]
    return header, steps, last


def pieces(text):
    return [piece for step in read(text)[1] for micro_batch in step["micro_batches"] for piece in micro_batch]


def check(text, lengths, policy):
    """Everything that a reader may rely on; returns the last line."""
    header, steps, last = read(text)
    assert text.endswith("}\n")
    sizes = {
        "windows": N,
        "micro_batches": N,
        "context_length": C,
        "max_tokens": S,
        "crossover": 30,
        "documents": len(lengths),
    }
    assert header == {"format": "megatron-wlb-plan", "version": 2, "policy": policy, **sizes}
    for t, step in enumerate(steps):
        assert list(step) == ["step", "micro_batches"]
        assert (step["step"], len(step["micro_batches"])) == (t, N)
        assert any(step["micro_batches"])
        assert all(sum(length for _, _, length in each) <= S for each in step["micro_batches"])
    ends = [0] * len(lengths)
    for document, offset, length in sorted(pieces(text) + last["waiting"]):
        assert 1 <= length <= C
        assert offset == ends[document]
        ends[document] += length
    assert ends == lengths
    assert list(last) == ["summary", "waiting"]
    summary = last["summary"]
    assert summary.keys() == METRICS
    assert (summary["steps"], summary["waiting_documents"]) == (len(steps), len(last["waiting"]))
    assert summary["tokens"] == sum(lengths) - sum(length for _, _, length in last["waiting"])
    assert summary["empty_documents"] == lengths.count(0)
    return last


@pytest.mark.parametrize("flush", [True, False])
@pytest.mark.parametrize(
    ("policy", "flags"),
    [
        *((policy, "") for policy in POLICIES),
        ("fixed", "--wlb-global-batches 3"),
        ("wlb", "--wlb-outlier-thresholds 20,30,50"),
        ("adaptive", "--wlb-max-delay-steps 20"),
    ],
)
def test_every_document_is_tiled_once(source, tmp_path, capsys, policy, flags, flush):
    lengths = make_lengths()
    text = packed(source, tmp_path / "plan", policy, *flags.split(), *([] if flush else ["--no-flush"]))
    last = check(text, lengths, policy)
    summary = last["summary"]
    if flush:
        assert last["waiting"] == []
    else:
        assert summary["steps"] <= sum(lengths) // (N * C)
        assert last["waiting"] == sorted(last["waiting"]) != []
    if "delay" in flags:
        assert summary["max_delay_steps"] <= 20
    printed = capsys.readouterr()
    assert printed.out == ""
    steps = f"{summary['steps']} steps of {N} micro-batches, averages of the middle {summary['middle_steps']}: "
    assert printed.err.startswith(steps)
    assert printed.err.count("\n") == 1
    assert sorted(os.listdir(tmp_path)) == ["lengths.json", "plan"]


def test_the_order_of_the_file(source, tmp_path):
    """Original packing takes the documents as they come, so its plan is the concatenation cut at every window."""
    order = pieces(packed(source, tmp_path / "plan", "original"))
    assert order == sorted(order)


def test_the_data_of_a_run(tmp_path):
    """Without LENGTHS: one pass over the training split, shuffled by --seed, numbered through the blend."""
    lengths = make_lengths()
    for name in "ab":
        write_index(tmp_path / f"{name}.idx", np.array(lengths) + 1)
    (tmp_path / "train.sh").write_text(f"x.py {' '.join(FLAGS)} --data-path {tmp_path / 'a'} {tmp_path / 'b'}")
    words = ["--launch", tmp_path / "train.sh", "--split", "3,1"]
    first, again, other = (plan(tmp_path / "plan", *words, "--seed", seed) for seed in (1, 1, 2))
    training = lengths[:300]
    check(first, 2 * training, DEFAULT_POLICY)
    assert first == again != other
    order = pieces(plan(tmp_path / "plan", *words, "--wlb-packing", "original"))
    assert order != sorted(order)
    source = write_json(tmp_path, lengths)
    assert plan(tmp_path / "plan", source, *words) == packed(source, tmp_path / "plan")


@pytest.mark.parametrize(
    ("flags", "many"), [("", True), ("--wlb-packing wlb", False), ("--wlb-micro-batches 4", False)]
)
def test_as_many_micro_batches_as_training_would_choose(source, tmp_path, flags, many):
    """More than windows in a deep pipeline, by the work of its micro-batches."""
    words = [*FLAGS, *"--pipeline-model-parallel-size 4 --num-gpus 4 --wlb-profile flops".split(), *flags.split()]
    text = plan(tmp_path / "plan", source, *words)
    header, steps, _ = read(text)
    assert header["micro_batches"] > N if many else header["micro_batches"] == N
    assert {len(step["micro_batches"]) for step in steps} == {header["micro_batches"]}


@pytest.mark.parametrize("policy", ["wlb", "adaptive"])
def test_the_same_flags_give_the_same_bytes(source, tmp_path, policy):
    texts = [packed(source, tmp_path / "plan", policy) for _ in range(2)]
    assert texts[0] == texts[1]


class TestNoFlush:
    def waiting(self, folder, lengths, *flags):
        text = packed(write_json(folder, lengths), folder / "plan", "wlb", "--no-flush", *flags)
        return len(read(text)[1]), check(text, lengths, "wlb")["waiting"]

    def test_queues_are_not_flushed_in_the_last_full_global_batch(self, tmp_path):
        """Exactly two global batches; the three outliers wait for a fourth one."""
        lengths = [50, 50, 50, *[15] * 24, 2]
        assert sum(lengths) == 2 * N * C
        assert self.waiting(tmp_path, lengths) == (2, [[0, 0, 50], [1, 0, 50], [2, 0, 50]])

    def test_what_lies_behind_the_last_full_global_batch_waits(self, tmp_path):
        steps, waiting = self.waiting(tmp_path, [8] * 32 + [8] * 31)
        assert (steps, waiting) == (1, [[i, 0, 8] for i in range(32, 63)])

    def test_a_last_global_batch_of_outliers_only_makes_no_step(self, tmp_path):
        """The packer would go on to the flush to get a step at all."""
        last = [60, 60, 60, 59, 17]
        assert self.waiting(tmp_path, [8] * 32 + last, "--wlb-outlier-thresholds", "17,60") == (
            1,
            [[32 + i, 0, length] for i, length in enumerate(last)],
        )


LAUNCHED = f"torchrun --nproc-per-node 4 pretrain_gpt.py {' '.join(FLAGS)} --wlb --wlb-packing adaptive --lr 3e-4"


def test_the_flags_of_a_launch_line_are_taken(source, tmp_path):
    """As words behind the command's own, and from a script, which flags overrule."""
    (tmp_path / "train.sh").write_text(LAUNCHED.replace("adaptive", "original"))
    expected = packed(source, tmp_path / "plan", "adaptive")
    assert plan(tmp_path / "plan", source, *LAUNCHED.split()) == expected
    launch = ["--launch", tmp_path / "train.sh", "--wlb-packing", "adaptive"]
    assert plan(tmp_path / "plan", source, *launch) == expected


PROFILE = {"name": "mine", "kernel": {"tile_rows": 1, "forward": {"launch": 0, "tile": 1, "query_tile": 0}}}
PROFILE |= {"linear_tflops": {"forward": 0.01, "backward": 0.01}}
WEIGHTS = MODELS["llama2-7b"].token_weights
CROSSOVER = make_job(
    model=MODELS["llama2-7b"], context_length=C, global_batch_size=N, profile=load_profile("h100-fa2")
).crossover_tokens


@pytest.mark.parametrize(
    ("flags", "max_tokens", "crossover", "note"),
    [
        ("", 80, CROSSOVER, f"Assumed: a crossover of {CROSSOVER} tokens, that of a 7B model (llama2-7b); describe"),
        ("--wlb-profile flops --model llama2-70b", 80, 104848, None),
        # Weights that a token is multiplied with in a layer, its share of the vocabulary among them, over heads x size.
        (
            "--wlb-profile flops --num-layers 2 --hidden-size 64 --num-attention-heads 4 --vocab-size 128",
            80,
            12 * 64 + 64,
            None,
        ),
        ("--wlb-crossover 9 --tensor-model-parallel-size 8 --context-parallel-size 2", 80, 9, None),
        ("--wlb-crossover 9 --num-gpus 4 --pipeline-model-parallel-size 2", 80, 9, None),
        # Stages that the layers of the model that is assumed do not divide over.
        ("--wlb-crossover 9 --num-gpus 3 --pipeline-model-parallel-size 3", 80, 9, None),
        (
            "--wlb-crossover 9 --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|L --num-gpus 2",
            80,
            9,
            None,
        ),
        # Memory is that of a layout: two stages of two layers, of 34 h bytes a token, and one MLP's backward.
        (
            "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --vocab-size 128 --pipeline-model-parallel-size 2 "
            "--wlb-max-tokens auto --wlb-memory-budget 0.001 --wlb-profile flops",
            int(2**30 / 1000 / (2 * 2 * (34 * 64 + 16) + 2 * 64 + 2 * 2 * 256)),
            12 * 64 + 32,
            "Assumed: 2 GPUs, one data-parallel rank",
        ),
        ("--wlb-crossover 9 --wlb-max-tokens auto", 80, 9, "Assumed: an S_max of 1.25 windows; how much memory"),
        # A pair takes 1 us and 2.5 in backward in each of 32 heads; half of them are seen, and all of the diagonal.
        ("--wlb-profile PROFILE --model llama2-7b", 80, round(6 * WEIGHTS / 0.01e6 / (3.5 * 32 / 2) + 1), None),
        (
            "--wlb-crossover 9 --fp8-format e4m3 --fp8-recipe mxfp8",
            96,
            9,
            "FP8 and FP4 (--fp8-format) are not modelled",
        ),
        (
            "--wlb-crossover 9 --wlb-outlier-thresholds 20,30",
            80,
            9,
            "--wlb-outlier-thresholds is of --wlb-packing wlb, and packing is adaptive: without effect.",
        ),
        ("--wlb-crossover 9 --seq-lenght 9", 80, 9, "Not simulated, and so without effect on these numbers: --seq-len"),
    ],
)
def test_sizes_are_those_of_training(source, tmp_path, capsys, flags, max_tokens, crossover, note):
    (tmp_path / "profile.json").write_text(json.dumps(PROFILE))
    words = flags.replace("PROFILE", str(tmp_path / "profile.json")).split()
    header = read(plan(tmp_path / "plan", source, *SIZES[:4], *words))[0]
    assert (header["max_tokens"], header["crossover"]) == (max_tokens, crossover)
    notes = capsys.readouterr().err.splitlines()[1:]
    assert len(notes) == (note is not None)
    assert not notes or notes[0].startswith(f"- {note}")


def refused(capsys, folder, *words, output="plan"):
    """The message; checks that no file was left."""
    before = sorted(os.listdir(folder))
    message = refusal(capsys, "plan", *map(str, words), "--output", str(folder / output))
    assert sorted(os.listdir(folder)) == before
    return message


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--wlb-packing best", "^--wlb-packing is 'best'; choose one of original, fixed, ilp, wlb, adaptive$"),
        ("--wlb-max-tokens 81 --tensor-model-parallel-size 2", "max_tokens is 81, .*; give a multiple of 2$"),
        ("--wlb-max-tokens 67108865", "^--wlb-max-tokens is 67108865; it must be from 1 to 67108864"),
        ("--global-batch-size 0", "--global-batch-size: '0' must be an integer from 1 to 1048576"),
        ("--wlb-crossover 1.5", "--wlb-crossover: invalid int value: '1.5'"),
        ("--wlb-packing wlb --wlb-outlier-thresholds 9,3", "is 9,3; give lengths of at least 1 in increasing order"),
        ("--wlb-outlier-thresholds 3,", "--wlb-outlier-thresholds: '3,' must be integers"),
        (f"--wlb-crossover {1 << 35} --wlb-max-tokens {1 << 26}", "overflows 64 bits; lower one of them"),
    ],
)
def test_wrong_flags(source, tmp_path, capsys, flags, message):
    assert re.search(message, refused(capsys, tmp_path, source, *FLAGS, *flags.split()))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("LENGTHS --seq-length 64", "^no --global-batch-size; give the context windows of tokens that a step trains"),
        ("LENGTHS --global-batch-size 4", "^no --seq-length; give the context window in tokens$"),
        ("--seq-length 64 --global-batch-size 4", "^no --data-path; give the prefix of a .bin/.idx dataset"),
        ("LENGTHS --seq-length 64 --global-batch-size 4 --num-layers 2", "no --hidden-size, --num-attention-heads: "),
        ("no --seq-length 64 --global-batch-size 4", r"no\.idx does not exist; give as LENGTHS "),
        (f"{' '.join(FLAGS)} --model llama2-7b LENGTHS", "lengths.json is a file, .*or put it first if it is LENGTHS"),
        (
            f"LENGTHS {' '.join(FLAGS)} --no-flush",
            "holds 248 tokens, under one global batch of 4 x 64, of which --no-f",
        ),
        (
            f"LENGTHS {' '.join(FLAGS)} --no-flush --wlb-packing wlb --wlb-outlier-thresholds 1,8",
            "^every document waits, so --no-flush leaves no step; leave it out or give more documents$",
        ),
    ],
)
def test_what_is_missing(tmp_path, capsys, words, message):
    source = write_json(tmp_path, [64, 63, 33, 64, 32] if "1,8" in words else [8] * 31)
    words = words.replace("LENGTHS", source).replace("1,8", "1,33,63,64")
    assert re.search(message, refused(capsys, tmp_path, *words.split()))


@pytest.mark.parametrize(("module", "suffix", "policy"), [("pyarrow", "parquet", "wlb"), ("scipy", "json", "ilp")])
def test_a_missing_extra(source, tmp_path, capsys, monkeypatch, module, suffix, policy):
    path = write_parquet(tmp_path / "x.parquet", length=[1]) if suffix == "parquet" else source
    monkeypatch.setitem(sys.modules, module, None)
    message = refused(capsys, tmp_path, path, *FLAGS, "--wlb-packing", policy)
    assert message == f"{module} is not installed; pip install 'megatron-wlb[analysis]'"


def test_wrong_outputs(source, tmp_path, capsys):
    message = refused(capsys, tmp_path, source, *FLAGS, output="no/plan")
    assert re.search("--output .*plan: the folder .*no does not exist; create it or name another", message)
    assert "Is a directory" in refused(capsys, tmp_path, source, *FLAGS, output=".")


def test_a_failure_while_planning_leaves_the_former_plan(source, tmp_path, capsys, monkeypatch):
    output = tmp_path / "plan"
    output.write_text("former")

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("megatron_wlb.cli.plan.metrics.measure", full)
    assert "No space left on device" in refused(capsys, tmp_path, source, *FLAGS)
    assert output.read_text() == "former"


def test_a_link_stays_a_link_and_a_device_a_device(source, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "plan")
    text = packed(source, tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "plan").read_text() == text
    os.mkfifo(tmp_path / "pipe")
    reader = subprocess.Popen(["cat", tmp_path / "pipe"], stdout=subprocess.PIPE, text=True)
    assert main(["plan", source, *FLAGS, "--output", str(tmp_path / "pipe")]) == 0
    assert reader.communicate()[0] == text
    assert (tmp_path / "pipe").is_fifo()


@pytest.mark.parametrize("policy", POLICIES)
def test_standard_input_and_output_where_torch_is_blocked(source, tmp_path, policy):
    arguments = ["plan", "-", *FLAGS, "--wlb-packing", policy, "--output", "-"]
    done = process(*arguments, without=("torch", "megatron", "transformer_engine"), input=json.dumps(make_lengths()))
    assert done.returncode == 0, done.stderr
    assert done.stdout == packed(source, tmp_path / "plan", policy)
    assert done.stderr.count("\n") == 1  # no progress bar: this is not a terminal


def test_without_rich(source, tmp_path):
    done = process("plan", source, *FLAGS, "--output", "-", without=("rich.console",))
    assert (done.returncode, done.stdout) == (0, packed(source, tmp_path / "plan"))


def test_a_progress_bar_on_a_terminal(source, tmp_path):
    terminal, other_end = os.openpty()
    done = process("plan", source, *FLAGS, "--output", tmp_path / "plan", capture_output=False, stderr=other_end)
    os.close(other_end)
    shown = os.read(terminal, 1 << 16).decode()
    os.close(terminal)
    assert done.returncode == 0
    assert "planning" in shown and "100%" in shown


def test_a_reader_that_goes_away(tmp_path):
    """As in `| head -n 1`: no traceback."""
    source = write_json(tmp_path, make_lengths(20_000))
    arguments = [sys.executable, "-m", "megatron_wlb", "plan", source, *FLAGS, "--output", "-"]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) as planning:
        assert json.loads(planning.stdout.readline())["documents"] == 20_000
        planning.stdout.close()
        assert planning.stderr.read() == ""
        assert planning.wait() == 1


def test_python_m_and_exit_code():
    arguments = [sys.executable, "-m", "megatron_wlb", "plan", "-", *FLAGS, "--output", "-"]
    done = subprocess.run(arguments, input="[1, 2", capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "megatron-wlb plan: error: standard input, line 1, column 6: not JSON: Expecting ',' delimiter; give an "
        "array of integers\n"
    )
