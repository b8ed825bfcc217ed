"""What is analysed: the job, the data and the settings that the flags describe, contradictions refused."""

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_wlb.adapter.arguments import config_from_args
from megatron_wlb.cli import job as jobs
from megatron_wlb.config import WlbConfig
from megatron_wlb.plan import native
from megatron_wlb.plan.dataset import read_tokens
from megatron_wlb.plan.memory import ActivationModel
from megatron_wlb.plan.stream import Source
from megatron_wlb.simulate import Job

DEFAULT_SPLIT = "969,30,1"
"""Upstream's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A job as it would be trained. Lengths count trained tokens."""

    job: Job
    config: WlbConfig
    """Of the run with --wlb."""
    described: dict[str, Any]
    """Job and sizes as JSON types."""
    sources: list[Source]
    seed: int
    num_micro_batches: int
    context_length: int
    unit_tokens: int
    max_tokens: int
    """S_max."""
    crossover_tokens: int
    use_native: bool
    memory: ActivationModel
    notes: list[str]
    """What the flags did not say, and what of them is not simulated: sentences."""
    empty_validation: bool
    """The validation split has no documents."""
    ignored: list[str]
    """Flags of the launch line that don't matter."""
    refused: list[str]
    """And those that training with --wlb refuses."""


def setup_of(args: argparse.Namespace) -> Setup:
    """Raises ValueError, naming the flags, for what is missing, contradicts itself or is no dataset."""
    data_path, is_split = _data_path(args)
    jobs.require(args, "seq_length")
    notes = list(args.remarks)
    config = config_from_args(args)
    job = jobs.job_of(args, config, notes)
    _settle_batch(args, job, notes)
    max_tokens, crossover = jobs.max_tokens_of(args, config, job, notes), jobs.crossover_of(args, config, [])
    if is_split and args.split is None:
        args.split = DEFAULT_SPLIT
        notes.append(f"Assumed: --split {DEFAULT_SPLIT}, Megatron's default.")
    split = args.split if is_split else "1"
    sources, prefixes = _sources(data_path, split)
    found = jobs.described(args, config, job)
    described = {"model": found["model"], **found["layout"], "num_gpus": job.num_gpus}
    described |= {"global_batch_size": args.global_batch_size, "seq_length": args.seq_length}
    described |= {"max_tokens": max_tokens, "crossover_tokens": crossover, "data_path": prefixes, "seed": args.seed}
    return Setup(
        job=job,
        config=config,
        described=described,
        sources=sources,
        seed=args.seed,
        num_micro_batches=args.global_batch_size,
        context_length=args.seq_length,
        unit_tokens=jobs.unit_of(args),
        max_tokens=max_tokens,
        crossover_tokens=crossover,
        use_native=native.use(config.planner),
        memory=jobs.memory_of(args, job),
        notes=notes,
        empty_validation=is_split and not _shares(split)[1],
        ignored=args.ignored,
        refused=args.refused,
    )


def _settle_batch(args: argparse.Namespace, job: Job, notes: list[str]) -> None:
    """Give the global batch size its default, and compare it and the window with what ranks can share."""
    unit = jobs.unit_of(args)
    if args.seq_length % unit:
        raise ValueError(
            f"--seq-length {args.seq_length} cannot be shared by {job.cp} context-parallel ranks, which hold two "
            f"chunks each, and {job.tp} tensor-parallel ones; give a multiple of {unit}"
        )
    if args.global_batch_size is None:
        args.global_batch_size = job.pp * job.dp
        notes.append(f"Assumed: {args.global_batch_size} micro-batches a step, PP x DP (no --global-batch-size).")
    jobs.per_rank(job, args.global_batch_size)


def _data_path(args: argparse.Namespace) -> tuple[list[str], bool]:
    """The words of the training blend, and whether --split divides it: upstream's get_blend_and_blend_per_split."""
    if not args.data_path:
        if args.data_args_path is not None:
            return Path(args.data_args_path).read_text(encoding="utf-8").split(), True
        if args.per_split_data_args_path is not None:
            return _training_blend(args.per_split_data_args_path), False
        if args.train_data_path:
            return args.train_data_path, False
    jobs.require(args, "data_path")
    return args.data_path, True


def _training_blend(path: str) -> list[str]:
    try:
        blend = json.loads(Path(path).read_text(encoding="utf-8"))["train"]
        return blend.split() if isinstance(blend, str) else [str(word) for word in blend]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"--per-split-data-args-path {path} holds no training blend ({error!r}); give JSON such as "
            '{"train": ["PREFIX"], "valid": ["PREFIX"], "test": ["PREFIX"]}'
        ) from error


def _sources(data_path: Sequence[str], split: str) -> tuple[list[Source], list[str]]:
    """The training split of every dataset of a blend, and their prefixes."""
    prefixes, weights = _blend(data_path)
    share = _shares(split)[0]
    sources = []
    for i, prefix in enumerate(prefixes):
        tokens = read_tokens(prefix)
        pairs = np.maximum(tokens[: round(share * len(tokens))] - 1, 0)
        if not pairs.any():
            raise ValueError(
                f"{prefix} has no document of at least 2 tokens among the first {share:.3%} of {len(tokens)} (--split "
                f"{split}): there is nothing to train; give another split, or leave the dataset out"
            )
        sources.append(Source(pairs=pairs, weight=weights[i] if weights else float(pairs.sum())))
    return sources, prefixes


def _blend(data_path: Sequence[str]) -> tuple[list[str], list[float] | None]:
    """Prefixes and weights (None: by size), which upstream tells apart likewise."""
    try:
        weights = [float(text) for text in data_path[::2]]
    except ValueError:
        weights = []
    if not weights or len(data_path) % 2:
        return list(data_path), None
    if not all(math.isfinite(w) and w > 0 for w in weights):
        raise ValueError(f"--data-path {' '.join(data_path)}: weights must be over 0")
    return list(data_path[1::2]), weights


def _shares(split: str) -> tuple[float, float]:
    """Of the training and the validation split."""
    try:
        parts = [float(part) for part in split.replace("/", ",").split(",") if part.strip()]
    except ValueError:
        parts = []
    if not parts or not all(math.isfinite(p) and p >= 0 for p in parts) or not parts[0]:
        raise ValueError(f"--split {split}: give shares of training, validation and test, such as 969,30,1")
    return parts[0] / sum(parts), sum(parts[1:2]) / sum(parts)
