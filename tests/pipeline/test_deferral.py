"""Deferred weight gradients: closed forms, and what holds for any times and any memory."""

from dataclasses import replace
from unittest.mock import patch

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megatron_wlb import _native
from megatron_wlb.pipeline.schedule import Schedule
from megatron_wlb.pipeline.timeline import WeightGradients, _needs, run, run_deferred
from tests.pipeline.schedules import timed_schedules
from tests.reference.pipeline import play


def weights_of(backward, share, parts, *, held=0.0, limit=np.inf):
    """`share` of every backward pass that has parts, in equal parts, of which the last virtual stage has one more."""
    counts = np.full(backward.shape[:2], parts)
    counts[-1, -1] += 1
    alike = WeightGradients.alike(counts, backward * share)
    real = np.arange(parts + 1)[:, None] < counts[:, :, None, None]
    return replace(
        alike, held=held * np.broadcast_to(real, alike.times.shape), limit=np.full(len(backward), float(limit))
    )


@given(st.integers(2, 8), st.integers(1, 4), st.integers(1, 50))
def test_uniform_1f1b_keeps_one_pass_of_the_bubble(stages, rounds, time):
    """ZB-H1 of Qi et al., arXiv 2401.10241, section 2.1: (P - 1) * (F + B - W) with the B that is left."""
    schedule = Schedule(num_stages=stages, num_micro_batches=rounds * stages)
    forward = np.full((stages, 1, schedule.num_micro_batches), float(time))
    weights = weights_of(2 * forward, 0.5, 1, held=0.25, limit=stages)
    done, _ = run_deferred(schedule, forward, 2 * forward, 0.0, weights)
    assert np.isclose(done.makespan, (3 * schedule.num_micro_batches + stages - 1) * time)


@given(timed_schedules(), st.floats(0, 0.5), st.integers(0, 4), st.sampled_from([0, 0.25, 0.5, 1]), st.integers(1, 20))
def test_all_run_once_in_memory_and_nothing_gets_later(timed, share, parts, held, limit):
    schedule, work, transfer = timed
    before = run(schedule, *work, transfer)
    weights = weights_of(work[1], share, parts, held=held, limit=limit)
    done, ran = run_deferred(schedule, *work, transfer, weights)
    np.testing.assert_allclose(done.busy, before.busy)
    # Where memory does not matter, passes are no later than without, and the step ends no later but for what is left.
    roomy, _ = run_deferred(schedule, *work, transfer, weights_of(work[1], share, parts))
    assert (roomy.end <= before.end + 1e-6).all()
    for stage in range(schedule.num_stages):
        _replay(schedule, stage, done, ran, weights)


@given(timed_schedules())
def test_plain_timelines_are_as_by_the_reference(timed):
    schedule, work, transfer = timed
    done = run(schedule, *work, transfer=transfer)
    with patch.object(_native, "play", play):
        plain = run(schedule, *work, transfer=transfer)
    np.testing.assert_array_equal(done.start, plain.start)
    np.testing.assert_array_equal(done.end, plain.end)
    assert not done.left.any()
    assert not done.filled.any()


@given(timed_schedules(), st.floats(0, 0.5), st.integers(0, 4), st.floats(0, 1), st.integers(1, 20))
def test_what_is_deferred_runs_as_by_the_reference(timed, share, parts, held, limit):
    schedule, work, transfer = timed
    weights = weights_of(work[1], share, parts, held=held, limit=limit)
    done, ran = run_deferred(schedule, *work, transfer, weights)
    with patch.object(_native, "play", play):
        plain, plain_ran = run_deferred(schedule, *work, transfer, weights)
    np.testing.assert_array_equal(ran, plain_ran)
    for name in ("start", "end", "filled", "left"):
        np.testing.assert_array_equal(getattr(done, name), getattr(plain, name))


def _replay(schedule, stage, done, ran, weights):
    """Run a stage by what `ran` says: parts exist when they run, take the time that is kept for them, and fit."""
    waiting, used, count, now, own = [], 0.0, 0, 0.0, 0
    for backward, chunk, i in schedule.ops(stage).tolist():
        at = int(backward), stage, chunk, i
        ran_here = ran[at] - count
        for _ in range(ran_here):
            time, held = waiting.pop(0)
            now, used, count = now + time, used - held, count + 1
        assert now <= done.start[at] + 1e-6
        now = done.end[at]
        some = stage, chunk, slice(weights.counts[stage, chunk]), i
        if backward:
            waiting += zip(weights.times[some], weights.held[some], strict=True)
            used += weights.held[some].sum()
        follows = backward and (stage, chunk) == (schedule.num_stages - 1, schedule.num_chunks - 1)
        assert not (follows and ran_here)
        # Too much only where all has run, but for what this pass, and those that follow it at once, defer.
        own = own * follows + weights.counts[stage, chunk] * backward
        assert used <= weights.limit[stage] + 1e-6 or len(waiting) <= own
    assert np.isclose(done.left[stage], sum(time for time, _ in waiting))


def test_what_later_passes_free_is_not_there_before():
    """A pass keeps 1 byte, and its backward frees half of one; nothing runs before that of the last virtual stage."""
    steps = np.stack((np.ones((2, 1, 3)), np.full((2, 1, 3), -0.5)))
    needs = _needs(Schedule(num_stages=2, num_micro_batches=3), steps)
    assert (needs[0] == 1).all() and (needs[1] == 0).all()
    growing = _needs(Schedule(num_stages=2, num_micro_batches=3), np.abs(steps))
    assert (growing[0] == [[[1]], [[1.5]]]).all()
