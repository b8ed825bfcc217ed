"""A training job by the flags of its launch line, how its steps are packed, placed and sharded: for all commands."""

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Any

import numpy as np

from megatron_wlb.adapter.arguments import add_wlb_arguments, config_from_args
from megatron_wlb.cli import launch
from megatron_wlb.cli.common import integer
from megatron_wlb.config import MAX_TOKENS, WlbConfig
from megatron_wlb.plan import native
from megatron_wlb.plan.memory import ActivationModel
from megatron_wlb.plan.sharding.exchange import head_groups
from megatron_wlb.plan.step import Layout, is_order_free, shard_step
from megatron_wlb.plan.types import ShardPlan
from megatron_wlb.plan.workload import ModelShape, load_profile
from megatron_wlb.simulate import MODELS, Hardware, Job, SimulatedStep

MAX_GPUS = 1 << 17
DEFAULT_MODEL = "llama2-7b"
"""Whose crossover length packing goes by where none and no model is given."""
DEFAULT_PROFILE = "h100-fa2"
DEFAULT_VOCABULARY = 32000
_BYTES_PER_VALUE = 2
"""bf16."""
_SHAPE = ("num_layers", "hidden_size", "num_attention_heads")
"""What describes a model that has no name; the rest has defaults."""
_NEEDED = {
    "data_path": "the prefix of a .bin/.idx dataset, or a blend",
    "seq_length": "the context window in tokens",
    "global_batch_size": "the micro-batches of a step over all data-parallel ranks",
}

StepShards = list[list[ShardPlan]]
"""Micro-batches of every data-parallel rank, in pipeline order."""


def add_job_arguments(parser: argparse.ArgumentParser, **defaults: Any) -> None:
    """Let a command take what a training run is launched with, as flags, as a launch line, and as a file with one.

    Names are those of training; the rest of a launch line is sorted out by `launch.accept`.
    """
    script = argparse.ArgumentParser(prog=parser.prog, add_help=False, allow_abbrev=False)
    for each in (parser, script):
        _add_flags(each)
        each.set_defaults(**defaults)
    parser.add_argument("--launch", metavar="FILE", help="a launch line or script with the flags; - for standard input")
    launch.accept(parser, script)


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the model alone; see `model_of`."""
    size = integer(1, 1 << 20)
    model = parser.add_argument_group("model", "a known one, or its sizes; sizes beside --model change it")
    model.add_argument("--model", choices=MODELS)
    model.add_argument("--num-layers", type=integer(1, 1 << 12), metavar="N")
    model.add_argument("--hidden-size", type=size, metavar="N")
    model.add_argument("--num-attention-heads", type=size, metavar="N")
    model.add_argument("--group-query-attention", action="store_true")
    model.add_argument("--num-query-groups", type=size, metavar="N", help="with --group-query-attention; default: 1")
    model.add_argument("--kv-channels", type=size, metavar="N", help="default: hidden size / attention heads")
    model.add_argument("--ffn-hidden-size", type=size, metavar="N", help="default: 4 x hidden size, or as for --swiglu")
    model.add_argument("--swiglu", action="store_true", help="a gated MLP")
    model.add_argument("--vocab-size", "--padded-vocab-size", type=integer(1, 1 << 24), metavar="N")


def _add_flags(parser: argparse.ArgumentParser) -> None:
    count = integer(1, 1 << 20)
    add_model_arguments(parser)
    data = parser.add_argument_group("data and steps")
    data.add_argument("--data-path", nargs="*", metavar="PREFIX", help=".idx, or a blend of them")
    data.add_argument("--train-data-path", nargs="*", metavar="PREFIX", help="likewise, not split")
    for name in ("data-args-path", "per-split-data-args-path"):
        data.add_argument(f"--{name}", metavar="FILE", help="with such a blend, as Megatron")
    data.add_argument("--split", metavar="a,b,c", help="as Megatron; default: 969,30,1")
    data.add_argument("--seed", type=integer(0, 1 << 62), default=1234, metavar="N", help="default: %(default)s")
    data.add_argument("--seq-length", type=integer(1, MAX_TOKENS), metavar="C", help="context window in tokens")
    data.add_argument("--global-batch-size", type=count, metavar="N", help="micro-batches a step")
    data.add_argument("--micro-batch-size", type=count, default=1, metavar="1")
    layout = parser.add_argument_group("layout")
    layout.add_argument("--num-gpus", type=integer(1, MAX_GPUS), metavar="N", help="default: one data-parallel rank")
    layout.add_argument("--nproc-per-node", "--nproc_per_node", metavar="N", help="torchrun's, as is --nnodes")
    layout.add_argument("--nnodes", metavar="N")
    for name in ("tensor-model", "context", "pipeline-model"):
        layout.add_argument(f"--{name}-parallel-size", type=integer(1, MAX_GPUS), metavar="N", help="default: 1")
    for name in ("num-virtual-stages-per-pipeline-rank", "num-layers-per-virtual-pipeline-stage"):
        layout.add_argument(f"--{name}", type=integer(1, 1 << 12), metavar="N")
    layout.add_argument("--microbatch-group-size-per-virtual-pipeline-stage", type=count, metavar="N")
    for name in ("embedding", "loss"):
        layout.add_argument(
            f"--account-for-{name}-in-pipeline-split", action="store_true", help="counts as a layer; both or none"
        )
    layout.add_argument("--recompute-granularity", choices=("full", "selective"))
    layout.add_argument("--recompute-method", choices=("uniform", "block"))
    layout.add_argument("--recompute-num-layers", type=count, metavar="N")
    layout.add_argument("--recompute-modules", nargs="*", metavar="NAME")
    layout.add_argument("--hidden-dropout", type=float, default=0.1, metavar="P", help="default: %(default)s")
    for name in launch.NOT_SIMULATED:
        parser.add_argument(f"--{name}", nargs="*", help=argparse.SUPPRESS)
    for name in launch.LOW_PRECISION:
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    add_wlb_arguments(parser)


def require(args: argparse.Namespace, *names: str) -> None:
    """Raises ValueError for the first of these arguments that was not given."""
    for name in names:
        if not getattr(args, name):
            raise ValueError(f"no {flag_of(name)}; give {_NEEDED[name]}")


def flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def pasted(name: str, value: Any) -> str:
    """A setting of WlbConfig as a flag, to paste into a launch line."""
    flag = flag_of(f"wlb_{name}")
    if value is True:
        return flag
    return f"{flag} {','.join(map(str, value)) if isinstance(value, tuple) else value}"


def settle(args: argparse.Namespace, known: Mapping[str, Any], source: str) -> None:
    """Give arguments the values that `source` states; raises ValueError where one was given that is another."""
    for name, value in known.items():
        given = getattr(args, name)
        if given is not None and given != value:
            raise ValueError(
                f"{flag_of(name)} is {given}, and {source} was made with {value}; leave it out, or change it"
            )
        setattr(args, name, value)


def config_of(args: argparse.Namespace) -> WlbConfig:
    """The settings of --wlb; of the baseline `ilp`, which plans may have and training has not, those of `fixed`."""
    packing = "fixed" if args.wlb_packing == "ilp" else args.wlb_packing
    return config_from_args(argparse.Namespace(**vars(args) | {"wlb_packing": packing}))


def parallel_sizes(args: argparse.Namespace) -> tuple[int, int, int]:
    """TP, CP, PP."""
    names = ("tensor_model", "context", "pipeline_model")
    tp, cp, pp = (getattr(args, f"{name}_parallel_size") or 1 for name in names)
    return tp, cp, pp


def unit_of(args: argparse.Namespace) -> int:
    """Micro-batches are padded to a multiple of this many tokens: `adapter.arguments.unit_tokens` without Megatron."""
    rows, cp, _ = parallel_sizes(args)  # sequence parallelism is taken for granted
    if args.fp8_format:
        rows *= 32 if args.fp8_recipe == "mxfp8" else 16
    elif args.fp4_format:
        rows *= 128
    return cp * math.lcm(2, rows)


def job_of(args: argparse.Namespace, config: WlbConfig, notes: list[str]) -> Job:
    """The job of `add_job_arguments`; sentences on what was assumed are added to `notes`.

    Raises ValueError, naming the flags, where they contradict each other.
    """
    if args.micro_batch_size != 1:
        raise ValueError(
            f"--micro-batch-size is {args.micro_batch_size}; a micro-batch of --wlb is one packed sequence, give 1"
        )
    tp, cp, pp = parallel_sizes(args)
    model = model_of(args, notes, tp)
    dp = _data_parallel_size(args, notes)
    if args.account_for_embedding_in_pipeline_split != args.account_for_loss_in_pipeline_split:
        raise ValueError(
            "--account-for-embedding-in-pipeline-split and --account-for-loss-in-pipeline-split are simulated together "
            "only; give both or none"
        )
    edge_layers = int(args.account_for_loss_in_pipeline_split)
    if args.recompute_method == "block" or args.recompute_granularity == "selective":
        what = "every layer" if args.recompute_method == "block" else "nothing"
        notes.append(f"Time is that of recomputing {what}; memory counts what --recompute flags say.")
    return Job(
        model=model,
        tp=tp,
        cp=cp,
        pp=pp,
        vpp=_virtual_stages(args, model.num_layers + 2 * edge_layers, pp),
        dp=dp,
        group_size=args.microbatch_group_size_per_virtual_pipeline_stage,
        edge_layers=edge_layers,
        cp_head_groups=head_groups(config.cp_head_groups, model.heads_per_rank(tp)[1]),
        recompute=args.recompute_granularity == "full",
        hardware=Hardware(attention=load_profile(config.profile or DEFAULT_PROFILE)),
    )


def _data_parallel_size(args: argparse.Namespace, notes: list[str]) -> int:
    tp, cp, pp = parallel_sizes(args)
    world, ranks = launch.world_size(args), tp * cp * pp
    if world is None:
        world = ranks
        notes.append(
            f"Assumed: {ranks} GPUs, one data-parallel rank (no --num-gpus, nor torchrun's --nproc-per-node and "
            "--nnodes)."
        )
    if world % ranks or world > MAX_GPUS:
        raise ValueError(
            f"{world} GPUs are no multiple of tensor x context x pipeline parallel sizes {tp} x {cp} x {pp} = {ranks}, "
            f"or more than {MAX_GPUS}; change one of them"
        )
    return world // ranks


def _virtual_stages(args: argparse.Namespace, num_layers: int, pp: int) -> int:
    layers = args.num_layers_per_virtual_pipeline_stage
    if args.num_virtual_stages_per_pipeline_rank is not None or layers is None:
        return args.num_virtual_stages_per_pipeline_rank or 1
    stages, rest = divmod(num_layers, pp * layers)
    if rest or not stages:
        raise ValueError(
            f"--num-layers-per-virtual-pipeline-stage {layers} x {pp} pipeline stages do not divide {num_layers} "
            "layers; change one of them"
        )
    return stages


def model_of(args: argparse.Namespace, notes: list[str], tp: int = 1) -> ModelShape:
    """The model of `add_model_arguments`, with Megatron's defaults for sizes that are not given."""
    given = {f.name: getattr(args, f.name) for f in fields(ModelShape) if getattr(args, f.name, None) is not None}
    vocabulary = args.vocab_size
    if args.model is None:
        if vocabulary is None:
            vocabulary = DEFAULT_VOCABULARY
            notes.append(f"Assumed: a vocabulary of {vocabulary} (no --vocab-size).")
        given = _with_defaults(args, given, notes)
    if vocabulary is not None:
        given["padded_vocab_size"] = math.ceil(vocabulary / (128 * tp)) * 128 * tp
    model = ModelShape(**given) if args.model is None else replace(MODELS[args.model], **given)
    if model.num_attention_heads % model.num_query_groups:
        raise ValueError(
            f"--num-query-groups {model.num_query_groups} does not divide {model.num_attention_heads} attention heads; "
            "change one of them"
        )
    return model


def _with_defaults(args: argparse.Namespace, given: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    """Sizes of a model that has no name, all but its vocabulary."""
    missing = [flag_of(name) for name in _SHAPE if name not in given]
    if missing:
        raise ValueError(f"no {', '.join(missing)}: give the sizes of the model, or --model")
    hidden, heads = args.hidden_size, args.num_attention_heads
    if "kv_channels" not in given and hidden % heads:
        raise ValueError(
            f"--num-attention-heads {heads} does not divide --hidden-size {hidden}; change one, or give --kv-channels"
        )
    if args.num_query_groups is not None and not args.group_query_attention:
        del given["num_query_groups"]
        notes.append("--num-query-groups counts with --group-query-attention only, in Megatron as well as here.")
    gated_ffn = max(64, hidden * 8 // 3 // 64 * 64)
    return {
        "num_query_groups": 1 if args.group_query_attention else heads,
        "kv_channels": hidden // heads,
        "ffn_hidden_size": gated_ffn if args.swiglu else 4 * hidden,
        "gated_linear_unit": args.swiglu,
        **given,
    }


def crossover_of(args: argparse.Namespace, config: WlbConfig, notes: list[str]) -> int:
    """Crossover length in tokens, as training has it for the model that is described; else that of a 7B model."""
    if config.crossover is not None:
        return config.crossover
    profile = load_profile(config.profile or DEFAULT_PROFILE)
    if any(getattr(args, name) is not None for name in ("model", *_SHAPE)):
        return profile.crossover_for(model_of(args, notes, parallel_sizes(args)[0]))
    if profile.crossover_tokens is not None:
        return profile.crossover_tokens
    crossover = profile.crossover_for(MODELS[DEFAULT_MODEL])
    notes.append(
        f"Assumed: a crossover of {crossover} tokens, that of a 7B model ({DEFAULT_MODEL}); describe yours by --model "
        "or its sizes, or give --wlb-crossover."
    )
    return crossover


def memory_of(args: argparse.Namespace, job: Job) -> ActivationModel:
    return ActivationModel(
        model=job.model,
        dropout=args.hidden_dropout > 0,
        recompute_granularity=args.recompute_granularity,
        recompute_method=args.recompute_method,
        recompute_num_layers=args.recompute_num_layers,
        recompute_modules=frozenset(args.recompute_modules or ()),
        bytes_per_value=_BYTES_PER_VALUE,
        save_gathered_keys=args.wlb_save_gathered_kv,
        tp_size=job.tp,
        sequence_parallel=True,
        cp_size=job.cp,
        pp_size=job.pp,
        vp_size=job.vpp,
        group_size=job.group_size or 0,
    )


def per_rank(job: Job, count: int) -> int:
    """Micro-batches of a data-parallel rank; raises ValueError if ranks or pipeline cannot take as many as `count`."""
    if count % job.dp or not count:
        raise ValueError(
            f"{count} micro-batches a step (--global-batch-size) cannot be shared by {job.dp} data-parallel ranks; "
            f"give a multiple of {job.dp}, or another --num-gpus"
        )
    job.schedule(count // job.dp)  # raises what upstream refuses
    return count // job.dp


def max_tokens_of(args: argparse.Namespace, config: WlbConfig, job: Job | None, notes: list[str]) -> int:
    """S_max, as training has it. `job` is that of the flags, if the caller has it already."""
    fitting = None
    if config.memory_budget is not None:
        job = job or job_of(args, config, notes)
        budget, count = config.memory_budget * 2**30, per_rank(job, args.global_batch_size)
        fitting = memory_of(args, job).largest_max_tokens(budget, count, unit_of(args))
    elif config.max_tokens == "auto":
        config = replace(config, max_tokens=None)
        notes.append(
            "Assumed: an S_max of 1.25 windows; how much memory --wlb-max-tokens auto would find is known on the GPU, "
            "or by --wlb-memory-budget."
        )
    return config.max_tokens_for(args.seq_length, unit_of(args), fitting)


def layout_of(
    job: Job,
    *,
    crossover_tokens: int,
    cp_sharding: str,
    balance: bool,
    unit_tokens: int,
    free_order: bool = True,
    use_native: bool = native.AVAILABLE,
) -> Layout:
    """How a job's micro-batches are placed and sharded, as in training; of its first data-parallel rank."""
    kernel = job.hardware.attention.layer_kernel(
        job.model, tp_size=job.tp, bytes_per_value=_BYTES_PER_VALUE, head_groups=job.cp_head_groups
    )
    return Layout(
        dp_size=job.dp,
        dp_rank=0,
        cp_size=job.cp,
        pp_size=job.pp,
        vp_size=job.vpp,
        unit_tokens=unit_tokens,
        cp_sharding=cp_sharding,
        kernel=kernel,
        crossover_tokens=crossover_tokens,
        balance=balance,
        free_order=free_order,
        use_native=use_native,
    )


def shards_of(job: Job, layout: Layout, lengths: Sequence[np.ndarray]) -> StepShards:
    """`shard_step`, of as many micro-batches as ranks and pipeline can take; else raises ValueError."""
    per_rank(job, len(lengths))
    return shard_step(lengths, layout)


def prepare(args: argparse.Namespace, notes: list[str]) -> tuple[Job, Layout, dict[str, Any]]:
    """How the steps of a run run whose packing and crossover are known, and that as JSON types."""
    config = config_of(args)
    job = job_of(args, config, notes)
    layout = layout_of(
        job,
        crossover_tokens=args.wlb_crossover,
        cp_sharding=config.cp_sharding,
        balance=args.wlb_packing != "original",
        unit_tokens=unit_of(args),
        free_order=is_order_free(args.wlb_packing, config.cp_sharding),
        use_native=native.use(config.planner),
    )
    return job, layout, described(args, config, job)


def attention_of_ranks(step: SimulatedStep) -> np.ndarray:
    """Of every micro-batch and context-parallel rank, forward and backward of one layer in us: float64 [n, CP]."""
    return np.concatenate([sum(layer.attention for layer in p.layers) for p in step.passes])


def cp_imbalance(step: SimulatedStep) -> float:
    """Attention of the slowest context-parallel rank over the mean, over all micro-batches."""
    attention = attention_of_ranks(step)
    return float(attention.max(axis=1).sum() / attention.mean(axis=1).sum())


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


def described(args: argparse.Namespace, config: WlbConfig, job: Job) -> dict[str, Any]:
    """What is simulated, as JSON types."""
    names = ("tp", "cp", "pp", "vpp", "dp", "group_size", "edge_layers", "recompute")
    return {
        "model": {"name": args.model, **asdict(job.model)},
        "layout": {name: getattr(job, name) for name in names},
        "cp_sharding": config.cp_sharding,
        "cp_head_groups": job.cp_head_groups,
        "profile": config.profile or DEFAULT_PROFILE,
    }
