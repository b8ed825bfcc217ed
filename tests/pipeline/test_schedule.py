"""Schedules are upstream's, pass by pass; what a stage receives is what its neighbours send."""

from collections import defaultdict

import pytest
from hypothesis import given, settings
from megatron.core.pipeline_parallel.schedules import get_schedule_table

from megatron_wlb.pipeline.schedule import Schedule
from tests.pipeline.schedules import schedules
from tests.pipeline.upstream import record


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
        Schedule(num_stages=4, num_chunks=2, num_micro_batches=9, group_size=4)


@pytest.mark.parametrize(("micro_batches", "group"), [(4, 4), (8, 4), (9, 5), (5, 5), (11, 6), (14, 5), (16, 4)])
def test_a_group_that_is_not_given_is_the_smallest_that_upstream_takes(micro_batches, group):
    assert Schedule(num_stages=4, num_chunks=2, num_micro_batches=micro_batches).group == group


def test_early_stages_hold_more_micro_batches():
    def in_flight(**sizes):
        schedule = Schedule(**sizes)
        return [schedule.in_flight(stage) for stage in range(schedule.num_stages)]

    assert in_flight(num_stages=8, num_micro_batches=64) == [8, 7, 6, 5, 4, 3, 2, 1]
    assert in_flight(num_stages=8, num_micro_batches=3) == [3, 3, 3, 3, 3, 3, 2, 1]
    assert in_flight(num_stages=4, num_chunks=3, num_micro_batches=64) == [15, 13, 11, 9]
    assert in_flight(num_stages=4, num_chunks=3, num_micro_batches=64, group_size=10)[0] == 27
    assert in_flight(num_stages=2, num_chunks=3, num_micro_batches=2) == [6, 5]


def received(schedule, stage):
    """Micro-batches of the messages that upstream's neighbours of a stage send to it, forward and backward."""
    inbox = defaultdict(list)
    for sender in range(schedule.num_stages):
        for what, handles in record(schedule, sender):
            for handle in handles if what == "post" else ():
                direction, side, message = handle.message
                if side == "send":
                    receiver = (sender + (-1 if direction else 1)) % schedule.num_stages
                    inbox[receiver, direction].append(message[2])
    return inbox[stage, 0], inbox[stage, 1]


@given(schedules())
@settings(deadline=None)
def test_a_stage_receives_what_upstreams_neighbours_send(schedule):
    for stage in range(schedule.num_stages):
        forward, backward = schedule.receive_order(stage)
        assert (forward, [] if schedule.forward_only else backward) == received(schedule, stage)


def test_receive_order_by_hand():
    schedule = Schedule(num_stages=2, num_chunks=2, num_micro_batches=4)
    assert schedule.receive_order(0) == ([0, 1, 2, 3], [0, 1, 0, 1, 2, 3, 2, 3])
    assert schedule.receive_order(1) == ([0, 1, 0, 1, 2, 3, 2, 3], [0, 1, 2, 3])
    assert Schedule(num_stages=1, num_micro_batches=3).receive_order(0) == ([], [])
