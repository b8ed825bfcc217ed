"""Placement on data-parallel ranks, order there, and the receive order of a stage against what its neighbours send."""

import dataclasses
import functools
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_wlb.plan import native, pipeline
from megatron_wlb.plan.packer import Packer
from megatron_wlb.plan.packing import make_policy
from megatron_wlb.plan.pipeline import makespan, order, place, rank_cost, receive_order
from megatron_wlb.plan.step import Layout, plan_step
from megatron_wlb.plan.stream import DocumentStream, Source
from megatron_wlb.plan.workload import load_profile

LARGEST = 2**63 - 1
WORKS = {
    "all equal": [7] * 8,
    "zeros": [0] * 8,
    "one giant": [1, 2, 3, 10**15, 4, 5, 6, 7],
    "one other than zero": [0, 0, 0, 0, 0, 5, 0, 0],
    "two kinds": [1, 9, 1, 9, 1, 9, 1, 9],
    "descending": [80, 70, 60, 50, 40, 30, 20, 10],
}


@st.composite
def works(draw, counts, multiple=1):
    """Work of so many micro-batches times `multiple`, often with ties and far outliers."""
    count = draw(counts) * multiple
    item = st.one_of(st.integers(0, 5), st.integers(0, 1000), st.integers(0, 10**13))
    return np.array(draw(st.lists(item, min_size=count, max_size=count)), np.int64)


def snake(work, dp_size):
    """Descending work, dealt back and forth."""
    rounds = np.argsort(-work, kind="stable").reshape(-1, dp_size)
    return np.array([row[::-1] if k % 2 else row for k, row in enumerate(rounds)]).T


def greatest_cost(work, ranks, num_stages, num_chunks):
    """In Python's integers."""
    return max(
        num_chunks * sum(rank) + (num_stages - 1) * max(rank) for rank in ([int(work[i]) for i in row] for row in ranks)
    )


@settings(deadline=None)
@given(dp_size=st.integers(1, 6), stages=st.integers(1, 5), chunks=st.integers(1, 3), data=st.data())
def test_placement_is_a_partition_never_worse_than_dealing(dp_size, stages, chunks, data):
    work = data.draw(works(st.integers(1, 8), dp_size))
    placement = place(work, dp_size, balance=True, num_stages=stages, num_chunks=chunks)
    assert placement.shape == (dp_size, len(work) // dp_size) and placement.dtype == np.int64
    assert sorted(placement.ravel()) == list(range(len(work)))
    assert (np.diff(placement, axis=1) > 0).all()
    cost = greatest_cost(work, placement, stages, chunks)
    assert cost == rank_cost(work[placement], stages, chunks).max()
    assert cost <= greatest_cost(work, snake(work, dp_size), stages, chunks)
    assert (placement == place(work.copy(), dp_size, balance=True, num_stages=stages, num_chunks=chunks)).all()


@settings(deadline=None)
@given(stages=st.integers(1, 4), rounds=st.integers(1, 3), data=st.data())
def test_placement_is_the_best_for_two_ranks_of_up_to_three(stages, rounds, data):
    item = st.integers(0, 1000)
    work = np.array(data.draw(st.lists(item, min_size=2 * rounds, max_size=2 * rounds)), np.int64)
    everything = set(range(len(work)))
    best = min(
        greatest_cost(work, (ours, everything - set(ours)), stages, 1)
        for ours in itertools.combinations(everything, rounds)
    )
    assert greatest_cost(work, place(work, 2, balance=True, num_stages=stages), stages, 1) == best


@pytest.mark.parametrize("name", WORKS)
@pytest.mark.parametrize("dp_size", [1, 2, 4, 8])
def test_placement_of_extremes(name, dp_size):
    work = np.array(WORKS[name])
    placement = place(work, dp_size, balance=True, num_stages=4)
    assert sorted(placement.ravel()) == list(range(8))
    if name == "one giant" and dp_size > 1:
        # Its rank has the least of the others, or what is as good: none costs more.
        least = sum(sorted(WORKS[name])[: 8 // dp_size - 1])
        assert greatest_cost(work, placement, 4, 1) - 4 * 10**15 - least in range(4 * 10**15 >> 13)


def test_placement_without_balance_is_round_robin():
    work = np.array([9, 1, 8, 2, 7, 3])
    assert place(work, 2, balance=False, num_stages=4, num_chunks=2).tolist() == [[0, 2, 4], [1, 3, 5]]


def test_placement_by_hand():
    # Dealt to ranks 0 1 | 1 0 | 0 1 this is 100 40 30 and 60 50 20; the 40 for the 20 makes both 150.
    assert place(np.array([100, 60, 50, 40, 30, 20]), 2, balance=True).tolist() == [[0, 4, 5], [1, 2, 3]]
    # Sums are alike, largest are not: in a pipeline the 6 stands by the 1s.
    assert place(np.array([6, 5, 4, 3, 1, 1]), 2, balance=True, num_stages=8).tolist() == [[0, 4, 5], [1, 2, 3]]


def place_both(work, dp_size, num_stages, num_chunks):
    how = {"balance": True, "num_stages": num_stages, "num_chunks": num_chunks}
    ours, theirs = (place(work, dp_size, use_native=use_native, **how) for use_native in (True, False))
    assert ours.dtype == theirs.dtype == np.int64
    np.testing.assert_array_equal(ours, theirs, strict=True)
    return ours


def order_both(work, num_stages, num_chunks):
    ours, theirs = (order(work, num_stages, num_chunks, use_native=use_native) for use_native in (True, False))
    assert ours.dtype == theirs.dtype == np.int64
    np.testing.assert_array_equal(ours, theirs, strict=True)
    return ours


@st.composite
def nasty_works(draw, count, times):
    """Work of `count` micro-batches, up to the limit at which `times` the largest fits 64 bits."""
    limit = LARGEST // times
    around = st.sampled_from([0, 1, limit // 2, limit - 1, limit])
    item = st.one_of(
        st.integers(0, draw(st.sampled_from([1, 5, 1000, 2**53 // times, limit]))), draw(around.map(st.just))
    )
    return np.array(draw(st.lists(item, min_size=count, max_size=count)), np.int64)


@settings(deadline=None, max_examples=300)
@given(
    dp_size=st.integers(1, 9),
    rounds=st.integers(1, 9),
    stages=st.integers(1, 9),
    chunks=st.integers(1, 4),
    data=st.data(),
)
def test_native_placement_equals_python(dp_size, rounds, stages, chunks, data):
    count = dp_size * rounds
    place_both(data.draw(nasty_works(count, chunks * count + stages - 1)), dp_size, stages, chunks)


@settings(deadline=None, max_examples=300)
@given(count=st.integers(1, 20), stages=st.integers(1, 9), chunks=st.integers(1, 4), data=st.data())
def test_native_order_equals_python(count, stages, chunks, data):
    order_both(data.draw(nasty_works(count, 3 * stages * chunks * count)), stages, chunks)


@pytest.mark.parametrize("spread", [0.05, 1.0, 3.0])
@pytest.mark.parametrize(
    ("total", "dp_size", "num_stages", "num_chunks"),
    [(64, 1, 4, 1), (64, 1, 8, 2), (66, 2, 5, 3), (200, 2, 3, 1), (2048, 64, 16, 4)],
)
def test_native_equals_python_at_scale(total, dp_size, num_stages, num_chunks, spread):
    work = np.random.default_rng(4).lognormal(20, spread, total).astype(np.int64)
    order_both(work[place_both(work, dp_size, num_stages, num_chunks)[0]], num_stages, num_chunks)
    large = work * (LARGEST // (3 * num_stages * num_chunks * total) // work.max())
    order_both(large[place_both(large, dp_size, num_stages, num_chunks)[-1]], num_stages, num_chunks)


def test_strided_work_is_read_as_it_is():
    work = np.random.default_rng(5).integers(0, 100, (12, 2))[:, 1]
    order_both(work, 4, 1)
    place_both(work, 3, 4, 1)


@pytest.mark.parametrize("use_native", [True, False], ids=["native", "python"])
def test_the_largest_work_and_no_larger(use_native):
    """The limits of the docstrings; near them the result is that of small work of the same shares: no overflow."""
    calls = {
        2 * 6 + 3 - 1: lambda work: place(work, 3, balance=True, num_stages=3, num_chunks=2, use_native=use_native),
        3 * 3 * 2 * 6: lambda work: order(work, 3, 2, use_native=use_native),
    }
    for times, call in calls.items():
        limit = LARGEST // times
        shares = np.array([8, 1, 4, 0, 2, 8])
        np.testing.assert_array_equal(call(shares * (limit // 8)), call(shares))
        call(np.full(6, limit))
        for bad in (limit + 1, -1, LARGEST, -LARGEST - 1):
            with pytest.raises(
                ValueError, match=f"^a micro-batch has work {bad}; it must be 0 to {limit} for predicted"
            ):
                call(np.array([1, 2, bad, 3, 4, 5]))


def test_times_beyond_53_bits_are_exact():
    """Orders whose times differ by one unit where a double has no room for it."""
    rng, worse = np.random.default_rng(6), 0
    for _ in range(20):
        work = 2**55 + rng.integers(0, 4, 8)
        found = order_both(work, 4, 1)
        rounded = order(work // 8 * 8, 4, 1)
        worse += np.diff(makespan(work[np.array([found, rounded])], 4, 1))[0] > 0
    assert worse, "the last bits of work matter"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: native.order(np.zeros(0, np.int64), 4, 1), f"num_micro_batches is 0; it must be 1 to {2**20}"),
        (lambda: native.order(np.ones(3, np.int64), 0, 1), f"num_stages is 0; it must be 1 to {2**16}"),
        (lambda: native.order(np.ones(3, np.int64), 2, -1), f"num_chunks is -1; it must be 1 to {2**16}"),
        (
            lambda: native.order(np.ones(3, np.int64), 2**16, 2**16),
            f"micro-batches times stages times chunks is {3 * 2**32}; it must be 1 to {2**24}",
        ),
        (lambda: native.place(np.ones(3, np.int64), 4, 1, 1), "dp_size is 4; it must be 1 to 3"),
        (lambda: native.place(np.ones(3, np.int64), 2, 1, 1), "dp_size is 2; it must divide the 3 micro-batches"),
        (lambda: native.order(np.ones(3), 4, 1), "work must be a 1-d array of int64, not 1-d of float64"),
        (
            lambda: native.place(np.ones((2, 2), np.int64), 2, 4, 1),
            "work must be a 1-d array of int64, not 2-d of int64",
        ),
    ],
)
def test_native_refuses(call, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        call()


def simulated(work, num_stages, num_chunks):
    """The end of 1F1B by the recursion that defines it: a pass begins when its stage and its input are ready."""
    count, last = len(work), num_chunks - 1
    table = interleaved(count, num_chunks, num_stages if num_chunks > 1 else count)
    sequence = []
    for stage in range(num_stages):
        warm = num_stages - 1 - stage
        if num_chunks > 1:
            warm = 2 * warm + last * num_stages
        passes = [("F", m, c) for m, c in table[:warm]]
        for k in range(len(table)):
            passes += [("F", *table[k + warm])] if k + warm < len(table) else []
            passes.append(("B", table[k][0], last - table[k][1]))
        sequence.append(passes)
    place_of = [{one: k for k, one in enumerate(passes)} for passes in sequence]

    @functools.cache
    def end(stage, one):
        kind, m, chunk = one
        k = place_of[stage][one]
        ready = [end(stage, sequence[stage][k - 1])] if k else [0]
        # Virtual stage c * P + s hands on to the next, and gradients to the one before.
        neighbour = chunk * num_stages + stage + (-1 if kind == "F" else 1)
        if 0 <= neighbour < num_stages * num_chunks:
            ready.append(end(neighbour % num_stages, (kind, m, neighbour // num_stages)))
        return max(ready) + int(work[m]) * (1 if kind == "F" else 2)

    return max(end(stage, passes[-1]) for stage, passes in enumerate(sequence))


@pytest.mark.parametrize("num_chunks", [1, 2, 3])
@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_makespan_is_that_of_the_schedule(num_stages, num_chunks):
    rng = np.random.default_rng(0)
    for count in range(1, 10) if num_chunks == 1 else range(num_stages, 13, num_stages):
        work = rng.lognormal(5, 1, (3, count)).astype(np.int64)
        assert makespan(work, num_stages, num_chunks).tolist() == [simulated(w, num_stages, num_chunks) for w in work]
        if count >= num_stages:
            alike = makespan(np.full((1, count), 5), num_stages, num_chunks)
            assert alike == 5 * 3 * (num_chunks * count + num_stages - 1)


@pytest.mark.parametrize("num_chunks", [2, 3])
def test_ragged_groups_have_a_makespan(num_chunks):
    # Upstream runs them with a group size that leaves no last group smaller than the pipeline.
    for num_stages in (2, 3, 4, 5, 8):
        for count in range(1, 2 * num_stages + 5):
            work = np.ones((1, count), np.int64)
            assert makespan(work, num_stages, num_chunks)[0] >= 3 * (num_chunks * count + num_stages - 1)


@settings(deadline=None, max_examples=60)
@given(work=works(st.integers(1, 14)), stages=st.integers(1, 5), chunks=st.integers(1, 3))
def test_order_is_a_permutation_never_worse_than_the_given(work, stages, chunks):
    if stages == 1:
        chunks = 1
    found = order(work, stages, chunks)
    assert found.dtype == np.int64 and sorted(found) == list(range(len(work)))
    assert (found == order(work.copy(), stages, chunks)).all()
    given_time, time = makespan(np.array([work, work[found]]), stages, chunks)
    assert time <= given_time
    if stages == 1:
        assert found.tolist() == list(range(len(work)))
    elif chunks == 1:
        # The last stage waits for the first forward, computes everything, and the first waits for the last backward.
        least = np.sort(work)[:2].tolist() if len(work) > 1 else [work[0]] * 2
        assert time >= 3 * work.sum() + (stages - 1) * (least[1] + 2 * least[0])


@pytest.mark.parametrize(("num_stages", "num_chunks"), [(2, 1), (4, 1), (2, 2)])
def test_order_of_few_is_the_best_of_all(num_stages, num_chunks):
    rng = np.random.default_rng(1)
    for count in (1, 2, 4, 6) if num_chunks == 1 else (2, 4):
        work = rng.lognormal(5, 1, count).astype(np.int64)
        best = min(simulated(work[list(p)], num_stages, num_chunks) for p in itertools.permutations(range(count)))
        assert simulated(work[order(work, num_stages, num_chunks)], num_stages, num_chunks) == best


@pytest.mark.parametrize(("num_stages", "num_chunks"), [(2, 1), (4, 1), (8, 1), (2, 2), (4, 2)])
def test_order_of_many_is_close_to_the_best_of_all(num_stages, num_chunks):
    rng = np.random.default_rng(2)
    permutations = np.array(list(itertools.permutations(range(8))))
    for work in rng.lognormal(5, 0.5, (3, 8)).astype(np.int64):
        best = makespan(work[permutations], num_stages, num_chunks).min()
        assert makespan(work[order(work, num_stages, num_chunks)][None], num_stages, num_chunks)[0] <= 1.01 * best


@pytest.mark.parametrize("name", WORKS)
@pytest.mark.parametrize("count", [4, 8])
def test_order_of_extremes(name, count):
    work = np.array(WORKS[name])[:count]
    found = order(work, 4, 1)
    assert sorted(found) == list(range(count))
    if len(set(work.tolist())) == 1:
        assert found.tolist() == list(range(count)), "nothing to gain: the given order"
    if name == "descending":
        given_time, time = makespan(np.array([work, work[found]]), 4, 1)
        assert time < given_time


def plan(policy, dp_rank, **changes):
    lengths = np.random.default_rng(3).integers(10, 900, 600)
    stream = DocumentStream([Source(pairs=lengths)], seed=0, context_length=1000)
    made = make_policy(
        policy, num_micro_batches=16, context_length=1000, max_tokens=1000, crossover_tokens=500, use_native=False
    )
    packer = Packer(stream, made, num_micro_batches=16, context_length=1000, fingerprint="", policy_name=policy)
    layout = Layout(
        dp_size=2,
        dp_rank=dp_rank,
        cp_size=1,
        pp_size=4,
        vp_size=1,
        unit_tokens=1,
        cp_sharding="per-sequence",
        kernel=load_profile("flops").kernel(heads=1, row_bytes=1),
        crossover_tokens=500,
        balance=policy != "original",
        use_native=False,
    )
    return plan_step(packer, dataclasses.replace(layout, **changes))


def test_a_step_runs_in_that_order():
    ranks = [plan("fixed", rank) for rank in (0, 1)]
    assert ranks[0].digest == ranks[1].digest
    placement = place(ranks[0].work, 2, balance=True, num_stages=4)
    for step, row in zip(ranks, placement, strict=True):
        expected = row[order(step.work[row], 4, 1)]
        assert [m.documents.tolist() for m in step.micro_batches] == [
            step.packing.micro_batch(int(i)).tolist() for i in expected
        ]
    assert any((row[order(ranks[0].work[row], 4, 1)] != row).any() for row in placement)
    fast = plan("fixed", 0, use_native=True)
    assert fast.digest == ranks[0].digest
    assert [m.documents.tolist() for m in fast.micro_batches] == [m.documents.tolist() for m in ranks[0].micro_batches]
    others = [plan("fixed", 0, **change) for change in ({"pp_size": 2}, {"vp_size": 2}, {"crossover_tokens": 501})]
    assert len({step.digest for step in (ranks[0], *others)}) == 4, "whatever the order depends on is compared"


def test_a_step_is_placed_by_the_core_of_the_layout(monkeypatch):
    used = []
    for name in ("place", "order"):
        core = getattr(native, name)
        monkeypatch.setattr(native, name, lambda *a, core=core, name=name: used.append(name) or core(*a))
    plan("fixed", 0, use_native=False)
    assert used == []
    plan("fixed", 0, use_native=True)
    assert used == ["place", "order"]


def test_a_step_of_original_packing_keeps_upstreams_order(monkeypatch):
    monkeypatch.delattr(pipeline, "order")
    step = plan("original", 1)
    assert [m.documents.tolist() for m in step.micro_batches] == [
        step.packing.micro_batch(i).tolist() for i in range(1, 16, 2)
    ]


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
        for expected, inbox, backward in zip(orders, sends, (False, True), strict=True):
            assert expected == [m for m, _ in inbox[stage]]
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
