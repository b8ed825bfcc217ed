"""The flags that describe a training job, for all commands, and the `Job` that they make."""

import argparse
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from megatron_wlb.cli import launch
from megatron_wlb.cli.common import integer, short
from megatron_wlb.describe.flags import add_wlb_arguments
from megatron_wlb.describe.make import make_job
from megatron_wlb.describe.settings import PlanSettings
from megatron_wlb.job import MAX_TOKENS, Job, Parallel, Recompute
from megatron_wlb.micro_batches import predictions
from megatron_wlb.model import MODELS, ModelShape, latent_sizes
from megatron_wlb.packing import from_args, without_effect
from megatron_wlb.pipeline.split import Split
from megatron_wlb.plan.stream import DocumentStream
from megatron_wlb.simulate.memory import H100_BYTES

MAX_GPUS = 1 << 17
DEFAULT_MODEL = "llama2-7b"
"""Packing goes by its crossover length where no model is described."""
DEFAULT_PROFILE = "h100-fa2"
DEFAULT_VOCABULARY = 32000
"""Where only layers are of interest."""
TOKENIZERS = {"GPT2BPETokenizer": 50257, "Llama2Tokenizer": 32000, "TikTokenizer": 131072}
"""Tokens by Megatron's --tokenizer-type, where that says."""
_NAMED = {"llama-?3": "llama3-8b", "llama-?2": "llama2-7b"}
"""Models by the names of their tokenizers."""
_SHAPE = ("num_layers", "hidden_size", "num_attention_heads")
"""Sizes that describe a model without a name; the others have defaults."""
_LATENT_DEFAULTS = {"kv_lora_rank": 32, "qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128}
"""Sizes of multi-latent attention where a run does not say."""
_NEEDED = {
    "data_path": "the prefix of a .bin/.idx dataset, or a blend",
    "seq_length": "the context window in tokens",
    "global_batch_size": "the context windows of tokens that a step trains",
}


def add_job_flags(parser: argparse.ArgumentParser, **defaults: Any) -> None:
    """Let a command take what a training run is launched with: as flags, as its command, or from its log.

    Names are those of training; `launch.accept` sorts out the rest.
    """
    script = argparse.ArgumentParser(prog=parser.prog, add_help=False, allow_abbrev=False)
    for each in (parser, script):
        _add_flags(each)
        each.set_defaults(**defaults)
    parser.add_argument(
        "--launch", metavar="FILE", help="the log of a run, or a file with its command; - for standard input"
    )
    parser.add_argument(
        "--approximate", action="store_true", help="estimate without what is not simulated, such as sliding windows"
    )
    launch.accept(parser, script)


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the model alone; `model_of` reads them."""
    size = integer(1, 1 << 20)
    model = parser.add_argument_group("model", "a known one, or its sizes; sizes beside --model change it")
    model.add_argument("--model", choices=MODELS)
    model.add_argument("--num-layers", type=integer(1, 1 << 12), metavar="N")
    model.add_argument("--hidden-size", type=size, metavar="N")
    model.add_argument("--num-attention-heads", type=size, metavar="N")
    model.add_argument("--group-query-attention", action="store_true")
    model.add_argument("--num-query-groups", type=size, metavar="N", help="with --group-query-attention; default: 1")
    model.add_argument("--kv-channels", type=size, metavar="N", help="default: hidden size / attention heads")
    latent = parser.add_argument_group("multi-latent attention")
    latent.add_argument("--multi-latent-attention", action="store_true")
    latent.add_argument("--q-lora-rank", type=size, metavar="N", help="default: none")
    for name, default in _LATENT_DEFAULTS.items():
        flag = f"--{name.replace('_', '-')}"
        latent.add_argument(flag, type=size, metavar="N", help=f"default: {default}")
    model.add_argument("--ffn-hidden-size", type=size, metavar="N", help="default: 4 x hidden size, or as for --swiglu")
    model.add_argument("--swiglu", action="store_true", help="a gated MLP")
    model.add_argument("--qk-layernorm", action="store_true", help="norms of Q and K, which count in memory")
    model.add_argument("--mtp-num-layers", type=integer(1, 1 << 12), metavar="N", help="for multi-token prediction")
    model.add_argument("--vocab-size", "--padded-vocab-size", type=integer(1, 1 << 24), metavar="N")


def _add_flags(parser: argparse.ArgumentParser) -> None:
    count = integer(1, 1 << 20)
    add_model_flags(parser)
    experts = parser.add_argument_group("mixture of experts", "in every layer")
    experts.add_argument("--num-experts", type=count, metavar="N")
    experts.add_argument("--moe-router-topk", type=count, default=2, metavar="N", help="default: %(default)s")
    experts.add_argument("--moe-ffn-hidden-size", type=count, metavar="N", help="default: --ffn-hidden-size")
    experts.add_argument("--moe-shared-expert-intermediate-size", type=count, metavar="N", help="of all shared experts")
    tokenizer = parser.add_argument_group("tokenizer", "where --vocab-size does not say how many tokens it has")
    tokenizer.add_argument("--tokenizer-type", metavar="TYPE")
    tokenizer.add_argument("--tokenizer-model", metavar="NAME", help="a folder with tokenizer.json, or a known name")
    tokenizer.add_argument("--make-vocab-size-divisible-by", type=count, default=128, metavar="N")
    data = parser.add_argument_group("data and steps")
    data.add_argument("--data-path", nargs="*", metavar="PREFIX", help=".idx, or a blend of them")
    data.add_argument("--train-data-path", nargs="*", metavar="PREFIX", help="likewise, not split")
    for name in ("data-args-path", "per-split-data-args-path"):
        data.add_argument(f"--{name}", metavar="FILE", help="with such a blend, as Megatron")
    data.add_argument("--split", metavar="a,b,c", help="as Megatron; default: 969,30,1")
    data.add_argument("--seed", type=integer(0, 1 << 62), default=1234, metavar="N", help="default: %(default)s")
    data.add_argument("--seq-length", type=integer(1, MAX_TOKENS), metavar="C", help="context window in tokens")
    data.add_argument("--global-batch-size", type=count, metavar="N", help="context windows a step")
    data.add_argument("--micro-batch-size", type=count, default=1, metavar="b", help="of the run without --wlb")
    layout = parser.add_argument_group("layout")
    layout.add_argument("--num-gpus", type=integer(1, MAX_GPUS), metavar="N", help="default: one data-parallel rank")
    layout.add_argument("--nproc-per-node", "--nproc_per_node", metavar="N", help="torchrun's, as is --nnodes")
    layout.add_argument("--nnodes", metavar="N")
    for name in ("tensor-model", "context", "pipeline-model", "expert-model"):
        layout.add_argument(f"--{name}-parallel-size", type=integer(1, MAX_GPUS), metavar="N", help="default: 1")
    layout.add_argument("--expert-tensor-parallel-size", type=integer(1, MAX_GPUS), metavar="N", help="default: TP")
    for name in ("num-virtual-stages-per-pipeline-rank", "num-layers-per-virtual-pipeline-stage"):
        layout.add_argument(f"--{name}", type=integer(1, 1 << 12), metavar="N")
    layout.add_argument(
        "--microbatch-group-size-per-virtual-pipeline-stage",
        type=count,
        metavar="N",
        help="default: about 1.5 times as many as stages with --wlb, as many as stages without",
    )
    for name in ("embedding", "loss"):
        layout.add_argument(f"--account-for-{name}-in-pipeline-split", action="store_true", help="counts as a layer")
    for name in ("first", "last"):
        layout.add_argument(f"--decoder-{name}-pipeline-num-layers", type=integer(0, 1 << 12), metavar="N")
    layout.add_argument("--pipeline-model-parallel-layout", metavar="LAYOUT", help="as Megatron, such as Et*3|(tt|)*2L")
    layout.add_argument("--recompute-activations", action="store_true", help="as --recompute-granularity selective")
    layout.add_argument("--recompute-granularity", choices=("full", "selective"))
    layout.add_argument("--recompute-method", choices=("uniform", "block"))
    layout.add_argument("--recompute-num-layers", type=count, metavar="N")
    layout.add_argument("--recompute-modules", nargs="*", metavar="NAME")
    layers = integer(0, 1 << 12)
    layout.add_argument(
        "--cpu-offloading-num-layers", type=layers, default=0, metavar="N", help="whose activations wait in host memory"
    )
    layout.add_argument("--hidden-dropout", type=float, default=0.1, metavar="P", help="default: %(default)s")
    for name in launch.NOT_SIMULATED:
        parser.add_argument(f"--{name}", nargs="*", help=argparse.SUPPRESS)
    for name in launch.LOW_PRECISION:
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    add_wlb_arguments(parser)


def require(args: argparse.Namespace, *names: str) -> None:
    """Raises ValueError for the first of these arguments that is missing."""
    for name in names:
        if not getattr(args, name):
            raise ValueError(f"no {_flag(name)}; give {_NEEDED[name]}")


def settle(args: argparse.Namespace, known: Mapping[str, Any], source: str) -> None:
    """Give arguments the values that `source` states; raises ValueError where a flag says another."""
    for name, value in known.items():
        present = getattr(args, name)
        if present not in (None, value):
            raise ValueError(
                f"{_flag(name)} is {present}, and {source} was made with {value}; leave it out, or change it"
            )
        setattr(args, name, value)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def job_of(args: argparse.Namespace, notes: list[str], **fixed: Any) -> Job:
    """The job that the flags of `add_job_flags` describe; sentences on what was assumed are added to `notes`.

    Args:
        args: parsed flags; `seq_length` is needed, `global_batch_size` is PP x DP where it is missing.
        notes: of the report.
        fixed: arguments of `make_job` that the caller knows better.

    Raises ValueError, naming the flags, where they contradict each other.
    """
    require(args, "seq_length")
    model = model_of(args, notes, args.tensor_model_parallel_size or 1)
    parallel = _parallel(args, model.num_layers, notes)
    if model.moe_router_topk:
        notes.append(
            "Experts get equally many tokens. The exchange of tokens takes no time here, and gradients and optimizer "
            f"are those of the {model.moe_router_topk} experts that a token goes to."
        )
    if args.recompute_method == "block" or _granularity(args) == "selective":
        what = "every layer" if args.recompute_method == "block" else "nothing"
        notes.append(f"Time is that of recomputing {what}; memory counts what --recompute flags say.")
    if args.global_batch_size is None:
        fixed["global_batch_size"] = count = parallel.pp * parallel.dp
        notes.append(f"Assumed: {count} context windows a step, PP x DP (no --global-batch-size).")
    return _make(args, notes, model, parallel, fixed)


def layout_known(args: argparse.Namespace) -> bool:
    """Whether flags say how many data-parallel ranks or pipeline stages there are, or that memory bounds S_max."""
    sizes = args.pipeline_model_parallel_size, args.wlb_memory_budget, launch.world_size(args)
    return any(size is not None for size in sizes)


def packing_job(args: argparse.Namespace, notes: list[str], **fixed: Any) -> Job:
    """The job as far as packing depends on it; `fixed` as for `job_of`.

    Where no flag says how many GPUs or pipeline stages there are, every micro-batch is taken to have a data-parallel
    rank of its own, which makes them alike; but where memory bounds S_max. Without a model it is `DEFAULT_MODEL`, for
    its crossover length. Raises ValueError as `job_of` does.
    """
    require(args, "seq_length", "global_batch_size")
    if args.wlb_memory_budget is not None:
        return job_of(args, notes, **fixed)
    tp, cp, _ = _sizes(args)
    if args.model is None and all(getattr(args, name) is None for name in _SHAPE):
        model, unnamed = MODELS[DEFAULT_MODEL], args.wlb_crossover is None
    else:
        model, unnamed = model_of(args, notes if args.wlb_crossover is None else [], tp), False
    if not layout_known(args):
        count = args.global_batch_size if args.wlb_micro_batches == "auto" else args.wlb_micro_batches
        parallel = Parallel(tp=tp, cp=cp, dp=count)
    else:
        parallel = _parallel(args, model.num_layers, notes)
    job = _make(args, notes, model, parallel, fixed)
    if unnamed:
        notes.append(
            f"Assumed: a crossover of {job.crossover_tokens} tokens, that of a 7B model ({DEFAULT_MODEL}); describe "
            "yours by --model or its sizes, or give --wlb-crossover."
        )
    return job


def with_best_count(args: argparse.Namespace, job: Job, stream: Callable[[], DocumentStream]) -> Job:
    """A `packing_job` with as many micro-batches as training would choose, as far as flags say what that depends on."""
    if args.wlb_micro_batches != "auto" or not layout_known(args):
        return job
    make = partial(packing_job, args, [], packing=job.packing)
    return predictions(job, make, stream, memory_known=args.wlb_memory_budget is not None)[0]


def _make(
    args: argparse.Namespace, notes: list[str], model: ModelShape, parallel: Parallel, fixed: dict[str, Any]
) -> Job:
    settings = PlanSettings.from_args(args)
    if settings.max_tokens == "auto" and settings.memory_budget is None:
        settings = replace(settings, max_tokens=None)
        notes.append(
            "Assumed: an S_max of 1.25 windows; how much memory --wlb-max-tokens auto would find is known on the GPU, "
            "or by --wlb-memory-budget."
        )
    if "packing" not in fixed:
        fixed = {"packing": from_args(args), **fixed}
        notes += (f"{said}: without effect." for said in without_effect(args))
    modules = args.recompute_modules
    rows = 1
    if args.fp8_format:
        rows = 32 if args.fp8_recipe == "mxfp8" else 16
    elif args.fp4_format:
        rows = 128
    details = {
        "global_batch_size": args.global_batch_size,
        "row_multiple": rows,
        "hidden_dropout": args.hidden_dropout > 0,
        # Without virtual stages logs have it off, and nothing depends on it.
        "hidden_transfers": parallel.vpp == 1
        or not any(args.stated.get(name) is value for name, value in launch.TRANSFER_WAITS),
        "offloaded_layers": args.cpu_offloading_num_layers,
        "recompute": Recompute(
            granularity=_granularity(args),
            method=args.recompute_method,
            num_layers=args.recompute_num_layers,
            modules=tuple(("core_attn",) if modules is None and _granularity(args) == "selective" else modules or ()),
        ),
    }
    return make_job(
        model=model,
        parallel=parallel,
        context_length=args.seq_length,
        settings=settings,
        default_profile=DEFAULT_PROFILE,
        device_bytes=H100_BYTES,
        **details | fixed,
    )


def _granularity(args: argparse.Namespace) -> str | None:
    return args.recompute_granularity or ("selective" if args.recompute_activations else None)


def _sizes(args: argparse.Namespace) -> tuple[int, int, int]:
    """TP, CP, PP."""
    names = ("tensor_model", "context", "pipeline_model")
    tp, cp, pp = (getattr(args, f"{name}_parallel_size") or 1 for name in names)
    return tp, cp, pp


def _parallel(args: argparse.Namespace, num_layers: int, notes: list[str]) -> Parallel:
    """The layout; sequence parallelism is taken for granted."""
    tp, cp, pp = _sizes(args)
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
    if (args.expert_model_parallel_size or 1) > 1 and not args.num_experts:
        raise ValueError("--expert-model-parallel-size without --num-experts; give both or none")
    split = Split.from_args(args)
    return Parallel(
        tp=tp,
        cp=cp,
        pp=pp,
        vpp=_virtual_stages(args, split, num_layers, pp),
        dp=world // ranks,
        ep=args.expert_model_parallel_size or 1,
        etp=args.expert_tensor_parallel_size,
        group_size=args.microbatch_group_size_per_virtual_pipeline_stage,
        split=split,
    )


def _virtual_stages(args: argparse.Namespace, split: Split, num_layers: int, pp: int) -> int:
    layers, stages = args.num_layers_per_virtual_pipeline_stage, split.num_virtual_stages
    if args.num_virtual_stages_per_pipeline_rank is not None or (layers is None and stages is None):
        return args.num_virtual_stages_per_pipeline_rank or 1
    if stages is not None:
        if stages % pp:
            raise ValueError(
                f"--pipeline-model-parallel-layout {args.pipeline_model_parallel_layout} has {stages} virtual stages, "
                f"no multiple of {pp} pipeline stages; change one of them"
            )
        return stages // pp
    if split.has_ends:
        raise ValueError(
            "--num-layers-per-virtual-pipeline-stage with a number of layers of the first or last stage; give "
            "--num-virtual-stages-per-pipeline-rank"
        )
    stages, rest = divmod(num_layers + split.edges, pp * layers)
    if rest or not stages:
        raise ValueError(
            f"--num-layers-per-virtual-pipeline-stage {layers} x {pp} pipeline stages do not divide "
            f"{num_layers + split.edges} layers; change one of them"
        )
    return stages


def model_of(args: argparse.Namespace, notes: list[str], tp: int = 1) -> ModelShape:
    """The model of `add_model_flags`, with Megatron's defaults for sizes that are missing; dense without experts."""
    sizes = {f.name: getattr(args, f.name) for f in fields(ModelShape) if getattr(args, f.name, None) is not None}
    sizes.pop("moe_router_topk", None)
    for name in ("kv_lora_rank", "q_lora_rank", "qk_pos_emb_head_dim", "v_head_dim"):
        sizes.pop(name, None)  # logs have them without latents, too
    if args.multi_latent_attention:
        given = {name: getattr(args, name) or default for name, default in _LATENT_DEFAULTS.items()}
        sizes |= latent_sizes(q_lora_rank=args.q_lora_rank, **given)
    vocabulary = args.vocab_size
    if args.model is None:
        sizes = _with_defaults(args, sizes, notes)
        vocabulary = vocabulary or _vocabulary(args, notes)
    if vocabulary is not None:
        multiple = getattr(args, "make_vocab_size_divisible_by", 128) * tp
        sizes["padded_vocab_size"] = math.ceil(vocabulary / multiple) * multiple
    model = ModelShape(**sizes) if args.model is None else replace(MODELS[args.model], **sizes)
    if (getattr(args, "num_experts", None) or 1) > 1:
        expert, topk = args.moe_ffn_hidden_size or model.ffn_hidden_size, args.moe_router_topk
        shared = args.moe_shared_expert_intermediate_size or 0
        model = replace(model, ffn_hidden_size=topk * expert + shared, moe_router_topk=topk)
    if model.num_attention_heads % model.num_query_groups:
        raise ValueError(
            f"--num-query-groups {model.num_query_groups} does not divide {model.num_attention_heads} attention heads; "
            "change one of them"
        )
    return model


def _vocabulary(args: argparse.Namespace, notes: list[str]) -> int:
    """Tokens of the tokenizer that the flags name. Raises ValueError where they do not tell."""
    if not hasattr(args, "tokenizer_type"):
        notes.append(f"Assumed: a vocabulary of {DEFAULT_VOCABULARY} (no --vocab-size).")
        return DEFAULT_VOCABULARY
    if args.tokenizer_type in TOKENIZERS:
        return TOKENIZERS[args.tokenizer_type]
    name = args.tokenizer_model or ""
    file = Path(name, "tokenizer.json")
    if name and file.is_file():
        return tokens_of(file)
    known = next((model for pattern, model in _NAMED.items() if re.search(pattern, name, re.IGNORECASE)), None)
    if known is None:
        named = f"; {short(name)} has no tokenizer.json here" if name else ""
        raise ValueError(f"the vocabulary is not known{named}; give --vocab-size")
    notes.append(f"Assumed: the vocabulary of {known}, by the name of the tokenizer.")
    return MODELS[known].padded_vocab_size


def tokens_of(file: Path) -> int:
    """Tokens of a tokenizer.json of Hugging Face. Raises ValueError for anything else."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        vocabulary = found["model"]["vocab"]
        ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
        return 1 + max([*map(int, ids), *(int(token["id"]) for token in found.get("added_tokens", []))])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is no tokenizer of Hugging Face ({error!r}); give --vocab-size") from error


def _with_defaults(args: argparse.Namespace, sizes: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    """Sizes of a model that has no name, all but its vocabulary."""
    missing = [_flag(name) for name in _SHAPE if name not in sizes]
    if missing:
        raise ValueError(f"no {', '.join(missing)}: give the sizes of the model, or --model")
    hidden, heads = args.hidden_size, args.num_attention_heads
    if "kv_channels" not in sizes and hidden % heads:
        raise ValueError(
            f"--num-attention-heads {heads} does not divide --hidden-size {hidden}; change one, or give --kv-channels"
        )
    if not args.group_query_attention and sizes.pop("num_query_groups", 1) > 1:  # logs have it always
        notes.append("--num-query-groups counts with --group-query-attention only, in Megatron as well as here.")
    gated_ffn = max(64, hidden * 8 // 3 // 64 * 64)
    return {
        "num_query_groups": 1 if args.group_query_attention else heads,
        "kv_channels": hidden // heads,
        "ffn_hidden_size": gated_ffn if args.swiglu else 4 * hidden,
        "gated_linear_unit": args.swiglu,
        **sizes,
    }
