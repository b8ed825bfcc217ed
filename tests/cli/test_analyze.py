"""`megatron-wlb analyze`: its numbers by hand, its page, and what it refuses."""

import argparse
import base64
import json
import re
import struct
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from megatron_wlb.adapter.arguments import add_wlb_arguments, config_from_args
from megatron_wlb.cli.analyze.report import data_of, placed, schemes
from megatron_wlb.cli.main import main
from megatron_wlb.plan.step import shard_step
from megatron_wlb.plan.stream import shuffled
from tests.adapter.datasets import write_index
from tests.cli.analyses import (
    FFN,
    HEADS,
    HIDDEN,
    JOB,
    LARGE,
    LAYERS,
    MODEL,
    VOCABULARY,
    C,
    N,
    analyse,
    described,
    refused,
)

ROOT = Path(__file__).parents[2]


def order(lengths, seed=1234):
    """Documents of epoch after epoch as they come, pieces of at most a window."""
    epochs = [lengths[shuffled(np.arange(len(lengths)), len(lengths), (seed, 0, epoch))] for epoch in range(2)]
    pieces = []
    for length in np.concatenate(epochs).tolist():
        pieces += [C] * (length // C) + ([length % C] if length % C else [])
    return pieces


def windows(pieces):
    """Concatenated and cut at every multiple of the window: the way of Megatron."""
    out, current, room = [], [], C
    for piece in pieces:
        while piece:
            current.append(min(piece, room))
            piece, room = piece - current[-1], room - current[-1]
            if not room:
                out.append(current)
                current, room = [], C
    return out


def by_hand_us(micro_batches):
    """A step on one H100, from the constants of the shipped profile and those that the simulator states."""
    weights = HIDDEN * (4 * HIDDEN + 2 * FFN)
    time = 0.0
    for documents in micro_batches:
        tokens = sum(documents)
        tokens += -tokens % 2
        tiles = sum(sum(range(1, -(-d // 128) + 1)) for d in [*documents, *[1] * (tokens - sum(documents))])
        attention = 23.55 + HEADS * 0.0256 * tiles
        linear = 2 * weights * tokens / 600e6 + 2 * (14 * HIDDEN + 2 * FFN) * tokens / 2700e3
        logits = 2 * VOCABULARY * HIDDEN * tokens / 600e6 + 10 * VOCABULARY * tokens / 2700e3
        time += LAYERS * (3.5 * attention + 3 * linear) + 3 * logits
    return time + (LAYERS * weights + 2 * VOCABULARY * HIDDEN) * 30 / 2700e3


def imbalance(micro_batches, crossover):
    work = [sum(d * (d + crossover) for d in documents) for documents in micro_batches]
    return max(work) * N / sum(work)


def test_plain_and_ours_by_hand(tmp_path, lengths, data):
    """One GPU: the windows of plain Megatron cut by hand, the steps of ours from `megatron-wlb plan`."""
    found = analyse(tmp_path, JOB, "--data-path", data, "--steps 200")
    assert found["steps"] == {"warm_up": 30, "packed": 200, "simulated": 200}
    pieces = order(lengths)
    cut = windows(pieces)
    plain = [cut[N * i : N * (i + 1)] for i in range(30, 230)]

    (tmp_path / "lengths.json").write_text(json.dumps(pieces))
    crossover = str(found["job"]["crossover_tokens"])
    arguments = ["--global-batch-size", str(N), "--seq-length", str(C), "--wlb-crossover", crossover]
    arguments += ["--wlb-max-tokens", str(found["job"]["max_tokens"]), "--wlb-packing", "wlb", "--output"]
    assert main(["plan", str(tmp_path / "lengths.json"), *arguments, str(tmp_path / "plan")]) == 0
    steps = [json.loads(line) for line in (tmp_path / "plan").read_text().splitlines()[31:231]]
    ours = [[[d[2] for d in documents] for documents in step["micro_batches"]] for step in steps]

    per_token = {}
    for name, planned in (("plain", plain), ("ours", ours)):
        times = [by_hand_us(step) for step in planned]
        tokens = sum(sum(map(sum, step)) for step in planned)
        numbers = found["schemes"][name]
        assert numbers["step_ms"] == pytest.approx(np.mean(times) / 1e3)
        assert numbers["us_per_token"] == pytest.approx(sum(times) / tokens)
        kept = [imbalance(step, int(crossover)) for step in planned][20:-20]
        assert numbers["imbalance"]["work_mean"] == pytest.approx(np.mean(kept))
        assert numbers["imbalance"]["dp"] == numbers["imbalance"]["cp"] == 1
        per_token[name] = sum(times) / tokens
    assert found["schemes"]["ours"]["speedup"] == pytest.approx(per_token["plain"] / per_token["ours"])


def test_the_crossover_of_the_simulated_times_by_hand(tmp_path, capsys):
    """Whole tiles cost as many pairs as they hold, and half a tile more for every one."""
    documents = np.random.default_rng(0).lognormal(6, 1.2, 4000).astype(np.int64) // 128 * 128
    write_index(tmp_path / "tiles.idx", documents.clip(128, C) + 1)
    line = f"{JOB} --steps 4 --data-path {tmp_path / 'tiles'}"
    weights = HIDDEN * (4 * HIDDEN + 2 * FFN)
    linear = 3 * (2 * weights / 600e6 + 2 * (14 * HIDDEN + 2 * FFN) / 2700e3)
    tile = 3.5 * HEADS * 0.0256
    by_times = (linear + tile / 2 / 128) / (tile / 2 / 128**2)
    found = analyse(tmp_path, line)
    crossover = found["job"]["crossover_tokens"]
    assert crossover == pytest.approx(by_times, rel=1e-3)
    assert f"--wlb-crossover {crossover}" in found["flags"]
    assert "by FLOPs alone, as training has it by default, it is 6656." in capsys.readouterr().out
    assert analyse(tmp_path, line, "--wlb-crossover 900")["job"]["crossover_tokens"] == 900


def test_without_a_validation_split_there_is_no_evaluation(tmp_path, data):
    """Which training refuses, unless told not to evaluate."""
    for words, added in (("--split 1", 1), ("--split 99,1,0", 0), ("--split 1 --eval-iters 10", 1)):
        flags = analyse(tmp_path, JOB.replace("--split 1", words), "--steps 4 --data-path", data)["flags"]
        assert flags.endswith("--eval-iters 0") == added


def test_more_memory_than_there_is(tmp_path, data, capsys):
    for layers, named in ((LAYERS, 0), (4000, 1)):
        analyse(
            tmp_path, JOB.replace(f"--num-layers {LAYERS}", f"--num-layers {layers}"), "--steps 4 --data-path", data
        )
        assert capsys.readouterr().out.count("alone are more than the 80 GiB") == named


def test_nothing_to_gain(tmp_path, capsys):
    """Documents of a full window each: all schemes are the same, and nothing is attainable."""
    write_index(tmp_path / "full.idx", np.full(300, C + 1))
    found = analyse(
        tmp_path, JOB, "--steps 4 --num-gpus 2 --wlb-cp-head-groups 1 --data-path", str(tmp_path / "full.idx")
    )
    for numbers in found["schemes"].values():
        assert numbers["speedup"] == pytest.approx(1) and numbers["of_attainable"] is None
        assert numbers["imbalance"] == pytest.approx({"pp": 1, "dp": 1, "cp": 1, "work_mean": 1, "work_p95": 1})
        assert numbers["late_steps"] == numbers["token_cv"] == 0
    assert found["limit"]["speedup"] == pytest.approx(1)
    assert "nothing to gain" in capsys.readouterr().out
    shares = found["data"]["shares"]
    assert found["data"]["up_to"][-1] == C
    assert [values[-1] for values in shares.values()] == [1, 1, 1]


def test_other_numbers_of_head_groups(tmp_path, capsys):
    """Every step is the same, so ratios are those of whole analyses; where ours loses, no flags are to be added."""
    write_index(tmp_path / "full.idx", np.full(300, 16 * C + 1))
    model = (
        "--num-layers 2 --hidden-size 4096 --num-attention-heads 32 --tensor-model-parallel-size 4 --vocab-size 1024"
    )
    words = f"{model} --context-parallel-size 8 --seq-length {16 * C} --global-batch-size 2 --split 1 --steps 2"
    words = f"{words} --data-path {tmp_path / 'full'} --sft"
    found = analyse(tmp_path, words)["schemes"]["ours"]
    printed = capsys.readouterr().out
    assert set(found["over_head_groups"]) == {"1", "4", "8"}
    for groups, gain in found["over_head_groups"].items():
        other = analyse(tmp_path, words, f"--wlb-cp-head-groups {groups}")["schemes"]["ours"]
        assert gain == pytest.approx(found["step_ms"] / other["step_ms"])
        assert other["over_head_groups"]["2"] == pytest.approx(1 / gain)
    assert found["over_head_groups"]["8"] > 1.02 > 1 > found["speedup"]
    speedup = found["over_head_groups"]["8"] * found["speedup"]
    assert f"With --wlb-cp-head-groups 8 instead of 2 it would be {speedup:.2f} times" in printed
    assert "Add to the launch line:" not in printed and "Take out:" not in printed
    assert "Simulated was --wlb --calculate-per-token-loss" in printed and "refuses them: --sft." in printed


def test_levels_of_imbalance(tmp_path, lengths):
    """In a layout that has them all: balancing lowers each, and the speed-up lies between none and the limit."""
    write_index(tmp_path / "long.idx", 8 * lengths + 1)
    found = analyse(tmp_path, LARGE, "--steps 40 --data-path", str(tmp_path / "long"))
    assert [found["job"][name] for name in ("tp", "cp", "pp", "dp")] == [2, 2, 2, 2]
    assert found["job"]["model"]["num_query_groups"] == 1
    plain, ours = (found["schemes"][name] for name in ("plain", "ours"))
    for level in ("pp", "dp", "cp"):
        assert plain["imbalance"][level] > ours["imbalance"][level] >= 1
    assert 1 < ours["speedup"] < 1.1 * found["limit"]["speedup"]
    assert ours["of_attainable"] == pytest.approx((ours["speedup"] - 1) / (found["limit"]["speedup"] - 1))
    assert plain["max_delay_steps"] <= 1 and ours["max_delay_steps"] <= 30
    assert plain["token_cv"] == 0 < found["schemes"]["paper"]["token_cv"]
    assert ours["activation_gib"] / plain["activation_gib"] == pytest.approx(1.25)
    for numbers in (plain, ours):
        parts = dict(numbers["typical_step_ms"])
        assert sum(parts.values()) == pytest.approx(2 * parts["step"])
    best = [row for row in found["front"] if row["best"]]
    assert 0 < len(best) < len(found["front"])


@pytest.mark.parametrize(
    ("flags", "unit"),
    [
        ("", 2),
        ("--context-parallel-size 2 --tensor-model-parallel-size 4", 8),
        ("--fp8-format hybrid", 16),
        ("--fp8-recipe mxfp8", 2),
        ("--fp8-format hybrid --fp8-recipe mxfp8 --context-parallel-size 2", 64),
        ("--fp8-format hybrid --context-parallel-size 2 --tensor-model-parallel-size 4", 128),
        ("--fp4-format e2m1 --fp4-recipe nvfp4 --context-parallel-size 2", 256),
    ],
)
def test_micro_batches_are_aligned_for_ranks_and_kernels(flags, unit, data):
    """As in tests/adapter/test_arguments.py, but that sequence parallelism is always on."""
    setup, _ = described(JOB, flags, "--data-path", data)
    assert setup.unit_tokens == unit
    for scheme in schemes(setup):
        planned = shard_step([np.array([777, 224])] * N, placed(setup, scheme)[1])
        assert {int(shards.lengths.sum()) for rank in planned for shards in rank} == {-(-1001 // unit) * unit}


def test_blend_and_split(tmp_path, data, lengths):
    other = str(tmp_path / "other")
    write_index(tmp_path / "other.idx", np.full(100, 65))
    words = [MODEL, f"--seq-length {C} --global-batch-size {N} --split 80,10,10 --data-path"]
    setup, job = described(*words, f"0.25 {data} 0.75 {other}.idx")
    assert job["data_path"] == [data, f"{other}.idx"]
    assert [source.weight for source in setup.sources] == [0.25, 0.75]
    assert [source.pairs.tolist() for source in setup.sources] == [lengths[:6400].tolist(), [64] * 80]
    found = data_of(setup)
    assert (found["documents"], found["tokens"]) == (6480, lengths[:6400].sum() + 80 * 64)
    by_size, _ = described(*words, data, other)  # as upstream without weights
    assert [source.weight for source in by_size.sources] == [lengths[:6400].sum(), 80 * 64]
    whole, _ = described(MODEL, f"--seq-length {C} --data-path", data)  # upstream's default split
    assert len(whole.sources[0].pairs) == 7752


def test_blends_as_training_reads_them(tmp_path, data, lengths):
    """From a file, which --split divides, and by split, which it does not; --data-path counts before them."""
    (tmp_path / "blend.txt").write_text(f"1.0\n{data}\n")
    for name, blend in (("words", [1, data]), ("text", f"1 {data}")):
        (tmp_path / name).write_text(json.dumps({"train": blend, "valid": None, "test": None}))
    for flag, documents in (
        (f"--data-args-path {tmp_path / 'blend.txt'}", 4000),
        (f"--per-split-data-args-path {tmp_path / 'words'}", 8000),
        (f"--per-split-data-args-path {tmp_path / 'text'}", 8000),
        (f"--train-data-path {data} --valid-data-path {data}", 8000),
        (f"--train-data-path 1 {data} --data-path {data}", 4000),
    ):
        setup, job = described(MODEL, f"--seq-length {C} --split 50,50,0", flag)
        assert job["data_path"] == [data], flag
        assert [source.pairs.tolist() for source in setup.sources] == [lengths[:documents].tolist()], flag


def test_shares_of_work_by_hand(data, lengths):
    """Documents over the window count window by window."""
    setup, job = described(JOB, "--data-path", data)
    crossover, shares = job["crossover_tokens"], data_of(setup)["shares"]
    work = [d * crossover + (d // C) * C * C + (d % C) ** 2 for d in lengths.tolist()]
    for name, weights in (("documents", [1] * len(work)), ("tokens", lengths.tolist()), ("work", work)):
        over = sum(w for d, w in zip(lengths.tolist(), weights, strict=True) if 2048 < d <= 4096)
        assert shares[name][12] == pytest.approx(over / sum(weights))


def test_memory_that_only_a_gpu_knows(data):
    setup, job = described(JOB, "--data-path", data, "--wlb-max-tokens auto")
    assert job["max_tokens"] == 1.25 * C
    assert any("an S_max of 1.25 windows" in note for note in setup.notes)


def test_saved_keys_leave_less_memory_for_tokens(data):
    words = JOB, "--context-parallel-size 4 --wlb-memory-budget 1 --wlb-max-tokens auto --data-path", data
    plain, saved = (described(*words, flag)[1]["max_tokens"] for flag in ("", "--wlb-save-gathered-kv"))
    assert C <= saved < plain


def test_sizes_beside_a_known_model(data):
    words = f"--seq-length 4096 --tensor-model-parallel-size 8 --data-path {data}"
    known = described("--model llama2-70b", words)[1]["model"]
    assert (known["num_layers"], known["num_query_groups"]) == (80, 8)
    changed = described("--model llama2-70b --num-layers 40", words)[1]["model"]
    assert changed == known | {"num_layers": 40}
    edges = "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"
    setup, _ = described(f"--model llama3-405b --pipeline-model-parallel-size 16 {edges}", words)
    assert setup.job.layers().sum() == 126 and setup.job.layers()[0, 0] == 7
    # One key head a rank travels in one piece, however many groups are asked for.
    assert setup.job.cp_head_groups == 1


def test_flags_to_paste_are_those_that_were_simulated(tmp_path, data):
    ours = "--wlb-packing wlb --wlb-outlier-thresholds 500,2000 --wlb-max-tokens 6144 --wlb-cp-sharding hybrid"
    found = analyse(tmp_path, JOB, "--data-path", data, ours, "--steps 2")
    parser = add_wlb_arguments(argparse.ArgumentParser())
    parsed, _ = parser.parse_known_args(found["flags"].split())
    config = config_from_args(parsed)
    assert (config.packing, config.outlier_thresholds, config.max_tokens) == ("wlb", (500, 2000), 6144)
    assert config.cp_sharding == "hybrid"
    assert found["schemes"]["ours"]["packing"] == "wlb"
    assert found["schemes"]["ours"]["longest_micro_batch_tokens"] == 6144
    # Algorithm 1 with the same thresholds in both.
    assert found["schemes"]["ours"]["imbalance"]["work_mean"] == found["schemes"]["paper"]["imbalance"]["work_mean"]


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.images, self.titles, self.text = [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        if tag == "img":
            self.images.append(dict(attrs)["src"])
        assert tag not in ("script", "link", "iframe")

    def handle_data(self, data):
        self.text += data


@pytest.mark.parametrize(("layout", "images"), [("", 4), ("--context-parallel-size 2", 5)])
def test_page(tmp_path, data, layout, images):
    """Stands alone: every picture is in it, and whatever the table says."""
    target = tmp_path / "report.html"
    found = analyse(tmp_path, JOB, layout, "--data-path", data, "--steps 2 --lr 3 --html", str(target))
    text = target.read_text()
    page = Page(text)
    assert len(page.images) == images
    for source in page.images:
        head, _, image = source.partition(",")
        assert head == "data:image/svg+xml;base64"
        assert ElementTree.fromstring(base64.b64decode(image)).tag.endswith("svg")
    assert "http" not in re.sub('base64,[^"]*', "", text)
    assert found["flags"] in page.text
    assert f"{found['schemes']['ours']['speedup']:.3f}" in page.text
    assert "h100-fa2" in page.text and "median 9.7%" in page.text and "--lr" in page.text
    assert ("CP ranks: slowest / mean" in page.text) == bool(layout)


def test_json_on_standard_output(data, capsys):
    assert main(["analyze", *JOB.split(), "--data-path", data, "--steps", "2", "--json", "-"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["prediction"] is True
    assert "This is a prediction" in printed.err


def test_without_torch(data):
    code = (
        "import sys\n"
        "for name in ('torch', 'megatron'): sys.modules[name] = None\n"
        "from megatron_wlb.cli.main import main; sys.exit(main())"
    )
    arguments = ["analyze", *JOB.split(), "--fp8-format", "hybrid", "--data-path", data, "--steps", "2"]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert "--wlb-packing wlb" in done.stdout


def header(sequences, boundaries):
    return b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, sequences, boundaries)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"corpus.idx does not exist"),
        (b"", r"the file is truncated"),
        (b"parquet!!" + bytes(40), r"is not a Megatron .idx file"),
        (header(0, 1) + bytes(8), r"corpus.idx holds no document"),
        (header(1, 2) + struct.pack("<iqqq", 1, 0, 0, 1), r"no document of at least 2 tokens"),
    ],
)
def test_what_is_no_dataset(tmp_path, capsys, content, message):
    if content is not None:
        (tmp_path / "corpus.idx").write_bytes(content)
    refused(capsys, f"{JOB} --data-path {tmp_path / 'corpus'}", message)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--num-gpus 6 --tensor-model-parallel-size 4", r"6 GPUs are no multiple of .* 4 x 1 x 1 = 4"),
        ("--nproc-per-node 3 --context-parallel-size 2", r"3 GPUs are no multiple"),
        ("--nproc-per-node gpu", r"--nproc-per-node gpu is not a number; .* --num-gpus"),
        ("--nproc-per-node 8 --nnodes 1:4", r"--nnodes 1:4 is not a number"),
        ("--nnodes 2", r"--nnodes without --nproc-per-node"),
        ("--num-layers 5 --pipeline-model-parallel-size 2", r"5 layers do not divide over 2 stages"),
        ("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2", r"do not divide 2 layers"),
        ("--tensor-model-parallel-size 8", r"4 attention heads do not divide over 8 ranks"),
        ("--hidden-size 510", r"--num-attention-heads 4 does not divide --hidden-size 510"),
        ("--seq-length 4098 --context-parallel-size 4", r"--seq-length 4098 cannot be shared .* multiple of 8"),
        ("--num-gpus 3", r"4 micro-batches a step \(--global-batch-size\) cannot be shared by 3 data-parallel ranks"),
        ("--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --num-layers 8 --num-gpus 8",
         r"groups of 2 micro-batches"),
        ("--micro-batch-size 2", r"--micro-batch-size is 2; .* give 1"),
        ("--model gpt5", r"argument --model: invalid choice: 'gpt5'"),
        ("--num-layers $LAYERS", r"argument --num-layers: '\$LAYERS' must be an integer"),
        ("--account-for-loss-in-pipeline-split", r"give both or none"),
        ("--num-experts 8", r"--num-experts: mixture of experts cannot be simulated"),
        ("--wlb-packings adaptive", r"--wlb-packings is no flag of ours"),
        ("--wlb-packing best", r"--wlb-packing is 'best'; choose one of"),
        ("--wlb-max-tokens 100", r"--wlb-max-tokens 100 is under --seq-length 4096"),
        ("--wlb-memory-budget 0.001", r"micro-batches of at most \d+ tokens fit into memory"),
        ("--wlb-profile flops", r"profile flops counts attended pairs"),
        ("--wlb-profile none.json", r"no profile 'none.json'"),
        ("--split 0,1", r"--split 0,1: give shares"),
        ("--html - --json -", r"would be mixed on standard output"),
        ("--launch no/such/file", r"No such file"),
        ("--html no/such/report.html", r"--html no/such/report.html: the folder .* does not exist"),
    ],
)  # fmt: skip
def test_errors(data, capsys, words, message):
    refused(capsys, f"{JOB} --data-path {data} {words}", message)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (JOB, r"no --data-path; give"),
        (f"{MODEL} --data-path DATA", r"no --seq-length; give"),
        ("--data-path DATA --seq-length 64 --num-layers 2", r"no --hidden-size, --num-attention-heads: give the sizes"),
        (f"{JOB} --data-path -1 DATA", r"weights must be over 0"),
    ],
)
def test_what_is_missing(data, capsys, words, message):
    refused(capsys, words.replace("DATA", data), message)
