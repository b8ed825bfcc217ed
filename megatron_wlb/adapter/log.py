"""The log entry of a step, as JSON, as a line, and as TensorBoard scalars."""

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

from megatron_wlb import files, sharding
from megatron_wlb.cost.attention import sharding_kernel
from megatron_wlb.job import Job
from megatron_wlb.plan import metrics
from megatron_wlb.plan.step import StepPlan
from megatron_wlb.sharding import rank_work

SOURCES = ("predicted", "measured")
"""Fields of an entry that hold shares, in the words and order of `simulate.SHARES`."""
Shares = Mapping[str, float | None] | None


def summary(
    plan: StepPlan,
    loss: float,
    step_seconds: float,
    wait_seconds: float,
    predicted: tuple[float, Mapping[str, float]] | None,
    measured: Shares,
) -> dict[str, Any]:
    """Return the log entry of a step, as JSON types.

    Args:
        plan: plan of the step.
        loss: mean over tokens.
        step_seconds: time of the step.
        wait_seconds: the part of it spent waiting for the planner.
        predicted: simulated time in us, and simulated shares; None if the job cannot be timed.
        measured: shares of the step's time.
    """
    tokens, (predicted_us, shares) = plan.tokens, predicted or (None, None)
    return {
        "step": plan.step + 1,
        "digest": f"{plan.digest:016x}",
        "loss": loss,
        "tokens": tokens,
        "num_micro_batches": len(plan.work),
        "padded_tokens": sum(m.padded_tokens for m in plan.micro_batches),
        "imbalance_original": metrics.imbalance(plan.original_work),
        "imbalance": metrics.imbalance(plan.work),
        "delay_mean_steps": sum(max(0, steps) * late for steps, late in plan.delays.items()) / tokens,
        "delay_max_steps": max(plan.delays),
        "waiting_documents": plan.packed.num_waiting,
        "delays_tokens": plan.delays,
        "step_ms": step_seconds * 1e3,
        "plan_wait_ms": wait_seconds * 1e3,
        "predicted_ms": None if predicted_us is None else predicted_us / 1e3,
        "predicted": shares,
        "measured": measured,
    }


def details(plan: StepPlan, job: Job) -> dict[str, Any]:
    """Return further fields of the log entry, as JSON types; work as in `cost.work`.

    `megatron-wlb compare` predicts `step_ms` from `job` and `lengths`, the document lengths of all M micro-batches.
    """
    kernel, cp = sharding_kernel(job), job.parallel.cp
    return {
        "job": job.to_json(),
        "original_work": plan.original_work.tolist(),
        "work": plan.work.tolist(),
        "micro_batches": [
            {
                "tokens": m.tokens,
                "strategy": m.shards.strategy,
                "rounds": m.shards.rounds,
                "cp_work": rank_work(m.shards, kernel).tolist(),
                "cp_work_per_sequence": rank_work(sharding.per_sequence(m.shards.lengths, cp), kernel).tolist(),
            }
            for m in plan.micro_batches
        ],
        "lengths": [lengths.tolist() for lengths in plan.batch.lengths],
    }


def scalars(plan: StepPlan, entry: dict[str, Any]) -> dict[str, float]:
    """Return numbers and shares of an entry, and shares of micro-batches by sharding."""
    found = {name: value for name, value in entry.items() if isinstance(value, int | float)}
    for how in SOURCES:
        shares = entry[how] or {}
        found |= {f"{how}-{name}": share for name, share in shares.items() if share is not None}
    chosen = Counter(m.shards.strategy for m in plan.micro_batches)
    return found | {f"sharding-{name}": count / len(plan.micro_batches) for name, count in chosen.items()}


def line(entry: dict[str, Any]) -> str:
    """Format the line that training prints."""
    return (
        f" wlb step {entry['step']:6d} | loss {entry['loss']:.6f} | tokens {entry['tokens']} in "
        f"{entry['num_micro_batches']} micro-batches | imbalance {entry['imbalance_original']:.3f} -> "
        f"{entry['imbalance']:.3f} | delay mean {entry['delay_mean_steps']:.2f} max {entry['delay_max_steps']} steps | "
        f"waiting {entry['waiting_documents']} documents"
        + "".join(f" | {how} {_percent(entry[how])}" for how in SOURCES if entry[how])
    )


def _percent(shares: Mapping[str, float | None]) -> str:
    """Format shares as "busy 71, bubble 24, exchange -, waiting 5 %"; - is an unknown share."""
    return ", ".join(f"{name} {'-' if s is None else round(100 * s)}" for name, s in shares.items()) + " %"


def append(path: str, entry: dict[str, Any]) -> None:
    """Append one JSON line, all or nothing. Raises OSError, as `files.append`."""
    files.append(path, (json.dumps(entry, separators=(",", ":")) + "\n").encode(), "--wlb-log")
