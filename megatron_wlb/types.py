"""What a plan is made of: integers only, half-open ranges.

A sample of Megatron's dataset consists of pieces of documents; each is a document for everything that follows.
"""

import math
from dataclasses import dataclass
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
        """The data is at its end: what waits must be packed now."""

    @property
    def ahead(self) -> int:
        """Tokens taken so far beyond the beginning of this step's own samples."""

    def more(self, tokens: int) -> np.ndarray:
        """The next DOCUMENT rows, whole samples of at least `tokens` tokens in all unless the data ends."""

    def own(self, most_tokens: int | None = None) -> np.ndarray:
        """Return DOCUMENT rows of what is left of the step's own N samples, at most about `most_tokens`.

        What earlier steps took too little is not made up for.
        """


class Policy(Protocol):
    """A packing policy: which documents run in a step, in which micro-batch."""

    def pack(self, step: int, draw: Draw) -> PackedBatch:
        """The micro-batches of step `step`, from what waits and what the policy draws."""

    def waiting(self) -> dict[str, np.ndarray]:
        """Return documents drawn and not yet packed, by place: DOCUMENT arrays."""

    def load_waiting(self, waiting: dict[str, np.ndarray]) -> None:
        """Take over what `waiting` gave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """What one context-parallel rank holds of a micro-batch.

    One varlen attention call computes each of its *calls*: segments in which a document occurs at most once, in order.
    Local rows are those of its calls: of a set of documents first heads and what is whole or cut once, then tails.
    """

    calls: tuple[np.ndarray, ...]
    """SEGMENT arrays; one may be empty."""

    @property
    def tokens(self) -> int:
        return int(sum((c["stop"] - c["start"]).sum() for c in self.calls))


class Round(NamedTuple):
    """A part of attention whose K and V travel while the round before computes."""

    document_set: int
    heads: tuple[int, int] | None = None
    """Key heads of a rank [first, stop), with the query heads that read them; None: all."""
    keys: tuple[float, float] | None = None
    """For documents in parts, merged by log-sum-exps: (0, 0) is each segment with its own keys, which runs first; (low,
    high) that share of all others, by the rows of every segment. None: all keys at once."""


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
    call_sets: tuple[int, ...] = (0, 0)
    """The set of documents, counted from 0, that each call of every shard is for; ascending."""
    rounds: tuple[Round, ...] = (Round(0),)
    """The order in which attention runs; every head of every set of documents once."""

    def first_row(self, cp_rank: int, document_set: int) -> int:
        """Local rows that a rank holds before those of a set of documents."""
        calls = zip(self.shards[cp_rank].calls, self.call_sets, strict=True)
        return sum(int((call["stop"] - call["start"]).sum()) for call, of in calls if of < document_set)

    def segments(self, cp_rank: int, document_set: int) -> np.ndarray:
        """SEGMENT rows that a rank holds of a set of documents, in local order."""
        calls = zip(self.shards[cp_rank].calls, self.call_sets, strict=True)
        return np.concatenate([call for call, of in calls if of == document_set], dtype=SEGMENT)


def document_work(lengths: np.ndarray, crossover_tokens: int) -> np.ndarray:
    """Work of documents of `lengths` (int64 [n]), int64 [n]; packing and placement balance it.

    W(d) = d * Lc + d * d, in attended token pairs: an integer, equal in C++ and Python. Lc, the crossover length, is
    where attention costs as much as everything else (paper, equation 2 with W_a ~ d^2 and W_l ~ d).
    """
    lengths = lengths.astype(np.int64)
    return lengths * (lengths + crossover_tokens)
