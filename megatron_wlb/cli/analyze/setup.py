"""What is analysed: the job that the flags describe, the data, and the other ways to train the same."""

import argparse
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import NamedTuple

from megatron_wlb.adapter.settings import RunSettings
from megatron_wlb.cli.analyze import crossover
from megatron_wlb.cli.data import Data, data_of
from megatron_wlb.cli.flags import job_of
from megatron_wlb.describe import PlanSettings
from megatron_wlb.job import Job
from megatron_wlb.plan.packer import PackedStep, make_packer
from megatron_wlb.plan.packing.original import OriginalPacking
from megatron_wlb.plan.packing.wlb import WlbPacking
from megatron_wlb.settings import flag_with_value

WARM_UP = 30
"""Steps that are packed and not counted: queues fill."""


class Setup(NamedTuple):
    """A job as --wlb would train it, its data, and what else flags say of them."""

    job: Job
    settings: PlanSettings
    """As given; what they leave open is settled in `job`."""
    run_settings: RunSettings
    data: Data
    seed: int
    model: str | None
    refused: list[str]
    ignored: list[str]
    """Flags, as `launch.accept` sorts them."""
    notes: list[str]
    """What the flags did not say, and what of them is not simulated: sentences."""

    def steps(self, job: Job, count: int) -> Iterator[PackedStep]:
        """`count` steps as `job`, a scheme of this one, would train them, after those that warm up."""
        packer = make_packer(self.data.stream(self.seed, job.context_length), job, fingerprint="")
        for _ in range(WARM_UP):
            packer.next()
        for _ in range(count):
            yield packer.next()


def setup_of(args: argparse.Namespace) -> Setup:
    """What flags describe. Raises ValueError, naming them, for what is missing, contradicts itself or is no dataset."""
    notes = list(args.remarks)
    job = job_of(args, notes)
    settings, data = (PlanSettings.from_args(args), RunSettings.from_args(args)), data_of(args, notes)
    setup = Setup(job, *settings, data, args.seed, args.model, args.refused, args.ignored, notes)
    if setup.settings.crossover or job.profile.crossover_tokens or job.profile.linear_tflops:
        return setup
    count = -(-crossover.MICRO_BATCHES // 2 // job.num_micro_batches)
    by_times = crossover.fit(job, (step.packing for step in setup.steps(schemes(job)["plain"], count)))
    if by_times in (None, job.crossover_tokens):
        return setup
    notes.append(
        f"--wlb-crossover {by_times} fits these times; by FLOPs alone, as training has it by default, it is "
        f"{job.crossover_tokens}."
    )
    return setup._replace(job=replace(job, crossover_tokens=by_times))


def flags_of(setup: Setup) -> str:
    """What a launch line needs for the run that is simulated, beside what it has."""
    job = setup.job
    by_default = setup.settings.crossover is None and job.crossover_tokens == job.profile.crossover_for(job.model)
    settings = replace(setup.settings, max_tokens=None, crossover=None if by_default else job.crossover_tokens)
    flags = ["--wlb --calculate-per-token-loss --attention-dropout 0 --micro-batch-size 1"]
    flags += [f"--global-batch-size {job.num_micro_batches}", flag_with_value("packing", job.packing.name)]
    for each in (settings, job.packing, setup.run_settings):
        values = ((f, getattr(each, f.name)) for f in fields(each))  # type: ignore[arg-type]
        flags += [flag_with_value(f.name, value) for f, value in values if value != f.default]
    flags.append(flag_with_value("max_tokens", job.max_tokens))
    return " ".join(flags) + " --eval-iters 0" * (not setup.data.has_validation)


def schemes(job: Job) -> dict[str, Job]:
    """Ways to train the same data, by name.

    Plain Megatron exchanges K and V in a ring (`--cp-comm-type p2p`, its default), the paper's scheme all at once.
    """
    wlb = job.packing if isinstance(job.packing, WlbPacking) else WlbPacking()
    plain = replace(job, reorder=False, packing=OriginalPacking(), cp_sharding="per-sequence", cp_exchange="ring")
    paper = replace(plain, packing=wlb, cp_sharding="wlb", cp_exchange="all")
    return {"plain": plain, "paper": paper, "ours": job}
