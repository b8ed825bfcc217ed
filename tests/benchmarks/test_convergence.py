"""One process that adds up N micro-batches trains as Megatron on 4 processes; a run trains what every other does."""

import copy
import json
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks import convergence
from benchmarks.convergence import QUICK, VARIANTS, Trainer, cut, job_of
from benchmarks.convergence_model import accumulate
from benchmarks.fixed import FixedPacking
from megatron_wlb.describe import make
from megatron_wlb.model import shape
from megatron_wlb.packing import POLICIES
from megatron_wlb.plan.dataset import read_lengths
from megatron_wlb.plan.packer import Packer
from megatron_wlb.plan.samples import Windows, windows
from tests.adapter.conftest import dataset  # noqa: F401  # also makes this process the warm parent of forked worlds
from tests.adapter.training import MODEL, initial, relative_error, train

CP2_PP2 = "--context-parallel-size 2 --pipeline-model-parallel-size 2"
DP2_PP2 = "--pipeline-model-parallel-size 2"
SEED = int(MODEL[MODEL.index("--seed") + 1])
LEARNING_RATE = float(MODEL[MODEL.index("--lr") + 1])
STEPS = 3

# The model and the data of tests/adapter/training.py, with as many key heads as query heads.
TINY = replace(
    QUICK,
    shape=shape(4, 64, 96, 8, 8, 256, kv_channels=8),
    context_length=256,
    crossover_over_window=0.5,
)
FLAGS = "--num-query-groups 8 --wlb-max-tokens 320"


@pytest.mark.parametrize(
    ("variant", "flags"),
    [
        pytest.param("original", f"{CP2_PP2} --wlb-packing megatron", marks=pytest.mark.full),
        ("paper", f"{CP2_PP2} --wlb-packing paper:128,192"),
        pytest.param("fixed-8", f"{CP2_PP2} --wlb-packing fixed:8", marks=pytest.mark.full),
        ("delay", f"{DP2_PP2} --wlb-packing adaptive:30 --wlb-micro-batches 8"),
    ],
)
def test_equals_megatron_on_four_processes(variant, flags, dataset, tmp_path, monkeypatch):  # noqa: F811
    """The losses and all gradients of three steps, of the weights that two updates have led to."""
    monkeypatch.setitem(POLICIES, "fixed", FixedPacking)
    monkeypatch.setattr(make, "crossover", lambda job: 128)
    steps = f"--train-iters {STEPS} --weight-decay 0 --sgd-momentum 0.9"
    megatron = train(4, dataset, *FLAGS.split(), *flags.split(), *steps.split(), log=tmp_path / "log.jsonl")
    lengths = read_lengths(dataset).astype(np.int64)
    data = cut(np.fromfile(f"{dataset}.bin", np.int32), lengths, upstream_windows(dataset, lengths))
    model = Trainer(TINY, data.corpus, 0).model
    for name, parameter in model.named_parameters():
        parameter.data = initial(name_of(name), parameter.shape)
    scale = replace(TINY, dp=2, pp=2)  # adaptive packing goes by the layout, the others do not
    packer = Packer(data.samples, job_of(variant, scale))
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
    for logged, gradients in zip(megatron["log"], megatron["grads"], strict=True):
        packing = packer.next().batch
        optimizer.zero_grad()
        loss = accumulate(model, data.corpus, packing)
        assert int(packing.documents["length"].sum()) == logged["tokens"]
        assert loss == pytest.approx(logged["loss"], rel=1e-5)
        assert relative_error({name_of(n): p.grad for n, p in model.named_parameters()}, gradients) <= 1e-5
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # upstream's default
        optimizer.step()


def upstream_windows(prefix, lengths):
    """What upstream trains of the dataset."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    count = STEPS * TINY.global_batch_size
    config = GPTDatasetConfig(
        random_seed=SEED,
        sequence_length=TINY.context_length,
        blend=([prefix], None),
        split="90,10,0",
        tokenizer=SimpleNamespace(eod=255, pad=-1, vocab_size=256, unique_identifiers={}),
        reset_position_ids=True,
        reset_attention_mask=True,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    built = BlendedMegatronDatasetBuilder(GPTDataset, [count, 0, 0], lambda: True, config).build()[0]
    names = ("document_index", "sample_index", "shuffle_index")
    arrays = {name: getattr(built, name) for name in names}
    return Windows(**arrays, lengths=lengths, context_length=TINY.context_length)


def name_of(name):
    """Megatron's name of a parameter, as tests/adapter/training.py has it."""
    if match := re.match(r"layers\.(\d+)\.(.*)", name):
        block = {"linear_qkv": "self_attention.", "linear_proj": "self_attention.", "linear_fc": "mlp."}
        prefix = next((to for begin, to in block.items() if match[2].startswith(begin)), "")
        return f"layer{int(match[1]) + 1}.{prefix}{match[2]}"
    outer = {"embedding.weight": "embedding.word_embeddings.weight"}
    return (outer | {"final_layernorm.weight": "decoder.final_layernorm.weight"}).get(name, name)


@pytest.fixture(scope="module")
def data():
    """Documents of 2 to 599 tokens, a tenth of them held out."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(4, 1.2, 400), 2, 599).astype(np.int64)
    tokens = (TINY.shape.padded_vocab_size * rng.random(lengths.sum()) ** 3).astype(np.uint16)  # the first are frequent
    return {"tokens": tokens, "lengths": lengths, "held_out": np.arange(400) % 10 == 3, "summary": {"digest": "-"}}


SHORT = replace(
    TINY,
    shape=shape(1, 16, 16, 2, 2, 256, kv_channels=8),
    start_batches=4,
    global_batches=20,
    validation_tokens=1000,
)


@pytest.fixture(scope="module")
def started(data):
    return convergence.start(1, SHORT, data)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_trains_the_same_tokens_as_every_other(variant, data, started):
    log = convergence.run(variant, 1, SHORT, data, copy.deepcopy(started))
    *_, before, tokens = np.cumsum(log["steps"]["tokens"])
    assert before < SHORT.tokens <= tokens
    assert len(log["validation"]) == convergence.MEASUREMENTS + 1
    assert log["validation"][-1]["tokens"] == tokens
    assert log["validation"][-1]["all"] < log["validation"][0]["all"]
    assert sum(log["tokens_by_delay"].values()) == tokens == log["packing"]["tokens"]
    assert log == json.loads(json.dumps(log))


def test_held_out_documents_are_never_trained(data):
    """Rows are read from the stream of their documents, and labels go on behind a row."""
    ends = np.cumsum(data["lengths"])
    for held, count in ((False, 360), (True, 40)):
        tokens, lengths = convergence.split(data, held_out=held)
        assert len(lengths) == count
        of = windows(lengths, SHORT.context_length, seed=3)
        corpus = cut(tokens, lengths, of).corpus
        chosen = np.flatnonzero(data["held_out"] == held)[of.document_index]
        stream = np.concatenate([data["tokens"][ends[i] - data["lengths"][i] : ends[i]] for i in chosen]).tolist()
        for sample in range(len(of)):
            rows = of.documents(np.array([sample]))
            begin = int(of.shuffle_index[sample]) * SHORT.context_length
            batch = corpus.micro_batch(rows)
            assert batch.tokens.tolist() == stream[begin:][: SHORT.context_length]
            assert batch.labels.tolist() == stream[begin + 1 :][: SHORT.context_length]
