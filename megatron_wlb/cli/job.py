"""A training job by Megatron's flags, and its steps simulated, for the commands that predict times."""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from megatron_wlb.cli.plan import integer
from megatron_wlb.config import CP_SHARDINGS, MAX_TOKENS, WlbConfig
from megatron_wlb.plan import native
from megatron_wlb.plan.packer import PackedStep, Packer
from megatron_wlb.plan.sharding.select import rank_work
from megatron_wlb.plan.step import Layout, plan_step
from megatron_wlb.plan.types import DOCUMENT, Packing, ShardPlan
from megatron_wlb.plan.workload import load_profile
from megatron_wlb.simulate import MODELS, Hardware, Job, ModelShape

MAX_GPUS = 1 << 17
_KV_BYTES = 2
"""bf16."""

StepShards = list[list[ShardPlan]]
"""Micro-batches of every data-parallel rank, in pipeline order."""


def add_job_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what runs where: the model, its parallelism, and how sharding and costs go. Names are those of training."""
    size = integer(1, 1 << 20)
    model = parser.add_argument_group("model", "a known one, or its sizes; sizes beside --model change it")
    model.add_argument("--model", choices=MODELS)
    model.add_argument("--num-layers", type=integer(1, 1 << 12), metavar="N")
    model.add_argument("--hidden-size", type=size, metavar="N")
    model.add_argument("--num-attention-heads", type=size, metavar="N")
    model.add_argument("--num-query-groups", type=size, metavar="N", help="default: as many as attention heads")
    model.add_argument("--kv-channels", type=size, metavar="N", help="default: hidden size / attention heads")
    model.add_argument("--ffn-hidden-size", type=size, metavar="N", help="default: 4 x hidden size, or as for --swiglu")
    model.add_argument("--swiglu", action="store_true", help="a gated MLP")
    model.add_argument("--vocab-size", type=integer(1, 1 << 24), metavar="N")
    layout = parser.add_argument_group("layout")
    gpus = integer(1, MAX_GPUS)
    layout.add_argument("--world-size", type=gpus, metavar="N", help="GPUs; default: one data-parallel rank")
    for name in ("tensor-model", "context", "pipeline-model"):
        layout.add_argument(f"--{name}-parallel-size", type=gpus, default=1, metavar="N")
    chunks = layout.add_mutually_exclusive_group()
    chunks.add_argument("--num-virtual-stages-per-pipeline-rank", type=integer(1, 1 << 10), metavar="N")
    chunks.add_argument("--num-layers-per-virtual-pipeline-stage", type=integer(1, 1 << 10), metavar="N")
    layout.add_argument("--microbatch-group-size-per-virtual-pipeline-stage", type=integer(1, 1 << 20), metavar="N")
    for name in ("embedding", "loss"):
        layout.add_argument(
            f"--account-for-{name}-in-pipeline-split", action="store_true", help="counts as a layer; both or none"
        )
    layout.add_argument(
        "--recompute-granularity", choices=("full",), help="layers are computed again in backward; default: not"
    )
    costs = parser.add_argument_group("sharding and costs")
    costs.add_argument(
        "--wlb-cp-sharding", choices=CP_SHARDINGS, default=WlbConfig().cp_sharding, help="default: %(default)s"
    )
    costs.add_argument(
        "--wlb-cp-head-groups",
        type=integer(1, 1 << 10),
        default=WlbConfig().cp_head_groups,
        metavar="N",
        help="default: %(default)s",
    )
    costs.add_argument(
        "--profile",
        "--wlb-profile",
        default="h100-fa2",
        metavar="NAME|FILE",
        help="kernel times: of this device by `megatron-wlb profile`, or a shipped profile; default: %(default)s",
    )


def job_of(args: argparse.Namespace) -> Job:
    """The job of `add_job_arguments`. Raises ValueError, naming the flags, where they contradict each other."""
    model = _model(args)
    tp, cp, pp = (
        args.tensor_model_parallel_size,
        args.context_parallel_size,
        args.pipeline_model_parallel_size,
    )
    world = args.world_size or tp * cp * pp
    if world % (tp * cp * pp) or world > MAX_GPUS:
        raise ValueError(
            f"--world-size {world} must be a multiple of tensor x context x pipeline parallel sizes {tp} x {cp} x {pp} "
            f"= {tp * cp * pp}, and at most {MAX_GPUS}"
        )
    if args.account_for_embedding_in_pipeline_split != args.account_for_loss_in_pipeline_split:
        raise ValueError(
            "--account-for-embedding-in-pipeline-split and --account-for-loss-in-pipeline-split are simulated together "
            "only; give both or none"
        )
    vpp = args.num_virtual_stages_per_pipeline_rank or 1
    if args.num_layers_per_virtual_pipeline_stage is not None:
        vpp, rest = divmod(model.num_layers, pp * args.num_layers_per_virtual_pipeline_stage)
        if rest or not vpp:
            raise ValueError(
                f"--num-layers-per-virtual-pipeline-stage {args.num_layers_per_virtual_pipeline_stage} x {pp} pipeline "
                f"stages do not divide {model.num_layers} layers; change one of them"
            )
    return Job(
        model=model,
        tp=tp,
        cp=cp,
        pp=pp,
        vpp=vpp,
        dp=world // (tp * cp * pp),
        group_size=args.microbatch_group_size_per_virtual_pipeline_stage,
        edge_layers=int(args.account_for_loss_in_pipeline_split),
        cp_head_groups=args.wlb_cp_head_groups,
        recompute=args.recompute_granularity == "full",
        hardware=Hardware(attention=load_profile(args.profile)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Planning:
    """How the micro-batches of a step are placed and sharded, as in training."""

    job: Job
    crossover_tokens: int
    cp_sharding: str
    balance: bool
    """See `Layout`."""

    def __post_init__(self) -> None:
        if self.crossover_tokens < 1:
            raise ValueError(f"a crossover of {self.crossover_tokens} tokens; it must be at least 1")

    def step(self, number: int, lengths: Sequence[np.ndarray]) -> StepShards:
        """Place and shard the micro-batches of a step, given the lengths of their documents (int64 [n] each).

        Raises ValueError if the pipeline cannot run as many.
        """
        count, job = len(lengths), self.job
        if count % job.dp or not count:
            raise ValueError(
                f"{count} micro-batches a step cannot be shared by {job.dp} data-parallel ranks; --world-size must be "
                f"{job.num_gpus // job.dp} times a divisor of {count}"
            )
        job.schedule(count // job.dp)  # raises what upstream refuses
        bounds = np.cumsum([0, *map(len, lengths)])
        documents = np.zeros(bounds[-1], DOCUMENT)
        documents["index"] = np.arange(len(documents))
        documents["length"] = np.concatenate(lengths)
        packing = Packing(documents=documents, bounds=bounds)
        packed = PackedStep(step=number, packing=packing, original=packing, num_waiting=0, state={})
        model, profile = job.model, job.hardware.attention
        layout = Layout(
            dp_size=job.dp,
            dp_rank=0,
            cp_size=job.cp,
            pp_size=job.pp,
            vp_size=job.vpp,
            unit_tokens=job.cp * math.lcm(2, job.tp),
            cp_sharding=self.cp_sharding,
            kernel=profile.kernel(
                heads=model.num_attention_heads // job.tp,
                row_bytes=2 * max(1, model.num_query_groups // job.tp) * model.kv_channels * _KV_BYTES,
                head_groups=job.cp_head_groups,
            ),
            crossover_tokens=self.crossover_tokens,
            balance=self.balance,
            use_native=native.AVAILABLE,
        )
        packer = cast(Packer, _Replay(packed))
        plans = [plan_step(packer, replace(layout, dp_rank=rank)).micro_batches for rank in range(job.dp)]
        return [[micro_batch.shards for micro_batch in plan] for plan in plans]


@dataclass(frozen=True, slots=True)
class _Replay:
    """A packer for `plan_step` that has packed already."""

    packed: PackedStep

    def next(self) -> PackedStep:
        return self.packed


def cp_imbalance(job: Job, plan: StepShards) -> float:
    """Attention of the slowest context-parallel rank over the mean, over all micro-batches."""
    kernel = job.kernel(backward=False)
    work = np.array([rank_work(shards, kernel) for rank in plan for shards in rank])
    return float(work.max(axis=1).sum() / work.mean(axis=1).sum())


def described(args: argparse.Namespace, job: Job) -> dict[str, Any]:
    """What was simulated, as JSON types."""
    sizes = {name: getattr(job.model, name) for name in ModelShape.__dataclass_fields__}
    names = ("tp", "cp", "pp", "vpp", "dp", "group_size", "edge_layers", "recompute")
    layout = {name: getattr(job, name) for name in names}
    return {
        "model": {"name": args.model, **sizes},
        "layout": layout,
        "cp_sharding": args.wlb_cp_sharding,
        "cp_head_groups": job.cp_head_groups,
        "profile": args.profile,
    }


def _model(args: argparse.Namespace) -> ModelShape:
    """Megatron's defaults for sizes that are not given."""
    names = ("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "ffn_hidden_size")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if args.vocab_size is not None:
        multiple = 128 * args.tensor_model_parallel_size
        given["padded_vocab_size"] = -(-args.vocab_size // multiple) * multiple
    if args.model is not None:
        model = replace(MODELS[args.model], **given)
    else:
        needed = ("num_layers", "hidden_size", "num_attention_heads", "vocab_size")
        missing = [f"--{name.replace('_', '-')}" for name in needed if getattr(args, name) is None]
        if missing:
            raise ValueError(f"no {', '.join(missing)}: give the sizes of the model, or --model")
        hidden, heads = args.hidden_size, args.num_attention_heads
        if "kv_channels" not in given and hidden % heads:
            raise ValueError(
                f"--num-attention-heads {heads} does not divide --hidden-size {hidden}; change one, or give "
                "--kv-channels"
            )
        gated_ffn = max(64, hidden * 8 // 3 // 64 * 64)
        defaults = {
            "num_query_groups": heads,
            "kv_channels": hidden // heads,
            "ffn_hidden_size": gated_ffn if args.swiglu else 4 * hidden,
        }
        model = ModelShape(**(defaults | given), gated_linear_unit=args.swiglu)
    if model.num_attention_heads % model.num_query_groups:
        raise ValueError(
            f"--num-query-groups {model.num_query_groups} does not divide {model.num_attention_heads} attention heads; "
            "change one of them"
        )
    return model


def checked_lengths(values: Any, what: str, longest: int) -> np.ndarray:
    """Lengths of the documents of a micro-batch from JSON, int64 [n]. Raises ValueError beginning with `what`."""
    if not isinstance(values, list):
        raise ValueError(f"{what} is not a list but {str(values)[:40]}; give the lengths of its documents")
    for value in values:
        if type(value) is not int or not 1 <= value <= longest:  # bool is a subclass of int
            raise ValueError(f"{what} has a document of length {str(value)[:40]}; it must be from 1 to {longest}")
    if sum(values) > MAX_TOKENS:
        raise ValueError(f"{what} holds {sum(values)} tokens; it must be at most {MAX_TOKENS}")
    return np.array(values, np.int64)
