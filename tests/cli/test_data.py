"""Samples that commands cut from data without torch."""

import resource
import shlex

import numpy as np
import pytest

from megatron_wlb.cli import data
from megatron_wlb.describe.arguments import MegatronArguments
from megatron_wlb.describe.flags import RunSettings
from tests.adapter.datasets import write_lengths
from tests.cli.analyses import MODEL, described
from tests.limits import limited

WINDOW, SAMPLES = 128, 70


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory):
    """Of three datasets, the last without a window of its own."""
    rng, folder = np.random.default_rng(1), tmp_path_factory.mktemp("data")
    lengths = rng.integers(0, 300, 60), rng.integers(1, 50, 90), np.array([0, 40, 41])
    return [write_lengths(folder / f"{i}", each) for i, each in enumerate(lengths)]


def samples(*words):
    found = described(MODEL, f"--seq-length {WINDOW} --global-batch-size 2", *words)
    return found.data.samples(1234, WINDOW, SAMPLES)


def test_weights_of_a_blend_are_shares(prefixes):
    """Whatever they sum to, as upstream has it."""
    shares, counts = (
        samples("--split 1 --data-path {} {} {} {}".format(*w))
        for w in ((0.7, prefixes[0], 0.3, prefixes[1]), (7, prefixes[0], 3, prefixes[1]))
    )
    assert [len(part) for part in shares.datasets] == [len(part) for part in counts.datasets]
    for one, other in zip(shares.blend, counts.blend, strict=True):
        assert one.tolist() == other.tolist()


def test_a_blend_may_have_more_datasets_than_files_may_be_open(prefixes):
    with limited(resource.RLIMIT_NOFILE, 100):
        found = samples("--split 1 --data-path", *prefixes[:2] * 200)
    assert len(found.datasets) == 400 and len(found.documents(0, len(found)))


def test_numbers_of_a_split_are_those_of_upstream(prefixes):
    texts = "60,20,20", "60:20:20", "[60 20 20]"
    alike = [samples(f"--data-path {prefixes[0]} --split {shlex.quote(text)}") for text in texts]
    assert len({len(each.datasets[0].lengths) for each in alike}) == 1
    with pytest.raises(ValueError, match="--split 1e2,0,0: give shares"):  # four numbers
        samples(f"--data-path {prefixes[0]} --split 1e2,0,0")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--split 1 --data-path LAST LAST", "2 fills no window of 128 tokens; give the blend weights"),
        ("--split 1,2,0 --data-path LAST", r"has no token among the first 33.333% of 3 documents \(--split 1,2,0\)"),
    ],
)
def test_data_that_train_nothing_are_refused(words, message, prefixes):
    with pytest.raises(ValueError, match=message):
        samples(words.replace("LAST", prefixes[2]))


@pytest.mark.parametrize(
    ("words", "prefixes", "weights"),
    [("0.5 a 1 b", ["a", "b"], [0.5, 1]), ("a b", ["a", "b"], None), ("1 a 2", ["1", "a", "2"], None)],
)
def test_a_blend_has_weights_where_words_come_in_pairs_with_numbers(words, prefixes, weights):
    assert data._blend(words.split()) == (prefixes, weights)


def test_weights_that_no_sum_can_have_are_refused():
    with pytest.raises(ValueError, match="--data-path inf a 1 b: weights must be positive and finite"):
        data._blend("inf a 1 b".split())


def test_blends_are_as_long_as_their_datasets_or_as_their_shares_rounded_up():
    """Of 400 and 100 windows by size at most all; of 1,000 by weight a third of nearly all, rounded up."""
    lengths = [np.full(400, 32), np.full(100, 32)]
    by_size = data.Data(lengths=lengths, prefixes=["a", "b"], has_validation=True)
    assert [np.bincount(by_size.samples(1, 32, n).blend[0]).tolist() for n in (50, 9999)] == [[40, 10], [399, 99]]
    even = data.Data(lengths=lengths * 2, prefixes=[*"abcd"], weights=[1, 1, 1, 0.01], has_validation=True)
    found = even.samples(1, 32, 1000)
    assert len(found.blend[0]) == 3 * 333 + 4


@pytest.mark.parametrize(("split", "validates"), [("1,0,1", False), ("1,1,0", True), ("1", False)])
def test_a_split_without_second_share_validates_nothing(split, validates, prefixes):
    found = data.data_of(MegatronArguments(data_path=(prefixes[0],), split=split), [], RunSettings())
    assert found.has_validation == validates


def test_mock_data_train_a_third_of_their_documents():
    found = data.data_of(MegatronArguments(mock_data=True), [], RunSettings())
    assert len(found.lengths[0]) == 33_333 and found.has_validation


def test_rows_of_conversations_are_split_as_documents_are(monkeypatch):
    """Four rows of 2, 1, 4 and 5 conversations."""
    read = np.arange(1, 13), np.array([0, 2, 3, 7, 12])
    monkeypatch.setattr(data, "_conversations", lambda *_: read)
    for split, rows in (("1", 4), ("1,1", 2), ("3,1", 3)):
        found = data.data_of(MegatronArguments(sft=True, data_path=("file",), split=split), [], RunSettings())
        assert [each.tolist() for each in found.begins] == [read[1][: rows + 1].tolist()]
        assert [each.tolist() for each in found.lengths] == [read[0][: read[1][rows]].tolist()]


@pytest.mark.parametrize(
    ("blend", "message"),
    [
        (b"\n", "the blend names no dataset; give it the prefix of one"),
        (b"\xff", "--data-args-path .* is no text; give --data-args-path a file of weights and prefixes"),
    ],
)
def test_a_file_that_holds_no_blend_is_refused(blend, message, tmp_path):
    (tmp_path / "blend").write_bytes(blend)
    with pytest.raises(ValueError, match=message):
        samples(f"--data-args-path {tmp_path / 'blend'}")
