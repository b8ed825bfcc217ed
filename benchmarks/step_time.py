"""The share of its limit that a training step reaches: Megatron's ways, the paper's, and ours; predicted, not measured.

    python -m benchmarks.step_time [--quick] [--check]

The limit spreads attention, linear layers, vocabulary, tensor-parallel communication and optimizer of a step evenly
over all GPUs, and nothing waits; it is that of whole documents, in the micro-batches that need least. Documents are of
F2, times of the default H100 profile, and all have --tp-comm-overlap. Schemes: Megatron as most
runs have it, whose tokens attend across documents; Megatron with a ring per document (THD), micro-batches by token
count (`dp_balanced`, as upstream describes it), the paper, and --wlb by adaptive packing with a micro-batch for every
window or as many as `--wlb-micro-batches auto` chooses, memory taken to be enough; where `analyze` would try it with
fewer layers on the last stage; and without a pipeline with `--wlb-cp-gradients model`. Speed-ups are of tokens per
second: steps hold too few documents to tell, so time is that of their work at the work per token of many packed steps.
Errors are standard errors of a ratio of means over steps. Writes benchmarks/results/step_time.json and
docs/step_time.png in about ten minutes.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import track

from benchmarks import metrics, results
from benchmarks.lengths import WINDOW, f2, packer, packings, stream, work_per_token
from benchmarks.peers import InOrder, as_megatron
from benchmarks.results import Row
from megatron_wlb.cli.analyze.layouts import relieved
from megatron_wlb.describe.make import make_job
from megatron_wlb.describe.megatron import MegatronArguments, tile_rows, tp_overlap
from megatron_wlb.hardware.profile import DEFAULT_PROFILE, load_profile
from megatron_wlb.job import Job, Parallel
from megatron_wlb.micro_batches import predictions
from megatron_wlb.model import MODELS
from megatron_wlb.packing.adaptive import AdaptivePacking
from megatron_wlb.packing.wlb import WlbPacking
from megatron_wlb.plan.step import shard_step
from megatron_wlb.simulate.memory import H100_BYTES
from megatron_wlb.simulate.step import SimulatedStep, breakdown, limit_time, simulate_step, trace_of
from megatron_wlb.types import document_work

LAYOUTS = {
    "550M PP4": ("550m", {"tp": 2, "cp": 4, "pp": 4, "vpp": 6}, 4),
    "7B PP4": ("llama2-7b", {"tp": 8, "cp": 2, "pp": 4, "vpp": 8}, 4),
    "30B PP4": ("30b", {"tp": 8, "cp": 4, "pp": 4, "vpp": 12}, 4),
    "70B PP4": ("llama2-70b", {"tp": 8, "cp": 8, "pp": 4, "vpp": 20}, 4),
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
"""At a window of 128K only: the jobs of scripts/slurm, 7B with fewer virtual stages and without a pipeline, and models
with larger vocabularies."""
STEPS, WARM_UP, QUICK = 24, 12, 6
DRAWN_FROM = 21
PACKED = 200
"""Steps that tell the work per token."""
CASE = ("data", "window", "layout")
ACROSS = "across documents"
OVER = (ACROSS, "ring per document")


def cases(quick: bool) -> list[tuple[str, int, str]]:
    """Data, window and layout."""
    windows = (WINDOW,) if quick else (WINDOW, 2 * WINDOW, 4 * WINDOW)
    names = ("7B PP4", "8B, 8 nodes") if quick else LAYOUTS
    return [("F2", window, name) for name in names for window in (windows[:1] if name in SHORT else windows)]


def job_of(name: str, window: int, **changes: Any) -> Job:
    """The job of a layout as --wlb trains it, a micro-batch for every window; `changes` are arguments of `make_job`."""
    model, sizes, count = LAYOUTS[name]
    windows = max(1, count * WINDOW // window)
    given = {
        "tp_overlap": tp_overlap(sizes["tp"]),
        "tp_tile_rows": tile_rows(MegatronArguments(tp_comm_overlap=True, seq_length=window), Parallel(**sizes)),
        "model": MODELS[model],
        "context_length": window,
        "global_batch_size": windows,
        "parallel": Parallel(**sizes),
        "packing": AdaptivePacking(),
        "profile": load_profile(DEFAULT_PROFILE),
        "device_bytes": H100_BYTES,
    }
    return make_job(**given | changes)


def schemes(name: str, window: int, lengths: np.ndarray) -> Iterator[tuple[str, Job]]:
    """The schemes of a case, by name."""
    make = partial(job_of, name, window)
    ours = make()
    per_document = as_megatron(ours, cp_sharding="per-document")
    yield ACROSS, as_megatron(ours)
    yield "ring per document", per_document
    yield "dp_balanced", replace(per_document, packing=InOrder())
    yield "paper", replace(as_megatron(ours, cp_sharding="wlb", cp_exchange="all"), packing=WlbPacking())
    yield "ours, M = N", ours
    yield "ours, M = N, not deferred", make(defer_weight_gradients=False)
    best, _ = predictions(ours, make, lambda: stream(lengths, window), memory_known=True)
    yield "ours, auto", best
    if (fewer := relieved(best, stream(lengths, window))) != best:
        yield "ours, auto, fewer layers on the last stage", fewer
    if ours.parallel.pp == 1:
        yield "ours, auto, dK and dV as the model", best.sharded(cp_gradients="model")


def measured(job: Job, lengths: np.ndarray, steps: int, *, across: bool) -> dict[str, Any]:
    """Time, limit and work of steps, float64 [steps] each; the share of the exchange in the time, the delay of
    documents, and the spread of tokens. Work is tokens if tokens attend `across` documents."""
    packs, times, summaries, exchange = packer(lengths, job), [], [], 0.0
    for step in [packs.next() for _ in range(WARM_UP + steps)][WARM_UP:]:
        packing = step.batch
        windows = [np.array([each.sum()]) for each in packing.lengths] if across else packing.lengths
        simulated = simulate_step(job, shard_step(job, windows))
        documents = packing.documents["length"]
        work = documents.sum() if across else document_work(documents, job.crossover_tokens).sum()
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
    per_work: dict[str, tuple[float, float]] = {}
    for scheme, job in schemes(name, window, lengths):
        across = scheme == ACROSS
        found = measured(job, lengths, steps, across=across)
        time, work = found["time"], found["work"]
        done, error = _rate(time, work)
        per_token = 1.0 if across else work_per_token(packer(lengths, job), job, PACKED)
        rate = done / per_token
        rates[scheme], per_work[scheme] = (rate, error), (done, found["limit"].sum() / work.sum())
        row = dict(zip(CASE, case, strict=True)) | {"scheme": scheme, "micro_batches": job.num_micro_batches}
        row |= {"windows": job.global_batch_size, "ms": time.mean() / 1e3, "work_per_token": per_token}
        for other in OVER:
            if other in rates:
                over = rate / rates[other][0]
                row |= {f"over {other}": over, f"over {other}, error": over * np.hypot(error, rates[other][1])}
        row["of_limit"] = found["limit"].sum() / time.sum()
        rows.append(row | {"exchange": found["exchange"], "late_steps": found["late"], "token_cv": found["cv"]})
    least = min(limit for scheme, (_, limit) in per_work.items() if scheme not in OVER)
    for row in rows:
        if row["scheme"] not in OVER:
            row["of_limit"] = least * per_work[row["scheme"]][0]
    return rows


def _rate(time: np.ndarray, work: np.ndarray) -> tuple[float, float]:
    """Work per time in us, and its relative standard error."""
    rate = work.sum() / time.sum()
    return rate, float(np.std(work - rate * time) / np.sqrt(len(time)) / work.mean())


def clustering_bound(name: str, lengths: np.ndarray) -> float:
    """Share of a pipeline's time that packing can fill with 4 N micro-batches of whole documents and steady tokens.

    A step holds at most N * C / d documents of length d, and 1F1B is then idle for (P - 1) * d / (V * N * C) of their
    work.
    """
    job = job_of(name, WINDOW)
    parallel, work = job.parallel, document_work(lengths, job.crossover_tokens).astype(float)
    alike = np.maximum(lengths / job.batch_tokens, 1 / (4 * job.global_batch_size))
    return float(work.sum() / (work * (1 + (parallel.pp - 1) / parallel.vpp * alike)).sum())


GOALS = {"7B PP4": (0.92, 1.48), "70B PP4": (0.92, 1.48), "30B PP4": (0.80, 1.35), "405B PP14": (0.85, 2.0)}
"""Share of the limit, and speed-up over attention across documents, of F2."""


def goals(rows: list[Row]) -> list[results.Goal]:
    wanted = []
    for row in rows:
        if row["scheme"] != "ours, auto" or row["data"] != "F2":
            continue
        what = f"{row['layout']}, {row['window'] >> 10}K"
        if row["layout"] in GOALS:
            share, speedup = GOALS[row["layout"]]
            wanted.append(results.at_least(f"{what}: share of the limit", row["of_limit"], share))
            wanted.append(results.at_least(f"{what}: over attention across documents", row[f"over {ACROSS}"], speedup))
        cp = LAYOUTS[row["layout"]][1]["cp"]
        if cp <= 8 or cp == 32:
            most = 0.02 if cp <= 8 else 0.04
            wanted.append(results.at_most(f"{what}: exposed exchange, share of the step", row["exchange"], most))
        if row["layout"] == "550M PP4":
            wanted.append(results.at_least(f"{what}: over attention across documents", row[f"over {ACROSS}"], 1.65))
        elif "PP" not in row["layout"]:
            wanted.append(results.at_least(f"{what}: share of the limit", row["of_limit"], 0.98))
            wanted.append(results.at_most(f"{what}: mean delay, steps", row["late_steps"], 0.05))
    return wanted


def typical(job: Job, lengths: np.ndarray) -> SimulatedStep:
    """The step of a job with the median share of the limit."""
    packed = packings(lengths, job, DRAWN_FROM, WARM_UP)
    steps = [simulate_step(job, shard_step(job, packing.lengths)) for packing in packed]
    return sorted(steps, key=lambda step: step.time / limit_time(step))[DRAWN_FROM // 2]


def draw(folder: Path) -> Path:
    """Passes of a typical step of 7B on 64 GPUs, by Megatron and with --wlb."""
    lengths = f2(100_000, 0)
    jobs = dict(schemes("7B PP4", WINDOW, lengths))
    panels = {"Megatron": jobs["ring per document"], "--wlb": jobs["ours, auto"]}
    figure = results.figure(10, 4)
    colors = {"F": "#0072b2", "B": "#d55e00", "W": "#009e73"}
    drawn = figure.subplots(len(panels), sharex=True)
    for axes, (title, job) in zip(drawn, panels.items(), strict=True):
        step = typical(job, lengths)
        limit = limit_time(step)
        for event in trace_of(step)["traceEvents"]:
            if event["ph"] == "X" and event["cat"] in colors:
                bar = [(event["ts"] / limit, event["dur"] / limit)]
                row = (event["tid"] - 0.4, 0.8)
                axes.broken_barh(bar, row, color=colors[event["cat"]], edgecolor="white", linewidth=0.3)
        axes.axvline(1, color="black", linewidth=0.8)
        axes.set(yticks=range(job.parallel.pp), xlim=(0, None))
        axes.set_yticklabels([f"stage {stage}" for stage in range(job.parallel.pp)])
        axes.invert_yaxis()
        axes.set_title(
            f"{title}: {100 * limit / step.time:.0f} % of the speed without idle time", loc="left", fontsize=10
        )
    words = ("forward", "backward", "deferred weight gradients")
    drawn[-1].set_xlabel("time; 1: the same work if no GPU ever waited (white: idle)")
    for color, word in zip(colors.values(), words, strict=True):
        drawn[0].broken_barh([], (0, 1), color=color, label=word)
    drawn[0].legend(loc="upper right", ncols=3, fontsize=8, bbox_to_anchor=(1, 1.3), frameon=False)
    return results.save(figure, "step_time", folder)


def main() -> None:
    args = results.parser(__doc__, "two layouts, few steps").parse_args()
    steps, rows = QUICK if args.quick else STEPS, []
    for case in track(cases(args.quick), "simulating"):
        rows += rows_of(case, np.minimum(f2(400_000, 0, case[1]), case[1]), steps)
    results.show(rows)
    pipelines = [name for name, (_, sizes, _) in LAYOUTS.items() if "pp" in sizes and name in SHORT]
    bounds = {name: clustering_bound(name, f2(400_000, 0)) for name in pipelines}
    settings = {"profile": DEFAULT_PROFILE, "steps": steps, "warm_up": WARM_UP, "bounds": bounds}
    results.finish(args, "step_time", settings=settings, rows=rows, goals=goals(rows), draw=draw)


if __name__ == "__main__":
    main()
