"""What the model of a run takes of a GPU's memory, and which S_max fits beside its weights."""

from argparse import Namespace

import torch

from megatron_wlb.adapter import compat
from megatron_wlb.config import WlbConfig
from megatron_wlb.plan.memory import ActivationModel
from megatron_wlb.plan.workload import ModelShape

DEVICE_SHARE = 0.9
"""Of a GPU's memory; the rest is for the context, buffers of NCCL and kernels, and fragmentation."""


def activation_model(args: Namespace, config: WlbConfig) -> ActivationModel:
    """The model of a run on one rank of its layout."""
    modules = frozenset(args.recompute_modules or ())
    return ActivationModel(
        model=_model_shape(args),
        dropout=args.hidden_dropout > 0,
        recompute_granularity=args.recompute_granularity,
        recompute_method=args.recompute_method,
        recompute_num_layers=args.recompute_num_layers,
        recompute_modules=modules - {"mlp"} if args.num_experts else modules,  # only its dense layers have one
        bytes_per_value=args.params_dtype.itemsize,
        save_gathered_keys=config.save_gathered_kv,
        tp_size=args.tensor_model_parallel_size,
        sequence_parallel=args.sequence_parallel,
        cp_size=args.context_parallel_size,
        pp_size=args.pipeline_model_parallel_size,
        vp_size=args.virtual_pipeline_model_parallel_size or 1,
        group_size=args.microbatch_group_size_per_vp_stage or 0,
    )


def fitting_tokens(
    args: Namespace, config: WlbConfig, memory: ActivationModel, num_micro_batches: int, unit: int
) -> int | None:
    """The largest S_max whose activations fit the budget, with `num_micro_batches` a rank; None without a budget.

    Raises ValueError where weights and optimizer alone are too large for the GPU.
    """
    budget = config.memory_budget and config.memory_budget * 2**30
    if budget is None and torch.cuda.is_available():
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        held = compat.weight_and_optimizer_bytes(args)
        if held is not None:
            budget = DEVICE_SHARE * total - held
            if budget <= 0:
                raise ValueError(
                    f"weights and optimizer take {held / 2**30:.1f} GiB by upstream's formula, more than "
                    f"{DEVICE_SHARE:.0%} of this GPU's {total / 2**30:.1f}; use more tensor or pipeline parallelism or "
                    "--use-distributed-optimizer, or give --wlb-memory-budget if you know better"
                )
    return None if budget is None else memory.largest_max_tokens(budget, num_micro_batches, unit)


def _model_shape(args: Namespace) -> ModelShape:
    """What costs and memory of a layer depend on; a token runs through `moe_router_topk` experts at once."""
    expert = args.moe_ffn_hidden_size or args.ffn_hidden_size
    return ModelShape(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.moe_router_topk * expert if args.num_experts else args.ffn_hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups if args.group_query_attention else args.num_attention_heads,
        padded_vocab_size=args.padded_vocab_size or 0,
        kv_channels=args.kv_channels,
        gated_linear_unit=args.swiglu,
    )
