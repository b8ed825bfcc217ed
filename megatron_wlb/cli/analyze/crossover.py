"""The crossover by which work is proportional to what the simulation says of times, not to FLOPs."""

from dataclasses import replace

import numpy as np

from megatron_wlb.cli.analyze.report import layer_times, packed_steps, placed, schemes
from megatron_wlb.cli.analyze.setup import Setup
from megatron_wlb.cli.job import shards_of
from megatron_wlb.simulate.costs import pass_times

MICRO_BATCHES = 200
"""About how many are fitted to."""


def settle(setup: Setup) -> Setup:
    """The setup with `--wlb-crossover`, unless that or the profile says it already."""
    profile = setup.job.hardware.attention
    if setup.config.crossover or profile.crossover_tokens or profile.linear_tflops:
        return setup
    crossover = _of_times(setup)
    if crossover in (None, setup.crossover_tokens):
        return setup
    return replace(
        setup,
        config=replace(setup.config, crossover=crossover),
        crossover_tokens=crossover,
        described=setup.described | {"crossover_tokens": crossover},
        notes=[
            *setup.notes,
            f"--wlb-crossover {crossover} fits these times; by FLOPs alone, as training has it by default, it is "
            f"{setup.crossover_tokens}.",
        ],
    )


def _of_times(setup: Setup) -> int | None:
    """Tokens over squares of lengths in the fitted time of a layer; None where the documents don't tell.

    Fitted, by relative errors, to windows of plain packing and to the first half of the documents of each, under the
    sharding of --wlb. What every micro-batch costs alike counts for neither.
    """
    plain, *_, ours = schemes(setup)
    job, layout = placed(setup, ours)
    known, times = [], []
    for step in packed_steps(setup, plain, -(-MICRO_BATCHES // 2 // setup.num_micro_batches)):
        windows = [step.packing.micro_batch(k)["length"] for k in range(len(step.packing))]
        for micro_batches in (windows, [window[: -(-len(window) // 2)] for window in windows]):
            for plans in shards_of(job, layout, micro_batches):
                known += [(1.0, float(p.lengths.sum()), float((p.lengths**2).sum())) for p in plans]
                times.append(layer_times(pass_times(job, plans)))
    relative = np.array(known) / np.concatenate(times)[:, None]
    scale = np.abs(relative).max(axis=0)
    found, _, rank, _ = np.linalg.lstsq(relative / scale, np.ones(len(relative)))
    _, per_token, per_pair = found / scale
    return max(1, round(per_token / per_pair)) if rank == 3 and per_token > 0 and per_pair > 0 else None
