"""The pieces of samples: windows of a stream that is written out token by token, rows of a file, blends."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_wlb.plan.samples import Rows, Samples, Windows, blended, windows
from tests.jobs import samples

LENGTHS = st.lists(st.integers(0, 3) | st.integers(0, 40), min_size=1, max_size=12)


class Stream:
    """The reference: every token of the documents of `document_index`, as its place there and its offset."""

    def __init__(self, document_index, lengths, context_length):
        self.lengths = [int(lengths[document]) for document in document_index]
        self.tokens = [(place, offset) for place, length in enumerate(self.lengths) for offset in range(length)]
        self.context_length = context_length
        self.windows = (len(self.tokens) - 1) // context_length

    def beginning(self, window, *, behind):
        """Where a window begins; `behind`: at a document's end instead of the beginning of the next."""
        place, offset = self.tokens[window * self.context_length]
        if behind and window and not offset:
            place, offset = self.tokens[window * self.context_length - 1]
            offset += 1
        return place, offset

    def documents(self, window, number):
        """As `Windows.documents` gives them for the `number`th of its samples."""
        rows, first = {}, window * self.context_length
        for at, (place, offset) in enumerate(self.tokens[first : first + self.context_length]):
            index, begin, length = rows.get(place, (number * self.context_length + at, offset, 0))
            rows[place] = index, begin, length + 1
        return [(index, 0, place, offset, length, 0) for place, (index, offset, length) in rows.items()]


@st.composite
def streams(draw):
    """Arrays of a dataset of at least one window, and the stream that they are made from."""
    lengths = draw(LENGTHS.filter(lambda lengths: sum(lengths) > 1))
    documents = draw(st.permutations([*range(len(lengths))] * draw(st.integers(1, 3))))
    context_length = draw(st.sampled_from([c for c in (1, 2, 3, 8, 30) if c < sum(lengths)]))
    stream = Stream(documents, lengths, context_length)
    behind = draw(st.booleans())
    given = Windows(
        document_index=np.array(documents, np.int32),
        sample_index=np.array([stream.beginning(i, behind=behind) for i in range(stream.windows + 1)], np.int32),
        shuffle_index=np.array(draw(st.permutations(range(stream.windows))), np.uint32),
        lengths=np.array(lengths, np.int32),
        context_length=context_length,
    )
    return given, stream


@given(streams(), st.data())
def test_pieces_are_those_of_the_stream_written_out(made, data):
    """Empty documents, documents of many windows, several epochs, any samples in any order."""
    given, stream = made
    chosen = data.draw(st.lists(st.integers(0, len(given) - 1), max_size=8))
    rows = [row for i, sample in enumerate(chosen) for row in stream.documents(int(given.shuffle_index[sample]), i)]
    assert given.documents(np.array(chosen, np.int64)).tolist() == rows


@given(streams(), st.data())
def test_arrays_of_other_documents_are_told(made, data):
    """Whatever number differs: of a length, a document, a window or the order; but where these are as good."""
    given, _ = made
    documents = np.arange(len(given.lengths))
    assert given.misfit(documents) == given.misfit(None) == ""
    name = data.draw(st.sampled_from(["lengths", "document_index", "sample_index", "shuffle_index"]))
    changed = getattr(given, name).copy()
    place = tuple(data.draw(st.integers(0, n - 1)) for n in changed.shape)
    changed[place] += data.draw(st.sampled_from([1, 2, 50]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megatron_wlb.plan.samples._CHUNK", data.draw(st.sampled_from([1, 2, 1 << 22])))
        other = replace(given, **{name: changed})
        if given.misfit(documents) == "" and other.misfit(documents) == "":
            stream = Stream(other.document_index, other.lengths, other.context_length)
            begins = [{stream.beginning(i, behind=behind) for behind in (True, False)} for i in range(len(other) + 1)]
            assert all(tuple(row) in each for row, each in zip(other.sample_index.tolist(), begins, strict=True))
            assert sorted(other.shuffle_index) == [*range(stream.windows)] and name != "document_index"


@given(LENGTHS, st.sampled_from([1, 3, 8]), st.none() | st.integers(0, 3), st.none() | st.integers(1, 60))
def test_windows_have_every_token_of_their_epochs_but_the_last_ones(lengths, context_length, seed, num_samples):
    total = sum(lengths)
    if not total or (num_samples is None and total <= context_length):
        with pytest.raises(ValueError, match=f"{len(lengths)} documents of {total} tokens do not fill one window"):
            windows(np.array(lengths), context_length, seed=seed, num_samples=num_samples)
        return
    made = windows(np.array(lengths), context_length, seed=seed, num_samples=num_samples)
    epochs, rest = divmod(len(made.document_index), len(lengths))
    assert not rest and len(made) == (epochs * total - 1) // context_length >= (num_samples or 1)
    assert epochs == 1 or ((epochs - 1) * total - 1) // context_length < num_samples
    assert sorted(made.document_index) == sorted([*range(len(lengths))] * epochs)
    stream = Stream(made.document_index, lengths, context_length)
    assert sorted(made.shuffle_index) == list(range(stream.windows))
    rows = [row for i, window in enumerate(made.shuffle_index) for row in stream.documents(int(window), i)]
    assert made.documents(np.arange(len(made))).tolist() == rows
    if seed is None:
        assert made.document_index.tolist() == [*range(len(lengths))] * epochs
        assert made.shuffle_index.tolist() == [*range(len(made))]


def test_what_is_no_length_and_parts_of_another_window_are_refused():
    for lengths in ([3, -1, 9], [1.5, 20], [[9, 9], [9, 9]]):
        with pytest.raises(ValueError, match=r"lengths have shape .*; give whole numbers from 0 on"):
            windows(np.array(lengths), 4)
    for size in (0, -4):
        with pytest.raises(ValueError, match=f"context_length is {size}; it must be int >= 1"):
            windows(LONG, size)
    with pytest.raises(
        ValueError, match="datasets have other windows than the samples' 32 tokens; give all one context_len"
    ):
        Samples(datasets=[windows(LONG, 64)], context_length=32)


@given(
    st.lists(st.lists(st.integers(0, 5), max_size=4), min_size=1, max_size=6),
    st.integers(1, 12),
    st.integers(1, 15),
    st.data(),
)
def test_rows_have_their_documents_up_to_the_window(of_rows, context_length, num_samples, data):
    rows = data.draw(st.lists(st.integers(0, len(of_rows) - 1), min_size=1, max_size=6))
    lengths = [length for row in of_rows for length in row]
    begins = np.cumsum([0, *map(len, of_rows)])
    part = Rows(
        rows=np.array(rows),
        begins=begins,
        lengths=np.array(lengths, np.int32),
        context_length=context_length,
        num_samples=num_samples,
    )
    assert len(part) == num_samples
    first = data.draw(st.integers(0, num_samples - 1))
    expected = []
    for number, sample in enumerate(range(first, num_samples)):
        row, place = rows[sample % len(rows)], 0
        for k, length in enumerate(of_rows[row]):
            kept = min(length, context_length - place)
            if kept > 0:
                expected.append((number * context_length + place, 0, int(begins[row]) + k, 0, kept, 0))
            place += max(kept, 0)
    assert part.documents(np.arange(first, num_samples)).tolist() == expected


LONG = np.random.default_rng(0).integers(0, 300, 200)
BLEND = [LONG, LONG[:50] // 3, np.array([65, 1, 900])]


@pytest.mark.parametrize("order", [None, lambda places: (7 * places + 3) % 150], ids=["in order", "endless"])
@pytest.mark.parametrize("data", [BLEND[:1], BLEND], ids=["one", "blend"])
def test_samples_are_those_of_their_parts_one_by_one(data, order):
    made = samples(*data)
    made = Samples(datasets=made.datasets, blend=made.blend, context_length=64, order=order)
    expected = []
    for place in range(len(made)):
        sample = place if order is None else order(place)
        dataset, number = (int(each[sample]) for each in made.blend) if made.blend else (0, sample)
        for row in made.datasets[dataset].documents(np.array([number])).tolist():
            expected.append((row[0] + place * 64, dataset, *row[2:]))
    for step in (1, 7, len(made)):
        parts = [made.documents(first, min(first + step, len(made))) for first in range(0, len(made), step)]
        assert np.concatenate(parts).tolist() == expected
    index = np.array([row[0] for row in expected])
    assert (np.diff(index) > 0).all() and set(index // 64) == set(range(len(made)))
    if order is None:
        ends = "the data ends: samples {0} to {1} of {2}; train fewer steps"
        with pytest.raises(ValueError, match=ends.format(5, len(made) + 1, len(made))):
            made.documents(5, len(made) + 1)
    assert len(made.documents(3, 3)) == 0


def test_a_blend_draws_from_the_dataset_that_is_furthest_behind():
    """Of weights of 1, 5 and 2: by what a dataset should have so far less what it has; the first of a tie."""
    which, number = blended([None] * 3, (1, 5, 2), 8)
    assert which.tolist() == [1, 2, 0, 1, 1, 2, 1, 1] and number.tolist() == [0, 0, 0, 1, 2, 1, 3, 4]


def test_other_seeds_give_other_orders():
    orders = [windows(LONG, 64, seed=seed) for seed in (0, 1)]
    for name in ("document_index", "shuffle_index"):
        one, other = (getattr(order, name) for order in orders)
        assert (one != other).mean() > 0.9 and sorted(one) == sorted(other)
