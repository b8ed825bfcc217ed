"""Time in which the host launches the kernels of a layer, and how long a GPU waits for them."""

import numpy as np

from megatron_wlb.job import Job
from megatron_wlb.layers import parts_of

FORWARD = 1 / 3
"""Share of launches that forward has, as of products. Assumed."""


def launches(job: Job, kind: str) -> tuple[float, float]:
    """Return us in which the host launches a layer of a kind, forward and backward."""
    graphs, time = set(job.cuda_graphs), 0.0
    for part in parts_of(job.model, kind):
        if graphs & {"full", [*part.modules][-1]}:
            continue
        time += sum(each for module, each in part.modules.items() if module not in graphs)
        time += part.launches_us(job)
    return FORWARD * time, (1 - FORWARD) * time


def waiting(launched: float, busy: np.ndarray) -> np.ndarray:
    """Return us that a GPU waits for launches that take `launched` us, in a layer that keeps it `busy`.

    More than `launched` - `busy`: parts of a layer have many small kernels, and others few large ones. The third
    power is fitted, as `LAUNCHES_US` is; the larger of both alone is worse (p90 of left-out rows .17, not .10).
    """
    return np.cbrt(busy**3 + launched**3) - busy
