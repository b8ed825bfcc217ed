"""What placing micro-batches on data-parallel ranks and ordering them there by work gains, and how long it takes.

    python -m benchmarks.placement [--quick] [--check]

Works are those that each policy packs of F2 at S_max = 1.25 windows; the first and last tenth of the steps are left
out. Figures are predicted times of the slowest rank's 1F1B (`pipeline.makespan`), in shares of a step whose
micro-batches are all alike; ends may be cheaper than that. Writes benchmarks/results/placement.json.
"""

import itertools
import statistics
import time
from typing import Any

import numpy as np
from megatron_wlb.plan.workload import document_work
from rich.console import Console
from rich.table import Table

from benchmarks import results
from benchmarks.lengths import CROSSOVER, WINDOW, f2, stream
from benchmarks.packing import policies, spread
from benchmarks.results import at_most
from megatron_wlb.plan import pipeline
from megatron_wlb.plan.packer import Packer

S_MAX = 1.25
POLICIES = ("original", "fixed, 1 global batches", "Algorithm 1, 0.25/0.5", "adaptive, constant-tokens")
# Micro-batches, data-parallel ranks, stages, chunks: from 4 to 64 micro-batches a rank.
LAYOUTS = ((16, 4, 4, 1), (64, 8, 4, 1), (64, 8, 8, 1), (64, 8, 4, 2), (64, 4, 4, 1), (64, 1, 4, 1))
QUICK = ((16, 4, 4, 1), (64, 8, 4, 1))
TIMED = (*LAYOUTS, (64, 1, 4, 2), (64, 1, 8, 1), (64, 1, 8, 2), (2048, 64, 4, 1), (2048, 64, 16, 4))
Row = dict[str, Any]


def works(policy: Any, n: int, steps: int) -> np.ndarray:
    """Work of each micro-batch, int64 [steps, N]."""
    source = stream(f2(300_000, 0), WINDOW)
    packer = Packer(source, policy, num_micro_batches=n, context_length=WINDOW, fingerprint="", policy_name="")
    packings = [packer.next().packing for _ in range(steps)]
    found = [p.sums(document_work(p.documents["length"], CROSSOVER)) for p in packings]
    return np.array(found[steps // 10 : steps - steps // 10])


def snake(work: np.ndarray, dp_size: int) -> np.ndarray:
    """Descending work, back and forth over the ranks: [dp_size, M], ascending."""
    rounds = np.argsort(-work, kind="stable").reshape(-1, dp_size)
    rounds[1::2] = rounds[1::2, ::-1]
    return np.sort(rounds.T, axis=1)


def compare(work: np.ndarray, dp_size: int, stages: int, chunks: int, rng: np.random.Generator) -> dict[str, float]:
    """Predicted time of one step, by how its micro-batches are placed and ordered; `random` orders what is placed."""
    by_work = pipeline.place(work, dp_size, balance=True, num_stages=stages, num_chunks=chunks, use_native=True)
    dealt = snake(work, dp_size)

    def ordered(rows: np.ndarray) -> np.ndarray:
        return np.array([row[pipeline.order(work[row], stages, chunks, use_native=True)] for row in rows])

    ways = {
        "upstream": pipeline.place(work, dp_size, balance=False),
        "random": rng.permuted(by_work, axis=1),
        "snake, ascending index": dealt,
        "placed, ascending index": by_work,
        "snake, ordered": ordered(dealt),
        "placed, ordered": ordered(by_work),
    }
    alike = 3 * (chunks * work.sum() / dp_size + (stages - 1) * work.mean())
    found = {way: pipeline.makespan(work[rows], stages, chunks).max() / alike for way, rows in ways.items()}
    cost = {name: pipeline.rank_cost(work[rows], stages, chunks).max() for name, rows in (("s", dealt), ("p", by_work))}
    return found | {"cost of placed / snake": cost["p"] / cost["s"]}


def quality(quick: bool) -> list[Row]:
    rows, rng = [], np.random.default_rng(0)
    for policy in POLICIES:
        packed = {
            n: works(policies(n, S_MAX, WINDOW)[policy](), n, 20 if quick else 100)
            for n in {layout[0] for layout in (QUICK if quick else LAYOUTS)}
        }
        for n, dp_size, stages, chunks in QUICK if quick else LAYOUTS:
            steps = [compare(work, dp_size, stages, chunks, rng) for work in packed[n]]
            means = {name: statistics.mean(step[name] for step in steps) for name in steps[0]}
            rows.append({"policy": policy, "N": n, "DP": dp_size, "PP": stages, "VPP": chunks, **means})
    return rows


def partitions(items: tuple[int, ...], size: int) -> list[list[tuple[int, ...]]]:
    """All ways to split items into sets of `size`."""
    if not items:
        return [[]]
    first, rest = items[0], items[1:]
    return [
        [(first, *others), *remaining]
        for others in itertools.combinations(rest, size - 1)
        for remaining in partitions(tuple(i for i in rest if i not in others), size)
    ]


def optima(quick: bool) -> list[Row]:
    """`place` and `snake` over the best of all partitions, on log-normal works."""
    rows, rng = [], np.random.default_rng(0)
    for n, dp_size in ((6, 2), (8, 2), (9, 3), (12, 2)):
        every = np.array(partitions(tuple(range(n)), n // dp_size))
        excess: dict[str, list[float]] = {"placed": [], "snake": []}
        for _ in range(10 if quick else 100):
            work = rng.lognormal(10, 1, n).astype(np.int64)
            best = pipeline.rank_cost(work[every], 4, 1).max(axis=1).min()
            placed = pipeline.place(work, dp_size, balance=True, num_stages=4)
            for name, ranks in (("placed", placed), ("snake", snake(work, dp_size))):
                excess[name].append(float(pipeline.rank_cost(work[ranks], 4, 1).max() / best))
        found = {f"{name} {f.__name__}": f(v) for name, v in excess.items() for f in (statistics.mean, max)}
        rows.append({"N": n, "DP": dp_size, "PP": 4, **found})
    return rows


def timings(quick: bool) -> list[Row]:
    """CPU time of the calling thread to place all micro-batches and order those of one rank, and of its first call.

    Log-normal works, which leave the search most to do, and nearly equal ones.
    """
    rng, rows = np.random.default_rng(0), []
    for n, dp_size, stages, chunks in TIMED:
        for name, draw in (
            ("log-normal", lambda n=n: rng.lognormal(10, 1, n)),
            ("5 % apart", lambda n=n: rng.normal(1e6, 5e4, n)),
        ):
            for core in ("native", "Python"):
                times = []
                for _ in range(1 + (5 if quick else 50)):
                    work, how = draw().astype(np.int64), {"use_native": core == "native"}
                    begin = time.thread_time()
                    ranks = pipeline.place(work, dp_size, balance=True, num_stages=stages, num_chunks=chunks, **how)
                    pipeline.order(work[ranks[0]], stages, chunks, **how)
                    times.append(time.thread_time() - begin)
                first, *warm = times
                where = f"N={n} DP={dp_size} PP={stages} VPP={chunks}"
                rows.append({"layout": where, "works": name, "core": core, "first_ms": first * 1e3, **spread(warm)})
    return rows


def goals(rows: list[Row], best: list[Row], times: list[Row]) -> list[results.Goal]:
    native = [t for t in times if t["core"] == "native"]
    wanted = [at_most(f"{t['layout']}, {t['works']}: place + order, ms", t["median_ms"], 1.0) for t in native]
    wanted += [at_most(f"N={r['N']} DP={r['DP']}: placed over the optimum, mean", r["placed mean"], 1.01) for r in best]
    for r in rows:
        where = f"{r['policy']}, N={r['N']} DP={r['DP']} PP={r['PP']} VPP={r['VPP']}"
        for way in ("random", "snake, ascending index"):
            wanted.append(at_most(f"{where}: placed and ordered / {way}", r["placed, ordered"] / r[way], 1.0))
    return wanted


def show(rows: list[Row], best: list[Row], times: list[Row]) -> None:
    console = Console(width=170)
    table = Table(*rows[0])
    for r in rows:
        table.add_row(*(f"{v:.4f}" if isinstance(v, float) else str(v) for v in r.values()))
    console.print(table)
    for r in best + times:
        console.print(", ".join(f"{name} {v:.4f}" if isinstance(v, float) else f"{name} {v}" for name, v in r.items()))


def main() -> None:
    args = results.parser(__doc__, "two layouts and fewer steps, nothing written").parse_args()
    rows, best, times = quality(args.quick), optima(args.quick), timings(args.quick)
    wanted = goals(rows, best, times)
    show(rows, best, times)
    if not args.quick:
        setup = {"window": WINDOW, "crossover": CROSSOVER, "S_max": S_MAX, "steps": 100, "seed": 0}
        print(results.write("placement", settings=setup | {"optima": best, "timings": times}, rows=rows, goals=wanted))
    results.conclude(wanted, args.check)


if __name__ == "__main__":
    main()
