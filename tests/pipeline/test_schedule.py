"""Schedules are upstream's, pass by pass and message by message."""

import itertools

import numpy as np
import pytest

from megatron_wlb.pipeline.schedule import Schedule, even_groups, nearest_counts


def test_a_schedule_prints_a_stage_a_line():
    plain = "F0 F1 F2 B0 F3 B1 B2 B3", "F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"
    assert str(Schedule(num_stages=3, micro_batches_per_rank=4)) == "\n".join(plain)
    interleaved = (
        "F0.0 F1.0 F0.1 F1.1 F2.0 B0.1 F3.0 B1.1 F2.1 B0.0 F3.1 B1.0 B2.1 B3.1 B2.0 B3.0",
        "F0.0 F1.0 F0.1 B0.1 F1.1 B1.1 F2.0 B0.0 F3.0 B1.0 F2.1 B2.1 F3.1 B3.1 B2.0 B3.0",
    )
    assert str(Schedule(num_stages=2, num_chunks=2, micro_batches_per_rank=4, group_size=2)) == "\n".join(interleaved)
    assert str(Schedule(num_stages=1, micro_batches_per_rank=3, by_turns=True)) == "F0 F1 B0 F2 B1 B2"


def test_a_stage_receives_what_its_neighbours_send():
    """The first stage gets no input of the first chunk, nor the last one a gradient of the last chunk."""
    every, ends = [0, 1, 0, 1, 2, 3, 2, 3], [0, 1, 2, 3]
    interleaved = Schedule(num_stages=3, num_chunks=2, micro_batches_per_rank=4, group_size=4)
    assert [interleaved.receive_order(stage) for stage in (0, 1, 2)] == [
        ([0, 1, 2, 3], [0, 1, 2, 3] * 2), ([0, 1, 2, 3] * 2,) * 2, ([0, 1, 2, 3] * 2, [0, 1, 2, 3])
    ]  # fmt: skip
    grouped = Schedule(num_stages=2, num_chunks=2, micro_batches_per_rank=4, group_size=2)
    assert [grouped.receive_order(stage) for stage in (0, 1)] == [(ends, every), (every, ends)]
    plain = Schedule(num_stages=2, micro_batches_per_rank=3)
    assert [plain.receive_order(stage) for stage in (0, 1)] == [([], [0, 1, 2]), ([0, 1, 2], [])]


def test_refuses_what_upstream_refuses():
    with pytest.raises(ValueError, match="2 stages, 1 chunks, 0 micro-batches; give one of each"):
        Schedule(num_stages=2, micro_batches_per_rank=0)
    with pytest.raises(ValueError, match="2 model chunks need at least 2 pipeline stages"):
        Schedule(num_stages=1, num_chunks=2, micro_batches_per_rank=4)
    with pytest.raises(ValueError, match="2 stages without virtual ones .* leave --overlap-moe-expert-parallel-comm"):
        Schedule(num_stages=2, micro_batches_per_rank=4, by_turns=True)
    with pytest.raises(ValueError, match="give groups of at least 4"):
        Schedule(num_stages=4, num_chunks=2, micro_batches_per_rank=8, group_size=3)
    with pytest.raises(ValueError, match="3 micro-batches of .* over 4 pipeline stages in groups of 4; give 4$"):
        Schedule(num_stages=4, num_chunks=2, micro_batches_per_rank=3)
    with pytest.raises(ValueError, match="in groups of 6; give 6 or 10$"):
        Schedule(num_stages=4, num_chunks=2, micro_batches_per_rank=9, group_size=6)


def test_the_nearest_counts_are_those_that_upstream_takes():
    """By its two conditions, as schedules.py has them."""

    def taken(count, stages, group):
        return stages <= group <= count and not 0 < count % group < stages

    for stages, more, count in itertools.product(range(1, 6), range(4), range(1, 30)):
        group = stages + more
        below = [n for n in range(1, count + 1) if taken(n, stages, group)][-1:]
        above = next(n for n in range(count, 99) if taken(n, stages, group))
        assert nearest_counts(count, stages, group) == tuple(sorted({*below, above}))


def test_groups_are_even_and_upstream_takes_them():
    assert [even_groups(count, 4) for count in (4, 6, 8, 9, 12, 16, 24, 32)] == [4, 6, 8, 5, 6, 6, 6, 7]
    for stages in range(2, 17):
        groups = {count: even_groups(count, stages) for count in range(1, 300)}
        for count, group in groups.items():
            assert nearest_counts(count, stages, group) == ((count,) if count >= stages else (stages,))
        mean = np.mean([group / stages for count, group in groups.items() if count >= 4 * stages])
        assert 1.4 < mean < 1.9 and max(groups.values()) <= 4 * stages


@pytest.mark.parametrize(
    "sizes",
    [
        (4, 3, 8, 4),
        (4, 3, 19, 5),
        (4, 3, 64, 10),
        (2, 2, 9, 3),
        (2, 3, 2, None),
        (8, 1, 3, None),
        (8, 1, 64, None),
        (1, 1, 1, None),
        (1, 1, 5, None),
    ],
)
@pytest.mark.parametrize("overlaps", [False, True])
def test_what_passes_in_flight_weigh(sizes, overlaps):
    """A forward pass that runs by turns with a backward pass holds no more than what the other has freed."""
    stages, chunks, count, group = sizes
    if overlaps and chunks == 1 < stages:
        pytest.skip("not in plain pipelines")
    schedule = Schedule(
        num_stages=stages, num_chunks=chunks, micro_batches_per_rank=count, group_size=group, by_turns=overlaps
    )
    for weights in (np.ones(chunks), np.arange(1.0, chunks + 1), np.eye(chunks)[-1]):
        for stage in range(stages):
            held, most = 0.0, 0.0
            for i, (backward, chunk, _) in enumerate(schedule.ops(stage).tolist()):
                held += -weights[chunk] if backward else weights[chunk]
                joined = overlaps and not backward and i >= schedule.warm_up(stage)
                most = max(most, 0 if joined else held)
            assert schedule.in_flight(stage, weights) == most
