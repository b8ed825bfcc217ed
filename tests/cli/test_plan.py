"""Plan files, read back and checked by what the format promises, not by the code that wrote them."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron_wlb.cli.main import main
from megatron_wlb.config import WlbConfig
from megatron_wlb.plan.packing import POLICIES
from tests.cli.refusals import refusal
from tests.cli.test_lengths import write_dataset, write_parquet

ROOT = Path(__file__).parents[2]
N, C, S = 4, 64, 80
FLAGS = f"--global-batch-size {N} --seq-length {C} --wlb-max-tokens {S} --wlb-crossover 30".split()
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


def write_json(folder, lengths):
    path = folder / "lengths.json"
    path.write_text(json.dumps(lengths))
    return str(path)


def plan(source, output, *flags):
    assert main(["plan", source, *FLAGS, *flags, "--output", str(output)]) == 0
    return output.read_text()


def read(text):
    header, *steps, last = [json.loads(line) for line in text.splitlines()]
    return header, steps, last


def check(text, lengths, policy):
    """Everything that a reader may rely on; returns the last line."""
    header, steps, last = read(text)
    assert text.endswith("}\n")
    assert header == {
        "format": "megatron-wlb-plan",
        "version": 1,
        "policy": policy,
        "micro_batches": N,
        "context_length": C,
        "max_tokens": S,
        "crossover": 30,
        "documents": len(lengths),
    }
    pieces = list(last["waiting"])
    for t, step in enumerate(steps):
        assert list(step) == ["step", "micro_batches"]
        assert step["step"] == t
        assert len(step["micro_batches"]) == N
        assert any(step["micro_batches"])
        for micro_batch in step["micro_batches"]:
            assert sum(length for _, _, length in micro_batch) <= S
            pieces += micro_batch
    ends = [0] * len(lengths)
    for document, offset, length in sorted(pieces):
        assert 1 <= length <= C
        assert offset == ends[document]
        ends[document] += length
    assert ends == lengths
    assert list(last) == ["summary", "waiting"]
    assert last["summary"].keys() == METRICS
    assert last["summary"]["steps"] == len(steps)
    assert last["summary"]["tokens"] == sum(lengths) - sum(length for _, _, length in last["waiting"])
    assert last["summary"]["waiting_documents"] == len(last["waiting"])
    assert last["summary"]["empty_documents"] == lengths.count(0)
    return last


@pytest.mark.parametrize("flush", [True, False])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_document_is_tiled_once(source, tmp_path, capsys, policy, flush):
    lengths = make_lengths()
    text = plan(source, tmp_path / "plan.jsonl", "--wlb-packing", policy, *([] if flush else ["--no-flush"]))
    last = check(text, lengths, policy)
    if flush:
        assert last["waiting"] == []
    else:
        assert last["summary"]["steps"] <= sum(lengths) // (N * C)
        assert last["waiting"]
        assert last["waiting"] == sorted(last["waiting"])
    printed = capsys.readouterr()
    assert printed.out == ""
    summary = last["summary"]
    assert summary["middle_steps"] == summary["steps"] - 2 * (summary["steps"] // 10)
    assert printed.err.startswith(f"{summary['steps']} steps, averages of the middle {summary['middle_steps']}: ")
    assert printed.err.count("\n") == 1
    assert sorted(os.listdir(tmp_path)) == ["lengths.json", "plan.jsonl"]


@pytest.mark.parametrize(
    ("policy", "flags"),
    [
        ("fixed", ["--wlb-global-batches", "3"]),
        ("wlb", ["--wlb-outlier-thresholds", "20,30,50"]),
        ("adaptive", ["--wlb-packing-mode", "low-displacement"]),
        ("adaptive", ["--wlb-packing-mode", "constant-tokens", "--wlb-max-delay-steps", "12"]),
        ("adaptive", ["--wlb-planner", "python"]),
        ("adaptive", ["--wlb-balance-tolerance", "0.1", "--wlb-age-tolerance", "0"]),
    ],
)
def test_settings_of_policies(source, tmp_path, policy, flags):
    for flush in ([], ["--no-flush"]):
        last = check(plan(source, tmp_path / "plan", "--wlb-packing", policy, *flags, *flush), make_lengths(), policy)
    if "--wlb-max-delay-steps" in flags:
        assert last["summary"]["max_delay_steps"] <= 12


def test_tolerances(source, tmp_path):
    """Those of the mode change nothing, others do; both cores take them."""
    own, wide = ("0.003", "0.008"), ("0.1", "0")
    texts = [
        plan(source, tmp_path / "plan", "--wlb-packing", "adaptive", "--wlb-planner", planner, *flags)
        for planner in ("native", "python")
        for flags in ([], *(["--wlb-balance-tolerance", x, "--wlb-age-tolerance", y] for x, y in (own, wide)))
    ]
    assert texts[0] == texts[1] != texts[2]
    assert texts[:3] == texts[3:]


@pytest.mark.parametrize("name", ["balance_tolerance", "age_tolerance"])
@pytest.mark.parametrize("value", [-0.01, 1.01, float("nan"), float("inf")])
def test_tolerances_out_of_range_are_refused(name, value):
    with pytest.raises(ValueError, match=f"^--wlb-{name.replace('_', '-')} is {value}; it must be from 0 to 1$"):
        WlbConfig(**{name: value})


def test_the_order_of_the_file(tmp_path):
    """Original packing takes the documents as they come, so its plan is the concatenation cut at every window."""
    lengths = make_lengths()
    text = plan(write_json(tmp_path, lengths), tmp_path / "plan", "--wlb-packing", "original")
    pieces = [piece for step in read(text)[1] for micro_batch in step["micro_batches"] for piece in micro_batch]
    assert pieces == sorted(pieces)


def test_figures_of_the_summary(tmp_path):
    """Four windows that are equal, then one document: imbalance 1 and 4."""
    text = plan(write_json(tmp_path, [64, 64, 64, 64, 64]), tmp_path / "plan", "--wlb-packing", "original")
    summary = read(text)[2]["summary"]
    assert summary == {
        "steps": 2,
        "middle_steps": 2,
        "tokens": 320,
        "imbalance_mean": 2.5,
        "imbalance_p95": pytest.approx(3.85),
        "ratio_to_bound": 1.0,
        "late_steps": 0.0,
        "spread_steps": 0.0,
        "max_delay_steps": 0,
        "token_cv": pytest.approx(0.6),
        "long_share_mean": 1.0,
        "long_share_std": 0.0,
        "waiting_documents": 0,
        "empty_documents": 0,
    }


def test_all_inputs_give_the_same_plan(tmp_path):
    lengths = make_lengths()
    np.save(tmp_path / "x.npy", np.array(lengths))
    dataset = write_dataset(tmp_path, [length + 1 for length in lengths])
    sources = [
        write_json(tmp_path, lengths),
        str(tmp_path / "x.npy"),
        write_parquet(tmp_path / "x.parquet", length=lengths),
        dataset,
        dataset + ".idx",
    ]
    texts = [plan(source, tmp_path / f"plan{i}", "--wlb-packing", "wlb") for i, source in enumerate(sources)]
    assert len(set(texts)) == 1


@pytest.mark.parametrize("policy", ["wlb", "adaptive"])
def test_the_same_input_gives_the_same_bytes(source, tmp_path, policy):
    texts = {
        plan(source, tmp_path / "plan", "--wlb-packing", policy, "--wlb-planner", planner)
        for planner in ("native", "native", "python", "auto")
    }
    assert len(texts) == 1


SIZES = ["--global-batch-size", "4", "--seq-length", "63", "--wlb-packing", "wlb"]
PROFILE = {"name": "mine", "kernel": {"tile_rows": 1, "forward": {"launch": 0, "tile": 1, "query_tile": 0}}}


@pytest.mark.parametrize(
    ("flags", "max_tokens", "crossover", "note"),
    [
        ("", 80, 50408, "Assumed: a crossover of 50408 tokens, that of a 7B model (llama2-7b); describe yours by"),
        ("--model llama2-70b", 80, 104848, None),
        # Weights that a token is multiplied with in a layer, its share of the vocabulary among them, over heads x size.
        (
            "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --vocab-size 128",
            80,
            64 * (12 * 64 + 64) // 64,
            None,
        ),
        ("--wlb-crossover 9 --tensor-model-parallel-size 8 --context-parallel-size 3", 96, 9, None),
        ("--wlb-crossover 9 --wlb-max-tokens auto", 80, 9, "Assumed: an S_max of 1.25 windows; how much memory"),
        ("--wlb-profile PROFILE", 80, 1234, None),
        ("--wlb-crossover 9 --lr 3 --num-workers 2", 80, 9, None),
        ("--wlb-crossover 9 --fp8-format hybrid", 80, 9, "FP8 and FP4 (--fp8-format) are not modelled"),
        (
            "--wlb-crossover 9 --fp8-format e4m3 --fp8-recipe mxfp8",
            96,
            9,
            "FP8 and FP4 (--fp8-format --fp8-recipe) are",
        ),
        ("--wlb-crossover 9 --seq-lenght 9", 80, 9, "Not simulated, and so without effect on these numbers: --seq-len"),
    ],
)
def test_sizes_are_those_of_training(source, tmp_path, capsys, flags, max_tokens, crossover, note):
    (tmp_path / "profile.json").write_text(json.dumps(PROFILE | {"crossover_tokens": 1234}))
    words = flags.replace("PROFILE", str(tmp_path / "profile.json")).split()
    assert main(["plan", source, *SIZES, *words, "--output", str(tmp_path / "plan")]) == 0
    header = read((tmp_path / "plan").read_text())[0]
    assert (header["max_tokens"], header["crossover"]) == (max_tokens, crossover)
    notes = capsys.readouterr().err.splitlines()[1:]
    assert len(notes) == (note is not None)
    assert not notes or notes[0].startswith(f"- {note}")


LAYER = 2 * 4 * 64 + 2 * 64 + 2 * 4 * 64 + 4 * 4 + 2 * 2 * 256
"""Kept by a layer of four heads of 16 with dropout, in bf16: 34 h bytes a token."""


@pytest.mark.parametrize(
    ("flags", "kept"),
    [
        ("", 2 * 2 * LAYER),
        ("--recompute-granularity full", 2 * 128 + LAYER + 2 * 64 + 6 * 128),  # on the last stage, with its logits
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 1", 2 * (128 + LAYER) + LAYER),
        ("--recompute-granularity selective --recompute-modules mlp", 2 * 2 * (LAYER - 1024) + 1024),
    ],
)
def test_the_memory_of_a_layout_bounds_s_max(flags, kept, source, tmp_path, capsys):
    """Of two stages the first holds two micro-batches, of two layers each."""
    model = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --vocab-size 128 --hidden-dropout 0.1"
    words = f"{model} --pipeline-model-parallel-size 2 --wlb-max-tokens auto --wlb-memory-budget {kept * 101 / 2**30}"
    words += f" {flags}"
    assert main(["plan", source, *SIZES, *words.split(), "--output", str(tmp_path / "plan")]) == 0
    assert read((tmp_path / "plan").read_text())[0]["max_tokens"] == 100
    assert "Assumed: 2 GPUs, one data-parallel rank" in capsys.readouterr().err


def test_the_flags_of_a_launch_line_are_taken(source, tmp_path):
    """As words behind the command's own, and from a script, which flags overrule."""
    line = (
        f"torchrun --nproc-per-node 8 pretrain_gpt.py {' '.join(FLAGS)} --wlb --wlb-packing adaptive --lr 3e-4 --bf16"
    )
    (tmp_path / "train.sh").write_text(line.replace("adaptive", "original"))
    outputs = [plan(source, tmp_path / "plan", "--wlb-packing", "adaptive")]
    for words in (line.split(), ["--launch", str(tmp_path / "train.sh"), "--wlb-packing", "adaptive"]):
        assert main(["plan", source, "--output", str(tmp_path / "plan"), *words]) == 0
        outputs.append((tmp_path / "plan").read_text())
    assert outputs[0] == outputs[1] == outputs[2]


class TestNoFlush:
    def waiting(self, folder, lengths, *flags):
        text = plan(write_json(folder, lengths), folder / "plan", "--wlb-packing", "wlb", "--no-flush", *flags)
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
        lengths = [8] * 32 + [60, 60, 60, 59] + [17]
        flags = ["--wlb-outlier-thresholds", "17,60"]
        assert self.waiting(tmp_path, lengths, *flags) == (
            1,
            [[32, 0, 60], [33, 0, 60], [34, 0, 60], [35, 0, 59], [36, 0, 17]],
        )

    def test_no_full_global_batch_is_refused(self, tmp_path, capsys):
        source = write_json(tmp_path, [8] * 31)
        assert refused(capsys, tmp_path, source, "--wlb-packing", "wlb", "--no-flush") == (
            f"{source} holds 248 tokens, under one global batch of 4 x 64, of which --no-flush makes no step; leave it "
            "out or give more documents"
        )

    def test_no_step_at_all_is_refused(self, tmp_path, capsys):
        source = write_json(tmp_path, [64, 63, 33, 64, 32])
        flags = ["--wlb-packing", "wlb", "--no-flush", "--wlb-outlier-thresholds", "1,33,63,64"]
        assert refused(capsys, tmp_path, source, *flags) == (
            "every document waits, so --no-flush leaves no step; leave it out or give more documents"
        )


def refused(capsys, folder, source, *flags, output=None, alone=False):
    """The message; checks that no file was left."""
    before = sorted(os.listdir(folder))
    arguments = [source, *([] if alone else FLAGS), *flags, "--output", str(output or folder / "plan.jsonl")]
    message = refusal(capsys, "plan", *arguments)
    assert sorted(os.listdir(folder)) == before
    return message


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--wlb-packing", "best"], "^--wlb-packing is 'best'; choose one of original, fixed, wlb, adaptive$"),
        (["--wlb-packing-mode", "fast"], "^--wlb-packing-mode is 'fast'; choose one of constant-tokens, low-displ"),
        (["--wlb-planner", "rust"], "^--wlb-planner is 'rust'; choose one of auto, native, python$"),
        (["--wlb-max-tokens", "63"], "^--wlb-max-tokens 63 is under --seq-length 64.*; give at least 64$"),
        (["--wlb-max-tokens", "81"], "^--wlb-max-tokens 81 cannot be shared .* such as 82$"),
        (["--wlb-max-tokens", "67108865"], "^--wlb-max-tokens is 67108865; work is exact up to 67108864 tokens"),
        (["--global-batch-size", "0"], "--global-batch-size: '0' must be an integer from 1 to 1048576"),
        (["--wlb-crossover", "1.5"], "--wlb-crossover: invalid int value: '1.5'"),
        (["--seq-length", "-1"], "--seq-length"),
        (["--wlb-outlier-thresholds", "9,3"], "is '9,3'; give lengths of at least 1 in increasing order"),
        (["--wlb-outlier-thresholds", "3,"], "--wlb-outlier-thresholds: '3,' must be integers"),
        (["--wlb-age-tolerance", "1.1"], "^--wlb-age-tolerance is 1.1; it must be from 0 to 1$"),
        (["--wlb-packings", "wlb"], "^--wlb-packings is no flag of ours"),
        (["--num-experts", "8"], "^--num-experts: mixture of experts cannot be simulated"),
        (["--num-layers", "2"], "no --hidden-size, --num-attention-heads: give the sizes of the model, or --model"),
        (
            ["--wlb-packing", "adaptive", "--wlb-max-delay-steps", "1"],
            "--wlb-max-delay-steps is 1; it must be from 12",
        ),
        (["--wlb-crossover", str(1 << 35), "--wlb-max-tokens", str(1 << 26)], "overflows 64 bits; lower one of them"),
    ],
)
def test_wrong_flags(source, tmp_path, capsys, flags, message):
    alone = "--num-layers" in flags
    match(refused(capsys, tmp_path, source, *(SIZES if alone else []), *flags, alone=alone), message)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--seq-length", "64"],
            "^no --global-batch-size; give the micro-batches of a step over all data-parallel ranks$",
        ),
        (["--global-batch-size", "4"], "^no --seq-length; give the context window in tokens$"),
        ([*SIZES, "--wlb-profile", "none"], "no profile 'none': give a JSON file or one of the shipped profiles"),
    ],
)
def test_what_is_missing(source, tmp_path, capsys, flags, message):
    match(refused(capsys, tmp_path, source, *flags, alone=True), message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, 2,\n oops]", r"lengths\.json, line 2, column 2: not JSON"),
        ("[1, -2]", r"lengths\.json, index 1: -2 trained tokens; a length must be from 0 to 67108864$"),
        ("[1, 2.0]", "index 1: 2.0 is not an integer; give trained tokens$"),
        ("[]", "holds no document; give at least one length$"),
    ],
)
def test_wrong_lengths(tmp_path, capsys, text, message):
    (tmp_path / "lengths.json").write_text(text)
    match(refused(capsys, tmp_path, str(tmp_path / "lengths.json"), "--wlb-packing", "wlb"), message)


def test_missing_lengths(tmp_path, capsys):
    message = refused(capsys, tmp_path, str(tmp_path / "no"), "--wlb-packing", "wlb")
    match(message, r"no\.idx does not exist; give as LENGTHS ")


@pytest.mark.parametrize(("module", "suffix", "policy"), [("pyarrow", "parquet", "wlb"), ("scipy", "json", "ilp")])
def test_a_missing_extra(source, tmp_path, capsys, monkeypatch, module, suffix, policy):
    path = write_parquet(tmp_path / "x.parquet", length=[1]) if suffix == "parquet" else source
    monkeypatch.setitem(sys.modules, module, None)
    message = refused(capsys, tmp_path, path, "--wlb-packing", policy)
    assert message == f"{module} is not installed; pip install 'megatron-wlb[analysis]'"


def test_wrong_outputs(source, tmp_path, capsys):
    message = refused(capsys, tmp_path, source, "--wlb-packing", "wlb", output=tmp_path / "no" / "plan")
    match(message, "--output .*plan: the folder .*no does not exist; create it or name another")
    match(refused(capsys, tmp_path, source, "--wlb-packing", "wlb", output=tmp_path), "Is a directory")


def test_a_failure_while_planning_leaves_the_former_plan(source, tmp_path, capsys, monkeypatch):
    output = tmp_path / "plan.jsonl"
    output.write_text("former")

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("megatron_wlb.cli.plan.metrics.measure", full)
    match(refused(capsys, tmp_path, source, "--wlb-packing", "wlb"), "No space left on device")
    assert output.read_text() == "former"


def test_a_link_stays_a_link_and_a_device_a_device(source, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "plan")
    text = plan(source, tmp_path / "link", "--wlb-packing", "wlb")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "plan").read_text() == text
    os.mkfifo(tmp_path / "pipe")
    reader = subprocess.Popen(["cat", tmp_path / "pipe"], stdout=subprocess.PIPE, text=True)
    assert main(["plan", source, *FLAGS, "--wlb-packing", "wlb", "--output", str(tmp_path / "pipe")]) == 0
    assert reader.communicate()[0] == text
    assert (tmp_path / "pipe").is_fifo()


def match(message, pattern):
    assert re.search(pattern, message), message


def command(*arguments, prelude="", **kwargs):
    """Run the command in a process of its own, after `prelude`."""
    code = f"import sys\n{prelude}\nfrom megatron_wlb.cli.main import main\nsys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=ROOT, check=False, **kwargs
    )


@pytest.mark.parametrize("policy", POLICIES)
def test_standard_input_and_output_where_torch_is_blocked(source, tmp_path, policy):
    prelude = "for name in ('torch', 'megatron', 'transformer_engine'): sys.modules[name] = None"
    arguments = ["plan", "-", *FLAGS, "--wlb-packing", policy, "--output", "-"]
    done = command(*arguments, prelude=prelude, input=json.dumps(make_lengths()))
    assert done.returncode == 0, done.stderr
    assert done.stdout == plan(source, tmp_path / "plan", "--wlb-packing", policy)
    assert done.stderr.count("\n") == 1  # no progress bar: this is not a terminal


def test_without_rich(source, tmp_path):
    arguments = ["plan", source, *FLAGS, "--wlb-packing", "wlb", "--output", "-"]
    done = command(*arguments, prelude="sys.modules['rich.console'] = None")
    assert (done.returncode, done.stdout) == (0, plan(source, tmp_path / "plan", "--wlb-packing", "wlb"))


def test_a_progress_bar_on_a_terminal(source, tmp_path):
    terminal, other_end = os.openpty()
    arguments = ["plan", source, *FLAGS, "--wlb-packing", "wlb", "--output", str(tmp_path / "plan")]
    code = "import sys; from megatron_wlb.cli.main import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", code, *arguments], stderr=other_end, cwd=ROOT, check=True)
    os.close(other_end)
    shown = os.read(terminal, 1 << 16).decode()
    os.close(terminal)
    assert done.returncode == 0
    assert "planning" in shown and "100%" in shown


def test_a_reader_that_goes_away(tmp_path):
    """As in `| head -n 1`: no traceback."""
    source = write_json(tmp_path, make_lengths(20_000))
    arguments = [sys.executable, "-m", "megatron_wlb", "plan", source, *FLAGS, "--wlb-packing", "wlb", "--output", "-"]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert json.loads(process.stdout.readline())["documents"] == 20_000
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait() == 1
    process.stderr.close()


def test_python_m_and_exit_code():
    arguments = [sys.executable, "-m", "megatron_wlb", "plan", "-", *FLAGS, "--wlb-packing", "wlb", "--output", "-"]
    done = subprocess.run(arguments, input="[1, 2", capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "megatron-wlb plan: error: standard input, line 1, column 6: not JSON: Expecting ',' delimiter; give an "
        "array of integers\n"
    )
