"""Writes scalars under `wlb/` to Megatron's TensorBoard and Weights & Biases writers."""

from argparse import Namespace
from collections import Counter
from typing import Any

from megatron.training import get_tensorboard_writer, get_wandb_writer

from megatron_wlb.adapter import log
from megatron_wlb.plan.step import StepPlan


class Telemetry:
    """Writes every `--tensorboard-log-interval` steps if the run uses TensorBoard or W&B, else never."""

    def __init__(self, args: Namespace) -> None:
        self._interval = args.tensorboard_log_interval if args.tensorboard_dir or args.wandb_project else 0

    def wants(self, iteration: int) -> bool:
        """Whether `write` writes anything at `iteration`."""
        return self._interval > 0 and iteration % self._interval == 0

    def write(self, iteration: int, plan: StepPlan, entry: dict[str, Any]) -> None:
        """Write a step on the rank with upstream's writers; `entry` is its `log.summary`."""
        if not self.wants(iteration):
            return
        values = {f"wlb/{name}": value for name, value in scalars(plan, entry).items()}
        if board := get_tensorboard_writer():
            for name, value in values.items():
                board.add_scalar(name, value, iteration)
        if wandb := get_wandb_writer():
            wandb.log(values, iteration)


def scalars(plan: StepPlan, entry: dict[str, Any]) -> dict[str, float]:
    """Return the scalars of a step; times in seconds."""
    found = {
        "tokens": entry["tokens"],
        "micro-batches": entry["num_micro_batches"],
        "imbalance": entry["imbalance"],
        "imbalance-original": entry["imbalance_original"],
        "delay-mean": entry["delay_mean_steps"],
        "delay-max": entry["delay_max_steps"],
        "waiting-documents": plan.num_waiting,
        "planner-wait": entry["plan_wait_ms"] / 1e3,
        "step-time": entry["step_ms"] / 1e3,
    }
    if entry["predicted_ms"] is not None:
        found["step-time-predicted"] = entry["predicted_ms"] / 1e3
    for how in log.SOURCES:
        shares = entry[how] or {}
        found |= {f"{how}-{name}": share for name, share in shares.items() if share is not None}
    chosen = Counter(m.shards.strategy for m in plan.micro_batches)
    return found | {f"sharding-{name}": count / len(plan.micro_batches) for name, count in chosen.items()}
