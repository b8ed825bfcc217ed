"""Closed batches: what loops of reinforcement learning make of the same sequences, and what `balance` does.

    python -m benchmarks.closed_batches [--quick] [--check]

A step of 1,024 sequences, LLaMA2-7B, micro-batches of at most the longest sequence, three seeds. Step time is predicted
(`simulate`), for all by the same model. Writes benchmarks/results/closed_batches.json.
"""

import statistics
import time
from collections import defaultdict
from dataclasses import replace

import numpy as np
from rich.console import Console
from rich.progress import track

from benchmarks import results
from benchmarks.lengths import f2
from benchmarks.peers import Ranks, nemo_rl, slime, verl
from benchmarks.results import Row, at_least, at_most
from megatron_wlb import MODELS, Job, Parallel, balance, make_job
from megatron_wlb.hardware.profile import load_profile
from megatron_wlb.sharding import select
from megatron_wlb.simulate.step import simulate_step

LONGEST = 32_768
LAYOUTS = {"DP16": Parallel(dp=16), "DP8 PP2": Parallel(dp=8, pp=2), "DP4 PP4": Parallel(dp=4, pp=4)}
LAYOUTS |= {"DP2 PP8": Parallel(dp=2, pp=8)}
SEEDS = 3
OURS, EQUAL = "balance", "balance, equal counts"


def sequences(count: int, seed: int) -> dict[str, np.ndarray]:
    """Lengths by name: answers of a model that reasons, turns of agents, and documents."""
    rng = np.random.default_rng(seed)
    humps = np.where(rng.random(count) < 0.1, rng.normal(24_000, 4_000, count), rng.lognormal(7, 0.6, count))
    drawn = {"answers": rng.lognormal(8.2, 1, count), "agents": humps, "F2": f2(count, seed, LONGEST)}
    return {name: np.clip(lengths, 64, LONGEST).astype(np.int64) for name, lengths in drawn.items()}


def job_of(parallel: Parallel) -> Job:
    sizes = {"context_length": LONGEST, "max_tokens": LONGEST, "global_batch_size": parallel.dp, "parallel": parallel}
    return make_job(model=MODELS["llama2-7b"], profile=load_profile("h100-fa2"), **sizes)


def peers(lengths: list[int], job: Job) -> dict[str, Ranks]:
    """Micro-batches of every rank, by who makes them; FLOPs are those that verl counts."""
    weights = {"tokens": lengths, "FLOPs": [24576 * length + length**2 for length in lengths]}
    made = {
        f"{loop.__name__}, {name}": loop(each, lengths, job) for loop in (verl, slime) for name, each in weights.items()
    }
    made["NeMo-RL"] = nemo_rl(lengths, job)
    for name, equal in ((OURS, False), (EQUAL, True)):
        plans = (balance(lengths, job, rank, equal_counts=equal) for rank in range(job.parallel.dp))
        made[name] = [[m.documents["document"].tolist() for m in plan.micro_batches] for plan in plans]
    return made


def step_ms(ranks: Ranks, lengths: np.ndarray, job: Job) -> float:
    """Predicted time of a step."""
    job = replace(job, num_micro_batches=sum(map(len, ranks)), global_batch_size=1, max_tokens=1 << 20)
    shards = [[select.shard(lengths[rows], job) for rows in rank] for rank in ranks]
    return simulate_step(job, shards).time / 1e3


def compare(quick: bool) -> list[Row]:
    """Means over seeds, and how much faster `balance` is: with equal counts than verl, which needs them."""
    found: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    count, seeds = (256, 1) if quick else (1024, SEEDS)
    cases = [(layout, parallel, seed) for layout, parallel in LAYOUTS.items() for seed in range(seeds)]
    for layout, parallel, seed in track(cases, "closed batches", console=Console(stderr=True)):
        job = job_of(parallel)
        for data, lengths in sequences(count, seed).items():
            for who, ranks in peers(lengths.tolist(), job).items():
                found[data, layout, who].append(step_ms(ranks, lengths, job))
    table = []
    for (data, layout, who), times in found.items():
        mine = found[data, layout, EQUAL if who.startswith("verl") else OURS]
        gain = statistics.mean(theirs / ms for theirs, ms in zip(times, mine, strict=True))
        row = {"data": data, "layout": layout, "who": who, "step_ms": statistics.mean(times)}
        table.append(row | {"balance_is_faster": gain})
    return table


def planning_ms() -> list[Row]:
    """CPU time to plan 8,192 sequences, for one rank, in ms."""
    rows = []
    for layout, parallel in LAYOUTS.items():
        job, times = job_of(parallel), []
        for seed in range(5):
            lengths = sequences(8192, seed)["answers"]
            begin = time.process_time()
            balance(lengths, job)
            times.append((time.process_time() - begin) * 1e3)
        rows.append({"layout": layout, "plan_ms": statistics.median(times)})
    return rows


def main() -> None:
    args = results.parser(__doc__, "256 sequences of one seed").parse_args()
    table, planned = compare(args.quick), planning_ms()
    results.show(table)
    results.show(planned)
    others = [row for row in table if row["who"] not in (OURS, EQUAL)]
    piped = [row["balance_is_faster"] for row in others if "PP" in row["layout"]]
    goals = [
        at_least("least gain", min(row["balance_is_faster"] for row in others), 1.0),
        at_least("mean gain with pipelines", statistics.mean(piped), 1.05),
        at_most("planning 8,192 sequences, ms", max(row["plan_ms"] for row in planned), 50),
    ]
    settings = {"longest": LONGEST, "sequences": 256 if args.quick else 1024, "seeds": 1 if args.quick else SEEDS}
    results.finish(args, "closed_batches", settings=settings, rows=[*table, *planned], goals=goals)


if __name__ == "__main__":
    main()
