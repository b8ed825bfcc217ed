"""The loop of examples/ddp.py trains what was packed, on any number of ranks and workers, and goes on after a break."""

import itertools
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from examples import ddp
from megatron_wlb import MODELS, Packer, Parallel, Samples, make_job, plan_step, windows
from tests.adapter.datasets import write_index
from tests.worlds import run_world

README = Path(ddp.__file__).with_name("README.md")
NUM_STEPS = 4


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Forked worlds inherit it."""
    monkeypatch.setattr(ddp, "CONTEXT_LENGTH", 64)
    monkeypatch.setattr(ddp, "GLOBAL_BATCH_SIZE", 4)


@pytest.fixture(scope="module")
def documents():
    """Some are empty, some longer than the window."""
    rng = np.random.default_rng(0)
    lengths = np.append([0, 1, 2, 300], rng.lognormal(3, 1, 200)).astype(int)
    return [rng.integers(0, 256, length).astype(np.uint8) for length in lengths]


@pytest.fixture(scope="module")
def expected(documents):
    """Losses and gradients of one process that knows windows alone, and trains a document after the other in them."""
    made = windows(np.array([len(document) for document in documents]), 64)
    stream = np.concatenate([documents[i] for i in made.document_index]).astype(np.int64)
    place = np.repeat(np.arange(len(documents)), [len(documents[i]) for i in made.document_index])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ddp, "CONTEXT_LENGTH", 64)
        torch.manual_seed(0)
        model = ddp.Gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    steps = []
    for own in itertools.batched(made.shuffle_index[: 4 * NUM_STEPS], 4):
        total = 0.0
        for window in own:
            rows = np.arange(64 * window, 64 * (window + 1))
            for piece in np.split(rows, np.flatnonzero(np.diff(place[rows])) + 1):
                x = model.embedding(torch.from_numpy(stream[piece])) + model.positions.weight[: len(piece)]
                for layer in model.layers:
                    x = layer(x, [len(piece)])
                logits = model.output(model.norm(x))
                loss = F.cross_entropy(logits, torch.from_numpy(stream[piece + 1]), reduction="sum") / (4 * 64)
                loss.backward()
                total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        steps.append((total, float(norm)))
    return steps


@pytest.mark.parametrize(("fsdp", "num_workers"), [(False, 2), (True, 0)])
def test_two_ranks_train_as_one_process_does_a_document_at_a_time(documents, expected, fsdp, num_workers, tmp_path):
    """And go on after a break."""
    how = {"fsdp": fsdp, "num_workers": num_workers}
    one, two = (train(size, documents, NUM_STEPS, **how) for size in (1, 2))
    for steps in (one, two):
        np.testing.assert_allclose(steps, expected, rtol=0, atol=1e-5)
    parts = [train(2, documents, count, **how, checkpoint=tmp_path / "checkpoint.pt") for count in (1, NUM_STEPS - 1)]
    assert parts[0] + parts[1] == two


def train(size, documents, num_steps, *, checkpoint=None, **options):
    def run():
        return ddp.train(documents, num_steps, checkpoint=checkpoint, **options)

    results = run_world(run, size)
    assert all(steps == results[0] for steps in results)
    return results[0]


@pytest.mark.parametrize(("taken", "num_workers"), [(0, 2), (1, 0), (4, 2), (60, 0), (60, 2)])
def test_a_loader_begins_at_any_sample_with_any_number_of_workers(documents, taken, num_workers):
    """Also beyond the first epoch."""

    def steps(first_sample, num_workers, number):
        packed = ddp.PackedDocuments(documents, ddp.job_of(2), 1, first_sample)
        loader = ddp.DataLoader(packed, batch_size=None, num_workers=num_workers)
        taken = itertools.islice(loader, number)
        return [([[x.tolist() for x in batch] for batch in step.micro_batches], step.num_tokens) for step in taken]

    assert steps(4 * taken, num_workers, 4) == steps(0, 0, taken + 4)[taken:]


def test_the_ten_lines_of_the_readme_run(tmp_path, monkeypatch):
    code = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL).group(1)
    assert len([line for line in code.splitlines() if line]) <= 10
    lengths = np.random.default_rng(0).lognormal(8, 1.5, 2000).astype(np.int64)
    write_index(tmp_path / "corpus.idx", lengths)
    with (tmp_path / "corpus.bin").open("wb") as file:
        file.truncate(4 * int(lengths.sum()))
    monkeypatch.chdir(tmp_path)
    trained = []
    exec(code, {"rank": 3, "world_size": 8, "num_steps": 2, "train_on": lambda *row: trained.append(row)})
    job = make_job(model=MODELS["llama2-7b"], parallel=Parallel(dp=8), context_length=131072, global_batch_size=64)
    samples = Samples(datasets=[windows(lengths, 131072)], context_length=131072)
    packer = Packer(samples, job)
    plans = [plan_step(packer, job, 3) for _ in range(2)]
    rows = [row for plan in plans for m in plan.micro_batches for row in m.documents]
    order = samples.datasets[0].document_index
    assert trained == [(order[row["document"]], row["offset"], row["length"]) for row in rows]
