"""What is compared with ours holds every row once, and has what its description promises."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import cp_peers
from megatron_wlb.cost.attention import exchange_model
from megatron_wlb.hardware.profile import load_profile
from megatron_wlb.sharding.routing import moved_rows
from tests.jobs import job


def job_of(cp, **changes):
    return job(cp=cp, tp=8, context_length=1 << 18, profile=load_profile("h100-fa2"), **changes)


lengths = st.lists(st.integers(1, 500), min_size=1, max_size=30).map(lambda x: np.array(x, np.int64))


def flash(lengths, cp):
    return cp_peers.flash(lengths, job_of(cp))


@pytest.mark.parametrize("peer", [cp_peers.magi, cp_peers.dynamic, flash])
@given(lengths, st.sampled_from([1, 2, 8]))
def test_every_row_is_held_once(peer, lengths, cp):
    plan = peer(lengths, cp)
    held = [row for each in plan.shards for call in each.calls for row in call.tolist()]
    rows = sorted((document, i) for document, start, stop in held for i in range(start, stop))
    assert rows == [(document, i) for document, length in enumerate(lengths) for i in range(length)]


@given(lengths.map(lambda x: 100 * x), st.sampled_from([2, 8]))
def test_magi_computes_everything_once(lengths, cp):
    plan, given_job = cp_peers.magi(lengths, cp), job_of(cp)
    attention, added = cp_peers.magi_times(plan, given_job)
    for kernel, times in zip(cp_peers.magi_kernels(given_job), attention, strict=True):
        without = kernel.time(0, *np.array([kernel.count(each.calls[0]) for each in plan.shards]).T)
        assert (times >= without - 1e-6).all()
        assert (times <= without + (1 + max(cp_peers.MAGI_STAGES)) * kernel.launch + 1e-6).all()
    moved, _ = exchange_model(given_job).times(np.array(float(moved_rows(plan).max())))
    assert (added >= -1e-6).all() and added.sum() <= 3 * moved + 1e-6


@given(lengths.map(lambda x: 100 * x), st.sampled_from([2, 8]))
def test_flash_has_documents_on_one_rank_or_evenly_on_all(lengths, cp):
    given_job = job_of(cp)
    plan = cp_peers.flash(lengths, given_job)
    held = np.zeros((len(lengths), cp), np.int64)
    for rank, shard in enumerate(plan.shards):
        for call in shard.calls:
            np.add.at(held[:, rank], call["document"], call["stop"] - call["start"])
    ranks = (held > 0).sum(axis=1)
    assert set(ranks) <= {1, cp} and np.ptp(held[ranks == cp], axis=1).max(initial=0) <= 2
    assert lengths[ranks == cp].min(initial=1 << 40) >= lengths[ranks == 1].max(initial=0)
    _, added = cp_peers.flash_times(plan, given_job)
    arrive, leave = exchange_model(given_job).times(np.array(float(moved_rows(plan).max())))
    assert (added >= -1e-6).all() and (added[:, 0] <= [arrive + 1e-6, arrive + leave + 1e-6]).all()


def test_flash_divides_what_is_too_long_for_a_rank():
    """And sends nothing where whole documents are even."""
    given_job = job_of(2)
    alone, even = (cp_peers.flash(np.array(lengths), given_job) for lengths in ([100_000, 500], [40_000] * 4))
    assert [shard.tokens for shard in alone.shards] == [50_500, 50_000]
    assert moved_rows(even).max() == 0
    assert [shard.tokens for shard in even.shards] == [80_000, 80_000]
