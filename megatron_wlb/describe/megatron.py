"""Translates Megatron's arguments into a `Job`, for training and commands."""

import ast
import contextlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, get_args

import msgspec

from megatron_wlb.describe.flags import PlanSettings
from megatron_wlb.describe.make import make_job
from megatron_wlb.job import MAX_TOKENS, NUM_TILES, Job, Parallel, Recompute
from megatron_wlb.model import (
    DELTA_NET,
    EXPERTS,
    FULL,
    MAMBA,
    MLP,
    WINDOWED,
    ModelShape,
    gated_delta_net,
    latent_sizes,
    mamba,
)
from megatron_wlb.pipeline.split import Split

SWITCHED_OFF = {
    "apply_rope_fusion": "no-rope-fusion",
    "overlap_p2p_comm": "no-overlap-p2p-communication",
}
"""Arguments that are on by default, and the flags that switch them off."""
FLAGS = {
    "fp4": "fp4-format",
    "fp8": "fp8-format",
    "microbatch_group_size_per_vp_stage": "microbatch-group-size-per-virtual-pipeline-stage",
    "overlap_p2p_comm_warmup_flush": "overlap-p2p-communication-warmup-flush",
    "world_size": "num-gpus",
}
"""Arguments whose flags have another name. `world_size` is set by the launcher."""

DELTA_NETS = ("gated_delta_net", "gdn")
"""Variants of attention whose cost is known."""
MOST_LAYERS = 1 << 12
TILE_ROWS = 16384
"""Rows of the largest tile over tensor-parallel ranks. As predicted, smaller ones start more kernels, and larger ones
take more memory for little."""


def short(value: Any, most: int = 40) -> str:
    text = str(value)
    return text if len(text) <= most else f"{text[: most - 3]}..."


def flag_of(name: str) -> str:
    """Return the flag of one of Megatron's arguments."""
    return f"--{(SWITCHED_OFF | FLAGS).get(name, name).replace('_', '-')}"


def _size(group: str, help: str = "", default: Any = None, least: int = 1, most: int = 1 << 20) -> Any:
    return field(default=default, metadata={"group": group, "help": help, "least": least, "most": most})


def _other(group: str, help: str = "", default: Any = None, choices: tuple[str, ...] = ()) -> Any:
    return field(default=default, metadata={"group": group, "help": help, "choices": choices})


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronArguments:
    """The arguments of a job, by Megatron's names.

    None means Megatron's default, or a value that follows from other arguments.
    """

    num_layers: int | None = _size("model", most=1 << 12)
    hidden_size: int | None = _size("model")
    num_attention_heads: int | None = _size("model")
    group_query_attention: bool = _other("model", default=False)
    num_query_groups: int | None = _size("model", "with --group-query-attention; default: 1")
    kv_channels: int | None = _size("model", "default: hidden size / attention heads")
    ffn_hidden_size: int | None = _size("model", "default: 4 x hidden size, or as for --swiglu")
    swiglu: bool | None = _other("model", "a gated MLP")
    qk_layernorm: bool | None = _other("model", "norms of Q and K, which count in memory")
    mtp_num_layers: int | None = _size("model", "for multi-token prediction", least=0, most=1 << 12)
    vocab_size: int | None = _size("model", most=1 << 24)
    padded_vocab_size: int | None = _size("model", most=1 << 24)
    make_vocab_size_divisible_by: int = _size("model", default=128)
    transformer_impl: str = _other("model", default="transformer_engine")
    window_size: tuple[int, int] | str | None = _other("model", "LEFT,0: keys that a query sees before its own")
    window_attn_skip_freq: tuple[int, ...] | str | None = _other(
        "model", "N: every Nth layer has no window; or a list such as ([1]*5+[0])*4, 1: a window"
    )
    tokenizer_type: str | None = _other("model", "where --vocab-size does not say how many tokens it has")
    tokenizer_model: str | None = _other("model", "a folder with tokenizer.json, or a known name")
    attention_output_gate: bool = _other("model", default=False)
    hybrid_layer_pattern: str | None = _other("linear layers", "of *, M, G and - or E; | divides stages")
    experimental_attention_variant: str | None = _other("linear layers", "gated_delta_net")
    linear_attention_freq: tuple[int, ...] | str | None = _other(
        "linear layers", "N: every Nth layer has attention; or a list such as ([1]*3+[0])*4, 0: attention"
    )
    linear_key_head_dim: int = _size("linear layers", default=128)
    linear_value_head_dim: int = _size("linear layers", default=128)
    linear_num_key_heads: int = _size("linear layers", default=16)
    linear_num_value_heads: int = _size("linear layers", default=32)
    mamba_num_heads: int | None = _size("linear layers", "default: 2 x hidden size / --mamba-head-dim")
    mamba_head_dim: int = _size("linear layers", default=64)
    mamba_num_groups: int = _size("linear layers", default=8)
    mamba_state_dim: int = _size("linear layers", default=128)
    multi_latent_attention: bool = _other("multi-latent attention", default=False)
    q_lora_rank: int | None = _size("multi-latent attention")
    kv_lora_rank: int = _size("multi-latent attention", default=32)
    qk_head_dim: int = _size("multi-latent attention", default=128)
    qk_pos_emb_head_dim: int = _size("multi-latent attention", default=64)
    v_head_dim: int = _size("multi-latent attention", default=128)
    num_experts: int | None = _size("mixture of experts")
    moe_router_topk: int = _size("mixture of experts", default=2)
    moe_ffn_hidden_size: int | None = _size("mixture of experts", "default: --ffn-hidden-size")
    moe_shared_expert_intermediate_size: int | None = _size("mixture of experts", "of all shared experts", least=0)
    moe_token_dispatcher_type: str | None = _other(
        "mixture of experts", "default: alltoall, as with --wlb", choices=("allgather", "alltoall", "flex")
    )
    data_path: tuple[str, ...] | None = _other("data and steps", ".idx, or a blend of them")
    train_data_path: tuple[str, ...] | None = _other("data and steps", ".idx, or a blend of them, not split")
    data_args_path: str | None = _other("data and steps", "a file with such a blend")
    per_split_data_args_path: str | None = _other("data and steps", "a file with blends by split")
    mock_data: bool = _other("data and steps", "upstream's, or documents of --wlb-mock-lengths", default=False)
    split: str | None = _other("data and steps", "default: 969,30,1")
    sft: bool = _other("data and steps", "the data are files of conversations, which are tokenized", default=False)
    sft_tokenizer_prompt_format: str = _other("data and steps", default="nemotron-h-aligned")
    data_cache_path: str | None = _other("data and steps", "where they lie tokenized; default: beside them")
    seed: int = _size("data and steps", default=1234, least=0, most=1 << 62)
    seq_length: int | None = _size("data and steps", "context window in tokens", most=1 << 26)
    global_batch_size: int | None = _size("data and steps", "context windows a step")
    micro_batch_size: int = _size("data and steps", "of the run without --wlb", default=1)
    world_size: int | None = _size("layout", "default: one data-parallel rank", most=1 << 17)
    tensor_model_parallel_size: int = _size("layout", default=1, most=1 << 17)
    context_parallel_size: int = _size("layout", default=1, most=1 << 17)
    pipeline_model_parallel_size: int = _size("layout", default=1, most=1 << 17)
    expert_model_parallel_size: int = _size("layout", default=1, most=1 << 17)
    expert_tensor_parallel_size: int | None = _size("layout", "default: TP", most=1 << 17)
    sequence_parallel: bool = _other("layout", default=False)
    virtual_pipeline_model_parallel_size: int | None = None
    num_virtual_stages_per_pipeline_rank: int | None = _size("layout", most=1 << 12)
    num_layers_per_virtual_pipeline_stage: int | None = _size("layout", most=1 << 12)
    microbatch_group_size_per_vp_stage: int | None = _size("layout", "default: about 1.5 times the stages with --wlb")
    account_for_embedding_in_pipeline_split: bool = _other("layout", default=False)
    account_for_loss_in_pipeline_split: bool = _other("layout", default=False)
    decoder_first_pipeline_num_layers: int | None = _size("layout", least=0, most=1 << 12)
    decoder_last_pipeline_num_layers: int | None = _size("layout", least=0, most=1 << 12)
    pipeline_model_parallel_layout: str | None = _other("layout", "such as Et*3|(tt|)*2L")
    use_tp_pp_dp_mapping: bool = _other("layout", "stages are neighbours, not data-parallel ranks", default=False)
    overlap_p2p_comm: bool = _other("layout", default=True)
    tp_comm_overlap: bool = _other("layout", default=False)
    recompute_activations: bool = _other("memory", "as --recompute-granularity selective", default=False)
    recompute_granularity: str | None = _other("memory", choices=("full", "selective"))
    recompute_method: str | None = _other("memory", choices=("uniform", "block"))
    recompute_num_layers: int | None = _size("memory", least=0)
    recompute_modules: tuple[str, ...] | None = _other("memory")
    cpu_offloading_num_layers: int = _size("memory", "layers of activations in host memory", 0, least=0, most=1 << 12)
    hidden_dropout: float = _other("memory", default=0.1)
    fp8: str | None = _other("precision", "of products; attention and the output layer stay in bf16")
    fp8_recipe: str = _other("precision", default="delayed")
    fp8_dot_product_attention: bool = _other("precision", "of Megatron; with --wlb attention is in bf16", default=False)
    fp4: str | None = _other("precision", "of products")
    use_transformer_engine_op_fuser: bool = _other("memory", default=False)

    @property
    def model_parallel_size(self) -> int:
        """GPUs of a data-parallel rank: they hold one copy of the model."""
        return self.tensor_model_parallel_size * self.context_parallel_size * self.pipeline_model_parallel_size

    @classmethod
    def of(cls, stated: Mapping[str, Any]) -> "MegatronArguments":
        """Select arguments from `stated`. Raises ValueError for a wrong type or range."""
        values = {}
        if pattern := stated.get("hybrid_layer_pattern"):
            stated = {**stated, **_of_pattern(str(pattern))}
        for f in fields(cls):
            value = stated.get(f.name)
            if value is None:
                continue
            if type(value) in (int, float) and str in (get_args(f.type) or (f.type,)):
                value = str(value)  # --split 1
            if isinstance(value, str) and "tuple[str, ...]" in str(f.type):
                value = value.split()
            try:
                value = msgspec.convert(value, f.type, strict=False)
            except msgspec.ValidationError as error:
                raise ValueError(f"{flag_of(f.name)} {short(value)}: {error}; give another value") from None
            least, most, choices = (f.metadata.get(key) for key in ("least", "most", "choices"))
            if least is not None and value is not None and not least <= value <= most:
                raise ValueError(f"{flag_of(f.name)} is {short(value)}; it must be from {least} to {most}")
            if choices and value not in (None, *choices):
                raise ValueError(f"{flag_of(f.name)} is {short(value)}; choose one of {', '.join(choices)}")
            values[f.name] = value
        return cls(**{name: value for name, value in values.items() if value is not None})


def _of_pattern(pattern: str) -> dict[str, Any]:
    """Return the arguments that stand for the layers and virtual stages of `--hybrid-layer-pattern`."""
    stages = pattern.split("|")
    layout = "|".join("t" * len(stage) for stage in stages)
    whole = {} if len(stages) == 1 else {"pipeline_model_parallel_layout": f"E{layout}L"}
    return whole | {"num_layers": sum(map(len, stages))}


def job_of(
    arguments: MegatronArguments, *, settings: PlanSettings, model: ModelShape | None = None, **given: Any
) -> Job:
    """Build the job of arguments; `given`, of `make_job`, takes precedence."""
    a, parallel = arguments, parallel_of(arguments)
    if a.seq_length is None:
        raise ValueError("no --seq-length; give the context window in tokens")
    if a.global_batch_size is None and "global_batch_size" not in given:
        raise ValueError("no --global-batch-size; give the context windows of tokens that a step trains")
    details: dict[str, Any] = {
        "model": model or model_of(a),
        "parallel": parallel,
        "context_length": a.seq_length,
        "global_batch_size": a.global_batch_size,
        "precision": precision_of(a),
        "moe_dispatcher": "flex" if a.moe_token_dispatcher_type == "flex" else "alltoall",
        "row_multiple": row_multiple(a.fp8, a.fp8_recipe, a.fp4),
        "hidden_dropout": a.hidden_dropout > 0,
        "overlap_transfers": parallel.vpp == 1 or a.overlap_p2p_comm,
        "recompute": recompute_of(a),
        "offloaded_layers": a.cpu_offloading_num_layers,
        "tp_tile_rows": tile_rows(a, parallel),
        "tp_overlap": tp_overlap(parallel.tp) if tile_rows(a, parallel) else 0.0,
    }
    return make_job(settings=settings, **details | given)


def model_of(a: MegatronArguments, base: ModelShape | None = None) -> ModelShape:
    """Return the model of arguments, or `base` with their sizes.

    Missing sizes are Megatron's defaults; a missing vocabulary has size 0. Raises ValueError for contradictory sizes.
    """
    names = ("num_layers", "hidden_size", "num_attention_heads")
    if missing := [flag_of(name) for name in names if base is None and getattr(a, name) is None]:
        raise ValueError(f"no {', '.join(missing)}: give the sizes of the model")
    kept = (*names, "kv_channels", "ffn_hidden_size", "num_query_groups", "qk_layernorm", "mtp_num_layers")
    sizes: dict[str, Any] = {name: getattr(a, name) for name in kept if getattr(a, name) is not None}
    if a.swiglu is not None:
        sizes["gated_linear_unit"] = a.swiglu
    if base is None:
        hidden, heads = sizes["hidden_size"], sizes["num_attention_heads"]
        if a.kv_channels is None and hidden % heads:
            raise ValueError(
                f"--num-attention-heads {heads} does not divide --hidden-size {hidden}; change one, or give "
                "--kv-channels"
            )
        sizes["num_query_groups"] = (a.num_query_groups or 1) if a.group_query_attention else heads
        sizes.setdefault("kv_channels", hidden // heads)
        sizes.setdefault("ffn_hidden_size", max(64, hidden * 8 // 3 // 64 * 64) if a.swiglu else 4 * hidden)
        sizes["gated_linear_unit"] = bool(a.swiglu)
    if a.multi_latent_attention:
        sizes |= latent_sizes(
            kv_lora_rank=a.kv_lora_rank,
            q_lora_rank=a.q_lora_rank,
            qk_head_dim=a.qk_head_dim,
            qk_pos_emb_head_dim=a.qk_pos_emb_head_dim,
            v_head_dim=a.v_head_dim,
        )
    vocabulary = a.padded_vocab_size or a.vocab_size
    if vocabulary is not None or base is None:
        multiple = a.make_vocab_size_divisible_by * a.tensor_model_parallel_size
        sizes["padded_vocab_size"] = a.padded_vocab_size or math.ceil((vocabulary or 0) / multiple) * multiple
    if (a.num_experts or 1) > 1:
        dense = sizes.get("ffn_hidden_size") or (base.ffn_hidden_size if base else 0)
        ffn = a.moe_ffn_hidden_size or dense
        sizes |= {"dense_ffn_hidden_size": dense} if a.hybrid_layer_pattern else {}
        sizes["ffn_hidden_size"] = a.moe_router_topk * ffn + (a.moe_shared_expert_intermediate_size or 0)
        sizes["moe_router_topk"] = a.moe_router_topk
    sizes |= _layers(a, sizes["num_layers"] if base is None else sizes.get("num_layers", base.num_layers))
    hidden = sizes.get("hidden_size") or (base.hidden_size if base else 0)
    if DELTA_NET in sizes["pattern"]:
        sizes["delta_net"] = gated_delta_net(
            key_heads=a.linear_num_key_heads,
            value_heads=a.linear_num_value_heads,
            key_dim=a.linear_key_head_dim,
            value_dim=a.linear_value_head_dim,
        )
    if MAMBA in sizes["pattern"]:
        heads = a.mamba_num_heads or 2 * hidden // a.mamba_head_dim
        groups, state = a.mamba_num_groups, a.mamba_state_dim
        sizes["mamba"] = mamba(heads=heads, head_dim=a.mamba_head_dim, groups=groups, state_dim=state)
    if a.attention_output_gate:
        sizes["output_gate"] = True
    model = replace(base, **sizes) if base is not None else ModelShape(**sizes)
    if model.num_attention_heads % model.num_query_groups:
        raise ValueError(
            f"--num-query-groups {model.num_query_groups} does not divide {model.num_attention_heads} attention heads; "
            "change one of them"
        )
    return model


def _window(given: tuple[int, int] | str | None) -> int | None:
    """Return the keys that a query sees before its own; None: all. Raises ValueError for anything else."""
    if given is None:
        return None
    sides = re.fullmatch(r"[\[(]?(-?\d{1,9}), ?-?\d{1,9}[\])]?", str(given))
    if not sides or not -1 <= (left := int(sides[1])) <= MAX_TOKENS:
        raise ValueError(f"--window-size is {short(given)}; give LEFT,0, with LEFT from -1 (no window) to {MAX_TOKENS}")
    return None if left < 0 else left


def _layers(a: MegatronArguments, count: int) -> dict[str, Any]:
    """Return the kinds of layers. Raises ValueError for those whose cost is not known."""
    kinds = [FULL] * count
    if a.hybrid_layer_pattern:
        kinds = list(a.hybrid_layer_pattern.replace("|", ""))
        if others := set(kinds) - {FULL, MAMBA, DELTA_NET, MLP, EXPERTS}:
            raise ValueError(
                f"--hybrid-layer-pattern has {min(others)}; its cost is not known, give of *, M, G, - and E"
            )
    elif a.experimental_attention_variant in DELTA_NETS:
        linear = _flags("linear_attention_freq", a.linear_attention_freq or "", count)
        kinds = [DELTA_NET if each else FULL for each in linear]
    window = _window(a.window_size)
    if window is not None:
        has = (
            [1] * count
            if a.window_attn_skip_freq is None
            else _flags("window_attn_skip_freq", a.window_attn_skip_freq, count)
        )
        kinds = [WINDOWED if kind == FULL and each else kind for kind, each in zip(kinds, has, strict=True)]
    pattern = "".join(kinds)
    # The shortest that is repeated.
    periods = range(1, count // 2 + 1)
    period = next((n for n in periods if (pattern[:n] * -(-count // n))[:count] == pattern), count)
    return {"window": window, "pattern": pattern[:period], "hybrid": bool(a.hybrid_layer_pattern)}


def _flags(name: str, given: tuple[int, ...] | str, count: int) -> list[int]:
    """Return 1 or 0 for every layer, by N or a list: every Nth has 0. Raises ValueError for anything else."""
    text = given if isinstance(given, str) else str(list(given))
    if text.isdecimal() and int(text):
        return [int((i + 1) % int(text) != 0) for i in range(count)]
    found: list[int] = []
    with contextlib.suppress(SyntaxError, TypeError, ValueError, RecursionError, MemoryError):
        found = _list_of(ast.parse(text, mode="eval").body)
    if len(found) < count:
        raise ValueError(
            f"{flag_of(name)} is {short(text)}; give N, or a list of 1 and 0 for each of {count} layers, such as "
            "([1]*5+[0])*4"
        )
    return found[:count]


def _list_of(node: ast.expr) -> list[int]:
    """Return the list of an expression such as [1] * 5 + [0], as Megatron evaluates it, up to `MOST_LAYERS`."""
    match node:
        case ast.List(elts=items) if all(isinstance(each, ast.Constant) and each.value in (0, 1) for each in items):
            return [int(isinstance(each, ast.Constant) and bool(each.value)) for each in items]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return (_list_of(left) + _list_of(right))[:MOST_LAYERS]
        case ast.BinOp(left=left, op=ast.Mult(), right=ast.Constant(value=int(times))):
            return (_list_of(left) * min(times, MOST_LAYERS))[:MOST_LAYERS]
    raise TypeError(ast.dump(node))


def parallel_of(a: MegatronArguments) -> Parallel:
    """Return the parallel layout. Raises ValueError if something does not divide."""
    tp, cp, pp = a.tensor_model_parallel_size, a.context_parallel_size, a.pipeline_model_parallel_size
    ranks = a.model_parallel_size
    world = a.world_size or ranks
    if world % ranks:
        raise ValueError(
            f"{world} GPUs are no multiple of tensor x context x pipeline parallel sizes {tp} x {cp} x {pp} = {ranks}; "
            "change one of them"
        )
    if a.expert_model_parallel_size > 1 and not a.num_experts:
        raise ValueError("--expert-model-parallel-size without --num-experts; give both or none")
    split = Split(**{f.name: getattr(a, f.name) for f in fields(Split)})
    return Parallel(
        tp=tp,
        cp=cp,
        pp=pp,
        vpp=_virtual_stages(a, split),
        dp=world // ranks,
        ep=a.expert_model_parallel_size,
        etp=a.expert_tensor_parallel_size if a.num_experts else None,
        sequence_parallel=a.sequence_parallel,
        group_size=a.microbatch_group_size_per_vp_stage,
        split=split,
        stages_before_dp=a.use_tp_pp_dp_mapping,
    )


def _virtual_stages(a: MegatronArguments, split: Split) -> int:
    pp, layers, stages = (
        a.pipeline_model_parallel_size,
        a.num_layers_per_virtual_pipeline_stage,
        split.num_virtual_stages,
    )
    given = a.virtual_pipeline_model_parallel_size or a.num_virtual_stages_per_pipeline_rank
    if given is not None or (layers is None and stages is None):
        return given or 1
    if stages is not None:
        if stages % pp:
            raise ValueError(
                f"--pipeline-model-parallel-layout {a.pipeline_model_parallel_layout} has {stages} virtual stages, no "
                f"multiple of {pp} pipeline stages; change one of them"
            )
        return stages // pp
    if split.has_ends:
        raise ValueError(
            "--num-layers-per-virtual-pipeline-stage with a number of layers of the first or last stage; give "
            "--num-virtual-stages-per-pipeline-rank"
        )
    assert layers is not None
    counted = (a.num_layers or 0) + split.edges
    stages, rest = divmod(counted, pp * layers)
    if rest or not stages:
        raise ValueError(
            f"--num-layers-per-virtual-pipeline-stage {layers} x {pp} pipeline stages do not divide {counted} layers; "
            "change one of them"
        )
    return stages


def recompute_of(a: MegatronArguments) -> Recompute:
    granularity = a.recompute_granularity or ("selective" if a.recompute_activations else None)
    modules = a.recompute_modules
    if modules is None:
        modules = ("core_attn",) if granularity == "selective" else ()
    return Recompute(
        granularity=granularity,
        method=a.recompute_method,
        num_layers=a.recompute_num_layers,
        modules=tuple(sorted(set(modules))),
    )


def precision_of(a: MegatronArguments) -> str:
    """Return the precision of a layer's products: bf16, the recipe of FP8, or nvfp4."""
    return "nvfp4" if a.fp4 else a.fp8_recipe if a.fp8 else "bf16"


def row_multiple(fp8: Any, fp8_recipe: Any, fp4: Any) -> int:
    """Return the row alignment of FP8 and FP4 kernels, as Megatron does."""
    if fp8:
        return 32 if fp8_recipe == "mxfp8" else 16
    return 128 if fp4 else 1


def has_linear_layers(a: Any) -> bool:
    """Whether layers have states that run along documents: gated delta nets, or those of a hybrid model."""
    return any(getattr(a, name, None) for name in ("experimental_attention_variant", "hybrid_layer_pattern"))


def has_user_buffers(a: Any) -> bool:
    """Whether `--tp-comm-overlap` has user buffers, and tiles, for the layers of these arguments."""
    return not (a.multi_latent_attention or a.use_transformer_engine_op_fuser or has_linear_layers(a))


def tile_rows(a: MegatronArguments, parallel: Parallel) -> int:
    """Rows of the largest tile of `--tp-comm-overlap`, at most a window; 0 without."""
    if not (a.tp_comm_overlap and has_user_buffers(a)) or parallel.sequence_ranks == 1 or a.seq_length is None:
        return 0
    unit = parallel.sequence_ranks * row_multiple(a.fp8, a.fp8_recipe, a.fp4) << NUM_TILES - 1
    return min(TILE_ROWS, a.seq_length // parallel.cp) // unit * unit


def tp_overlap(tp: int) -> float:
    """Share of communication that `--tp-comm-overlap` hides: all but the first part."""
    return 1 - 1 / tp
