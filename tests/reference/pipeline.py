"""Longest paths through 1F1B, as csrc/pipeline.h has them."""

import numpy as np


def makespans(
    first: np.ndarray, second: np.ndarray, end: np.ndarray, time: np.ndarray, num_slots: int, work: np.ndarray
) -> np.ndarray:
    """When the last pass ends, int64 [K], for K orders of work [K, M] on the passes of a `PassGraph`."""
    ends = np.zeros((num_slots, len(work)), np.int64)
    for i, j, slot, of in zip(first, second, end, time, strict=True):
        ends[slot] = np.maximum(ends[i], ends[j]) + (1 + of % 2) * work[:, of // 2].astype(np.int64)
    return ends[end[-1]]
