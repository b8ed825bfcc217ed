"""Megatron's arguments that `--wlb` cannot serve, with reason and remedy: by the table, and by rules over several."""

from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

from megatron_wlb.describe.arguments import ARGUMENTS, Refused, flag_of, rows
from megatron_wlb.describe.megatron import has_linear_layers
from megatron_wlb.packing import policy_of


def _balancing(a: Any) -> bool:
    types = a.moe_router_load_balancing_type or ()
    return bool(a.num_experts) and "quantile_balancing" in ([types] if isinstance(types, str) else types)


def dispatches(a: Any, dispatcher: str, backend: str | None = None) -> bool:
    chosen = a.moe_token_dispatcher_type == dispatcher and backend in (None, a.moe_flex_dispatcher_backend)
    return bool(a.num_experts) and chosen


def _has_delta_nets(a: Any) -> bool:
    return bool(a.experimental_attention_variant) or "G" in (a.hybrid_layer_pattern or "")


def _ranks(a: Any) -> int:
    return int((a.tensor_model_parallel_size or 1) * (a.context_parallel_size or 1))


def _mamba_heads(a: Any) -> int:
    """Heads of a Mamba layer, 0 without such layers."""
    counted = a.mamba_num_heads or 2 * (a.hidden_size or 0) // (a.mamba_head_dim or 64)
    return counted if "M" in (a.hybrid_layer_pattern or "") else 0


RULES: dict[str, Callable[[Any], Any]] = {
    (
        "--linear-num-key-heads and --linear-num-value-heads do not divide by --tensor-model-parallel-size x "
        "--context-parallel-size, and every rank computes whole heads; give fewer ranks"
    ): lambda a: (
        _has_delta_nets(a)
        and any(heads % _ranks(a) for heads in (a.linear_num_key_heads or 16, a.linear_num_value_heads or 32))
    ),
    (
        "--mamba-num-heads (default: 2 x --hidden-size / --mamba-head-dim) does not divide by "
        "--tensor-model-parallel-size x --context-parallel-size, and every rank computes whole heads; give fewer ranks"
    ): lambda a: _mamba_heads(a) % _ranks(a),
    "--hybrid-layer-pattern with --multi-latent-attention has not been tried; leave one of them out": lambda a: (
        a.hybrid_layer_pattern and a.multi_latent_attention
    ),
    "--deterministic-mode has no gated delta nets by document in upstream; leave it out": lambda a: (
        _has_delta_nets(a) and a.deterministic_mode
    ),
    "--disable-mamba-mem-eff-path has no states by document in upstream; leave it out": lambda a: (
        a.hybrid_layer_pattern and a.use_mamba_mem_eff_path is False
    ),
    "FP8 and FP4 have not been tried in gated delta nets and Mamba layers; leave --fp8-format or --fp4-format out": (
        lambda a: has_linear_layers(a) and (a.fp8 or a.fp4)
    ),
    "--mtp-num-layers with --experimental-attention-variant or --hybrid-layer-pattern fails in upstream, or has not "
    "been tried; leave it out": lambda a: has_linear_layers(a) and a.mtp_num_layers,
    (
        "--tensor-model-parallel-size over 1 without --sequence-parallel leaves gradients of norms in gated delta nets "
        "that upstream does not sum over ranks; give --sequence-parallel"
    ): lambda a: _has_delta_nets(a) and a.tensor_model_parallel_size > 1 and not a.sequence_parallel,
    "gated delta nets know no activation but SiLU, and upstream fails at the first step with another; give --swiglu": (
        lambda a: _has_delta_nets(a) and not a.swiglu
    ),
    "--multiple-validation-sets: upstream wants --full-validation with it; give both, or blend the sets": lambda a: (
        a.multiple_validation_sets and not a.full_validation
    ),
    "--wlb-sft-skip has no effect without --sft; give both, or neither": lambda a: (
        a.wlb_sft_skip is not None and not a.sft
    ),
    "--wlb-mock-lengths has no effect without --mock-data; give both, or neither": lambda a: (
        a.wlb_mock_lengths is not None and not a.mock_data
    ),
    (
        "--moe-router-load-balancing-type quantile_balancing needs tokens * topk of every micro-batch to divide by the "
        "experts, and micro-batches vary in length; choose another"
    ): _balancing,
    "--mlp-chunks-for-training routes the chunks of a micro-batch without its padding mask; leave it out": lambda a: (
        a.num_experts and (a.mlp_chunks_for_training or 1) > 1
    ),
    "--moe-expert-rank-capacity-factor reads a step's micro-batches ahead, by --global-batch-size; leave it out": (
        lambda a: a.moe_expert_rank_capacity_factor and a.moe_flex_dispatcher_backend == "hybridep"
    ),
    (
        "with two pipeline ranks and virtual stages the next rank is also the previous one, and messages of one batch "
        "would be mixed up; leave --no-overlap-p2p-communication out"
    ): lambda a: (
        a.pipeline_model_parallel_size == 2
        and a.overlap_p2p_comm is False
        and (a.num_virtual_stages_per_pipeline_rank or a.num_layers_per_virtual_pipeline_stage)
    ),
    (
        "--position-embedding-type yarn with --multi-latent-attention, whose layers rotate by themselves; give rope, "
        "and --rope-type yarn"
    ): lambda a: a.multi_latent_attention and a.position_embedding_type == "yarn",
    (
        "--multi-latent-attention with --tensor-model-parallel-size over 1 and without --sequence-parallel has "
        "gradients of latents that upstream does not sum over ranks, or twice; give --sequence-parallel"
    ): lambda a: a.multi_latent_attention and a.tensor_model_parallel_size > 1 and not a.sequence_parallel,
    "--apply-layernorm-1p is not supported with --transformer-impl local; leave one of them out": lambda a: (
        a.transformer_impl == "local" and a.layernorm_zero_centered_gamma
    ),
    (
        "--save and --load to object storage are not supported with delay, what waits is a file beside the checkpoint; "
        "give a folder"
    ): lambda a: any("://" in str(folder) for folder in (a.save, a.load)) and policy_of(a.wlb_packing).delays,
}
"""Messages, and whether arguments `a` are refused; a missing one is None."""


class Lenient(Namespace):
    """Arguments that are None if missing."""

    def __getattr__(self, name: str) -> None:
        return None


def refusals(args: Namespace) -> Iterator[str]:
    """Yield why `--wlb` cannot serve arguments: flag, reason and remedy."""
    given = Lenient(**vars(args))
    for name, _ in rows(Refused):
        if why := refusal(name, getattr(given, name)):
            yield why
    for message, refused in RULES.items():
        if refused(given):
            yield message


def refusal(name: str, value: Any) -> str:
    """Return why an argument has a row that refuses this value; "" if none does."""
    found = (row for row in ARGUMENTS[name] if isinstance(row, Refused) and row.when(value))
    return next((f"{flag_of(name)} {row.reason.format(value)}" for row in found), "")


def check(args: Namespace) -> None:
    """Raise ValueError for the first of `refusals`. Call this before upstream validates its arguments."""
    for why in refusals(args):
        raise ValueError(f"--wlb: {why}")


def refuses(name: str, value: Any, *, has_experts: bool) -> bool:
    """Return whether an argument is refused for its value alone."""
    served = {"seq_length": 1024, "attention_dropout": 0, "tensor_model_parallel_size": 1, "swiglu": True}
    try:
        return any(refusals(Namespace(**served | {"num_experts": 2 if has_experts else None, name: value})))
    except TypeError:  # text instead of a number
        return True
