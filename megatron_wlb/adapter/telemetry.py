"""Scalars under `wlb/` where Megatron writes its own: TensorBoard and Weights & Biases."""

from argparse import Namespace
from collections import Counter
from typing import Any

import numpy as np
from megatron.training import get_tensorboard_writer, get_wandb_writer

from megatron_wlb.adapter import log
from megatron_wlb.plan.step import StepPlan

_SMOOTHING = 0.9
"""Weight of the steps before in the speed by which the time of a step is predicted."""

_MOST_BINS = 512
"""Bins of a histogram of W&B."""


class Telemetry:
    """Every `--tensorboard-log-interval` steps, if the run writes TensorBoard or W&B at all; else it does nothing."""

    def __init__(self, args: Namespace) -> None:
        self._interval = args.tensorboard_log_interval if args.tensorboard_dir or args.wandb_project else 0
        self._seconds_per_work: float | None = None

    def wants(self, iteration: int) -> bool:
        """Whether `write` will write anything."""
        return self._interval > 0 and iteration % self._interval == 0

    def write(self, iteration: int, plan: StepPlan, entry: dict[str, Any]) -> None:
        """Write a step, of which `entry` is `log.summary`; only on the rank that has upstream's writers."""
        if not self.wants(iteration):
            return
        scalars = self._scalars(plan, entry)
        steps, tokens = np.array(sorted(plan.delays.items())).T
        if board := get_tensorboard_writer():
            for name, value in scalars.items():
                board.add_scalar(f"wlb/{name}", value, iteration)
            _histogram(board, "wlb/delay", steps, tokens, iteration)
        if wandb := get_wandb_writer():
            ends = int(steps[0]), int(steps[-1]) + 1
            delays = np.histogram(steps, min(ends[1] - ends[0], _MOST_BINS), ends, weights=tokens)
            values = scalars | {"delay": wandb.Histogram(np_histogram=delays)}
            wandb.log({f"wlb/{name}": value for name, value in values.items()}, iteration)

    def _scalars(self, plan: StepPlan, entry: dict[str, Any]) -> dict[str, float]:
        step_seconds = entry["step_ms"] / 1e3
        scalars = {
            "tokens": entry["tokens"],
            "micro-batches": entry["num_micro_batches"],
            "imbalance": entry["imbalance"],
            "imbalance-original": entry["imbalance_original"],
            "delay-mean": entry["delay_mean_steps"],
            "delay-max": entry["delay_max_steps"],
            "waiting-documents": plan.num_waiting,
            "planner-wait": entry["plan_wait_ms"] / 1e3,
            "step-time": step_seconds,
        }
        for how in log.SOURCES:
            shares = entry[how] or {}
            scalars |= {f"{how}-{name}": share for name, share in shares.items() if share is not None}
        chosen = Counter(m.shards.strategy for m in plan.micro_batches)
        scalars |= {f"sharding-{name}": count / len(plan.micro_batches) for name, count in chosen.items()}
        speed = step_seconds / plan.cost
        if self._seconds_per_work is not None:
            # What the plan's cost model expects at the speed of the steps before.
            scalars["step-time-predicted"] = self._seconds_per_work * plan.cost
            speed = _SMOOTHING * self._seconds_per_work + (1 - _SMOOTHING) * speed
        self._seconds_per_work = speed
        return scalars


def _histogram(board: Any, name: str, steps: np.ndarray, tokens: np.ndarray, iteration: int) -> None:
    """Tokens by their delay in steps, as they are: TensorBoard's own binning would first have to unroll them."""
    weights = tokens.astype(np.float64)
    board.add_histogram_raw(
        name,
        min=float(steps[0]),
        max=float(steps[-1]),
        num=int(tokens.sum()),
        sum=float(weights @ steps),
        sum_squares=float(weights @ steps**2),
        bucket_limits=[float(s) for s in steps],
        bucket_counts=weights.tolist(),
        global_step=iteration,
    )
