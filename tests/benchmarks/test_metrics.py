"""Measures of balance and order, against their definitions written out document by document."""

import numpy as np
import pytest

from benchmarks.metrics import measure, summarise
from megatron_wlb.documents import DOCUMENT, PackedBatch
from tests.jobs import job

JOB = job(context_length=64, crossover_tokens=30)


def packing(*micro_batches):
    """Micro-batches of (length, arrival)."""
    rows = [document for micro_batch in micro_batches for document in micro_batch]
    documents = np.zeros(len(rows), DOCUMENT)
    documents["length"] = [length for length, _ in rows]
    documents["arrival"] = [arrival for _, arrival in rows]
    return PackedBatch(documents=documents, bounds=np.cumsum([0, *map(len, micro_batches)]))


def work(length):
    return length * (length + JOB.crossover_tokens)


def measured(step, *micro_batches, plan_ms=0.0):
    return measure(packing(*micro_batches), step, JOB, plan_ms)


def test_a_run():
    rng = np.random.default_rng(0)
    runs = [
        [[(int(rng.integers(1, 64)), int(t - rng.integers(-2, 6))) for _ in range(rng.integers(1, 9))] for _ in "abcd"]
        for t in range(45)
    ]
    steps = [measured(t, *micro_batches, plan_ms=t + 1.0) for t, micro_batches in enumerate(runs)]
    summary = summarise(steps, num_waiting=3)

    kept = range(4, 41)  # a tenth of 45 is 4 at either end
    token_delays = [t - arrival for t in kept for m in runs[t] for length, arrival in m for _ in range(length)]
    tokens = [sum(length for m in runs[t] for length, _ in m) for t in kept]
    long = [sum(length for m in runs[t] for length, _ in m if length > 16) for t in kept]
    imbalances = []
    for t in kept:
        loads = [sum(work(length) for length, _ in m) for m in runs[t]]
        imbalances.append(max(loads) * 4 / sum(loads))
    shares = np.divide(long, tokens)
    assert summary.imbalance_mean == pytest.approx(np.mean(imbalances))
    assert summary.imbalance_p95 == pytest.approx(np.quantile(imbalances, 0.95))
    assert summary.late_steps == pytest.approx(np.mean(np.maximum(token_delays, 0)))
    assert summary.spread_steps == pytest.approx(np.mean(np.abs(token_delays - np.median(token_delays))))
    assert summary.token_cv == pytest.approx(np.std(tokens) / np.mean(tokens))
    assert (summary.long_share_mean, summary.long_share_std) == pytest.approx((shares.mean(), shares.std()))
    # All steps, not only those of the averages.
    assert (summary.steps, summary.waiting_documents) == (45, 3)
    assert summary.tokens == sum(length for run in runs for m in run for length, _ in m)
    assert summary.max_delay_steps == max(t - arrival for t, run in enumerate(runs) for m in run for _, arrival in m)
    assert (summary.plan_ms_median, summary.plan_ms_min, summary.plan_ms_max) == (23.0, 1.0, 45.0)
