"""Sources of data by hand: which one flags ask for, how they are opened, and what is said of them."""

import errno
import json
from argparse import Namespace
from types import SimpleNamespace

import numpy as np
import pytest
import torch.distributed as dist
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.gpt_dataset import GPTDataset, MockGPTDataset

from megatron_wlb.adapter.sources import conversations, datasets, eod, source
from megatron_wlb.adapter.sources.conversations import FromConversations
from megatron_wlb.adapter.sources.mock import Mock, _Drawn
from megatron_wlb.adapter.sources.windows import FromIndex
from megatron_wlb.plan.mock import MockDocuments, mock_lengths
from tests.worlds import run_world

SOURCES = {"mock_data": False, "wlb_sft": False, "wlb_mock_lengths": None, "seed": 7}


@pytest.mark.parametrize(
    ("changes", "kind", "of", "apart"),
    [
        ({}, FromIndex, GPTDataset, False),
        ({"wlb_sft": True}, FromConversations, conversations._Conversations, True),
        ({"mock_data": True}, Mock, MockGPTDataset, False),
        ({"mock_data": True, "wlb_sft": True, "wlb_mock_lengths": "F2"}, Mock, _Drawn, True),
    ],
)
def test_flags_choose_the_source(changes, kind, of, apart):
    found = datasets.source_of(Namespace(**SOURCES | changes))
    assert (type(found), found.kind, found.apart) == (kind, of, apart)


def test_mock_documents_have_the_lengths_that_flags_name():
    args, config = (
        Namespace(**SOURCES | {"wlb_mock_lengths": "F2"}),
        SimpleNamespace(tokenizer=SimpleNamespace(vocab_size=9, eod=4)),
    )
    Mock(args).prepare(config)
    found = _Drawn.build_low_level_dataset(None, config)
    wanted = MockDocuments(distribution=mock_lengths("F2"), seed=7, vocabulary=9, eod=4)
    assert found.sequence_lengths.tolist() == wanted.sequence_lengths.tolist()
    assert found.get(3).tolist() == wanted.get(3).tolist()


@pytest.mark.parametrize(
    ("split", "whole", "message"),
    [
        ("train", False, "the training split is empty, give another --split"),
        ("valid", False, "the validation split is empty, and --eval-iters is 3; give --eval-iters 0"),
        ("valid 1", True, "the validation split is empty, and --full-validation is given; give --eval-iters 0"),
        ("test", False, "the test split is empty, and --eval-iters is 3"),
    ],
)
def test_an_empty_split_is_told_with_what_asks_for_it(split, whole, message):
    assert message in str(source.empty(Namespace(full_validation=whole, eval_iters=3), split))


def test_blends_name_files_once():
    blends = [(["b", "a"], [1, 2]), None, (["c", "b"], None)]
    assert source.paths((["a", "b"], None), None) == ["a", "b"] and source.paths(None, blends) == ["b", "a", "c"]
    evaluated = [(True, 0), (False, 1), (False, 0)]
    assert [source.evaluates(Namespace(full_validation=a, eval_iters=b)) for a, b in evaluated] == [True, True, False]


@pytest.mark.parametrize(
    ("raised", "number"), [("cause", errno.EMFILE), ("itself", errno.EMFILE), ("itself", errno.EACCES)]
)
def test_only_too_many_open_files_are_told_as_such(raised, number, monkeypatch):
    """Upstream raises another error, with it as the cause."""
    error = OSError(number, "no")
    if raised == "cause":
        (outer := RuntimeError("many causes")).__cause__, error = error, None
    monkeypatch.setattr(datasets.resource, "getrlimit", lambda kind: (10, 200))
    monkeypatch.setattr(datasets.resource, "setrlimit", lambda kind, limits: seen.append(limits))
    seen, config = [], SimpleNamespace()

    def build(*given):
        seen.append(given[:2])
        raise error or outer

    monkeypatch.setattr(datasets, "BlendedMegatronDatasetBuilder", build)
    kind, message = (ValueError, "open than the 200 that") if number == errno.EMFILE else (PermissionError, "no")
    with pytest.raises(kind, match=message):
        datasets.build(Namespace(**SOURCES), "samples", config)
    assert seen == [(200, 200), (GPTDataset, "samples")] and config.defer_npy_index_mmap is False


def test_sequences_are_read_where_they_are_named(tmp_path, monkeypatch):
    (path := tmp_path / "sequences.json").write_text(json.dumps({"a": [3, 4]}))
    for name in ("GPTDatasetConfig", "build_tokenizer"):
        monkeypatch.setattr(datasets, name, lambda *given, **named: named)
    monkeypatch.setattr(datasets, "get_blend_and_blend_per_split", lambda args: (None, None))

    class Args(Namespace):
        def __getattr__(self, name):
            return name

    assert datasets._config(Args(per_dataset_sequences_path=str(path)))["sequences_per_dataset"] == {"a": [3, 4]}
    found = datasets._config(Args(per_dataset_sequences_path=None))
    named = {
        "random_seed": "seed",
        "sequence_length": "seq_length",
        "num_dataset_builder_threads": "num_dataset_builder_threads",
    }
    named |= {"path_to_cache": "data_cache_path", "fast_cache_load": "dataloader_fast_cache_load", "split": "split"}
    assert found["sequences_per_dataset"] is None and {name: found[name] for name in named} == named


def test_a_blend_that_draws_behind_a_dataset_is_stale(monkeypatch):
    """By its last samples; others begin where the process does."""
    blend, parts = (
        object.__new__(BlendedDataset),
        [SimpleNamespace(dataset_path=name, size=i) for i, name in enumerate("ab")],
    )
    lengths = {"a": 2, "b": 3}
    parts = [
        type("Part", (SimpleNamespace,), {"__len__": lambda self: lengths[self.dataset_path]})(**vars(p)) for p in parts
    ]
    blend.datasets, blend.dataset_index = parts, np.array([1, 0, 1, 0, 1])
    blend.dataset_sample_index, blend.unique_description_hash = np.array([0, 0, 1, 1, 2]), "hash"
    blend.config = SimpleNamespace(path_to_cache="cache")
    opened = SimpleNamespace(opened=lambda part: (part.dataset_path, part), remark=lambda given: f"of {len(given)}")
    monkeypatch.setattr(datasets, "source_of", lambda args: opened)
    monkeypatch.setattr(datasets, "order_of", lambda args, split, size: (("order", split, size), 11))
    found = datasets.split_data(blend, Namespace(seq_length=16), "train", 40)
    assert (found.samples.datasets, found.samples.order, len(found.samples)) == (("a", "b"), ("order", "train", 5), 5)
    assert (found.first_sample, found.steps, found.remark) == (40, 11, "of 2")
    assert found.identity == datasets.digest_of("hash", 0, 1)
    lengths["b"] = 2
    with pytest.raises(
        ValueError, match=r"index cache/hash-\* is not of b, which has 2 samples: it draws 2; delete it"
    ):
        datasets.split_data(blend, Namespace(seq_length=16), "train", 40)


def test_texts_inside_of_documents_are_told():
    """Of 5 documents one ends with its only EOD, one with another before, one without; one has no token."""
    texts = [[1, 0], [1, 1, 0, 1, 0], [1, 1, 1], [], [0, 1, 1, 1]]

    def dataset(*numbers):
        of = SimpleNamespace(sequence_lengths=np.array([*map(len, texts)]), get=lambda i: np.array(texts[i]))
        config = SimpleNamespace(tokenizer=SimpleNamespace(eod=0))
        return SimpleNamespace(dataset=of, config=config, indices=np.array(numbers), document_index=np.array([1]))

    assert eod.remark_on_ends([dataset(0, 3), dataset(0)], by_eod=False) == ""
    told = "3 of 4 sampled documents do not end with their only EOD token: "
    pairs, within = 4 + 25 + 9 + 16, 4 + (9 + 4) + 9 + (1 + 9)
    crossed = f"attention goes across EOD for {1 - within / pairs:.1%} of their pairs of tokens"
    assert eod.remark_on_ends([dataset(0, 1, 3), dataset(2, 4)], by_eod=False) == told + crossed
    assert eod.remark_on_ends([dataset(0, 1, 3), dataset(2, 4)], by_eod=True).startswith(f"{told}pieces end where EOD")
    (late := dataset(0)).indices = None
    assert eod.remark_on_ends([late], by_eod=False).startswith("1 of 1 sampled")
    for more, told in ((200, "1 of 51"), (201, "")):  # every fourth is looked at
        for sets in ([*[dataset(0)] * more, dataset(1)], [dataset(*[0] * more, 1)]):
            assert eod.remark_on_ends(sets, by_eod=False).startswith(told or " ") == bool(told)


def _turns(fails):
    """The result on this rank of two nodes of two, and when it read."""
    order, rank = [], dist.get_rank()

    def read():
        order.append(dist.distributed_c10d.time.monotonic())
        if rank == fails:
            raise ValueError(f"no file on rank {rank}")
        return f"read by {rank}"

    try:
        return conversations._in_turn(read, rank % 2), order
    except ValueError as error:
        return str(error), order


def test_one_rank_reads_first_then_one_of_every_node_then_all():
    found = run_world(_turns, 4, None)
    assert [value for value, _ in found] == [f"read by {rank}" for rank in range(4)]
    times = [of_rank for _, (of_rank,) in found]
    assert times[0] < times[2] < min(times[1], times[3])
    found = run_world(_turns, 4, 2)
    assert [value for value, _ in found] == ["no file on rank 2"] * 4 and [len(order) for _, order in found] == [
        1,
        0,
        1,
        0,
    ]
