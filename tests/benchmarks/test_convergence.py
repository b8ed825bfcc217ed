"""One process that adds up N micro-batches trains as Megatron on 4 processes; runs go on after a break; the report."""

import copy
import json
import re
import subprocess
import sys
import zlib
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from benchmarks import convergence, convergence_corpus, convergence_report
from benchmarks.convergence import SCALES, VARIANTS, Runs, Trainer, learning_rate, packer_of, validation_packing
from benchmarks.convergence_model import Corpus, Shape, accumulate
from megatron_wlb.job import Parallel
from megatron_wlb.plan.dataset import read_index
from tests.adapter.conftest import dataset  # noqa: F401  # also makes this process the warm parent of forked worlds
from tests.adapter.training import MODEL, relative_error, train

CPU = torch.device("cpu")
CP2_PP2 = "--context-parallel-size 2 --pipeline-model-parallel-size 2"
DP2_PP2 = "--pipeline-model-parallel-size 2"
SEED = int(MODEL[MODEL.index("--seed") + 1])
LEARNING_RATE = float(MODEL[MODEL.index("--lr") + 1])
STEPS = 3

# The model and the data of tests/adapter/training.py, with as many key heads as query heads.
TINY = replace(
    SCALES["quick"],
    shape=Shape(num_layers=4, hidden_size=64, ffn_hidden_size=96, num_heads=8, vocab_size=256),
    context_length=256,
    crossover_over_window=0.5,
)
FLAGS = "--num-query-groups 8 --wlb-crossover 128 --wlb-outlier-thresholds 64,128 --wlb-max-tokens 320"


def full(*values):
    return pytest.param(*values, marks=pytest.mark.full)


@pytest.mark.parametrize(
    ("variant", "flags"),
    [
        full("original", f"{CP2_PP2} --wlb-packing original"),
        ("wlb", f"{CP2_PP2} --wlb-packing wlb"),
        full("fixed-8", f"{CP2_PP2} --wlb-packing fixed --wlb-global-batches 8"),
        ("adaptive-constant-tokens", f"{DP2_PP2} --wlb-packing adaptive --wlb-micro-batches 8"),
    ],
)
def test_equals_megatron_on_four_processes(variant, flags, dataset, tmp_path, monkeypatch):  # noqa: F811
    """The losses and all gradients of three steps, of the weights that two updates have led to."""
    steps = f"--train-iters {STEPS} --weight-decay 0 --sgd-momentum 0.9"
    log = tmp_path / "log.jsonl"
    megatron = train(4, dataset, *FLAGS.split(), *flags.split(), *steps.split(), log=log)
    index = read_index(dataset)
    corpus = Corpus(np.fromfile(f"{dataset}.bin", np.int32), index.tokens)
    model = Trainer(TINY, corpus, 0, CPU).model
    set_parameters(model)
    if DP2_PP2 in flags:  # which adaptive packing goes by
        job = replace(convergence.job_of(variant, TINY), parallel=Parallel(dp=2, pp=2))
        monkeypatch.setattr(convergence, "job_of", lambda *_: job)
    packer = packer_of(variant, TINY, corpus.lengths[: round(0.9 * len(index))], SEED)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
    for logged, gradients in zip(megatron["log"], megatron["grads"], strict=True):
        packing = packer.next().packing
        tokens = int(packing.documents["length"].sum())
        optimizer.zero_grad()
        loss = accumulate(model, corpus, packing, CPU)
        assert tokens == logged["tokens"]
        assert loss == pytest.approx(logged["loss"], rel=1e-5)
        assert relative_error({name_of(n): p.grad for n, p in model.named_parameters()}, gradients) <= 1e-5
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # upstream's default
        optimizer.step()


def name_of(name):
    """Megatron's name of a parameter, as tests/adapter/training.py has it."""
    if match := re.match(r"layers\.(\d+)\.(.*)", name):
        block = {"linear_qkv": "self_attention.", "linear_proj": "self_attention.", "linear_fc": "mlp."}
        prefix = next((to for begin, to in block.items() if match[2].startswith(begin)), "")
        return f"layer{int(match[1]) + 1}.{prefix}{match[2]}"
    return {
        "embedding.weight": "embedding.word_embeddings.weight",
        "final_layernorm.weight": "decoder.final_layernorm.weight",
    }.get(name, name)


def set_parameters(model):
    """As tests/adapter/training.py does."""
    for name, parameter in model.named_parameters():
        generator = torch.Generator().manual_seed(zlib.crc32(name_of(name).encode()))
        scale, shift = (0.1, 1.0) if parameter.dim() == 1 else (0.05, 0.0)
        parameter.data = torch.randn(parameter.shape, generator=generator) * scale + shift


@pytest.fixture(scope="module")
def data():
    """Documents of 2 to 599 tokens, a tenth of them held out."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(4, 1.2, 400), 2, 599).astype(np.int64)
    tokens = (TINY.shape.vocab_size * rng.random(lengths.sum()) ** 3).astype(np.uint16)  # the first are frequent
    return {"tokens": tokens, "lengths": lengths, "held_out": np.arange(400) % 10 == 3, "summary": {"digest": "-"}}


SHORT = replace(
    TINY,
    shape=Shape(num_layers=1, hidden_size=16, ffn_hidden_size=16, num_heads=2, vocab_size=256),
    start_batches=4,
    global_batches=40,
    validation_tokens=1000,
)


def run(variant, seed, data):
    return convergence.run(variant, seed, SHORT, data, CPU, convergence.start(seed, SHORT, data, CPU))


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_trains_the_same_tokens_as_every_other(variant, data):
    log = run(variant, 1, data)
    *_, before, tokens = np.cumsum(log["steps"]["tokens"])
    assert before < SHORT.tokens <= tokens
    assert len(log["validation"]) == convergence.MEASUREMENTS + 1
    assert log["validation"][-1]["tokens"] == tokens
    assert log["validation"][-1]["all"] < log["validation"][0]["all"]
    assert sum(log["tokens_by_delay"].values()) == tokens == log["packing"]["tokens"]
    assert log == json.loads(json.dumps(log))


def test_a_seed_draws_weights_and_order(data):
    first, again, other = (run("original", seed, data) for seed in (1, 1, 2))
    assert first["steps"] == again["steps"]
    assert first["validation"][0] != other["validation"][0]
    assert first["steps"]["long_tokens"] != other["steps"]["long_tokens"]


def test_held_out_documents_are_never_trained(data):
    train, held_out = (convergence.split(data, held_out=held) for held in (False, True))
    assert len(train.lengths) == 360 and len(held_out.lengths) == 40
    rows = validation_packing(held_out, replace(SHORT, validation_tokens=1 << 20)).documents
    assert rows["length"].sum() == held_out.lengths.sum()
    for corpus, held in ((train, False), (held_out, True)):
        begins = np.cumsum(data["lengths"]) - data["lengths"]
        for document, place in enumerate(np.flatnonzero(data["held_out"] == held)):
            row = np.array([(0, 0, document, 0, corpus.lengths[document], 0)], rows.dtype)
            batch = corpus.micro_batch(row, CPU)
            whole = data["tokens"][begins[place] :][: data["lengths"][place]].tolist()
            assert batch.tokens.tolist() == whole[:-1] and batch.labels.tolist() == whole[1:]


def test_documents_of_a_micro_batch_do_not_see_each_other(data):
    corpus = convergence.split(data, held_out=False)
    model = Trainer(SHORT, corpus, 1, CPU).model
    packing = packer_of("wlb", SHORT, corpus.lengths, 1).next().packing
    rows = max((packing.micro_batch(i) for i in range(len(packing))), key=len)
    assert len(rows) > 2
    together = model(corpus.micro_batch(rows, CPU))
    alone = torch.cat([model(corpus.micro_batch(rows[i : i + 1], CPU)) for i in range(len(rows))])
    torch.testing.assert_close(together, alone)


def test_learning_rate_goes_by_tokens():
    assert learning_rate(-TINY.start_tokens, TINY) == 0
    assert learning_rate(-0.75 * TINY.start_tokens, TINY) == pytest.approx(TINY.learning_rate / 2)
    for tokens in (-0.5 * TINY.start_tokens, -1, 0):
        assert learning_rate(tokens, TINY) == pytest.approx(TINY.learning_rate)
    assert learning_rate(0.5 * TINY.tokens, TINY) == pytest.approx(TINY.learning_rate / 2)
    assert learning_rate(1.02 * TINY.tokens, TINY) == 0


def test_all_variants_of_a_seed_go_on_from_the_same_model(data):
    started = convergence.start(1, SHORT, data, CPU)
    assert started["tokens"] == 0
    began = [run(variant, 1, data)["validation"][0] for variant in ("original", "wlb")]
    assert began[0] == began[1]
    # The optimizer goes on, too: one step more of either trainer is the same.
    corpus = convergence.split(data, held_out=False)
    packer = packer_of("original", SHORT, corpus.lengths, 1)
    steps = [packer.next().packing for _ in range(SHORT.start_batches + 1)]
    whole, resumed = Trainer(SHORT, corpus, 1, CPU), Trainer(SHORT, corpus, 2, CPU)
    resumed.load(started)
    for packing in steps[:-1]:
        whole.step(packing)
    assert whole.step(steps[-1]) == resumed.step(steps[-1])
    for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_finished_runs_are_kept_and_others_done(data, tmp_path, monkeypatch):
    runs = Runs(scale=SHORT, corpus=tmp_path / "corpus.npz", device=CPU, output=tmp_path)
    monkeypatch.setattr(Runs, "data", lambda runs: data)
    wanted = convergence.common(SHORT, data, CPU)
    runs.start_one(1)
    begin = runs.start_path(1).stat().st_mtime_ns
    runs.start_one(1)
    assert runs.start_path(1).stat().st_mtime_ns == begin
    assert not runs.is_finished("original", 1, wanted)
    with monkeypatch.context() as interrupted:
        interrupted.setattr(Trainer, "step", lambda trainer, packing: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            runs.run_one("original", 1)
    assert not runs.is_finished("original", 1, wanted)
    assert runs.run_one("original", 1).startswith("original, seed 1: validation loss")
    assert runs.is_finished("original", 1, wanted)
    with pytest.raises(ValueError, match="original-1.json is of another scale"):
        runs.is_finished("original", 1, convergence.common(replace(SHORT, learning_rate=1.0), data, CPU))


def test_corpus_is_made_once_and_split_by_name(tmp_path, monkeypatch):
    files = []
    for i in range(60):
        path = tmp_path / f"{i}.py"
        path.write_text(f"def function_{i % 50}(argument):\n    return argument + {i % 50}\n" * (1 + i % 50))
        files.append((f"root/{i}.py", path))
    monkeypatch.setattr(convergence_corpus, "_files", lambda: files)
    settings = {"vocab_size": 300, "pivot_bytes": 1 << 20, "held_out_share": 0.3}
    made = convergence_corpus.load(tmp_path / "corpus.npz", **settings)
    assert len(made["lengths"]) == 50  # ten have the same content as another
    assert made["lengths"].sum() == len(made["tokens"])
    assert Counter(made["tokens"].tolist())[299] == 50  # ends of documents
    monkeypatch.setattr(convergence_corpus, "_files", lambda: files[::-1])
    again = convergence_corpus.load(tmp_path / "corpus.npz", **settings)
    assert again["summary"] == made["summary"] and (again["tokens"] == made["tokens"]).all()
    fewer = convergence_corpus.load(tmp_path / "corpus.npz", **{**settings, "pivot_bytes": 1000})
    assert 0 < len(fewer["lengths"]) < 50


@pytest.fixture
def logs(data):
    """Three seeds of three variants; wlb loses 1 % on average, fixed-8 something between -1 and 1 %."""
    log = run("original", 1, data)
    changes = {"original": (0, 0, 0), "wlb": (0.9, 1.0, 1.1), "fixed-8": (-1, 0.2, 1)}
    made = []
    for variant, percents in changes.items():
        for seed, percent in enumerate(percents, 1):
            copied = copy.deepcopy(log) | {"variant": variant, "seed": seed}
            copied["validation"][-1]["all"] = (5 + seed / 10) * (1 + percent / 100)
            made.append(copied)
    return made


def test_report_compares_by_seed(logs):
    rows = {row["variant"]: row for row in convergence_report.compare(logs)}
    assert rows["original"]["difference_percent"] is None
    assert rows["wlb"]["difference_of_seeds"] == pytest.approx([0.9, 1.0, 1.1])
    low, high = stats.ttest_1samp([0.9, 1.0, 1.1], 0).confidence_interval(0.95)
    mean, half = rows["wlb"]["difference_percent"], rows["wlb"]["difference_half_width"]
    assert (mean - half, mean + half) == pytest.approx((low, high))
    worse, unseen = convergence_report.verdicts([rows["wlb"], rows["fixed-8"]])
    assert "worse: +1.00 % of the loss" in worse and "no difference is seen: +0.07 %" in unseen
    assert [goal.holds for goal in convergence_report.goals(list(rows.values()))] == [False]


def test_report_of_the_runs_so_far(logs):
    rows = convergence_report.compare([log for log in logs if log["seed"] == 1 and log["variant"] != "fixed-8"])
    assert rows[1]["difference_percent"] == pytest.approx(0.9) and rows[1]["difference_half_width"] is None
    assert "no interval yet" in convergence_report.verdicts(rows)[0]
    assert convergence_report.goals(rows) == []
    rows = convergence_report.compare(logs[3:])  # without the baseline
    assert [row["difference_percent"] for row in rows] == [None, None]
    convergence_report.show(rows)


def test_report_is_written(logs, tmp_path, monkeypatch):
    monkeypatch.setattr(convergence_report.results, "DOCS", tmp_path)
    monkeypatch.setattr(convergence_report.results, "FOLDER", tmp_path)
    size = {"documents": 1, "tokens": 1, "p50": 1, "p90": 1, "longest": 1}
    for log in logs:
        log["scale"] = log["scale"] | {"name": "cpu"}
        log["corpus"] = {"train": size, "held_out": size, "digest": "-"}
    assert convergence_report.write(logs) == [tmp_path / "convergence.json", tmp_path / "convergence.png"]
    assert (tmp_path / "convergence.png").stat().st_size
    assert "| `wlb` | 3 |" in convergence_report.page(json.loads((tmp_path / "convergence.json").read_text()))


def test_report_refuses_runs_of_other_settings(logs, tmp_path):
    with pytest.raises(ValueError, match="no finished run"):
        convergence_report.read(tmp_path)
    logs[1]["corpus"] = {"digest": "another"}
    for log in logs:
        (tmp_path / f"{log['variant']}-{log['seed']}.json").write_text(json.dumps(log))
    with pytest.raises(ValueError, match="differ in their corpus"):
        convergence_report.read(tmp_path)


@pytest.mark.full
def test_quick_version(tmp_path):
    """Everything from text to table."""
    command = [sys.executable, "-m", "benchmarks.convergence", "--quick", "--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    logs = convergence_report.read(tmp_path)
    assert {(log["variant"], log["seed"]) for log in logs} == {(v, s) for v in VARIANTS for s in (1, 2, 3)}
    for log in logs:
        assert log["validation"][0]["all"] < np.log(SCALES["quick"].shape.vocab_size)
        assert log["validation"][-1]["all"] < 0.95 * log["validation"][0]["all"]
    assert "adaptive-constant-tokens" in done.stdout
