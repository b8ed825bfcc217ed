"""`--sft --wlb` trains what upstream's `--sft` trains: the same rows, targets and gradients, in every layout."""

import functools
import gzip
import json
import os
import re
from argparse import Namespace
from pathlib import Path

import datasets
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron.training.datasets.sft_dataset import SFTDataset

from megatron_wlb.adapter.sources import conversations
from megatron_wlb.cli.main import main
from tests.adapter.chats import conversation, write_chats, write_tokenizer
from tests.adapter.training import CP2, MTP, PP2, TP2, each_version, relative_error, train
from tests.limits import files_up_to
from tests.upstream.test_parity import TOLERANCE

FORMAT = "nemotron-nano-v2"
WITHOUT = "--vocab-size --reset-attention-mask --reset-position-ids"
ROWS = [[30], [1], [100, 3], [5, 5, 5], [180], [60, 20], [2], [11], [240], [7], [90], [13]]
"""Answers of the conversation of each row, one and a half steps of them; one is cut off at the window."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    return write_chats(path, [conversation(answers, i) for i, answers in enumerate(ROWS)])


def sft_flags(tokenizer, prompt=FORMAT):
    sft = ["--sft", "--tokenizer-type", "SFTTokenizer", "--tokenizer-model", tokenizer]
    sft += ["--make-vocab-size-divisible-by", "256"]  # for one tensor-parallel rank and for two
    return [*sft, "--sft-tokenizer-prompt-format", prompt, "--split", "100,0,0"]


def arguments(tokenizer, path, **changes):
    """What reading conversations asks of upstream's arguments."""
    given = {"tokenizer_type": "SFTTokenizer", "tokenizer_model": tokenizer, "seq_length": 256}
    given |= {"sft_tokenizer_prompt_format": FORMAT, "data_cache_path": str(Path(path).parent / "cache")}
    given |= {"wlb_sft_skip": ("long",), "context_parallel_size": 1, "sequence_parallel": False}
    return Namespace(**given | changes)


@pytest.fixture(scope="module")
def upstream(chats, tokenizer):
    """Upstream's own --sft in one process, which trains each row alone, in a window of padding."""

    @functools.cache
    def run(flags=""):
        return train(1, chats, *sft_flags(tokenizer), *flags.split(), wlb=False, without=WITHOUT)

    return run


def compare(run, theirs):
    """Losses and gradients of every step."""
    assert max(map(relative_error, run["grads"], theirs["grads"])) <= TOLERANCE
    assert run["losses"] == pytest.approx(theirs["losses"], rel=TOLERANCE)


EVALUATE = "--split 60,40,0 --eval-iters 1 --eval-interval 1"


@pytest.mark.parametrize(
    ("size", "layout", "flags"),
    [
        (2, TP2, ""),
        (2, CP2, ""),
        (1, "--num-workers 2", ""),  # which read ahead, up to the end of the data
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
    compare(run, theirs)
    assert run["evaluations"] == pytest.approx(theirs["evaluations"], rel=TOLERANCE)
    assert bool(run["evaluations"]) == (flags == EVALUATE)


PACKED = [[[30, 4], [1], [17]], [[100], [9, 9]], [[5], [6], [7], [8], [60]], [[180], [33], [12]], [[2]], [[13], [300]]]
"""Answers of each conversation of a row; some rows are over the window."""


@pytest.mark.parametrize(
    ("size", "layout", "prompt", "flags"),
    [
        each_version(2, CP2, FORMAT, "--calculate-per-token-loss"),
        (4, f"{CP2} {PP2}", "identity", ""),
        each_version(2, TP2, "identity", ""),
        (2, CP2, "identity", "--micro-batch-size 2 --calculate-per-token-loss"),
        (2, PP2, "identity", ""),
    ],
)
def test_rows_of_several_conversations(size, layout, prompt, flags, tmp_path, tokenizer, monkeypatch):
    """With the padding that upstream puts between them for parallel ranks, which predicts the next one."""
    rows = [[m for answers in row for m in conversation(answers, len(answers) + i)] for i, row in enumerate(PACKED)]
    data, common = write_chats(tmp_path / "packed.jsonl", rows), [*sft_flags(tokenizer, prompt), *flags.split()]
    run = train(size, data, *common, *layout.split(), without=WITHOUT)
    made = SFTDataset.__init__

    def of_ranks(self, *given):
        given[-1].context_parallel_size = 2 if CP2 in layout else 1
        given[-1].sequence_parallel_size = 2 if TP2 in layout else 0
        made(self, *given)

    monkeypatch.setattr(SFTDataset, "__init__", of_ranks)
    theirs = train(1, data, *common, wlb=False, without=WITHOUT)
    compare(run, theirs)


def test_a_blend_is_read_on_several_ranks(chats, tokenizer, tmp_path):
    """Where upstream's builder makes the datasets of one rank before those of the others."""
    other = write_chats(tmp_path / "other.jsonl", [conversation([20 + i], i) for i in range(9)])
    blend, flags = f"2 {chats} 1 {other}", sft_flags(tokenizer)
    run = train(2, blend, *flags, without=WITHOUT, timeout=200)
    theirs = train(1, blend, *flags, wlb=False, without=WITHOUT)
    compare(run, theirs)


# Rows ----------------------------------------------------------------------------------------------------------------

LONG, SHORT = conversation([300]), conversation([3])


def write(tmp_path, *lines):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps({"messages": line}) for line in lines))
    return str(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ([], "row 2: it has no messages"),
        ([{"role": "robot", "content": "a"}], "row 2: a message has role 'robot'; roles are system, user, assistant"),
        ([{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}], "assistant is empty"),
        ([{"role": "user", "content": "a"}], "row 2: no token of it is trained"),
        ([{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}], "row 2: AssertionError"),
    ],
)
def test_broken_rows_stop_the_run_or_are_counted(line, message, tmp_path, tokenizer, capsys):
    path = write(tmp_path, SHORT, line, "", SHORT)
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        conversations.read(path, arguments(tokenizer, path))
    assert "--wlb-sft-skip broken" in str(error.value)
    for _ in range(2):  # also from the cache
        found = conversations.read(path, arguments(tokenizer, path, wlb_sft_skip=("long", "broken")))
        assert found.begins.tolist() == [0, 1, 2] and [len(found.row(i)[0]) for i in (0, 1)] == found.lengths.tolist()
        assert "1 broken rows" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"messages": [', "cannot be read by the datasets library: JSON parse error"),
        ("[1, 2]", "row 1: it has no messages"),
        ('{"text": "a"}', "row 1: it has no messages"),
        ("", "cannot be read by the datasets library"),
    ],
)
def test_files_that_hold_no_rows_of_messages_are_refused(text, message, tmp_path, tokenizer):
    path = write(tmp_path, text)
    with pytest.raises(ValueError, match=re.escape(message)):
        conversations.read(path, arguments(tokenizer, path))
    with pytest.raises(ValueError, match="holds no conversations; give --data-path a file of .jsonl"):
        conversations.read(f"{path}.txt", arguments(tokenizer, path))


GOOD = {"input_ids": [5, 6, 7, 8, 9], "loss_mask": [0, 1, 0, 1, 0], "seq_start_id": [0, 3]}
ANYTHING = st.none() | st.integers() | st.floats() | st.text(max_size=2) | st.booleans()


@given(
    st.fixed_dictionaries(
        {name: st.just(good) | st.lists(st.integers(-1, 6), max_size=6) | ANYTHING | st.lists(ANYTHING | st.just([1]))
         for name, good in GOOD.items()},
        optional={"messages": st.lists(st.dictionaries(st.sampled_from(["role", "content"]), ANYTHING)) | ANYTHING},
    )
)  # fmt: skip
def test_a_row_is_whole_or_broken(tokenizer, row):
    """Whatever it holds: as many masks as tokens, which are its conversations', or none and a reason."""
    found = conversations._row(row, 0, "file", conversations._made(tokenizer, FORMAT))
    assert len(found["tokens"]) == len(found["trained"]) == sum(found["lengths"])
    assert bool(found["broken"]) == (not found["lengths"])
    if found["lengths"]:
        assert (
            found["tokens"].tolist() == row["input_ids"]
            and np.cumsum(found["lengths"])[:-1].tolist() == (row["seq_start_id"][1:])
        )
        assert found["trained"].sum() <= np.sum(row["loss_mask"]) == sum(x in (0, 1) and x for x in row["loss_mask"])


@pytest.mark.parametrize(
    "change",
    [
        {"loss_mask": [0, 1]},
        {"loss_mask": [0, 1, 0, 7, 0]},
        {"loss_mask": [0, 0.5, 0, 1, 0]},
        {"input_ids": [5, 6, 7, 8, (1 << 32) + 5]},
        {"input_ids": [[5, 6, 7, 8, 9]]},
        {"input_ids": [5.5, 6, 7, 8, 9]},
        {"seq_start_id": [0, -3]},
        {"seq_start_id": [1, 3]},
        {"seq_start_id": [0, 5]},
        {"seq_start_id": []},
    ],
)
def test_packs_that_disagree_with_themselves_are_broken_rows(change, tokenizer):
    made = conversations._made(tokenizer, FORMAT)
    assert not conversations._row(GOOD, 0, "file", made)["broken"]
    assert conversations._row(GOOD | change, 6, "file", made)["broken"].startswith("file row 7: ")


def test_long_conversations_are_left_out_or_cut_off_as_upstream_does(tmp_path, tokenizer, capsys):
    path = write(tmp_path, SHORT, LONG)
    dropped = conversations.read(path, arguments(tokenizer, path))
    assert dropped.lengths[0] > 0 and dropped.lengths[1] == 0
    assert "1 of 2 conversations" in (said := capsys.readouterr().out) and "rows.jsonl row 2" in said
    cut = conversations.read(path, arguments(tokenizer, path, wlb_sft_skip=None))
    assert cut.lengths[0] == dropped.lengths[0] and cut.lengths[1] > 256


def test_several_conversations_of_a_row_and_folders(tmp_path, tokenizer):
    path = write(tmp_path, [*SHORT, *conversation([9])], SHORT)
    found = conversations.read(str(tmp_path), arguments(tokenizer, path, data_cache_path=str(tmp_path / "cache")))
    assert len(found.lengths) == 3 and found.begins.tolist() == [0, 2, 3]
    assert [len(found.row(i)[0]) for i in (0, 1)] == [sum(found.lengths[:2]), found.lengths[2]]
    Path(path).rename(tmp_path / "row[1].jsonl")  # no pattern, which would find no file, or another one
    (tmp_path / "row1.jsonl").write_text(json.dumps({"messages": LONG}))
    found = conversations.read(str(tmp_path / "row[1].jsonl"), arguments(tokenizer, path))
    assert found.begins.tolist() == [0, 2, 3]


def test_tokenizing_happens_once(tmp_path, tokenizer, monkeypatch):
    path = write(tmp_path, SHORT, LONG)
    args = arguments(tokenizer, path)
    before = conversations.read(path, args)
    monkeypatch.setattr(conversations, "_row", lambda *_, **__: pytest.fail("it is there already"))
    assert conversations.read(path, args).lengths.tolist() == before.lengths.tolist()
    monkeypatch.undo()
    write(tmp_path, SHORT)
    assert len(conversations.read(path, args).lengths) == 1


def test_another_file_of_the_same_name_and_time_is_tokenized(tmp_path, tokenizer):
    path = write(tmp_path, SHORT, SHORT)
    args, time = arguments(tokenizer, path), Path(path).stat().st_mtime_ns
    before = conversations.read(path, args)
    write(tmp_path, SHORT, conversation([4], 1))
    os.utime(path, ns=(time, time))
    assert conversations.read(path, args).lengths.tolist() != before.lengths.tolist()


def test_a_full_disk_is_named_and_names_of_files_do_not_reach_the_terminal(tmp_path, tokenizer, capsys, monkeypatch):
    (folder := tmp_path / "\x1b[31m").mkdir()
    path = write(folder, SHORT, LONG, [])
    args = arguments(tokenizer, path, wlb_sft_skip=("broken",))
    conversations.read(path, args)
    said = capsys.readouterr().out
    assert said.count("[31m/rows.jsonl") == 4 and "\x1b" not in said
    monkeypatch.setattr(conversations, "VERSION", 0)  # to be tokenized anew
    with files_up_to(10), pytest.raises(ValueError, match="the tokens of .* cannot be written: .*File too large; free"):
        conversations.read(path, args)


def test_a_file_without_a_whole_row_is_refused(tmp_path, tokenizer):
    path = write(tmp_path, [], [])
    with pytest.raises(ValueError, match=r"rows.jsonl has no conversation to train: .*row 1: it has no messages; give"):
        conversations.read(path, arguments(tokenizer, path, wlb_sft_skip=("broken",)))


def test_tokenizers_that_upstream_cannot_take_are_refused(tokenizer, monkeypatch):
    with pytest.raises(ValueError, match="and --tokenizer-type is HuggingFaceTokenizer; give --tokenizer-type SFTTok"):
        conversations._tokenizer(arguments(tokenizer, "", tokenizer_type="HuggingFaceTokenizer"))
    monkeypatch.setattr(conversations, "_made", lambda model, prompt: Namespace(pad_id=None, of=(model, prompt)))
    with pytest.raises(ValueError, match=f"no pad token for --sft-tokenizer-prompt-format {FORMAT}, and"):
        conversations._tokenizer(arguments(tokenizer, ""))


@pytest.mark.parametrize(
    ("ranks", "tp", "sequence", "divides", "multiple"),
    [
        *((1, 1, False, False, 1), (2, 1, False, False, 4), (3, 2, True, False, 6), (3, 2, True, True, 12)),
        *((3, 2, False, True, 6), (1, 2, True, True, 2), (None, None, False, True, 1)),
    ],
)
def test_conversations_are_padded_as_upstream_pads_them(ranks, tp, sequence, divides, multiple, monkeypatch):
    """For sequence parallelism from one of its changes on."""
    if divides:
        monkeypatch.setattr(SFTDataset, "_calculate_padding_divisor", None, raising=False)
    else:
        monkeypatch.delattr(SFTDataset, "_calculate_padding_divisor", raising=False)
    how = {"context_parallel_size": ranks, "tensor_model_parallel_size": tp, "sequence_parallel": sequence}
    assert conversations._multiple(Namespace(**how)) == multiple


@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl.gz", "rows.parquet"])
def test_other_files_are_read_as_lines_are(name, tmp_path, tokenizer):
    rows = [conversation([length], length) for length in (3, 40, 9, 300)]
    lines, path = write(tmp_path, *rows), tmp_path / name
    messages = [{"messages": row} for row in rows]
    if name.endswith(".gz"):
        path.write_bytes(gzip.compress(Path(lines).read_bytes()))
    elif name.endswith(".json"):
        path.write_text(json.dumps(messages, indent=1))
    else:
        datasets.Dataset.from_list(messages).to_parquet(path)
    of_lines, other = (conversations.read(str(each), arguments(tokenizer, lines)) for each in (lines, path))
    assert other.lengths.tolist() == of_lines.lengths.tolist()
    for i in range(4):
        assert all(np.array_equal(*both) for both in zip(of_lines.row(i), other.row(i), strict=True))


def test_packs_of_bridge_are_conversations(tmp_path, tokenizer):
    """Their mask is that of labels: 1 where the next token is trained."""
    datasets.Dataset.from_list([GOOD]).to_parquet(tmp_path / "pack.parquet")
    path = str(tmp_path / "pack.parquet")
    found = conversations.read(path, arguments(tokenizer, path))
    assert found.lengths.tolist() == [3, 2] and found.row(0)[1].tolist() == [0, 0, 1, 0, 1]


def test_analyze_says_what_it_would_bring_and_what_upstream_pads(tmp_path, tokenizer, capsys):
    path = write(tmp_path, *([*SHORT, *conversation([9])], conversation([60]), LONG) * 10)
    flags = ["--sft", "--tokenizer-type", "SFTTokenizer", "--tokenizer-model", tokenizer, "--data-path", path]
    flags += ["--model", "llama3-8b", "--seq-length", "256", "--sft-tokenizer-prompt-format", FORMAT, "--steps", "1"]
    assert main(["analyze", *flags, "--json", "-"]) == 0
    printed = capsys.readouterr()
    found = conversations.read(path, arguments(tokenizer, path, wlb_sft_skip=None))
    rows = np.add.reduceat(found.lengths, found.begins[:-1])
    assert json.loads(printed.out)["data"]["documents"] == 39 and len(rows) == 30
    padding = 1 - np.mean(np.minimum(rows, 256)) / 256
    assert f"each of the 30 lines of {path}: {padding:.1%} of their tokens are padding" in " ".join(printed.err.split())
    assert main(["analyze", *flags, "--json", path]) == 2 and "an input of this command" in capsys.readouterr().err


def test_cached_tokens_are_those_of_the_same_tokenizer():
    """Of a fast one all of it: merges and normalizers, not only the vocabulary."""

    def identity(vocabulary=(("a", 1),), whole=None, form="chat", config="config"):
        inner = Namespace(get_vocab=lambda: dict(vocabulary))
        if whole is not None:
            inner.backend_tokenizer = Namespace(to_str=lambda: whole)
        tokenizer = Namespace(_tokenizer=inner, _prompt_format=form, _prompt_config=config)
        return conversations._identity(tokenizer)

    assert identity(vocabulary=(("a", 1), ("b", 2))) == identity(vocabulary=(("b", 2), ("a", 1)))
    changes = {}, {"vocabulary": (("a", 2),)}, {"form": "other"}, {"config": "other"}, {"whole": "x"}, {"whole": "y"}
    assert len({identity(**each) for each in changes}) == len(changes)
