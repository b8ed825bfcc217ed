"""The benchmark of the simulator records what ran. Times are not looked at."""

import numpy as np
import pytest
import torch

from benchmarks import simulator
from benchmarks.simulator import Layout, Recording, Size
from megatron_wlb.pipeline.schedule import Schedule
from megatron_wlb.pipeline.timeline import run

TINY = Size(hidden=8, layers=2, max_tokens=16, steps=2)


def recording(slower=1.0):
    """A simulated step, as if it had run with everything `slower` than its passes and transfers say."""
    schedule = Schedule(num_stages=2, num_micro_batches=3)
    timeline = run(schedule, np.array([30.0, 10.0, 20.0]), np.array([60.0, 20.0, 40.0]), 5.0)
    start = slower * timeline.start
    return Recording(
        schedule=schedule,
        tokens=[3, 1, 2],
        start=start,
        end=start + timeline.end - timeline.start,
        transfer=np.full(3, 5.0),
    )


def test_errors_are_those_of_the_makespan():
    exact, slow = recording(), recording(slower=2.0)
    assert exact.error == pytest.approx(0)
    assert exact.start_error == pytest.approx(0)
    assert slow.error == pytest.approx(exact.end.max() / slow.end.max() - 1)
    assert slow.error < -0.3
    row = simulator.summary(simulator.LAYOUTS[0], [exact, slow])
    assert row["error_max"] == pytest.approx(-slow.error)
    assert row["error_median"] == pytest.approx(slow.error / 2)
    assert row["measured_ms_max"] == pytest.approx(slow.end.max() / 1e3)


def test_a_recording_survives_its_file():
    one = recording()
    other = Recording.from_json(one.to_json())
    assert (other.schedule, other.tokens) == (one.schedule, one.tokens)
    np.testing.assert_array_equal(other.start, one.start)
    np.testing.assert_array_equal(other.end, one.end)
    np.testing.assert_array_equal(other.transfer, one.transfer)


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs Megatron without a GPU")
@pytest.mark.parametrize(("chunks", "computes"), [(1, True), (2, False)])
def test_a_tiny_run(chunks, computes):
    schedule = Schedule(num_stages=2, num_chunks=chunks, num_micro_batches=4)
    recordings = simulator.record(Layout(schedule=schedule, computes=computes), TINY)
    assert len(recordings) == TINY.steps
    for one in recordings:
        assert one.start.shape == (2, 2, chunks, 4)
        assert one.start.min() == 0
        assert (one.end > one.start).all()
        assert (one.transfer > 0).all()
        # What a pass takes from another one was there.
        ways = [times.swapaxes(0, 1).reshape(2 * chunks, 4) for times in (*one.start, *one.end)]
        assert (ways[0][1:] >= ways[2][:-1]).all()
        assert (ways[1][:-1] >= ways[3][1:]).all()
        assert (ways[1][-1] >= ways[2][-1]).all()
    assert recordings[0].tokens != recordings[1].tokens


def test_stages_that_compute_need_cores(monkeypatch):
    monkeypatch.setattr(simulator.os, "sched_getaffinity", lambda process: {0})
    with pytest.raises(RuntimeError, match="2 stages that compute need as many cores"):
        simulator.record(simulator.LAYOUTS[0], TINY)
