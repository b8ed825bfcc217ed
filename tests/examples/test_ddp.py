"""The loop of examples/ddp.py trains what was packed, on any number of ranks and workers, and goes on after a break."""

import itertools
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from examples import ddp
from megatron_wlb import MODELS, DocumentStream, Parallel, Source, make_job, make_packer, plan_step, trained_tokens
from tests.adapter.datasets import write_index
from tests.worlds import run_world

README = Path(ddp.__file__).with_name("README.md")
NUM_STEPS = 4


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Forked worlds inherit it."""
    monkeypatch.setattr(ddp, "CONTEXT_LENGTH", 64)
    monkeypatch.setattr(ddp, "NUM_MICRO_BATCHES", 4)


@pytest.fixture(scope="module")
def documents():
    """Some with nothing to train, some longer than the window."""
    rng = np.random.default_rng(0)
    lengths = np.append([0, 1, 2, 300], rng.lognormal(3, 1, 200)).astype(int)
    return [rng.integers(0, 256, length).astype(np.uint8) for length in lengths]


@pytest.fixture(scope="module")
def expected(documents):
    """Losses and gradients of one process that knows no micro-batches: a document after the other, alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ddp, "CONTEXT_LENGTH", 64)
        patch.setattr(ddp, "NUM_MICRO_BATCHES", 4)
        packer = make(documents)
        torch.manual_seed(0)
        model = ddp.Gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    steps = []
    for _ in range(NUM_STEPS):
        rows = packer.next().batch.documents
        total = 0.0
        for row in rows:
            read = documents[row["document"]][row["offset"] : row["offset"] + row["length"] + 1]
            tokens = torch.from_numpy(read.astype(np.int64))
            length = len(tokens) - 1
            x = model.embedding(tokens[:-1]) + model.positions.weight[:length]
            for layer in model.layers:
                x = layer(x, [length])
            logits = model.output(model.norm(x))
            loss = F.cross_entropy(logits, tokens[1:]) * length / rows["length"].sum()
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        steps.append((total, float(norm)))
    return steps


def make(documents, seed=0, num_epochs=None, size=1):
    lengths = trained_tokens(np.array([len(document) for document in documents]))
    stream = DocumentStream([Source(lengths=lengths)], seed=seed, context_length=64, num_epochs=num_epochs)
    return make_packer(stream, ddp.job_of(size))


def loader(documents, rank, size, num_workers, **how):
    packed = ddp.PackedDocuments(documents, make(documents, size=size, **how), ddp.job_of(size), rank)
    return ddp.StepLoader(packed, num_workers=num_workers)


def as_lists(step):
    """Everything of a step that a rank sees."""
    return [[x.tolist() for x in batch] for batch in step.micro_batches], step.num_tokens, step.state


@pytest.mark.parametrize(("fsdp", "num_workers"), [(False, 0), (False, 2), (True, 0), (True, 2)])
def test_two_ranks_train_as_one_process_does_a_document_at_a_time(documents, expected, fsdp, num_workers):
    one = train(1, documents, NUM_STEPS, fsdp=fsdp, num_workers=num_workers)
    two = train(2, documents, NUM_STEPS, fsdp=fsdp, num_workers=num_workers)
    np.testing.assert_allclose(one, expected, rtol=0, atol=1e-5)
    np.testing.assert_allclose(two, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("fsdp", [False, True])
def test_a_run_goes_on_after_a_break(documents, fsdp, num_workers, tmp_path):
    checkpoint = tmp_path / "checkpoint.pt"
    whole = train(2, documents, NUM_STEPS, fsdp=fsdp, num_workers=num_workers)
    first = train(2, documents, 1, fsdp=fsdp, num_workers=num_workers, checkpoint=checkpoint)
    again = train(2, documents, NUM_STEPS - 1, fsdp=fsdp, num_workers=num_workers, checkpoint=checkpoint)
    assert first + again == whole


def train(size, documents, num_steps, *, checkpoint=None, **options):
    def run():
        return ddp.train(documents, num_steps, checkpoint=checkpoint, **options)

    results = run_world(run, size)
    assert all(steps == results[0] for steps in results)
    return results[0]


@pytest.mark.parametrize(("before", "after"), [(0, 0), (0, 2), (2, 0), (2, 2)])
@pytest.mark.parametrize("taken", [0, 1, 4])
def test_the_state_is_of_what_was_handed_out_not_of_what_was_read_ahead(documents, before, after, taken):
    steps = [as_lists(step) for step in itertools.islice(loader(documents, 1, 2, 0), 8)]
    stopped = loader(documents, 1, 2, before)
    assert [as_lists(step) for step in itertools.islice(stopped, taken)] == steps[:taken]
    resumed = loader(documents, 1, 2, after)
    resumed.load_state_dict(stopped.state_dict())
    assert [as_lists(step) for step in itertools.islice(resumed, 8 - taken)] == steps[taken:]
    assert [as_lists(step) for step in itertools.islice(stopped, 8 - taken)] == steps[taken:]  # a second iteration


def test_a_micro_batch_without_documents_trains_nothing():
    """A step may have fewer documents than micro-batches."""
    (step,) = loader([np.arange(30, dtype=np.uint8)], 0, 1, 0, num_epochs=1)
    full, empty, *_ = sorted(step.micro_batches, key=lambda batch: -len(batch.tokens))
    assert full.labels.tolist() == list(range(1, 30))
    assert (empty.labels == ddp.IGNORED).all()
    model = ddp.Gpt()
    loss = model(empty)
    loss.backward()
    assert loss == 0 and all((p.grad == 0).all() for p in model.parameters())


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
    stream = DocumentStream([Source(lengths=trained_tokens(lengths))], seed=0, context_length=131072)
    packer = make_packer(stream, job)
    plans = [plan_step(packer, job, 3) for _ in range(2)]
    rows = [row for plan in plans for m in plan.micro_batches for row in m.documents]
    assert trained == [(0, row["document"], row["offset"], row["length"]) for row in rows]
