"""Which K and V a rank sends, and where it finds those that it needs.

Only documents that live on more than one rank are exchanged. Every rank sends `num_sent` rows, the most that any has to
send, so that one all-gather serves. What arrives, rank by rank, and then the rows of the rank that are not exchanged
make up a *pool*; the *keys* of the rank are the rows of the pool that its queries see: of each of its documents, in
packed order, the beginning up to the last query.
"""

from dataclasses import dataclass

import numpy as np

from megatron_wlb.plan.sharding.segments import document_begins, ranges
from megatron_wlb.plan.types import ShardPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """Integers of one rank, which holds s rows; rows count in the rank's local order, keys in its key order."""

    num_sent: int
    """Rows that every rank sends."""
    key_begins: np.ndarray
    """int64 [documents + 1]: first key of each document; a document without queries here has no keys."""
    sent_rows: np.ndarray
    """int64 [at most num_sent]: the rows that are sent, in order; the rest of what is sent is padding."""
    gather: np.ndarray
    """int64 [keys]: keys = pool[gather]."""
    scatter: np.ndarray
    """int64 [cp * num_sent]: key of every row that arrives; the number of keys where it is none of ours."""
    own_rows: np.ndarray
    """int64: rows whose document lives nowhere else."""
    own_keys: np.ndarray
    """int64: and their keys."""


def num_sent(plan: ShardPlan) -> int:
    """Rows that every rank of the plan sends."""
    shared = _shared(plan)
    return max(_rows_of(np.concatenate(s.calls), shared) for s in plan.shards)


def exchange(plan: ShardPlan, cp_rank: int) -> Exchange:
    """What rank `cp_rank` of the plan exchanges. O(rows of the micro-batch), vectorised."""
    shared = _shared(plan)
    held = [np.concatenate(s.calls) for s in plan.shards]
    sent = max(_rows_of(segments, shared) for segments in held)
    mine = held[cp_rank]
    key_lengths = np.zeros(len(plan.lengths), np.int64)
    np.maximum.at(key_lengths, mine["document"], mine["stop"])
    begins = document_begins(key_lengths)
    keys = int(begins[-1])

    # Where the segments of shared documents lie in the pool, and the part of each that this rank has keys for.
    arrived = [(s[shared[s["document"]]], r * sent) for r, s in enumerate(held)]
    segments = np.concatenate([s for s, _ in arrived])
    places = np.concatenate([first + document_begins(s["stop"] - s["start"])[:-1] for s, first in arrived])
    counts = np.minimum(segments["stop"], key_lengths[segments["document"]]) - segments["start"]
    seen = counts > 0
    segments, places, counts = segments[seen], places[seen], counts[seen]
    targets = begins[segments["document"]] + segments["start"]

    rows = document_begins(mine["stop"] - mine["start"])[:-1]
    is_shared = shared[mine["document"]]
    own, own_first = mine[~is_shared], rows[~is_shared]
    own_rows = ranges(own_first, own_first + own["stop"] - own["start"])
    own_keys = ranges(begins[own["document"]] + own["start"], begins[own["document"]] + own["stop"])

    gather = np.empty(keys, np.int64)
    scatter = np.full(len(held) * sent, keys, np.int64)
    from_pool, to_keys = ranges(places, places + counts), ranges(targets, targets + counts)
    gather[to_keys] = from_pool
    scatter[from_pool] = to_keys
    gather[own_keys] = len(held) * sent + np.arange(len(own_rows))
    first, segments = rows[is_shared], mine[is_shared]
    return Exchange(
        num_sent=sent,
        key_begins=begins,
        sent_rows=ranges(first, first + segments["stop"] - segments["start"]),
        gather=gather,
        scatter=scatter,
        own_rows=own_rows,
        own_keys=own_keys,
    )


def _shared(plan: ShardPlan) -> np.ndarray:
    """bool [documents]: lives on more than one rank."""
    held = np.zeros((len(plan.shards), len(plan.lengths)), bool)
    for rank, shard in enumerate(plan.shards):
        held[rank, np.concatenate(shard.calls)["document"]] = True
    return held.sum(axis=0) > 1


def _rows_of(segments: np.ndarray, chosen: np.ndarray) -> int:
    return int((segments["stop"] - segments["start"])[chosen[segments["document"]]].sum())
