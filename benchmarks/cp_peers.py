"""How others shard a micro-batch over context-parallel ranks, written from their published descriptions.

Plans to compare with, not to run: ranks may hold different numbers of tokens, and a call a document several times.
"""

import heapq

import numpy as np

from megatron_wlb.plan.sharding.segments import document_begins
from megatron_wlb.plan.types import SEGMENT, Shard, ShardPlan


def magi(lengths: np.ndarray, cp: int) -> ShardPlan:
    """MagiAttention's dispatch: eight equal chunks of the packed sequence a rank, the largest attended area first.

    Each goes to the rank with the least area so far that has not its eight. Adjacent chunks are one; all is one call.
    """
    begins, tokens = document_begins(lengths), int(lengths.sum())
    size = -(-tokens // (8 * cp))
    cuts = np.unique(np.concatenate((begins, np.arange(0, tokens, size))))
    pieces = np.empty(len(cuts) - 1, SEGMENT)
    pieces["document"] = np.searchsorted(begins, cuts[:-1], side="right") - 1
    pieces["start"], pieces["stop"] = (edge - begins[pieces["document"]] for edge in (cuts[:-1], cuts[1:]))
    chunk = cuts[:-1] // size
    area = np.zeros(chunk[-1] + 1, np.int64)
    np.add.at(area, chunk, (pieces["stop"] - pieces["start"]) * (pieces["stop"] + pieces["start"] + 1) // 2)
    owner, held = np.empty(len(area), np.int64), np.zeros(cp, np.int64)
    ranks = [(0, rank) for rank in range(cp)]
    for c in np.argsort(-area, kind="stable").tolist():
        load, rank = heapq.heappop(ranks)
        owner[c] = rank
        held[rank] += 1
        if held[rank] < 8:
            heapq.heappush(ranks, (load + int(area[c]), rank))

    def call(rank: int) -> np.ndarray:
        mine = pieces[owner[chunk] == rank]
        joins = (mine["document"][1:] == mine["document"][:-1]) & (mine["start"][1:] == mine["stop"][:-1])
        joined = mine[np.append(True, ~joins)[: len(mine)]]
        joined["stop"] = mine["stop"][np.append(~joins, True)[: len(mine)]]
        return joined

    shards = tuple(Shard(calls=(call(r),)) for r in range(cp))
    return ShardPlan(lengths=lengths, shards=shards, strategy="magi", call_sets=(0,))


def dynamic(lengths: np.ndarray, cp: int) -> ShardPlan:
    """Dynamic context parallelism: a document on the fewest ranks, 1, 2, 4, ..., that have room for it alone.

    Longest first, on the aligned group of ranks whose slowest has least work; equal heads and tails within the group.
    `cp` is a power of two. Nothing makes the numbers of tokens equal.
    """
    work = np.zeros(cp)
    calls: list[tuple[list[tuple[int, int, int]], ...]] = [([], []) for _ in range(cp)]
    for document in np.argsort(-lengths, kind="stable").tolist():
        length, k = int(lengths[document]), 1
        while k < cp and length * cp > k * int(lengths.sum()):
            k *= 2
        group = k * int(work.reshape(-1, k).max(axis=1).argmin())
        work[group : group + k] += length**2 / k
        cuts = np.arange(2 * k + 1) * length // (2 * k)
        for chunk in range(2 * k) if k > 1 else ():
            rank = group + min(chunk, 2 * k - 1 - chunk)
            if cuts[chunk + 1] > cuts[chunk]:
                calls[rank][chunk >= k].append((document, int(cuts[chunk]), int(cuts[chunk + 1])))
        if k == 1:
            calls[group][0].append((document, 0, length))
    shards = (Shard(calls=tuple(np.sort(np.array(each, SEGMENT)) for each in pair)) for pair in calls)
    return ShardPlan(lengths=lengths, shards=tuple(shards), strategy="dynamic")
