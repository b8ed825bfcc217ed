"""The order in which documents come: shuffled epochs, blends, pieces; resumable from a few integers.

The shuffled order of an epoch is a keyed permutation computed on the fly (a Feistel network with cycle walking), so it
costs no memory however many documents there are. A blend always draws from the dataset that is furthest behind its
share of tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import index
from typing import Any

import numpy as np

from megatron_wlb.plan.types import DOCUMENT

_ROUNDS = 6
_CHUNK = 4096


@dataclass(frozen=True, kw_only=True)
class Source:
    """One dataset of a blend: the documents [first, first + len(pairs)) of a `.bin/.idx` dataset."""

    pairs: np.ndarray
    """Trained pairs of each document (its tokens - 1, at least 0), int64 [documents]."""
    weight: float = 1.0
    first: int = 0

    @cached_property
    def too_short(self) -> int:
        """Documents under 2 tokens, which have nothing to train."""
        return int((self.pairs < 1).sum())


class DocumentStream:
    """Stream of documents, cut into pieces of at most `context_length` pairs; endless unless `num_epochs` is given.

    Args:
        sources: the datasets of the blend; weights are shares of tokens.
        seed: of the epoch shuffles.
        context_length: longest piece in pairs.
        shuffle: False for file order.
        num_epochs: passes over every dataset; a dataset that is at its end leaves the blend to the others.

    Raises ValueError if a dataset has no document of at least 2 tokens, or a weight is not positive.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        seed: int,
        context_length: int,
        shuffle: bool = True,
        num_epochs: int | None = None,
    ) -> None:
        for i, source in enumerate(sources):
            if len(source.pairs) == source.too_short:
                raise ValueError(f"dataset {i} of the blend is empty: it has no document of at least 2 tokens")
            if not source.weight > 0:
                raise ValueError(f"dataset {i} of the blend has weight {source.weight}; weights must be positive")
        if not sources:
            raise ValueError("the blend is empty; give at least one dataset")
        self.sources = list(sources)
        self.context_length = context_length
        self._seed, self._shuffle, self._num_epochs = seed, shuffle, num_epochs
        self._drawn = [0] * len(sources)  # documents taken from each dataset, epochs included
        self._given = [0] * len(sources)  # of those, documents with something to train
        self._tokens = [0] * len(sources)  # pairs taken from each dataset
        self._chunks: dict[int, tuple[tuple[int, int], list[int]]] = {}
        self._position = 0  # pairs taken in all
        self._index = 0  # pieces taken in all
        self._head: tuple[int, int, int] | None = None  # dataset, document, offset of a document not wholly taken

    @property
    def position(self) -> int:
        """Pairs taken so far: where the next piece begins."""
        return self._position

    @property
    def exhausted(self) -> bool:
        """Nothing will come any more."""
        return self._head is None and not self._open()

    def take(self, limit: int) -> np.ndarray:
        """Next pieces, all that begin before pair `limit` of the stream: DOCUMENT [n], `arrival` left 0."""
        pieces: list[tuple[int, int, int, int]] = []
        while self._position < limit and not self.exhausted:
            dataset, document, offset = self._head or (*self._next_document(), 0)
            pairs = int(self.sources[dataset].pairs[document - self.sources[dataset].first])
            while offset < pairs and self._position < limit:
                length = min(self.context_length, pairs - offset)
                pieces.append((dataset, document, offset, length))
                offset += length
                self._position += length
            self._head = (dataset, document, offset) if offset < pairs else None
        out = np.zeros(len(pieces), DOCUMENT)
        if pieces:
            columns = np.array(pieces, np.int64).T
            out["dataset"], out["document"], out["offset"], out["length"] = columns
        out["index"] = np.arange(self._index, self._index + len(pieces))
        self._index += len(pieces)
        return out

    def state(self) -> dict[str, Any]:
        """What `load_state` needs to go on from here."""
        return {
            "seed": self._seed,
            "shuffle": self._shuffle,
            "drawn": list(self._drawn),
            "given": list(self._given),
            "tokens": list(self._tokens),
            "position": self._position,
            "index": self._index,
            "head": list(self._head) if self._head else None,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a `state()` of a stream over the same datasets.

        Raises ValueError, before anything changes, for another number of datasets or another order of documents, which
        would repeat some of the epoch's documents and leave out others; TypeError or KeyError, likewise, for what is
        not a state.
        """
        if len(state["drawn"]) != len(self.sources):
            raise ValueError(f"the state has {len(state['drawn'])} datasets, this blend has {len(self.sources)}")
        for name, value in (("seed", self._seed), ("shuffle", self._shuffle)):
            if state[name] != value:
                raise ValueError(
                    f"the state was saved with {name} {state[name]}, this run has {value}; resume with the same"
                )
        drawn, given, tokens = ([index(n) for n in state[key]] for key in ("drawn", "given", "tokens"))
        position, next_index = index(state["position"]), index(state["index"])
        head = [index(n) for n in state["head"] or ()]
        if not len(drawn) == len(given) == len(tokens) or len(head) not in (0, 3):
            raise ValueError("the state is damaged: it lacks counts of a dataset, or parts of the document begun")
        self._drawn, self._given, self._tokens = drawn, given, tokens
        self._position, self._index = position, next_index
        self._head = (head[0], head[1], head[2]) if head else None

    def _next_document(self) -> tuple[int, int]:
        """Dataset and document of the next document with something to train."""
        candidates = self._open()
        total = sum(self._tokens[i] for i in candidates)
        shares = sum(self.sources[i].weight for i in candidates)
        # The first of those furthest behind their share.
        dataset = max(candidates, key=lambda i: self.sources[i].weight / shares * total - self._tokens[i])
        source = self.sources[dataset]
        while True:
            epoch, place = divmod(self._drawn[dataset], len(source.pairs))
            self._drawn[dataset] += 1
            document = self._order(dataset, epoch, place)
            if pairs := int(source.pairs[document]):
                self._tokens[dataset] += pairs
                self._given[dataset] += 1
                return dataset, source.first + document

    def _open(self) -> Sequence[int]:
        """Datasets that have documents left."""
        if self._num_epochs is None:
            return range(len(self.sources))
        limits = ((len(s.pairs) - s.too_short) * self._num_epochs for s in self.sources)
        return [i for i, limit in enumerate(limits) if self._given[i] < limit]

    def _order(self, dataset: int, epoch: int, place: int) -> int:
        """The document at a place of an epoch; permuted a chunk at a time, which is what costs."""
        if not self._shuffle:
            return place
        chunk, within = divmod(place, _CHUNK)
        if self._chunks.get(dataset, (None,))[0] != (epoch, chunk):
            size = len(self.sources[dataset].pairs)
            places = np.arange(chunk * _CHUNK, min((chunk + 1) * _CHUNK, size))
            order = shuffled(places, size, (self._seed, dataset, epoch)).tolist()
            self._chunks[dataset] = ((epoch, chunk), order)
        return self._chunks[dataset][1][within]


def shuffled(places: np.ndarray, size: int, key: tuple[int, ...]) -> np.ndarray:
    """Elements `places` (int64 [n]) of a permutation of range(size) that `key` selects, int64 [n].

    A Feistel network over the next even power of two; what falls outside of the range walks on until it is inside.
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    seed = np.zeros(1, np.uint64)
    for k in key:
        seed = _mix(seed ^ _mix(np.array([k % (1 << 64)], np.uint64)))
    keys = [_mix(seed + np.uint64(i)) for i in range(_ROUNDS)]
    out = places.astype(np.uint64)
    outside = np.ones(len(out), bool)
    while outside.any():
        left, right = out[outside] >> half, out[outside] & mask
        for round_key in keys:
            left, right = right, left ^ (_mix(right ^ round_key) & mask)
        out[outside] = left << half | right
        outside = out >= size
    return out.astype(np.int64)


def _mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser (Steele, Lea, Flood 2014) on uint64, which wraps around."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
