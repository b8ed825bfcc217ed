"""Command line: the `--wlb-*` flags, and what upstream's flags must be for `--wlb` to be right."""

import argparse
import contextlib
import functools
import math
from dataclasses import fields
from typing import Any

from megatron_wlb.config import WlbConfig


def add_wlb_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--wlb` and one flag for every field of WlbConfig; an `extra_args_provider` of upstream's."""
    _mend_help(parser)
    group = parser.add_argument_group("workload-balanced training (megatron_wlb)")
    group.add_argument(
        "--wlb",
        action="store_true",
        help="Balance the work of micro-batches and context-parallel shards (WLB-LLM, OSDI'25).",
    )
    for f in fields(WlbConfig):
        flag, text = "--wlb-" + f.name.replace("_", "-"), f.metadata["help"].replace("%", "%%")
        if f.type is bool or f.type == "bool":
            group.add_argument(flag, action="store_true", help=text)
            continue
        kind: Any = str
        if "tuple" in str(f.type):
            kind = _integers
        elif "auto" in str(f.type):
            kind = _integer_or_auto
        elif "int" in str(f.type):
            kind = int
        elif "float" in str(f.type):
            kind = float
        default = "" if f.default is None else f" Default: {f.default}."
        # Choices are checked by WlbConfig, which also serves those who come without a command line.
        choices = f"{{{','.join(f.metadata['choices'])}}}" if f.metadata["choices"] else None
        group.add_argument(flag, type=kind, default=f.default, metavar=choices, help=text + default)
    return parser


def _integer_or_auto(value: str) -> int | str:
    try:
        return value if value == "auto" else int(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{value!r} must be a number of tokens, or auto") from None


def _mend_help(parser: argparse.ArgumentParser) -> None:
    """Escape a lone percent sign in upstream's help texts (0.19 has one), over which --help stumbles."""
    for action in parser._actions:
        try:
            _ = (action.help or "") % {**vars(action), "prog": parser.prog}
        except ValueError:
            action.help = (action.help or "").replace("%", "%%")


def config_from_args(args: argparse.Namespace) -> WlbConfig:
    """The WlbConfig that the flags describe. Raises ValueError as WlbConfig does."""
    return WlbConfig(**{f.name: getattr(args, f"wlb_{f.name}") for f in fields(WlbConfig)})


def unit_tokens(args: argparse.Namespace) -> int:
    """Micro-batches have a multiple of this many tokens: CP * lcm(2, rows), so that CP ranks hold two equal chunks.

    rows is TP under sequence parallelism, else 1; times what FP8 and FP4 kernels align rows to.
    """
    rows = args.tensor_model_parallel_size if args.sequence_parallel else 1
    if getattr(args, "fp8", None) or getattr(args, "fp4", None):
        from megatron.core.fp4_utils import get_fp4_align_size  # the rest of this module does without Megatron
        from megatron.core.fp8_utils import get_fp8_align_size

        rows *= get_fp8_align_size(args.fp8_recipe) if args.fp8 else get_fp4_align_size(args.fp4_recipe)
    return int(args.context_parallel_size * math.lcm(2, rows))


def check(args: argparse.Namespace, config: WlbConfig) -> None:
    """Compare upstream's flags with what WLB training can do, before upstream validates them.

    Raises ValueError naming the flag, why it cannot be, and the remedy.
    """
    for wrong, message in _refusals(args):
        if wrong:
            raise ValueError(f"--wlb: {message}")
    unit = unit_tokens(args)
    if args.seq_length % unit:
        raise ValueError(
            f"--wlb: --seq-length {args.seq_length} cannot be shared by {args.context_parallel_size} context-parallel "
            f"and {args.tensor_model_parallel_size} tensor-parallel ranks; give a multiple of {unit}"
        )
    if config.max_tokens != "auto":
        config.max_tokens_for(args.seq_length, unit)
    model_ranks = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    dp_size, batch = args.world_size // model_ranks, args.global_batch_size
    if dp_size and batch and batch % dp_size:
        raise ValueError(
            f"--wlb: --global-batch-size {batch} cannot be shared by {dp_size} data-parallel ranks; give a multiple"
        )
    if config.attention_backend == "megatron":
        _check_upstream_attention(args, config)


def checked_with_checkpoint(load: Any, reporting: Any = contextlib.nullcontext) -> Any:
    """Upstream's `load_args_from_checkpoint` (`--use-checkpoint-args`), after which `check` looks at the flags.

    It overwrites many, given or not; attention dropout stays as given. `reporting` makes the context of the check.
    """

    @functools.wraps(load)
    def load_args_from_checkpoint(args: argparse.Namespace, load_arg: str = "load", **options: Any) -> Any:
        given = args.attention_dropout
        loaded = load(args, load_arg=load_arg, **options)
        if args.wlb:
            args.attention_dropout = given
            if load_arg == "load":  # the last of two calls
                with reporting():
                    try:
                        check(args, config_from_args(args))
                    except ValueError as error:
                        raise ValueError(
                            f"{error}; flags of the checkpoint count, too (--use-checkpoint-args)"
                        ) from error
        return loaded

    return load_args_from_checkpoint


def _check_upstream_attention(args: argparse.Namespace, config: WlbConfig) -> None:
    if args.transformer_impl == "local":
        raise ValueError(
            "--wlb-attention-backend megatron with --transformer-impl local, whose attention knows no packed "
            "documents; leave --transformer-impl out"
        )
    if args.context_parallel_size > 1 and config.cp_sharding != "per-document":
        raise ValueError(
            f"--wlb-attention-backend megatron cuts every document over {args.context_parallel_size} context-parallel "
            f"ranks, and --wlb-cp-sharding is {config.cp_sharding}; give per-document"
        )


def _refusals(args: argparse.Namespace) -> list[tuple[bool, str]]:
    """Upstream flags that WLB training cannot serve, each with the reason and the remedy."""

    def given(name: str) -> bool:
        return bool(getattr(args, name, None))

    graphs = getattr(args, "cuda_graph_impl", "none") != "none"
    return [
        (args.seq_length is None, "--seq-length is missing; give the context window"),
        (
            args.micro_batch_size != 1 or getattr(args, "eval_micro_batch_size", None) not in (None, 1),
            f"--micro-batch-size is {args.micro_batch_size}; a micro-batch is one packed sequence, give 1 (and "
            "--eval-micro-batch-size 1 or none)",
        ),
        (
            not args.calculate_per_token_loss,
            "--calculate-per-token-loss is missing; give it, since without it every micro-batch would weigh the same, "
            "whatever its length",
        ),
        (
            given("rampup_batch_size") or given("step_batch_size_schedule"),
            "a global batch size that changes (--rampup-batch-size, --step-batch-size-schedule) is not supported; give "
            "a fixed --global-batch-size",
        ),
        (
            graphs or given("enable_cuda_graph") or given("external_cuda_graph"),
            "CUDA graphs need fixed shapes, and micro-batches vary in length; leave --cuda-graph-impl out",
        ),
        (
            given("overlap_moe_expert_parallel_comm"),
            "--overlap-moe-expert-parallel-comm replaces the pipeline schedule; leave it out",
        ),
        (given("tp_comm_overlap"), "--tp-comm-overlap has buffers of fixed size; leave it out"),
        (
            given("fine_grained_activation_offloading"),
            "--fine-grained-activation-offloading keeps host memory for every shape that it has met, and micro-batches "
            "vary in length; leave it out",
        ),
        (
            given("defer_embedding_wgrad_compute") and args.sequence_parallel,
            "--defer-embedding-wgrad-compute with --sequence-parallel gathers all micro-batches by the length of the "
            "first; leave it out",
        ),
        (
            given("cpu_offloading_retain_pinned_cpu_buffers"),
            "--cpu-offloading-retain-pinned-cpu-buffers keeps buffers of one shape, and micro-batches vary in length; "
            "leave it out",
        ),
        (
            given("mtp_num_layers"),
            "--mtp-num-layers would predict across the boundaries of packed documents and CP shards; leave it out",
        ),
        (
            given("num_experts") and args.moe_token_dispatcher_type == "allgather",
            "--moe-token-dispatcher-type allgather needs equal lengths on all ranks; give alltoall",
        ),
        (
            given("moe_pad_expert_input_to_capacity"),
            "--moe-pad-expert-input-to-capacity needs equal lengths on all ranks; leave it out",
        ),
        (
            given("num_experts")
            and args.moe_token_dispatcher_type == "flex"
            and args.moe_flex_dispatcher_backend == "hybridep"
            and not given("moe_hybridep_pad_uneven_dispatch_inputs"),
            "--moe-flex-dispatcher-backend hybridep needs equal lengths on all ranks; give deepep, or from "
            "megatron-core 0.19 on --moe-hybridep-pad-uneven-dispatch-inputs",
        ),
        (
            given("num_experts")
            and args.moe_token_dispatcher_type == "flex"
            and args.moe_flex_dispatcher_backend == "ncclep",
            "--moe-flex-dispatcher-backend ncclep sizes its buffers by the first micro-batch; give deepep",
        ),
        (
            given("qk_clip") or given("log_max_attention_logit"),
            "--qk-clip and --log-max-attention-logit need the largest logit, which packed attention does not report; "
            "leave them out",
        ),
        (
            args.pipeline_model_parallel_size == 2
            and not args.overlap_p2p_comm
            and (given("num_virtual_stages_per_pipeline_rank") or given("num_layers_per_virtual_pipeline_stage")),
            "with two pipeline ranks and virtual stages the next rank is also the previous one, and messages of one "
            "batch would be mixed up; leave --no-overlap-p2p-communication out",
        ),
        (given("use_ring_exchange_p2p"), "--use-ring-exchange-p2p needs fixed shapes; leave it out"),
        (
            "local" in str(getattr(args, "attention_backend", "auto")).rsplit(".", 1)[-1],
            "--attention-backend local would replace the attention of --wlb; choose with --wlb-attention-backend",
        ),
        (
            given("use_torch_fsdp2")
            and (
                args.pipeline_model_parallel_size > 1
                or args.expert_model_parallel_size > 1
                or given("use_distributed_optimizer")
                or not args.untie_embeddings_and_output_weights
            ),
            "--use-torch-fsdp2 does not go with pipeline or expert parallelism, tied embeddings or the distributed "
            "optimizer; leave it out and use --use-distributed-optimizer",
        ),
        (
            given("use_torch_fsdp2") and (given("save") or given("load")),
            "--use-torch-fsdp2 with --save or --load: upstream does not bring back the optimizer state, in either "
            "--ckpt-format; use --use-distributed-optimizer",
        ),
        (
            given("use_megatron_fsdp"),
            "--use-megatron-fsdp is not supported yet; use --use-torch-fsdp2 or --use-distributed-optimizer",
        ),
        (
            args.attention_dropout > 0,
            f"--attention-dropout is {args.attention_dropout}; packed attention has none, give --attention-dropout 0",
        ),
        (
            given("multi_latent_attention") or given("experimental_attention_variant"),
            "multi-latent attention and experimental variants are not supported; use plain attention",
        ),
        (
            (getattr(args, "window_size", None) or (0, 0))[1] != 0,
            f"--window-size is {getattr(args, 'window_size', None)}; causal attention sees nothing to its right, give "
            "LEFT,0",
        ),
        (
            getattr(args, "softmax_type", "vanilla") != "vanilla",
            f"--softmax-type {getattr(args, 'softmax_type', '')} (attention sinks) is not supported; give vanilla",
        ),
        (
            args.position_embedding_type in ("mrope", "relative"),
            f"--position-embedding-type {args.position_embedding_type} is not supported; give rope, yarn, "
            "learned_absolute or none",
        ),
        (
            any(given(name) for name in ("sft", "mock_data", "fim_data", "perform_rl_step", "hybrid_context_parallel")),
            "only pre-training on .bin/.idx datasets is supported (--data-path); leave --sft, --mock-data, --fim-data, "
            "--perform-rl-step and --hybrid-context-parallel out",
        ),
        (
            given("logits_load_dir") or given("logits_save_dir"),
            "--logits-load-dir and --logits-save-dir go by the order of documents of a run without --wlb; leave them "
            "out",
        ),
        (
            given("full_validation") or given("multiple_validation_sets"),
            "--full-validation and --multiple-validation-sets are not supported; give --eval-iters",
        ),
        (
            getattr(args, "dataloader_type", None) not in (None, "external"),
            f"--dataloader-type {getattr(args, 'dataloader_type', None)} would replace the sampler of --wlb; leave it "
            "out",
        ),
        (
            given("heterogeneous_layers_config_path") or given("heterogeneous_layers_config_encoded_json"),
            "heterogeneous layers are not supported; leave --heterogeneous-layers-config-path and "
            "--heterogeneous-layers-config-encoded-json out",
        ),
        (
            getattr(args, "transformer_impl", None) == "local" and given("layernorm_zero_centered_gamma"),
            "--apply-layernorm-1p is not supported with --transformer-impl local; leave one of them out",
        ),
        (
            given("non_persistent_save_interval"),
            "--non-persistent-save-interval is not supported, its checkpoints would lack the packer state; use "
            "--save-interval",
        ),
        (given("spec") or given("yaml_cfg"), "--spec and --yaml-cfg are not supported; give flags"),
        (
            getattr(args, "rerun_mode", None) == "report_stats",
            "--rerun-mode report_stats: upstream takes the flag and fails at its start, since it calls this mode "
            "otherwise inside; give validate_results or disabled",
        ),
        (
            given("iterations_to_skip") or given("result_rejected_tracker_filename"),
            "--iterations-to-skip and --result-rejected-tracker-filename are not supported; leave them out",
        ),
        (
            any("://" in str(getattr(args, name, "")) for name in ("save", "load")),
            "--save and --load to object storage are not supported, the packer state is a file beside the checkpoint; "
            "give a folder",
        ),
    ]


def _integers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be integers, such as 32768,65536") from None
