"""Command line: the `--wlb-*` flags, and what upstream's flags must be for `--wlb` to be right. Needs no Megatron."""

import argparse
from collections.abc import Iterator

from megatron_wlb import packing
from megatron_wlb.describe.settings import PlanSettings, RunSettings

_FIXED_SHAPES = "needs fixed shapes, and micro-batches vary in length; leave it out"
_REASONS = {
    _FIXED_SHAPES: (
        "cpu_offloading_retain_pinned_cpu_buffers enable_cuda_graph external_cuda_graph "
        "fine_grained_activation_offloading moe_pad_expert_input_to_capacity tp_comm_overlap use_ring_exchange_p2p"
    ),
    "changes the global batch size, which must stay; give a fixed --global-batch-size": (
        "rampup_batch_size step_batch_size_schedule"
    ),
    "replaces the pipeline schedule; leave it out": "overlap_moe_expert_parallel_comm",
    "divides weights over other ranks, by which the data-parallel size means another number; leave it out": (
        "expert_tensor_parallel_num_weight_shards tensor_parallel_num_weight_shards"
    ),
    "reads a step's micro-batches ahead, by --global-batch-size; leave it out": "moe_expert_rank_capacity_factor",
    "mixes hidden states of rows that it rolls, across documents and shards; leave it out": "mtp_hsm",
    "needs the largest logit, which packed attention does not report; leave it out": "qk_clip log_max_attention_logit",
    "goes by the order of documents of a run without --wlb; leave it out": "logits_load_dir logits_save_dir",
    "saves checkpoints without the packer state; use --save-interval": "non_persistent_save_interval",
    "is not supported; use --use-torch-fsdp2 or --use-distributed-optimizer": "use_megatron_fsdp",
    "is not supported; use plain attention": "experimental_attention_variant",
    "is for inference; leave it out": "cache_mla_latents",
    "is not supported; pre-train on .bin/.idx datasets (--data-path)": (
        "sft mock_data fim_data perform_rl_step hybrid_context_parallel dynamic_context_parallel"
    ),
    "is not supported; give --eval-iters": "full_validation multiple_validation_sets",
    "is not supported; give flags": "spec yaml_cfg",
    "is not supported; leave it out": (
        "enable_mhc_connections heterogeneous_layers_config_path heterogeneous_layers_config_encoded_json "
        "inprocess_restart iterations_to_skip mla_down_proj_fusion result_rejected_tracker_filename"
    ),
}
REFUSED = {name: reason for reason, names in _REASONS.items() for name in names.split()}
"""Arguments of upstream that training with --wlb cannot serve at all, each with the reason and the remedy."""


def add_wlb_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--wlb` and the flag of every setting; an `extra_args_provider` of upstream's."""
    _mend_help(parser)
    group = parser.add_argument_group("workload-balanced training (megatron_wlb)")
    group.add_argument(
        "--wlb",
        action="store_true",
        help="Balance the work of micro-batches and context-parallel shards (WLB-LLM, OSDI'25).",
    )
    packing.add_flags(group)
    PlanSettings.add_flags(group)
    RunSettings.add_flags(group)
    return parser


def check(args: argparse.Namespace) -> None:
    """Raise ValueError for the first flag of upstream's that training with `--wlb` cannot serve.

    The message has the flag, why it cannot be, and the remedy. To be called before upstream validates its flags.
    """
    for message in _refusals(args):
        raise ValueError(f"--wlb: {message}")


def _refusals(args: argparse.Namespace) -> Iterator[str]:
    def has(name: str) -> bool:
        return bool(getattr(args, name, None))

    for name, reason in REFUSED.items():
        if has(name):
            yield f"--{name.replace('_', '-')} {reason}"
    if args.seq_length is None:
        yield "--seq-length is missing; give the context window"
    if args.micro_batch_size != 1 or getattr(args, "eval_micro_batch_size", None) not in (None, 1):
        yield (
            f"--micro-batch-size is {args.micro_batch_size}; a micro-batch is one packed sequence, give 1 (and "
            "--eval-micro-batch-size 1 or none)"
        )
    if not args.calculate_per_token_loss:
        yield (
            "--calculate-per-token-loss is missing; give it, since without it every micro-batch would weigh the same, "
            "whatever its length"
        )
    if getattr(args, "cuda_graph_impl", "none") != "none":
        yield f"--cuda-graph-impl {_FIXED_SHAPES}"
    if has("defer_embedding_wgrad_compute") and args.sequence_parallel:
        yield (
            "--defer-embedding-wgrad-compute with --sequence-parallel gathers all micro-batches by the length of the "
            "first; leave it out"
        )
    if has("mtp_num_layers") and has("pipeline_model_parallel_layout"):
        yield (
            "--mtp-num-layers with --pipeline-model-parallel-layout is not supported: MTP layers must be on the last "
            "stage; leave the latter out"
        )
    if has("num_experts"):
        yield from _expert_refusals(args)
    if (
        args.pipeline_model_parallel_size == 2
        and not args.overlap_p2p_comm
        and (has("num_virtual_stages_per_pipeline_rank") or has("num_layers_per_virtual_pipeline_stage"))
    ):
        yield (
            "with two pipeline ranks and virtual stages the next rank is also the previous one, and messages of one "
            "batch would be mixed up; leave --no-overlap-p2p-communication out"
        )
    if "local" in str(getattr(args, "attention_backend", "auto")).rsplit(".", 1)[-1]:
        yield ("--attention-backend local would replace the attention of --wlb; choose with --wlb-attention-backend")
    if has("use_torch_fsdp2") and (
        args.pipeline_model_parallel_size > 1
        or args.expert_model_parallel_size > 1
        or has("mtp_num_layers")
        or has("use_distributed_optimizer")
        or not args.untie_embeddings_and_output_weights
    ):
        yield (
            "--use-torch-fsdp2 does not go with pipeline or expert parallelism, tied embeddings, MTP or the "
            "distributed optimizer; leave it out and use --use-distributed-optimizer"
        )
    if has("use_torch_fsdp2") and (has("save") or has("load")):
        yield (
            "--use-torch-fsdp2 with --save or --load: upstream does not bring back the optimizer state, in either "
            "--ckpt-format; use --use-distributed-optimizer"
        )
    if args.attention_dropout > 0:
        yield (
            f"--attention-dropout is {args.attention_dropout}; packed attention has none, give --attention-dropout 0"
        )
    if (getattr(args, "window_size", None) or (0, 0))[1] != 0:
        yield f"--window-size is {args.window_size}; causal attention sees nothing to its right, give LEFT,0"
    if has("multi_latent_attention"):
        yield from _latent_refusals(args)
    if args.position_embedding_type in ("mrope", "relative"):
        yield (
            f"--position-embedding-type {args.position_embedding_type} is not supported; give rope, yarn, "
            "learned_absolute or none"
        )
    if getattr(args, "dataloader_type", None) not in (None, "external"):
        yield f"--dataloader-type {args.dataloader_type} would replace the sampler of --wlb; leave it out"
    if getattr(args, "transformer_impl", None) == "local" and has("layernorm_zero_centered_gamma"):
        yield "--apply-layernorm-1p is not supported with --transformer-impl local; leave one of them out"
    if getattr(args, "rerun_mode", None) == "report_stats":
        yield (
            "--rerun-mode report_stats: upstream takes the flag and fails at its start, since it calls this mode "
            "otherwise inside; give validate_results or disabled"
        )
    if any("://" in str(getattr(args, name, "")) for name in ("save", "load")):
        yield (
            "--save and --load to object storage are not supported, the packer state is a file beside the checkpoint; "
            "give a folder"
        )


def _latent_refusals(args: argparse.Namespace) -> Iterator[str]:
    if args.position_embedding_type == "yarn":
        yield (
            "--position-embedding-type yarn with --multi-latent-attention, whose layers rotate by themselves; give "
            "rope, and --rope-type yarn"
        )
    if args.apply_rope_fusion:
        yield "fused rotary embeddings of --multi-latent-attention count rows of whole documents; give --no-rope-fusion"
    if args.tensor_model_parallel_size > 1 and not args.sequence_parallel:
        yield (
            "--multi-latent-attention with --tensor-model-parallel-size over 1 and without --sequence-parallel has "
            "gradients of latents that upstream does not sum over ranks, or twice; give --sequence-parallel"
        )
    if getattr(args, "wlb_attention_backend", None) == "megatron":
        yield "--wlb-attention-backend megatron with --multi-latent-attention is not supported; choose another"


def _expert_refusals(args: argparse.Namespace) -> Iterator[str]:
    balancing = getattr(args, "moe_router_load_balancing_type", None) or ()
    if "quantile_balancing" in ([balancing] if isinstance(balancing, str) else balancing):
        yield (
            "--moe-router-load-balancing-type quantile_balancing needs tokens * topk of every micro-batch to divide by "
            "the experts, and micro-batches vary in length; choose another"
        )
    dispatcher, backend = args.moe_token_dispatcher_type, getattr(args, "moe_flex_dispatcher_backend", None)
    if dispatcher == "allgather":
        yield "--moe-token-dispatcher-type allgather needs equal lengths on all ranks; give alltoall"
    if dispatcher != "flex":
        return
    if backend == "hybridep" and not getattr(args, "moe_hybridep_pad_uneven_dispatch_inputs", False):
        yield (
            "--moe-flex-dispatcher-backend hybridep needs equal lengths on all ranks; give deepep, or from "
            "megatron-core 0.19 on --moe-hybridep-pad-uneven-dispatch-inputs"
        )
    if backend == "ncclep":
        yield "--moe-flex-dispatcher-backend ncclep sizes its buffers by the first micro-batch; give deepep"


def _mend_help(parser: argparse.ArgumentParser) -> None:
    """Escape a lone percent sign in upstream's help texts (0.19 has one), over which --help stumbles."""
    for action in parser._actions:
        try:
            _ = (action.help or "") % {**vars(action), "prog": parser.prog}
        except ValueError:
            action.help = (action.help or "").replace("%", "%%")
