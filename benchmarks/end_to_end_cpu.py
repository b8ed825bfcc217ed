"""How much faster real training gets on two CPU cores: upstream's `pretrain()` with `--wlb` against plain packing.

    python -m benchmarks.end_to_end_cpu [--quick] [--check] [--layouts DP=2 ...] [--rounds N]

Two processes of one thread, each pinned to a core, train a small model on documents of random tokens with the lengths
of F2. Plain is Megatron's packing: concatenate in order, cut at the window, shard per
sequence. Methods run by turns, every round on the next steps, so that all train the same data.

Busy is the CPU time of forward and backward passes in the thread that trains, by rank and micro-batch, without waits.
The critical path (`critical_path`) is the time that a step must take of it, imbalance the critical path over an even
share of the same work, and attainable plain's gain if its work were even and all else took as long. Gains are per work,
that is, per second of computing, and per token. These differ, since a document that plain packing cuts at the window
needs less attention than a whole one, and the few measured steps differ in their documents; so the gain per token is
the gain per work over the work per token of many planned steps. Imbalance is predicted by two cost models: of
`megatron-wlb profile`, and fitted to some steps of training before, whose crossover packing goes by. The gain by CPU
time is of the critical path and all other computing of the thread, without waits for messages or a busy core.

Layouts are compared over plain packing with DP=2 by the planned work of documents, since passes of different layouts
compute different things. Writes benchmarks/results/end_to_end_cpu.json, in about 45 minutes; anything else that runs
meanwhile spoils it.
"""

import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import track

from benchmarks import results
from benchmarks.critical_path import Costs, fit, summarise
from benchmarks.lengths import WINDOW, f2, job_7b, work_per_token
from benchmarks.results import ROOT, Row
from benchmarks.training_cpu import SEED, SHAPE, TRAINING, Steps, arguments, train, warm, write_dataset
from megatron_wlb.packing import POLICIES
from megatron_wlb.plan.dataset import trained_tokens
from megatron_wlb.plan.packer import make_packer
from megatron_wlb.plan.stream import DocumentStream, Source
from tests.worlds import run_world

WARM_STEPS = 100
"""Planned and not trained, so that deferred documents are as in the middle of a run."""
PLANNED_STEPS = 2000
"""Steps that tell the work per token."""
COLUMNS = (
    *("layout", "method", "speedup_per_token", "speedup_per_work", "speedup_by_cpu_time", "attainable", "fraction"),
    *("work_per_token", "imbalance", "imbalance by trained", "share_error_median", "other_computing", "no_computing"),
)
PREDICTED = (
    *("layout", "method", "late_steps", "speedup_per_work", "computing_gain", "computing_gain by trained"),
    *("over_plain_dp", "over_plain_dp_by_cpu_time", "over_plain_dp_computing", "over_plain_dp by trained"),
)


class Layout(NamedTuple):
    name: str
    flags: str
    micro_batches: int
    """Micro-batches of a step."""
    methods: dict[str, str]
    """Name -> flags; the first is plain."""
    fraction: float | None = None
    """Goal, of the attainable gain."""
    longest: float = 2
    """S_max, in windows."""
    rounds: int | None = None
    """Fewer than usual, of steps that take longer."""
    goals: dict[str, float] = {}  # noqa: RUF012
    """Column -> what the last method should reach."""

    @property
    def ranks(self) -> int:
        """Data-parallel ranks."""
        return 2 if self.name.startswith("DP") else 1

    @property
    def same_model(self) -> bool:
        """The model is that of DP=2."""
        return "--num-layers" not in self.flags


class Size(NamedTuple):
    window: int
    steps: int
    """Measured, per round and method."""
    rounds: int


PLAIN = "--wlb-packing original --wlb-cp-sharding per-sequence --wlb-defer-weight-gradients off"
CP, PP = "--context-parallel-size 2", "--pipeline-model-parallel-size 2"
ADAPTIVE, ORIGINAL = "--wlb-packing adaptive", "--wlb-packing original --wlb-cp-sharding"
LAYOUTS = (
    Layout("DP=2", "", 2, {"plain": PLAIN} | {p: f"--wlb-packing {p}" for p in ("fixed", "wlb", "adaptive")}, 0.9),
    Layout("CP=2", CP, 1, {"plain": PLAIN} | {s: f"{ORIGINAL} {s}" for s in ("per-document", "hybrid", "auto")}, 0.9),
    Layout(
        "PP=2",
        PP,
        4,
        {"plain": PLAIN, "wlb": "--wlb-packing wlb"}
        | {"adaptive, not deferred": f"{ADAPTIVE} --wlb-defer-weight-gradients off", "adaptive": ADAPTIVE},
        goals={"speedup_per_work": 1.28},
    ),
    Layout(
        "CP=2 for DP=2",
        CP,
        2,
        {"plain": PLAIN, "adaptive, M = N/2": f"{ADAPTIVE} --wlb-micro-batches 1"},
        longest=2.5,
        goals={"over_plain_dp": 1.21},
    ),
    Layout(
        "PP=2 VPP=2",
        f"{PP} --num-virtual-stages-per-pipeline-rank 2 --num-layers 4",
        4,
        # Plain has Megatron's default groups.
        {"plain": f"{PLAIN} --microbatch-group-size-per-virtual-pipeline-stage 2", "adaptive": ADAPTIVE},
        rounds=2,
    ),
)
SIZE = Size(window=8192, steps=6, rounds=4)
QUICK = Size(window=2048, steps=3, rounds=1)


def main() -> None:
    parser = results.parser(__doc__, "about a minute: a short window")
    parser.add_argument("--layouts", nargs="+", choices=[layout.name for layout in LAYOUTS], help="default: all")
    parser.add_argument("--rounds", type=int, help=f"default: {SIZE.rounds}, with --quick {QUICK.rounds}")
    args = parser.parse_args()
    if len(os.sched_getaffinity(0)) < 2:
        sys.exit("end_to_end_cpu: this process may run on one core only; it needs two")
    size = QUICK if args.quick else SIZE
    size = size._replace(rounds=args.rounds or size.rounds)
    layouts = [layout for layout in LAYOUTS if layout.name in (args.layouts or (layout.name,))]
    lengths = np.maximum(f2(20000, 0) * size.window // WINDOW, 2)
    with tempfile.TemporaryDirectory() as folder:
        dataset = write_dataset(Path(folder), lengths)
        profile = measure_profile(Path(folder), args.quick)
        stated = json.loads(profile.read_text())
        warm()
        models = calibrate(size, dataset, profile)
        crossover = models["trained"].crossover
        measured = {layout.name: measure(layout, size, dataset, profile, crossover) for layout in layouts}
    rows = []
    for layout in layouts:
        work = {m: planned_work(lengths, layout, flags, size.window, crossover) for m, flags in layout.methods.items()}
        dp = measured.get("DP=2", {}).get("plain") if layout.same_model else None
        own = layout.micro_batches // layout.ranks
        rows += summarise(layout.name, own, measured[layout.name], models, work, dp)
    results.show(rows, COLUMNS)
    results.show(rows, PREDICTED)
    suffix = "".join("_" + "".join(filter(str.isalnum, name.lower())) for name in args.layouts or ())
    settings = {"model": [*SHAPE, *TRAINING], "profile": stated, **size._asdict()}
    settings |= {"lengths": "f2", "costs": {name: costs._asdict() for name, costs in models.items()}}
    settings |= {"layouts": [layout._asdict() for layout in layouts]}
    wanted = goals(layouts, rows)
    results.finish(args, "end_to_end_cpu", settings=settings, rows=rows, goals=wanted, suffix=suffix)


def measure_profile(folder: Path, quick: bool) -> Path:
    """A profile of this machine, measured now."""
    path = folder / "profile.json"
    command = [sys.executable, "-m", "megatron_wlb", "profile", *SHAPE, "--device", "cpu", "--output", path]
    subprocess.run([*command, "--quick"] if quick else command, check=True, cwd=ROOT)
    return path


def calibrate(size: Size, dataset: str, profile: Path) -> dict[str, Costs]:
    """Cost models: of the profile, which knows a layer's matrices and attention, and fitted to training itself.

    The fit is to the busy times of micro-batches that are not measured later.
    """
    data = json.loads(profile.read_text())
    linear = data["linear"]["forward_us_per_token"] + data["linear"]["backward_us_per_token"]
    flags = f"--wlb --wlb-profile {profile} {PLAIN}"
    argv = arguments(dataset, size.window, 2, WARM_STEPS, flags)
    steps = [step for steps in run_world(train, 2, argv, WARM_STEPS - size.steps, timeout=600) for step in steps]
    return {"profile": Costs(data["crossover_tokens"], linear), "trained": fit(steps)}


def measure(layout: Layout, size: Size, dataset: str, profile: Path, crossover: int) -> dict[str, list[list[Steps]]]:
    """Method -> of every round: the steps of each rank."""
    measured: dict[str, list[list[Steps]]] = {method: [] for method in layout.methods}
    rounds = min(size.rounds, layout.rounds or size.rounds)
    for number in track(range(rounds), layout.name, console=Console(stderr=True)):
        # Turns go back and forth, so that none always follows the same other.
        for method in list(layout.methods)[:: 1 if number % 2 == 0 else -1]:
            first = WARM_STEPS + number * size.steps
            flags = f"--wlb --wlb-profile {profile} --wlb-crossover {crossover}"
            flags += f" --wlb-max-tokens {round(layout.longest * size.window)}"
            flags += f" {layout.flags} {layout.methods[method]}"
            argv = arguments(dataset, size.window, layout.micro_batches, first + size.steps, flags)
            measured[method].append(run_world(train, 2, argv, first, timeout=600))
    return measured


def planned_work(lengths: np.ndarray, layout: Layout, flags: str, window: int, crossover: int) -> float:
    """Work per token that a method plans over PLANNED_STEPS."""
    changes = {"crossover_tokens": crossover, "max_tokens": round(layout.longest * window)}
    job = job_7b(layout.micro_batches, window, packing=POLICIES[flags.split()[1]](), **changes)
    stream = DocumentStream([Source(lengths=trained_tokens(lengths))], seed=SEED, context_length=window)
    return work_per_token(make_packer(stream, job), job, PLANNED_STEPS)


def goals(layouts: list[Layout], rows: list[Row]) -> list[results.Goal]:
    """The best method of a layout reaches its fraction of the gain; imbalance is as predicted for every method."""
    wanted = []
    for layout in layouts:
        here = [row for row in rows if row["layout"] == layout.name]
        if layout.fraction:
            best = max(here[1:], key=lambda row: row["fraction"])
            name = f"{layout.name}, {best['method']}: fraction of the attainable gain"
            wanted.append(results.at_least(name, best["fraction"], layout.fraction))
        for column, goal in layout.goals.items():
            if column in here[-1]:
                name = f"{layout.name}, {here[-1]['method']}: {column}"
                wanted.append(results.at_least(name, here[-1][column], goal))
        if "over_plain_dp" in layout.goals:
            # Documents that straddle two global batches count, plain packing's as well.
            name = f"{layout.name}, {here[-1]['method']}: mean delay beyond that of plain, steps"
            wanted.append(results.at_most(name, here[-1]["late_steps"] - here[0]["late_steps"], 0.005))
        pairs = ("imbalance", "imbalance by trained"), ("over_plain_dp_computing", "over_plain_dp by trained")
        for row, (what, predicted) in itertools.product(here, pairs):
            if what in row:
                name = f"{layout.name}, {row['method']}: {what}, predicted against measured"
                wanted.append(results.at_most(name, abs(row[predicted] / row[what] - 1), 0.05))
    return wanted


if __name__ == "__main__":
    main()
