"""From a shard to rows: which ones a rank holds, and their positions."""

import numpy as np

from megatron_wlb.types import Shard


def document_begins(lengths: np.ndarray) -> np.ndarray:
    """Return the first row of each document in packed order, int64 [documents + 1]."""
    return np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))


def ranges(starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
    """Return the concatenation of arange(start, stop), int64."""
    counts = stops - starts
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total, dtype=np.int64) + np.repeat(starts - (ends - counts), counts)


def rows(lengths: np.ndarray, shard: Shard) -> np.ndarray:
    """Return the rows of the micro-batch that the shard holds, int64 [tokens].

    They count in packed order, and come in local order.
    """
    begins = document_begins(lengths)
    parts = [ranges(begins[c["document"]] + c["start"], begins[c["document"]] + c["stop"]) for c in shard.calls]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def positions(shard: Shard) -> np.ndarray:
    """Return the in-document position of every local row, int64 [tokens]."""
    return np.concatenate([ranges(c["start"], c["stop"]) for c in shard.calls])
