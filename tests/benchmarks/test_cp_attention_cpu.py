"""What the CPU benchmark compares computes the same. Times are not looked at."""

import numpy as np
import pytest
import torch

from benchmarks import cp_attention_cpu
from benchmarks.cp_attention_cpu import METHODS, OURS, Case, measure, prepare

CASES = (
    Case("per document", np.array([5, 61, 18, 33, 1, 42, 24, 8], np.int64), 4),
    Case("GQA", np.array([5, 61, 18, 33, 1, 42, 24, 8], np.int64), 2, heads=(8, 2)),
    Case("whole", np.array([7, 25], np.int64), 1, dtype=torch.bfloat16),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_all_methods_are_float64_and_measured(case):
    calls = prepare(case)  # raises where one is not
    assert [of_rank.keys() for of_rank in calls] == [METHODS.keys()] * case.cp
    rows = measure(case, calls, 1, 0)
    assert [row["method"] for row in rows] == list(METHODS)
    assert rows[0]["total_over_ours"] == rows[0]["slowest_over_ours"] == 1
    assert all(row["total_ms_min"] <= row["total_ms"] <= row["total_ms_max"] for row in rows)


def test_a_wrong_method_is_found(monkeypatch):
    def twice(rank, local):
        right = METHODS[OURS](rank, local)
        return lambda: tuple(2 * x for x in right())

    monkeypatch.setattr(cp_attention_cpu, "METHODS", {**METHODS, "one mask": twice})
    with pytest.raises(ValueError, match="one mask is off"):
        prepare(CASES[0])
