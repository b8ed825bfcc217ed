"""How much faster the same training step is, and what share of its limit it reaches; predicted, not measured.

    python -m benchmarks.step_time [--quick] [--check]

Windows are cut from documents of F2, times are those of the default H100 profile, and all have --tp-comm-overlap. Every
scheme trains the same windows in the same steps, but for those that delay documents (`paper`, `ours, delay`).
Schemes: Megatron as most runs have it, whose tokens attend across documents; Megatron with a ring per document (THD);
the paper; and --wlb with a micro-batch for every window or as many as `--wlb-micro-batches auto` chooses, memory taken
to be enough. Of the last: with a delay; with fewer layers on the last stage where `analyze` would try it; with
`--wlb-cp-gradients model`; with twice the context-parallel ranks for half the data-parallel ones. `settings.memory` has
both sides within an H100's memory, each with its fastest recomputation: none, modules, or the least number of layers,
and the ring at its best micro-batch size, as `analyze` predicts them by `flags_of` the case.

Speed-ups are of tokens per second: ratios of the times of the same steps; with a delay, of times per work. Errors are
standard errors of a ratio of means over steps. The limit spreads attention, linear layers, vocabulary, tensor-parallel
communication and optimizer of a step evenly over all GPUs, in the micro-batches that need least, and nothing waits.
Writes benchmarks/results/step_time.json and docs/step_time.png in about a quarter of an hour.
"""

import itertools
import math
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks import metrics, results
from benchmarks.lengths import WINDOW, drawn, samples
from benchmarks.results import Row
from megatron_wlb.cli.analyze.report import READING_STEPS, Steps, at_its_best, measure, ratio_of, speedup
from megatron_wlb.cli.analyze.report import steps_of as steps_of_report
from megatron_wlb.cli.analyze.setup import Setup
from megatron_wlb.cli.job import add_job_flags, run_of
from megatron_wlb.cli.main import Parser
from megatron_wlb.describe import tiles
from megatron_wlb.describe.alternatives import gib, recomputed, relieved
from megatron_wlb.describe.arguments import MegatronArguments
from megatron_wlb.describe.make import make_job
from megatron_wlb.hardware.profile import DEFAULT_PROFILE, load_profile
from megatron_wlb.job import Job, Parallel, Recompute
from megatron_wlb.model import MODELS
from megatron_wlb.packing.adaptive import AdaptivePacking
from megatron_wlb.packing.megatron import without_wlb
from megatron_wlb.packing.paper import PaperPacking
from megatron_wlb.plan.metrics import lateness
from megatron_wlb.plan.micro_batches import predictions
from megatron_wlb.plan.packer import Packer
from megatron_wlb.plan.samples import Samples
from megatron_wlb.plan.step import shard_step
from megatron_wlb.simulate.memory import DEVICE_SHARE, one_document, step_peak_bytes, weight_bytes
from megatron_wlb.simulate.recompute import ways
from megatron_wlb.simulate.step import SimulatedStep, breakdown, simulate_step


class Case(NamedTuple):
    layout: str
    window: int
    windows: int
    """Of a pipeline in a step; of a data-parallel rank where there is no pipeline."""
    dp: int

    @classmethod
    def of(cls, row: Row) -> "Case":
        return cls(*(row[name] for name in cls._fields))

    @property
    def title(self) -> str:
        ranks = f" DP{self.dp}" if self.dp > 1 else ""
        return f"{self.layout}{ranks}, {self.windows} of {self.window >> 10}K"


LAYOUTS = {
    "550M PP4": ("550m", {"tp": 2, "cp": 4, "pp": 4, "vpp": 6}),
    "7B PP4": ("llama2-7b", {"tp": 8, "cp": 2, "pp": 4, "vpp": 8}),
    "30B PP4": ("30b", {"tp": 8, "cp": 4, "pp": 4, "vpp": 12}),
    "70B PP4": ("llama2-70b", {"tp": 8, "cp": 8, "pp": 4, "vpp": 20}),
    "7B PP4, VPP 2": ("llama2-7b", {"tp": 8, "cp": 2, "pp": 4, "vpp": 2}),
    "Llama-3-8B PP4": ("llama3-8b", {"tp": 8, "cp": 2, "pp": 4, "vpp": 8}),
    "405B PP14": ("llama3-405b", {"tp": 8, "cp": 16, "pp": 14}),
    "405B PP14, VPP 9": ("llama3-405b", {"tp": 8, "cp": 16, "pp": 14, "vpp": 9}),
    "7B CP8": ("llama2-7b", {"tp": 8, "cp": 8}),
    "8B CP8": ("llama3-8b", {"tp": 8, "cp": 8}),
    "8B CP4 PP2": ("llama3-8b", {"tp": 8, "cp": 4, "pp": 2}),
    "8B CP32": ("llama3-8b", {"tp": 8, "cp": 32}),
    "8B TP4 CP4": ("llama3-8b", {"tp": 4, "cp": 4}),
    "34B CP8": ("codellama-34b", {"tp": 8, "cp": 8}),
    "34B CP4 PP2": ("codellama-34b", {"tp": 8, "cp": 4, "pp": 2}),
    "34B CP32": ("codellama-34b", {"tp": 8, "cp": 32}),
    "Qwen3-30B-A3B PP2": ("qwen3-30b-a3b", {"tp": 2, "cp": 4, "pp": 2, "vpp": 12, "ep": 8, "etp": 1}),
}
"""Model and layout. PP4 are the jobs of scripts/slurm, and 7B with fewer virtual stages."""
_FLAGS = {
    "tp": "tensor-model-parallel-size",
    "cp": "context-parallel-size",
    "pp": "pipeline-model-parallel-size",
    "vpp": "num-virtual-stages-per-pipeline-rank",
    "ep": "expert-model-parallel-size",
    "etp": "expert-tensor-parallel-size",
}
_WIDE = ("7B CP8", "8B CP8", "34B CP8")
CASES = (
    *(
        Case(name, WINDOW, *sizes)
        for name in ("550M PP4", "7B PP4", "30B PP4", "70B PP4")
        for sizes in ((4, 1), (16, 1), (64, 1), (4, 4), (16, 4))
    ),
    *(Case("7B PP4", WINDOW, *sizes) for sizes in ((8, 1), (32, 1), (8, 4))),
    *(Case(name, WINDOW, 16, 1) for name in ("7B PP4, VPP 2", "Llama-3-8B PP4")),
    Case("405B PP14", WINDOW, 14, 1),
    *(Case("405B PP14, VPP 9", WINDOW, *sizes) for sizes in ((14, 1), (56, 1), (14, 4))),
    *(Case(name, WINDOW, *sizes) for name in _WIDE for sizes in itertools.product((1, 4), (1, 4))),
    *(
        Case(f"{model} {name}", WINDOW << i, windows >> i, dp)
        for model in ("8B", "34B")
        for name, windows, dp in (("CP8", 16, 1), ("CP4 PP2", 16, 1), ("CP8", 8, 4), ("CP32", 32, 1))
        for i in range(3)
    ),
    Case("8B TP4 CP4", WINDOW // 2, 1, 16),
)
"""Four windows a pipeline are the paper's jobs, 16 and 64 what is run. Of 8B and 34B, 64 GPUs train 16 windows of 128K
in a step, or as many tokens in longer ones, and 256 GPUs 32."""
QUICK = (Case("7B PP4", WINDOW, 4, 4), Case("8B CP8", WINDOW, 16, 1))
REMEMBERED = (
    *(Case(name, WINDOW, 16, 1) for name in ("7B PP4", "30B PP4", "70B PP4")),
    Case("8B CP8", WINDOW, 8, 4),
    Case("34B CP8", WINDOW, 16, 1),
    *(Case("405B PP14, VPP 9", WINDOW, windows, 1) for windows in (14, 56)),
    Case("8B TP4 CP4", WINDOW // 2, 16, 4),
    Case("8B CP8", WINDOW << 1, 8, 1),
    Case("Qwen3-30B-A3B PP2", WINDOW, 16, 1),
)
"""Those within an H100's memory."""
WINDOWS, STEPS, WARM_UP, QUICK_STEPS = 1024, (12, 48), 12, 6
"""Windows of a case, for so many steps at least and at most; then steps before those of schemes that delay."""
ACROSS, RING, OURS, DELAY, WIDER = (
    "across documents",
    "ring per document",
    "ours, auto",
    "ours, delay",
    "ours, twice the CP",
)
WAITING = ("cp_wait", "ep_wait", "dp_wait", "imbalance")
"""Parts of a step for the slowest rank, stage or micro-batch."""
FULL = Recompute(granularity="full", method="uniform", num_layers=1)


def job_of(case: Case, *, wider: int = 1, **changes: Any) -> Job:
    """The job of a case as --wlb trains it, a micro-batch for every window, CP `wider` and DP narrower by as much.

    `changes` are arguments of `make_job`.
    """
    model, sizes = LAYOUTS[case.layout]
    # Experts do not overlap: Megatron then recomputes neither whole layers nor MoE layers, and 128K fit no H100.
    experts = {"moe_dispatcher": "flex"} if "ep" in sizes else {}
    parallel = Parallel(**sizes | {"cp": wider * sizes["cp"], "dp": case.dp // wider})
    given = {
        **tiles.settings(MegatronArguments(tp_comm_overlap=True, seq_length=case.window), parallel, 1),
        "model": MODELS[model],
        "context_length": case.window,
        "global_batch_size": case.windows * case.dp,
        "parallel": parallel,
        "packing": AdaptivePacking(),
        "profile": load_profile(DEFAULT_PROFILE),
    }
    return make_job(**given | experts | changes)


def samples_of(case: Case, profile: str = "F2") -> Samples:
    return samples(drawn(profile, 400_000, 0, case.window), case.window)


def flags_of(case: Case, recompute: str, profile: str = "F2") -> list[str]:
    """Flags with which `megatron-wlb analyze` predicts a case in equal memory; `recompute` as flags."""
    model, sizes = LAYOUTS[case.layout]
    gpus, samples = job_of(case).parallel.num_gpus, case.windows * case.dp
    flags = {"model": model, "seq-length": case.window, "global-batch-size": samples, "num-gpus": gpus}
    flags |= {_FLAGS[name]: size for name, size in sizes.items()}
    flags |= {"moe-token-dispatcher-type": "flex"} if "ep" in sizes else {}
    words = ["--mock-data", "--wlb-mock-lengths", profile, "--tp-comm-overlap"]
    return [*words, *(word for name, value in flags.items() for word in (f"--{name}", str(value))), *recompute.split()]


def schemes(case: Case, data: Samples) -> Iterator[tuple[str, Job]]:
    """The schemes of a case, by name; the ring comes before what is compared with it."""

    def auto(**changes: Any) -> Job:
        make = partial(job_of, case, **changes)
        return predictions(make(), make, data, memory_known=True)[0]

    ours = job_of(case)
    yield RING, without_wlb(ours)
    yield ACROSS, without_wlb(ours, cp_sharding="per-sequence")
    yield "paper", replace(without_wlb(ours, cp_sharding="paper"), cp_exchange="all", packing=PaperPacking())
    yield "ours, M = N", ours
    best = auto()
    yield OURS, best
    yield DELAY, auto(packing=AdaptivePacking(max_delay_steps=30))
    if (fewer := relieved(best, data)) != best:
        yield f"{OURS}, fewer layers on the last stage", fewer
    if best.parallel.pp == 1:
        yield f"{OURS}, dK and dV as the model", best.sharded(cp_gradients="model")
    if case.dp > 1:
        yield WIDER, auto(wider=2)


class Totals(NamedTuple):
    """Of some steps of a job: float64 [steps] each, in us and in work, or tokens if tokens attend across documents."""

    time: np.ndarray
    limit: np.ndarray
    work: np.ndarray
    exchange: float
    """Share of the time."""
    late_steps: float


def measured(job: Job, data: Samples, steps: int, *, across: bool = False) -> Totals:
    packer, times, exchange, late, tokens = Packer(data, job), [], 0.0, 0, 0
    for _ in range(0 if job.packing.same_steps else WARM_UP):
        packer.next()
    for _ in range(steps):
        packed = packer.next()
        batch, documents = packed.batch, packed.batch.documents["length"]
        lengths = [np.array([each.sum()]) for each in batch.lengths] if across else batch.lengths
        step = simulate_step(job, shard_step(job, lengths, batch.ranks))
        work = documents.sum() if across else job.work(documents).sum()
        late, tokens = late + lateness(batch, packed.step)[0], tokens + int(documents.sum())
        parts = breakdown(step)
        times.append((step.time, metrics.limit_time(parts), float(work)))
        exchange += parts.exchange
    time, limit, work = np.array(times).T
    return Totals(time, limit, work, exchange / time.sum(), late / tokens)


def over(ring: Totals, other: Totals, *, same_steps: bool) -> tuple[float, float]:
    """Tokens per second over the ring's, and the standard error.

    Both train the same tokens in the long run; in other steps, what they train has other work.
    """
    if same_steps:
        return ratio_of(ring.time, other.time)
    (theirs, their_error), (ours, our_error) = (ratio_of(each.work, each.time) for each in (ring, other))
    return ours / theirs, ours / theirs * math.hypot(their_error / theirs, our_error / ours)


def rows_of(case: Case, steps: int) -> list[Row]:
    """A row for every scheme."""
    data, rows = samples_of(case), list[Row]()
    found: dict[str, Totals] = {}
    for scheme, job in schemes(case, data):
        found[scheme] = of = measured(job, data, steps, across=scheme == ACROSS)
        row = case._asdict() | {"scheme": scheme, "N": job.global_batch_size, "micro_batches": job.num_micro_batches}
        row["ms"] = of.time.mean() / 1e3
        ratio, error = over(found[RING], of, same_steps=job.packing.same_steps)
        row |= {f"over {RING}": ratio, f"over {RING}, error": error, "exchange": of.exchange}
        rows.append(row | {"late_steps": of.late_steps})
    per_work = {scheme: (of.limit.sum() / of.work.sum(), of.work.sum() / of.time.sum()) for scheme, of in found.items()}
    least = min(limit for scheme, (limit, _) in per_work.items() if scheme != ACROSS)
    for row in rows:
        limit, rate = per_work[row["scheme"]]
        row["of_limit"] = rate * (limit if row["scheme"] == ACROSS else least)
        row[f"over {ACROSS}"] = row[f"over {RING}"] / next(r[f"over {RING}"] for r in rows if r["scheme"] == ACROSS)
    return rows


def remembered(case: Case, steps: int | None = None, profile: str = "F2") -> Row:
    """Both sides with their fastest recomputation within an H100's memory, and the speed-up over the ring.

    As `analyze` predicts them, Megatron at its best micro-batch size; `steps` as of --steps.
    """
    data, free = samples_of(case, profile), job_of(case)
    device = DEVICE_SHARE * free.profile.memory_gib * 2**30
    rings = (without_wlb(job_of(case, recompute=way)) for way in ways(free))  # the fastest first
    ring = next(each for each in rings if gib(each) * 2**30 <= device)
    budget = device - weight_bytes(free)
    (ours, _), *_ = recomputed(free, partial(job_of, case, budget_bytes=budget), data, budget)
    theirs, mine = (_setup(case, job.recompute.flags, profile) for job in (ring, ours))
    of = steps_of_report(mine.job) if steps is None else Steps(steps, steps)
    alone, _ = at_its_best(
        theirs.without_wlb(), theirs.run.budget or 0.0, Steps(few := min(of.simulated, READING_STEPS), few)
    )
    found = {"megatron": measure(alone, of), "wlb": measure(mine.with_wlb(mine.job), of)}
    ratio, error = speedup(found["wlb"], found["megatron"])
    row = case._asdict() | {f"over {RING}": ratio, f"over {RING}, error": error}
    for name, each in found.items():
        scheme, parts = each.scheme, each.parts_ms
        gibs = (weight_bytes(scheme.job) + scheme.activation_bytes()) / 2**30
        waiting = sum(parts[part] for part in WAITING)
        row[name] = {"recompute": scheme.job.recompute.flags, "micro_batches": scheme.num_micro_batches}
        row[name] |= {"max_tokens": scheme.longest_tokens, "gib": gibs, "ms": each.step_ms}
        row[name] |= {"exchange": parts["exchange"] / each.step_ms, "waiting": waiting / each.step_ms}
    row["megatron"]["micro_batch_size"] = alone.micro_batch_size
    return row


def _setup(case: Case, recompute: str, profile: str) -> Setup:
    parser = Parser()
    add_job_flags(parser)
    own, flags, launched = parser.divide(flags_of(case, recompute, profile))
    return Setup(run_of(parser.parse_args(own, Namespace(flags=flags, launched=launched))))


def steps_of(case: Case) -> int:
    return min(max(STEPS[0], WINDOWS // (case.windows * case.dp)), STEPS[1])


TARGETS = {
    (Case("7B PP4", WINDOW, 8, 1), OURS): 1.26,
    (Case("7B PP4", WINDOW, 16, 1), OURS): 1.29,
    (Case("7B PP4", WINDOW, 32, 1), OURS): 1.30,
    (Case("70B PP4", WINDOW, 16, 1), OURS): 1.23,
    (Case("30B PP4", WINDOW, 16, 1), OURS): 1.36,
    (Case("405B PP14, VPP 9", WINDOW, 56, 1), OURS): 1.24,
    (Case("7B PP4", WINDOW, 8, 4), OURS): 1.42,
    (Case("7B PP4", WINDOW, 16, 4), OURS): 1.43,
    (Case("70B PP4", WINDOW, 16, 4), OURS): 1.37,
    (Case("8B CP8", WINDOW, 16, 1), OURS): 1.22,
    (Case("8B CP8", WINDOW, 8, 4), OURS): 1.31,
    (Case("34B CP8", WINDOW, 16, 1), OURS): 1.07,
    (Case("8B TP4 CP4", WINDOW // 2, 1, 16), WIDER): 1.31,
    (Case("7B PP4", WINDOW, 4, 4), WIDER): 1.59,
    (Case("405B PP14, VPP 9", WINDOW, 14, 4), WIDER): 1.34,
}
"""Tokens per second over the ring per document; at least as many in all other cases of `OURS`."""
REMEMBERED_TARGETS = dict(zip(REMEMBERED, (1.27, 1.29, 1.18, 1.25, 1.01, 1.0, 1.22, 1.0, 1.0, 1.0), strict=True))
"""The same within an H100's memory, both sides with their fastest recomputation."""


def goals(rows: list[Row]) -> list[results.Goal]:
    wanted = []
    for row in rows:
        case, scheme = Case.of(row), row["scheme"]
        if scheme == OURS or (case, scheme) in TARGETS:
            name = f"{case.title}{', twice the CP' if scheme == WIDER else ''}: over a {RING}"
            wanted.append(results.at_least(name, row[f"over {RING}"], TARGETS.get((case, scheme), 1.0)))
        if scheme == OURS and ((cp := LAYOUTS[case.layout][1]["cp"]) <= 8 or cp == 32):
            name = f"{case.title}: exposed exchange, share of the step"
            wanted.append(results.at_most(name, row["exchange"], 0.02 if cp <= 8 else 0.04))
    return wanted


def remembered_goals(memory: list[Row]) -> Iterator[results.Goal]:
    for row in memory:
        case = Case.of(row)
        target = REMEMBERED_TARGETS.get(case, 1.0)
        yield results.at_least(f"{case.title}: over a {RING}, in equal memory", row[f"over {RING}"], target)


def draw(folder: Path) -> Path:
    """Passes of the step of median speed-up, of 21 of 7B on 64 GPUs, by Megatron and with --wlb."""
    case = Case("7B PP4", WINDOW, 8, 1)
    data = samples_of(case)
    jobs = dict(schemes(case, data))
    packers = [(jobs[scheme], Packer(data, jobs[scheme])) for scheme in (RING, OURS)]

    def pair() -> list[SimulatedStep]:
        batches = [(job, packer.next().batch) for job, packer in packers]
        return [simulate_step(job, shard_step(job, batch.lengths, batch.ranks)) for job, batch in batches]

    steps = sorted((pair() for _ in range(21)), key=lambda steps: steps[0].time / steps[1].time)[10]
    figure, limit = results.figure(10, 4), metrics.limit_time(breakdown(steps[1]))
    colors, stages = {"forward": "#0072b2", "backward": "#d55e00"}, range(steps[0].job.parallel.pp)
    drawn = figure.subplots(len(steps), sharex=True)
    for axes, title, step in zip(drawn, ("Megatron", "--wlb, the same tokens"), steps, strict=True):
        (timeline,) = step.timelines
        for stage, (i, (word, color)) in itertools.product(stages, enumerate(colors.items())):
            begins, ends = (each[i, stage].ravel() / limit for each in (timeline.start, timeline.end))
            style = {"color": color, "edgecolor": "white", "linewidth": 0.3, "label": None if stage else word}
            axes.broken_barh(list(zip(begins, ends - begins, strict=True)), (stage - 0.4, 0.8), **style)
        axes.axvline(1, color="black", linewidth=0.8)
        (shards,), job = step.shards, step.job
        rows = np.array([plan.lengths.sum() for plan in shards]) / job.parallel.cp
        peaks = [step_peak_bytes(job, stage, rows, [one_document(job)] * len(rows)) / 2**30 for stage in stages]
        labels = [f"stage {stage}: {peak:.0f} GiB" for stage, peak in zip(stages, peaks, strict=True)]
        axes.set(yticks=stages, yticklabels=labels, xlim=(0, None))
        axes.invert_yaxis()
        of_limit = f"{title}: {100 * limit / step.time:.0f} % of the speed without idle time"
        axes.set_title(of_limit, loc="left", fontsize=10)
    drawn[-1].set_xlabel(
        "time; 1: the same work if no GPU ever waited (white: idle). GiB: activations of a GPU at their peak, predicted"
    )
    drawn[0].legend(loc="upper right", ncols=2, fontsize=8, bbox_to_anchor=(1, 1.3), frameon=False)
    return results.save(figure, "step_time", folder)


def main() -> None:
    args = results.parser(__doc__, "two cases, few steps").parse_args()
    rows: list[Row] = []
    memory: list[Row] = []
    for case in results.track(QUICK if args.quick else CASES, "simulating"):
        rows += rows_of(case, QUICK_STEPS if args.quick else steps_of(case))
    for case in results.track(QUICK[1:] if args.quick else REMEMBERED, "in equal memory"):
        memory.append(remembered(case, QUICK_STEPS if args.quick else None))
    results.show(rows)
    results.show(memory, title="within an H100's memory")
    settings = {"data": "F2", "profile": DEFAULT_PROFILE, "windows": WINDOWS, "steps": STEPS, "memory": memory}
    wanted = [*goals(rows), *remembered_goals(memory)]
    results.finish(args, "step_time", settings=settings, rows=rows, goals=wanted, draw=draw)


if __name__ == "__main__":
    main()
