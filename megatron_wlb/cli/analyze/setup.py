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
from megatron_wlb.plan.stream import DocumentStream
from megatron_wlb.settings import flag_with_value

WARM_UP = 30
"""Steps that are packed and not counted: queues fill."""


class Setup(NamedTuple):
    """A job as --wlb would train it, its data, and the flags that describe both."""

    job: Job
    data: Data
    args: argparse.Namespace
    notes: list[str]
    """What the flags did not say, and what of them is not simulated: sentences."""

    def stream(self) -> DocumentStream:
        """The documents in the order of training, from their beginning."""
        return DocumentStream(self.data.sources, seed=self.args.seed, context_length=self.job.context_length)

    def steps(self, job: Job, count: int) -> Iterator[PackedStep]:
        """`count` steps as `job`, a scheme of this one, would train them, after those that warm up."""
        packer = make_packer(self.stream(), job, fingerprint="")
        for _ in range(WARM_UP):
            packer.next()
        for _ in range(count):
            yield packer.next()


def setup_of(args: argparse.Namespace) -> Setup:
    """What flags describe. Raises ValueError, naming them, for what is missing, contradicts itself or is no dataset."""
    notes = list(args.remarks)
    job = job_of(args, notes)
    setup = Setup(job, data_of(args, notes), args, notes)
    if args.wlb_crossover or job.profile.crossover_tokens or job.profile.linear_tflops:
        return setup
    count = -(-crossover.MICRO_BATCHES // 2 // job.num_micro_batches)
    by_times = crossover.fit(job, (step.packing for step in setup.steps(schemes(job)["plain"], count)))
    if by_times in (None, job.crossover_tokens):
        return setup
    notes.append(
        f"--wlb-crossover {by_times} fits these times; by FLOPs alone, as training has it by default, it is "
        f"{job.crossover_tokens}."
    )
    args.wlb_crossover = by_times
    return setup._replace(job=replace(job, crossover_tokens=by_times))


def flags_of(setup: Setup) -> str:
    """What a launch line needs for the run that is simulated, beside what it has."""
    job, args = setup.job, setup.args
    flags = ["--wlb --calculate-per-token-loss --attention-dropout 0 --micro-batch-size 1"]
    flags += [f"--global-batch-size {job.num_micro_batches}", flag_with_value("packing", job.packing.name)]
    for settings in (PlanSettings.from_args(args), job.packing, RunSettings.from_args(args)):
        for f in fields(settings):  # type: ignore[arg-type]
            value = getattr(settings, f.name)
            if f.name != "max_tokens" and value != f.default:
                flags.append(flag_with_value(f.name, value))
    flags.append(flag_with_value("max_tokens", job.max_tokens))
    return " ".join(flags) + " --eval-iters 0" * (not setup.data.has_validation)


def schemes(job: Job) -> dict[str, Job]:
    """Ways to train the same data, by name.

    Plain Megatron exchanges K and V in a ring (`--cp-comm-type p2p`, its default), the paper's scheme all at once.
    """
    wlb = job.packing if isinstance(job.packing, WlbPacking) else WlbPacking()
    plain = replace(job, reorder=False, packing=OriginalPacking(), cp_sharding="per-sequence", cp_exchange="ring")
    paper = replace(plain, packing=wlb, cp_sharding="wlb", cp_exchange="all", cp_head_groups=1)
    return {"plain": plain, "paper": paper, "ours": job}
