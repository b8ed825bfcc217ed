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
from benchmarks.convergence_displacement import displacement
from benchmarks.convergence_model import Corpus, Shape, accumulate
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
FLAGS = "--num-query-groups 8 --wlb-crossover 128 --wlb-max-tokens 320"


def full(*values):
    return pytest.param(*values, marks=pytest.mark.full)


@pytest.mark.parametrize(
    ("variant", "flags"),
    [
        full("original", f"{CP2_PP2} --wlb-packing original"),
        ("wlb", f"{CP2_PP2} --wlb-packing wlb --wlb-outlier-thresholds 128,192"),
        full("fixed-8", f"{CP2_PP2} --wlb-packing fixed --wlb-global-batches 8"),
        full("adaptive", f"{DP2_PP2} --wlb-packing adaptive --wlb-micro-batches 8"),
        ("adaptive-2N", f"{DP2_PP2} --wlb-packing adaptive --wlb-micro-batches 16"),
    ],
)
def test_equals_megatron_on_four_processes(variant, flags, dataset, tmp_path):  # noqa: F811
    """The losses and all gradients of three steps, of the weights that two updates have led to."""
    steps = f"--train-iters {STEPS} --weight-decay 0 --sgd-momentum 0.9"
    log = tmp_path / "log.jsonl"
    megatron = train(4, dataset, *FLAGS.split(), *flags.split(), *steps.split(), log=log)
    index = read_index(dataset)
    corpus = Corpus(np.fromfile(f"{dataset}.bin", np.int32), index.tokens)
    model = Trainer(TINY, corpus, 0, CPU).model
    set_parameters(model)
    scale = replace(TINY, dp=2, pp=2)  # adaptive packing goes by the layout, the others do not
    packer = packer_of(variant, scale, corpus.lengths[: round(0.9 * len(index))], SEED)
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
    global_batches=20,
    validation_tokens=1000,
)


@pytest.fixture(scope="module")
def started(data):
    return convergence.start(1, SHORT, data, CPU)


@pytest.fixture
def begun(started):
    """The start of seed 1; who loads it trains on in its tensors."""
    return copy.deepcopy(started)


@pytest.fixture(scope="module")
def original(data, started):
    """The log of seed 1 in the original order."""
    return convergence.run("original", 1, SHORT, data, CPU, copy.deepcopy(started))


def run(variant, seed, data):
    return convergence.run(variant, seed, SHORT, data, CPU, convergence.start(seed, SHORT, data, CPU))


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_trains_the_same_tokens_as_every_other(variant, data, begun, original):
    log = original if variant == "original" else convergence.run(variant, 1, SHORT, data, CPU, begun)
    *_, before, tokens = np.cumsum(log["steps"]["tokens"])
    assert before < SHORT.tokens <= tokens
    assert len(log["validation"]) == convergence.MEASUREMENTS + 1
    assert log["validation"][-1]["tokens"] == tokens
    assert log["validation"][-1]["all"] < log["validation"][0]["all"]
    assert sum(log["tokens_by_delay"].values()) == tokens == log["packing"]["tokens"]
    assert log == json.loads(json.dumps(log))
    assert log["validation"][0] == original["validation"][0]
    if variant == "original-shuffled":
        assert log["steps"]["long_tokens"] != original["steps"]["long_tokens"]


def test_a_seed_draws_weights_and_order(data, original):
    first, (again, other) = original, (run("original", seed, data) for seed in (1, 2))
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
    assert len(rows) > 1
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


def test_the_optimizer_goes_on_after_the_start(data, begun):
    """One step more of either trainer is the same."""
    assert begun["tokens"] == 0
    corpus = convergence.split(data, held_out=False)
    packer = packer_of("original", SHORT, corpus.lengths, 1)
    steps = [packer.next().packing for _ in range(SHORT.start_batches + 1)]
    whole, resumed = Trainer(SHORT, corpus, 1, CPU), Trainer(SHORT, corpus, 2, CPU)
    resumed.load(begun)
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


def test_corpus_is_of_pinned_versions(tmp_path, monkeypatch):
    names = [name for name, path in convergence_corpus._files() if path.stat().st_size]
    assert len(names) > 1000 and len(set(names)) == len(names)
    pinned = convergence_corpus.CONSTRAINTS.read_text()
    monkeypatch.setattr(convergence_corpus, "CONSTRAINTS", tmp_path / "constraints.txt")
    convergence_corpus.CONSTRAINTS.write_text(re.sub("numpy==.*", "numpy==1.0", pinned))
    with pytest.raises(ValueError, match=r"the text is of numpy 1\.0, which is .* here; install constraints\.txt"):
        list(convergence_corpus._files())


def test_delays_in_steps_and_tokens():
    """Of two windows a step: the long document of step 0 waits for that of step 1, while the 256 others run."""
    job = convergence.job_of("wlb", replace(TINY, global_batch_size=2, dp=1, pp=1))
    row = displacement(job, np.array([256, 64, 64, 64, 64]), steps=2)
    tokens = 256 + 2 * 320  # S_max
    assert (row["p99_delay_steps"], row["max_delay_steps"]) == (1, 1)
    assert (row["p99_delay_tokens"], row["max_delay_tokens"]) == (256, 256)
    assert row["mean_delay_steps"] == 256 / tokens and row["mean_delay_tokens"] == 256 * 256 / tokens


def test_displacement_of_every_variant(monkeypatch):
    rows = {(r["data"], r["variant"]): r for r in convergence.displacements(steps=40)}
    assert len(rows) == 3 * (len(VARIANTS) - 1)
    original, ours = rows["F2", "original"], rows["F2", "adaptive"]
    assert original["max_delay_steps"] == 1 and original["token_cv"] == 0
    assert 0 < ours["mean_delay_steps"] < ours["p99_delay_steps"] <= ours["max_delay_steps"] <= 30
    assert ours["max_delay_tokens"] > 131_072 * 8 * (ours["max_delay_steps"] - 1)


@pytest.fixture
def logs(original):
    """Four seeds of what is compared, the fourth unfinished; fixed-8 loses 1 %, adaptive is the same but for noise."""
    changes = {
        "original": (0, 0, 0, 0),
        "original-shuffled": (-0.4, 0, 0.5),
        "wlb": (-1, 0.2, 1),
        "adaptive": (0.1, 0, -0.1),
        "fixed-8": (0.9, 1.0, 1.1),
    }
    made = []
    for variant, percents in changes.items():
        for seed, percent in enumerate(percents, 1):
            copied = copy.deepcopy(original) | {"variant": variant, "seed": seed}
            copied["validation"][-1]["all"] = (5 + seed / 10) * (1 + percent / 100)
            made.append(copied)
    return made


def test_report_compares_by_seed(logs):
    rows = {row["variant"]: row for row in convergence_report.compare(logs)}
    assert rows["original"]["difference_percent"] is None and rows["original"]["seeds"] == [1, 2, 3, 4]
    worse = rows["fixed-8"]
    assert worse["difference_of_seeds"] == pytest.approx([0.9, 1.0, 1.1])
    low, high = stats.ttest_1samp([0.9, 1.0, 1.1], 0).confidence_interval(0.95)
    mean, half = worse["difference_percent"], worse["difference_half_width"]
    assert (mean - half, mean + half) == pytest.approx((low, high))
    sentences = convergence_report.verdicts(list(rows.values()))
    for sentence, verdict in zip(
        sentences, ("open, neither", "open, neither", "equivalent", "worse: +1.00"), strict=True
    ):
        assert f"`: {verdict}" in sentence and "over 3 seeds" in sentence
    goals = {goal.name: goal.holds for goal in convergence_report.goals(list(rows.values()))}
    narrow = "half of the 95 % interval of the difference to original, percent of the loss"
    alike = "p of the two one-sided tests within 0.5 % of original"
    held = {"original-shuffled": False, "wlb": False, "adaptive": True, "fixed-8": True}
    assert goals == {f"{name}: {narrow}": holds for name, holds in held.items()} | {
        f"wlb: {alike}": False,
        f"adaptive: {alike}": True,
    }


def test_equivalence_is_an_interval_within_the_margin():
    """Two one-sided tests of 5 % each hold where the interval of 90 % lies within the margin, and nowhere else."""
    rng = np.random.default_rng(0)
    held = []
    for _ in range(200):
        values = rng.normal(rng.uniform(-0.4, 0.4), 0.3, 6).tolist()
        low, high = stats.ttest_1samp(values, 0).confidence_interval(0.9)
        held.append(low > -0.5 and high < 0.5)
        assert (convergence_report.equivalence(values, 0.5) < 0.05) == held[-1]
    assert 20 < sum(held) < 180


def test_report_of_the_runs_so_far(logs):
    rows = convergence_report.compare([log for log in logs if log["seed"] == 1 and log["variant"] != "wlb"])
    assert rows[-1]["difference_percent"] == pytest.approx(0.9) and rows[-1]["difference_half_width"] is None
    assert "1 seed(s) to compare with `original`, which decides nothing" in convergence_report.verdicts(rows)[0]
    assert convergence_report.goals(rows) == []
    rows = convergence_report.compare([log for log in logs if log["variant"] != "original"])
    assert all(row["difference_percent"] is None for row in rows)
    convergence_report.show(rows)


def test_report_is_written(logs, tmp_path, monkeypatch):
    monkeypatch.setattr(convergence_report.results, "DOCS", tmp_path)
    monkeypatch.setattr(convergence_report.results, "FOLDER", tmp_path)
    size = {"documents": 1, "tokens": 1, "p50": 1, "p90": 1, "longest": 1}
    for log in logs:
        log["scale"] = log["scale"] | {"name": "cpu"}
        log["corpus"] = {"train": size, "held_out": size, "digest": "-"}
    moved = dict.fromkeys(
        [f"{what}_delay_{unit}" for what in ("mean", "p99", "max") for unit in ("steps", "tokens")], 3
    )
    moved |= {"data": "F2", "variant": "wlb", "token_cv": 0.1, "long_share_mean": 0.5, "long_share_std": 0.1}
    assert convergence_report.write(logs, [moved]) == [tmp_path / "convergence.json", tmp_path / "convergence.png"]
    assert (tmp_path / "convergence.png").stat().st_size
    page = convergence_report.page(json.loads((tmp_path / "convergence.json").read_text()))
    assert "| `wlb` | 3 |" in page and "| F2 | `wlb` | 3.00 steps" in page
    assert "end 0.45 % apart" in page and "so there are not enough yet" in page
    (nothing,) = convergence_report.write([], [moved])
    assert "No run of this text has finished yet" in convergence_report.page(json.loads(nothing.read_text()))


def test_report_refuses_runs_of_other_settings(logs, tmp_path):
    assert convergence_report.read(tmp_path) == []
    logs[1]["corpus"] = {"digest": "another"}
    for log in logs:
        (tmp_path / f"{log['variant']}-{log['seed']}.json").write_text(json.dumps(log))
    with pytest.raises(ValueError, match="differ in their corpus"):
        convergence_report.read(tmp_path)


@pytest.mark.full
def test_quick_version(tmp_path):
    """Everything from text to table."""
    command = [sys.executable, "-m", "benchmarks.convergence", "--quick", "--seeds", "2", "--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    logs = convergence_report.read(tmp_path)
    assert {(log["variant"], log["seed"]) for log in logs} == {(v, s) for v in VARIANTS for s in (1, 2)}
    for log in logs:
        assert log["validation"][0]["all"] < np.log(SCALES["quick"].shape.vocab_size)
        assert log["validation"][-1]["all"] < 0.95 * log["validation"][0]["all"]
    assert "adaptive-2N" in done.stdout
