"""What is analysed: the job, the data and the settings that the flags describe, contradictions refused."""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megatron_wlb.adapter.arguments import config_from_args
from megatron_wlb.cli import job as jobs
from megatron_wlb.cli.analyze import flags
from megatron_wlb.config import WlbConfig
from megatron_wlb.plan import native
from megatron_wlb.plan.dataset import read_tokens
from megatron_wlb.plan.memory import ActivationModel
from megatron_wlb.plan.step import Layout
from megatron_wlb.plan.stream import Source
from megatron_wlb.simulate import Job

DEFAULT_SPLIT = "969,30,1"
"""Upstream's."""
DEFAULT_VOCABULARY = 32000


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A job as it would be trained. Lengths count trained tokens."""

    job: Job
    config: WlbConfig
    """Of the run with --wlb."""
    profile: str
    sources: list[Source]
    prefixes: list[str]
    seed: int
    num_micro_batches: int
    context_length: int
    max_tokens: int
    """S_max."""
    crossover_tokens: int
    memory: ActivationModel
    assumptions: tuple[str, ...]
    """What the flags did not say."""
    ignored: tuple[str, ...]
    """Flags of the launch line that don't matter."""
    model_name: str | None

    @property
    def use_native(self) -> bool:
        return native.AVAILABLE and self.config.planner != "python"

    @property
    def unit_tokens(self) -> int:
        return self.job.cp * math.lcm(2, self.job.tp)

    def layout(self, *, cp_sharding: str, balance: bool) -> Layout:
        job, model = self.job, self.job.model
        return Layout(
            dp_size=job.dp,
            dp_rank=0,
            cp_size=job.cp,
            pp_size=job.pp,
            vp_size=job.vpp,
            unit_tokens=self.unit_tokens,
            cp_sharding=cp_sharding,
            kernel=job.hardware.attention.kernel(
                heads=model.num_attention_heads // job.tp,
                row_bytes=2 * max(1, model.num_query_groups // job.tp) * model.kv_channels * 2,  # K and V in bf16
                head_groups=job.cp_head_groups,
            ),
            crossover_tokens=self.crossover_tokens,
            balance=balance,
            use_native=self.use_native,
        )


def setup_of(args: argparse.Namespace) -> Setup:
    """Raises ValueError, naming the flags, for what is missing, contradicts itself or is no dataset."""
    for name in ("data_path", "seq_length"):
        if not getattr(args, name):
            raise ValueError(f"no --{name.replace('_', '-')}; give {_NEEDED[name]}")
    if args.micro_batch_size != 1:
        raise ValueError(
            f"--micro-batch-size is {args.micro_batch_size}; a micro-batch of --wlb is one packed sequence, give 1"
        )
    assumptions: list[str] = []
    config = config_from_args(args)
    job = _job(args, config, assumptions)
    unit, window = job.cp * math.lcm(2, job.tp), args.seq_length
    if window % unit:
        raise ValueError(
            f"--seq-length {window} cannot be shared by {job.cp} context-parallel ranks, which hold two chunks each, "
            f"and {job.tp} tensor-parallel ones; give a multiple of {unit}"
        )
    num_micro_batches = _global_batch(args, job, assumptions)
    memory = _memory(args, job)
    budget = config.memory_budget
    per_rank = num_micro_batches // job.dp
    fitting = memory.largest_max_tokens(budget * 2**30, per_rank, unit) if budget is not None else None
    max_tokens = config.max_tokens_for(window, unit, fitting)
    model = job.model
    crossover = config.crossover or job.hardware.attention.crossover_for(
        **{name: getattr(memory, name) for name in _SHAPE}, padded_vocab_size=model.padded_vocab_size
    )
    sources, prefixes = _sources(args.data_path, args.split, assumptions)
    return Setup(
        job=job,
        config=config,
        profile=config.profile or "h100-fa2",
        sources=sources,
        prefixes=prefixes,
        seed=args.seed,
        num_micro_batches=num_micro_batches,
        context_length=window,
        max_tokens=max_tokens,
        crossover_tokens=crossover,
        memory=memory,
        assumptions=tuple(assumptions),
        ignored=tuple(args.ignored),
        model_name=args.model,
    )


_NEEDED = {"data_path": "the prefix of a .bin/.idx dataset, or a blend", "seq_length": "the context window in tokens"}
_SHAPE = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "gated_linear_unit",
)


def _job(args: argparse.Namespace, config: WlbConfig, assumptions: list[str]) -> Job:
    edges = (args.account_for_embedding_in_pipeline_split, args.account_for_loss_in_pipeline_split)
    if edges[0] != edges[1]:
        raise ValueError(
            "--account-for-embedding-in-pipeline-split and --account-for-loss-in-pipeline-split are simulated together "
            "only; give both or none"
        )
    groups, vocabulary = args.num_query_groups, args.vocab_size
    if args.model is None:
        # Upstream looks at the number of groups only with the flag, and has one group then.
        groups = (groups or 1) if args.group_query_attention else None
        if vocabulary is None:
            vocabulary = DEFAULT_VOCABULARY
            assumptions.append(f"a vocabulary of {vocabulary} (no --vocab-size)")
    world = flags.world_size(args)
    tp, cp, pp = args.tensor_model_parallel_size, args.context_parallel_size, args.pipeline_model_parallel_size
    if world is None:
        assumptions.append(
            f"{tp * cp * pp} GPUs, one data-parallel rank (no --num-gpus, nor torchrun's --nproc-per-node and --nnodes)"
        )
    elif world % (tp * cp * pp):
        raise ValueError(
            f"{world} GPUs are no multiple of tensor x context x pipeline parallel sizes {tp} x {cp} x {pp} = "
            f"{tp * cp * pp}; change one of them"
        )
    stated = {
        **vars(args),
        "num_query_groups": groups,
        "vocab_size": vocabulary,
        "world_size": world,
        "profile": config.profile or "h100-fa2",
        "edge_layers": int(edges[0]),
    }
    job = jobs.job_of(argparse.Namespace(**stated))
    # As many as the attention of --wlb makes of the key heads of a rank.
    heads = max(1, job.model.num_query_groups // tp)
    groups = max(n for n in range(1, min(config.cp_head_groups, heads) + 1) if heads % n == 0)
    return replace(job, cp_head_groups=groups)


def _global_batch(args: argparse.Namespace, job: Job, assumptions: list[str]) -> int:
    """N; raises ValueError if data-parallel ranks or the pipeline cannot take as many."""
    count = args.global_batch_size
    if count is None:
        count = job.pp * job.dp
        assumptions.append(f"{count} micro-batches a step, PP x DP (no --global-batch-size)")
    if count % job.dp:
        raise ValueError(
            f"--global-batch-size {count} cannot be shared by {job.dp} data-parallel ranks; give a multiple of {job.dp}"
        )
    job.schedule(count // job.dp)  # raises what upstream refuses
    return int(count)


def _memory(args: argparse.Namespace, job: Job) -> ActivationModel:
    return ActivationModel(
        **{name: getattr(job.model, name) for name in _SHAPE},
        padded_vocab_size=job.model.padded_vocab_size,
        dropout=args.hidden_dropout > 0,
        recompute_layers=job.recompute,
        bytes_per_value=2,
        tp_size=job.tp,
        sequence_parallel=True,
        cp_size=job.cp,
        pp_size=job.pp,
        vp_size=job.vpp,
        group_size=job.group_size or 0,
    )


def _sources(data_path: Sequence[str], split: str | None, assumptions: list[str]) -> tuple[list[Source], list[str]]:
    """The training split of every dataset of a blend, and their prefixes."""
    prefixes, weights = _blend(data_path)
    if split is None:
        split = DEFAULT_SPLIT
        assumptions.append(f"--split {split}, Megatron's default")
    share = _training_share(split)
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
    if len(data_path) % 2 == 0:
        try:
            weights = [float(text) for text in data_path[::2]]
        except ValueError:
            return list(data_path), None
        if not all(math.isfinite(w) and w > 0 for w in weights):
            raise ValueError(f"--data-path {' '.join(data_path)}: weights must be over 0")
        return list(data_path[1::2]), weights
    return list(data_path), None


def _training_share(split: str) -> float:
    try:
        parts = [float(part) for part in split.replace("/", ",").split(",") if part.strip()]
    except ValueError:
        parts = []
    if not parts or not all(math.isfinite(p) and p >= 0 for p in parts) or not parts[0]:
        raise ValueError(f"--split {split}: give shares of training, validation and test, such as 969,30,1")
    return parts[0] / sum(parts)


def described(setup: Setup) -> dict[str, Any]:
    """The job as JSON types."""
    job, model = setup.job, setup.job.model
    return {
        "model": {"name": setup.model_name, **{name: getattr(model, name) for name in _SHAPE}}
        | {"padded_vocab_size": model.padded_vocab_size},
        **{
            name: getattr(job, name) for name in ("tp", "cp", "pp", "vpp", "dp", "num_gpus", "recompute", "edge_layers")
        },
        "global_batch_size": setup.num_micro_batches,
        "seq_length": setup.context_length,
        "max_tokens": setup.max_tokens,
        "crossover_tokens": setup.crossover_tokens,
        "data_path": setup.prefixes,
        "seed": setup.seed,
    }
