"""The job of a training run, made of Megatron's arguments: the only place that translates between the two."""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from megatron_wlb import describe, packing
from megatron_wlb.adapter import arguments, compat
from megatron_wlb.describe.settings import PlanSettings, RunSettings
from megatron_wlb.job import Job, Parallel, Recompute
from megatron_wlb.micro_batches import Prediction, predictions
from megatron_wlb.model import MODELS, ModelShape, latent_sizes
from megatron_wlb.packing.original import OriginalPacking
from megatron_wlb.pipeline.split import Split
from megatron_wlb.plan.stream import DocumentStream
from megatron_wlb.simulate.memory import DEVICE_SHARE

_UNDEFERRABLE = (
    "defer_embedding_wgrad_compute fp4 fp8 moe_shared_expert_overlap overlap_dispatch_backward_with_experts_wgrad "
    "use_torch_fsdp2 use_transformer_engine_op_fuser"
).split()
"""Arguments of upstream with which weight gradients stay in the backward pass: with other hooks or layers, or where it
was not tested that none is lost."""


def check(args: Namespace) -> None:
    """Raise ValueError for flags, upstream's or ours, that training with `--wlb` cannot serve.

    To be called before upstream validates its flags, with assertions that name no remedy.
    """
    arguments.check(args)
    compat.check_flags(args)
    policy, run = packing.for_training(args), RunSettings.from_args(args)
    if said := packing.without_effect(args):
        raise ValueError(f"{said[0]}; choose that, or take the flag out")
    if run.attention_backend == "megatron":
        _check_upstream_attention(args)
    settings = PlanSettings.from_args(args)
    parallel = _parallel(args)
    try:
        describe.make_job(
            model=MODELS["550m"],  # stands in for sizes that only validation settles
            context_length=args.seq_length,
            global_batch_size=args.global_batch_size or parallel.dp,
            parallel=parallel,
            packing=policy,
            settings=replace(
                settings,
                memory_budget=None,
                max_tokens=None if settings.max_tokens == "auto" else settings.max_tokens,
                defer_weight_gradients="off",  # whether the model's layers divide is not known yet
            ),
            row_multiple=compat.row_multiple(args),
        )
    except ValueError as error:
        raise ValueError(f"--wlb: {error}") from error
    if (args.global_batch_size or 0) % parallel.dp:
        raise ValueError(
            f"--wlb: --global-batch-size is {args.global_batch_size}, by which upstream counts samples on "
            f"{parallel.dp} data-parallel ranks; give a multiple of {parallel.dp}"
        )


def make_job(args: Namespace, **fixed: int) -> Job:
    """The job that validated arguments describe; `fixed` are fields of `Job` that count before them.

    Raises ValueError for settings that contradict each other, and where weights or activations do not fit the GPU.
    """
    settings = PlanSettings.from_args(args)
    return describe.make_job(
        model=_model_shape(args),
        context_length=args.seq_length,
        global_batch_size=args.global_batch_size,
        parallel=replace(
            _parallel(args),
            vpp=args.virtual_pipeline_model_parallel_size or 1,
            group_size=args.microbatch_group_size_per_vp_stage,
        ),
        packing=packing.from_args(args),
        settings=settings,
        default_profile="h100-fa2" if torch.cuda.is_available() else "flops",
        budget_bytes=_budget_bytes(args) if settings.memory_budget is None else None,
        bytes_per_value=args.params_dtype.itemsize,
        row_multiple=compat.row_multiple(args),
        windowed=getattr(args, "window_size", None) is not None,
        hidden_dropout=args.hidden_dropout > 0,
        hidden_transfers=args.overlap_p2p_comm,
        recompute=Recompute(
            granularity=args.recompute_granularity,
            method=args.recompute_method,
            num_layers=args.recompute_num_layers,
            modules=tuple(sorted(set(args.recompute_modules or ()))),
        ),
        offloaded_layers=args.cpu_offloading_num_layers,
        **_no_deferral(args, settings),
        **fixed,
    )


def best_job(args: Namespace, stream: Callable[[], DocumentStream]) -> tuple[Job, list[Prediction]]:
    """The job of `make_job`, with `--wlb-micro-batches auto` by the run's first documents; and what was compared.

    `stream` gives them from the beginning.
    """
    job, settings = make_job(args), PlanSettings.from_args(args)
    if settings.micro_batches != "auto":
        return job, []
    known = settings.memory_budget is not None or _budget_bytes(args) is not None
    return predictions(job, partial(make_job, args), stream, memory_known=known)


def evaluation_job(job: Job, args: Namespace) -> Job:
    """The evaluation steps of a job: windows of the data as it comes. Raises ValueError where they fit no schedule."""
    count = args.eval_global_batch_size
    try:
        return replace(
            job,
            parallel=replace(job.parallel, group_size=args.microbatch_group_size_per_vp_stage),
            packing=OriginalPacking(),
            global_batch_size=count,
            num_micro_batches=count,
            defer_weight_gradients=False,
        )
    except ValueError as error:
        raise ValueError(f"evaluation (--eval-global-batch-size): {error}") from error


def _no_deferral(args: Namespace, settings: PlanSettings) -> dict[str, bool]:
    """The field of `Job` where layers cannot put weight gradients off.

    Raises ValueError where the flags ask for it nevertheless.
    """
    biased = args.transformer_impl == "transformer_engine" and (args.add_bias_linear or args.add_qkv_bias)
    given = [f"--{flag.replace('_', '-')}" for flag in _UNDEFERRABLE if getattr(args, flag, None)]
    given += ["--transformer-impl transformer_engine with biases in linear layers"] * biased
    if args.virtual_pipeline_model_parallel_size and args.overlap_grad_reduce and not args.align_grad_reduce:
        # Buckets without a weight gradient that is put off would be reduced before or after those of other chunks, as
        # the plan has it, which differs between data-parallel ranks.
        given.append("--overlap-grad-reduce --no-align-grad-reduce and virtual stages")
    if not given:
        return {}
    if settings.defer_weight_gradients == "on":
        raise ValueError(f"--wlb-defer-weight-gradients on does not go with {given[0]}; give auto")
    return {"defer_weight_gradients": False}


def _parallel(args: Namespace) -> Parallel:
    """The layout, but for the virtual stages that only validation counts."""
    tp, cp, pp = args.tensor_model_parallel_size, args.context_parallel_size, args.pipeline_model_parallel_size
    return Parallel(
        tp=tp,
        cp=cp,
        pp=pp,
        dp=max(1, args.world_size // (tp * cp * pp)),
        ep=args.expert_model_parallel_size,
        etp=args.expert_tensor_parallel_size if args.num_experts else None,
        sequence_parallel=args.sequence_parallel,
        split=Split.from_args(args),
    )


def _model_shape(args: Namespace) -> ModelShape:
    """What costs and memory of a layer depend on; a token runs through `moe_router_topk` experts at once."""
    ffn = args.ffn_hidden_size
    if args.num_experts:
        ffn = args.moe_router_topk * (args.moe_ffn_hidden_size or ffn) + (args.moe_shared_expert_intermediate_size or 0)
    sizes = {"kv_channels": args.kv_channels}
    if args.multi_latent_attention:
        sizes = latent_sizes(
            kv_lora_rank=args.kv_lora_rank,
            q_lora_rank=args.q_lora_rank,
            qk_head_dim=args.qk_head_dim,
            qk_pos_emb_head_dim=args.qk_pos_emb_head_dim,
            v_head_dim=args.v_head_dim,
        )
    return ModelShape(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=ffn,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups if args.group_query_attention else args.num_attention_heads,
        padded_vocab_size=args.padded_vocab_size or 0,
        gated_linear_unit=args.swiglu,
        qk_layernorm=args.qk_layernorm,
        moe_router_topk=args.moe_router_topk if args.num_experts else 0,
        mtp_num_layers=args.mtp_num_layers or 0,
        **sizes,
    )


def _budget_bytes(args: Namespace) -> float | None:
    """What activations may take of this rank's GPU; None without one, and where upstream's formula of weights fails.

    Raises ValueError where weights and optimizer alone are too large for the GPU.
    """
    if not torch.cuda.is_available():
        return None
    # GPUs of one kind differ by MiB, and all ranks must plan alike.
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory >> 30 << 30
    fixed = compat.weight_and_optimizer_bytes(args)
    if fixed is None:
        return None
    if fixed >= DEVICE_SHARE * total:
        raise ValueError(
            f"weights and optimizer take {fixed / 2**30:.1f} GiB by upstream's formula, over {DEVICE_SHARE:.0%} of "
            f"this GPU's {total / 2**30:.1f}; use more tensor or pipeline parallelism or --use-distributed-optimizer, "
            "or give --wlb-memory-budget if you know better"
        )
    return DEVICE_SHARE * total - fixed


def _check_upstream_attention(args: Namespace) -> None:
    if args.transformer_impl == "local":
        raise ValueError(
            "--wlb-attention-backend megatron with --transformer-impl local, whose attention knows no packed "
            "documents; leave --transformer-impl out"
        )
    if args.softmax_type != "vanilla":
        raise ValueError(
            f"--wlb-attention-backend megatron with --softmax-type {args.softmax_type}, which was never compared; give "
            "another backend"
        )
    if args.context_parallel_size > 1 and args.wlb_cp_sharding != "per-document":
        raise ValueError(
            f"--wlb-attention-backend megatron cuts every document over {args.context_parallel_size} context-parallel "
            f"ranks, and --wlb-cp-sharding is {args.wlb_cp_sharding}; give per-document"
        )
