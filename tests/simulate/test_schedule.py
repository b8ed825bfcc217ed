"""Schedules are upstream's, pass by pass."""

import pytest
from hypothesis import given, settings
from megatron.core.pipeline_parallel.schedules import get_schedule_table

from megatron_wlb.simulate.schedule import Schedule
from tests.simulate.schedules import schedules
from tests.simulate.upstream import record


@given(schedules())
def test_the_table_is_upstreams(schedule):
    group = schedule.group if schedule.num_chunks > 1 else 1
    expected = get_schedule_table(schedule.num_micro_batches, schedule.num_chunks, group)
    assert [tuple(row) for row in schedule.table().tolist()] == expected


@given(schedules())
@settings(deadline=None)
def test_every_stage_runs_upstreams_passes_in_upstreams_order(schedule):
    for stage in range(schedule.num_stages):
        passes = [note for what, note in record(schedule, stage) if what == "pass"]
        assert [(int(b), c, m) for b, c, m in schedule.ops(stage).tolist()] == passes


def test_refuses_what_upstream_refuses():
    with pytest.raises(ValueError, match="at least one stage"):
        Schedule(num_stages=2, num_micro_batches=0)
    with pytest.raises(ValueError, match="2 model chunks need at least 2 pipeline stages"):
        Schedule(num_stages=1, num_chunks=2, num_micro_batches=4)
    with pytest.raises(ValueError, match="from 4, the number of stages, to 3, the number of micro-batches"):
        Schedule(num_stages=4, num_chunks=2, num_micro_batches=3)
    with pytest.raises(ValueError, match="a last group of 1; it must be empty or at least 4"):
        Schedule(num_stages=4, num_chunks=2, num_micro_batches=9)
