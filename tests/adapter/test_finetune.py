"""Megatron-Bridge's real `finetune()` with the plugin, against its own: losses, evaluations and all gradients."""

import functools
import json
from dataclasses import replace

import numpy as np
import pytest

from tests.adapter import bridge_runs
from tests.adapter.bridge_runs import ADAM, EXPERTS, PP2, DoRA, alone, bridge, container, run
from tests.adapter.chats import conversation, write_chats, write_tokenizer
from tests.adapter.training import relative_error
from tests.upstream.test_parity import TOLERANCE, compare

VOCABULARY, EOS = 264, 2
ANSWERS = [[30, 4], [1], [17, 200], [100], [9, 9], [5, 6, 7, 8, 60], [180, 33], [2], [13, 150], [240], [90, 90], [12]]
"""Tokens of the conversations of each row; a fifth of the tokens or so are trained."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("finetune")


TEMPLATE = """{% for m in messages %}{{ m.role }}: {% if m.role == "assistant" %}{% generation %}{{ m.content }}</s>\
{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"""


@pytest.fixture(scope="module")
def tokenizer(folder):
    path = write_tokenizer(folder / "tokenizer")
    (folder / "tokenizer" / "chat_template.jinja").write_text(TEMPLATE)
    return {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": path}


@pytest.fixture(scope="module")
def pretrained(folder, dataset):
    """Checkpoints to begin with, by the fields of the model."""

    @functools.cache
    def run_once(*model):
        path = folder / f"pretrained {len(model)}"
        saved = {"save": str(path), "save_interval": 1}
        options = {"checkpoint": saved, "vocab_size": VOCABULARY} | dict(model)
        run(1, dataset, folder / "pretrained.jsonl", steps=1, **options)
        return {"pretrained_checkpoint": str(path)}

    return run_once


def made_up(seed):
    """Packs with tokens of the end inside, and conversations of which nothing is trained, one alone in its row."""
    rng, found = np.random.default_rng(seed), []
    for answers in ANSWERS:
        lengths = [answer + 2 for answer in answers]
        size = sum(lengths)
        ids = rng.integers(EOS, VOCABULARY - 1, size)
        mask = np.repeat(rng.random(-(-size // 5)) < 0.4, 5)[:size]
        mask[: 5 * (answers == [2])] = False
        starts = np.cumsum([0, *lengths[:-1]]).tolist()
        found.append({"input_ids": ids.tolist(), "loss_mask": mask.astype(int).tolist(), "seq_start_id": starts})
    return found


@pytest.fixture(scope="module")
def packed(folder):
    return bridge_runs.packs(folder, train=made_up(0), val=made_up(1))


PER_TOKEN = {"calculate_per_token_loss": True}
CP2 = {"context_parallel_size": 2} | PER_TOKEN  # as Bridge asks for
VPP2 = PP2 | {"virtual_pipeline_model_parallel_size": 2, "overlap_p2p_comm": True, "batch_p2p_comm": False}
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]}
LORA = {"lora_rank": 4}
OF_EXPERTS = EXPERTS.keys() - {"expert_model_parallel_size"}


def chosen(options, names):
    return tuple((name, options[name]) for name in sorted(options.keys() & names))


@pytest.fixture(scope="module")
def common(pretrained, tokenizer):
    return {"vocab_size": VOCABULARY, "tokenizer": tokenizer, "checkpoint": pretrained(), "micro_batch_size": 1}


def ours(size, dataset, log, **options):
    return run(size, dataset, log, call=bridge.finetune, **options)


def compare_all(got, want):
    compare(got, want)
    assert got["evaluations"] == pytest.approx(want["evaluations"], rel=TOLERANCE)
    assert len(got["evaluations"]) > len(got["losses"])


@pytest.fixture(scope="module")
def bridges(packed, common, pretrained):
    """Bridge's own run of these packs in one process, by the fields of its model."""

    @functools.cache
    def run_alone(*model):
        begins = {"checkpoint": pretrained(*chosen(dict(model), OF_EXPERTS))}
        return run(1, packed, call=alone, **common | begins | dict(model))

    return run_alone


@pytest.mark.parametrize(
    ("size", "layout"),
    [
        (2, {}),
        (2, CP2),
        (2, PP2),
        (4, VPP2 | CP2 | SELECTIVE),
        (2, TP2 | FULL | PER_TOKEN),
        (2, EXPERTS),
        (4, VPP2 | CP2 | SELECTIVE | LORA),
        (2, TP2 | FULL | PER_TOKEN | LORA),
        (2, EXPERTS | LORA),
    ],
)
def test_packs_equal_bridge(size, layout, packed, common, pretrained, bridges, tmp_path):
    begins = {"checkpoint": pretrained(*chosen(layout, OF_EXPERTS))}
    got = ours(size, packed, tmp_path / "log.jsonl", **common | begins | layout)
    compare_all(got, bridges(*chosen(layout, OF_EXPERTS | PER_TOKEN.keys() | LORA.keys())))


@pytest.fixture(scope="module")
def chats(folder):
    """Conversations, one and a half steps of them; some are longer than the window."""
    for seed, name in enumerate(("training", "validation")):
        write_chats(folder / f"{name}.jsonl", [conversation(answers, i + seed) for i, answers in enumerate(ANSWERS)])
    return bridge_runs.chats(folder)


@pytest.fixture(scope="module")
def questions(folder):
    path = folder / "questions"
    path.mkdir()
    for seed, name in enumerate(("training", "validation")):
        turns = [conversation(answers[:1], i + seed) for i, answers in enumerate(ANSWERS)]
        lines = [json.dumps({"input": turn[1]["content"], "output": turn[2]["content"]}) for turn in turns]
        (path / f"{name}.jsonl").write_text("\n".join(lines))
    return bridge_runs.rows(path)


@pytest.mark.parametrize(
    ("kind", "size", "theirs", "layout"),
    [
        ("chats", 2, 2, {}),  # ranks take rows in turn, and each micro-batch of two has a mean
        ("questions", 4, 2, PP2),
        ("chats", 2, 1, CP2 | {"drop_last": False}),
    ],
)
def test_conversations_equal_bridge(kind, size, theirs, layout, request, common, tmp_path):
    """Over three steps, two epochs."""
    dataset = replace(request.getfixturevalue(kind), drop_last=layout.get("drop_last", True))
    layout = common | {name: value for name, value in layout.items() if name != "drop_last"}
    options = {"micro_batch_size": 2, "steps": 3}
    got = ours(size, dataset, tmp_path / "log.jsonl", **layout | options)
    want = {name: layout[name] for name in layout.keys() & {*common, *PER_TOKEN}}
    compare_all(got, run(theirs, dataset, call=alone, **want | options))


@pytest.mark.parametrize("lora", [{}, LORA], ids=str)
def test_resumes_what_bridge_saved_and_back(lora, packed, common, tmp_path):
    adam, own = common | lora | {"optimizer": ADAM}, tmp_path / "own"

    def saves(folder):
        return common["checkpoint"] | {"load": str(folder), "save": str(folder), "save_interval": 1}

    whole = run(1, packed, call=alone, **adam, steps=3)
    run(1, packed, call=alone, **adam | {"checkpoint": saves(own)}, steps=1)
    second = ours(2, packed, tmp_path / "log.jsonl", **adam | PP2 | {"checkpoint": saves(own)})
    third = run(1, packed, call=alone, **adam | {"checkpoint": saves(own)}, steps=3)
    assert [*second["losses"], *third["losses"]] == pytest.approx(whole["losses"][1:], rel=TOLERANCE)
    assert relative_error(second["grads"][0], whole["grads"][1]) <= TOLERANCE


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"dataloader_type": "cyclic"}, "does not support dataset.dataloader_type cyclic instead of batch"),
        ({"dataset_kwargs": {"return_cu_seqlen": False}}, "return_cu_seqlen=False of dataset.dataset_kwargs"),
        ({"seq_length": 128}, "packed_sequence_size over dataset.seq_length"),
    ],
)
def test_what_differs_is_refused(changed, message, packed, common):
    with pytest.raises(ValueError, match=message):
        bridge.finetune(container(replace(packed, **changed), **common))
    with pytest.raises(ValueError, match="pre-trains on .bin/.idx datasets; give a GPTDatasetConfig, not GPTSFT"):
        bridge.pretrain(container(packed, **common))
    config = container(packed, **common)
    config.peft = DoRA()
    with pytest.raises(ValueError, match="does not support peft, but for LoRA"):
        bridge.finetune(config)
    with pytest.raises(ValueError, match="does not support sft_skip with finetune"):
        bridge.finetune(container(packed, **common), sft_skip=("long",))
