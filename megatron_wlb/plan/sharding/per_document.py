"""Per-document sharding without padding: every rank holds chunks i and 2*CP - 1 - i of every document.

A document of length L has 2*CP chunks of L // (2*CP) tokens; its remainder extends that many chunks by one token each,
chosen by a pointer that rotates over the chunks from document to document. Chunks stay contiguous, and since the whole
micro-batch divides by 2*CP, every rank ends with exactly the same number of tokens (paper, section 5.1, which deals
the remainder out as single tokens; those would be fragments).
"""

import numpy as np

from megatron_wlb.plan.types import SEGMENT, Shard, ShardPlan


def per_document(lengths: np.ndarray, cp_size: int) -> ShardPlan:
    """Shard documents of `lengths` (int64 [n], sum divisible by 2 * cp_size) over `cp_size` ranks."""
    chunks = 2 * cp_size
    remainder = lengths % chunks
    pointer = np.concatenate(([0], np.cumsum(remainder)))[:-1] % chunks
    extended = (np.arange(chunks)[None, :] - pointer[:, None]) % chunks < remainder[:, None]
    bounds = np.zeros((len(lengths), chunks + 1), np.int64)
    np.cumsum(lengths[:, None] // chunks + extended, axis=1, out=bounds[:, 1:])
    cut = [_segments(bounds[:, c], bounds[:, c + 1]) for c in range(chunks)]
    shards = tuple(Shard(colours=(cut[i], cut[chunks - 1 - i])) for i in range(cp_size))
    return ShardPlan(lengths=lengths, shards=shards, strategy="per-document")


def _segments(starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
    out = np.empty(len(starts), SEGMENT)
    out["document"], out["start"], out["stop"] = np.arange(len(starts)), starts, stops
    return out[out["stop"] > out["start"]]
