"""Gains of placing micro-batches of jobs with expert parallelism.

    python -m benchmarks.placement [--quick] [--check]

Whole steps of F2 are simulated: Megatron's, and ours with micro-batches placed by their sums, as if every rank had all
experts, and slot by slot. Figures are times per work over that of a step of ours that is all alike. Writes
benchmarks/results/placement.json.
"""

import itertools
import statistics
from collections import Counter
from dataclasses import replace

from benchmarks import results
from benchmarks.lengths import S_MAX, WINDOW, f2, job_7b, packings
from benchmarks.metrics import balanced_time
from benchmarks.results import Row, at_most
from megatron_wlb.hardware.profile import DEFAULT_PROFILE, load_profile
from megatron_wlb.job import Job, Parallel
from megatron_wlb.model import shape
from megatron_wlb.packing.adaptive import AdaptivePacking
from megatron_wlb.packing.megatron import without_wlb
from megatron_wlb.packing.paper import PaperPacking
from megatron_wlb.plan.step import shard_step
from megatron_wlb.simulate.passes import crossover
from megatron_wlb.simulate.step import simulate_step

WARM_UP = 30
"""Steps that fill queues and are not counted."""
EP, MICRO_BATCHES = 8, 8
"""Expert-parallel ranks, and micro-batches of a data-parallel rank."""
EXPERTS = {
    "Mixtral 8x7B": shape(32, 4096, 2 * 14336, 32, 8, 32000, moe_router_topk=2),
    "Qwen3 30B-A3B": shape(48, 2048, 8 * 768, 32, 4, 151936, moe_router_topk=8),
}
"""By their published configurations: few large experts, and many small ones."""


def jobs(quick: bool) -> list[Row]:
    rows, profile = [], load_profile(DEFAULT_PROFILE)
    layouts = list(itertools.product((2, 4, 8), (1, 2), (1, 4)))
    policies = {"adaptive": AdaptivePacking(), "Algorithm 1, default": PaperPacking()}
    for (name, model), (policy, packing) in itertools.product(EXPERTS.items(), policies.items()):
        for dp, cp, pp in layouts[:2] if quick else layouts:
            parallel = Parallel(tp=max(1, EP // (dp * cp)), cp=cp, dp=dp, pp=pp, ep=EP, etp=1)
            job = job_7b(MICRO_BATCHES * dp, model=model, parallel=parallel, packing=packing, profile=profile)
            job = replace(job, crossover_tokens=crossover(job))
            row = {"model": name, "policy": policy, "DP": dp, "CP": cp, "PP": pp, "TP": parallel.tp}
            rows.append(row | {"ranks": parallel.pooling_ranks} | simulated(job, 3 if quick else 20))
    return rows


def simulated(job: Job, steps: int) -> dict[str, float]:
    """Sums over `steps` steps of a job and of Megatron's."""
    plain, own = (
        without_wlb(job, cp_sharding="per-sequence"),
        replace(job, parallel=replace(job.parallel, ep=1, etp=None)),
    )
    sums: Counter[str] = Counter()
    for run, ways in ((plain, {"megatron": plain}), (job, {"sums": own, "slots": job})):
        for packing in packings(f2(300_000, 0), run, steps, WARM_UP):
            for way, placing in ways.items():
                step = simulate_step(run, shard_step(placing, packing.lengths))
                sums[way] += step.time
                sums[f"{way} work"] += int(job.work(packing.documents["length"]).sum())
                sums[f"{way} limit"] += balanced_time(step)
    alike = sums["slots limit"] / sums["slots work"]
    times = {way: sums[way] / sums[f"{way} work"] / alike for way in ("megatron", "sums", "slots")}
    return times | {"slots / sums": times["slots"] / times["sums"]}


def main() -> None:
    args = results.parser(__doc__, "two layouts and fewer steps").parse_args()
    rows = jobs(args.quick)
    results.show(rows)
    shares = [row["slots / sums"] for row in rows]
    goals = [
        at_most("jobs with experts: slots alike / sums alike, mean", statistics.mean(shares), 0.98),
        at_most("jobs with experts: slots alike / sums alike, worst", max(shares), 1.0),
    ]
    results.finish(args, "placement", settings={"window": WINDOW, "S_max": S_MAX}, rows=rows, goals=goals)


if __name__ == "__main__":
    main()
