"""Routing of K and V: which rows a rank sends to which rank, and where it finds its keys.

Only rows that some query sees travel: the rows of a rank up to the last query of another rank in the document. For a
part of attention, the rows that arrive, in the order of the ranks, then the rank's own rows that count as
keys, make up a *pool*; its *keys* are the rows of the pool, document by document in packed order.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from megatron_wlb.documents import SEGMENT, Keys, Near, RoundKeys, Shard, ShardPlan, Share


def moved_rows(plan: ShardPlan, window: int | None = None) -> np.ndarray:
    """Return the rows that every rank receives and sends, int64 [cp, 2].

    It receives the keys that its queries see and others hold, and sends each of its rows as often as another rank sees
    it. A query sees `window` keys before its own; None: all of its document.
    """
    moved: np.ndarray = Ownership(plan, window=window).rows().sum(axis=0).T
    return moved


class Ownership:
    """Which rank of a plan holds which rows of a round's documents; n segments, all ranks one after the other.

    The keys that a rank sees are *runs*: of a document, or in a window of a head and of a tail, or of both where they
    meet.
    """

    def __init__(self, plan: ShardPlan, of: RoundKeys = Keys.ALL, window: int | None = None) -> None:
        by_rank = [plan.calls(rank, of) for rank in range(len(plan.shards))]
        calls = [call for each in by_rank for call in each]
        self.segments = np.concatenate(calls, dtype=SEGMENT)  # to find out the dtype takes five times as long
        """SEGMENT [n]."""
        self.ranks = np.repeat(np.arange(len(by_rank)), [sum(map(len, each)) for each in by_rank])
        """int64 [n]."""
        self.cp, self.lengths = len(plan.shards), plan.lengths
        self.holds = np.zeros((len(plan.lengths), self.cp), bool)
        """bool [documents, cp]: which ranks have rows of a document."""
        self.holds[self.segments["document"], self.ranks] = True
        self.is_shared = self.holds.sum(axis=1) > 1
        """bool [documents]: on several ranks."""
        # Rows of the micro-batch, counted on from rank to rank.
        begins = document_begins(plan.lengths)
        self._total = int(begins[-1])
        self._rows = begins[self.segments["document"]] + np.stack((self.segments["start"], self.segments["stop"]))
        back = self.segments["start"] if window is None else np.minimum(self.segments["start"], window)
        order = np.lexsort((self._rows[0], self.ranks))
        firsts, stops = (self._rows - [back, np.zeros_like(back)] + self.ranks * self._total)[:, order]
        documents = self.segments["document"][order]
        alone = np.ones(len(order) + 1, bool)
        alone[1:-1] = (documents[1:] != documents[:-1]) | (np.diff(self.ranks[order]) > 0) | (firsts[1:] > stops[:-1])
        self._firsts, self._stops = firsts[alone[:-1]], stops[alone[1:]]
        self._begins = document_begins(self._stops - self._firsts)
        """First key of each run, all ranks one after the other."""

    def rows(self) -> np.ndarray:
        """Return rows of documents that ranks receive and send, int64 [documents, 2, cp]."""
        moved = np.zeros((len(self.lengths), 2, self.cp), np.int64)
        (travel,) = np.nonzero(self.is_shared[self.segments["document"]])
        documents, ranks = self.segments["document"][travel], self.ranks[travel]
        (first, stop), _ = self.seen(np.arange(self.cp)[:, None], travel)
        counts = (stop - first).T
        counts[np.arange(len(travel)), ranks] = 0
        np.add.at(moved[:, 0], documents, counts)
        np.add.at(moved[:, 1], (documents, ranks), counts.sum(axis=1))
        return moved

    def seen(self, cp_rank: Any, segments: Any = slice(None)) -> tuple[np.ndarray, np.ndarray]:
        """Return which rows [first, stop) of segments a rank sees, int64 [2, n], and their runs.

        It sees all of a segment, its end, or nothing.
        """
        begins, stops = (rows[segments] + cp_rank * self._total for rows in self._rows)
        run = np.searchsorted(self._firsts, stops) - 1
        first = np.maximum(begins, self._firsts[run])
        return np.stack((first, np.clip(stops, first, np.maximum(self._stops[run], first)))) - begins, run

    def keys(self, cp_rank: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return where runs of a rank begin among its keys, int64 [runs + 1], the first key that each segment sees,
        int64 [n], and the rank's own segments as it sees them, SEGMENT [n] by run."""
        (first, _), run = self.seen(cp_rank)
        runs = slice(*np.searchsorted(self._firsts, self._total * np.array([cp_rank, cp_rank + 1])))
        before = self._rows[0] + first + cp_rank * self._total - self._firsts[run]
        (mine,) = np.nonzero(self.ranks == cp_rank)
        own = self.segments[mine]
        own["stop"] += before[mine] - own["start"]
        own["document"], own["start"] = run[mine] - runs.start, before[mine]
        begins = self._begins[runs.start : runs.stop + 1] - self._begins[runs.start]
        return begins, self._begins[run] - self._begins[runs.start] + before, own


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


class Exchange(NamedTuple):
    """Integers of one rank and round, for documents with n of its rows."""

    calls: tuple[tuple[int, np.ndarray], ...]
    """Attention calls, each its first row and SEGMENT rows, whose documents count in `key_begins`: stop - start query
    rows see `stop` keys, causally, perhaps in a window, or all of them."""
    causal: bool
    key_begins: np.ndarray
    """int64 [runs + 1]: first key of each run, or document, of which one without queries here has no keys."""
    own_rows: int
    """So many of the first rows are keys."""
    own_keys: np.ndarray
    """int64: the keys that `own_rows` are."""
    sent: tuple[int, ...] = ()
    """Rows that every rank is sent; () where no rank of the micro-batch has anything to exchange."""
    received: tuple[int, ...] = ()
    """Rows that come from every rank, likewise."""
    sent_rows: np.ndarray = np.zeros(0, np.int64)
    """int64 [sum of `sent`]: the rows that are sent, rank by rank."""
    arrived_keys: np.ndarray = np.zeros(0, np.int64)
    """int64 [sum of `received`]: the keys that arrive."""

    @property
    def gather(self) -> np.ndarray:
        """int64 [keys]: keys = pool[gather]."""
        found = np.concatenate((self.arrived_keys, self.own_keys))
        gather = np.empty_like(found)
        gather[found] = np.arange(len(found))
        return gather


def exchange(plan: ShardPlan, cp_rank: int, of: RoundKeys) -> Exchange:
    """Return the exchange of a rank for a round of the plan."""
    held_calls = plan.calls(cp_rank, of)
    if of is Keys.OWN:
        return _own_keys(np.concatenate(held_calls, dtype=SEGMENT))
    held = Ownership(plan, of, of.window if isinstance(of, Near) else None)
    (mine,) = np.nonzero(held.ranks == cp_rank)
    share = of if isinstance(of, Share) else Share(0.0, 1.0)
    # Rows [first, stop) of each segment that others send to the rank, and of its own that it sends to each of them.
    arriving = _shared(held.seen(cp_rank)[0], share)
    arriving[:, mine] = 0
    leaving = _shared(held.seen(np.arange(held.cp)[:, None], mine)[0], share)
    leaving[:, cp_rank] = 0
    arrive = arriving[1] - arriving[0]
    if isinstance(of, Share):
        calls, key_begins, own_rows, place = _share_of_keys(held, mine, held_calls, share, arrive)
    else:
        calls, key_begins, own_rows, place = _all_keys(held, cp_rank, held_calls)
    rows = held.segments["stop"][mine] - held.segments["start"][mine]
    first_rows = document_begins(rows)[:-1]
    moves = bool(held.is_shared.any())
    received = np.bincount(held.ranks, arrive, held.cp)
    return Exchange(
        calls=tuple(calls),
        causal=not isinstance(of, Share),
        key_begins=key_begins,
        own_rows=own_rows,
        sent=tuple((leaving[1] - leaving[0]).sum(axis=1).tolist()) if moves else (),
        received=tuple(received.astype(int).tolist()) if moves else (),
        sent_rows=ranges(*(first_rows + leaving).reshape(2, -1)),
        arrived_keys=ranges(place, place + arrive),
        own_keys=ranges(place[mine], place[mine] + np.clip(own_rows - first_rows, 0, rows)),
    )


_Keys = tuple[list[tuple[int, np.ndarray]], np.ndarray, int, np.ndarray]
"""Calls, `key_begins` and `own_rows` of an `Exchange`, and the first of the rank's keys of every segment, int64 [n]."""


def _all_keys(held: Ownership, cp_rank: int, calls: Sequence[np.ndarray]) -> _Keys:
    """All keys that the rank's queries see, run by run."""
    begins, place, seeing = held.keys(cp_rank)
    rows = document_begins(np.array([(call["stop"] - call["start"]).sum() for call in calls])).tolist()
    each = np.split(seeing, np.cumsum([len(call) for call in calls])[:-1])
    return [(row, call) for row, call in zip(rows[:-1], each, strict=True) if len(call)], begins, rows[-1], place


def _share_of_keys(
    held: Ownership, mine: np.ndarray, calls: Sequence[np.ndarray], share: Share, arrive: np.ndarray
) -> _Keys:
    """Rows that arrive and, with the first share, the heads, which tails see; every document's keys in packed order."""
    (heads, tails), counts = calls, arrive.copy()
    segments, own = held.segments, held.segments[mine]
    num_heads = len(heads) if share.low == 0 and len(tails) else 0
    counts[mine[:num_heads]] = heads["stop"][:num_heads] - heads["start"][:num_heads]
    order = np.lexsort((segments["start"], segments["document"]))
    place = np.empty(len(segments), np.int64)
    place[order] = document_begins(counts[order])[:-1]
    begins = np.zeros(len(held.lengths) + 1, np.int64)
    np.add.at(begins[1:], segments["document"], counts)
    begins = begins.cumsum()
    first_rows = document_begins(own["stop"] - own["start"])
    seeing = own.copy()
    seeing["stop"] = place[mine] - begins[own["document"]]
    seeing["start"] = seeing["stop"] - (own["stop"] - own["start"])
    # Rows without keys are in no call.
    is_tail = np.arange(len(own)) >= len(heads)
    runs = itertools.groupby(range(len(own)), lambda i: (is_tail[i], seeing["stop"][i] > 0))
    found = [list(run) for (_, sees), run in runs if sees]
    return [(int(first_rows[run[0]]), seeing[run]) for run in found], begins, int(counts[mine].sum()), place


def _own_keys(segments: np.ndarray) -> Exchange:
    alone = np.zeros(len(segments), SEGMENT)
    alone["document"], alone["stop"] = np.arange(len(segments)), segments["stop"] - segments["start"]
    begins = document_begins(alone["stop"])
    rows = int(begins[-1])
    return Exchange(
        calls=((0, alone),) if rows else (), causal=True, key_begins=begins, own_rows=rows, own_keys=np.arange(rows)
    )


def _shared(rows: np.ndarray, share: Share) -> np.ndarray:
    """Return a share of rows [first, stop) of segments, int64 [2, ...]."""
    counts = rows[1] - rows[0]
    return rows[0] + np.stack([(counts * share.low).astype(np.int64), (counts * share.high).astype(np.int64)])
