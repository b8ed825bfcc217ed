"""Chooses the number of micro-batches that is predicted fastest for a run, and predicts what a delay would bring."""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from megatron_wlb.job import Job
from megatron_wlb.packing.adaptive import AdaptivePacking
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
"""Steps that are packed and not counted; then the windows to count, and bounds on the steps that hold them.

`delay_gain` takes the most: steps with a delay differ in work, by 30 % of the gain over four of them.
"""
DELAY = AdaptivePacking(max_delay_steps=30)
"""The delay that is tried beside the same step."""
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
    `default` has one micro-batch per window; `make` builds a job with `num_micro_batches`, and raises ValueError if it
    cannot have that many, or if they do not fit memory (`memory_known`; else none of several windows is tried).
    """
    if not default.packing.steady_tokens:
        return default, []
    windows, jobs = default.global_batch_size, {default.num_micro_batches: default}
    for count in sorted(
        {windows * share for share in MICRO_BATCHES_PER_WINDOW if windows * share == int(windows * share)}
    ):
        if count >= windows or memory_known:
            with contextlib.suppress(ValueError):
                jobs.setdefault(int(count), make(num_micro_batches=int(count)))
    if len(jobs) == 1 or _steps_left(default, samples, first_sample) <= 0:
        return default, []
    tried = [Prediction(job, *_measured(_scaled(job), samples, first_sample)) for job in jobs.values()]
    best, unit = min(each.time for each in tried), tried[0].time
    alike = [each for each in tried if each.time <= (1 + ALIKE) * best]
    chosen = min(alike, key=lambda each: (round(each.late_steps, 2), each.time)).job
    rows = [each._replace(time=each.time / unit) for each in tried]
    return chosen, sorted(rows, key=lambda each: each.job.num_micro_batches)


def delay_gain(job: Job, samples: Samples, first_sample: int) -> float:
    """Return the predicted speed of `job` with `DELAY`, over without; 1 where it has a delay already, or too few steps.

    Documents then run in other steps, so it is the speed per work.
    """
    packing = job.packing
    if not isinstance(packing, AdaptivePacking) or packing.delays or job.whole_documents:
        return 1.0
    if _steps_left(job, samples, first_sample) < WARM_UP + MOST_STEPS:
        return 1.0
    both = job, replace(job, packing=DELAY)
    same, late = (_measured(_scaled(each), samples, first_sample, MOST_STEPS)[0] for each in both)
    return same / late


def _steps_left(job: Job, samples: Samples, first_sample: int) -> int:
    """Return the steps from a sample on to the end of the data, the last of which it may fill in part."""
    return 1 << 30 if samples.order is not None else -(-(len(samples) - first_sample) // job.global_batch_size)


def _scaled(job: Job) -> Job:
    """Return the job with about `RANKS` data-parallel ranks, whole groups of those that divide experts."""
    parallel = job.parallel
    ranks = min(parallel.dp, -(-RANKS // parallel.expert_dp_ranks) * parallel.expert_dp_ranks)
    windows, count = (size * ranks // parallel.dp for size in (job.global_batch_size, job.num_micro_batches))
    return replace(job, parallel=replace(parallel, dp=ranks), global_batch_size=windows, num_micro_batches=count)


def _measured(job: Job, samples: Samples, first_sample: int, least_steps: int = LEAST_STEPS) -> tuple[float, float]:
    """Return the time of steps per work, and the mean delay of their tokens in steps.

    Time is simulated, in us, or the work of `step_cost` if `untimed`.
    """
    packer = Packer(samples, job, first_sample=first_sample)
    warm_up = min(WARM_UP, _steps_left(job, samples, first_sample) // 2) if job.packing.delays else 0
    steps = min(MOST_STEPS, max(least_steps, WINDOWS // job.global_batch_size))
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
            time += simulate_step(job, shard_step(job, packing.lengths, packing.ranks)).time
        work += float(job.work(lengths).sum())
        tokens += float(lengths.sum())
        late += float((np.maximum(step.step - packing.documents["arrival"], 0) * lengths).sum())
    return time / work, late / tokens
