"""Data-parallel placement, and the receive order of a pipeline stage against what its neighbours send."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_wlb.plan.pipeline import place, receive_order


@settings(deadline=None)
@given(dp_size=st.integers(1, 8), rounds=st.integers(1, 8), balance=st.booleans(), data=st.data())
def test_placement_is_a_partition_in_order(dp_size, rounds, balance, data):
    count = dp_size * rounds
    work = np.array(data.draw(st.lists(st.integers(0, 1000), min_size=count, max_size=count)), np.int64)
    placement = place(work, dp_size, balance=balance)
    assert placement.shape == (dp_size, rounds)
    assert sorted(placement.ravel()) == list(range(count))
    assert (np.diff(placement, axis=1) > 0).all()
    if balance:
        totals, largest = work[placement].sum(axis=1), np.sort(work)[-dp_size:]
        # Going back and forth, ranks differ by less than what separates the largest from the smallest micro-batch,
        assert np.ptp(totals) <= np.ptp(work)
        # and each has one of the dp_size largest.
        assert sorted(work[placement].max(axis=1)) == sorted(largest)


def test_placement_without_balance_is_round_robin():
    assert place(np.array([9, 1, 8, 2, 7, 3]), 2, balance=False).tolist() == [[0, 2, 4], [1, 3, 5]]


def test_placement_by_hand():
    # Descending: 9 8 | 7 3 | 2 1, dealt to ranks 0 1 | 1 0 | 0 1.
    assert place(np.array([9, 1, 8, 2, 7, 3]), 2, balance=True).tolist() == [[0, 3, 5], [1, 2, 4]]


def interleaved(num_micro_batches, num_chunks, group):
    """The order in which a stage of an interleaved pipeline runs (micro-batch, chunk): group by group, every chunk."""
    return [
        (m, chunk)
        for first in range(0, num_micro_batches, group)
        for chunk in range(num_chunks)
        for m in range(first, min(first + group, num_micro_batches))
    ]


def received(table, num_chunks, num_stages, *, backward):
    """Micro-batches that each stage receives, in order, from the sends of its neighbour alone."""
    last_stage, last_chunk = num_stages - 1, num_chunks - 1
    inbox = {stage: [] for stage in range(num_stages)}
    for stage in range(num_stages):
        for m, chunk in table:
            if backward:
                chunk = last_chunk - chunk  # the last chunk's gradients come first
                if stage > 0:
                    inbox[stage - 1].append((m, chunk))
                elif chunk > 0:
                    inbox[last_stage].append((m, chunk - 1))
            elif stage < last_stage:
                inbox[stage + 1].append((m, chunk))
            elif chunk < last_chunk:
                inbox[0].append((m, chunk + 1))
    return inbox


def check_receive_order(num_stages, num_chunks, num_micro_batches, group):
    table = interleaved(num_micro_batches, num_chunks, group)
    sends = [received(table, num_chunks, num_stages, backward=backward) for backward in (False, True)]
    for stage in range(num_stages):
        orders = receive_order(table if num_chunks > 1 else None, num_micro_batches, num_chunks, stage, num_stages)
        for order, inbox, backward in zip(orders, sends, (False, True), strict=True):
            assert order == [m for m, _ in inbox[stage]]
            # And the stage computes its messages in the order in which they come.
            computed = [(m, num_chunks - 1 - chunk if backward else chunk) for m, chunk in table]
            assert inbox[stage] == [work for work in computed if work in set(inbox[stage])]


@pytest.mark.parametrize("num_chunks", [1, 2, 3])
@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_receive_order_is_what_the_neighbour_sends(num_stages, num_chunks):
    for num_micro_batches in range(1 if num_chunks == 1 else num_stages, 18):
        for group in range(num_stages, num_micro_batches + 1) if num_chunks > 1 else [num_micro_batches]:
            # Upstream refuses a last group smaller than the pipeline.
            if num_micro_batches % group == 0 or num_micro_batches % group >= num_stages:
                check_receive_order(num_stages, num_chunks, num_micro_batches, group)


def test_receive_order_by_hand():
    table = interleaved(3, 2, 2)
    assert table == [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (2, 1)]
    assert receive_order(table, 3, 2, 0, 2) == ([0, 1, 2], [0, 1, 0, 1, 2, 2])
    assert receive_order(table, 3, 2, 1, 2) == ([0, 1, 0, 1, 2, 2], [0, 1, 2])
