"""Per-sequence sharding: rank i holds chunks i and 2*CP - 1 - i of the packed sequence (paper, section 5)."""

import numpy as np

from megatron_wlb.plan.sharding.segments import document_begins
from megatron_wlb.plan.types import SEGMENT, Shard, ShardPlan


def per_sequence(lengths: np.ndarray, cp_size: int) -> ShardPlan:
    """Shard documents of `lengths` (int64 [n], sum divisible by 2 * cp_size) over `cp_size` ranks."""
    begins = document_begins(lengths)
    chunk = int(begins[-1]) // (2 * cp_size)
    cut = [_segments(begins, c * chunk, (c + 1) * chunk) for c in range(2 * cp_size)]
    shards = tuple(Shard(colours=(cut[i], cut[2 * cp_size - 1 - i])) for i in range(cp_size))
    return ShardPlan(lengths=lengths, shards=shards, strategy="per-sequence")


def _segments(begins: np.ndarray, start: int, stop: int) -> np.ndarray:
    """The documents that packed rows [start, stop) cut through."""
    first = int(np.searchsorted(begins, start, side="right")) - 1
    last = int(np.searchsorted(begins, stop, side="left"))
    out = np.empty(last - first, SEGMENT)
    out["document"] = np.arange(first, last)
    out["start"] = np.maximum(start - begins[first:last], 0)
    out["stop"] = np.minimum(stop, begins[first + 1 : last + 1]) - begins[first:last]
    return out[out["stop"] > out["start"]]
