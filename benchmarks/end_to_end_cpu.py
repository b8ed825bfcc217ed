"""How much faster real training gets on two CPU cores: upstream's `pretrain()` with `--wlb` against plain packing.

    python -m benchmarks.end_to_end_cpu [--quick] [--check]

Two processes of one thread, each pinned to a core, train a small model on documents of random tokens with the lengths
of F2. Plain is Megatron's packing: a micro-batch for every window, in its order, sharded per sequence. Methods train
step by step by turns, and the same tokens in each step.

Busy is the CPU time of forward and backward passes in the thread that trains, by rank and micro-batch, without waits.
The critical path (`critical_path`) is the time that a step must take of it, imbalance the critical path over an even
share of the same work, and attainable plain's gain if its work were even and all else took as long. Imbalance is
predicted by costs that are fitted to some steps of training before, whose crossover packing goes by. Writes
benchmarks/results/end_to_end_cpu.json, in about half an hour; anything else that runs meanwhile spoils it.
"""

import functools
import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks import results
from benchmarks.critical_path import Costs, fit, summarise
from benchmarks.lengths import WINDOW, f2
from benchmarks.results import ROOT
from benchmarks.training_cpu import SHAPE, TRAINING, Steps, arguments, by_turns, train, warm, write_dataset


class Layout(NamedTuple):
    name: str
    flags: str
    methods: dict[str, str]
    """Name -> flags; the first is plain."""
    fraction: float | None = None
    """Goal for the last method, of the attainable gain."""

    @property
    def ranks(self) -> int:
        """Data-parallel ranks."""
        return 2 if self.name.startswith("DP") else 1


class Size(NamedTuple):
    window: int
    windows: tuple[int, ...]
    """Of a data-parallel rank in a step."""
    steps: int
    """Measured."""


PLAIN = "--wlb-packing megatron --wlb-cp-sharding per-sequence"
CP, PP = "--context-parallel-size 2", "--pipeline-model-parallel-size 2"
LAYOUTS = (
    Layout("DP=2", "", {"plain": PLAIN, "--wlb": ""}, 0.9),
    Layout("CP=2", CP, {"plain": PLAIN, "auto sharding alone": "--wlb-packing megatron", "--wlb": ""}, 0.9),
    Layout("PP=2", PP, {"plain": PLAIN, "--wlb": ""}),
    Layout(
        "PP=2 VPP=2",
        f"{PP} --num-virtual-stages-per-pipeline-rank 2 --num-layers 4",
        # Plain has Megatron's default groups.
        {"plain": f"{PLAIN} --microbatch-group-size-per-virtual-pipeline-stage 2", "--wlb": ""},
    ),
)
LONGEST = 2
"""S_max, in windows."""
SIZE = Size(window=4096, windows=(4, 8), steps=8)
QUICK = Size(window=2048, windows=(4,), steps=2)


def main() -> None:
    args = results.parser(__doc__, "about a minute: a short window").parse_args()
    if len(os.sched_getaffinity(0)) < 2:
        sys.exit("end_to_end_cpu: this process may run on one core only; it needs two")
    size = QUICK if args.quick else SIZE
    lengths, rows = np.maximum(f2(20000, 0) * size.window // WINDOW, 2), []
    with tempfile.TemporaryDirectory() as folder:
        dataset = write_dataset(Path(folder), lengths)
        profile = measure_profile(Path(folder), args.quick)
        stated = json.loads(profile.read_text())
        warm()
        costs = calibrate(size, dataset, profile)
        for layout, windows in itertools.product(LAYOUTS, size.windows):
            measured = measure(layout, windows, size, dataset, profile, costs.crossover)
            rows += summarise(layout.name, windows, measured, costs)
    results.show(rows)
    settings = {"model": [*SHAPE, *TRAINING], "profile": stated, **size._asdict()}
    settings |= {"lengths": "f2", "costs": {"trained": costs._asdict()}}
    settings |= {"layouts": [layout._asdict() for layout in LAYOUTS]}
    results.finish(args, "end_to_end_cpu", settings=settings, rows=rows, goals=goals(rows))


def measure_profile(folder: Path, quick: bool) -> Path:
    """A profile of this machine, measured now."""
    path = folder / "profile.json"
    command = [sys.executable, "-m", "megatron_wlb", "profile", *SHAPE, "--device", "cpu", "--output", path]
    subprocess.run([*command, "--quick"] if quick else command, check=True, cwd=ROOT)
    return path


def calibrate(size: Size, dataset: str, profile: Path) -> Costs:
    """Costs fitted to training itself, to the busy times of micro-batches that are not measured later."""
    windows, last = 2 * min(size.windows), size.steps + 1
    argv = arguments(dataset, size.window, windows, last, f"--wlb --wlb-profile {profile} {PLAIN}")
    trained = by_turns({"plain": functools.partial(train, argv=argv, first=1)})["plain"]
    return fit([step for of_rank in trained for step in of_rank])


def measure(
    layout: Layout, windows: int, size: Size, dataset: str, profile: Path, crossover: int
) -> dict[str, list[Steps]]:
    """Method -> the steps of each rank."""
    first, methods = size.steps + 2, {}  # behind those of the fit
    for method, of_method in layout.methods.items():
        flags = f"--wlb --wlb-profile {profile} --wlb-max-tokens {LONGEST * size.window} {layout.flags} {of_method}"
        argv = arguments(dataset, size.window, windows * layout.ranks, first + size.steps, flags)
        methods[method] = functools.partial(train, argv=argv, first=first, crossover=crossover)
    return by_turns(methods)


def goals(rows: list[results.Row]) -> list[results.Goal]:
    """`--wlb` is nowhere slower, and reaches its fraction of the gain; imbalance is as predicted for every method."""
    wanted = []
    for row in rows:
        name = f"{row['layout']}, {row['windows']} windows, {row['method']}"
        if row["method"] == "--wlb":
            wanted.append(results.at_least(f"{name}: tokens per second over plain", row["speedup"], 1.0))
            fraction = next(layout.fraction for layout in LAYOUTS if layout.name == row["layout"])
            if fraction:
                wanted.append(results.at_least(f"{name}: fraction of the attainable gain", row["fraction"], fraction))
        error = abs(row["imbalance by trained"] / row["imbalance"] - 1)
        wanted.append(results.at_most(f"{name}: imbalance, predicted against measured", error, 0.05))
    return wanted


if __name__ == "__main__":
    main()
