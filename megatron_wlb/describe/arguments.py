"""The table of Megatron's arguments: a row for each, which says how training with `--wlb` and the commands serve it.

Rules on several arguments are in `refusals`, `same` and `adapt`. A supported megatron-core whose parser has an
argument without a row fails `tests/adapter/test_script.py`.
"""

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Annotated, Any, NamedTuple, get_args

import msgspec
from msgspec import Meta

from megatron_wlb.layers import VARIANTS
from megatron_wlb.layers.part import ONE_SIZE
from megatron_wlb.settings import Count, message_of

SWITCHED_OFF = {
    "apply_rope_fusion": "no-rope-fusion",
    "create_attention_mask_in_dataloader": "no-create-attention-mask-in-dataloader",
    "masked_softmax_fusion": "no-masked-softmax-fusion",
    "overlap_p2p_comm": "no-overlap-p2p-communication",
}
"""Arguments that are on by default, and the flags that switch them off."""
FLAGS = {
    "fp4": "fp4-format",
    "fp8": "fp8-format",
    "logit_dtype": "output-logit-dtype",
    "microbatch_group_size_per_vp_stage": "microbatch-group-size-per-virtual-pipeline-stage",
    "overlap_p2p_comm_warmup_flush": "overlap-p2p-communication-warmup-flush",
    "world_size": "num-gpus",
}
"""Arguments whose flags have another name. `world_size` is set by the launcher."""


def flag_of(name: str) -> str:
    """Return the flag of one of Megatron's arguments."""
    return f"--{(SWITCHED_OFF | FLAGS).get(name, name).replace('_', '-')}"


class Read(NamedTuple):
    """Plans or predictions depend on it."""

    kind: Any


class Set(NamedTuple):
    """Training with `--wlb` sets it."""

    value: Any
    reason: str
    when: Callable[[Any], Any]
    """Of which values."""


class Off(NamedTuple):
    """Training with `--wlb` switches it off."""

    reason: str
    price: str = ""
    """The loss in results or speed; "" if none."""
    value: Any = False
    when: Callable[[Any], Any] = bool


class Refused(NamedTuple):
    """Training with `--wlb` refuses it."""

    reason: str
    """Continues the flag: reason; remedy. {} is the value."""
    when: Callable[[Any], Any] = bool
    unlike: str = ""
    """The feature of a run with it that cannot be simulated."""


class Differs(NamedTuple):
    """Steps with `--wlb` are not quite those without."""

    how: str
    when: Callable[[Any], Any] = bool


class Simulated(NamedTuple):
    """Affects the time of a step, and is simulated only with these values."""

    values: tuple[Any, ...]


class Mark(Enum):
    """Says of a row where it matters."""

    SET = "training with --wlb sets it, by a rule of `adapt`"
    LIST = "its flag takes several words"
    BESIDE = "writes, loads, serves or counts: beside the step, so a rehearsal does not take it from a log"
    TEXT = "its words are parsed, or name datasets, which are only read, so a rehearsal takes them from a log"
    DERIVED = "upstream sets it by others; a log has it even if it was not given"


SET, LIST, BESIDE, TEXT, DERIVED = Mark
Verdict = Read | Set | Off | Refused | Differs | Simulated | Mark


def _row(default: Any, *verdicts: Verdict) -> Any:
    """Give an argument that is read other verdicts, too."""
    return field(default=default, metadata={"verdicts": verdicts})


def _is(*values: Any) -> Callable[[Any], bool]:
    return lambda value: value in values


def _is_not(*values: Any) -> Callable[[Any], bool]:
    return lambda value: value not in values


def _sees_right(value: Any) -> bool:
    """Whether attention sees later tokens; --window-size may be text."""
    return bool(value) and str(value).strip("()[]").rpartition(",")[2].strip() != "0"


_UNSUPPORTED = Refused("is not supported; leave it out")
_OTHER_DATA = Refused("is not supported; pre-train on .bin/.idx datasets (--data-path)")
_FORMER = Refused("belongs to an older release; give --hybrid-layer-pattern")
_SCALES = Differs("scales of FP8 and FP4 are of other micro-batches, as with another --micro-batch-size")
_Ranks = Annotated[int, Meta(ge=1, le=1 << 17)]
_Words = Annotated[int, Meta(ge=1, le=1 << 24)]
_Layers = Annotated[int, Meta(ge=1, le=1 << 12)]
_LayersOrNone = Annotated[int, Meta(ge=0, le=1 << 12)]
_Dtype = Annotated[str, Meta(pattern=r"^(fp32|fp16|bf16|fp8|torch\.(float32|float16|bfloat16|uint8))$")]


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronArguments:
    """The arguments that a job is described by: rows that are read, with their types, ranges and defaults.

    None means Megatron's default, or a value that follows from other arguments.
    """

    num_layers: _Layers | None = None
    hidden_size: Count | None = None
    num_attention_heads: Count | None = None
    group_query_attention: bool = False
    num_query_groups: Count | None = None
    kv_channels: Count | None = None
    ffn_hidden_size: Count | None = None
    swiglu: bool | None = None
    qk_layernorm: bool | None = None
    mtp_num_layers: _LayersOrNone | None = None
    vocab_size: _Words | None = None
    padded_vocab_size: _Words | None = None
    make_vocab_size_divisible_by: Count = 128
    transformer_impl: str = "transformer_engine"
    window_size: tuple[int, int] | str | None = _row(
        None, Refused("is {}; causal attention has no keys to its right, give LEFT,0", _sees_right)
    )
    window_attn_skip_freq: tuple[int, ...] | str | None = None
    tokenizer_type: str | None = None
    tokenizer_model: str | None = None
    attention_output_gate: bool = False
    hybrid_layer_pattern: str | None = _row(
        None,
        Refused(
            "{} has latent or sparse attention (+, D) or MTP layers (/); give one of M, G, *, -, E and |",
            lambda value: set(value or "") & set("+D/"),
        ),
    )
    experimental_attention_variant: str | None = _row(
        None,
        Refused(
            "{} is not supported; give gated_delta_net",
            _is_not(None, *VARIANTS),
            unlike="another attention",
        ),
    )
    linear_attention_freq: tuple[int, ...] | str | None = None
    linear_key_head_dim: Count = 128
    linear_value_head_dim: Count = 128
    linear_num_key_heads: Count = 16
    linear_num_value_heads: Count = 32
    mamba_num_heads: Count | None = None
    mamba_head_dim: Count = 64
    mamba_num_groups: Count = 8
    mamba_state_dim: Count = 128
    multi_latent_attention: bool = False
    q_lora_rank: Count | None = None
    kv_lora_rank: Count = 32
    qk_head_dim: Count = 128
    qk_pos_emb_head_dim: Count = 64
    v_head_dim: Count = 128
    num_experts: Count | None = None
    moe_router_topk: Count = 2
    moe_router_num_groups: Count | None = None
    moe_router_group_topk: Count | None = None
    moe_ffn_hidden_size: Count | None = None
    moe_layer_freq: tuple[int, ...] | str | None = None
    moe_shared_expert_intermediate_size: Annotated[int, Meta(ge=0, le=1 << 20)] | None = None
    moe_token_dispatcher_type: Annotated[str, Meta(pattern="^(allgather|alltoall|flex)$")] | None = _row(None, SET)
    moe_flex_dispatcher_backend: str | None = None
    data_path: tuple[str, ...] | None = _row(None, TEXT)
    train_data_path: tuple[str, ...] | None = _row(None, TEXT)
    data_args_path: str | None = _row(None, TEXT)
    per_split_data_args_path: str | None = _row(None, TEXT)
    mock_data: bool = False
    split: str | None = _row(None, TEXT)
    sft: bool = False
    sft_tokenizer_prompt_format: str = "nemotron-h-aligned"
    data_cache_path: str | None = None
    seed: Annotated[int, Meta(ge=0, le=1 << 62)] = 1234
    seq_length: Annotated[int, Meta(ge=1, le=1 << 26)] | None = _row(
        None, Refused("is missing; give the context window", _is(None))
    )
    global_batch_size: Count | None = None
    micro_batch_size: Count = field(default=1, metadata={"verdicts": (SET,)})
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
    microbatch_group_size_per_vp_stage: Count | None = None
    account_for_embedding_in_pipeline_split: bool = False
    account_for_loss_in_pipeline_split: bool = False
    decoder_first_pipeline_num_layers: _LayersOrNone | None = None
    decoder_last_pipeline_num_layers: _LayersOrNone | None = None
    pipeline_model_parallel_layout: str | None = _row(None, TEXT)
    use_tp_pp_dp_mapping: bool = False
    overlap_p2p_comm: bool = True
    overlap_moe_expert_parallel_comm: bool = False
    tp_comm_overlap: bool = False
    recompute_activations: bool = False
    recompute_granularity: Annotated[str, Meta(pattern="^(full|selective)$")] | None = None
    recompute_method: Annotated[str, Meta(pattern="^(uniform|block)$")] | None = None
    recompute_num_layers: Annotated[int, Meta(ge=0, le=1 << 20)] | None = None
    recompute_modules: tuple[str, ...] | None = _row(None, TEXT)
    cpu_offloading_num_layers: _LayersOrNone = 0
    cuda_graph_impl: str | None = None
    enable_cuda_graph: bool = False
    external_cuda_graph: bool = False
    cuda_graph_modules: tuple[str, ...] | None = None
    cuda_graph_scope: tuple[str, ...] | None = None
    use_megatron_fsdp: bool = False
    use_torch_fsdp2: bool = _row(False, Simulated((False,)))
    fine_grained_activation_offloading: bool = _row(
        False,
        Off(
            "it keeps pools of one size each, and micro-batches vary in length", "offloaded tensors stay in GPU memory"
        ),
    )
    optimizer: str = "adam"
    use_precision_aware_optimizer: bool = False
    main_grads_dtype: _Dtype = "fp32"
    main_params_dtype: _Dtype = "fp32"
    exp_avg_dtype: _Dtype = "fp32"
    exp_avg_sq_dtype: _Dtype = "fp32"
    accumulate_allreduce_grads_in_fp32: bool = False
    grad_reduce_in_bf16: bool = False
    optimizer_cpu_offload: bool = _row(False, Simulated((False,)))
    optimizer_offload_fraction: Annotated[float, Meta(ge=0, le=1)] = 1.0
    use_distributed_optimizer: bool = False
    untie_embeddings_and_output_weights: bool = False
    hidden_dropout: float = _row(0.1, Differs("hidden dropout uses different random numbers", _is_not(0)))
    fp8: str | None = _row(None, _SCALES)
    fp8_recipe: str = "delayed"
    fp8_dot_product_attention: bool = _row(False, Off("packed attention is in bf16", "attention is not in FP8"))
    fp4: str | None = _row(None, _SCALES)
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
            if f.name.endswith("_dtype"):
                value = str(value)  # upstream parses them
            if f.name in ("cuda_graph_modules", "cuda_graph_scope"):
                value = [getattr(each, "name", each) for each in value]  # upstream parses them to an enum
            try:
                value = msgspec.convert(value, f.type, strict=False)
            except msgspec.ValidationError as error:
                raise ValueError(f"{message_of(error, value, flag_of(f.name))}; give another value") from None
            values[f.name] = value
        return cls(**{name: value for name, value in values.items() if value is not None})


def _of_pattern(pattern: str) -> dict[str, Any]:
    """Return the arguments that stand for the layers and virtual stages of `--hybrid-layer-pattern`."""
    stages = pattern.split("|")
    layout = "|".join("t" * len(stage) for stage in stages)
    whole = {} if len(stages) == 1 else {"pipeline_model_parallel_layout": f"E{layout}L"}
    return whole | {"num_layers": sum(map(len, stages))}


def _each(names: str, *verdicts: Verdict) -> dict[str, tuple[Verdict, ...]]:
    return dict.fromkeys(names.split(), verdicts)


_SAME = {
    "transformer configuration": """activation_func_clamp_value activation_offload_fraction add_bias_linear
    add_qkv_bias apply_query_key_layer_scaling apply_residual_connection_post_layernorm batch_invariant_backend
    batch_invariant_mode clone_scatter_output_in_embedding config_logger_dir cross_entropy_fusion_impl
    cross_entropy_loss_fusion cuda_graph_warmup_steps defer_embedding_wgrad_compute delay_offload_until_cuda_graph
    delay_wgrad_compute delta_offload_bytes_across_pp_ranks deterministic_mode disable_bf16_reduced_precision_matmul
    distribute_saved_activations dsa_indexer_head_dim dsa_indexer_k_norm_epsilon dsa_indexer_k_norm_fp32
    dsa_indexer_loss_coeff dsa_indexer_n_heads dsa_indexer_rope_interleaved dsa_indexer_rotate_activation
    dsa_indexer_scoring_relu dsa_indexer_skip_topk_offset dsa_indexer_topk dsa_indexer_topk_freq
    dsa_indexer_use_sparse_loss dsa_kernel_backend embedding_init_method_std ep_overlap_early_attn_memory_release
    fine_grained_offloading_max_inflight_offloads first_last_layers_bf16 flash_attention_version flash_decode
    fp32_residual_connection fp4_quantizer_factory fp4_recipe fp8_amax_compute_algo fp8_amax_history_len fp8_interval
    fp8_margin fp8_output_proj fp8_quantizer_factory fp8_wgrad fused_residual_rmsnorm gdp_cutedsl_kernel
    gdp_num_chunk_states_to_recompute gdp_num_householder glu_linear_offset gtp_remat_opt_in_modules+
    high_priority_a2a_comm_stream inference_disable_triton_nvls_kernels inference_fuse_tp_communication
    inference_grouped_gemm_backend inference_moe_disable_fused_quant_kernels inference_moe_token_dispatcher_type
    init_method_std init_model_with_meta_device kitchen_attention_backend layernorm_epsilon
    layernorm_zero_centered_gamma linear_conv_kernel_dim max_seqlen_per_dp_cp_rank mhc_init_gating_factor
    mhc_num_residual_streams mhc_recompute_layer_num mhc_sinkhorn_iterations min_offloaded_tensor_size
    mlp_chunks_for_prefill mlp_chunks_for_training moe_apply_probs_on_input moe_deepep_num_sms moe_enable_deepep
    moe_enable_routing_replay moe_expert_rank_capacity_factor moe_flex_dispatcher_num_sms moe_grouped_gemm
    moe_hybridep_num_blocks_permute moe_hybridep_num_blocks_unpermute moe_hybridep_num_sms
    moe_hybridep_num_sms_preprocessing moe_input_jitter_eps moe_layer_recompute moe_mlp_glu_interleave_size
    moe_ncclep_static_shape moe_ncclep_zero_copy moe_pad_experts_for_cuda_graph_inference moe_paged_stash
    moe_paged_stash_buffer_size_factor_cpu moe_paged_stash_buffer_size_factor_cuda moe_paged_stash_page_size
    moe_per_layer_logging moe_permute_fusion moe_permute_fusion_into_hybridep moe_router_bias_update_rate
    moe_router_dtype moe_router_enable_expert_bias moe_router_force_biased moe_router_force_load_balancing
    moe_router_fusion moe_router_padding_for_fp8 moe_router_padding_for_quantization moe_router_pre_softmax
    moe_router_quantile_balancing_ema moe_router_score_function moe_router_topk_scaling_factor moe_shared_expert_gate
    moe_shared_expert_glu_interleave_size moe_shared_expert_overlap moe_single_grouped_bias moe_single_grouped_weight
    moe_token_drop_policy moe_use_grouped_tensor moe_z_loss_coeff mrope_section+ mtp_detach_heads
    mtp_hybrid_override_pattern mtp_loss_scaling_factor mtp_standalone mtp_use_repeated_layer mup_attn_scale_power
    mup_base_head_dim mup_base_hidden_size mup_embedding_mult mup_output_mult mup_width_mult
    nccl_all_reduce_for_prefill normalization num_layers_at_end_in_bf16 num_layers_at_start_in_bf16
    overlap_dispatch_backward_with_experts_wgrad perform_initialization pipeline_model_parallel_comm_backend
    qk_clip_alpha qk_clip_threshold qk_l2_norm rotary_interleaved softmax_type symmetric_ar_type
    tp_comm_bootstrap_backend tp_comm_bulk_dgrad tp_comm_bulk_wgrad tp_comm_overlap_ag tp_comm_overlap_rs
    tp_comm_overlap_rs_dgrad tp_comm_split_ag tp_comm_split_rs use_cpu_initialization use_fused_weighted_squared_relu
    use_grouped_gemm_for_dense_mlp use_grouped_gemm_for_shared_expert use_mamba_mem_eff_path use_mup
    use_te_activation_func wgrad_deferral_limit""",
    "network size": """add_position_embedding max_position_embeddings no_rope_freq openai_gelu quick_geglu
    relative_attention_max_distance relative_attention_num_buckets rope_scaling_factor rotary_base rotary_percent
    rotary_seq_len_interpolation_factor squared_relu use_rope_scaling use_rotary_position_embeddings yarn_beta_fast
    yarn_beta_slow yarn_correction_range_round_to_int yarn_original_max_position_embeddings | bert_binary_head
    decoder_num_layers onnx_safe""",
    "regularization": """adam_beta1 adam_beta2 adam_eps apply_wd_to_qk_layernorm clip_grad lion_beta1 lion_beta2
    muon_coefficient_type muon_extra_scale_factor muon_fp32_matmul_prec muon_momentum muon_nesterov muon_num_ns_steps
    muon_scalar_optimizer muon_scale_mode muon_split_qkv muon_tp_mode muon_use_syrk sgd_momentum weight_decay |
    muon_use_nesterov no_weight_decay_cond_type""",
    "profiling": """| memory_snapshot_path nvtx_ranges profile profile_ranks+ profile_step_end profile_step_start
    pytorch_profiler_collect_callstack pytorch_profiler_collect_chakra pytorch_profiler_collect_shapes
    record_memory_history record_shapes use_pytorch_profiler""",
    "training": """apply_rope_fusion bias_dropout_fusion bias_gelu_fusion bias_swiglu_fusion check_for_large_grads
    empty_unused_memory_level gradient_accumulation_fusion manual_gc manual_gc_interval no_persist_layer_norm
    optimizer_cuda_graph overlap_cpu_optimizer_d2h_h2d pin_cpu_grads pin_cpu_params
    rope_type tp_comm_overlap_cfg use_flash_attn use_torch_optimizer_for_cpu_offload | batch_size
    check_for_nan_in_loss_and_grad check_weight_hash_across_dp_replicas_interval checkpoint_activations
    decrease_batch_size_if_needed deprecated_use_mcore_models dump_param_to_param_group_map exit_duration_in_mins
    exit_interval exit_signal exit_signal_handler exit_signal_handler_for_dataloader exit_signal_handler_for_training
    gpu_sniff_test_interval iterations_to_skip+ manual_gc_eval train_iters train_samples train_sync_interval
    use_legacy_models""",
    "rl": """| grpo_clamp_eps_lower grpo_clamp_eps_upper grpo_entropy_term_weight grpo_filter_groups_with_same_reward
    grpo_group_size grpo_iterations grpo_kl_beta grpo_prompts_per_step langrl_env_config refit_method
    rl_consumption_granularity rl_default_temperature rl_default_top_k rl_default_top_p rl_durable_rollout_bank
    rl_generation_batch_size rl_generation_lag rl_importance_sampling_truncation_coef
    rl_inference_expert_model_parallel_size rl_inference_expert_tensor_model_parallel_size
    rl_inference_logprobs_is_correction rl_inference_model_unified_memory_level rl_inference_parsers+
    rl_inference_pipeline_model_parallel_size rl_inference_tensor_model_parallel_size rl_kv_cache_management_mode
    rl_max_inflight_requests rl_num_parallel_generation_batches rl_num_parallel_generations
    rl_offload_inference_model_weights_when_idle rl_offload_optimizer_during_inference rl_parallel_generation_tasks
    rl_partial_rollouts rl_persist_cuda_graphs rl_profile rl_profile_dir rl_prompts_per_eval rl_rollout_bank_dir
    rl_rollout_bank_max_bytes rl_sequence_packing_algo rl_sequence_packing_max_sequences_per_bin rl_skip_bos_token
    rl_submission_granularity rl_training_cuda_graphs rl_verify_model_weights_swap""",
    "RNG and initialization": """inference_rng_tracker init_method_xavier_uniform te_rng_tracker |
    data_parallel_random_init""",
    "learning rate and weight decay": """decoupled_lr decoupled_min_lr lr lr_decay_style min_lr | freeze_all_layers
    lr_decay_iters lr_decay_samples lr_warmup_fraction lr_warmup_init lr_warmup_iters lr_warmup_samples
    lr_wsd_decay_iters lr_wsd_decay_samples lr_wsd_decay_style override_opt_param_scheduler
    use_checkpoint_opt_param_scheduler warmup weight_decay_incr_style""",
    "checkpointing": """| async_ckpt_cpu_priority async_ckpt_io_priority async_ckpt_use_cpu_shm async_save
    auto_detect_ckpt_format ckpt_assume_constant_structure ckpt_convert_format ckpt_convert_save
    ckpt_convert_update_legacy_dist_opt_format ckpt_drop_redundant_extra_state ckpt_fully_parallel_load
    ckpt_fully_parallel_load_exchange_algo ckpt_fully_parallel_load_per_rank_objects
    ckpt_fully_parallel_load_process_group ckpt_fully_parallel_save ckpt_fully_parallel_save_deprecated
    ckpt_fully_parallel_save_process_group ckpt_load_validate_sharding_integrity ckpt_pg_tensors_cache_create
    ckpt_pg_tensors_cache_path ckpt_step dist_ckpt_format_deprecated dist_ckpt_optim_fully_reshardable
    dist_ckpt_save_pre_mcore_014 dist_ckpt_strictness dist_ckpt_workers distrib_optim_fully_reshardable_mem_efficient
    exit_on_missing_checkpoint finetune load load_main_params_from_ckpt no_load_optim no_load_rng no_save_optim
    no_save_rng non_persistent_ckpt_type non_persistent_global_ckpt_dir non_persistent_local_ckpt_algo
    non_persistent_local_ckpt_dir non_persistent_save_interval override_ckpt_iteration pretrained_checkpoint
    replication replication_factor replication_jump save save_activations_interval save_dgrads_interval save_interval
    save_params_interval save_retain_interval save_tokenizer_assets save_tokens_per_expert_interval
    save_wgrads_interval stream_ckpt_dequant strict_fsdp_dtensor_load use_checkpoint_args use_dist_ckpt_deprecated
    use_mp_args_from_checkpoint_args use_persistent_ckpt_worker use_tokenizer_model_from_checkpoint_args
    verify_integrity""",
    "mixed precision": """attention_softmax_in_fp32 fp16_lm_cross_entropy
    hysteresis initial_loss_scale loss_scale loss_scale_window mamba_training_ssm_states_dtype
    min_loss_scale reuse_grad_buf_for_mxfp8_param_ag""",
    "distributed init": """align_grad_reduce align_param_gather create_all_gather_group data_parallel_sharding_strategy
    ddp_bucket_size ddp_num_buckets ddp_pad_buckets_for_high_nccl_busbw ddp_reduce_scatter_with_fp32_accumulation
    disable_jit_fuser disable_symmetric_registration fsdp_double_buffer fsdp_manual_registration
    gradient_reduce_div_fusion gtp_expert_remat_nccl_ub gtp_remat_nccl_ub
    gtp_remat_reduce_scatter_with_fp32_accumulation keep_fp8_transpose_cache megatron_fsdp_version nccl_ub
    outer_dp_sharding_strategy overlap_grad_reduce overlap_param_gather overlap_param_gather_with_optimizer_step
    suggested_communication_unit_size torch_fsdp2_reshard_after_forward use_gloo_process_groups
    use_layer_wise_param_layout | ddp_param_name_patterns_for_fp32_local_accumulation+ distributed_backend
    distributed_timeout_minutes distributed_timeout_seconds_after_init enable_full_sharding_in_hsdp fake_process_group
    flight_recorder_dump_on_timeout flight_recorder_dump_path flight_recorder_extra_dump_on_exec
    flight_recorder_include_only_active flight_recorder_include_stack_trace flight_recorder_trace_buffer_size
    high_priority_stream_groups+ lazy_mpu_init local_rank model_parallel_size nccl_communicator_config_path
    scatter_gather_tensors_in_pipeline sharp_enabled_group use_sharp""",
    "validation": """eval_global_batch_size eval_interval test_mode | eval_iters full_validation
    multiple_validation_sets skip_train start_eval_at_iter validation_set_names+""",
    "data and dataloader": """eod_mask_loss mmap_bin_files num_workers reset_position_ids | allow_ambiguous_pad_tokens
    dataloader_defer_npy_index_mmap dataloader_fast_cache_load decoder_seq_length fim_eod_token fim_fragment_rate
    fim_middle_token fim_no_prefix fim_pad_token fim_prefix_token fim_rate fim_split_sample fim_spm_rate
    fim_suffix_token mask_prob mid_level_dataset_surplus num_dataset_builder_threads object_storage_cache_path
    per_dataset_sequences_path phase_transition_iterations sample_rate sft_mock_dataset_config_json short_seq_prob
    test_data_path+ valid_data_path+ varlen_mock_dataset_config_json varlen_sbhd_validation""",
    "tokenizer": """| chat_template merge_file metadata_path null_tokenizer_eod_id null_tokenizer_pad_id pad_vocab_size
    special_tokens tiktoken_num_special_tokens tiktoken_pattern tiktoken_special_tokens
    tokenizer_hf_include_special_tokens tokenizer_hf_no_include_special_tokens tokenizer_hf_no_use_fast
    tokenizer_hf_use_fast tokenizer_metadata tokenizer_sentencepiece_ignore_extra_whitespaces
    tokenizer_sentencepiece_legacy tokenizer_special_tokens+ trust_remote_code use_gigatoken vocab_extra_ids
    vocab_file""",
    "autoresume": "| adlr_autoresume adlr_autoresume_interval",
    "biencoder": """| bert_load biencoder_projection_dim biencoder_shared_query_context_model block_data_path
    embedding_path evidence_data_path ict_head_size ict_load indexer_batch_size indexer_log_interval
    query_in_block_prob retriever_report_topk_accuracies+ retriever_score_scaling titles_data_path use_one_sent_docs""",
    "vision": """| classes_fraction data_per_class_fraction data_sharding dino_bottleneck_size dino_freeze_last_layer
    dino_head_hidden_size dino_local_crops_number dino_local_img_size dino_norm_last_layer dino_teacher_temp
    dino_warmup_teacher_temp dino_warmup_teacher_temp_epochs head_lr_mult img_h img_w iter_per_epoch mask_factor
    mask_type num_channels num_classes patch_dim swin_backbone_type vision_backbone_type vision_pretraining
    vision_pretraining_type""",
    "moe": "moe_aux_loss_coeff+ moe_router_load_balancing_type+ | moe_upcycling_granularity moe_use_upcycling",
    "mla": "mscale mscale_all_dim rotary_scaling_factor",
    "logging": """barrier_with_L1_time log_num_zeros_in_grad | log_device_memory_used log_energy
    log_loss_scale_to_tensorboard log_memory_interval log_memory_to_tensorboard log_params_norm log_progress
    log_throughput log_timers_to_tensorboard log_validation_ppl_to_tensorboard log_world_size_to_tensorboard
    logging_level moe_routing_trace_capture_hidden_states moe_routing_trace_capture_logits
    moe_routing_trace_dump_weights moe_routing_trace_max_training_iters moe_routing_trace_path tensorboard_dir
    tensorboard_log_interval tensorboard_queue_size timing_log_level timing_log_option wandb_entity wandb_exp_name
    wandb_project wandb_save_dir""",
    "opentelemetry": "| otel_enabled otel_service_name otel_span_groups",
    "Logits Distillation": """| logits_load_decode_threads logits_load_ignore_errors logits_load_kd_loss_alpha
    logits_load_msc_prefetch_depth logits_load_prefetch_factor logits_save_dtype logits_save_top_k logits_save_top_p
    logits_save_top_p_min_k""",
    "straggler": "| disable_straggler_on_startup log_straggler straggler_ctrlr_port straggler_minmax_count",
    "workload inspector": "| run_workload_inspector_server",
    "inference": """| bert_embedder_type cuda_graph_scope_deprecated
    decode_only_cuda_graphs enable_chunked_prefill inference_batch_times_seqlen_threshold inference_coordinator_port
    inference_cuda_graph_all_prefills inference_cuda_graph_max_tokens inference_disable_ep_consensus
    inference_dynamic_batching inference_dynamic_batching_async_sched_mode inference_dynamic_batching_block_size
    inference_dynamic_batching_buffer_size_gb inference_dynamic_batching_cuda_graph_max_tokens
    inference_dynamic_batching_cuda_graph_mixed_prefill_count
    inference_dynamic_batching_cuda_graph_sizing_distribution inference_dynamic_batching_enable_prefix_caching
    inference_dynamic_batching_logprobs_mode inference_dynamic_batching_mamba_memory_ratio
    inference_dynamic_batching_max_requests inference_dynamic_batching_max_tokens
    inference_dynamic_batching_num_cuda_graphs inference_dynamic_batching_paused_buffer_size_gb
    inference_dynamic_batching_prefix_caching_coordinator_policy
    inference_dynamic_batching_prefix_caching_eviction_policy inference_dynamic_batching_prefix_caching_mamba_gb
    inference_dynamic_batching_prefix_caching_routing_alpha inference_dynamic_batching_sampling_backend
    inference_dynamic_batching_track_generated_token_events inference_dynamic_batching_track_paused_request_events
    inference_dynamic_batching_unified_memory_level inference_logging_step_interval inference_max_requests
    inference_max_seq_length inference_shards inference_text_gen_server_logging
    inference_use_synchronous_zmq_collectives inference_wandb_logging max_tokens_to_oom num_speculative_tokens
    offset_sampling_seed_by_dp_rank output_bert_embeddings use_legacy_static_engine""",
    "Transformer-Engine": "fp4_param_gather fp8_param_gather | te_precision_config_file",
    "experimental": """enable_experimental fsdp_db_use_persist_buf_on_alloc_fail
    megatron_fsdp_enable_fine_grained_param_gather megatron_fsdp_grad_comm_dtype
    megatron_fsdp_main_grads_dtype megatron_fsdp_main_params_dtype megatron_fsdp_max_pool_double_buffer | spec+""",
    "one logger": """| app_tag_run_name app_tag_run_version enable_one_logger one_logger_async one_logger_project
    one_logger_run_name""",
    "In-process restart": """| inprocess_active_world_size inprocess_barrier_timeout inprocess_completion_timeout
    inprocess_empty_cuda_cache inprocess_granularity inprocess_hard_timeout inprocess_heartbeat_interval
    inprocess_heartbeat_timeout inprocess_last_call_wait inprocess_max_iterations inprocess_monitor_process_interval
    inprocess_monitor_thread_interval inprocess_progress_watchdog_interval inprocess_soft_timeout
    inprocess_termination_grace_time""",
    "ft_package": "| calc_ft_timeouts enable_ft_package ft_num_warmup_iters",
    "rerun engine": "| check_for_spiky_loss error_injection_rate error_injection_type",
    "msc": "| disable_msc_deprecated enable_msc",
    "fault injector": """| fault_injector_delay_start_iteration fault_injector_fault_delay
    fault_injector_fault_probabilities fault_injector_fault_types fault_injector_mtti_seconds fault_injector_num_ranks
    fault_injector_offset_seconds fault_injector_ranks fault_injector_seed""",
}
"""Arguments that training with `--wlb` leaves to Megatron, by the group of its parser; + marks a LIST, and those behind
a bar are BESIDE."""
_JUDGED: dict[str, tuple[Verdict, ...]] = {
    # data
    **_each(
        "dataloader_type", Set("external", "a loader of its own reads the same samples", _is_not(None, "external"))
    ),
    **_each("create_attention_mask_in_dataloader dataloader_inter_document_masking reset_attention_mask", Read(bool)),
    **_each(
        "fim_data",
        Refused("gives documents another length as they are read, and --wlb plans by lengths; do it in the dataset"),
        BESIDE,
    ),
    **_each(
        "dynamic_context_parallel hybrid_context_parallel",
        _OTHER_DATA,
        Simulated((False,)),
    ),
    **_each("perform_rl_step", _OTHER_DATA, BESIDE),
    **_each(
        "rl_use_sequence_packing sequence_packing_scheduler use_varlen_dataset",
        Refused("packs sequences by itself; leave it out"),
        BESIDE,
    ),
    **_each(
        "logits_load_dir logits_save_dir",
        Refused("depends on the document order of a run without --wlb; leave it out"),
        BESIDE,
    ),
    # batches and steps
    **_each(
        "calculate_per_token_loss",
        Set(True, "targets weigh as without it, in micro-batches of any length", operator.not_),
    ),
    **_each("ddp_average_in_collective", Off("gradients are divided by tokens at the end, which gives the same")),
    **_each("eval_micro_batch_size", SET),
    **_each("rampup_batch_size", Off("megatron-core ignores it from 0.19 on", value=None), LIST, BESIDE),
    **_each("step_batch_size_schedule", Read(str), BESIDE),
    **_each(
        "log_interval",
        Refused("is {}, by which upstream divides after the first step; give 1 or more", _is(0)),
    ),
    **_each(
        "rerun_mode",
        Refused(
            "{}: upstream takes the flag and fails at its start, since it calls this mode otherwise inside; give "
            "validate_results or disabled",
            _is("report_stats"),
        ),
        BESIDE,
    ),
    **_each(
        "ckpt_format",
        Off("the format is FSDP's", value="torch_dist", when=_is("fsdp_dtensor", "torch_dcp")),
        BESIDE,
    ),
    # attention
    **_each("bf16 fp16 masked_softmax_fusion", Read(bool)),
    **_each(
        "attention_backend",
        Refused(
            "{} runs no packed documents; give auto, flash or fused",
            lambda value: str(value).rpartition(".")[2] == "local",
        ),
    ),
    **_each(
        "attention_dropout",
        SET,
        Differs("no attention dropout", _is_not(0)),
        Refused("is {}; packed attention has none, give --attention-dropout 0", lambda value: value > 0),
    ),
    **_each("cache_mla_latents", Refused("is for inference; leave it out")),
    **_each(
        "linear_cp_mode",
        Refused(
            "{} passes states along ranks in order, which shards are not in; give headwise",
            _is("chunkwise"),
        ),
    ),
    **_each("log_max_attention_logit", Off("packed attention does not report the largest logit", "it is not logged")),
    **_each(
        "position_embedding_type",
        Refused(
            "{} is not supported; give rope, yarn, learned_absolute or none",
            _is("mrope", "relative"),
        ),
    ),
    **_each("qk_clip", Refused("needs the largest logit, which packed attention does not report; leave it out")),
    **_each(
        "use_kitchen_attention", Refused("brings a core attention of its own, which --wlb would replace; leave it out")
    ),
    # experts
    **_each("moe_expert_capacity_factor moe_latent_size", Simulated((None,))),
    **_each(
        "moe_combine_bwd_dtype moe_dispatch_fwd_dtype",
        Off(
            "only ncclep sends mxfp8, and --wlb replaces it",
            "rows of experts travel in bf16",
            value="bf16",
            when=_is("mxfp8"),
        ),
    ),
    **_each("moe_hybridep_pad_uneven_dispatch_inputs", SET),
    **_each(
        "moe_pad_expert_input_to_capacity",
        Off(
            "padding wants equal lengths on all ranks, and tokens over the capacity are dropped without it, too",
            "inputs of experts vary in length",
        ),
    ),
    # parallelism and memory
    **_each("cp_comm_type", Simulated(("p2p", "allgather")), TEXT, LIST),
    **_each("cpu_offloading_retain_pinned_cpu_buffers", Off(ONE_SIZE, "host memory is pinned again every time")),
    **_each("hierarchical_context_parallel_sizes", Simulated((None,)), LIST),
    **_each("min_dynamic_context_parallel_size num_distributed_optimizer_instances", Simulated((1,))),
    **_each("offload_modules", TEXT, LIST),
    **_each("offload_optimizer_states", Simulated((False,))),
    **_each("overlap_p2p_comm_warmup_flush", Read(bool)),
    **_each("use_ring_exchange_p2p", Off(ONE_SIZE, "stages exchange by ordinary sends")),
    **_each(
        "expert_tensor_parallel_num_weight_shards tensor_parallel_num_weight_shards",
        Refused("divides weights over other ranks, by which the data-parallel size means another number; leave it out"),
        BESIDE,
    ),
    # models
    **_each("logit_dtype", Simulated((None,))),
    **_each("heterogeneous_layers_config_path", _UNSUPPORTED._replace(unlike="layers of several kinds"), BESIDE),
    **_each("hybrid_override_pattern", _FORMER, BESIDE),
    **_each("is_hybrid_model", _FORMER),
    **_each(
        "export_kd_teacher_load export_te_mcore_model modelopt_enabled",
        Refused("makes a model that is no GPT of Megatron-core; pre-train one"),
    ),
    **_each("mtp_hsm", Refused("mixes hidden states of rows that it rolls, across documents and shards; leave it out")),
    **_each("yaml_cfg", Refused("is not supported; give flags", unlike="a YAML file of flags"), BESIDE),
    **_each("enable_mhc_connections mla_down_proj_fusion", _UNSUPPORTED),
    **_each(
        "heterogeneous_layers_config_encoded_json inprocess_restart result_rejected_tracker_filename",
        _UNSUPPORTED,
        BESIDE,
    ),
    **_each(
        "async_strategy encoder_num_layers encoder_seq_length end_weight_decay inference_cuda_graph_scope "
        "mamba_inference_conv_states_dtype mamba_inference_ssm_states_dtype start_weight_decay",
        DERIVED,
    ),
}
"""All others but the fields of `MegatronArguments`."""


def _same(names: str) -> Iterator[tuple[str, tuple[Verdict, ...]]]:
    of_step, _, beside = names.partition("|")
    for name in of_step.split():
        yield name.rstrip("+"), (LIST,) if name.endswith("+") else ()
    for name in beside.split():
        yield name.rstrip("+"), (LIST, BESIDE) if name.endswith("+") else (BESIDE,)


_READ = {f.name: (Read(f.type), *f.metadata.get("verdicts", ())) for f in fields(MegatronArguments)}
ARGUMENTS: dict[str, tuple[Verdict, ...]] = {
    **_READ,
    **_JUDGED,
    **{name: verdicts for names in _SAME.values() for name, verdicts in _same(names)},
}
"""The verdicts on every argument; () if training and predictions leave it to Megatron."""


def rows[V: Verdict](kind: type[V]) -> Iterator[tuple[str, V]]:
    """Yield the arguments with a verdict of this kind, and the verdict."""
    return ((name, each) for name, verdicts in ARGUMENTS.items() for each in verdicts if isinstance(each, kind))


def marked(mark: Mark) -> set[str]:
    """Return the arguments with a mark."""
    return {name for name, verdicts in ARGUMENTS.items() if mark in verdicts}
