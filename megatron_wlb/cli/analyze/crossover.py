"""The crossover by which work is proportional to what the simulation says of times, not to FLOPs."""

from collections.abc import Iterable

import numpy as np

from megatron_wlb.cli.balance import layer_times
from megatron_wlb.cost.passes import H100, pass_times
from megatron_wlb.job import Job
from megatron_wlb.plan.step import shard_step
from megatron_wlb.plan.types import Packing

MICRO_BATCHES = 200
"""About how many are fitted to."""


def fit(job: Job, steps: Iterable[Packing]) -> int | None:
    """Tokens over squares of lengths in the fitted time of a layer; None where the documents don't tell.

    Fitted, by relative errors, to micro-batches of `steps` and to the first half of the documents of each, as the job
    shards them. What every micro-batch costs alike counts for neither.
    """
    sizes, times = [], []
    for packing in steps:
        whole = [packing.micro_batch(k)["length"] for k in range(len(packing))]
        for micro_batches in (whole, [lengths[: -(-len(lengths) // 2)] for lengths in whole]):
            for plans in shard_step(job, micro_batches):
                sizes += [(1.0, float(p.lengths.sum()), float((p.lengths**2).sum())) for p in plans]
                times.append(layer_times(pass_times(job, H100, plans)))
    relative = np.array(sizes) / np.concatenate(times)[:, None]
    scale = np.abs(relative).max(axis=0)
    solution, _, rank, _ = np.linalg.lstsq(relative / scale, np.ones(len(relative)))
    _, per_token, per_pair = solution / scale
    return max(1, round(per_token / per_pair)) if rank == 3 and per_token > 0 and per_pair > 0 else None
