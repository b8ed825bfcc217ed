"""How much faster real training gets on two CPU cores: upstream's `pretrain()` with `--wlb` against plain packing.

    python -m benchmarks.end_to_end_cpu [--quick] [--check] [--lengths f2|demo] [--layouts DP=2 ...] [--rounds N]

Two processes of one thread, each pinned to a core, train a small model; documents are of random tokens and have the
lengths of F2, or of the demo's corpus. Plain is what Megatron does with packed documents: concatenate in order, cut at
the window, shard per sequence. Methods run by turns, every round on the next steps, so that all train the same data.

Busy is the CPU time of forward and backward passes in the thread that trains, by rank and micro-batch; waiting is no
part of it. The critical path is what a step must take of it (the slower rank; under CP the slower rank of each
micro-batch; 1F1B in a pipeline), imbalance the critical path over that of the same work spread evenly, and attainable
plain's gain if its work were spread evenly and all else took as long as it did. Gains are per work, that is, per second
of computing, and per token: these are apart, since a document that plain packing cuts at the window needs less
attention than a whole one. The few steps that are measured differ in what documents they hold, so the gain per token is
that per work over the work a token of many steps that are planned; the tokens of the steps themselves are in the file,
too. The fraction reached compares gains per work. Imbalance is predicted by two cost models: of
`megatron-wlb profile`, and fitted to some steps of training before; the latter's crossover is what packing goes by.
The gain by CPU time is that of the critical path and whatever else the thread computes, without any wait for messages
or for a core that others use.

Layouts are compared as well, over plain packing with DP=2, by the planned work of documents, since passes of different
layouts compute different things; predicted is what the critical path has over an even share of the work by the fitted
model. Writes benchmarks/results/end_to_end_cpu.json, in about 45 minutes; anything else that runs meanwhile spoils it.
"""

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import track

from benchmarks import results
from benchmarks.lengths import job_7b
from benchmarks.training_cpu import (
    ROOT,
    SEED,
    SHAPE,
    TRAINING,
    Row,
    Steps,
    arguments,
    document_lengths,
    train,
    warm,
    write_dataset,
)
from megatron_wlb.cost.work import document_work
from megatron_wlb.packing import POLICIES
from megatron_wlb.pipeline.deferral import WeightGradients, run_deferred
from megatron_wlb.pipeline.schedule import Schedule
from megatron_wlb.pipeline.timeline import makespans
from megatron_wlb.plan.dataset import trained_tokens
from megatron_wlb.plan.packer import make_packer
from megatron_wlb.plan.stream import DocumentStream, Source
from tests.worlds import run_world

WARM_STEPS = 100
"""Planned and not trained, so that documents that wait are as in the middle of a run."""
PLANNED_STEPS = 2000
"""Whose work a token counts."""


COLUMNS = (
    *("layout", "method", "speedup_per_token", "speedup_per_work", "speedup_by_cpu_time", "attainable", "fraction"),
    *("work_per_token", "imbalance", "imbalance by trained", "share_error_median", "other_computing", "no_computing"),
)
"""What is shown of rows."""
PREDICTED = (
    *("layout", "method", "late_steps", "speedup_per_work", "computing_gain", "computing_gain by trained"),
    *("over_plain_dp", "over_plain_dp_by_cpu_time", "over_plain_dp_computing", "over_plain_dp by trained"),
)
"""The second table: predicted beside measured."""


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


class Costs(NamedTuple):
    """How planning takes times to come about."""

    crossover: int
    """A whole micro-batch costs rows * crossover + pairs."""
    row: float
    """A shard costs rows * this + kernel_us."""

    def work(self, layout: str, step: Row) -> list[float]:
        """Cost of every micro-batch of a rank; any unit, the same on all ranks."""
        if layout.startswith("CP"):
            return [self.row * rows + us for rows, us in zip(step["rows"], step["kernel_us"], strict=True)]
        return [float(rows * self.crossover + pairs) for rows, pairs in zip(step["rows"], step["pairs"], strict=True)]


class Size(NamedTuple):
    window: int
    steps: int
    """Measured, per round and method."""
    rounds: int


PLAIN = "--wlb-packing original --wlb-cp-sharding per-sequence --wlb-defer-weight-gradients off"
LAYOUTS = (
    Layout(
        "DP=2",
        "",
        2,
        {"plain": PLAIN, **{p: f"--wlb-packing {p}" for p in ("fixed", "wlb", "adaptive")}},
        0.9,
    ),
    Layout(
        "CP=2",
        "--context-parallel-size 2",
        1,
        {
            "plain": PLAIN,
            **{s: f"--wlb-packing original --wlb-cp-sharding {s}" for s in ("per-document", "hybrid", "auto")},
        },
        0.9,
    ),
    Layout(
        "PP=2",
        "--pipeline-model-parallel-size 2",
        4,
        {
            "plain": PLAIN,
            "wlb": "--wlb-packing wlb",
            "adaptive, not deferred": "--wlb-packing adaptive --wlb-defer-weight-gradients off",
            "adaptive": "--wlb-packing adaptive",
        },
        goals={"speedup_per_work": 1.28},
    ),
    Layout(
        "CP=2 for DP=2",
        "--context-parallel-size 2",
        2,
        {"plain": PLAIN, "adaptive, M = N/2": "--wlb-packing adaptive --wlb-micro-batches 1"},
        longest=2.5,
        goals={"over_plain_dp": 1.21},
    ),
    Layout(
        "PP=2 VPP=2",
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --num-layers 4",
        4,
        # In groups as Megatron has them by default.
        {
            "plain": f"{PLAIN} --microbatch-group-size-per-virtual-pipeline-stage 2",
            "adaptive": "--wlb-packing adaptive",
        },
        rounds=2,
    ),
)
SIZE = Size(window=8192, steps=6, rounds=4)
QUICK = Size(window=2048, steps=3, rounds=1)


def main() -> None:
    parser = results.parser(__doc__, "about a minute: a short window, nothing written")
    parser.add_argument(
        "--layouts",
        nargs="+",
        choices=[layout.name for layout in LAYOUTS],
        help="default: all; the file then says which",
    )
    parser.add_argument("--lengths", choices=("f2", "demo"), default="f2", help="of documents; default: f2")
    parser.add_argument("--rounds", type=int, help=f"default: {SIZE.rounds}, with --quick {QUICK.rounds}")
    args = parser.parse_args()
    if len(os.sched_getaffinity(0)) < 2:
        sys.exit("end_to_end_cpu: this process may run on one core only; it needs two")
    size = QUICK if args.quick else SIZE
    size = size._replace(rounds=args.rounds or size.rounds)
    layouts = [layout for layout in LAYOUTS if layout.name in (args.layouts or (layout.name,))]
    lengths = document_lengths(args.lengths, size.window)
    with tempfile.TemporaryDirectory() as folder:
        dataset = write_dataset(Path(folder), lengths)
        profile = measure_profile(Path(folder), args.quick)
        warm()
        models = calibrate(size, dataset, profile)
        crossover = models["trained"].crossover
        measured = {layout.name: measure(layout, size, dataset, profile, crossover) for layout in layouts}
        without = without_wlb(dataset)
        stated = json.loads(profile.read_text())
    rows = []
    for layout in layouts:
        work = {m: planned_work(lengths, layout, flags, size.window, crossover) for m, flags in layout.methods.items()}
        rows += summarise(layout, measured[layout.name], models, work, measured.get("DP=2", {}).get("plain"))
    results.show(rows, COLUMNS, width=160)
    results.show(rows, PREDICTED, width=160)
    print(without)
    suffix = "" if args.lengths == "f2" else f".{args.lengths}"
    suffix += "".join("_" + "".join(filter(str.isalnum, name.lower())) for name in args.layouts or ())
    settings = {"model": [*SHAPE, *TRAINING], "profile": stated, **size._asdict()}
    settings |= {"lengths": args.lengths, "costs": {name: costs._asdict() for name, costs in models.items()}}
    settings |= {"layouts": [layout._asdict() for layout in layouts], "plain without --wlb": without}
    wanted = goals(layouts, rows)
    results.finish(args, "end_to_end_cpu", settings=settings, rows=rows, goals=wanted, suffix=suffix)


# What is run ----------------------------------------------------------------------------------------------------------


def measure_profile(folder: Path, quick: bool) -> Path:
    """What planning goes by, measured now and on this machine."""
    path = folder / "profile.json"
    command = [sys.executable, "-m", "megatron_wlb", "profile", *SHAPE, "--device", "cpu", "--output", path]
    subprocess.run([*command, "--quick"] if quick else command, check=True, cwd=ROOT)
    return path


def calibrate(size: Size, dataset: str, profile: Path) -> dict[str, Costs]:
    """Cost models: of the profile, which knows a layer's matrices and its attention, and of training as it is.

    The latter is fitted to the busy times of micro-batches that are not measured later.
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


def without_wlb(dataset: str) -> Row:
    """Tokens a second under DP=2 of plain packing by us, and of upstream without `--wlb`, at a short window.

    Upstream's attention on a CPU is dense: every row costs a window of keys, and memory is quadratic in the window.
    """
    masked = f"--reset-position-ids --reset-attention-mask --eod-mask-loss --data-cache-path {dataset}.cache"
    found: Row = {"window": QUICK.window}
    for name, flags in (("plain", f"--wlb {PLAIN}"), ("without --wlb", masked)):
        argv = arguments(dataset, QUICK.window, 2, QUICK.steps + 1, flags)
        steps = run_world(train, 2, argv, 2 if name == "plain" else 1, timeout=600)[0]
        seconds = statistics.median(step["seconds"] for step in steps)
        found[f"{name}, tokens a second"] = 2 * QUICK.window / seconds
    return found


# What follows from it -------------------------------------------------------------------------------------------------


def planned_work(lengths: np.ndarray, layout: Layout, flags: str, window: int, crossover: int) -> float:
    """Work per token that a method plans over PLANNED_STEPS."""
    packing = POLICIES[flags.split()[1]]()
    changes = {"packing": packing, "crossover_tokens": crossover, "max_tokens": round(layout.longest * window)}
    stream = DocumentStream([Source(lengths=trained_tokens(lengths))], seed=SEED, context_length=window)
    packer = make_packer(stream, job_7b(layout.micro_batches, window, **changes))
    documents = np.concatenate([packer.next().packing.documents["length"] for _ in range(PLANNED_STEPS)])
    return float(document_work(documents, crossover).sum() / documents.sum())


def fit(steps: Steps) -> Costs:
    """Fit costs to micro-batches that one rank holds whole, by least squares of relative errors."""
    busy, rows, pairs, kernel = (np.concatenate([s[k] for s in steps]) for k in ("busy", "rows", "pairs", "kernel_us"))

    def ratio(other: np.ndarray) -> float:
        """What a row costs, in units of `other`."""
        row, one = np.linalg.lstsq(np.stack((rows, other), 1) / busy[:, None], np.ones(len(busy)))[0]
        if not (row > 0 and one > 0):
            raise ValueError("micro-batches took no longer for more attention; run while nothing else does")
        return float(row / one)

    return Costs(round(ratio(pairs)), ratio(kernel))


def critical_path(layout: str, busy: np.ndarray, weights: np.ndarray | None = None, group: int | None = None) -> float:
    """Time of a step that computing takes, of busy times float64 [ranks, micro-batches of a rank], in their unit.

    The slower rank under data parallelism; under context parallelism the slower one of every micro-batch, as ranks wait
    for each other within; 1F1B, interleaved with VPP=2, of the mean over stages in a pipeline. There, `weights` are the
    part of `busy` that is put off, if any, and `group` is that of the schedule.
    """
    if layout.startswith("DP"):
        return float(busy.sum(axis=1).max())
    if layout.startswith("CP"):
        return float(busy.max(axis=0).sum())
    chunks = 2 if "VPP=2" in layout else 1
    schedule = Schedule(
        num_stages=len(busy),
        num_micro_batches=busy.shape[1],
        num_chunks=chunks,
        group_size=group,
        hidden_transfers=chunks > 1,
    )
    if weights is not None and weights.any():
        return _deferred_path(schedule, busy.mean(axis=0), weights.mean(axis=0))
    # In whole numbers, a third of a pass forward and two backward.
    scale = 2**40 / busy.sum()
    work = np.rint(busy.mean(axis=0) * scale).astype(np.int64)
    return float(makespans(schedule, work[None])[0]) / 3 / scale / chunks


def _deferred_path(schedule: Schedule, busy: np.ndarray, weights: np.ndarray) -> float:
    """The same with weight gradients put off, of a layer or of the output layer at a time."""
    chunks = schedule.num_chunks
    shape = schedule.num_stages, chunks, len(busy)
    counts = np.ones(shape[:2], np.int64)
    counts[-1, -1] += 1
    put_off = WeightGradients.alike(counts, np.broadcast_to(weights / chunks, shape))
    passes = np.broadcast_to(busy / 3 / chunks, shape)
    return run_deferred(schedule, passes, 2 * passes, 0.0, put_off)[0].makespan


def even_path(layout: str, busy: np.ndarray, count: int | None = None) -> float:
    """The critical path if all ranks and micro-batches had the mean, of `count` on a rank (default: as many)."""
    count = count or busy.shape[1]
    return critical_path(layout, np.full((len(busy), count), busy.sum() / len(busy) / count))


def totals(layout: str, ranks: list[Steps], models: dict[str, Costs], count: int | None = None) -> Row:
    """Sums over the steps of a round; and by how much each share of a step was predicted wrong, in "errors".

    Even is with `count` micro-batches on a rank, plain's, so that it is a measure of work whatever a method has.
    """
    sums: Counter[str] = Counter()
    errors: list[float] = []
    for of_ranks in zip(*ranks, strict=True):
        for key in ("tokens", "work", "late"):
            sums[key] += of_ranks[0][key]
        sums["seconds"] += float(np.mean([step["seconds"] for step in of_ranks]))
        sums["other"] += float(np.mean([step["other"] for step in of_ranks]))
        busy = np.array([step["busy"] for step in of_ranks])
        weights = np.array([step["weights"] for step in of_ranks])
        group = of_ranks[0]["group"]
        sums["critical"] += critical_path(layout, busy, weights, group)
        sums["even"] += even_path(layout, busy, count)
        sums["ideal"] += busy.sum() / len(busy)
        for name, model in models.items():
            work = np.array([model.work(layout, step) for step in of_ranks])
            sums[f"{name} critical"] += critical_path(layout, work, work * weights / busy, group)
            sums[f"{name} even"] += even_path(layout, work, count)
            sums[f"{name} ideal"] += work.sum() / len(work)
        if layout.startswith("PP"):  # whose stages differ by more than micro-batches
            busy, work = busy.mean(axis=0), work.mean(axis=0)
        errors += np.abs(work / work.mean() / (busy / busy.mean()) - 1).ravel().tolist()
    return {**sums, "errors": errors}


def compare(plain: Row, other: Row) -> Row:
    """Ratios of the totals of the same round or rounds."""

    def attainable(imbalance: float) -> float:
        """Plain's gain if its critical path were shorter by `imbalance`."""
        return plain["seconds"] / (plain["seconds"] - plain["critical"] + plain["critical"] / imbalance)

    gain = attainable(plain["critical"] / plain["even"])
    per_work = plain["seconds"] / plain["even"] / (other["seconds"] / other["even"])
    computing = [(row["critical"] + row["other"]) / row["even"] for row in (plain, other)]
    even = 1 + plain["other"] / plain["even"]
    models = _models(other)
    predicted = {name: [row[f"{name} critical"] / row[f"{name} even"] for row in (plain, other)] for name in models}
    return {
        "speedup_in_tokens": plain["seconds"] / plain["tokens"] / (other["seconds"] / other["tokens"]),
        "speedup_per_work": per_work,
        "speedup_by_cpu_time": computing[0] / computing[1],
        "attainable": gain,
        **{f"attainable by {name}": attainable(of_plain) for name, (of_plain, _) in predicted.items()},
        "fraction": (per_work - 1) / (gain - 1),
        "computing_gain": plain["critical"] / plain["even"] / (other["critical"] / other["even"]),
        **{f"computing_gain by {name}": of_plain / of_other for name, (of_plain, of_other) in predicted.items()},
        "fraction_by_cpu_time": (computing[0] / computing[1] - 1) / (computing[0] / even - 1),
        "imbalance": other["critical"] / other["even"],
        **{f"imbalance by {name}": of_other for name, (_, of_other) in predicted.items()},
        "other_computing": other["other"] / other["seconds"],
        "no_computing": 1 - (other["critical"] + other["other"]) / other["seconds"],
    }


def over_layout(reference: Row, other: Row) -> Row:
    """How many times as much planned work a second as another layout does: measured, and predicted by every model."""

    def gain(*keys: str) -> float:
        per_work = [sum(row[key] for key in keys) / row["work"] for row in (reference, other)]
        return per_work[0] / per_work[1]

    def predicted(model: str) -> float:
        longer = [row[f"{model} critical"] / row[f"{model} ideal"] for row in (reference, other)]
        return longer[0] / longer[1]

    return {
        "over_plain_dp": gain("seconds"),
        "over_plain_dp_by_cpu_time": gain("critical", "other"),
        "over_plain_dp_computing": gain("critical"),
        **{f"over_plain_dp by {model}": predicted(model) for model in _models(other)},
    }


def _models(sums: Row) -> list[str]:
    return [key.removesuffix(" critical") for key in sums if key.endswith(" critical")]


def summarise(
    layout: Layout,
    measured: dict[str, list[list[Steps]]],
    models: dict[str, Costs],
    work: dict[str, float],
    dp: list[list[Steps]] | None = None,
) -> list[Row]:
    """A row for each method: of all rounds together, and the median, least and greatest of single rounds.

    Errors of shares are those of the last model; `work` is that of a token, by method; `dp` is what plain packing was
    measured with under DP=2, where that is to be compared.
    """
    own = layout.micro_batches // layout.ranks
    found = {m: [totals(layout.name, ranks, models, own) for ranks in rounds] for m, rounds in measured.items()}
    plain = next(iter(found.values()))
    rows = []
    for method, rounds in found.items():
        row: Row = {"layout": layout.name, "method": method, **compare(_sum(plain), _sum(rounds))}
        row["late_steps"] = sum(r["late"] for r in rounds) / sum(r["tokens"] for r in rounds)
        if dp is not None and layout.same_model:
            row |= over_layout(_sum([totals("DP=2", ranks, models) for ranks in dp]), _sum(rounds))
        row["work_per_token"] = work[method] / next(iter(work.values()))
        row["speedup_per_token"] = row["speedup_per_work"] / row["work_per_token"]
        single = [compare(p, r) for p, r in zip(plain, rounds, strict=True)]
        for key in ("speedup_in_tokens", "speedup_per_work", "imbalance"):
            values = [s[key] for s in single]
            row |= {f"{key}_median": statistics.median(values), f"{key}_min": min(values), f"{key}_max": max(values)}
        errors = np.concatenate([r["errors"] for r in rounds])
        row |= {"share_error_median": float(np.median(errors)), "share_error_p90": float(np.quantile(errors, 0.9))}
        rows.append(row | {key: sum(r[key] for r in rounds) for key in ("tokens", "seconds")})
    return rows


def _sum(rounds: list[Row]) -> Row:
    return {key: sum(r[key] for r in rounds) for key in rounds[0] if key != "errors"}


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
