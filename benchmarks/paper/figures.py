"""All figures in one run, at a scale, by two processes."""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track

from benchmarks.paper import balance, speed
from benchmarks.paper.setups import CASES_OF_WINDOWS, SEVEN_128, TABLE_1

Row = dict[str, Any]
Task = tuple[Callable[..., Any], tuple[Any, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Steps that are simulated, and micro-batches of Figure 15."""

    small_model: int
    """Of 550M, whose steps differ most."""
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


def figure_12(case: int, scale: Scale) -> list[Row]:
    """Of case number `case`; cases are told by number, since each process keeps what it has derived of its own."""
    small = TABLE_1[case].name.startswith("550M")
    return speed.figure_12([TABLE_1[case]], scale.small_model if small else scale.other_models)


def figure_14(scale: Scale) -> list[Row]:
    return speed.figure_14(CASES_OF_WINDOWS if scale.everything else CASES_OF_WINDOWS[3:], scale.other_models)


def sensitivity(variation: str, scale: Scale) -> list[Row]:
    cases = TABLE_1 if scale.everything else (SEVEN_128,)
    return speed.sensitivity(cases, scale.sensitivity, [variation])


def run(scale: Scale) -> tuple[list[Row], dict[str, np.ndarray]]:
    """All rows, and the times of GPUs in a step of Figure 1 by scheme."""
    cases = range(len(TABLE_1)) if scale.everything else (TABLE_1.index(SEVEN_128),)
    names = list(speed.variations(SEVEN_128)) if scale.everything else QUICK_VARIATIONS
    tasks: list[Task] = [
        (balance.figures_1_and_4, (scale.gpus,)),
        *((figure_12, (case, scale)) for case in cases),
        (speed.figure_13, (scale.other_models,)),
        (figure_14, (scale,)),
        (balance.figure_15, (scale.layer,)),
        (balance.table_2, (scale.packing,)),
        *((sensitivity, (name, scale)) for name in names),
    ]
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        futures = [pool.submit(function, *arguments) for function, arguments in tasks]
        (first, gpus), *found = (f.result() for f in track(futures, "simulating", console=Console(stderr=True)))
    return [{"label": "simulated", **row} for rows in (first, *found) for row in rows], gpus
