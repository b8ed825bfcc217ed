"""Megatron's arguments that a job is described by, their flags and ranges."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, get_args

import msgspec

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
