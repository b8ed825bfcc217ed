"""What a kernel is told about the rows of a call: encoded once per micro-batch, for the backend that runs it.

A backend's `encode` is a function of

    key_begins: int64 [documents + 1], where the keys of each document begin among those of the rank (`Exchange`);
    segments: SEGMENT [n], n >= 1, a call of a shard.

It can be pickled, since a DataLoader's worker may run it.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from megatron_wlb.sharding.segments import ranges


class Encoded(NamedTuple):
    """An attention call as a backend takes it."""

    table: np.ndarray
    """int32, contiguous, of the shape and meaning that the backend gives it."""
    max_q: int = 0
    """Longest entry in queries, where kernels ask for it."""
    max_k: int = 0
    """Longest entry in keys, likewise."""


Encoding = Callable[[np.ndarray, np.ndarray], Encoded]

_GAP_ROWS = 4096
"""Gaps are cut into pieces no longer than this, or than the longest entry with queries."""


def varlen(key_begins: np.ndarray, segments: np.ndarray) -> Encoded:
    """The table [cu_q, cu_k], [2, entries + 1], of one varlen call over all keys of the rank.

    Entry e attends query rows [cu_q[e], cu_q[e + 1]) of the call to keys [cu_k[e], cu_k[e + 1]), causally and aligned
    to the bottom right. Gap entries, without queries, skip the keys that nobody in this call reads, so no K/V is
    copied. They count in max_k: a backward kernel writes dK only up to there, and starts max_k / 128 blocks for every
    entry, so a long gap is cut into pieces.
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
    # With max_q = 1 FlashAttention takes every entry for a single query (decoding) and fails on the gaps, which have
    # none. It is an upper bound, so 2 is as good.
    return Encoded(offsets(np.stack((q, k))), max_q=max(2, int(q.max())), max_k=int(k.max()))


def offsets(lengths: np.ndarray) -> np.ndarray:
    """Where entries of `lengths` (int64 [..., entries]) begin and end, int32 [..., entries + 1]."""
    bounds = np.zeros((*lengths.shape[:-1], lengths.shape[-1] + 1), np.int32)
    np.cumsum(lengths, axis=-1, out=bounds[..., 1:])
    return bounds
