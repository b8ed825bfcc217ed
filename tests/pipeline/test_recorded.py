"""Steps of real pipelines, recorded by `python -m benchmarks.simulator --record`, as the simulator sees them."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.simulator import LAYOUTS, WITHIN, Recording

RECORDED = {
    name: Recording.from_json(data)
    for name, data in json.loads((Path(__file__).parent / "recorded.json").read_text()).items()
}


def test_every_layout_was_recorded():
    assert list(RECORDED) == [layout.name for layout in LAYOUTS]
    assert [r.schedule for r in RECORDED.values()] == [layout.schedule for layout in LAYOUTS]


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_step_is_reproduced(name):
    """Its passes run in the order of the schedule, and take as long as simulated."""
    recording = RECORDED[name]
    assert abs(recording.error) <= WITHIN
    assert recording.start_error <= WITHIN
    work = (recording.end - recording.start).reshape(-1, recording.schedule.num_micro_batches).sum(axis=0)
    assert work.max() > 1.5 * work.min()  # ragged
    assert recording.simulated().busy.max() < 0.9 * recording.simulated().makespan  # something to get wrong
    for stage in range(recording.schedule.num_stages):
        ops = recording.schedule.ops(stage)
        at = (ops["backward"].astype(int), stage, ops["chunk"], ops["micro_batch"])
        assert (np.diff(recording.start[at]) > 0).all()
        assert (recording.end[at][:-1] <= recording.start[at][1:]).all()
