"""Builds the job of a training run from Megatron's arguments and the GPU."""

import importlib
import math
from argparse import Namespace
from dataclasses import replace

import torch

from megatron_wlb.adapter.sources.source import SplitData
from megatron_wlb.describe import alternatives, refusals
from megatron_wlb.describe.megatron import Description
from megatron_wlb.hardware.profile import FLOPS_PROFILE, GPUS, gpu_of
from megatron_wlb.job import Job
from megatron_wlb.packing.megatron import MegatronPacking
from megatron_wlb.plan.micro_batches import Prediction
from megatron_wlb.simulate.memory import DEVICE_SHARE


def check(args: Namespace) -> None:
    """Raise ValueError for flags that `--wlb` cannot serve, before upstream validates its own."""
    refusals.check(args)
    if (spec := getattr(args, "spec", None)) is not None:
        _check_spec(*spec, of_stack=bool(getattr(args, "hybrid_layer_pattern", None)))
    run = Description.of(args).without_memory()  # memory and the split of layers are checked later
    a = run.arguments
    windows = a.global_batch_size or max(1, (a.world_size or 1) // a.model_parallel_size)
    try:
        if (sizes := batch_sizes(args)) and run.settings.micro_batches != "auto":
            raise ValueError(
                "--wlb-micro-batches is one number, and --step-batch-size-schedule has several; leave it out"
            )
        for size in [n for _, n in sizes] or [windows]:
            job = run.job(global_batch_size=size)
            if size % job.parallel.dp:
                raise ValueError(
                    f"--global-batch-size is {size}, by which upstream counts samples on {job.parallel.dp} "
                    f"data-parallel ranks; give a multiple of {job.parallel.dp}"
                )
            if job.parallel.vpp > 1 and getattr(args, "multiple_validation_sets", False):
                raise ValueError(
                    "--multiple-validation-sets with virtual stages, whose data upstream takes for the sets; blend the "
                    "sets, or leave virtual stages out"
                )
    except ValueError as error:
        raise ValueError(f"--wlb: {error}") from error


def _check_spec(module: str, name: str = "", *, of_stack: bool = False) -> None:
    """Raise ValueError for a --spec that cannot be imported, or is no layer of a GPT or, `of_stack`, no hybrid stack;
    a function, which makes a layer alone, is called later."""
    from megatron.core.transformer.spec_utils import ModuleSpec

    from megatron_wlb.adapter.layers import check_layer, check_stack

    try:
        spec = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"--wlb: --spec {module} {name}: {error}; give a module on PYTHONPATH and its spec") from None
    if of_stack:
        check_stack(spec)
    elif isinstance(spec, ModuleSpec):
        check_layer(spec)


def described(args: Namespace) -> Description:
    """Return the run of validated arguments on this GPU. Raises ValueError if weights do not fit it."""
    profile = FLOPS_PROFILE.name
    if torch.cuda.is_available():
        nearest = "h100" if torch.cuda.get_device_capability() >= (9, 0) else "a100"
        profile = GPUS[gpu_of(torch.cuda.get_device_name()) or nearest]
    run = Description.of(args, profile=profile, bytes_per_value=args.params_dtype.itemsize)
    if sizes := batch_sizes(args):
        run = replace(run, arguments=replace(run.arguments, global_batch_size=max(n for _, n in sizes)))
    if run.budget is not None or args.wlb_frozen:  # of adapters alone, what is held is not known
        return run
    return replace(run, budget=_budget_bytes(run))


def best_job(args: Namespace, run: Description, data: SplitData) -> tuple[Job, list[Prediction]]:
    """Return the job for the training samples, and the predictions that `--wlb-micro-batches auto` compared, if any."""
    if batch_sizes(args):
        return run.job(), []
    return alternatives.best(run, run.packing, data.samples, first_sample=data.first_sample)


def jobs_by_step(args: Namespace, job: Job, step: int) -> list[tuple[int, Job]]:
    """Return (first step, job) from the running step on; several by `--step-batch-size-schedule`, as upstream counts.

    Each has a micro-batch for every window. Raises ValueError if one does not fit the layout.
    """
    if not (sizes := batch_sizes(args)):
        return [(step, job)]
    samples, jobs = args.consumed_train_samples, []
    for (_, windows), (end, _) in zip(sizes, [*sizes[1:], (math.inf, 0)], strict=True):
        if samples >= end:
            continue
        jobs.append((step, replace(job, global_batch_size=windows, num_micro_batches=windows)))
        if end < math.inf:
            steps = -(-(int(end) - samples) // windows)
            step, samples = step + steps, samples + steps * windows
    return jobs


def evaluation_job(job: Job, args: Namespace) -> Job:
    """Return the job of evaluation, sample by sample. Raises ValueError."""
    count = args.eval_global_batch_size
    if args.full_validation:  # for which upstream's micro-batches are of one window
        count //= args.wlb_eval_windows_per_micro_batch
    try:
        return replace(
            job,
            parallel=replace(job.parallel, group_size=args.microbatch_group_size_per_vp_stage),
            packing=MegatronPacking(),
            global_batch_size=count,
            num_micro_batches=count,
        )
    except ValueError as error:
        raise ValueError(f"evaluation (--eval-global-batch-size): {error}") from error


def _budget_bytes(run: Description) -> float | None:
    """Return memory for activations on this GPU, or None. Raises ValueError for none left."""
    if not torch.cuda.is_available():
        return None
    # Round to GiB: GPUs of one kind differ by MiB, and all ranks must plan alike.
    gib = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory >> 30
    free = run.without_memory()
    left = free.budget_bytes(free.job(), gib)
    if left is not None and left <= 0:
        raise ValueError(
            f"weights and optimizer take {DEVICE_SHARE * gib - left / 2**30:.1f} GiB, over {DEVICE_SHARE:.0%} of this "
            f"GPU's {gib}; use more tensor or pipeline parallelism or --use-distributed-optimizer, or give "
            "--wlb-memory-budget if you know better"
        )
    return left


def batch_sizes(args: Namespace) -> list[tuple[int, int]]:
    """(samples trained before, windows per step) of `--step-batch-size-schedule`; [] without. Raises ValueError."""
    if getattr(args, "step_batch_size_schedule", None) is None:
        return []
    calculator = importlib.import_module("megatron.core.num_microbatches_calculator")
    try:
        schedule: list[tuple[int, int]] = calculator.StepBatchsizeNumMicroBatchesCalculator(
            1, 1, False, 1, args.step_batch_size_schedule, args.seq_length
        ).schedule
    except (AssertionError, ValueError) as error:
        raise ValueError(f"--step-batch-size-schedule: {error}; give another, such as '0:512 100B:1024'") from error
    return schedule
