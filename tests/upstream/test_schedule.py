"""Schedules are upstream's, pass by pass and message by message, and timelines a replay of them.

`python -m tests.upstream.test_schedule` writes the record that the pipeline's own tests are held to.
"""

import json
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given

from megatron_wlb.pipeline.timeline import run
from tests.pipeline.schedules import schedules, timed_schedules
from tests.pipeline.test_timeline import RECORD, timed
from tests.upstream.schedules import record, replay


@given(schedules())
def test_passes_and_receives_are_in_upstreams_order(schedule):
    """A stage receives, forward and backward, what its neighbours send."""
    inbox = defaultdict(list)
    for stage in range(schedule.num_stages):
        notes = record(schedule, stage)
        passes = [note for what, note in notes if what == "pass"]
        assert [(int(b), c, m) for b, c, m in schedule.ops(stage).tolist()] == passes
        for handle in (handle for what, handles in notes if what == "post" for handle in handles):
            direction, side, message = handle.message
            if side == "send":
                receiver = (stage + (-1 if direction else 1)) % schedule.num_stages
                inbox[receiver, direction].append(message[2])
    for stage in range(schedule.num_stages):
        assert schedule.receive_order(stage) == (inbox[stage, 0], inbox[stage, 1])


@given(timed_schedules())
def test_equal_to_a_replay_of_upstreams_functions(timed):
    schedule, work, transfer = timed
    start, end = replay(schedule, work, transfer)
    done = run(schedule, *work, transfer)
    np.testing.assert_array_equal(done.start, start)
    np.testing.assert_array_equal(done.end, end)


SIZES = [
    {"num_stages": 1, "micro_batches_per_rank": 5, "by_turns": True},
    *({"num_stages": stages, "micro_batches_per_rank": count} for stages, count in ((1, 3), (2, 5), (3, 2), (4, 7))),
    *(
        {"num_stages": stages, "num_chunks": chunks, "micro_batches_per_rank": count, "group_size": group}
        | {"overlap_transfers": transfers, "by_turns": experts}
        for stages, chunks, count, group in ((2, 2, 5, 3), (2, 3, 2, 2), (3, 2, 6, 3), (4, 2, 9, 5))
        for transfers in (False, True)
        for experts in (False, True)
    ),
]


def replayed(case):
    schedule, work, transfer = timed(case)
    return replay(schedule, work.astype(float), transfer.astype(float))[1].tolist()


@pytest.mark.parametrize("case", RECORD, ids=lambda case: str(case["seed"]))
def test_the_record_of_the_pipelines_tests_is_upstreams(case):
    assert case["schedule"] == SIZES[case["seed"]] and replayed(case) == case["end"]


if __name__ == "__main__":
    cases = [{"seed": seed, "schedule": sizes} for seed, sizes in enumerate(SIZES)]
    lines = [json.dumps(case | {"end": replayed(case)}) for case in cases]
    Path("tests/pipeline/timelines.json").write_text("[\n" + ",\n".join(lines) + "\n]\n")
