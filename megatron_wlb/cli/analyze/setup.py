"""What is analysed: the job that the flags describe, the data, and the other ways to train the same."""

import argparse
import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from functools import partial
from shlex import quote
from typing import Any, NamedTuple

import numpy as np

from megatron_wlb.cli.analyze import layouts
from megatron_wlb.cli.common import short
from megatron_wlb.cli.data import Data, data_of
from megatron_wlb.cli.flags import job_of
from megatron_wlb.cli.launch import DYNAMIC, WARM_UP_OVERLAP
from megatron_wlb.describe.settings import PlanSettings, RunSettings, default_max_tokens
from megatron_wlb.job import Job
from megatron_wlb.micro_batches import Prediction, predictions
from megatron_wlb.packing import for_training
from megatron_wlb.packing.adaptive import AdaptivePacking
from megatron_wlb.packing.original import OriginalPacking
from megatron_wlb.packing.wlb import WlbPacking
from megatron_wlb.pipeline.schedule import nearest_counts
from megatron_wlb.plan.packer import PackedStep, make_packer
from megatron_wlb.plan.step import shard_step
from megatron_wlb.settings import flag_with_value
from megatron_wlb.simulate import SimulatedStep, simulate_step
from megatron_wlb.simulate.dynamic_cp import simulate_dynamic
from megatron_wlb.simulate.memory import largest_max_tokens
from megatron_wlb.simulate.passes import H100, Hardware
from megatron_wlb.types import Shard, ShardPlan

MEGATRON = {"plain": "per-sequence", "thd": "per-document", "dynamic": "per-document"}
"""Schemes without --wlb, which may use what --wlb refuses, and how each shards."""
WARM_UP = 30
"""Steps that are packed and not counted: queues fill."""


class Megatron(NamedTuple):
    """What a run without --wlb has beside its job."""

    name: str = "plain"
    """The scheme that it is."""
    micro_batch_size: int = 1
    """Windows of a micro-batch."""
    tp_comm_overlap: bool = False
    hidden_transfers: bool = False
    """`--overlap-p2p-communication-warmup-flush`, which is taken to hide all transfers between stages."""
    dynamic: str = ""
    """The flag by which every document has context-parallel ranks of its own, if there is one."""
    rank_tokens: int = 0
    """`--max-seqlen-per-dp-cp-rank`, with `dynamic`."""

    @property
    def packs(self) -> bool:
        """Whether documents of the same ranks run at once; without `--dynamic-context-parallel` each runs by itself."""
        return self.dynamic == DYNAMIC["dynamic_context_parallel"]

    @property
    def hardware(self) -> Hardware:
        """With --tp-comm-overlap all of tensor-parallel communication is taken to hide, which favours Megatron."""
        return replace(H100, tp_overlap=1.0) if self.tp_comm_overlap else H100

    @property
    def refused(self) -> dict[str, "Megatron"]:
        """What --wlb refuses of it, and the run without that."""
        without = {"--tp-comm-overlap": self._replace(tp_comm_overlap=False)} if self.tp_comm_overlap else {}
        if self.dynamic:
            without[self.dynamic] = self._replace(dynamic="")
        elif self.micro_batch_size > 1:
            without[f"--micro-batch-size {self.micro_batch_size}"] = self._replace(micro_batch_size=1)
        return without

    def simulate(self, job: Job, lengths: Sequence[np.ndarray]) -> SimulatedStep:
        """A step of windows with these documents, so many of them a micro-batch, or all of them as one pool."""
        if self.dynamic:
            pool = np.concatenate(lengths)
            return simulate_dynamic(job, pool, self.rank_tokens, packs=self.packs, hardware=self.hardware)
        shards, size = shard_step(job, lengths), self.micro_batch_size
        if size > 1:
            if len(shards[0]) % size:
                raise ValueError(
                    f"--micro-batch-size {size} does not divide the {len(shards[0])} windows of a data-parallel rank; "
                    "change it, or --global-batch-size"
                )
            shards = [[_joined(row[i : i + size]) for i in range(0, len(row), size)] for row in shards]
        return simulate_step(job, shards, self.hardware)


def _joined(plans: Sequence[ShardPlan]) -> ShardPlan:
    """Windows that run at once, each sharded by itself."""
    first = np.cumsum([0, *(len(plan.lengths) for plan in plans)])

    def calls(rank: int) -> tuple[np.ndarray, ...]:
        moved = [[call.copy() for call in plan.shards[rank].calls] for plan in plans]
        for of_plan, begin in zip(moved, first, strict=False):
            for call in of_plan:
                call["document"] += begin
        return tuple(np.concatenate(of_all) for of_all in zip(*moved, strict=True))

    shards = tuple(Shard(calls=calls(rank)) for rank in range(len(plans[0].shards)))
    return replace(plans[0], lengths=np.concatenate([plan.lengths for plan in plans]), shards=shards)


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
    megatron: Megatron
    left_out: list[str]
    """What an estimate on request is without."""
    launch: str | None
    """The file that the flags come from."""
    notes: list[str]
    """What the flags did not say, and what of them is not simulated: sentences."""
    make: Callable[..., Job]
    """The job of the flags, but for what it is given. Raises ValueError where memory has no room for that."""
    needs_dispatcher: bool = False
    """The run's dispatcher of tokens to experts is one that --wlb refuses."""
    layouts: Sequence[Job] = ()
    """The job in other layouts of the same GPUs, where the number of micro-batches is free."""
    tried: Sequence[Prediction] = ()
    """What other numbers of micro-batches would bring."""

    @property
    def other(self) -> Job | None:
        """The job with the other of Algorithm 1 and adaptive packing and a micro-batch for every window, if it fits."""
        if not isinstance(self.job.packing, WlbPacking | AdaptivePacking):
            return None
        packing = AdaptivePacking() if isinstance(self.job.packing, WlbPacking) else WlbPacking()
        with contextlib.suppress(ValueError):
            return self.make(packing=packing, num_micro_batches=self.job.global_batch_size)
        return None

    @property
    def others(self) -> dict[str, Job]:
        """The job with a flag that the run does not have, by that flag: the other policy, gradients of K and V in the
        model's dtype, fewer layers on the last stage where memory allows that."""
        job, found = self.job, {}
        if self.other is not None:
            found[flag_with_value("packing", self.other.packing.name)] = self.other
        if job.parallel.cp > 1 and job.cp_gradient_bytes > job.bytes_per_value:
            found[flag_with_value("cp_gradients", "model")] = replace(job, cp_gradients="model")
        relieved = layouts.relieved(job, self.data.stream(self.seed, job.context_length))
        budget = self.settings.memory_budget
        layout = relieved.parallel.split.pipeline_model_parallel_layout
        fits = budget is None or largest_max_tokens(relieved, budget * 2**30) >= job.max_tokens
        if layout is not None and relieved != job and fits:
            found[f"--pipeline-model-parallel-layout {quote(layout)}"] = relieved
        return found

    def by_windows(self) -> Job:
        """The job with a micro-batch for every window, and S_max as a flag says or by default, even if too long."""
        job = _by_windows(self.job, self.job.parallel.group_size)
        return job if isinstance(self.settings.max_tokens, int) else replace(job, max_tokens=default_max_tokens(job))

    def steps(self, job: Job, count: int) -> Iterator[PackedStep]:
        """`count` steps as `job`, a scheme of this one, would train them, after those that warm up."""
        packer = make_packer(self.data.stream(self.seed, job.context_length), job, fingerprint="")
        for _ in range(WARM_UP):
            packer.next()
        for _ in range(count):
            yield packer.next()


def setup_of(args: argparse.Namespace) -> Setup:
    """What flags describe. Raises ValueError, naming them, for what is missing, contradicts itself or is no dataset."""
    for_training(args)  # what is printed is a command that trains
    notes = list(args.remarks)
    job = job_of(args, notes)
    settings, data = (PlanSettings.from_args(args), RunSettings.from_args(args)), data_of(args, notes)
    stated = args.stated
    overlaps = stated.get("tp_comm_overlap") and job.parallel.tp > 1
    megatron = Megatron(
        "thd" if stated.get("sft") and job.parallel.cp > 1 else "plain",
        args.micro_batch_size,
        bool(overlaps),
        any(stated.get(name) for name in WARM_UP_OVERLAP),
    )
    dynamic = next((flag for name, flag in DYNAMIC.items() if stated.get(name)), "")
    if dynamic and job.parallel.pp > 1:
        notes.append(f"{dynamic} is not simulated with a pipeline: Megatron here has a ring of all CP ranks.")
    elif dynamic:
        tokens = _rank_tokens(job, stated.get("max_seqlen_per_dp_cp_rank"), dynamic)
        megatron = megatron._replace(name="dynamic", dynamic=dynamic, rank_tokens=tokens)
    setup = Setup(
        job,
        *settings,
        data,
        args.seed,
        args.model,
        args.refused,
        args.ignored,
        megatron,
        args.left_out,
        args.launch,
        notes,
        partial(job_of, args, []),
        needs_dispatcher=args.needs_dispatcher,
    )
    return _with_best_count(setup, args)


def _rank_tokens(job: Job, given: Any, flag: str) -> int:
    """Tokens that a rank has room for. Raises ValueError where nothing is said, or a window has no room."""
    ranks = job.parallel.cp * job.parallel.dp
    if not isinstance(given, int | float) or given * ranks < job.context_length:
        said = "no --max-seqlen-per-dp-cp-rank" if given is None else f"--max-seqlen-per-dp-cp-rank {short(str(given))}"
        raise ValueError(
            f"{flag} with {said}: {ranks} ranks must have room for a window of {job.context_length} tokens; give at "
            f"least {-(-job.context_length // ranks)}"
        )
    return int(given)


def _with_best_count(setup: Setup, args: argparse.Namespace) -> Setup:
    """With as many micro-batches as `--wlb-micro-batches auto` would choose."""
    if setup.settings.micro_batches != "auto" or not setup.job.packing.steady_tokens:
        return setup
    stream = partial(setup.data.stream, setup.seed, setup.job.context_length)
    known = setup.settings.memory_budget is not None
    best, tried = predictions(setup.job, setup.make, stream, memory_known=known)
    if not known:
        setup.notes.append("Micro-batches of several windows are tried where --wlb-memory-budget says what fits.")
    return setup._replace(job=best, tried=tried, layouts=tuple(layouts.jobs(setup, args)))


def flags_of(setup: Setup) -> str:
    """What a launch line needs for a run with --wlb, beside what it has."""
    job = setup.job
    settings = replace(setup.settings, max_tokens=None)
    if job.packing.steady_tokens:  # else it is what `settings` has
        settings = replace(settings, micro_batches=job.num_micro_batches)
    flags = ["--wlb --calculate-per-token-loss --attention-dropout 0 --micro-batch-size 1"]
    flags += [f"--global-batch-size {job.global_batch_size}", flag_with_value("packing", job.packing.name)]
    for each in (settings, job.packing, setup.run_settings):
        values = ((f, getattr(each, f.name)) for f in fields(each))  # type: ignore[arg-type]
        flags += [flag_with_value(f.name, value) for f, value in values if value != f.default]
    flags.append(flag_with_value("max_tokens", job.max_tokens))
    if setup.needs_dispatcher:
        flags.append("--moe-token-dispatcher-type alltoall")
    return " ".join(flags) + " --eval-iters 0" * (not setup.data.has_validation)


def _by_windows(job: Job, group_size: int | None) -> Job:
    """The job with a micro-batch for every window, in groups of such a size if so many can be interleaved in them."""
    parallel, windows = job.parallel, job.global_batch_size
    each = windows // parallel.dp
    if parallel.vpp == 1 or (group_size and each not in nearest_counts(each, parallel.pp, group_size)):
        group_size = None
    return replace(job, num_micro_batches=windows, parallel=replace(parallel, group_size=group_size))


def as_megatron(job: Job) -> Job:
    """The job by Megatron's defaults: K and V travel in a ring (`--cp-comm-type p2p`), sequences are sharded whole,
    micro-batches are interleaved in groups of as many as stages."""
    return replace(
        _by_windows(job, job.parallel.group_size or job.parallel.pp),
        reorder=False,
        defer_weight_gradients=False,
        packing=OriginalPacking(),
        cp_sharding="per-sequence",
        cp_exchange="ring",
        hidden_transfers=False,
    )


def schemes(setup: Setup) -> dict[str, Job]:
    """Ways to train the same data, by name: `MEGATRON`, the paper's, and `Setup.job` as it is.

    Megatron shards over context-parallel ranks per sequence, or per document, where sequences come to it packed (THD),
    on ranks of its own where the flags have that (dynamic); the paper's scheme exchanges all at once.
    """
    job = setup.job
    wlb = job.packing if isinstance(job.packing, WlbPacking) else WlbPacking()
    plain = replace(as_megatron(setup.by_windows()), hidden_transfers=setup.megatron.hidden_transfers)
    paper = replace(plain, packing=wlb, cp_sharding="wlb", cp_exchange="all")
    has = {"plain": True, "thd": job.parallel.cp > 1, "dynamic": bool(setup.megatron.dynamic)}
    megatron = {name: replace(plain, cp_sharding=way) for name, way in MEGATRON.items() if has[name]}
    return megatron | {"paper": paper, "ours": job}
