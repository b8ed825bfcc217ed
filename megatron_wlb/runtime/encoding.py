"""Tables that tell a kernel the rows of a call.

They are encoded once per micro-batch, for the backend that runs it. A backend's `encode` is a function of

    key_begins: int64 [documents + 1], the offset of each document's keys among the keys of the rank (`Exchange`);
    segments: SEGMENT [n], n >= 1, a call of a shard.

It can be pickled, since a DataLoader's worker may run it.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from megatron_wlb.sharding.segments import ranges


class Encoded(NamedTuple):
    """An attention call in the form that a backend takes."""

    table: np.ndarray
    """int32, contiguous; the backend defines its shape and meaning."""
    max_q: int = 0
    """Queries of the longest entry, for kernels that need the number."""
    max_k: int = 0
    """Keys of the longest entry, for kernels that need the number."""


Encoding = Callable[[np.ndarray, np.ndarray], Encoded]

_GAP_ROWS = 4096
"""Pieces of a gap are capped at this length, or at the longest entry with queries if that is longer."""


def varlen(key_begins: np.ndarray, segments: np.ndarray) -> Encoded:
    """The table [cu_q, cu_k], [2, entries + 1], of a varlen call over all keys.

    Entry e attends query rows [cu_q[e], cu_q[e + 1]) of the call to keys [cu_k[e], cu_k[e + 1]), causally and aligned
    to the bottom right. Gap entries have no queries: they skip keys that this call does not read, so no K/V is copied.
    Gaps count in max_k, because a backward kernel writes dK only up to max_k. The kernel also starts max_k / 128 blocks
    for every entry, so long gaps are cut into pieces.
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
    # With max_q = 1 FlashAttention assumes one query per entry (decoding) and fails on gaps. max_q is an upper bound,
    # so 2 works as well.
    return Encoded(offsets(np.stack((q, k))), max_q=max(2, int(q.max())), max_k=int(k.max()))


def offsets(lengths: np.ndarray) -> np.ndarray:
    """Offsets of entries, int32 [..., entries + 1], from int64 `lengths`."""
    bounds = np.zeros((*lengths.shape[:-1], lengths.shape[-1] + 1), np.int32)
    np.cumsum(lengths, axis=-1, out=bounds[..., 1:])
    return bounds
