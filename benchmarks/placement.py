"""Gains of placing micro-batches on data-parallel ranks and ordering them there by work.

    python -m benchmarks.placement [--quick] [--check]

Each policy packs F2 at S_max = 1.25 windows; the first and last tenth of the steps are left out. Figures are predicted
times of the slowest rank's 1F1B (`timeline.makespans`) over a step whose micro-batches are all alike; cheap ends can
take less. Adaptive packing without a delay is left out there: it deals micro-batches to ranks itself. For jobs with
expert parallelism whole steps are simulated: Megatron's, and ours with micro-batches placed by their sums, as if every
rank had all experts, and slot by slot. Writes benchmarks/results/placement.json.
"""

import itertools
import statistics
from collections import Counter
from dataclasses import replace

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
from megatron_wlb.model import shape
from megatron_wlb.packing.adaptive import AdaptivePacking
from megatron_wlb.packing.original import OriginalPacking
from megatron_wlb.packing.wlb import WlbPacking
from megatron_wlb.pipeline.timeline import makespans
from megatron_wlb.plan.placement import order, place
from megatron_wlb.plan.step import shard_step
from megatron_wlb.simulate.passes import crossover
from megatron_wlb.simulate.step import simulate_step

PACKINGS = {
    "original": OriginalPacking(),
    "fixed, 1 global batches": FixedPacking(),
    "Algorithm 1, 0.25/0.5": WlbPacking(outlier_thresholds=(WINDOW // 4, WINDOW // 2)),
    "adaptive, delay": AdaptivePacking(max_delay_steps=30),
}
LAYOUTS = ((16, 4, 4, 1), (64, 8, 4, 1), (64, 8, 8, 1), (64, 8, 4, 2), (64, 4, 4, 1), (64, 1, 4, 1))
"""Micro-batches, data-parallel ranks, stages, chunks: from 4 to 64 micro-batches a rank."""
WARM_UP = 30
"""Steps that fill queues and are not counted."""
EP, MICRO_BATCHES = 8, 8
"""Expert-parallel ranks, and micro-batches of a data-parallel rank, of jobs with experts."""
EXPERTS = {
    "Mixtral 8x7B": shape(32, 4096, 2 * 14336, 32, 8, 32000, moe_router_topk=2),
    "Qwen3 30B-A3B": shape(48, 2048, 8 * 768, 32, 4, 151936, moe_router_topk=8),
}
"""By their published configurations: few large experts, and many small ones."""


def works(policy: Packing, n: int, steps: int) -> np.ndarray:
    """Work of each micro-batch, int64 [steps, N]."""
    packed = packings(f2(300_000, 0), job_7b(n, parallel=Parallel(), packing=policy), steps - steps // 10, steps // 10)
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
    p, placed = job.parallel, place(work, job)
    ways = {
        "random": rng.permuted(placed, axis=1),
        "snake, ascending index": snake(work, p.dp),
        "placed, ordered": np.array([row[order(work[row], job)] for row in placed]),
    }
    alike = 3 * (p.vpp * work.sum() / p.dp + (p.pp - 1) * work.mean())
    return {way: makespans(job.schedule(), work[rows]).max() / alike for way, rows in ways.items()}


def quality(quick: bool) -> list[Row]:
    rows, rng = [], np.random.default_rng(0)
    layouts = LAYOUTS[:2] if quick else LAYOUTS
    for name, policy in PACKINGS.items():
        packed = {n: works(policy, n, 20 if quick else 100) for n in {layout[0] for layout in layouts}}
        for n, dp, pp, vpp in layouts:
            job = job_7b(n, parallel=Parallel(dp=dp, pp=pp, vpp=vpp))
            steps = [compare(work, job, rng) for work in packed[n]]
            means = {way: statistics.mean(step[way] for step in steps) for way in steps[0]}
            rows.append({"policy": name, "N": n, "DP": dp, "PP": pp, "VPP": vpp, **means})
    return rows


def with_experts(quick: bool) -> list[Row]:
    """Steps of jobs with experts: time per work over that of a step of ours that is all alike."""
    rows, profile = [], load_profile(DEFAULT_PROFILE)
    layouts = list(itertools.product((2, 4, 8), (1, 2), (1, 4)))
    policies = {"adaptive": AdaptivePacking(), "Algorithm 1, default": WlbPacking()}
    for (name, model), (policy, packing) in itertools.product(EXPERTS.items(), policies.items()):
        for dp, cp, pp in layouts[:2] if quick else layouts:
            parallel = Parallel(tp=max(1, EP // (dp * cp)), cp=cp, dp=dp, pp=pp, ep=EP, etp=1)
            job = job_7b(MICRO_BATCHES * dp, model=model, parallel=parallel, packing=packing, profile=profile)
            job = replace(job, crossover_tokens=crossover(job))
            row = {"model": name, "policy": policy, "DP": dp, "CP": cp, "PP": pp, "TP": parallel.tp}
            rows.append(row | {"ranks": parallel.expert_dp_ranks} | simulated(job, 3 if quick else 20))
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
                sums[f"{way} work"] += int(document_work(packing.documents["length"], job.crossover_tokens).sum())
                sums[f"{way} limit"] += balanced_time(step)
    alike = sums["slots limit"] / sums["slots work"]
    times = {way: sums[way] / sums[f"{way} work"] / alike for way in ("megatron", "sums", "slots")}
    return times | {"slots / sums": times["slots"] / times["sums"]}


def goals(rows: list[Row], experts: list[Row]) -> list[results.Goal]:
    shares = [r["slots / sums"] for r in experts]
    wanted = [
        at_most("jobs with experts: slots alike / sums alike, mean", statistics.mean(shares), 0.98),
        at_most("jobs with experts: slots alike / sums alike, worst", max(shares), 1.0),
    ]
    for r in rows:
        where = f"{r['policy']}, N={r['N']} DP={r['DP']} PP={r['PP']} VPP={r['VPP']}"
        for way in ("random", "snake, ascending index"):
            wanted.append(at_most(f"{where}: placed and ordered / {way}", r["placed, ordered"] / r[way], 1.0))
    return wanted


def main() -> None:
    args = results.parser(__doc__, "two layouts and fewer steps").parse_args()
    rows, experts = quality(args.quick), with_experts(args.quick)
    results.show(rows)
    results.show(experts)
    settings = {"window": WINDOW, "crossover": CROSSOVER, "S_max": S_MAX, "steps": 100, "seed": 0}
    means = {way: statistics.mean(row[way] for row in experts) for way in ("megatron", "sums", "slots")}
    settings |= {"experts": experts, "experts, mean": means}
    results.finish(args, "placement", settings=settings, rows=rows, goals=goals(rows, experts))


if __name__ == "__main__":
    main()
