"""The document stream: epochs, pieces, blends, and going on from a state."""

import json
from functools import cache

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_wlb.plan import stream as module
from megatron_wlb.plan.dataset import TrainedTokens, trained_tokens
from megatron_wlb.plan.stream import DocumentStream, Source, shuffled


def source(*lengths, **kwargs):
    return Source(lengths=np.array(lengths, np.int64), **kwargs)


@given(st.integers(1, 400), st.integers(-(2**63), 2**64), st.integers(0, 50))
@example(1, 0, 0)
@example(2, 0, 0)
@example(256, 0, 0)
@example(257, 0, 0)
def test_shuffled_is_a_permutation(size, seed, epoch):
    assert sorted(shuffled(np.arange(size), size, (seed, 0, epoch)).tolist()) == list(range(size))


def test_shuffled_reaches_far_and_depends_on_every_part_of_its_key():
    keys = [(1, 0, 0), (2, 0, 0), (1, 1, 0), (1, 0, 1), (0, 1, 0)]
    orders = {tuple(shuffled(np.arange(1000), 1000, key).tolist()) for key in keys}
    assert len(orders) == len(keys)
    for order in orders:
        moved = np.abs(np.array(order) - np.arange(1000))
        assert abs(moved.mean() - 1000 / 3) < 30  # what a random permutation moves an element on average
    assert 0 <= shuffled(np.array([10**12]), 10**13, (1,))[0] < 10**13


@cache
def epoch_order(size, key):
    return shuffled(np.arange(size), size, key).tolist()


class PlainStream:
    """The reference: one piece and one document at a time."""

    def __init__(self, sources, *, seed, context_length, shuffle, num_epochs):
        self.sources, self.seed, self.context_length, self.shuffle = sources, seed, context_length, shuffle
        self.limits = [np.count_nonzero(s.lengths) * (num_epochs or 10**9) for s in sources]
        self.drawn, self.documents, self.tokens = ([0] * len(sources) for _ in range(3))
        self.position, self.index, self.head = 0, 0, None

    def take(self, limit):
        pieces = []
        while self.position < limit and (self.head or self.open()):
            dataset, document, offset, whole = self.head or self.next_document()
            length = min(self.context_length, whole - offset)
            pieces.append((self.index, dataset, document, offset, length, 0))
            self.position, self.index = self.position + length, self.index + 1
            self.head = (dataset, document, offset + length, whole) if offset + length < whole else None
        return pieces

    def open(self):
        return [i for i, limit in enumerate(self.limits) if self.documents[i] < limit]

    def next_document(self):
        total, shares = (
            sum(values[i] for i in self.open()) for values in (self.tokens, [s.weight for s in self.sources])
        )
        i = max(self.open(), key=lambda i: self.sources[i].weight / shares * total - self.tokens[i])
        size, length = len(self.sources[i].lengths), 0
        while not length:
            epoch, place = divmod(self.drawn[i], size)
            document = epoch_order(size, (self.seed, i, epoch))[place] if self.shuffle else place
            self.drawn[i] += 1
            length = int(self.sources[i].lengths[document])
        self.documents[i] += 1
        self.tokens[i] += length
        return i, self.sources[i].first + document, 0, length

    def state(self):
        return {
            **{
                name: getattr(self, name)
                for name in ("seed", "shuffle", "drawn", "documents", "tokens", "position", "index")
            },
            "whole_epochs": False,
            "head": list(self.head[:3]) if self.head else None,
        }


@settings(max_examples=200)
@given(
    blend=st.lists(
        st.tuples(
            st.floats(0.01, 100),
            st.lists(st.integers(0, 3) | st.integers(0, 200), min_size=1, max_size=25).filter(any),
            st.integers(0, 9),
        ),
        min_size=1,
        max_size=3,
    ),
    how=st.fixed_dictionaries(
        {
            "seed": st.integers(-5, 2**64),
            "context_length": st.sampled_from([1, 2, 7, 64, 1000]),
            "shuffle": st.booleans(),
            "num_epochs": st.sampled_from([None, 1, 2, 3]),
        }
    ),
    chunk=st.sampled_from([1, 5, 16, 1 << 14]),
    takes=st.lists(st.tuples(st.integers(-2, 5) | st.integers(0, 2000), st.booleans()), min_size=1, max_size=8),
)
def test_equals_the_plain_stream(blend, how, chunk, takes):
    """Pieces and states, whatever the size of the chunks that are permuted at once, resumed after any take."""
    sources = [source(*lengths, weight=weight, first=first) for weight, lengths, first in blend]
    plain, stream, limit = PlainStream(sources, **how), DocumentStream(sources, **how), 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_CHUNK", chunk)
        for tokens, resume in takes:
            limit += tokens
            assert stream.take(limit).tolist() == plain.take(limit)
            state = json.loads(json.dumps(stream.state()))
            assert state == plain.state()
            assert stream.position == plain.position
            assert stream.exhausted == (not plain.head and not plain.open())
            if resume:
                stream = DocumentStream(sources, **how)
                stream.take(limit // 3)
                stream.load_state(state)


def test_lengths_may_stay_mapped(tmp_path, monkeypatch):
    """Nothing asks for more of them at once than a part."""
    tokens = np.random.default_rng(0).integers(0, 50, 3000, dtype=np.int32)
    tokens.tofile(tmp_path / "tokens")
    mapped = np.memmap(tmp_path / "tokens", np.int32)
    monkeypatch.setattr(module, "_MANY", 1000)
    largest = []

    class Watched(TrainedTokens):
        def __getitem__(self, rows):
            lengths = super().__getitem__(rows)
            largest.append(lengths.size)
            return lengths

    lazy, plain = Source(lengths=Watched(mapped)), Source(lengths=trained_tokens(tokens))
    assert lazy.too_short == plain.too_short
    streams = [DocumentStream([s], seed=1, context_length=16, num_epochs=2) for s in (lazy, plain)]
    for limit in (1000, 50_000, 10**9):
        one, other = (s.take(limit) for s in streams)
        assert one.tolist() == other.tolist()
        assert streams[0].state() == streams[1].state()
    assert max(largest) <= module._CHUNK


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ([], "the blend is empty; give at least one dataset"),
        ([source(5), source(0, 0)], "dataset 1 of the blend is empty: it has no document of .* 2 tokens; leave it out"),
        ([source()], "dataset 0 of the blend is empty: it has no document of at least 2 tokens; leave it out"),
        ([source(5, 0, -1)], "dataset 0 of the blend has a document of length -1; give its tokens - 1, at least 0"),
        *(
            ([source(5), source(5, weight=float(weight))], f"dataset 1 of the blend has weight {weight}; .* and finite")
            for weight in ("0.0", "-1.0", "nan", "inf")
        ),
    ],
)
def test_what_cannot_be_streamed_is_refused(sources, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        DocumentStream(sources, seed=0, context_length=10)
