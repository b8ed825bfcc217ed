"""Packing policies: which documents run in this step, and in which micro-batch."""

from collections.abc import Sequence

from megatron_wlb.plan.packing import adaptive
from megatron_wlb.plan.packing.adaptive import AdaptivePolicy
from megatron_wlb.plan.packing.fixed import FixedPolicy
from megatron_wlb.plan.packing.ilp import IlpPolicy
from megatron_wlb.plan.packing.original import OriginalPolicy
from megatron_wlb.plan.packing.wlb import WlbPolicy
from megatron_wlb.plan.types import Policy

POLICIES = ("original", "fixed", "ilp", "wlb", "adaptive")

__all__ = ["POLICIES", "AdaptivePolicy", "FixedPolicy", "IlpPolicy", "OriginalPolicy", "WlbPolicy", "make_policy"]


def make_policy(
    name: str,
    *,
    num_micro_batches: int,
    context_length: int,
    max_tokens: int,
    crossover_tokens: int,
    outlier_thresholds: Sequence[int] = (),
    mode: str = "constant-tokens",
    max_delay_steps: int = 30,
    balance_tolerance: float | None = None,
    age_tolerance: float | None = None,
    num_global_batches: int = 1,
    time_limit_seconds: float = 60.0,
    use_native: bool,
) -> Policy:
    """The policy of that name; each takes of the settings what it has use for.

    Raises ValueError for an unknown name or mode, and for settings that the policy refuses.
    """
    if name == "original":
        return OriginalPolicy(num_micro_batches=num_micro_batches, context_length=context_length, use_native=use_native)
    if name == "fixed":
        return FixedPolicy(
            num_micro_batches=num_micro_batches,
            context_length=context_length,
            num_global_batches=num_global_batches,
            crossover_tokens=crossover_tokens,
            use_native=use_native,
        )
    if name == "ilp":
        return IlpPolicy(
            num_micro_batches=num_micro_batches,
            context_length=context_length,
            num_global_batches=num_global_batches,
            time_limit_seconds=time_limit_seconds,
        )
    if name == "wlb":
        return WlbPolicy(
            num_micro_batches=num_micro_batches,
            max_tokens=max_tokens,
            outlier_thresholds=outlier_thresholds,
            crossover_tokens=crossover_tokens,
            use_native=use_native,
        )
    if name == "adaptive":
        chosen = adaptive.settings(
            num_micro_batches=num_micro_batches,
            max_tokens=max_tokens,
            context_length=context_length,
            mode=mode,
            max_delay_steps=max_delay_steps,
            balance_tolerance=balance_tolerance,
            age_tolerance=age_tolerance,
        )
        return AdaptivePolicy(chosen, crossover_tokens=crossover_tokens, use_native=use_native)
    raise ValueError(f"unknown packing policy {name!r}; choose one of {', '.join(POLICIES)}")
