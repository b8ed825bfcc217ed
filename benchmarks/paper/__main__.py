"""The paper's figures by simulation, set beside what the paper reports, what ours reaches, and what can be reached.

    python -m benchmarks.paper [--quick] [--check]

Times are simulated (megatron_wlb/simulate) under one calibration, `setups.CALIBRATION`, which no figure has its own of;
packing times are measured here. Writes benchmarks/results/paper.json and docs/paper.png.
"""

import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track

from benchmarks import results
from benchmarks.paper import balance, report, speed
from benchmarks.paper.setups import (
    CALIBRATION,
    CASES_OF_WINDOWS,
    SEVEN_128,
    SPEEDUPS,
    TABLE_1,
    check_calibration,
)
from benchmarks.results import Row

NEAR = 0.06
"""How near to the paper the averages of Figure 12 shall be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Steps that are simulated, and micro-batches of Figure 15."""

    small_model: int
    """For 550M, whose steps differ most."""
    other_models: int
    packing: int
    gpus: int
    layer: int
    sensitivity: int
    everything: bool = True
    """All cases and variations."""


FULL = Scale(small_model=1600, other_models=350, packing=250, gpus=24, layer=800, sensitivity=40)
QUICK = Scale(small_model=10, other_models=10, packing=10, gpus=2, layer=8, sensitivity=10, everything=False)
QUICK_VARIATIONS = ("as calibrated", "linear_tflops 400", "VPP 1")


def run(scale: Scale) -> tuple[list[Row], dict[str, np.ndarray]]:
    """All rows, and the times of GPUs in a step of Figure 1 by scheme."""
    cases = TABLE_1 if scale.everything else (SEVEN_128,)
    windows = CASES_OF_WINDOWS if scale.everything else CASES_OF_WINDOWS[3:]
    names = list(speed.variations(SEVEN_128)) if scale.everything else QUICK_VARIATIONS
    steps = {True: scale.small_model, False: scale.other_models}
    tasks: list[tuple[Any, tuple[Any, ...]]] = [
        (balance.figures_1_and_4, (scale.gpus,)),
        *((speed.figure_12, (case, steps[case.name.startswith("550M")])) for case in cases),
        (speed.figure_13, (scale.other_models,)),
        *((speed.figure_14, (case, scale.other_models)) for case in windows),
        (balance.figure_15, (scale.layer,)),
        (balance.table_2, (scale.packing,)),
        *((speed.sensitivity, (case, scale.sensitivity, names)) for case in cases),
    ]
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        futures = [pool.submit(function, *arguments) for function, arguments in tasks]
        (first, gpus), *others = (f.result() for f in track(futures, "simulating", console=Console(stderr=True)))
    return [{"label": "simulated", **row} for rows in (first, *others) for row in rows], gpus


def goals(rows: list[Row]) -> list[results.Goal]:
    """What was set out for, and that the steps are enough to tell."""
    speedups, targets = report.speedups(rows), []
    for group in ("all", "64K", "128K"):
        if ("12", group) in speedups:
            paper = SPEEDUPS["12", group, "WLB-LLM"]
            name = f"figure 12, WLB-LLM, {group}: away from the paper's {paper:.2f}"
            targets.append(results.at_most(name, abs(speedups["12", group]["WLB-LLM"] - paper), NEAR))
    for r in report.of(rows, "12"):
        if (r["case"], r["scheme"]) == (SEVEN_128.name, "ours, balance alone"):
            name = "7B-128K, ours by balance alone: share of the gain of perfect balance"
            targets.append(results.at_least(name, r["share_of_balance"], 0.93))
    errors = [r["standard_error"] for r in rows if r["figure"] in ("12", "13", "14", "15")]
    return [*targets, results.at_most("largest standard error", max(errors), 0.01)]


def show(rows: list[Row]) -> None:
    """Print the table of the figures and that of the sensitivity."""
    results.show(report.compare(rows), ("figure", "what", *report.COLUMNS), title="simulated; ms measured")
    title = "what the averages of figure 12 depend on (WLB-LLM over Plain-4D, simulated)"
    results.show(report.sensitivity(rows), title=title)


def main() -> None:
    args = results.parser(__doc__, "one case, a few steps, nothing written").parse_args()
    check_calibration()
    begin = time.perf_counter()
    rows, gpus = run(QUICK if args.quick else FULL)
    show(rows)
    calibration = [dict(zip(("name", "value", "from"), row, strict=True)) for row in CALIBRATION]
    checks = {"llama3_tflops": speed.llama3_tflops(), "step_seconds": report.step_seconds(rows)}
    settings = {"seconds": time.perf_counter() - begin, "scale": asdict(FULL), "calibration": calibration}
    settings |= {"checks": checks, "comparison": report.compare(rows)}
    draw = partial(report.draw, rows, gpus)
    results.finish(args, "paper", settings=settings, rows=rows, goals=goals(rows), draw=draw)


if __name__ == "__main__":
    main()
