"""The parts of a plan: half-open ranges of integers.

A sample of Megatron's dataset consists of pieces of documents; each is a document for everything that follows.
"""

import itertools
import math
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple, Protocol

import numpy as np

DOCUMENT = np.dtype(
    [
        ("index", "<i8"),  # sample * C + place of its first token there: increasing; breaks every tie
        ("dataset", "<i8"),  # which dataset of the blend
        ("document", "<i8"),  # which document of that dataset, in the dataset's own order
        ("offset", "<i8"),  # first token within the document
        ("length", "<i8"),  # tokens, >= 1
        ("arrival", "<i8"),  # step whose samples it belongs to
    ]
)
"""One row per document (or piece of one) that is trained as a unit of attention."""

SEGMENT = np.dtype([("document", "<i8"), ("start", "<i8"), ("stop", "<i8")])
"""Query rows [start, stop) of a document of the micro-batch; they attend to its keys [0, stop)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch:
    """Documents of a step; micro-batch i is rows [bounds[i], bounds[i + 1])."""

    documents: np.ndarray
    """DOCUMENT [n], ordered by micro-batch."""
    bounds: np.ndarray
    """int64 [M + 1]."""
    ranks: np.ndarray | None = None
    """Micro-batches of each data-parallel rank, int64 [dp, M / dp]; None: not dealt yet."""

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def micro_batch(self, i: int) -> np.ndarray:
        """DOCUMENT rows of micro-batch i, in the order they are concatenated."""
        return self.documents[self.bounds[i] : self.bounds[i + 1]]

    @property
    def lengths(self) -> list[np.ndarray]:
        """Of the documents of every micro-batch, int64 [documents] each."""
        return [self.micro_batch(i)["length"] for i in range(len(self))]

    def sums(self, values: np.ndarray) -> np.ndarray:
        """Per micro-batch sums, int64 [M], of one integer per document."""
        total = np.concatenate(([0], np.cumsum(values, dtype=np.int64)))
        return total[self.bounds[1:]] - total[self.bounds[:-1]]


class Draw(Protocol):
    """How a packing policy takes the pieces of samples in one step."""

    @property
    def exhausted(self) -> bool:
        """The data is at its end: waiting documents must be packed now."""

    @property
    def early_tokens(self) -> int:
        """Tokens drawn so far beyond the beginning of this step's own samples."""

    def more(self, tokens: int) -> np.ndarray:
        """The next DOCUMENT rows, whole samples of at least `tokens` tokens in all unless the data ends."""

    def own(self, most_tokens: int | None = None) -> np.ndarray:
        """Return DOCUMENT rows of the rest of the step's own N samples, at most about `most_tokens`.

        Tokens that earlier steps were short of are not made up for.
        """


class Policy(Protocol):
    """A packing policy: which documents run in a step, in which micro-batch."""

    def pack(self, step: int, draw: Draw) -> PackedBatch:
        """The micro-batches of step `step`, from waiting documents and those that the policy draws."""

    def waiting(self) -> dict[str, np.ndarray]:
        """Return documents drawn and not yet packed, by place: DOCUMENT arrays."""
        return {}

    def load_waiting(self, waiting: dict[str, np.ndarray]) -> None:
        """Take over the result of `waiting`."""
        return  # a policy may keep nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """The rows of a micro-batch on one context-parallel rank.

    One varlen attention call computes each of its *calls*: segments in which a document occurs at most once, in order.
    Local rows follow the calls. For attention in rounds, and wherever a mask hides tiles that take time, these are
    documents that are whole on the rank, then heads and tails of others. Otherwise they are heads with whole documents,
    then tails. On a single rank they are all documents.
    """

    calls: tuple[np.ndarray, ...]
    """SEGMENT arrays; some may be empty."""

    @property
    def tokens(self) -> int:
        return int(sum((c["stop"] - c["start"]).sum() for c in self.calls))


class Keys(Enum):
    """Documents of a round of attention, and which of their keys its queries see."""

    ALL = "all"
    """All documents, all keys."""
    WHOLE = "whole"
    """Documents that are whole on a rank, all keys: nothing is exchanged."""
    SHARED = "shared"
    """The other documents, all keys."""
    OWN = "own"
    """The other documents, in shares that are merged by log-sum-exps: of each segment its own keys."""


class Share(NamedTuple):
    """A round of documents in shares: the share [low, high) of the keys of other ranks, by the rows of every segment.

    With the first share, tails also see the heads of their rank.
    """

    low: float
    high: float


class Near(NamedTuple):
    """A round of the other documents in a layer with a window: the keys that queries see there."""

    window: int
    """Keys that a query sees before its own."""


RoundKeys = Keys | Share | Near


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPlan:
    """A micro-batch sharded over its context-parallel ranks."""

    lengths: np.ndarray
    """int64 [documents], in packed order; tail padding, if any, is the last document."""
    shards: tuple[Shard, ...]
    """One per context-parallel rank, all of the same number of tokens."""
    strategy: str
    """per-sequence, per-document, hybrid, or whole for a single rank."""
    time: float = math.nan
    """Predicted time of the slowest rank, in the unit of the kernel model that chose the strategy."""
    key_bounds: tuple[float, ...] = ()
    """Bounds from 0 to 1 of the `Share`s in which keys of other ranks arrive; (): all at once."""

    def __str__(self) -> str:
        """A line for every rank, with `document[start:stop]` of the segments of its calls."""

        def words(call: np.ndarray) -> str:
            return " ".join(f"{document}[{start}:{stop}]" for document, start, stop in call.tolist())

        return "\n".join(" | ".join(map(words, shard.calls)) for shard in self.shards)

    @property
    def rounds(self) -> tuple[RoundKeys, ...]:
        """The order in which attention runs; K and V of a round travel while the round before computes."""
        if len(self.shards[0].calls) < 3:
            return (Keys.ALL,)
        whole, *shared = (any(map(len, calls)) for calls in zip(*(each.calls for each in self.shards), strict=True))
        parts: list[RoundKeys] = [Keys.OWN, *(Share(*bounds) for bounds in itertools.pairwise(self.key_bounds))]
        return (*[Keys.WHOLE] * whole, *any(shared) * (parts if self.key_bounds else [Keys.SHARED]))

    def rounds_of(self, window: int | None) -> tuple[RoundKeys, ...]:
        """Return the rounds of a layer whose queries see so many keys before their own; None: all of their document.

        In a window, shared documents go together.
        """
        if window is None:
            return self.rounds
        return tuple(Near(window) if of is Keys.SHARED else of for of in replace(self, key_bounds=()).rounds)

    def calls(self, cp_rank: int, of: RoundKeys) -> tuple[np.ndarray, ...]:
        """Return the calls of a rank that have the documents of a round."""
        calls = self.shards[cp_rank].calls
        return calls if of is Keys.ALL else calls[:1] if of is Keys.WHOLE else calls[1:]


def document_work(lengths: np.ndarray, crossover_tokens: int) -> np.ndarray:
    """Work of documents of `lengths` (int64 [n]), int64 [n]; packing and placement balance it.

    W(d) = d * Lc + d * d, in attended token pairs: an integer, equal in C++ and Python. Lc, the crossover length, is
    where attention costs as much as everything else (paper, equation 2 with W_a ~ d^2 and W_l ~ d).
    """
    lengths = lengths.astype(np.int64)
    return lengths * (lengths + crossover_tokens)
