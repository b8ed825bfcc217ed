"""The order in which documents come: shuffled epochs, blends, pieces; resumable from a few integers.

The shuffled order of an epoch is a keyed permutation computed on the fly (a Feistel network with cycle walking), so it
costs no memory however many documents there are. A blend always draws from the dataset that is furthest behind its
share of tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_wlb.plan.types import DOCUMENT

_ROUNDS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One dataset of a blend: the documents [first, first + len(pairs)) of a `.bin/.idx` dataset."""

    pairs: np.ndarray
    """Trained pairs of each document (its tokens - 1, at least 0), int64 [documents]."""
    weight: float = 1.0
    first: int = 0

    @property
    def too_short(self) -> int:
        """Documents under 2 tokens, which have nothing to train."""
        return int((self.pairs < 1).sum())


class DocumentStream:
    """Endless stream of documents, cut into pieces of at most `context_length` pairs.

    Args:
        sources: the datasets of the blend; weights are shares of tokens.
        seed: of the epoch shuffles.
        context_length: longest piece in pairs.
        shuffle: False for file order.

    Raises ValueError if a dataset has no document of at least 2 tokens, or a weight is not positive.
    """

    def __init__(self, sources: Sequence[Source], *, seed: int, context_length: int, shuffle: bool = True) -> None:
        for i, source in enumerate(sources):
            if len(source.pairs) == source.too_short:
                raise ValueError(f"dataset {i} of the blend is empty: it has no document of at least 2 tokens")
            if not source.weight > 0:
                raise ValueError(f"dataset {i} of the blend has weight {source.weight}; weights must be positive")
        if not sources:
            raise ValueError("the blend is empty; give at least one dataset")
        self.sources = list(sources)
        self.context_length = context_length
        self._seed, self._shuffle = seed, shuffle
        self._drawn = [0] * len(sources)  # documents taken from each dataset, epochs included
        self._tokens = [0] * len(sources)  # pairs taken from each dataset
        self._position = 0  # pairs taken in all
        self._index = 0  # pieces taken in all
        self._head: tuple[int, int, int] | None = None  # dataset, document, offset of a document not wholly taken

    def take(self, limit: int) -> np.ndarray:
        """Next pieces, all that begin before pair `limit` of the stream: DOCUMENT [n], `arrival` left 0."""
        pieces: list[tuple[int, int, int, int]] = []
        while self._position < limit:
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
            "tokens": list(self._tokens),
            "position": self._position,
            "index": self._index,
            "head": list(self._head) if self._head else None,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a `state()` of a stream over the same datasets.

        Raises ValueError, before anything changes, for another number of datasets or another order of documents, which
        would repeat some of the epoch's documents and leave out others.
        """
        if len(state["drawn"]) != len(self.sources):
            raise ValueError(f"the state has {len(state['drawn'])} datasets, this blend has {len(self.sources)}")
        for name, value in (("seed", self._seed), ("shuffle", self._shuffle)):
            if state[name] != value:
                raise ValueError(
                    f"the state was saved with {name} {state[name]}, this run has {value}; resume with the same"
                )
        self._drawn, self._tokens = list(state["drawn"]), list(state["tokens"])
        self._position, self._index = state["position"], state["index"]
        self._head = tuple(state["head"]) if state["head"] else None

    def _next_document(self) -> tuple[int, int]:
        """Dataset and document of the next document with something to train."""
        total = sum(self._tokens)
        shares = sum(s.weight for s in self.sources)
        behind = [s.weight / shares * total - t for s, t in zip(self.sources, self._tokens, strict=True)]
        dataset = behind.index(max(behind))
        source = self.sources[dataset]
        while True:
            epoch, place = divmod(self._drawn[dataset], len(source.pairs))
            self._drawn[dataset] += 1
            document = self._order(dataset, epoch, place)
            if pairs := int(source.pairs[document]):
                self._tokens[dataset] += pairs
                return dataset, source.first + document

    def _order(self, dataset: int, epoch: int, place: int) -> int:
        if not self._shuffle:
            return place
        return shuffled(place, len(self.sources[dataset].pairs), (self._seed, dataset, epoch))


def shuffled(place: int, size: int, key: tuple[int, ...]) -> int:
    """Element `place` of a permutation of range(size) that `key` selects; both directions cost no memory."""
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    seed = 0
    for k in key:
        seed = _mix(seed ^ _mix(k))
    while True:
        left, right = place >> half, place & mask
        for i in range(_ROUNDS):
            left, right = right, left ^ (_mix(right ^ _mix(seed + i)) & mask)
        place = left << half | right
        if place < size:
            return place


def _mix(x: int) -> int:
    """SplitMix64's finaliser (Steele, Lea, Flood 2014)."""
    x = (x + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return x ^ (x >> 31)
