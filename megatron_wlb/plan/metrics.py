"""Balance of steps, and its cost in order and in tokens per step: per step, and over a run."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_wlb.cost.work import document_work
from megatron_wlb.job import Job
from megatron_wlb.packing.original import cut
from megatron_wlb.types import PackedBatch


def imbalance(work: np.ndarray) -> float:
    """max * M / total of the work of M micro-batches: 1 is perfect (paper, section 7.4)."""
    total = float(work.sum())
    return float(work.max()) * len(work) / total if total else 1.0


def original_work(drawn: np.ndarray, job: Job) -> np.ndarray:
    """Work of the micro-batches that original packing would make of DOCUMENT rows in stream order: int64 [<= N].

    These are the first N windows that the documents fill, or the one that they begin if they fill none.
    """
    pieces, window = cut(drawn, job.context_length)
    full = int(drawn["length"].sum()) // job.context_length
    bounds = np.searchsorted(window, np.arange(min(max(1, full), job.global_batch_size) + 1))
    return PackedBatch(documents=pieces, bounds=bounds).sums(document_work(pieces["length"], job.crossover_tokens))


def delays(packing: PackedBatch, step: int) -> dict[int, int]:
    """Tokens of the step by their delay in steps since arrival; negative if a policy read ahead."""
    late = step - packing.documents["arrival"]
    first = int(late.min(initial=0))
    tokens = np.bincount(late - first, weights=packing.documents["length"])
    return {first + int(i): int(tokens[i]) for i in np.flatnonzero(tokens)}


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
    """Measures of a run, to be shown together: each can improve at the cost of another; see `summarise`."""

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
    """Number of steps at either end, out of `count`, that means leave out: queues fill and drain there."""
    return int(skip * count)


def summarise(steps: Sequence[StepMetrics], *, num_waiting: int, skip: float = 0.1) -> Summary:
    """Summarise all steps of a run.

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
