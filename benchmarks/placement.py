"""Gains of placing micro-batches on data-parallel ranks and ordering them there by work, and the time that it takes.

    python -m benchmarks.placement [--quick] [--check]

Each policy packs F2 at S_max = 1.25 windows; the first and last tenth of the steps are left out. Figures are predicted
times of the slowest rank's 1F1B (`timeline.makespans`) over a step whose micro-batches are all alike; cheap ends can
take less. Adaptive packing without a delay is left out there: it deals micro-batches to ranks itself. For jobs with
expert parallelism whole steps are simulated: Megatron's, and ours with micro-batches placed by their sums, as if every
rank had all experts, and slot by slot. Writes benchmarks/results/placement.json.
"""

import itertools
import statistics
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks import results
from benchmarks.fixed import FixedPacking
from benchmarks.lengths import CROSSOVER, S_MAX, WINDOW, f2, job_7b, packings
from benchmarks.metrics import balanced_time
from benchmarks.peers import as_megatron
from benchmarks.results import Row, at_most
from megatron_wlb.documents import document_work
from megatron_wlb.hardware.profile import DEFAULT_PROFILE, load_profile
from megatron_wlb.job import Job, Packing, Parallel
from megatron_wlb.model import ModelShape
from megatron_wlb.packing.adaptive import AdaptivePacking
from megatron_wlb.packing.original import OriginalPacking
from megatron_wlb.packing.wlb import WlbPacking
from megatron_wlb.pipeline.timeline import makespans
from megatron_wlb.plan.placement import order, paces, place, rank_cost
from megatron_wlb.plan.step import shard_step
from megatron_wlb.simulate.passes import crossover
from megatron_wlb.simulate.step import breakdown, simulate_step

PACKINGS = {
    "original": OriginalPacking(),
    "fixed, 1 global batches": FixedPacking(),
    "Algorithm 1, 0.25/0.5": WlbPacking(outlier_thresholds=(WINDOW // 4, WINDOW // 2)),
    "adaptive, delay": AdaptivePacking(max_delay_steps=30),
}
LAYOUTS = ((16, 4, 4, 1), (64, 8, 4, 1), (64, 8, 8, 1), (64, 8, 4, 2), (64, 4, 4, 1), (64, 1, 4, 1))
"""Micro-batches, data-parallel ranks, stages, chunks: from 4 to 64 micro-batches a rank."""
LARGER = ((64, 1, 4, 2), (64, 1, 8, 1), (64, 1, 8, 2), (2048, 64, 4, 1), (2048, 64, 16, 4))
EXPERT_LAYOUTS = ((64, 8, 4, 1, 8), (64, 8, 1, 1, 8), (2048, 64, 4, 1, 8))
"""The last number is that of ranks that divide experts."""
TIMED = (*LAYOUTS, *LARGER, *EXPERT_LAYOUTS)
WARM_UP = 30
"""Steps that fill queues and are not counted."""
EP, MICRO_BATCHES = 8, 8
"""Expert-parallel ranks, and micro-batches of a data-parallel rank, of jobs with experts."""
SIZES = ("num_layers", "hidden_size", "ffn_hidden_size", "num_query_groups", "padded_vocab_size", "moe_router_topk")
EXPERTS = {
    name: ModelShape(num_attention_heads=32, **dict(zip(SIZES, sizes, strict=True)))
    for name, sizes in {
        "Mixtral 8x7B": (32, 4096, 2 * 14336, 8, 32000, 2),
        "Qwen3 30B-A3B": (48, 2048, 8 * 768, 4, 151936, 8),
    }.items()
}
"""By their published configurations: few large experts, and many small ones."""


def job_of(n: int, dp: int = 1, pp: int = 1, vpp: int = 1, ep: int = 1, **changes: Any) -> Job:
    """A 7B model on that layout."""
    return job_7b(n, parallel=Parallel(dp=dp, pp=pp, vpp=vpp, ep=ep), **changes)


def works(policy: Packing, n: int, steps: int) -> np.ndarray:
    """Work of each micro-batch, int64 [steps, N]."""
    packed = packings(f2(300_000, 0), job_of(n, packing=policy), steps - steps // 10, steps // 10)
    return np.array([p.sums(document_work(p.documents["length"], CROSSOVER)) for p in packed[: -(steps // 10)]])


def snake(work: np.ndarray, dp: int) -> np.ndarray:
    """Descending work, back and forth over the ranks: [dp, M], ascending."""
    rounds = np.argsort(-work, kind="stable").reshape(-1, dp)
    rounds[1::2] = rounds[1::2, ::-1]
    return np.sort(rounds.T, axis=1)


def compare(work: np.ndarray, job: Job, rng: np.random.Generator) -> dict[str, float]:
    """Predicted time of one step, by how its micro-batches are placed and ordered; `random` orders what is placed.

    All are interleaved in the groups of --wlb.
    """
    placed, dealt = place(work, job), snake(work, job.parallel.dp)

    def ordered(rows: np.ndarray) -> np.ndarray:
        return np.array([row[order(work[row], job)] for row in rows])

    ways = {
        "upstream": place(work, replace(job, reorder=False)),
        "random": rng.permuted(placed, axis=1),
        "snake, ascending index": dealt,
        "placed, ascending index": placed,
        "snake, ordered": ordered(dealt),
        "placed, ordered": ordered(placed),
    }
    p = job.parallel
    alike = 3 * (p.vpp * work.sum() / p.dp + (p.pp - 1) * work.mean())
    times = {way: makespans(job.schedule(), work[rows]).max() / alike for way, rows in ways.items()}
    return times | {"cost of placed / snake": rank_cost(work[placed], job).max() / rank_cost(work[dealt], job).max()}


def quality(quick: bool) -> list[Row]:
    rows, rng = [], np.random.default_rng(0)
    layouts = LAYOUTS[:2] if quick else LAYOUTS
    for name, policy in PACKINGS.items():
        packed = {n: works(policy, n, 20 if quick else 100) for n in {layout[0] for layout in layouts}}
        for n, dp, pp, vpp in layouts:
            steps = [compare(work, job_of(n, dp, pp, vpp), rng) for work in packed[n]]
            means = {way: statistics.mean(step[way] for step in steps) for way in steps[0]}
            rows.append({"policy": name, "N": n, "DP": dp, "PP": pp, "VPP": vpp, **means})
    return rows


def with_experts(quick: bool) -> list[Row]:
    """Steps of jobs with experts: time per work over that of a step of ours that is all alike, and what waits of it."""
    rows = []
    layouts = list(itertools.product((2, 4, 8), (1, 2), (1, 4)))
    for (name, model), policy in itertools.product(EXPERTS.items(), ("adaptive", "Algorithm 1, default")):
        for dp, cp, pp in layouts[:2] if quick else layouts:
            parallel = Parallel(tp=max(1, EP // (dp * cp)), cp=cp, dp=dp, pp=pp, ep=EP, etp=1)
            job = job_7b(
                MICRO_BATCHES * dp,
                model=model,
                parallel=parallel,
                packing=AdaptivePacking() if policy == "adaptive" else WlbPacking(),
                profile=load_profile(DEFAULT_PROFILE),
            )
            job = replace(job, crossover_tokens=crossover(job))
            rows.append(
                {"model": name, "policy": policy, "DP": dp, "CP": cp, "PP": pp, "TP": parallel.tp}
                | {"ranks": parallel.expert_dp_ranks}
                | simulated(job, 3 if quick else 20)
            )
    return rows


def simulated(job: Job, steps: int) -> dict[str, float]:
    """Sums over `steps` steps of a job and of Megatron's, as `with_experts` shows them."""
    plain, own = as_megatron(job), replace(job, parallel=replace(job.parallel, ep=1, etp=None))
    sums: Counter[str] = Counter()
    for run, ways in ((plain, {"megatron": plain}), (job, {"sums": own, "slots": job})):
        for packing in packings(f2(300_000, 0), run, steps, WARM_UP):
            for way, placing in ways.items():
                step = simulate_step(run, shard_step(placing, packing.lengths))
                sums[way] += step.time
                sums[f"{way} waits"] += breakdown(step).ep_wait
                sums[f"{way} work"] += int(document_work(packing.documents["length"], job.crossover_tokens).sum())
                sums[f"{way} limit"] += balanced_time(step)
    alike = sums["slots limit"] / sums["slots work"]
    times = {way: sums[way] / sums[f"{way} work"] / alike for way in ("megatron", "sums", "slots")}
    waits = {f"{way} waits": sums[f"{way} waits"] / sums[way] for way in times}
    return times | waits | {"slots / sums": times["slots"] / times["sums"]}


def timings(quick: bool) -> list[Row]:
    """CPU time of the calling thread to place all micro-batches and order those of one rank, and of its first call.

    Log-normal works, which leave the search most to do, and nearly equal ones.
    """
    rng, rows = np.random.default_rng(0), []
    draws = {"log-normal": lambda n: rng.lognormal(10, 1, n), "5 % apart": lambda n: rng.normal(1e6, 5e4, n)}
    for layout, (name, draw) in itertools.product(TIMED, draws.items()):
        (n, dp, pp, vpp, *ep), job, times = layout, job_of(*layout), []
        for _ in range(1 + (5 if quick else 50)):
            work = draw(n).astype(np.int64)
            experts = (work * rng.uniform(0.2, 0.8, n)).astype(np.int64)
            begin = time.thread_time()
            ranks = place(work, job, experts)
            order(paces(work[ranks], experts[ranks], job)[0], job)
            times.append(time.thread_time() - begin)
        first, *warm = 1e3 * np.array(times)
        where = f"N={n} DP={dp} PP={pp} VPP={vpp}" + "".join(f" EP={size}" for size in ep)
        rows.append({"layout": where, "works": name, "first_ms": float(first), **results.spread("median_ms", warm)})
    return rows


def goals(rows: list[Row], times: list[Row], experts: list[Row]) -> list[results.Goal]:
    wanted = [at_most(f"{t['layout']}, {t['works']}: place + order, ms", t["median_ms"], 1.0) for t in times]
    shares = [r["slots / sums"] for r in experts]
    wanted.append(at_most("jobs with experts: slots alike / sums alike, mean", statistics.mean(shares), 0.98))
    wanted.append(at_most("jobs with experts: slots alike / sums alike, worst", max(shares), 1.0))
    for r in rows:
        where = f"{r['policy']}, N={r['N']} DP={r['DP']} PP={r['PP']} VPP={r['VPP']}"
        for way in ("random", "snake, ascending index"):
            wanted.append(at_most(f"{where}: placed and ordered / {way}", r["placed, ordered"] / r[way], 1.0))
    return wanted


def main() -> None:
    args = results.parser(__doc__, "two layouts and fewer steps").parse_args()
    rows, times = quality(args.quick), timings(args.quick)
    experts = with_experts(args.quick)
    for table in (rows, times, experts):
        results.show(table)
    settings = {"window": WINDOW, "crossover": CROSSOVER, "S_max": S_MAX, "steps": 100, "seed": 0}
    means = {way: statistics.mean(row[way] for row in experts) for way in ("megatron", "sums", "slots")}
    settings |= {"timings": times, "experts": experts, "experts, mean": means}
    results.finish(args, "placement", settings=settings, rows=rows, goals=goals(rows, times, experts))


if __name__ == "__main__":
    main()
