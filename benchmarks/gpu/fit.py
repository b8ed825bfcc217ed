"""A kernel profile from measured launches, with numpy alone (`megatron-wlb profile` does it with held-out shapes)."""

from dataclasses import asdict
from itertools import combinations
from typing import Any

import numpy as np
from megatron_wlb.plan.workload import KernelModel, KernelTimes, Profile

TILE_ROWS = 128
_COUNTER = KernelModel(tile_rows=TILE_ROWS, launch=0.0, tile=0.0, query_tile=0.0)


def count(segments: np.ndarray, heads: int) -> tuple[int, int, int]:
    """What the launch, tile and query_tile of `KernelTimes` are multiplied with for a call of SEGMENT [n]."""
    tiles, query_tiles = _COUNTER.count(segments)
    return 1, heads * tiles, heads * query_tiles


def fit(counts: np.ndarray, us: np.ndarray) -> tuple[Profile, dict[str, Any]]:
    """A profile named "fitted" from counts [n, 3] and us [n, 2], forward and backward; and its file's content.

    Least squares of relative errors, no constant under 0.
    """
    times, errors = {}, {}
    for direction, measured in zip(("forward", "backward"), us.T, strict=True):
        constants = _non_negative(counts / measured[:, None])
        times[direction] = KernelTimes(**dict(zip(("launch", "tile", "query_tile"), constants.tolist(), strict=True)))
        errors[direction] = float(np.median(np.abs(counts @ constants / measured - 1)))
    kernel = {"tile_rows": TILE_ROWS, **{direction: asdict(t) for direction, t in times.items()}}
    entries = {"name": "fitted", "kernel": kernel, "median_error_of_fit": errors}
    return Profile(name="fitted", tile_rows=TILE_ROWS, **times), entries


def _non_negative(shares: np.ndarray) -> np.ndarray:
    """x >= 0 that brings shares @ x [n, 3] closest to 1: the best of the least squares over some of the columns."""
    best = np.zeros(shares.shape[1])
    for columns in (list(c) for n in (1, 2, 3) for c in combinations(range(3), n)):
        x = np.zeros(shares.shape[1])
        # Columns of like size: tiles are many, launches few.
        unit = np.linalg.norm(shares[:, columns], axis=0)
        x[columns] = np.linalg.lstsq(shares[:, columns] / unit, np.ones(len(shares)), rcond=None)[0] / unit
        if x.min() >= 0 and np.linalg.norm(shares @ x - 1) < np.linalg.norm(shares @ best - 1):
            best = x
    return best
