"""Document lengths that benchmarks draw. Needs numpy only, since GPU machines may have little more."""

import json
from pathlib import Path

import numpy as np

DATA = Path(__file__).parent / "data"


def f2(count: int, seed: int, window: int | None = None) -> np.ndarray:
    """Lengths of the synthetic distribution F2, whose tail ends at the context window; default: the file's."""
    p = json.loads((DATA / "f2.json").read_text())
    rng = np.random.default_rng(seed)
    body = rng.lognormal(p["body"]["mu"], p["body"]["sigma"], count)
    tail = p["tail"]["minimum"] * (1 + rng.pareto(p["tail"]["alpha"], count))
    drawn = np.where(rng.random(count) < p["tail"]["probability"], tail, body)
    shortest, longest = p["clip"]
    return np.clip(drawn, shortest, window or longest).astype(np.int64)
