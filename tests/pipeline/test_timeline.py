"""Timelines: equal to closed forms and to a replay of upstream's own schedules, and bounds for any times."""

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_wlb.pipeline.graph import graph_of
from megatron_wlb.pipeline.schedule import Schedule, nearest_counts
from megatron_wlb.pipeline.timeline import cost_weights, makespans, run
from megatron_wlb.plan.placement import order
from tests.jobs import job
from tests.pipeline.schedules import schedules, timed_schedules
from tests.pipeline.upstream import replay

SIZES = st.integers(1, 8)
TIMES = st.integers(1, 1000).map(float)


def timeline(schedule, work, transfer):
    return run(schedule, work[0], None if schedule.forward_only else work[1], transfer)


@given(SIZES, st.integers(1, 20), TIMES, TIMES)
def test_uniform_1f1b(stages, micro_batches, forward, backward):
    done = run(Schedule(num_stages=stages, num_micro_batches=micro_batches), forward, backward)
    assert done.makespan == (micro_batches + stages - 1) * (forward + backward)


@given(st.integers(2, 8), st.integers(2, 4), st.integers(1, 4), TIMES, TIMES)
def test_uniform_interleaved(stages, chunks, groups, forward, backward):
    schedule = Schedule(num_stages=stages, num_chunks=chunks, num_micro_batches=groups * stages)
    done = run(schedule, forward, backward)
    assert done.makespan == (groups * stages * chunks + stages - 1) * (forward + backward)


@given(timed_schedules())
@settings(deadline=None)
def test_equal_to_a_replay_of_upstreams_functions(timed):
    schedule, work, transfer = timed
    start, end = replay(schedule, work, transfer)
    done = timeline(schedule, work, transfer)
    np.testing.assert_array_equal(done.start, start)
    np.testing.assert_array_equal(done.end, end)


def test_backward_times_belong_to_training():
    with pytest.raises(ValueError, match="backward times"):
        run(Schedule(num_stages=2, num_micro_batches=2), np.ones(2))
    with pytest.raises(ValueError, match="backward times"):
        run(Schedule(num_stages=2, num_micro_batches=2, forward_only=True), np.ones(2), np.ones(2))


def test_a_timeline_takes_one_look_at_every_pass_and_transfer():
    """512 micro-batches over 16 stages of 4 chunks: 65,536 passes, and per pass at most a transfer and a join."""
    graph = graph_of(Schedule(num_stages=16, num_chunks=4, num_micro_batches=512))
    assert len(graph.nodes) < 3 * 65_536


def ending(work, schedule):
    """The end of 1F1B by the recursion that defines it: a pass begins when its stage and its input are ready."""
    last = schedule.num_stages * schedule.num_chunks - 1
    sequences = [[tuple(op) for op in schedule.ops(stage).tolist()] for stage in range(schedule.num_stages)]

    @functools.cache
    def end(stage, k):
        backward, chunk, m = sequences[stage][k]
        ready = [end(stage, k - 1)] if k else [0]
        # Virtual stage c * P + s hands on to the next, and gradients to the one before.
        sender = chunk * schedule.num_stages + stage + (1 if backward else -1)
        if 0 <= sender <= last:
            chunk, neighbour = divmod(sender, schedule.num_stages)
            if neighbour != stage:
                ready.append(end(neighbour, sequences[neighbour].index((backward, chunk, m))))
        return max(ready) + int(work[m]) * (2 if backward else 1)

    return max(end(stage, len(passes) - 1) for stage, passes in enumerate(sequences))


@pytest.mark.parametrize("num_chunks", [1, 2, 3])
@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_makespans_are_those_of_the_schedule(num_stages, num_chunks):
    rng = np.random.default_rng(0)
    for count in range(1 if num_chunks == 1 else num_stages, 13):
        groups = range(num_stages, count + 1)
        group = next((g for g in groups if nearest_counts(count, num_stages, g) == (count,)), None)
        schedule = Schedule(num_stages=num_stages, num_chunks=num_chunks, num_micro_batches=count, group_size=group)
        work = rng.lognormal(5, 1, (19, count)).astype(np.int64)
        assert makespans(schedule, work).tolist() == [ending(w, schedule) for w in work]
        if count % num_stages == 0 or num_chunks == 1:
            alike = makespans(schedule, np.full((1, count), 5))
            assert alike == 5 * 3 * (num_chunks * count + num_stages - 1)


def test_makespans_beyond_53_bits_are_exact():
    schedule = Schedule(num_stages=4, num_micro_batches=8)
    work = 2**55 + np.random.default_rng(6).integers(0, 4, (20, 8))
    assert makespans(schedule, work).tolist() == [ending(w, schedule) for w in work]


@given(schedules())
def test_free_transfers_end_no_later_than_those_that_wait(schedule):
    if not schedule.forward_only:
        work = np.random.default_rng(0).integers(0, 100, (1, schedule.num_micro_batches))
        assert makespans(schedule, work)[0] <= run(schedule, work[0], 2 * work[0]).makespan


@pytest.mark.parametrize(("stages", "chunks", "count"), [(4, 1, 8), (2, 4, 4), (4, 4, 4), (4, 4, 8), (14, 3, 14)])
def test_cost_weights_say_about_when_1f1b_ends(stages, chunks, count):
    """In a good order. Exact where all micro-batches are alike; else no less than 1F1B takes, nor a fifth more."""
    one = job(num_micro_batches=count, pp=stages, vpp=chunks)
    rng, weights = np.random.default_rng(count), cost_weights(one.schedule())
    for spread in (0, 0.1, 0.3):
        work = (10_000 * np.exp(rng.normal(0, spread, count))).astype(np.int64)
        time = makespans(one.schedule(count), work[order(work, one)][None])[0] / 3
        cost = (weights.total * work.sum() + weights.largest * work.max()) * chunks / weights.unit
        assert 0.8 <= time / cost <= 1.03
        assert spread or time == pytest.approx(cost, rel=0.03)
