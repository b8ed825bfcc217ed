"""Pipeline schedules and times for them, drawn by hypothesis."""

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from megatron_wlb.pipeline.schedule import Schedule


@st.composite
def schedules(draw) -> Schedule:
    """Up to 5 stages; ragged numbers of micro-batches, and groups longer than the pipeline."""
    stages = draw(st.integers(1, 5))
    chunks = draw(st.integers(1, 3)) if stages > 1 else 1
    if chunks == 1:
        overlaps = stages == 1 and draw(st.booleans())
        return Schedule(num_stages=stages, micro_batches_per_rank=draw(st.integers(1, 12)), by_turns=overlaps)
    group = draw(st.integers(stages, stages + 3))
    rest = draw(st.one_of(st.just(0), st.integers(stages, group - 1) if group > stages else st.just(0)))
    return Schedule(
        num_stages=stages,
        num_chunks=chunks,
        micro_batches_per_rank=draw(st.integers(1, 3)) * group + rest,
        group_size=group,
        overlap_transfers=draw(st.booleans()),
        by_turns=draw(st.booleans()),
    )


@st.composite
def timed_schedules(draw) -> tuple[Schedule, np.ndarray, np.ndarray]:
    """A schedule, times of its passes and of its transfers: integers, so that sums are exact."""
    schedule = draw(schedules())
    shape = (schedule.num_stages, schedule.num_chunks, schedule.micro_batches_per_rank)
    work = draw(st_numpy.arrays(np.float64, (2, *shape), elements=st.integers(0, 100)))
    transfer = draw(st_numpy.arrays(np.float64, schedule.micro_batches_per_rank, elements=st.integers(0, 30)))
    return schedule, work, transfer
