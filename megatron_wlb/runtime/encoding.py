"""Tables that tell a kernel the rows of a call, encoded once per micro-batch.

A backend's `encode` takes `key_begins`, int64 [documents + 1], the offsets of the documents' keys among the keys of the
rank (`Exchange`), and `segments`, SEGMENT [n] of a call, n >= 1. It can be pickled: a DataLoader's worker may run it.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from megatron_wlb.sharding.segments import ranges


class Encoded(NamedTuple):
    """An attention call as a backend takes it."""

    table: np.ndarray
    """int32, contiguous; the backend defines its shape and meaning."""
    max_q: int = 0
    """Queries of the longest entry."""
    max_k: int = 0
    """Keys of the longest entry."""


Encoding = Callable[[np.ndarray, np.ndarray], Encoded]

_GAP_ROWS = 4096
"""Longest piece of a gap, unless an entry with queries is longer."""


def varlen(key_begins: np.ndarray, segments: np.ndarray) -> Encoded:
    """Return the table [cu_q, cu_k], [2, entries + 1], of a varlen call over all keys.

    Entry e attends query rows [cu_q[e], cu_q[e + 1]) to keys [cu_k[e], cu_k[e + 1]), causally, aligned to the bottom
    right. Entries without queries (gaps) skip keys that the call does not read, so no K/V is copied. Gaps count in
    max_k, since backward kernels write dK only up to max_k. They start max_k / 128 blocks per entry, so long gaps are
    cut into pieces.
    """
    begins = key_begins[segments["document"]]
    longest = max(_GAP_ROWS, int(segments["stop"].max()))
    # Interleave gap, entry, gap, entry, ..., gap; an empty gap comes in 0 pieces.
    cu_k = np.concatenate(([0], np.stack([begins, begins + segments["stop"]], axis=1).ravel(), key_begins[-1:]))
    q, k = np.zeros(2 * len(segments) + 1, np.int64), np.diff(cu_k)
    q[1::2] = segments["stop"] - segments["start"]
    pieces = -(-k // longest)
    q, k = np.repeat(q, pieces), np.repeat(k, pieces)
    piece = ranges(np.zeros_like(pieces), pieces)
    k = np.clip(k - piece * longest, 0, longest)
    # With max_q = 1 FlashAttention assumes decoding, and fails on gaps; max_q is an upper bound.
    return Encoded(offsets(np.stack((q, k))), max_q=max(2, int(q.max())), max_k=int(k.max()))


def offsets(lengths: np.ndarray) -> np.ndarray:
    """Return offsets of entries, int32 [..., entries + 1], from int64 `lengths`."""
    bounds = np.zeros((*lengths.shape[:-1], lengths.shape[-1] + 1), np.int32)
    np.cumsum(lengths, axis=-1, out=bounds[..., 1:])
    return bounds
