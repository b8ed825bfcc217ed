"""The integer linear program of the paper's equation 1: worked by hand, and never worse than the greedy packing."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.ilp import IlpPacking
from tests.packing.steps import documents, fixed, pack, windows


def solved(num_micro_batches=2, context_length=10, **settings):
    return windows(IlpPacking(**settings), num_micro_batches, context_length)


def largest(policy, rows, steps=1):
    """Sum over the steps of the largest attention work, with the data at its end."""
    packings = [pack(policy, rows if step == 0 else rows[:0], exhausted=True) for step in range(steps)]
    return sum(int(p.sums(p.documents["length"] ** 2).max()) for p in packings)


@settings(max_examples=25)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=10), st.integers(1, 2))
def test_ilp_is_never_worse_than_fixed_on_the_same_pieces(lengths, num_steps):
    lengths = lengths[: int(np.searchsorted(np.cumsum(lengths), 2 * num_steps * 30 * 0.98, side="right"))]
    rows = documents(lengths)
    how = {"context_length": 30, "global_batches": num_steps}
    steps = max(1, -(-sum(lengths) // 60))
    best, greedy = largest(solved(**how), rows, steps), largest(fixed(**how), rows, steps)
    assert best <= greedy * (1 + 1e-4) + 1e-4
