"""Balance, order and tokens of steps and runs, as benchmarks report them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.results import Row
from megatron_wlb.documents import PackedBatch
from megatron_wlb.job import Job
from megatron_wlb.plan.metrics import imbalance
from megatron_wlb.simulate.step import TIME_SHARES, Breakdown, SimulatedStep, even_time


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """Measures of one step; see `measure`."""

    tokens: int
    imbalance: float
    delays: dict[int, int]
    """Tokens by their delay in steps since arrival."""
    long_tokens: int
    """Tokens of documents (pieces) longer than a quarter of the context window."""


def measure(packing: PackedBatch, step: int, job: Job) -> StepMetrics:
    """Measure the packing of `step`. O(documents)."""
    lengths = packing.documents["length"]
    return StepMetrics(
        tokens=int(lengths.sum()),
        imbalance=imbalance(packing.sums(job.work(lengths))),
        delays=delays_of(packing, step),
        long_tokens=int(lengths[4 * lengths > job.context_length].sum()),
    )


def delays_of(packing: PackedBatch, step: int) -> dict[int, int]:
    """Return tokens of the step by delay in steps; negative if read ahead."""
    late = step - packing.documents["arrival"]
    first = int(late.min(initial=0))
    tokens = np.bincount(late - first, weights=packing.documents["length"])
    return {first + int(i): int(tokens[i]) for i in np.flatnonzero(tokens)}


def summarise(steps: Sequence[StepMetrics], skip: float = 0.1) -> Row:
    """Measures of a run, to be shown together: each can improve at another's cost.

    Leaves the first and the last `skip` of the steps (rounded down) out of everything but counts and extremes: queues
    fill and drain there. `late_steps` is the mean over tokens of max(0, delay), `token_cv` the standard deviation over
    the mean of the tokens of steps.
    """
    left_out = int(skip * len(steps))
    middle = steps[left_out : len(steps) - left_out]
    imbalances, tokens = np.array([s.imbalance for s in middle]), np.array([s.tokens for s in middle])
    late = sum(max(0, delay) * count for s in middle for delay, count in s.delays.items())
    return {
        "steps": len(steps),
        "tokens": sum(s.tokens for s in steps),
        "imbalance_mean": float(imbalances.mean()),
        "late_steps": late / max(1, int(tokens.sum())),
        "max_delay_steps": max(max(s.delays, default=0) for s in steps),
        "token_cv": float(tokens.std() / max(1.0, tokens.mean())),
    }


def limit_time(parts: Breakdown) -> float:
    """Return the step's us if work were spread evenly, without waiting."""
    return sum(getattr(parts, name) for name in TIME_SHARES["busy"])


def balanced_time(step: SimulatedStep) -> float:
    """Return the step's us if micro-batches and CP shards had the mean work."""
    layers = step.job.layers()[:, :, None]
    balanced = []
    for p in step.passes:
        forward, backward = (
            time - p.pool_wait[d] - layers * (p.layers[d].attention.max(axis=1) - p.layers[d].attention.mean(axis=1))
            for d, time in enumerate((p.forward, p.backward))
        )
        balanced.append(replace(p, forward=forward, backward=backward))
    return even_time(step.job, balanced) + step.gradients + step.optimizer + step.parameters
