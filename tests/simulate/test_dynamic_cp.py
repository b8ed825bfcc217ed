"""A step under dynamic context parallelism: against the simulator of rings, and against hand-made groups."""

import numpy as np
import pytest
from megatron_wlb.simulate.dynamic_cp import ranks_of, simulate_dynamic

from megatron_wlb.hardware.profile import load_profile
from megatron_wlb.sharding import per_document
from megatron_wlb.simulate import breakdown, simulate_step
from tests.jobs import job

C = 1 << 14


def job_of(**sizes):
    return job(context_length=C, profile=load_profile("h100-fa2"), cp_exchange="ring", **sizes)


def passes(step):
    return np.array([(each.forward.sum(), each.backward.sum()) for each in step.passes]).T


def test_groups_are_powers_of_two_or_everyone():
    """Of twelve ranks, eight are not enough for the longest; the least work of aligned groups decides, the first if
    they are alike."""
    place = ranks_of(np.array([90, 40, 31, 5]), 12, 10)
    assert place.tolist() == [[0, 12], [0, 4], [4, 4], [8, 1]]


def test_a_window_on_all_ranks_is_the_ring_of_all():
    one = job_of(cp=4, tp=2, num_micro_batches=1)
    lengths = np.array([C])
    dynamic = simulate_dynamic(one, lengths, C // 4, packs=False)
    ring = simulate_step(one, [[per_document(lengths, 4)]])
    assert dynamic.time == pytest.approx(ring.time)
    assert breakdown(dynamic).exchange == pytest.approx(breakdown(ring).exchange)


@pytest.mark.parametrize("packs", [False, True])
def test_documents_run_by_themselves_or_as_far_as_there_is_room(packs):
    """On four ranks, two of which are data-parallel ones: a document on two of them, the others on one each."""
    lengths = np.array([6000, 3000, 2000, 1000, 500])
    assert ranks_of(lengths, 4, 4000).tolist() == [[0, 2], [2, 1], [3, 1], [3, 1], [3, 1]]
    step = simulate_dynamic(job_of(cp=2, dp=2), lengths, 4000, packs=packs)
    on_two = simulate_step(job_of(cp=2, num_micro_batches=1), [[per_document(lengths[:1], 2)]])

    def alone(*groups):
        plans = [per_document(np.array(group), 1) for group in groups]
        return simulate_step(job_of(num_micro_batches=len(plans)), [plans])

    short = alone([2000, 1000, 500]) if packs else alone([2000], [1000], [500])
    expected = [passes(each)[:, 0] for each in (on_two, on_two, alone([3000]), short)]
    np.testing.assert_allclose(passes(step).T, expected)
    assert [len(each) for each in step.shards] == [1, 1, 1, 1 if packs else 3]
    slowest, waits = np.sum(expected, axis=1), breakdown(step).dp_wait
    assert waits == pytest.approx(slowest.max() - slowest.mean())
