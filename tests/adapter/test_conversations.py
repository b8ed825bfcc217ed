"""`--sft --wlb` trains what upstream's `--sft` trains: the same tokens, targets and gradients, in every layout."""

import json
import multiprocessing
import os
import re
import signal
from argparse import Namespace
from itertools import pairwise

import datasets
import numpy as np
import pytest

from megatron_wlb import conversations
from megatron_wlb.adapter.data import load_splits
from megatron_wlb.cli.main import main
from megatron_wlb.types import DOCUMENT
from tests.adapter.chats import conversation, write_chats, write_tokenizer
from tests.adapter.test_parity import LAYOUTS, TOLERANCE
from tests.adapter.training import CP2, MTP, PP2, relative_error, train

FORMAT = "nemotron-nano-v2"
WITHOUT = "--tokenizer-type --vocab-size --split"
ONE_EPOCH = [[30], [1], [100, 3], [5, 5, 5], [180], [60, 20], [2], [11]]
"""Answers of eight conversations, as many as windows in a step, and less than its tokens."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    return write_chats(path, [conversation(answers, i) for i, answers in enumerate(ONE_EPOCH)])


def sft_flags(tokenizer):
    sft = ["--sft", "--tokenizer-type", "SFTTokenizer", "--tokenizer-model", tokenizer]
    sft += ["--make-vocab-size-divisible-by", "256"]  # for one tensor-parallel rank and for two
    return [*sft, "--sft-tokenizer-prompt-format", FORMAT, "--split", "100,0,0"]


def arguments(tokenizer, path, **changes):
    """What reading conversations asks of upstream's arguments."""
    given = {"sft": True, "seed": 1, "mock_data": False, "tokenizer_type": "SFTTokenizer", "tokenizer_model": tokenizer}
    given |= {"sft_tokenizer_prompt_format": FORMAT, "seq_length": 256, "data_cache_path": None, "eval_iters": 0}
    given |= {"wlb_sft_broken": "error", "wlb_sft_too_long": "drop", "split": "100,0,0", "data_path": [path]}
    given |= dict.fromkeys(("train_data_path", "valid_data_path", "test_data_path", "data_args_path"))
    return Namespace(**given | {"per_split_data_args_path": None, "full_validation": False} | changes)


@pytest.fixture(scope="module")
def upstream(chats, tokenizer):
    """Upstream's own --sft in one process, which trains each conversation alone, in a window of padding."""
    return train(1, chats, *sft_flags(tokenizer), wlb=False, without=WITHOUT)


@pytest.mark.parametrize(("size", "layout"), [(1, ""), *LAYOUTS])
def test_gradients_of_two_epochs_are_those_of_upstream(size, layout, chats, tokenizer, upstream):
    run = train(size, chats, *sft_flags(tokenizer), "--wlb-packing", "adaptive", *layout.split(), without=WITHOUT)
    assert len(run["grads"]) == len(upstream["grads"]) == 2
    assert max(map(relative_error, run["grads"], upstream["grads"])) <= TOLERANCE


def test_depths_of_mtp_weigh_what_is_trained(chats, tokenizer):
    flags = [*sft_flags(tokenizer), "--wlb-packing", "adaptive", *MTP.split()]
    one, two = (train(size, chats, *flags, *layout, without=WITHOUT) for size, layout in ((1, []), (2, CP2.split())))
    assert max(map(relative_error, two["grads"], one["grads"])) <= TOLERANCE
    split = load_splits(arguments(tokenizer, chats))["train"]
    rows = np.zeros(8, DOCUMENT)
    rows["document"], rows["length"] = np.arange(8), split.sources[0].lengths[:]
    masks = [conversations.read(chats, arguments(tokenizer, chats)).mask]
    begins = np.append(0, np.cumsum(split.indices[0].tokens))
    targets = [sum(int(masks[0][a + 1 + d : b].sum()) for a, b in pairwise(begins)) for d in range(3)]
    assert split.targets(rows, 2) == targets and targets[0] < rows["length"].sum()


def test_evaluation_is_per_trained_token(chats, tokenizer):
    flags = [*sft_flags(tokenizer), "--wlb-packing", "adaptive", "--eval-iters", "1", "--eval-interval", "1"]
    flags[flags.index("100,0,0")] = "50,50,0"
    one, two = (train(size, chats, *flags, *layout, without=WITHOUT) for size, layout in ((1, []), (2, PP2.split())))
    assert two["evaluations"] == pytest.approx(one["evaluations"], rel=TOLERANCE)


# Rows ----------------------------------------------------------------------------------------------------------------

LONG, SHORT = conversation([300]), conversation([3])


def write(tmp_path, *lines):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps({"messages": line}) for line in lines))
    return str(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"messages": [', "line 2: Expecting value"),
        ("[1]", "line 2: it is no object with messages"),
        ('{"text": "a"}', "line 2: it has no messages"),
        ([], "line 2: it has no messages"),
        ([{"role": "robot", "content": "a"}], "line 2: a message has role 'robot'; roles are system, user, assistant"),
        ([{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}], "assistant is empty"),
        ([{"role": "user", "content": "a"}], "line 2: no token of it is trained"),
        ([{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}], "line 2: AssertionError"),
    ],
)
def test_broken_rows_stop_the_run_or_are_counted(line, message, tmp_path, tokenizer, capsys):
    path = write(tmp_path, SHORT, line, "", SHORT)
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        conversations.read(path, arguments(tokenizer, path))
    assert "--wlb-sft-broken skip" in str(error.value) and os.listdir(tmp_path) == ["rows.jsonl"]
    for _ in range(2):  # also from the folder that is there
        found = conversations.read(path, arguments(tokenizer, path, wlb_sft_broken="skip"))
        assert len(found.lengths) == 2 and "1 broken rows" in capsys.readouterr().out


def test_long_conversations_are_left_out_or_cut_off_as_upstream_does(tmp_path, tokenizer, capsys):
    path = write(tmp_path, SHORT, LONG)
    dropped = conversations.read(path, arguments(tokenizer, path))
    assert dropped.lengths[0] > 0 and dropped.lengths[1] == 0
    assert "1 of 2 conversations" in (said := capsys.readouterr().out) and "rows.jsonl line 2" in said
    cut = conversations.read(path, arguments(tokenizer, path, wlb_sft_too_long="truncate"))
    assert cut.lengths.tolist() == [dropped.lengths[0], 255] and cut.content != dropped.content


def test_several_conversations_of_a_row_and_folders(tmp_path, tokenizer):
    path = write(tmp_path, [*SHORT, *conversation([9])], SHORT)
    found = conversations.read(str(tmp_path), arguments(tokenizer, path, data_cache_path=str(tmp_path / "cache")))
    assert len(found.lengths) == 3
    tokens = np.fromfile(f"{found.index.prefix}.bin", np.int32)
    assert len(tokens) == len(found.mask) == found.index.tokens.sum()
    with pytest.raises(ValueError, match="holds no conversations; give --data-path a file of .jsonl"):
        conversations.read(str(tmp_path / "cache"), arguments(tokenizer, path))


def test_tokenizing_happens_once_and_a_kill_leaves_nothing(tmp_path, tokenizer, monkeypatch):
    path = write(tmp_path, SHORT)
    args = arguments(tokenizer, path)

    def killed(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    with monkeypatch.context() as patch:
        patch.setattr(np, "save", killed)
        process = multiprocessing.get_context("fork").Process(target=conversations.read, args=(path, args))
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL
    assert not [each for each in tmp_path.iterdir() if each.is_dir() and each.suffix != ".parts"]
    conversations.read(path, args)
    assert not [each for each in tmp_path.iterdir() if each.suffix in (".parts", ".lock")]
    monkeypatch.setattr(conversations, "_build", lambda *_, **__: pytest.fail("it is there already"))
    conversations.read(path, args)


def test_packs_of_bridge_are_conversations(tmp_path, tokenizer):
    """Their mask is that of labels: 1 where the next token is trained."""
    row = {"input_ids": [5, 6, 7, 8, 9], "loss_mask": [0, 1, 0, 1, 0], "seq_start_id": [0, 3]}
    datasets.Dataset.from_list([row]).to_parquet(tmp_path / "pack.parquet")
    path = str(tmp_path / "pack.parquet")
    found = conversations.read(path, arguments(tokenizer, path))
    assert found.lengths.tolist() == [2, 1] and found.mask.tolist() == [0, 0, 1, 0, 1]


def test_analyze_says_what_it_would_bring_and_what_upstream_pads(tmp_path, tokenizer, capsys):
    path = write(tmp_path, *([*SHORT, *conversation([9])], conversation([60]), LONG) * 10)
    flags = ["--sft", "--tokenizer-type", "SFTTokenizer", "--tokenizer-model", tokenizer, "--data-path", path]
    flags += ["--model", "llama3-8b", "--seq-length", "256", "--sft-tokenizer-prompt-format", FORMAT, "--steps", "1"]
    assert main(["analyze", *flags, "--json", "-"]) == 0
    printed = capsys.readouterr()
    found = conversations.read(path, arguments(tokenizer, path))
    assert json.loads(printed.out)["data"]["documents"] == 39 and len(found.rows) == 30
    padding = 1 - np.mean(np.minimum(found.rows, 256)) / 256
    assert f"each of the 30 lines of {path}: {padding:.1%} of their tokens would be padding" in " ".join(
        printed.err.split()
    )
    assert main(["analyze", *flags, "--json", path]) == 2 and "an input of this command" in capsys.readouterr().err


def test_messages_of_parquet_and_blends_are_those_of_lines(tmp_path, tokenizer):
    """A table of messages reads as its lines do, and a blend with weights trains both sources by them."""
    rows = [conversation([length], length) for length in (3, 40, 9, 70)]
    lines, table = write_chats(tmp_path / "a.jsonl", rows), str(tmp_path / "b.parquet")
    datasets.Dataset.from_list([{"messages": row} for row in rows]).to_parquet(table)
    of_lines, of_table = (conversations.read(path, arguments(tokenizer, path)) for path in (lines, table))
    assert of_table.lengths.tolist() == of_lines.lengths.tolist() and (of_table.mask == of_lines.mask).all()
    tokens = [np.fromfile(f"{found.index.prefix}.bin", np.int32).tolist() for found in (of_lines, of_table)]
    assert tokens[0] == tokens[1]
    split = load_splits(arguments(tokenizer, lines, data_path=["3", lines, "1", table]))["train"]
    assert [float(source.weight) for source in split.sources] == [3, 1]
    assert [source.lengths[:].tolist() for source in split.sources] == [of_lines.lengths.tolist()] * 2
