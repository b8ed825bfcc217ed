"""Balance, order and tokens of steps and runs, as benchmarks report them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_wlb.documents import PackedBatch, document_work
from megatron_wlb.job import Job
from megatron_wlb.plan.metrics import delays, imbalance
from megatron_wlb.simulate.step import SimulatedStep, alike_time


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """Measures of one step; see `measure`."""

    tokens: int
    imbalance: float
    ratio_to_bound: float
    """Largest micro-batch over max(mean micro-batch, largest document), the lower bound of any packing of the step."""
    delays: dict[int, int]
    """Tokens by their delay in steps since arrival."""
    long_tokens: int
    """Tokens of documents (pieces) longer than a quarter of the context window."""
    plan_ms: float


def measure(packing: PackedBatch, step: int, job: Job, plan_ms: float = 0.0) -> StepMetrics:
    """Measure the packing of `step`. O(documents)."""
    lengths = packing.documents["length"]
    document = document_work(lengths, job.crossover_tokens)
    work = packing.sums(document)
    bound = max(float(work.sum()) / len(work), float(document.max(initial=0)))
    return StepMetrics(
        tokens=int(lengths.sum()),
        imbalance=imbalance(work),
        ratio_to_bound=float(work.max()) / bound if bound else 1.0,
        delays=delays(packing, step),
        long_tokens=int(lengths[4 * lengths > job.context_length].sum()),
        plan_ms=plan_ms,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Measures of a run, to be shown together: each can improve at another's cost."""

    steps: int
    middle_steps: int
    """Number of steps in means, quantiles and deviations."""
    tokens: int
    imbalance_mean: float
    imbalance_p95: float
    ratio_to_bound: float
    late_steps: float
    """Mean over tokens of max(0, delay)."""
    spread_steps: float
    """Mean over tokens of |delay - median delay|: what remains if all data may run some steps later."""
    max_delay_steps: int
    token_cv: float
    """Standard deviation over mean of tokens per step."""
    long_share_mean: float
    """Share of a step's tokens in documents longer than a quarter of the window."""
    long_share_std: float
    waiting_documents: int
    plan_ms_median: float
    plan_ms_min: float
    plan_ms_max: float


def edge(count: int, skip: float = 0.1) -> int:
    """Return the number of steps at either end that means leave out."""
    return int(skip * count)


def summarise(steps: Sequence[StepMetrics], *, num_waiting: int, skip: float = 0.1) -> Summary:
    """Return the summary of all steps of a run.

    Leaves the first and the last `skip` of the steps (rounded down) out of everything but counts, extremes and planning
    time: queues fill and drain there. Raises ValueError if no step is left.
    """
    left_out = edge(len(steps), skip)
    middle = steps[left_out : len(steps) - left_out]
    if not middle:
        raise ValueError(
            f"nothing to summarise: {len(steps)} steps, of which {left_out} at either end are left out; give more steps"
        )
    imbalances = np.array([s.imbalance for s in middle])
    tokens = np.array([s.tokens for s in middle])
    shares = np.array([s.long_tokens / max(1, s.tokens) for s in middle])
    late, spread = _displacement(middle)
    times = [s.plan_ms for s in steps]
    return Summary(
        steps=len(steps),
        middle_steps=len(middle),
        tokens=sum(s.tokens for s in steps),
        imbalance_mean=float(imbalances.mean()),
        imbalance_p95=float(np.quantile(imbalances, 0.95)),
        ratio_to_bound=float(np.mean([s.ratio_to_bound for s in middle])),
        late_steps=late,
        spread_steps=spread,
        max_delay_steps=max(max(s.delays, default=0) for s in steps),
        token_cv=float(tokens.std() / max(1.0, tokens.mean())),
        long_share_mean=float(shares.mean()),
        long_share_std=float(shares.std()),
        waiting_documents=num_waiting,
        plan_ms_median=float(np.median(times)),
        plan_ms_min=min(times),
        plan_ms_max=max(times),
    )


def _displacement(steps: Sequence[StepMetrics]) -> tuple[float, float]:
    """`late_steps` and `spread_steps` of `Summary`."""
    counts: Counter[int] = Counter()
    for step in steps:
        counts.update(step.delays)
    if not counts:
        return 0.0, 0.0
    delay = np.array(sorted(counts))
    tokens = np.array([counts[d] for d in delay.tolist()])
    median = delay[np.searchsorted(2 * np.cumsum(tokens), tokens.sum())]
    late = np.average(np.maximum(delay, 0), weights=tokens)
    return float(late), float(np.average(np.abs(delay - median), weights=tokens))


def balanced_time(step: SimulatedStep) -> float:
    """Return the step's us if micro-batches and CP shards had the mean work."""
    layers = step.job.layers()[:, :, None]
    balanced = []
    for p in step.passes:
        forward, backward = (
            time - p.expert_wait[d] - layers * (p.layers[d].attention.max(axis=1) - p.layers[d].attention.mean(axis=1))
            for d, time in enumerate((p.forward, p.backward))
        )
        balanced.append(replace(p, forward=forward, backward=backward))
    return alike_time(step.job, balanced) + step.gradients + step.optimizer + step.parameters
