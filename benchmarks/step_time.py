"""How much of the limit a training step reaches: Megatron's ways, the paper's, and ours; predicted, not measured.

    python -m benchmarks.step_time [--quick] [--check]

The limit of a step has its attention, linear layers, vocabulary, tensor-parallel communication and optimizer spread
evenly over all GPUs, and nobody ever waits; of whole documents, by the micro-batches that have the least of it.
Documents of F2 and of DistCA's sample; the shipped H100 model. Schemes: Megatron with a ring per sequence and a ring
per document (THD), with documents over micro-batches by token count (`dp_balanced`, as upstream describes it), the
paper, and --wlb by adaptive packing with a micro-batch for every window, and with as many as `--wlb-micro-batches auto`
chooses, memory taken to be enough; where `analyze` would try it with fewer layers on the last stage; and without a
pipeline with `--wlb-cp-gradients model`. Speed-ups are of work, since Megatron cuts documents where windows end; a gain
per token is that per work over the work a token of many steps that are packed. Errors are standard errors of a ratio of
means over steps. Writes benchmarks/results/step_time.json and docs/step_time.png in about ten minutes.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import track

from benchmarks import results
from benchmarks.lengths import WINDOW, f2, stream
from benchmarks.packing import distributions
from benchmarks.peers import InOrder
from benchmarks.results import Row
from megatron_wlb.cli.analyze import layouts
from megatron_wlb.cost.work import document_work
from megatron_wlb.describe.make import make_job
from megatron_wlb.describe.settings import PlanSettings
from megatron_wlb.job import Job, Parallel
from megatron_wlb.micro_batches import predictions
from megatron_wlb.model import MODELS
from megatron_wlb.packing.adaptive import AdaptivePacking
from megatron_wlb.packing.original import OriginalPacking
from megatron_wlb.packing.wlb import WlbPacking
from megatron_wlb.plan import metrics
from megatron_wlb.plan.packer import make_packer
from megatron_wlb.plan.step import shard_step
from megatron_wlb.simulate import SimulatedStep, breakdown, limit_time, simulate_step
from megatron_wlb.simulate.memory import H100_BYTES
from megatron_wlb.simulate.trace import trace_events

LAYOUTS = {
    "550M PP4": ("550m", {"tp": 2, "cp": 4, "pp": 4, "vpp": 6}, 4),
    "7B PP4": ("llama2-7b", {"tp": 8, "cp": 2, "pp": 4, "vpp": 8}, 4),
    "30B PP4": ("30b", {"tp": 8, "cp": 4, "pp": 4, "vpp": 12}, 4),
    "70B PP4": ("llama2-70b", {"tp": 16, "cp": 4, "pp": 4, "vpp": 20}, 4),
    "7B PP4, VPP 2": ("llama2-7b", {"tp": 8, "cp": 2, "pp": 4, "vpp": 2}, 4),
    "Llama-3-8B PP4": ("llama3-8b", {"tp": 8, "cp": 2, "pp": 4, "vpp": 8}, 4),
    "7B CP8": ("llama2-7b", {"tp": 8, "cp": 8}, 4),
    "405B PP14": ("llama3-405b", {"tp": 8, "cp": 16, "pp": 14}, 14),
    "405B PP14, VPP 9": ("llama3-405b", {"tp": 8, "cp": 16, "pp": 14, "vpp": 9}, 14),
    "8B, 8 nodes": ("llama3-8b", {"tp": 8, "cp": 8}, 16),
    "8B, 8 nodes, PP2": ("llama3-8b", {"tp": 8, "cp": 4, "pp": 2}, 16),
    "8B, 32 nodes": ("llama3-8b", {"tp": 8, "cp": 8, "dp": 4}, 32),
    "8B, 32 nodes, CP32": ("llama3-8b", {"tp": 8, "cp": 32}, 32),
    "34B, 8 nodes": ("codellama-34b", {"tp": 8, "cp": 8}, 16),
    "34B, 8 nodes, PP2": ("codellama-34b", {"tp": 8, "cp": 4, "pp": 2}, 16),
    "34B, 32 nodes": ("codellama-34b", {"tp": 8, "cp": 8, "dp": 4}, 32),
    "34B, 32 nodes, CP32": ("codellama-34b", {"tp": 8, "cp": 32}, 32),
}
"""Model, layout, and N at a window of 128K; half of that at 256K, a quarter at 512K, so that tokens a step stay."""
SHORT = tuple(name for name in LAYOUTS if "node" not in name)
"""Those of scripts/slurm, one of them with fewer virtual stages and without a pipeline, and of models with larger
vocabularies: at a window of 128K only."""
STEPS, WARM_UP, QUICK = 60, 12, 6
DRAWN_FROM = 21
PACKED = 200
"""Steps that work per token is of."""
CASE = ("data", "window", "layout")


def cases(quick: bool) -> list[tuple[str, int, str]]:
    """Data, window and layout."""
    windows = (WINDOW,) if quick else (WINDOW, 2 * WINDOW, 4 * WINDOW)
    names = ("7B PP4", "8B, 8 nodes") if quick else LAYOUTS
    return [
        (data, window, name)
        for data in (("F2",) if quick else ("F2", "dist_wlbllm"))
        for name in names
        for window in (windows[:1] if name in SHORT else windows)
    ]


def schemes(name: str, window: int, lengths: np.ndarray) -> Iterator[tuple[str, Job]]:
    """What is compared, by name."""
    model, sizes, count = LAYOUTS[name]
    count = max(1, count * WINDOW // window)

    def make(num_micro_batches: int = count, packing: Any = None, group_size: int | None = None, **changes: Any) -> Job:
        return make_job(
            model=MODELS[model],
            context_length=window,
            global_batch_size=count,
            num_micro_batches=num_micro_batches,
            parallel=Parallel(**sizes, group_size=group_size),
            packing=packing or AdaptivePacking(),
            settings=PlanSettings(profile="h100-fa2"),
            device_bytes=H100_BYTES,
            **changes,
        )

    others = {"reorder": False, "defer_weight_gradients": False, "hidden_transfers": False}
    others |= {"group_size": sizes.get("pp")}
    megatron = others | {"packing": OriginalPacking(), "cp_exchange": "ring"}
    yield "ring per sequence", make(**megatron, cp_sharding="per-sequence")
    yield "ring per document", make(**megatron, cp_sharding="per-document")
    yield "dp_balanced", make(**megatron | {"packing": InOrder()}, cp_sharding="per-document")
    yield "paper", make(packing=WlbPacking(), cp_exchange="all", cp_sharding="wlb", **others)
    yield "ours, M = N", make()
    yield "ours, M = N, not deferred", make(defer_weight_gradients=False)
    best, _ = predictions(make(), make, lambda: stream(lengths, window), memory_known=True)
    yield "ours, auto", best
    relieved = layouts.relieved(best, stream(lengths, window))
    if relieved != best:
        yield "ours, auto, fewer layers on the last stage", relieved
    if "pp" not in sizes:
        yield "ours, auto, dK and dV as the model", best.sharded(cp_gradients="model")


def measured(job: Job, lengths: np.ndarray, steps: int) -> dict[str, np.ndarray | float | int]:
    """Time, limit and work of steps, float64 [steps] each; the share of the exchange in the time, how late documents
    are, and how tokens vary."""
    packer = make_packer(stream(lengths, job.context_length), job, fingerprint="")
    times, summaries, exchange = [], [], 0.0
    for k in range(WARM_UP + steps):
        step = packer.next()
        if k < WARM_UP:
            continue
        packing = step.packing
        simulated = simulate_step(job, shard_step(job, packing.lengths))
        work = document_work(packing.documents["length"], job.crossover_tokens).sum()
        times.append((simulated.time, limit_time(simulated), float(work)))
        exchange += breakdown(simulated).exchange
        summaries.append(metrics.measure(packing, step.step, job))
    summary = metrics.summarise(summaries, num_waiting=0, skip=0)
    time, limit, work = np.array(times).T
    found = {"time": time, "limit": limit, "work": work, "exchange": exchange / time.sum()}
    return found | {"late": summary.late_steps, "cv": summary.token_cv}


def rows_of(case: tuple[str, int, str], lengths: np.ndarray, steps: int) -> list[Row]:
    """A row for every scheme."""
    _, window, name = case
    rows: list[Row] = []
    rates: dict[str, tuple[float, float]] = {}
    limits: dict[str, float] = {}
    for scheme, job in schemes(name, window, lengths):
        found = measured(job, lengths, steps)
        time, work = found["time"], found["work"]
        rates[scheme] = rate, error = _rate(time, work)
        limits[scheme] = found["limit"].sum() / work.sum()
        row = dict(zip(CASE, case, strict=True)) | {"scheme": scheme, "micro_batches": job.num_micro_batches}
        row |= {"windows": job.global_batch_size, "ms": time.mean() / 1e3}
        row["work_per_token"] = work_per_token(job, lengths)
        for ring in ("ring per sequence", "ring per document"):
            if ring in rates:
                over, its_error = rate / rates[ring][0], rates[ring][1]
                row |= {f"over_{ring}": over, f"over_{ring}_error": over * np.hypot(error, its_error)}
        row["per_token"] = row["over_ring per sequence"] / row["work_per_token"]
        row["per_token"] *= (rows or [row])[0]["work_per_token"]
        rows.append(row | {"exchange": found["exchange"], "late_steps": found["late"], "token_cv": found["cv"]})
    least = min(limit for scheme, limit in limits.items() if not scheme.startswith("ring"))
    for row in rows:
        limit = limits[row["scheme"]] if row["scheme"].startswith("ring") else least
        row["of_limit"] = limit * rates[row["scheme"]][0]
    return rows


def work_per_token(job: Job, lengths: np.ndarray) -> float:
    packer = make_packer(stream(lengths, job.context_length), job, fingerprint="")
    documents = np.concatenate([packer.next().packing.documents["length"] for _ in range(PACKED)])
    return float(document_work(documents, job.crossover_tokens).sum() / documents.sum())


def _rate(time: np.ndarray, work: np.ndarray) -> tuple[float, float]:
    """Work per time, and its relative standard error."""
    rate = work.sum() / time.sum()
    return rate, float(np.std(work - rate * time) / np.sqrt(len(time)) / work.mean())


def clustering_bound(name: str, lengths: np.ndarray) -> float:
    """Share of a pipeline's time that packing can fill with 4 N micro-batches of whole documents and steady tokens.

    A document of length d runs with at most N * C / d of its like, and 1F1B is then idle for (P - 1) * d / (V * N * C)
    of its work.
    """
    job = dict(schemes(name, WINDOW, lengths))["ours, M = N"]
    parallel, work = job.parallel, document_work(lengths, job.crossover_tokens).astype(float)
    alike = np.maximum(lengths / job.batch_tokens, 1 / (4 * job.global_batch_size))
    return float(work.sum() / (work * (1 + (parallel.pp - 1) / parallel.vpp * alike)).sum())


GOALS = {"7B PP4": (0.92, 1.48), "70B PP4": (0.92, 1.48), "30B PP4": (0.80, 1.35), "405B PP14": (0.85, 2.0)}
"""Share of the limit, and speed-up per token over a ring per sequence, of F2."""


def goals(rows: list[Row]) -> list[results.Goal]:
    wanted = []
    for row in rows:
        if row["scheme"] != "ours, auto" or row["data"] != "F2":
            continue
        what = f"{row['layout']}, {row['window'] >> 10}K"
        if row["layout"] in GOALS:
            share, speedup = GOALS[row["layout"]]
            wanted.append(results.at_least(f"{what}: share of the limit", row["of_limit"], share))
            wanted.append(results.at_least(f"{what}: per token over a ring per sequence", row["per_token"], speedup))
        cp = LAYOUTS[row["layout"]][1]["cp"]
        if cp <= 8 or cp == 32:
            most = 0.02 if cp <= 8 else 0.04
            wanted.append(results.at_most(f"{what}: exposed exchange, share of the step", row["exchange"], most))
        if row["layout"] == "550M PP4":
            wanted.append(results.at_least(f"{what}: per token over a ring per sequence", row["per_token"], 1.65))
        elif "PP" not in row["layout"]:
            wanted.append(results.at_least(f"{what}: share of the limit", row["of_limit"], 0.98))
            wanted.append(results.at_most(f"{what}: mean delay, steps", row["late_steps"], 0.05))
    return wanted


def typical(job: Job, lengths: np.ndarray) -> SimulatedStep:
    """Of a job's steps the one with the median share of the limit."""
    packer = make_packer(stream(lengths, job.context_length), job, fingerprint="")
    steps = []
    for k in range(WARM_UP + DRAWN_FROM):
        packing = packer.next().packing
        if k >= WARM_UP:
            documents = packing.lengths
            steps.append(simulate_step(job, shard_step(job, documents)))
    return sorted(steps, key=lambda step: step.time / limit_time(step))[DRAWN_FROM // 2]


def draw() -> Path:
    """Passes of a typical step of 7B on 64 GPUs, forward and backward, by its number of micro-batches."""
    lengths = f2(100_000, 0)
    pipeline, flat = (dict(schemes(name, WINDOW, lengths)) for name in ("7B PP4", "7B CP8"))
    base = pipeline["ours, M = N"]
    panels = [("Megatron, a ring per document, 4 micro-batches", pipeline["ring per document"])]
    panels += [(f"--wlb, {m} micro-batches", replace(base, num_micro_batches=m)) for m in (4, 8, 16)]
    panels += [(f"--wlb, no pipeline, {flat['ours, auto'].num_micro_batches} of several windows", flat["ours, auto"])]
    figure = results.figure(10, 7)
    heights = [job.parallel.pp for _, job in panels]
    for axes, (title, job) in zip(
        figure.subplots(len(panels), sharex=True, height_ratios=heights), panels, strict=True
    ):
        step = typical(job, lengths)
        limit = limit_time(step)
        colors = {"F": "#0072b2", "B": "#d55e00", "W": "#009e73"}
        for event in trace_events(step):
            if event["ph"] == "X" and event["cat"] in colors:
                bar = [(event["ts"] / limit, event["dur"] / limit)]
                row = (event["tid"] - 0.4, 0.8)
                axes.broken_barh(bar, row, color=colors[event["cat"]], edgecolor="white", linewidth=0.3)
        axes.axvline(1, color="black", linewidth=0.8)
        axes.set(yticks=[], xlim=(0, None))
        axes.invert_yaxis()
        axes.set_title(f"{title}: {100 * limit / step.time:.0f} % of the limit", loc="left", fontsize=10)
    axes.set_xlabel("time of a step over its limit; forward passes blue, backward orange, weight gradients green")
    return results.save(figure, "step_time")


def main() -> None:
    args = results.parser(__doc__, "two layouts, few steps, nothing written").parse_args()
    steps, data = (QUICK if args.quick else STEPS), distributions(200_000)
    rows = []
    for case in track(cases(args.quick), "simulating"):
        drawn = f2(400_000, 0, case[1]) if case[0] == "F2" else data[case[0]][0]
        rows += rows_of(case, np.minimum(drawn, case[1]), steps)
    results.show(rows)
    pipelines = [name for name, (_, sizes, _) in LAYOUTS.items() if "pp" in sizes and name in SHORT]
    bounds = {name: clustering_bound(name, f2(400_000, 0)) for name in pipelines}
    settings = {"profile": "h100-fa2", "steps": steps, "warm_up": WARM_UP, "bounds": bounds}
    results.finish(args, "step_time", settings=settings, rows=rows, goals=goals(rows), draw=draw)


if __name__ == "__main__":
    main()
