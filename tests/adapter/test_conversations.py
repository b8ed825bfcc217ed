"""`--sft --wlb` trains what upstream's `--sft` trains: the same rows, targets and gradients, in every layout."""

import functools
import json
import multiprocessing
import os
import re
import signal
from argparse import Namespace

import datasets
import numpy as np
import pytest

from megatron_wlb import conversations
from megatron_wlb.cli.main import main
from tests.adapter.chats import conversation, write_chats, write_tokenizer
from tests.adapter.test_parity import LAYOUTS, TOLERANCE
from tests.adapter.training import CP2, MTP, PP2, relative_error, train

FORMAT = "nemotron-nano-v2"
WITHOUT = "--tokenizer-type --vocab-size --split --reset-attention-mask --reset-position-ids"
ROWS = [[30], [1], [100, 3], [5, 5, 5], [180], [60, 20], [2], [11], [240], [7], [90], [13]]
"""Answers of the conversation of each row, one and a half steps of them; one is cut off at the window."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    return write_chats(path, [conversation(answers, i) for i, answers in enumerate(ROWS)])


def sft_flags(tokenizer):
    sft = ["--sft", "--tokenizer-type", "SFTTokenizer", "--tokenizer-model", tokenizer]
    sft += ["--make-vocab-size-divisible-by", "256"]  # for one tensor-parallel rank and for two
    return [*sft, "--sft-tokenizer-prompt-format", FORMAT, "--split", "100,0,0"]


def arguments(tokenizer, path, **changes):
    """What reading conversations asks of upstream's arguments."""
    given = {"tokenizer_type": "SFTTokenizer", "tokenizer_model": tokenizer, "seq_length": 256}
    given |= {"sft_tokenizer_prompt_format": FORMAT, "data_cache_path": None}
    return Namespace(**given | {"wlb_sft_broken": "error", "wlb_sft_too_long": "drop"} | changes)


@pytest.fixture(scope="module")
def upstream(chats, tokenizer):
    """Upstream's own --sft in one process, which trains each row alone, in a window of padding."""

    @functools.cache
    def run(flags=""):
        return train(1, chats, *sft_flags(tokenizer), *flags.split(), wlb=False, without=WITHOUT)

    return run


EVALUATE = "--split 60,40,0 --eval-iters 1 --eval-interval 1"


@pytest.mark.parametrize(
    ("size", "layout", "flags"),
    [
        *((each.values[0], each.values[1], "") if hasattr(each, "values") else (*each, "") for each in LAYOUTS[:4]),
        (1, "", ""),
        (2, CP2, MTP),
        (2, PP2, "--calculate-per-token-loss"),
        (2, CP2, "--micro-batch-size 2"),
        (2, PP2, EVALUATE),
    ],
)
def test_rows_are_trained_and_evaluated_as_upstream_does(size, layout, flags, chats, tokenizer, upstream):
    """The rows of each step, whatever tokens they have, by upstream's weights; over two epochs."""
    run = train(size, chats, *sft_flags(tokenizer), *flags.split(), *layout.split(), without=WITHOUT)
    theirs = upstream(flags)
    assert len(run["grads"]) == len(theirs["grads"]) == 2
    assert max(map(relative_error, run["grads"], theirs["grads"])) <= TOLERANCE
    assert run["losses"] == pytest.approx(theirs["losses"], rel=TOLERANCE)
    assert run["evaluations"] == pytest.approx(theirs["evaluations"], rel=TOLERANCE)
    assert bool(run["evaluations"]) == (flags == EVALUATE)


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
        assert len(found.lengths) == 2 == len(found.begins) - 1 and "1 broken rows" in capsys.readouterr().out


def test_long_conversations_are_left_out_or_cut_off_as_upstream_does(tmp_path, tokenizer, capsys):
    path = write(tmp_path, SHORT, LONG)
    dropped = conversations.read(path, arguments(tokenizer, path))
    assert dropped.lengths[0] > 0 and dropped.lengths[1] == 0
    assert "1 of 2 conversations" in (said := capsys.readouterr().out) and "rows.jsonl line 2" in said
    cut = conversations.read(path, arguments(tokenizer, path, wlb_sft_too_long="truncate"))
    assert cut.lengths[0] == dropped.lengths[0] and cut.lengths[1] > 256


def test_several_conversations_of_a_row_and_folders(tmp_path, tokenizer):
    path = write(tmp_path, [*SHORT, *conversation([9])], SHORT)
    found = conversations.read(str(tmp_path), arguments(tokenizer, path, data_cache_path=str(tmp_path / "cache")))
    assert len(found.lengths) == 3 and found.begins.tolist() == [0, 2, 3]
    tokens = np.fromfile(f"{found.index.prefix}.bin", np.int32)
    assert len(tokens) == len(found.mask) == found.index.lengths.sum()
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
    assert found.lengths.tolist() == [3, 2] and found.mask.tolist() == [0, 0, 1, 0, 1]


def test_analyze_says_what_it_would_bring_and_what_upstream_pads(tmp_path, tokenizer, capsys):
    path = write(tmp_path, *([*SHORT, *conversation([9])], conversation([60]), LONG) * 10)
    flags = ["--sft", "--tokenizer-type", "SFTTokenizer", "--tokenizer-model", tokenizer, "--data-path", path]
    flags += ["--model", "llama3-8b", "--seq-length", "256", "--sft-tokenizer-prompt-format", FORMAT, "--steps", "1"]
    assert main(["analyze", *flags, "--json", "-"]) == 0
    printed = capsys.readouterr()
    found = conversations.read(path, arguments(tokenizer, path))
    rows = np.add.reduceat(found.index.lengths, found.begins[:-1])
    assert json.loads(printed.out)["data"]["documents"] == 39 and len(rows) == 30
    padding = 1 - np.mean(np.minimum(rows, 256)) / 256
    assert f"each of the 30 lines of {path}: {padding:.1%} of their tokens are padding" in " ".join(printed.err.split())
    assert main(["analyze", *flags, "--json", path]) == 2 and "an input of this command" in capsys.readouterr().err


def test_messages_of_parquet_are_those_of_lines(tmp_path, tokenizer):
    """A table of messages reads as its lines do."""
    rows = [conversation([length], length) for length in (3, 40, 9, 70)]
    lines, table = write_chats(tmp_path / "a.jsonl", rows), str(tmp_path / "b.parquet")
    datasets.Dataset.from_list([{"messages": row} for row in rows]).to_parquet(table)
    of_lines, of_table = (conversations.read(path, arguments(tokenizer, path)) for path in (lines, table))
    assert of_table.lengths.tolist() == of_lines.lengths.tolist() and (of_table.mask == of_lines.mask).all()
    tokens = [np.fromfile(f"{found.index.prefix}.bin", np.int32).tolist() for found in (of_lines, of_table)]
    assert tokens[0] == tokens[1]
