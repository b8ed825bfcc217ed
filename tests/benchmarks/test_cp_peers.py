"""What is compared with ours holds every row once, and has what its description promises."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import cp_peers
from benchmarks.cp_balance import once_a_node
from megatron_wlb.cost.attention import attention_kernels
from megatron_wlb.cost.exchange import exchange_model, exposed_exchange
from megatron_wlb.hardware.network import load_network
from megatron_wlb.hardware.profile import load_profile
from megatron_wlb.sharding import moved_rows, per_document
from megatron_wlb.sharding.volume import Held
from megatron_wlb.types import SEGMENT, Shard, ShardPlan
from tests.jobs import job

lengths = st.lists(st.integers(1, 500), min_size=1, max_size=30).map(lambda x: np.array(x, np.int64))


@pytest.mark.parametrize("peer", [cp_peers.magi, cp_peers.dynamic])
@given(lengths, st.sampled_from([1, 2, 8]))
def test_every_row_is_held_once(peer, lengths, cp):
    plan = peer(lengths, cp)
    held = [row for each in plan.shards for call in each.calls for row in call.tolist()]
    rows = sorted((document, i) for document, start, stop in held for i in range(start, stop))
    assert rows == [(document, i) for document, length in enumerate(lengths) for i in range(length)]


@given(lengths, st.sampled_from([2, 8]))
def test_magi_ranks_have_eight_chunks_at_most(lengths, cp):
    size = -(-int(lengths.sum()) // (8 * cp))
    assert max(each.tokens for each in cp_peers.magi(lengths, cp).shards) <= 8 * size


def test_dynamic_takes_the_fewest_ranks_that_have_room():
    plan = cp_peers.dynamic(np.array([100, 30, 10, 10, 10], np.int64), 4)
    lives = [sum(d in np.concatenate(each.calls)["document"] for each in plan.shards) for d in range(5)]
    assert lives == [4, 1, 1, 1, 1]


def test_rows_go_to_a_node_once():
    """Of a document on four ranks, the second pair needs two heads of the first, which needs nothing of it."""
    two_chunks = np.array([[(0, 0, 10)], [(0, 10, 20)], [(0, 20, 30)], [(0, 30, 40)]], SEGMENT)
    plan = ShardPlan(
        lengths=np.array([40]), shards=tuple(Shard(calls=(c,)) for c in two_chunks), strategy="", call_sets=(0,)
    )
    assert once_a_node(plan, 1) == 1
    # Twenty rows come to each rank of the second node, and to the node; each of the first sends ten twice, or once.
    assert once_a_node(plan, 2) == 10 / 20
    assert once_a_node(plan, 4) == 1


def test_dynamic_takes_a_whole_step_with_the_room_of_a_micro_batch():
    plan = cp_peers.dynamic(np.array([60, 60, 30, 30, 20], np.int64), 2, room=100, crossover_tokens=1000)
    lives = [sum(d in np.concatenate(each.calls)["document"] for each in plan.shards) for d in range(5)]
    assert lives == [2, 2, 1, 1, 1]
    assert [each.tokens for each in plan.shards] == [110, 90]


NETWORK = load_network()


def job_of(cp):
    return job(cp=cp, tp=8, context_length=1 << 18, profile=load_profile("h100-fa2"))


@given(lengths, st.sampled_from([1, 2, 8]))
def test_own_share_counts_the_pairs_whose_key_is_on_the_rank(lengths, cp):
    plan = cp_peers.magi(lengths, cp)
    for share, each in zip(cp_peers.own_share(Held(plan)), plan.shards, strict=True):
        held = {(d, i) for d, start, stop in each.calls[0].tolist() for i in range(start, stop)}
        own = sum((d, key) in held for d, row in held for key in range(row + 1))
        assert share == pytest.approx(own / max(1, sum(row + 1 for _, row in held)))


def test_a_ring_of_all_ranks_has_the_hops_of_the_cost_model():
    given_job, plan = job_of(4), per_document(np.array([100_000, 8_000, 144], np.int64), 4)
    attention, added = cp_peers.ring_times(plan, given_job, NETWORK, whole=True)
    for kernel, times in zip(attention_kernels(given_job), attention, strict=True):
        counts = np.array([np.sum([kernel.count(call) for call in each.calls], axis=0) for each in plan.shards])
        np.testing.assert_allclose(times, kernel.time(4, *counts.T))
    slowest, ring = attention.max(axis=1, keepdims=True), job(cp=4, tp=8, context_length=1 << 18, cp_exchange="ring")
    expected = exposed_exchange(ring, np.array([108_144.0]), tuple(slowest), NETWORK)
    np.testing.assert_allclose(added, np.repeat(expected, 4, axis=1))


def test_documents_of_the_same_ranks_are_in_a_ring_of_these():
    plan = cp_peers.dynamic(np.array([90_000, 90_000, 20_000, 20_000], np.int64), 4)
    given_job = job_of(4)
    attention, added = cp_peers.ring_times(plan, given_job, NETWORK, whole=False)
    alone, hops = cp_peers.ring_times(per_document(plan.lengths[:1], 2), job_of(2), NETWORK, whole=True)
    short = np.array(
        [kernel.time(1, *kernel.count(plan.shards[0].calls[0][-1:])) for kernel in attention_kernels(given_job)]
    )
    assert [len(each.calls[0]) for each in plan.shards] == [2, 2, 1, 1]
    np.testing.assert_allclose(attention, np.tile(alone, 2) + np.outer(short, [1, 1, 0, 0]))
    np.testing.assert_allclose(added, np.tile(hops, 2))


@given(lengths.map(lambda x: 100 * x), st.sampled_from([2, 8]))
def test_magi_computes_everything_once_and_waits_at_most_for_all_that_moves(lengths, cp):
    plan, given_job = cp_peers.magi(lengths, cp), job_of(cp)
    attention, added = cp_peers.magi_times(plan, given_job, NETWORK)
    for kernel, times in zip(attention_kernels(given_job), attention, strict=True):
        without = kernel.time(0, *np.array([kernel.count(each.calls[0]) for each in plan.shards]).T)
        assert (times >= without - 1e-6).all()
        assert (times <= without + (1 + max(cp_peers.MAGI_STAGES)) * kernel.launch + 1e-6).all()
    moved, _ = exchange_model(given_job, NETWORK).times(np.array(float(moved_rows(plan).max())))
    assert (added >= -1e-6).all()
    assert added.sum() <= 3 * moved + 1e-6
