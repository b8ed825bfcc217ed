"""Chooses micro-batches and their S_max by predicted time."""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from megatron_wlb.job import Job
from megatron_wlb.plan.metrics import lateness
from megatron_wlb.plan.packer import Packer
from megatron_wlb.plan.samples import Samples
from megatron_wlb.plan.step import shard_step, step_cost
from megatron_wlb.simulate.passes import untimed
from megatron_wlb.simulate.step import simulate_step

MICRO_BATCHES_PER_WINDOW = (1, 3 / 2, 2, 3, 4, 3 / 4, 1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64)
"""Micro-batches per window to try, if a step can have that many."""
RANKS = 8
"""Data-parallel ranks that represent all; the slowest of fewer would be faster than the slowest of all."""
WARM_UP, WINDOWS, LEAST_STEPS, MOST_STEPS = 24, 224, 4, 32
"""Steps that are packed and not counted; then the windows to count, and bounds on the steps that hold them."""
ALIKE = 0.01
"""Times that differ by less count as equal; then the least delay decides."""


class Prediction(NamedTuple):
    job: Job
    time: float
    """Time of a step per work, relative to one micro-batch per window."""
    late_steps: float
    """Delay in steps, mean over tokens."""


def predictions(
    default: Job, make: Callable[..., Job], samples: Samples, *, memory_known: bool, first_sample: int = 0
) -> tuple[Job, list[Prediction]]:
    """Return the job with the best number of micro-batches, and all predictions.

    All see the same samples, from `first_sample` on, on a few data-parallel ranks; time is work if a job is `untimed`.
    `default` has one micro-batch per window; `make` builds a job with `num_micro_batches`, and with the least S_max if
    `tight`, and raises ValueError if it cannot have that many, or if they do not fit memory (without `memory_known`,
    none of several windows is tried). Returns the faster S_max of every number.
    """
    if not default.packing.steady_tokens:
        return default, []
    windows, jobs = default.global_batch_size, [default]
    for count in sorted(
        {windows * share for share in MICRO_BATCHES_PER_WINDOW if windows * share == int(windows * share)}
    ):
        if count < windows and not memory_known:
            continue
        for tight in (False, True) if default.packing.same_steps else (False,):  # where documents would wait for room
            with contextlib.suppress(ValueError):
                jobs.append(make(num_micro_batches=int(count), tight=tight))
    jobs = list(dict.fromkeys(jobs))
    if len(jobs) == 1 or steps_left(default, samples, first_sample) <= 0:
        return default, []
    tried = [Prediction(job, *_measured(_scaled(job), samples, first_sample)) for job in jobs]
    best = min(each.time for each in tried)
    unit = min(each.time for each in tried if each.job.num_micro_batches == default.num_micro_batches)
    alike = [each for each in tried if each.time <= (1 + ALIKE) * best]
    chosen = min(alike, key=lambda each: (round(each.late_steps, 2), each.time)).job
    rows: dict[int, Prediction] = {}
    for each in sorted(tried, key=lambda each: -each.time):
        rows[each.job.num_micro_batches] = each._replace(time=each.time / unit)
    return chosen, [rows[count] for count in sorted(rows)]


def time_per_work(job: Job, unit: Job, samples: Samples, first_sample: int, size: int = 1) -> float:
    """Return the predicted time of the first steps, per work of `unit` on all ranks.

    So jobs compare whose work counts otherwise, or that have other data-parallel ranks. Megatron alone has `size`
    windows per micro-batch.
    """
    few = _scaled(job)
    return (
        _measured(few, samples, first_sample, unit=unit, size=size)[0] * few.global_batch_size / job.global_batch_size
    )


def steps_left(job: Job, samples: Samples, first_sample: int) -> int:
    """Return the steps from a sample on to the end of the data, the last of which it may fill in part."""
    return 1 << 30 if samples.order is not None else -(-(len(samples) - first_sample) // job.global_batch_size)


def _scaled(job: Job) -> Job:
    """Return the job with about `RANKS` data-parallel ranks, whole groups of those that pool work."""
    parallel = job.parallel
    ranks = min(parallel.dp, -(-RANKS // parallel.pooling_ranks) * parallel.pooling_ranks)
    windows, count = (size * ranks // parallel.dp for size in (job.global_batch_size, job.num_micro_batches))
    return replace(job, parallel=replace(parallel, dp=ranks), global_batch_size=windows, num_micro_batches=count)


def _measured(
    job: Job, samples: Samples, first_sample: int, *, unit: Job | None = None, size: int = 1
) -> tuple[float, float]:
    """Return the time of steps per work (of `unit`, or the job itself), and the mean delay of their tokens in steps.

    Time is simulated, in us, or the work of `step_cost` if `untimed`.
    """
    packer = Packer(samples, job, first_sample=first_sample)
    warm_up = 0 if job.packing.same_steps else min(WARM_UP, steps_left(job, samples, first_sample) // 2)
    steps = min(MOST_STEPS, max(LEAST_STEPS, WINDOWS // job.global_batch_size))
    time = work = late = tokens = 0.0
    for k in range(warm_up + steps):
        try:
            step = packer.next()
        except StopIteration:  # a run of few steps
            break
        packing, lengths = step.batch, step.batch.documents["length"]
        if k < warm_up:
            continue
        if untimed(job):
            time += step_cost(packing, job)
        else:
            time += simulate_step(job, shard_step(job, packing.lengths, packing.ranks, size=size)).time
        work += float((unit or job).work(lengths).sum())
        tokens += float(lengths.sum())
        late += float(lateness(packing, step.step)[0])
    return time / work, late / tokens
