"""Balance of a simulated step: between micro-batches, DP ranks and CP ranks."""

import numpy as np

from megatron_wlb.simulate.step import SimulatedStep


def micro_batch_times(step: SimulatedStep) -> np.ndarray:
    """Return us of a layer per micro-batch, with equal CP ranks: float64 [dp, M]."""
    by_direction = [
        [layer.total - layer.attention.max(axis=1) + layer.attention.mean(axis=1) for layer in passes.layers]
        for passes in step.passes
    ]
    return np.sum(by_direction, axis=1)


def attention_of_ranks(step: SimulatedStep) -> np.ndarray:
    """Return us of attention by micro-batch and CP rank: float64 [dp * M, cp]."""
    return np.concatenate([sum(layer.attention for layer in passes.layers) for passes in step.passes])


def imbalances(step: SimulatedStep) -> dict[str, float]:
    """Return slowest over mean of micro-batches, DP ranks and CP ranks."""
    times, attention = micro_batch_times(step), attention_of_ranks(step)
    return {
        "pp": float((times.max(axis=1) / times.mean(axis=1)).mean()),
        "dp": float(times.sum(axis=1).max() / times.sum(axis=1).mean()),
        "cp": float(attention.max(axis=1).sum() / attention.mean(axis=1).sum()),
    }
