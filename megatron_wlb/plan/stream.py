"""Order of documents: shuffled epochs, blends, pieces; resumable from integers.

The order of an epoch is a keyed permutation computed on the fly (a Feistel network with cycle walking). A blend draws
from the dataset that is furthest behind its share of tokens.
"""

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import index
from typing import Any

import numpy as np

from megatron_wlb.plan.dataset import TrainedTokens
from megatron_wlb.types import DOCUMENT

_ROUNDS = 6
_CHUNK, _MANY = 1 << 14, 1 << 20


@dataclass(frozen=True, kw_only=True)
class Source:
    """One dataset of a blend: documents [first, first + len(lengths)) of a dataset."""

    lengths: np.ndarray | TrainedTokens
    """Trained tokens of each document, int32 or int64 [documents]."""
    weight: float = 1.0
    first: int = 0
    content: str | None = None
    """Digest of the dataset; None: its documents are known by their lengths alone."""

    @cached_property
    def too_short(self) -> int:
        """Number of documents under 2 tokens, which have nothing to train."""
        return sum(int((part < 1).sum()) for part in self._parts())

    @cached_property
    def fingerprint(self) -> str:
        """Digest of the documents: `content`, or else of their lengths."""
        digest = hashlib.blake2b(digest_size=16)
        for part in self._parts() if self.content is None else ():
            digest.update(np.ascontiguousarray(part, np.int64))
        return self.content or digest.hexdigest()

    def _parts(self) -> Iterator[np.ndarray]:
        return (self.lengths[begin : begin + _MANY] for begin in range(0, len(self.lengths), _MANY))


class _Order:
    """Documents of a source in order, epoch after epoch, that have tokens to train.

    `key` selects the shuffles (None: file order); `drawn` documents came before, including skipped ones.
    """

    def __init__(self, source: Source, key: tuple[int, int] | None, drawn: int, epochs: float) -> None:
        self._source, self._key, self._epochs = source, key, epochs
        self.drawn = drawn
        """Number of documents drawn so far, up to the last one taken."""
        self.at = 0
        """Index of the next document in the chunk."""
        self.lengths: list[int] = []
        """Lengths of the documents of the chunk."""
        self._chunk = drawn  # where the next chunk begins
        self._document = self._length = self._ends = self._drawn = np.empty(0, np.int64)

    def permute(self) -> None:
        """Go to the next chunk if this one is used up; permutes a chunk at a time."""
        size = len(self._source.lengths)
        while self.at == len(self.lengths):
            epoch: int | np.ndarray
            epoch, place = divmod(self._chunk, size)
            places = np.arange(place, min(place - place % _CHUNK + _CHUNK, size))
            if (epochs := min(_CHUNK // size, self._epochs - epoch)) > 1:  # of a small dataset, permuted at once
                epoch, places = np.divmod(np.arange(self._chunk, self._chunk + size * epochs - place), size)
            order = places if self._key is None else shuffled(places, size, (*self._key, epoch))
            lengths = self._source.lengths[order]
            trained = np.flatnonzero(lengths)
            self._document, self._length = self._source.first + order[trained], lengths[trained].astype(np.int64)
            self._ends, self._drawn = np.cumsum(self._length), self._chunk + trained + 1
            self.lengths, self.at = self._length.tolist(), 0
            self._chunk += len(places)

    def count_begun(self, tokens: int) -> int:
        start = self._ends[self.at] - self._length[self.at]
        return min(int(np.searchsorted(self._ends, start + tokens)) + 1, len(self.lengths)) - self.at

    def take(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return numbers and lengths of the chunk's next documents, int64 [count] each."""
        taken = slice(self.at, self.at + count)
        self.at += count
        if count:
            self.drawn = self._drawn.item(self.at - 1)
        return self._document[taken], self._length[taken]


class DocumentStream:
    """Stream of documents in pieces of at most `context_length` tokens.

    `sources` are the datasets of the blend, weighted by shares of tokens; `shuffle` False keeps file order;
    `num_epochs` passes over every dataset, which then drops out (None: endless); `whole_epochs`: the stream is
    exhausted after every pass, until `begin_epoch`. Raises ValueError if the blend is empty, a dataset has nothing to
    train or a document of negative length, or a weight is not positive.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        seed: int,
        context_length: int,
        shuffle: bool = True,
        num_epochs: int | None = None,
        whole_epochs: bool = False,
    ) -> None:
        for i, source in enumerate(sources):
            if len(source.lengths) == source.too_short:
                raise ValueError(
                    f"dataset {i} of the blend is empty: it has no document of at least 2 tokens; leave it out"
                )
            if isinstance(source.lengths, np.ndarray) and (least := int(source.lengths.min())) < 0:
                raise ValueError(
                    f"dataset {i} of the blend has a document of length {least}; give its tokens - 1, at least 0"
                )
            if not 0 < source.weight < math.inf:
                raise ValueError(
                    f"dataset {i} of the blend has weight {source.weight}; weights must be positive and finite"
                )
        if not sources:
            raise ValueError("the blend is empty; give at least one dataset")
        self.sources = list(sources)
        self.context_length = context_length
        self._seed, self._shuffle = index(seed), shuffle
        self._epochs = math.inf if num_epochs is None else num_epochs
        self._each = [len(s.lengths) - s.too_short for s in sources]  # documents of an epoch
        self._whole, self._begun = whole_epochs, 1 if whole_epochs else self._epochs
        self._orders = self._begin_at([0] * len(sources))
        self._counts = [0] * len(sources)  # documents taken from each dataset, without skipped ones
        self._tokens = [0] * len(sources)  # tokens taken from each dataset
        self.position = 0
        """Number of tokens taken so far: the next piece begins there."""
        self._index = 0  # pieces taken in all
        self._head: tuple[int, int, int] | None = None  # dataset, document and offset of a partly taken document

    @property
    def exhausted(self) -> bool:
        """Whether nothing is left, of the epoch where each ends by itself."""
        return self._head is None and not self._open()

    @property
    def ended(self) -> bool:
        """Whether it is exhausted and `begin_epoch` begins no more."""
        return self.exhausted and self._begun >= self._epochs

    def begin_epoch(self) -> bool:
        """Go on with the next epoch, where each ends by itself; returns whether there is one."""
        if self._begun >= self._epochs:
            return False
        self._begun += 1
        return True

    def take(self, limit: int) -> np.ndarray:
        """Take all next pieces that begin before token `limit`: DOCUMENT [n], arrival 0."""
        dataset, document, offset, length = self._take_documents(limit - self.position)
        left = length - offset
        starts = self.position + np.cumsum(left) - left
        pieces = -(-np.minimum(left, limit - starts) // self.context_length)
        row = np.repeat(np.arange(len(pieces)), pieces)
        number = np.arange(len(row)) - np.repeat(np.cumsum(pieces) - pieces, pieces)  # of a piece within its document
        out = np.zeros(len(row), DOCUMENT)
        out["index"] = self._index + np.arange(len(row))
        out["dataset"], out["document"] = dataset[row], document[row]
        out["offset"] = offset[row] + number * self.context_length
        out["length"] = np.minimum(self.context_length, length[row] - out["offset"])
        if len(row):
            taken = int(out["offset"][-1] + out["length"][-1])
            self._head = (int(dataset[-1]), int(document[-1]), taken) if taken < length[-1] else None
        self._index += len(row)
        self.position += int(out["length"].sum())
        return out

    def state(self) -> dict[str, Any]:
        """Return what `load_state` needs to continue from here."""
        return {
            "seed": self._seed,
            "shuffle": self._shuffle,
            "whole_epochs": self._whole,
            "drawn": [order.drawn for order in self._orders],
            "documents": list(self._counts),
            "tokens": list(self._tokens),
            "position": self.position,
            "index": self._index,
            "head": list(self._head) if self._head else None,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from a `state()` of a stream over the same datasets.

        Raises ValueError, before anything changes, for another number of datasets or order of documents.
        """
        if len(state["drawn"]) != len(self.sources):
            raise ValueError(
                f"the state has {len(state['drawn'])} datasets, this blend has {len(self.sources)}; resume with as many"
            )
        for name, value in (("seed", self._seed), ("shuffle", self._shuffle)):
            if state[name] != value:
                raise ValueError(
                    f"the state was saved with {name} {state[name]}, this run has {value}; resume with the same"
                )
        self._orders = self._begin_at(state["drawn"])
        self._counts, self._tokens = list(state["documents"]), list(state["tokens"])
        self.position, self._index = state["position"], state["index"]
        self._head = tuple(state["head"]) if state["head"] else None
        if self._whole:  # at the end of an epoch it is not yet the next one
            self._begun = max(1, *(-(-count // each) for count, each in zip(self._counts, self._each, strict=True)))

    def _begin_at(self, drawn: list[int]) -> list[_Order]:
        keys = [(self._seed, i) if self._shuffle else None for i in range(len(drawn))]
        epochs = 1 if self._whole else self._epochs  # permuted at once
        return [_Order(*each, epochs) for each in zip(self.sources, keys, drawn, strict=True)]

    def _open(self) -> list[int]:
        return [i for i, each in enumerate(self._each) if self._counts[i] < each * self._begun]

    def _take_documents(self, tokens: int) -> np.ndarray:
        """Take documents within `tokens`: dataset, number, offset, length, int64 [4, n]."""
        runs = [np.empty((4, 0), np.int64)]
        if self._head and tokens > 0:
            dataset, document, offset = self._head
            whole = int(self.sources[dataset].lengths[document - self.sources[dataset].first])
            runs.append(np.array([[dataset], [document], [offset], [whole]]))
            tokens -= whole - offset
        while tokens > 0 and (datasets := self._open()):
            choice = self._next_datasets(datasets, tokens)
            run = np.zeros((4, len(choice)), np.int64)
            run[0] = choice
            for i in datasets:
                places = np.flatnonzero(choice == i)
                run[1, places], run[3, places] = self._orders[i].take(len(places))
                self._counts[i] += len(places)
                self._tokens[i] += int(run[3, places].sum())
            tokens -= int(run[3].sum())
            runs.append(run)
        return np.concatenate(runs, axis=1)

    def _next_datasets(self, datasets: list[int], tokens: int) -> np.ndarray:
        """Return datasets of the next documents within `tokens`, up to a chunk's end."""
        orders = [self._orders[i] for i in datasets]
        for order in orders:
            order.permute()
        if len(datasets) == 1:
            return np.full(orders[0].count_begun(tokens), datasets[0])
        weights = sum(self.sources[i].weight for i in datasets)
        shares = np.array([self.sources[i].weight / weights for i in datasets])
        taken = np.array([self._tokens[i] for i in datasets], float)  # exact up to 2^53
        at = [order.at for order in orders]
        total, choice = sum(self._tokens[i] for i in datasets), []
        # One by one, since each choice depends on the lengths of those before.
        while tokens > 0:
            k = int((shares * total - taken).argmax())  # the first of those furthest behind their share
            length = orders[k].lengths[at[k]]
            choice.append(datasets[k])
            taken[k] += length
            total += length
            tokens -= length
            at[k] += 1
            if at[k] == len(orders[k].lengths):
                break
        return np.array(choice)


def shuffled(places: np.ndarray, size: int, key: tuple[int | np.ndarray, ...]) -> np.ndarray:
    """Return elements `places` (int64 [n]) of keyed permutations of range(size).

    `key` may hold arrays of integers, int64 [n], which select one for each place. A Feistel network over the next even
    power of two; values outside the range are mapped again.
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    seed = np.zeros(1, np.uint64)
    for k in key:
        seed = _mix(seed ^ _mix(np.array(k % (1 << 64) if isinstance(k, int) else k, np.uint64, ndmin=1)))
    keys = [np.broadcast_to(_mix(seed + np.uint64(i)), len(places)) for i in range(_ROUNDS)]
    out = places.astype(np.uint64)
    outside = np.ones(len(out), bool)
    while outside.any():
        left, right = out[outside] >> half, out[outside] & mask
        for round_key in keys:
            left, right = right, left ^ (_mix(right ^ round_key[outside]) & mask)
        out[outside] = left << half | right
        outside = out >= size
    return out.astype(np.int64)


def _mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser (Steele, Lea, Flood 2014) on uint64, which wraps around."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
