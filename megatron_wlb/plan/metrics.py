"""How well a step is balanced, and what it cost in order."""

import numpy as np

from megatron_wlb.plan.types import Packing


def imbalance(work: np.ndarray) -> float:
    """max * N / total of the work of N micro-batches: 1 is perfect (paper, section 7.4)."""
    total = float(work.sum())
    return float(work.max()) * len(work) / total if total else 1.0


def delays(packing: Packing, step: int) -> dict[int, int]:
    """Tokens of the step by the number of steps they ran after they arrived."""
    late = step - packing.documents["arrival"]
    steps, where = np.unique(late, return_inverse=True)
    tokens = np.bincount(where, weights=packing.documents["length"]).astype(np.int64)
    return dict(zip(steps.tolist(), tokens.tolist(), strict=True))
