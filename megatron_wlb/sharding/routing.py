"""Routing of K and V: what a rank sends to whom, and where it finds its keys.

Only rows that some query sees travel: the rows of a rank up to the last query of another rank in the document. For a
part of attention, the rows that arrive, in the order of the ranks, then those of the rank's own rows that count as
keys, make up a *pool*; its *keys* are the rows of the pool, document by document in packed order.
"""

import itertools
from dataclasses import dataclass

import numpy as np

from megatron_wlb.types import SEGMENT, Shard, ShardPlan


def moved_rows(plan: ShardPlan) -> np.ndarray:
    """Return the rows that every rank receives and sends, int64 [cp, 2].

    It receives the keys that its queries see and others hold, and sends each of its rows as often as another rank sees
    it.
    """
    moved: np.ndarray = Held(plan).rows().sum(axis=0).T
    return moved


class Held:
    """Which rank of a plan holds what; n segments, all ranks one after the other."""

    def __init__(self, plan: ShardPlan) -> None:
        calls = [call for shard in plan.shards for call in shard.calls]
        sizes = [len(call) for call in calls]
        self.segments = np.concatenate(calls, dtype=SEGMENT)  # to find out the dtype takes five times as long
        """SEGMENT [n]."""
        self.ranks = np.repeat(np.repeat(np.arange(len(plan.shards)), len(plan.call_sets)), sizes)
        """int64 [n]."""
        self.cp, self.lengths = len(plan.shards), plan.lengths
        self.seen = np.zeros((len(plan.lengths), self.cp), np.int64)
        """int64 [documents, cp]: keys of each document that the queries of each rank see."""
        np.maximum.at(self.seen, (self.segments["document"], self.ranks), self.segments["stop"])
        self.is_shared = (self.seen > 0).sum(axis=1) > 1
        """bool [documents]: on several ranks."""

    def rows(self) -> np.ndarray:
        """Return rows of documents that ranks receive and send, int64 [documents, 2, cp]."""
        moved = np.zeros((len(self.seen), 2, self.cp), np.int64)
        (travel,) = np.nonzero(self.is_shared[self.segments["document"]])
        segments, ranks = self.segments[travel], self.ranks[travel]
        documents, lengths = segments["document"], segments["stop"] - segments["start"]
        moved[:, 0] = self.seen * self.is_shared[:, None]
        np.subtract.at(moved[:, 0], (documents, ranks), lengths)
        # Segments do not overlap, so another rank sees all of one or nothing.
        needed = (self.seen[documents] > segments["start"][:, None]).sum(axis=1) - 1
        np.add.at(moved[:, 1], (documents, ranks), lengths * needed)
        return moved


def document_begins(lengths: np.ndarray) -> np.ndarray:
    """Return the first row of each document in packed order, int64 [documents + 1]."""
    return np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))


def ranges(starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
    counts = stops - starts
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total, dtype=np.int64) + np.repeat(starts - (ends - counts), counts)


def rows(lengths: np.ndarray, shard: Shard) -> np.ndarray:
    """Return the rows of the micro-batch that the shard holds, in local order, int64 [tokens]."""
    begins = document_begins(lengths)
    parts = [ranges(begins[c["document"]] + c["start"], begins[c["document"]] + c["stop"]) for c in shard.calls]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def positions(shard: Shard) -> np.ndarray:
    """Return the in-document position of every local row, int64 [tokens]."""
    return np.concatenate([ranges(c["start"], c["stop"]) for c in shard.calls])


OWN = (0.0, 0.0)
"""`Round.keys` of segments with their own keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """Integers of one rank and part of attention, for documents with n of its rows."""

    calls: tuple[tuple[int, np.ndarray], ...]
    """Attention calls, each its first row and SEGMENT rows, whose documents count in `key_begins`: stop - start query
    rows see `stop` keys, causally or all of them."""
    causal: bool
    key_begins: np.ndarray
    """int64 [documents + 1]: first key of each document; a document without queries here has no keys."""
    own_rows: tuple[int, int]
    """The rows [first, stop) that are keys."""
    sent: tuple[int, ...]
    """Rows that every rank is sent; () where no rank of the micro-batch has anything to exchange."""
    received: tuple[int, ...]
    """Rows that come from every rank, likewise."""
    sent_rows: np.ndarray
    """int64 [sum of `sent`]: the rows that are sent, rank by rank."""
    arrived_keys: np.ndarray
    """int64 [sum of `received`]: the keys that arrive."""
    own_keys: np.ndarray
    """int64: the keys that `own_rows` are."""

    @property
    def gather(self) -> np.ndarray:
        """int64 [keys]: keys = pool[gather]."""
        found = np.concatenate((self.arrived_keys, self.own_keys))
        gather = np.empty_like(found)
        gather[found] = np.arange(len(found))
        return gather


def exchange(plan: ShardPlan, cp_rank: int, document_set: int, keys: tuple[float, float] | None = None) -> Exchange:
    """Return the exchange of a rank for documents, or for `Round.keys` of them."""
    held = [plan.segments(rank, document_set) for rank in range(len(plan.shards))]
    if keys == OWN:
        return _own(held[cp_rank])
    seen = np.zeros((len(held), len(plan.lengths)), np.int64)
    for by_document, segments in zip(seen, held, strict=True):
        np.maximum.at(by_document, segments["document"], segments["stop"])
    own, segments = held[cp_rank], np.concatenate(held)
    home = np.repeat(np.arange(len(held)), [len(each) for each in held])
    first_rows = document_begins(own["stop"] - own["start"])[:-1]
    arriving = _rows_seen(segments, seen[cp_rank], keys)
    arriving[:, home == cp_rank] = 0
    leaving = np.stack([_rows_seen(own, by_rank, keys) for by_rank in seen], axis=1)
    leaving[:, cp_rank] = 0
    calls: list[tuple[int, np.ndarray]] = []
    if keys is None:
        begins, own_rows, row = document_begins(seen[cp_rank]), (0, int((own["stop"] - own["start"]).sum())), 0
        for call, of in zip(plan.shards[cp_rank].calls, plan.call_sets, strict=True):
            if of == document_set:
                calls.append((row, call))
                row += int((call["stop"] - call["start"]).sum())
        place = begins[segments["document"]] + segments["start"]
    else:
        # What arrives and, with the first share, the heads, which tails see; every document's keys in packed order.
        counts, mine = arriving[1] - arriving[0], np.flatnonzero(home == cp_rank)
        of_set = [of == document_set for of in plan.call_sets]
        heads, tails = itertools.compress(plan.shards[cp_rank].calls, of_set)
        num_heads = len(heads) if keys[0] == 0 and len(tails) else 0
        counts[mine[:num_heads]] = heads["stop"][:num_heads] - heads["start"][:num_heads]
        own_rows = (0, int(counts[mine].sum()))
        order = np.lexsort((segments["start"], segments["document"]))
        place = np.empty(len(segments), np.int64)
        place[order] = document_begins(counts[order])[:-1]
        begins = np.zeros(len(plan.lengths) + 1, np.int64)
        np.add.at(begins[1:], segments["document"], counts)
        begins = begins.cumsum()
        seeing = own.copy()
        seeing["stop"] = place[mine] - begins[own["document"]]
        seeing["start"] = seeing["stop"] - (own["stop"] - own["start"])
        # Rows without keys are in no call.
        is_tail = np.arange(len(own)) >= len(heads)
        for _, run in itertools.groupby(range(len(own)), lambda i: (is_tail[i], seeing["stop"][i] > 0)):
            some = seeing[(found := list(run))]
            if some["stop"][0]:
                calls.append((int(first_rows[found[0]]), some))
    first_own = place[home == cp_rank]
    own_counts = np.clip(own_rows[1] - first_rows, 0, own["stop"] - own["start"])
    moves = bool(((seen > 0).sum(axis=0) > 1).any())
    return Exchange(
        calls=tuple(call for call in calls if len(call[1])),
        causal=keys is None,
        key_begins=begins,
        own_rows=own_rows,
        sent=tuple((leaving[1] - leaving[0]).sum(axis=1).tolist()) if moves else (),
        received=tuple(np.bincount(home, arriving[1] - arriving[0], len(held)).astype(int).tolist()) if moves else (),
        sent_rows=ranges(*(first_rows + leaving).reshape(2, -1)),
        arrived_keys=ranges(place, place + arriving[1] - arriving[0]),
        own_keys=ranges(first_own, first_own + own_counts),
    )


def _own(segments: np.ndarray) -> Exchange:
    alone = np.zeros(len(segments), SEGMENT)
    alone["document"], alone["stop"] = np.arange(len(segments)), segments["stop"] - segments["start"]
    begins, nothing = document_begins(alone["stop"]), np.zeros(0, np.int64)
    rows = int(begins[-1])
    return Exchange(
        calls=((0, alone),) if rows else (),
        causal=True,
        key_begins=begins,
        own_rows=(0, rows),
        sent=(),
        received=(),
        sent_rows=nothing,
        arrived_keys=nothing,
        own_keys=np.arange(rows),
    )


def _rows_seen(segments: np.ndarray, seen: np.ndarray, keys: tuple[float, float] | None) -> np.ndarray:
    """Return the rows [first, stop) of each segment that a rank sees, int64 [2, n]: of its `seen` keys the share
    `keys`."""
    rows = np.clip(np.minimum(segments["stop"], seen[segments["document"]]) - segments["start"], 0, None)
    low, high = (0.0, 1.0) if keys is None else keys
    return np.stack([(rows * low).astype(np.int64), (rows * high).astype(np.int64)])
