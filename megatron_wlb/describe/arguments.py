"""Megatron's arguments that a job is described by, their flags and ranges."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, get_args

import msgspec
from msgspec import Meta

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


_Size = Annotated[int, Meta(ge=1, le=1 << 20)]
_Ranks = Annotated[int, Meta(ge=1, le=1 << 17)]
_Words = Annotated[int, Meta(ge=1, le=1 << 24)]
_Layers = Annotated[int, Meta(ge=1, le=1 << 12)]
_LayersOrNone = Annotated[int, Meta(ge=0, le=1 << 12)]


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronArguments:
    """The arguments of a job, by Megatron's names.

    None means Megatron's default, or a value that follows from other arguments.
    """

    num_layers: _Layers | None = None
    hidden_size: _Size | None = None
    num_attention_heads: _Size | None = None
    group_query_attention: bool = False
    num_query_groups: _Size | None = None
    kv_channels: _Size | None = None
    ffn_hidden_size: _Size | None = None
    swiglu: bool | None = None
    qk_layernorm: bool | None = None
    mtp_num_layers: _LayersOrNone | None = None
    vocab_size: _Words | None = None
    padded_vocab_size: _Words | None = None
    make_vocab_size_divisible_by: _Size = 128
    transformer_impl: str = "transformer_engine"
    window_size: tuple[int, int] | str | None = None
    window_attn_skip_freq: tuple[int, ...] | str | None = None
    tokenizer_type: str | None = None
    tokenizer_model: str | None = None
    attention_output_gate: bool = False
    hybrid_layer_pattern: str | None = None
    experimental_attention_variant: str | None = None
    linear_attention_freq: tuple[int, ...] | str | None = None
    linear_key_head_dim: _Size = 128
    linear_value_head_dim: _Size = 128
    linear_num_key_heads: _Size = 16
    linear_num_value_heads: _Size = 32
    mamba_num_heads: _Size | None = None
    mamba_head_dim: _Size = 64
    mamba_num_groups: _Size = 8
    mamba_state_dim: _Size = 128
    multi_latent_attention: bool = False
    q_lora_rank: _Size | None = None
    kv_lora_rank: _Size = 32
    qk_head_dim: _Size = 128
    qk_pos_emb_head_dim: _Size = 64
    v_head_dim: _Size = 128
    num_experts: _Size | None = None
    moe_router_topk: _Size = 2
    moe_ffn_hidden_size: _Size | None = None
    moe_shared_expert_intermediate_size: Annotated[int, Meta(ge=0, le=1 << 20)] | None = None
    moe_token_dispatcher_type: Annotated[str, Meta(pattern="^(allgather|alltoall|flex)$")] | None = None
    moe_flex_dispatcher_backend: str | None = None
    data_path: tuple[str, ...] | None = None
    train_data_path: tuple[str, ...] | None = None
    data_args_path: str | None = None
    per_split_data_args_path: str | None = None
    mock_data: bool = False
    split: str | None = None
    sft: bool = False
    sft_tokenizer_prompt_format: str = "nemotron-h-aligned"
    data_cache_path: str | None = None
    seed: Annotated[int, Meta(ge=0, le=1 << 62)] = 1234
    seq_length: Annotated[int, Meta(ge=1, le=1 << 26)] | None = None
    global_batch_size: _Size | None = None
    micro_batch_size: _Size = 1
    world_size: _Ranks | None = None
    tensor_model_parallel_size: _Ranks = 1
    context_parallel_size: _Ranks = 1
    pipeline_model_parallel_size: _Ranks = 1
    expert_model_parallel_size: _Ranks = 1
    expert_tensor_parallel_size: _Ranks | None = None
    sequence_parallel: bool = False
    virtual_pipeline_model_parallel_size: int | None = None
    num_virtual_stages_per_pipeline_rank: _Layers | None = None
    num_layers_per_virtual_pipeline_stage: _Layers | None = None
    microbatch_group_size_per_vp_stage: _Size | None = None
    account_for_embedding_in_pipeline_split: bool = False
    account_for_loss_in_pipeline_split: bool = False
    decoder_first_pipeline_num_layers: _LayersOrNone | None = None
    decoder_last_pipeline_num_layers: _LayersOrNone | None = None
    pipeline_model_parallel_layout: str | None = None
    use_tp_pp_dp_mapping: bool = False
    overlap_p2p_comm: bool = True
    overlap_moe_expert_parallel_comm: bool = False
    tp_comm_overlap: bool = False
    recompute_activations: bool = False
    recompute_granularity: Annotated[str, Meta(pattern="^(full|selective)$")] | None = None
    recompute_method: Annotated[str, Meta(pattern="^(uniform|block)$")] | None = None
    recompute_num_layers: Annotated[int, Meta(ge=0, le=1 << 20)] | None = None
    recompute_modules: tuple[str, ...] | None = None
    cpu_offloading_num_layers: _LayersOrNone = 0
    cuda_graph_impl: str | None = None
    enable_cuda_graph: bool = False
    external_cuda_graph: bool = False
    cuda_graph_modules: tuple[str, ...] | None = None
    cuda_graph_scope: tuple[str, ...] | None = None
    use_megatron_fsdp: bool = False
    use_torch_fsdp2: bool = False
    fine_grained_activation_offloading: bool = False
    optimizer: str = "adam"
    use_precision_aware_optimizer: bool = False
    use_distributed_optimizer: bool = False
    untie_embeddings_and_output_weights: bool = False
    hidden_dropout: float = 0.1
    fp8: str | None = None
    fp8_recipe: str = "delayed"
    fp8_dot_product_attention: bool = False
    fp4: str | None = None
    use_transformer_engine_op_fuser: bool = False

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
            if f.name in ("cuda_graph_modules", "cuda_graph_scope"):
                value = [getattr(each, "name", each) for each in value]  # upstream parses them to an enum
            try:
                value = msgspec.convert(value, f.type, strict=False)
            except msgspec.ValidationError as error:
                raise ValueError(f"{flag_of(f.name)} {short(value)}: {error}; give another value") from None
            values[f.name] = value
        return cls(**{name: value for name, value in values.items() if value is not None})


def _of_pattern(pattern: str) -> dict[str, Any]:
    """Return the arguments that stand for the layers and virtual stages of `--hybrid-layer-pattern`."""
    stages = pattern.split("|")
    layout = "|".join("t" * len(stage) for stage in stages)
    whole = {} if len(stages) == 1 else {"pipeline_model_parallel_layout": f"E{layout}L"}
    return whole | {"num_layers": sum(map(len, stages))}
