"""Fits a profile's kernel times: shapes to measure, the fit, the file's contents."""

import itertools
from dataclasses import fields
from operator import itemgetter
from typing import Any

import msgspec
import numpy as np

from megatron_wlb.hardware.profile import KernelModel, KernelTimes, Profile
from megatron_wlb.sharding.select import divide
from megatron_wlb.types import Shard, ShardPlan

Shape = tuple[ShardPlan, int]
"""A plan, and the rank whose shard is measured."""


def shapes(longest: int) -> list[Shape]:
    """Return shards to measure, of up to `longest` tokens per document (2^k >= 512).

    The same in every run: single documents; equal ones packed; chunks of single ones; mixed ones in all shardings.
    """
    rng = np.random.default_rng(0)
    kernel = KernelModel(tile_rows=128, launch=0.0, tile=1.0, query_tile=1.0)
    shards: list[Shape] = []

    def add(lengths: Any, cp: int = 1, strategy: str = "per-document") -> None:
        plan = divide(np.array(lengths, np.int64), cp, strategy, kernel)
        shards.extend((plan, rank) for rank in sorted({0, cp - 1}))

    for length in sorted({max(8, int(longest / 4 * 0.6**k)) for k in range(14)}):
        add([length])
    equal = sorted({max(8, longest // n) for n in (32, 128, 512, 2048)})
    for total, length in itertools.product((longest // 8, longest // 32), equal):
        add([length] * (total // length))
    for length, cp in itertools.product((longest, longest // 4, longest // 16), (4, 16)):
        add([length], cp)
    for total, cp in itertools.product((longest, longest // 4), (4, 8)):
        for strategy in ("per-sequence", "per-document", "hybrid"):
            ends = np.unique(rng.lognormal(np.log(total / 32), 1.2, 256).astype(np.int64).cumsum().clip(1, total))
            add(np.diff(ends, prepend=0), cp, strategy)
    return shards


def fit_directions(
    shards: list[Shard], us: np.ndarray, heads: int, tile_rows: tuple[int, ...]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return kernel times, best `tile_rows` and errors; `us` is float64 [shards, 2].

    Raises ValueError if the times do not grow with the tiles.
    """
    held_out = held_out_shapes(len(shards))
    sizes = {"shapes_fitted": int((~held_out).sum()), "shapes_held_out": int(held_out.sum())}

    def fit_with(rows: int) -> tuple[float, dict[str, Any], dict[str, Any]]:
        counts = np.array([count(s, heads, rows) for s in shards])
        kernel: dict[str, Any] = {"tile_rows": rows}
        error, misfit = {}, 0.0
        for direction, measured in zip(("forward", "backward"), us.T, strict=True):
            kernel[direction] = fit(counts[~held_out], measured[~held_out])
            predicted = predict(kernel[direction], counts)
            median, p90 = relative_error(predicted[held_out], measured[held_out])
            error[direction] = {"held_out_median": median, "held_out_p90": p90, **sizes}
            misfit += float(((predicted / measured - 1)[~held_out] ** 2).sum())
        return misfit, kernel, error

    _, kernel, error = min(map(fit_with, tile_rows), key=itemgetter(0))
    if not kernel["forward"].tile + kernel["backward"].tile:
        raise ValueError("attention took no longer for more tiles; run without --quick, or while nothing else runs")
    return kernel, error


def held_out_shapes(num_shapes: int) -> np.ndarray:
    """Return the third of the shapes to hold out, shuffled, always the same: bool [n]."""
    return np.random.default_rng(0).permutation(num_shapes) % 3 == 2


def count(shard: Shard, heads: int, tile_rows: int) -> tuple[int, int, int]:
    """Return the factors of launch, tile and query_tile of `KernelTimes` for a shard."""
    kernel = KernelModel(tile_rows=tile_rows, launch=0.0, tile=0.0, query_tile=0.0)
    launches, tiles, query_tiles = kernel.count_shard(shard.calls)
    return launches, heads * tiles, heads * query_tiles


def fit(counts: np.ndarray, us: np.ndarray) -> KernelTimes:
    """Fit relative errors by least squares, no time under 0; counts [n, 3], us [n]."""
    from scipy.optimize import nnls

    relative = counts / us[:, None]
    unit = np.linalg.norm(relative, axis=0)
    shares = nnls(relative / unit, np.ones(len(us)))[0]
    shares[shares < 1e-9 * shares.max()] = 0  # rounding errors
    launch, tile, query_tile = map(rounded, shares / unit)
    return KernelTimes(launch=launch, tile=tile, query_tile=query_tile)


def predict(times: KernelTimes, counts: np.ndarray) -> np.ndarray:
    """Return predicted times in us, float64 [n], of counts [n, 3]."""
    return counts @ np.array([times.launch, times.tile, times.query_tile])


def relative_error(predicted: np.ndarray, measured: np.ndarray) -> tuple[float, float]:
    """Median and 90th percentile of |predicted / measured - 1|."""
    errors = np.abs(predicted / measured - 1)
    return round(float(np.median(errors)), 4), round(float(np.quantile(errors, 0.9)), 4)


def rounded(x: float) -> float:
    """Round to 4 significant digits."""
    return float(f"{x:.4g}")


def entries(profile: Profile, error: dict[str, Any]) -> dict[str, Any]:
    """Return the file of a profile with everything measured, as JSON types."""
    stated = msgspec.to_builtins(profile)
    kept = {f.name: stated[f.name] for f in fields(Profile) if getattr(profile, f.name) != f.default}
    return kept | {"unit": "us; tile and query_tile per query head, launch once", "error": error}
