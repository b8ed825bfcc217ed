"""Closed batches: what loops of reinforcement learning make of the same sequences, and what `balance` does.

    python -m benchmarks.closed_batches [--quick] [--check]

A step of 1,024 sequences, LLaMA2-7B, micro-batches of at most the longest sequence, three seeds. Step time is predicted
(`simulate`), for all by the same model. Writes benchmarks/results/closed_batches.json.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from rich.console import Console
from rich.progress import track

from benchmarks import results
from benchmarks.lengths import f2
from benchmarks.peers import Ranks, nemo_rl, slime, verl
from benchmarks.results import Row, at_least, at_most
from megatron_wlb import MODELS, Job, Parallel, balance, make_job
from megatron_wlb.documents import document_work
from megatron_wlb.hardware.profile import load_profile
from megatron_wlb.sharding import select
from megatron_wlb.simulate.step import simulate_step

LONGEST = 32_768
LAYOUTS = {"DP16": Parallel(dp=16), "DP8 PP2": Parallel(dp=8, pp=2), "DP4 PP4": Parallel(dp=4, pp=4)}
LAYOUTS |= {"DP2 PP8": Parallel(dp=2, pp=8)}
SEEDS = 3
MOST_MS = 50
"""For 8,192 sequences."""


def sequences(count: int, seed: int) -> dict[str, np.ndarray]:
    """Lengths by name: answers of a model that reasons, turns of agents, and documents."""
    rng = np.random.default_rng(seed)
    humps = np.where(rng.random(count) < 0.1, rng.normal(24_000, 4_000, count), rng.lognormal(7, 0.6, count))
    drawn = {"answers": rng.lognormal(8.2, 1, count), "agents": humps, "F2": f2(count, seed, LONGEST)}
    return {name: np.clip(lengths, 64, LONGEST).astype(np.int64) for name, lengths in drawn.items()}


def job_of(parallel: Parallel) -> Job:
    return make_job(
        model=MODELS["llama2-7b"],
        parallel=parallel,
        context_length=LONGEST,
        global_batch_size=parallel.dp,
        max_tokens=LONGEST,
        profile=load_profile("h100-fa2"),
    )


def ours(lengths: list[int], job: Job, *, equal_counts: bool = False) -> Ranks:
    plans = (balance(lengths, job, rank, equal_counts=equal_counts) for rank in range(job.parallel.dp))
    return [[m.documents["document"].tolist() for m in plan.micro_batches] for plan in plans]


def peers(job: Job) -> dict[str, Callable[[list[int]], Ranks]]:
    """Who makes the micro-batches of every rank, by name; FLOPs are those that verl counts."""
    weights = {
        "tokens": lambda length: length,
        "squares": lambda length: length**2,
        "FLOPs": lambda length: 24576 * length + length**2,
    }
    made = {
        f"{loop.__name__}, {name}": lambda lengths, loop=loop, weigh=weigh: loop(
            [weigh(length) for length in lengths], lengths, job
        )
        for loop in (verl, slime)
        for name, weigh in weights.items()
    }
    return made | {
        "NeMo-RL": lambda lengths: nemo_rl(lengths, job),
        "balance": lambda lengths: ours(lengths, job),
        "balance, equal counts": lambda lengths: ours(lengths, job, equal_counts=True),
    }


def measure(ranks: Ranks, lengths: np.ndarray, job: Job) -> Row:
    """Predicted step time, and the work of the slowest rank over the mean."""
    count = sum(map(len, ranks))
    job = replace(job, num_micro_batches=count, global_batch_size=1, max_tokens=1 << 20)
    shards = [[select.shard(lengths[rows], job) for rows in rank] for rank in ranks]
    work = [sum(int(document_work(lengths[rows], job.crossover_tokens).sum()) for rows in rank) for rank in ranks]
    return {
        "micro_batches": count,
        "longest": max(int(lengths[rows].sum()) for rank in ranks for rows in rank),
        "slowest_rank": max(work) / statistics.mean(work),
        "step_ms": simulate_step(job, shards).time / 1e3,
    }


def compare(quick: bool) -> list[Row]:
    rows = []
    count, seeds = (256, 1) if quick else (1024, SEEDS)
    cases = [(layout, parallel, seed) for layout, parallel in LAYOUTS.items() for seed in range(seeds)]
    for layout, parallel, seed in track(cases, "closed batches", console=Console(stderr=True)):
        job = job_of(parallel)
        for data, lengths in sequences(count, seed).items():
            for name, make in peers(job).items():
                made = measure(make(lengths.tolist()), lengths, job)
                rows.append({"data": data, "layout": layout, "seed": seed, "who": name, **made})
    return rows


def summary(rows: list[Row]) -> list[Row]:
    """Means over seeds, and how much faster `balance` is: with equal counts than verl, which needs them."""
    table = []
    for data, layout, who in dict.fromkeys((row["data"], row["layout"], row["who"]) for row in rows):
        mine = "balance, equal counts" if who.startswith("verl") else "balance"
        of = {
            name: [r for r in rows if (r["data"], r["layout"], r["who"]) == (data, layout, name)]
            for name in (who, mine)
        }
        gains = [a["step_ms"] / b["step_ms"] for a, b in zip(of[who], of[mine], strict=True)]
        means = {
            key: statistics.mean(r[key] for r in of[who])
            for key in ("micro_batches", "longest", "slowest_rank", "step_ms")
        }
        table.append({"data": data, "layout": layout, "who": who, **means, "balance_is_faster": statistics.mean(gains)})
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
        rows.append({"layout": layout, **results.spread("plan_ms", times)})
    return rows


def main() -> None:
    args = results.parser(__doc__, "256 sequences of one seed").parse_args()
    rows, planned = compare(args.quick), planning_ms()
    table = summary(rows)
    results.show(table)
    results.show(planned)
    others = [row for row in table if not row["who"].startswith("balance")]
    piped = [row["balance_is_faster"] for row in others if "PP" in row["layout"]]
    goals = [
        at_least("least gain", min(row["balance_is_faster"] for row in others), 1.0),
        at_least("mean gain with pipelines", statistics.mean(piped), 1.05),
        at_most("planning 8,192 sequences, ms", max(row["plan_ms"] for row in planned), MOST_MS),
    ]
    settings = {"longest": LONGEST, "sequences": 256 if args.quick else 1024, "seeds": 1 if args.quick else SEEDS}
    results.finish(args, "closed_batches", settings=settings, rows=[*table, *planned], goals=goals)


if __name__ == "__main__":
    main()
