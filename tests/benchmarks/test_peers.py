"""What is compared with ours holds every row once, and has what its description promises."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import cp_peers
from megatron_wlb.cost.attention import attention_kernels, exchange_model, exposed_exchange
from megatron_wlb.hardware.profile import load_profile
from megatron_wlb.sharding.routing import moved_rows
from megatron_wlb.sharding.select import per_document
from tests.jobs import job
from tests.reference.rounds import Held

lengths = st.lists(st.integers(1, 500), min_size=1, max_size=30).map(lambda x: np.array(x, np.int64))


@pytest.mark.parametrize("peer", [cp_peers.magi, cp_peers.dynamic])
@given(lengths, st.sampled_from([1, 2, 8]))
def test_every_row_is_held_once(peer, lengths, cp):
    plan = peer(lengths, cp)
    held = [row for each in plan.shards for call in each.calls for row in call.tolist()]
    rows = sorted((document, i) for document, start, stop in held for i in range(start, stop))
    assert rows == [(document, i) for document, length in enumerate(lengths) for i in range(length)]


def job_of(cp, **changes):
    return job(cp=cp, tp=8, context_length=1 << 18, profile=load_profile("h100-fa2"), **changes)


@given(lengths, st.sampled_from([1, 2, 8]))
def test_own_share_counts_the_pairs_whose_key_is_on_the_rank(lengths, cp):
    plan = cp_peers.magi(lengths, cp)
    for share, each in zip(cp_peers.own_share(Held(plan)), plan.shards, strict=True):
        held = {(d, i) for d, start, stop in each.calls[0].tolist() for i in range(start, stop)}
        own = sum((d, key) in held for d, row in held for key in range(row + 1))
        assert share == pytest.approx(own / max(1, sum(row + 1 for _, row in held)))


def test_a_ring_has_the_hops_of_the_cost_model():
    given_job, plan = job_of(4), per_document(np.array([100_000, 8_000, 144], np.int64), 4)
    attention, added = cp_peers.ring_times(plan, given_job, whole=True)
    for kernel, times in zip(attention_kernels(given_job), attention, strict=True):
        counts = np.array([np.sum([kernel.count(call) for call in each.calls], axis=0) for each in plan.shards])
        np.testing.assert_allclose(times, kernel.time(4, *counts.T))
    slowest = attention.max(axis=1, keepdims=True)
    expected = exposed_exchange(job_of(4, cp_exchange="ring"), np.array([108_144.0]), tuple(slowest))
    np.testing.assert_allclose(added, np.repeat(expected, 4, axis=1))


@given(lengths.map(lambda x: 100 * x), st.sampled_from([2, 8]))
def test_magi_computes_everything_once_and_waits_at_most_for_all_that_moves(lengths, cp):
    plan, given_job = cp_peers.magi(lengths, cp), job_of(cp)
    attention, added = cp_peers.magi_times(plan, given_job)
    for kernel, times in zip(cp_peers.magi_kernels(given_job), attention, strict=True):
        without = kernel.time(0, *np.array([kernel.count(each.calls[0]) for each in plan.shards]).T)
        assert (times >= without - 1e-6).all()
        assert (times <= without + (1 + max(cp_peers.MAGI_STAGES)) * kernel.launch + 1e-6).all()
    moved, _ = exchange_model(given_job).times(np.array(float(moved_rows(plan).max())))
    assert (added >= -1e-6).all() and added.sum() <= 3 * moved + 1e-6
