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


def test_a_run():
    rng = np.random.default_rng(0)
    runs = [
        [[(int(rng.integers(1, 64)), int(t - rng.integers(-2, 6))) for _ in range(rng.integers(1, 9))] for _ in "abcd"]
        for t in range(45)
    ]
    steps = [measure(packing(*micro_batches), t, JOB) for t, micro_batches in enumerate(runs)]
    summary = summarise(steps)

    kept = range(4, 41)  # a tenth of 45 is 4 at either end
    token_delays = [t - arrival for t in kept for m in runs[t] for length, arrival in m for _ in range(length)]
    tokens = [sum(length for m in runs[t] for length, _ in m) for t in kept]
    loads = [[sum(work(length) for length, _ in m) for m in runs[t]] for t in kept]
    imbalances = [max(each) * 4 / sum(each) for each in loads]
    expected = {
        "imbalance_mean": np.mean(imbalances),
        "late_steps": np.mean(np.maximum(token_delays, 0)),
        "token_cv": np.std(tokens) / np.mean(tokens),
    }
    # All steps, not only those of the averages.
    expected["steps"] = 45
    expected["tokens"] = sum(length for run in runs for m in run for length, _ in m)
    expected["max_delay_steps"] = max(t - arrival for t, run in enumerate(runs) for m in run for _, arrival in m)
    assert {name: summary[name] for name in expected} == pytest.approx(expected)
