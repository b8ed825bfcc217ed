"""Closed batches: what loops of reinforcement learning make of the same sequences, and what `balance` does.

    python -m benchmarks.closed_batches [--quick] [--check]

A step of 1,024 sequences, LLaMA2-7B, micro-batches of at most the longest sequence, three seeds. Trajectories of agents
(`plan.mock.PROFILES`) have several limits; longer ones are left out. Of Megatron-Bridge, steps of its packed rows are
trained: ROWS a rank, and as many a pipeline stage. Step time is predicted (`simulate`), for all by the same model.
Writes benchmarks/results/closed_batches.json.
"""

import itertools
import statistics
import time
from collections import defaultdict
from dataclasses import replace

import numpy as np

from benchmarks import results
from benchmarks.lengths import f2
from benchmarks.peers import Ranks, bridge, nemo_rl, slime, verl
from benchmarks.results import Row, at_least, at_most
from megatron_wlb import MODELS, Job, Parallel, balance, make_job
from megatron_wlb.hardware.profile import load_profile
from megatron_wlb.plan.closed import divide
from megatron_wlb.plan.mock import PROFILES
from megatron_wlb.sharding import select
from megatron_wlb.simulate.step import simulate_step

LIMITS = {"answers": (32_768,), "turns": (32_768,), "F2": (32_768,), "agents": (32_768, 65_536, 131_072, 262_144)}
"""Most tokens of a sequence and of a micro-batch, by lengths."""
LAYOUTS = {"DP16": Parallel(dp=16), "DP8 PP2": Parallel(dp=8, pp=2), "DP4 PP4": Parallel(dp=4, pp=4)}
LAYOUTS |= {"DP2 PP8": Parallel(dp=2, pp=8)}
ROWS = 4
"""Of Megatron-Bridge."""
ROW_LAYOUTS = {"DP4": Parallel(dp=4), "DP16": Parallel(dp=16), "PP4": Parallel(pp=4), "PP8": Parallel(pp=8)}
ROW_STEPS = 8
SEEDS = 3
OURS, EQUAL, BRIDGE = "balance", "balance, equal counts", "Bridge"


def sequences(name: str, count: int, seed: int, longest: int) -> np.ndarray:
    """Lengths: answers of a model that reasons, turns of agents and their trajectories, or documents."""
    rng = np.random.default_rng(seed)
    if name == "agents":
        drawn = PROFILES["agents"].lengths.draw(8 * count, seed)
        return drawn[drawn <= longest][:count]
    if name == "turns":
        drawn = np.where(rng.random(count) < 0.1, rng.normal(24_000, 4_000, count), rng.lognormal(7, 0.6, count))
    else:
        drawn = rng.lognormal(8.2, 1, count) if name == "answers" else f2(count, seed, longest)
    return np.clip(drawn, 64, longest).astype(np.int64)


def job_of(parallel: Parallel, longest: int) -> Job:
    sizes = {"context_length": longest, "max_tokens": longest, "global_batch_size": parallel.dp, "parallel": parallel}
    return make_job(model=MODELS["llama2-7b"], profile=load_profile("h100-fa2"), **sizes)


def peers(lengths: list[int], job: Job) -> dict[str, Ranks]:
    """Micro-batches of every rank, by who makes them; FLOPs are those that verl counts."""
    weights = {"tokens": lengths, "FLOPs": [24576 * length + length**2 for length in lengths]}
    made = {
        f"{loop.__name__}, {name}": loop(each, lengths, job) for loop in (verl, slime) for name, each in weights.items()
    }
    made["NeMo-RL"] = nemo_rl(lengths, job)
    return made | {name: divide(lengths, job, equal_counts=equal) for name, equal in ((OURS, False), (EQUAL, True))}


def step_ms(ranks: Ranks, lengths: np.ndarray, job: Job) -> float:
    """Predicted time of a step."""
    job = replace(job, num_micro_batches=sum(map(len, ranks)), global_batch_size=1, max_tokens=1 << 20)
    shards = [[select.shard(lengths[rows], job) for rows in rank] for rank in ranks]
    return simulate_step(job, shards).time / 1e3


def compare(quick: bool) -> list[Row]:
    """Means over seeds, and how much faster `balance` is: with equal counts than verl, which needs them."""
    found: dict[tuple[str, int, str, str], list[float]] = defaultdict(list)
    count, seeds = (256, 1) if quick else (1024, SEEDS)
    cases = [
        (data, longest, layout, seed)
        for data, limits in LIMITS.items()
        for longest in limits
        for layout in LAYOUTS
        for seed in range(seeds)
    ]
    for data, longest, layout, seed in results.track(cases, "closed batches"):
        job, lengths = job_of(LAYOUTS[layout], longest), sequences(data, count, seed, longest)
        for who, ranks in peers(lengths.tolist(), job).items():
            found[data, longest, layout, who].append(step_ms(ranks, lengths, job))
    table = []
    for (data, longest, layout, who), times in found.items():
        mine = found[data, longest, layout, EQUAL if who.startswith("verl") else OURS]
        gain = statistics.mean(theirs / ms for theirs, ms in zip(times, mine, strict=True))
        row = {"data": data, "longest": longest, "layout": layout, "who": who, "step_ms": statistics.mean(times)}
        table.append(row | {"balance_is_faster": gain})
    return table


def compare_rows(quick: bool) -> list[Row]:
    """The time of steps of Megatron-Bridge's packed rows over the time that `balance` takes for the same sequences."""
    table = []
    for longest, (layout, parallel) in itertools.product(LIMITS["agents"], ROW_LAYOUTS.items()):
        job, rows = job_of(parallel, longest), ROWS * parallel.dp * parallel.pp
        theirs, mine = [], []
        for seed in range(1 if quick else SEEDS):
            # As many as fill the steps' rows, and some more.
            mean = sequences("agents", 4096, seed, longest).mean()
            lengths = sequences("agents", int((ROW_STEPS + 1) * rows * longest / mean), seed, longest)
            for ranks in bridge(lengths.tolist(), seed, job, rows)[: 2 if quick else ROW_STEPS]:
                own = lengths[sorted(itertools.chain.from_iterable(itertools.chain.from_iterable(ranks)))]
                theirs.append(step_ms(ranks, lengths, job))
                mine.append(step_ms(divide(own, job), own, job))
        row = {"data": "agents", "longest": longest, "layout": layout, "who": BRIDGE, "rows": rows}
        table.append(row | {"step_ms": statistics.mean(theirs), "balance_is_faster": sum(theirs) / sum(mine)})
    return table


def planning_ms() -> list[Row]:
    """CPU time to plan 8,192 answers for one rank, and 200,000 for all without their shards, in ms."""
    rows = []
    for layout, parallel in LAYOUTS.items():
        job, times = job_of(parallel, 32_768), []
        for seed in range(5):
            lengths = sequences("answers", 8192, seed, 32_768)
            begin = time.process_time()
            balance(lengths, job)
            times.append((time.process_time() - begin) * 1e3)
        begin = time.process_time()
        divide(sequences("answers", 200_000, 0, 32_768), job)
        rows.append({"layout": layout, "plan_ms": statistics.median(times)})
        rows[-1]["divide_200_000_ms"] = (time.process_time() - begin) * 1e3
    return rows


def main() -> None:
    args = results.parser(__doc__, "256 sequences of one seed").parse_args()
    table, packed, planned = compare(args.quick), compare_rows(args.quick), planning_ms()
    for rows in (table, packed, planned):
        results.show(rows)
    others = [row for row in table if row["who"] not in (OURS, EQUAL)]
    piped = [row["balance_is_faster"] for row in others if "PP" in row["layout"]]

    def least(layout: str) -> float:
        return min(row["balance_is_faster"] for row in packed if row["layout"] == layout)

    goals = [
        at_least("least gain", min(row["balance_is_faster"] for row in others), 1.0),
        at_least("mean gain with pipelines", statistics.mean(piped), 1.05),
        at_least("least gain over Bridge's rows, agents, PP4", least("PP4"), 1.05),
        at_least("least gain over Bridge's rows, agents, DP4", least("DP4"), 1.09),
        at_least("least gain over Bridge's rows", min(map(least, ROW_LAYOUTS)), 1.0),
        at_most("planning 8,192 sequences, ms", max(row["plan_ms"] for row in planned), 50),
        at_most("dividing 200,000 sequences, ms", max(row["divide_200_000_ms"] for row in planned), 5000),
    ]
    settings = {"sequences": 256 if args.quick else 1024, "seeds": 1 if args.quick else SEEDS, "row_steps": ROW_STEPS}
    results.finish(args, "closed_batches", settings=settings, rows=[*table, *packed, *planned], goals=goals)


if __name__ == "__main__":
    main()
