"""Timelines: those on record, which upstream's own schedules have, and the recursion that defines the end."""

import functools
import json
from pathlib import Path

import numpy as np
import pytest

from megatron_wlb.pipeline.schedule import Schedule, nearest_counts
from megatron_wlb.pipeline.timeline import cost_weights, makespans, run

RECORD = json.loads(Path(__file__).with_name("timelines.json").read_text())


def timed(case):
    """A schedule of the record, and times of its passes and transfers."""
    schedule, rng = Schedule(**case["schedule"]), np.random.default_rng(case["seed"])
    shape = (2, schedule.num_stages, schedule.num_chunks, schedule.micro_batches_per_rank)
    return schedule, rng.integers(0, 100, shape), rng.integers(0, 30, schedule.micro_batches_per_rank)


@pytest.mark.parametrize("case", RECORD, ids=lambda case: str(case["seed"]))
def test_passes_end_as_on_record(case):
    schedule, work, transfer = timed(case)
    done = run(schedule, *work.astype(float), transfer.astype(float))
    assert done.end.tolist() == case["end"]
    assert (done.end - done.start == work).all()


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
        schedule = Schedule(
            num_stages=num_stages, num_chunks=num_chunks, micro_batches_per_rank=count, group_size=group
        )
        work = rng.lognormal(5, 1, (19, count)).astype(np.int64)
        assert makespans(schedule, work).tolist() == [ending(w, schedule) for w in work]
        if count % num_stages == 0 or num_chunks == 1:
            alike = makespans(schedule, np.full((1, count), 5))
            assert alike == 5 * 3 * (num_chunks * count + num_stages - 1)


def test_costs_of_an_interleaved_pipeline_by_hand():
    """Three waits for the largest of eight in both chunks, in eighths; all work has what is left of a unit."""
    schedule = Schedule(num_stages=4, num_chunks=2, micro_batches_per_rank=8, group_size=4)
    largest = 8 * 2 * 3 * 8 // 7
    assert cost_weights(schedule) == (8 * 2 - (largest - 8 * 3) // 8, largest, 8 * 2)


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_equal_micro_batches_cost_what_they_take(num_stages):
    """Costs are of a whole stage's forward; backward takes twice as long."""
    schedule = Schedule(num_stages=num_stages, num_chunks=1, micro_batches_per_rank=5)
    total, largest, unit = cost_weights(schedule)
    assert unit == 1 and 3 * (5 * total + largest) == makespans(schedule, np.ones((1, 5), np.int64))
