"""Table 2 of the paper with our rows added: how evenly each policy packs, and what that costs in order.

    python -m benchmarks.packing [--quick] [--check]

All pack the same windows of documents in file order; the first and last tenth of the steps are left out of averages.
Times are of the CPU: of the core, which chooses and places documents, and of all planning of a step on one rank. Writes
benchmarks/results/packing.json and docs/packing.png.
"""

import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from benchmarks import metrics, results
from benchmarks.fixed import FixedPacking
from benchmarks.ilp import IlpPacking
from benchmarks.lengths import CROSSOVER, S_MAX, WINDOW, f2, job_7b, packer, samples
from benchmarks.results import Row, at_most
from megatron_wlb import _native
from megatron_wlb.job import Job, Packing
from megatron_wlb.packing.adaptive import AdaptivePacking
from megatron_wlb.packing.megatron import MegatronPacking
from megatron_wlb.packing.paper import PaperPacking
from megatron_wlb.plan.packer import Packer
from megatron_wlb.plan.step import plan_packed

TUNINGS = ((0.5,), (0.25,), (0.25, 0.5), (0.5, 0.75), (0.375, 0.625, 0.875), (0.125, 0.25, 0.5), (0.5, 0.95))
"""Thresholds of Algorithm 1 in shares of the window."""
DELAY = "adaptive, delay"
MOST_DELAY = {"imbalance_mean": 1.006, "late_steps": 0.47, "token_cv": 0.02, "max_delay_steps": 25}
"""Goals of adaptive packing with a delay."""
MOST_MS = {"core, N=4": 0.5, "core, N=2048": 50, "planning, N=16": 3, "planning, N=2048": 60}


def policies() -> dict[str, Packing]:
    """Every policy that runs on all settings, by label."""
    every: dict[str, Packing] = {"original": MegatronPacking()}
    every |= {f"fixed, {k} global batches": FixedPacking(global_batches=k) for k in (1, 2, 4, 8)}
    for tuning in TUNINGS:
        label = f"Algorithm 1, {'/'.join(f'{share:g}' for share in tuning)}"
        every[label] = PaperPacking(outlier_thresholds=tuple(round(share * WINDOW) for share in tuning))
    return every | {"adaptive": AdaptivePacking(), DELAY: AdaptivePacking(max_delay_steps=30)}


def measure(job: Job, lengths: np.ndarray, steps: int) -> Row:
    """Balance and order of `steps` steps; samples repeat if they end."""
    packs = packer(lengths, job)
    packed = [packs.next() for _ in range(steps)]
    return metrics.summarise([metrics.measure(step.batch, step.step, job) for step in packed])


def quality(quick: bool) -> list[Row]:
    """Rows of the big table."""
    rows, lengths = [], f2(200_000 if quick else 900_000, 0)
    for label, packing in results.track(list(policies().items()), "packing"):
        summary = measure(job_7b(packing=packing), lengths, 60 if quick else 300)
        rows.append({"S_max": S_MAX, "policy": label, **summary})
    return rows


def solver_rows(quick: bool) -> list[Row]:
    """Equation 1 by HiGHS; minutes, so few steps."""
    rows = []
    for k in (1, 2) if quick else (1, 2, 4):
        packing, steps = IlpPacking(global_batches=k), 4 * k if quick else 12 * k
        summary = measure(job_7b(packing=packing, max_tokens=WINDOW), f2(200_000, 0), steps)
        label = f"solver, {k} global batches, {packing.time_limit_seconds:g} s limit, {steps} steps"
        rows.append({"S_max": 1.0, "policy": label, **summary})
    return rows


def timings(quick: bool) -> list[Row]:
    """CPU time of steps by N."""
    rows, lengths = [], f2(600_000, 0)
    for n, steps in ((4, 200), (16, 100), (64, 40), (2048, 4 if quick else 12)):
        for what, times in zip(("planning", "core"), step_times(lengths, job_7b(n), steps), strict=True):
            rows.append({"what": f"{what}, N={n}", "median_ms": 1e3 * float(np.median(times[len(times) // 10 :]))})
    return rows


def step_times(lengths: np.ndarray, job: Job, steps: int) -> tuple[list[float], list[float]]:
    """CPU seconds of planning a step on one rank, and of the placement of documents alone."""
    packs = Packer(samples(lengths, WINDOW, shuffle=True), job)
    whole, times, place = [], [], _native.place_documents

    def stopped(*arguments: Any) -> Any:
        begin = time.process_time()
        placed = place(*arguments)
        times.append(time.process_time() - begin)
        return placed

    with patch.object(_native, "place_documents", stopped):
        for _ in range(steps):
            begin = time.process_time()
            plan_packed(packs.next(), job, 0)
            whole.append(time.process_time() - begin)
    return whole, times


def goals(rows: list[Row], times: list[Row]) -> list[results.Goal]:
    """What this packer set out to reach."""
    ours, ms = next(r for r in rows if r["policy"] == DELAY), {row["what"]: row["median_ms"] for row in times}
    case = f"F2, N=4, S_max {S_MAX}, {DELAY}"
    wanted = [at_most(f"{case}: {name}", ours[name], most) for name, most in MOST_DELAY.items()]
    return wanted + [at_most(f"{what}: ms", ms[what], most) for what, most in MOST_MS.items()]


def draw(rows: list[Row], folder: Path) -> Path:
    """Imbalance over delay and over the variation of tokens: down and to the left is better."""
    figure = results.figure(11, 4)
    axes = figure.subplots(1, 2)
    styles = {"Algorithm 1": ("#d55e00", "o"), "adaptive": ("#0072b2", "s"), "fixed": ("#8c8c8c", "^")}
    measures = (("late_steps", "mean delay (steps)"), ("token_cv", "tokens per step, CV"))
    for axis, (key, label) in zip(axes, measures, strict=True):
        for family, (color, marker) in styles.items():
            points = [(r[key], r["imbalance_mean"] - 1) for r in rows if r["policy"].startswith(family)]
            axis.scatter(*zip(*points, strict=True), color=color, marker=marker, label=family, s=40)
        axis.set(xlabel=label, yscale="log")
    axes[0].set_ylabel("mean imbalance - 1")
    axes[0].legend(frameon=False)
    figure.suptitle("F2, N = 4, S_max = 1.25 windows", x=0.01, ha="left", fontsize=11)
    return results.save(figure, "packing", folder)


def main() -> None:
    args = results.parser(__doc__, "a minute: fewer steps").parse_args()
    rows, times = quality(args.quick) + solver_rows(args.quick), timings(args.quick)
    results.show(rows)
    results.show(times)
    settings = {"data": "F2", "N": 4, "window": WINDOW, "crossover": CROSSOVER, "timings": times}
    results.finish(args, "packing", settings=settings, rows=rows, goals=goals(rows, times), draw=partial(draw, rows))


if __name__ == "__main__":
    main()
