"""Hybrid sharding, as csrc/hybrid.h has it: every document on as few ranks as balance needs: 1, 2, 4, ... up to all.

The fewer ranks share a document, the fewer of its keys travel, and the fewer of its tiles are half empty. The paper
names a hybrid of its two shardings as future work (section 8). Documents come longest first, and each takes the ranks
that would end with least predicted work if their room were filled with the average of what is left; one with less work
a token than that, those that would end with most.

A document with more work than one rank should have of it goes to two ranks, four, ..., where each holds a head and a
tail chunk as in per-document sharding. Chunks are multiples of the kernel's tile, so that no query tile is half empty
and no diagonal is crossed twice, but where a rank is filled up. Other documents stay whole. What fits nowhere is cut to
fill the ranks up: every piece of it but the last fills a rank, so fewer than CP documents are cut like that, each rank
having one piece of them.
"""

import itertools
from functools import lru_cache

import numpy as np

from megatron_wlb.documents import SEGMENT, Shard, ShardPlan
from megatron_wlb.hardware.profile import KernelModel

Segments = list[tuple[int, int, int]]


def hybrid(lengths: np.ndarray, cp: int, most_share: float, kernel: KernelModel) -> ShardPlan:
    """Shard documents of `lengths` (int64 [n], sum divisible by cp), each on as few ranks as `most_share` allows.

    No rank has more work of one document than `most_share` times the mean work of a rank, where there are ranks enough.
    """
    order = np.argsort(-lengths, kind="stable")
    own = np.array([_count(kernel, 0, length) for length in lengths[order].tolist()])
    left, tokens_left = own.sum(0), int(lengths.sum())
    most_work = most_share * kernel.time(0, *left)
    ranks = _Ranks(cp, tokens_left // cp, kernel)
    for document, counts in zip(order.tolist(), own, strict=True):
        length, work = int(lengths[document]), kernel.time(0, *counts)
        ranks.per_token = kernel.time(0, *left) / tokens_left
        ranks.sign = -1 if work < ranks.per_token * length else 1
        left, tokens_left = left - counts, tokens_left - length
        share = 1
        while share < cp and work * cp > most_work * share:
            share = min(2 * share, cp)
        if share > 1:
            ranks.spread(document, length, share)
        else:
            ranks.fill(document, length)
    return ShardPlan(
        lengths=lengths,
        shards=tuple(Shard(calls=(np.sort(_segments(h)), np.sort(_segments(t)))) for h, t in ranks.calls),
        strategy="hybrid",
    )


class _Ranks:
    """What the ranks hold so far, and which of them the next document goes to."""

    per_token: float
    """Mean work of a token that is left."""
    sign: int
    """1 if ranks that would end with least work come first, -1 if those with most."""

    def __init__(self, cp: int, tokens: int, kernel: KernelModel) -> None:
        self._kernel = kernel
        self._room = np.full(cp, tokens)
        self._counts = np.zeros((cp, 2), np.int64)
        self.calls: list[tuple[Segments, Segments]] = [([], []) for _ in range(cp)]

    def fill(self, document: int, length: int) -> None:
        """Whole on one rank, or cut where none has the room."""
        start, ranks = 0, self._with_room(length)
        while start < length:
            rank = ranks[0] if len(ranks) else self._with_room(1)[0]
            stop = min(length, start + int(self._room[rank]))
            self._put(rank, 0, (document, start, stop))
            start = stop

    def spread(self, document: int, length: int, share: int) -> None:
        """As heads and tails on `share` ranks, or on more where too few have the room."""
        cp, tile = len(self._room), self._kernel.tile_rows
        while len(ranks := self._with_room(-(-length // share) if share < cp else 0)[:share]) < share:
            share = min(2 * share, cp)
        room = self._room[ranks]
        # Whole tiles as evenly as they go, the first ranks having more; but so that the rest fits the ranks after.
        sizes, left, room_after = [], length, room.sum()
        for i in range(share):
            room_after -= room[i]
            even = -(-left // ((share - i) * tile)) * tile
            sizes.append(min(room[i], max(min(even, left), left - room_after)))
            left -= sizes[-1]
        heads = [size // 2 // tile * tile for size in sizes]
        tails = [size - head for size, head in zip(sizes, heads, strict=True)]
        bounds = np.cumsum([0, *heads, *tails[::-1]]).tolist()
        for chunk, (start, stop) in enumerate(itertools.pairwise(bounds)):
            i = min(chunk, 2 * share - 1 - chunk)
            if stop > start:
                self._put(ranks[i], int(chunk >= share and heads[i] > 0), (document, start, stop))

    def _with_room(self, least: int) -> np.ndarray:
        """Ranks with room for so many tokens, in the order in which they need work."""
        ends = self.sign * (self._kernel.time(0, *self._counts.T) + self.per_token * self._room)
        order = np.argsort(ends, kind="stable")
        return order[self._room[order] >= least]

    def _put(self, rank: int, call: int, segment: tuple[int, int, int]) -> None:
        self.calls[rank][call].append(segment)
        self._counts[rank] += _count(self._kernel, *segment[1:])
        self._room[rank] -= segment[2] - segment[1]


@lru_cache(maxsize=1 << 14)
def _count(kernel: KernelModel, start: int, stop: int) -> tuple[int, int]:
    """Tiles of a segment; most are whole documents, which every `most_share` has."""
    return kernel.count(_segments([(0, start, stop)]))


def _segments(rows: Segments) -> np.ndarray:
    return np.array(rows, SEGMENT)
