"""From a shard to kernel arguments: which rows a rank holds, and the varlen encoding of its segments."""

from dataclasses import dataclass

import numpy as np

from megatron_wlb.plan.types import Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class VarlenCall:
    """Arguments of one varlen attention call over the keys of a rank, causal aligned to the bottom right.

    Entry e attends query rows [cu_q[e], cu_q[e + 1]) of the colour to keys [cu_k[e], cu_k[e + 1]). Entries without
    queries skip the keys that nobody in this colour reads, so no K/V is copied.
    """

    cu_q: np.ndarray
    """int32 [entries + 1]."""
    cu_k: np.ndarray
    """int32 [entries + 1]; spans all keys of the rank."""
    max_q: int
    max_k: int
    """Longest entry in queries and in keys. Gap entries count: a backward kernel writes dK only up to max_k."""


def document_begins(lengths: np.ndarray) -> np.ndarray:
    """First row of each document in packed order, int64 [documents + 1]."""
    return np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))


def ranges(starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
    """Concatenation of arange(start, stop), int64."""
    counts = stops - starts
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total, dtype=np.int64) + np.repeat(starts - (ends - counts), counts)


def rows(lengths: np.ndarray, shard: Shard) -> np.ndarray:
    """Rows of the micro-batch (packed order) that the shard holds, in local order, int64 [tokens]."""
    begins = document_begins(lengths)
    parts = [ranges(begins[c["document"]] + c["start"], begins[c["document"]] + c["stop"]) for c in shard.calls]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def positions(shard: Shard) -> np.ndarray:
    """In-document position of every local row, int64 [tokens]."""
    return np.concatenate([ranges(c["start"], c["stop"]) for c in shard.calls])


def encode(key_begins: np.ndarray, colour: np.ndarray) -> VarlenCall:
    """The varlen call of one colour (SEGMENT [n], in document order); DESIGN "colours and gap entries".

    `key_begins` (int64 [documents + 1]) says where the keys of each document begin; see `exchange.Exchange`.
    """
    q_lengths = colour["stop"] - colour["start"]
    k_starts = key_begins[colour["document"]]
    k_stops = k_starts + colour["stop"]
    # Interleave gap, entry, gap, entry, ..., gap; then drop the empty gaps.
    cu_k = np.concatenate(([0], np.stack([k_starts, k_stops], axis=1).ravel(), key_begins[-1:]))
    q = np.zeros(2 * len(colour) + 1, np.int64)
    q[1::2] = q_lengths
    keep = (np.diff(cu_k) > 0) | (q > 0)
    q, k = q[keep], np.diff(cu_k)[keep]
    return VarlenCall(
        cu_q=np.concatenate(([0], np.cumsum(q))).astype(np.int32),
        cu_k=np.concatenate(([0], np.cumsum(k))).astype(np.int32),
        max_q=int(q.max(initial=0)),
        max_k=int(k.max(initial=0)),
    )
