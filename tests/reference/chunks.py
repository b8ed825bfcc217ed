"""The paper's two shardings, as csrc/sharding.cpp has them: chunks r and 2 * CP - 1 - r on rank r."""

import numpy as np

from megatron_wlb.documents import SEGMENT, Shard, ShardPlan
from megatron_wlb.sharding.routing import document_begins


def per_sequence(lengths: np.ndarray, cp: int) -> ShardPlan:
    """Cut the packed sequence into equal chunks (paper, section 5).

    Args:
        lengths: int64 [n], of the documents; their sum is divisible by 2 * cp.
        cp: context-parallel ranks.
    """
    begins = document_begins(lengths)
    cuts = np.arange(2 * cp + 1) * (begins[-1] // (2 * cp))
    bounds = np.clip(cuts - begins[:-1, None], 0, lengths[:, None])
    return ShardPlan(lengths=lengths, shards=mirrored_chunks(bounds), strategy="per-sequence")


def per_document(lengths: np.ndarray, cp: int) -> ShardPlan:
    """Cut every document into chunks that differ by one token at most (paper, section 5.1); arguments as above.

    The remainder of a document extends that many of its chunks by one token each. A pointer that rotates over the
    chunks from document to document chooses them, so every rank ends with the same number of tokens, without padding.
    (The paper deals the remainder out as single tokens, which would be fragments.)
    """
    chunks = 2 * cp
    remainder = lengths % chunks
    pointer = document_begins(remainder)[:-1] % chunks
    extended = (np.arange(chunks) - pointer[:, None]) % chunks < remainder[:, None]
    return ShardPlan(
        lengths=lengths,
        shards=mirrored_chunks(chunk_bounds(lengths[:, None] // chunks + extended)),
        strategy="per-document",
    )


def chunk_bounds(sizes: np.ndarray) -> np.ndarray:
    """Where chunks of `sizes` (int64 [n, chunks]) begin and end in their documents, int64 [n, chunks + 1]."""
    return np.pad(sizes.cumsum(axis=1), ((0, 0), (1, 0)))


def mirrored_chunks(bounds: np.ndarray) -> tuple[Shard, ...]:
    """The shards of documents that are cut at `bounds` (int64 [n, 2 * cp + 1]); chunks may be empty."""

    def call(chunk: int) -> np.ndarray:
        segments = np.empty(len(bounds), SEGMENT)
        segments["document"] = np.arange(len(bounds))
        segments["start"], segments["stop"] = bounds[:, chunk], bounds[:, chunk + 1]
        return segments[segments["stop"] > segments["start"]]

    last = bounds.shape[1] - 2
    return tuple(Shard(calls=(call(r), call(last - r))) for r in range(bounds.shape[1] // 2))
