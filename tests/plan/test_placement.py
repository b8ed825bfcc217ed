"""Micro-batches over data-parallel ranks and their order there: bounds, optima of small cases, as by the reference."""

import itertools
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_wlb import _native
from megatron_wlb.packing.megatron import MegatronPacking
from megatron_wlb.pipeline.schedule import nearest_counts
from megatron_wlb.pipeline.timeline import cost_weights, makespans
from megatron_wlb.plan import placement as plan_placement
from megatron_wlb.plan.placement import critical_work, order, place, rank_cost
from tests.jobs import job
from tests.reference import pipeline, placement

LARGEST = 2**63 - 1


def job_of(work, dp=1, pp=1, vpp=1, **changes):
    """A job that interleaves in the smallest groups that fit; where none do, it has one chunk a stage."""
    count = len(work) // dp
    group = next((g for g in range(pp, count + 1) if nearest_counts(count, pp, g) == (count,)), None)
    vpp = vpp if pp > 1 and group else 1
    return job(num_micro_batches=len(work), dp=dp, pp=pp, vpp=vpp, group_size=group, **changes)


def works(count, largest):
    """Work of `count` micro-batches, often with ties and far outliers."""
    item = st.one_of(st.integers(0, 5), st.integers(0, 1000), st.integers(0, largest), st.just(largest))
    return st.lists(item, min_size=count, max_size=count).map(lambda items: np.array(items, np.int64))


def both(call, *arguments):
    """What `place` or `order` gives, in C++ and by the reference alike."""
    fast = call(*arguments)
    with patch.multiple(_native, place=placement.place, makespans=pipeline.makespans):
        slow = call(*arguments)
    assert fast.dtype == np.int64
    np.testing.assert_array_equal(fast, slow, strict=True)
    return fast


def snake(work, dp):
    """Descending work, dealt back and forth."""
    rounds = np.argsort(-work, kind="stable").reshape(-1, dp)
    return np.array([row[::-1] if k % 2 else row for k, row in enumerate(rounds)]).T


def greatest_cost(work, ranks, given):
    """In Python's integers."""
    total, largest, _ = cost_weights(given.schedule())
    return max(total * sum(rank) + largest * max(rank) for rank in ([int(work[i]) for i in row] for row in ranks))


def ending(work, orders, given):
    return makespans(given.schedule(len(work)), work[np.atleast_2d(orders)])


@given(dp=st.integers(1, 9), rounds=st.integers(1, 9), pp=st.integers(1, 9), vpp=st.integers(1, 4), data=st.data())
def test_placement_is_a_partition_never_worse_than_dealing(dp, rounds, pp, vpp, data):
    given = job_of(range(dp * rounds), dp, pp, vpp)
    total, largest, _ = cost_weights(given.schedule())
    work = data.draw(works(dp * rounds, LARGEST // (total * dp * rounds + largest)))
    placed = both(place, work, given)
    assert placed.shape == (dp, rounds)
    assert sorted(placed.ravel()) == list(range(len(work)))
    assert (np.diff(placed, axis=1) > 0).all()
    cost = greatest_cost(work, placed, given)
    assert cost == rank_cost(work[placed], given).max()
    assert cost <= greatest_cost(work, snake(work, dp), given)


def test_placement_by_hand():
    # Dealt to ranks 0 1 | 1 0 | 0 1 this is 100 40 30 and 60 50 20; the 40 for the 20 makes both 150.
    work = np.array([100, 60, 50, 40, 30, 20])
    assert place(work, job_of(work, 2)).tolist() == [[0, 4, 5], [1, 2, 3]]
    # Sums are alike, largest are not: in a pipeline the 6 stands by the 1s.
    work = np.array([6, 5, 4, 3, 1, 1])
    assert place(work, job_of(work, 2, 8)).tolist() == [[0, 4, 5], [1, 2, 3]]


def test_ranks_of_too_many_tokens_are_dealt_by_tokens():
    """A rank may have half of six windows of 64 and of S_max: 292. By work 0, 1 and 4 are together."""
    given, work = job(num_micro_batches=6, dp=2, max_tokens=200), np.array([10, 8, 9, 9, 1, 1])
    for tokens, rows in (
        ([160, 120, 50, 33, 12, 9], [[0, 1, 4], [2, 3, 5]]),
        ([160, 120, 50, 32, 13, 9], [[0, 3, 4], [1, 2, 5]]),
    ):
        assert place(work, given, tokens=np.array(tokens)).tolist() == rows
    assert place(work[::-1], given, tokens=np.array([12, 14, 31, 49, 121, 160])).tolist() == [[1, 2, 5], [0, 3, 4]]


@given(
    groups=st.integers(1, 3), beside=st.integers(2, 4), rounds=st.integers(1, 4), pp=st.integers(1, 4), data=st.data()
)
def test_ranks_that_divide_experts_wait_the_least(groups, beside, rounds, pp, data):
    dp = groups * beside
    work = data.draw(works(dp * rounds, LARGEST // (3 * pp * dp * rounds + pp)))
    shares = st.lists(st.integers(0, 8), min_size=len(work), max_size=len(work))
    experts = work // 8 * np.array(data.draw(shares))
    given = job_of(work, dp, pp, ep=beside)
    rows = both(place, work, given, experts)
    assert sorted(rows.ravel()) == list(range(len(work)))
    critical = critical_work(work[rows], experts[rows], beside)
    for rank in range(dp):
        first = rank // beside * beside
        group = rows[first : first + beside]
        slots = [
            max(int(work[i] - experts[i]) for i in slot) + sum(int(experts[i]) for i in slot) // beside
            for slot in group.T
        ]
        assert critical[rank].tolist() == slots
    # Whoever holds the largest, the next largest that is not beside it, and so on is waited for.
    rest = np.sort(work - experts)[::-1]
    waited = (work - experts)[rows].reshape(groups, beside, rounds).max(axis=1)
    assert sorted(waited.ravel().tolist(), reverse=True) == rest[::beside].tolist()


def test_slots_are_alike_where_ranks_divide_experts():
    """Both ranks hold 22 with any pairing; what they wait for is more unless both run attention at the same time."""
    work, experts = np.array([11, 11, 11, 11]), np.array([1, 10, 1, 10])
    dense = job_of(work, 2, 4)
    apart = place(work, dense, experts)
    assert apart.tolist() == [[0, 3], [1, 2]]
    shared = job_of(work, 2, 4, ep=2)
    assert critical_work(work[apart], experts[apart], 2).tolist() == [[15, 15]] * 2
    together = place(work, shared, experts)
    assert together.tolist() == [[0, 1], [2, 3]]
    assert critical_work(work[together], experts[together], 2).tolist() == [[11, 11]] * 2
    assert (critical_work(work[apart], experts[apart], 1) == work[apart]).all()


@pytest.mark.parametrize("changes", [{"reorder": False}, {"packing": MegatronPacking()}])
def test_a_job_that_keeps_its_order_is_placed_round_robin(changes):
    work = np.array([9, 1, 8, 2, 7, 3])
    given = job_of(work, 2, 4, **changes)
    assert place(work, given).tolist() == [[0, 2, 4], [1, 3, 5]]
    assert order(work[:3], given).tolist() == [0, 1, 2]


@given(count=st.integers(1, 20), pp=st.integers(1, 9), vpp=st.integers(1, 4), data=st.data())
def test_order_is_a_permutation_never_worse_than_the_given(count, pp, vpp, data):
    vpp = 1 if pp == 1 or count < pp else vpp
    limit = LARGEST // (3 * pp * vpp * count)
    work = data.draw(works(count, data.draw(st.sampled_from([1000, 2**53 // (3 * pp * vpp * count), limit]))))
    given = job_of(work, pp=pp, vpp=vpp)
    best = both(order, work, given)
    assert sorted(best) == list(range(count))
    if pp == 1:
        assert best.tolist() == list(range(count)), "all take equally long"
        return
    before, time = ending(work, [np.arange(count), best], given)
    assert time <= before
    if vpp == 1 and count > 1:
        # The last stage waits for the first forward, computes everything, and the first waits for the last backward.
        least, next_least = np.sort(work)[:2].tolist()
        assert time >= 3 * sum(work.tolist()) + (pp - 1) * (next_least + 2 * least)


@pytest.mark.parametrize(("pp", "vpp"), [(2, 1), (4, 1), (8, 1), (2, 2), (4, 2)])
def test_order_is_the_best_of_few_and_close_to_it_of_many(pp, vpp):
    rng = np.random.default_rng(1)
    for count, spread, within in ((1, 1.0, 1), (4, 1.0, 1), (6, 1.0, 1), (8, 0.5, 1.01)):
        if vpp > 1 and count < pp:
            continue
        permutations = np.array(list(itertools.permutations(range(count))))
        for work in rng.lognormal(5, spread, (3, count)).astype(np.int64):
            given = job_of(work, pp=pp, vpp=vpp)
            best = ending(work, permutations, given).min()
            assert ending(work, order(work, given), given)[0] <= within * best


@pytest.mark.parametrize(
    ("work", "pp", "shapes", "best"),
    [
        ([1, 1, 6, 3, 2, 7, 8], 4, 134, 131),
        ([7, 9, 1, 2, 4, 6, 7], 4, 158, 156),
        ([8, 7, 1, 4, 8, 5, 1], 2, 115, 113),
        ([2, 7, 9, 1, 4, 6, 1], 2, 104, 103),  # by no swap alone
        ([8, 1, 4, 3, 9, 6, 9], 2, 133, 132),  # by no move alone
        ([1, 7, 8, 5, 2, 2, 4, 7], 2, 119, 118),  # in no first round
        ([2, 1, 9, 8, 2, 7, 5, 7], 2, 136, 136),  # with five or seven that go up
    ],
)
def test_swaps_and_moves_find_the_best_order_where_shapes_do_not(work, pp, shapes, best):
    """Of seven and more, which are over `EXHAUSTIVE`."""
    work, given = np.array(work), job_of(work, pp=pp)
    assert ending(work, list(itertools.permutations(range(len(work)))), given).min() == best
    assert ending(work, order(work, given), given) == best
    with patch.object(plan_placement, "MOST_MOVED", 6):
        assert ending(work, order(work, given), given) == shapes


@pytest.mark.parametrize("spread", [0.05, 1.0, 3.0])
@pytest.mark.parametrize(
    ("total", "dp", "pp", "vpp"), [(64, 1, 4, 1), (64, 1, 8, 2), (66, 2, 5, 3), (200, 2, 3, 1), (2048, 64, 16, 4)]
)
def test_many_are_placed_as_by_the_reference(total, dp, pp, vpp, spread):
    work = np.random.default_rng(4).lognormal(20, spread, total).astype(np.int64)
    given = job_of(work, dp, pp, vpp)
    both(order, work[both(place, work, given)[0]], given)
    large = work * (LARGEST // (3 * pp * vpp * total) // work.max())
    both(order, large[both(place, large, given)[-1]], given)
