"""How evenly each sharding spreads attention over context-parallel ranks, by the kernel model: predicted, not measured.

    python -m benchmarks.cp_balance [--quick] [--check]

Micro-batches of N = 4 by `original` and `adaptive` packing, documents in the order of the stream; a LLaMA2-7B layer at
TP = 8 (4 query heads per rank), the shipped H100 model of one forward launch per colour, no communication. The limit is
the attention of whole documents, without a wasted tile, divided by the ranks. Writes benchmarks/results/cp_balance.json
and docs/cp_balance.png.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks import results
from benchmarks.packing import CROSSOVER, distributions
from megatron_wlb.plan import sharding
from megatron_wlb.plan.packer import make_packer
from megatron_wlb.plan.stream import DocumentStream, Source
from megatron_wlb.plan.types import SEGMENT
from megatron_wlb.plan.workload import load_profile

KERNEL = load_profile("h100-fa2").kernel(heads=4)
DATA = ("F2", "dist_wlbllm", "demo")
PACKINGS = ("original", "adaptive")
STRATEGIES = ("per-sequence", "per-document", "paper", "hybrid", "adaptive")
LIMIT = "limit"
Row = dict[str, Any]


def micro_batches(lengths: np.ndarray, window: int, packing: str, count: int) -> list[np.ndarray]:
    """`count` micro-batches after the first 20, as document lengths."""
    packer = make_packer(
        DocumentStream([Source(pairs=lengths)], seed=0, context_length=window, shuffle=False),
        num_micro_batches=4,
        crossover_tokens=CROSSOVER,
        policy=packing,
        fingerprint="",
    )
    made: list[np.ndarray] = []
    while len(made) < 20 + count:
        packing_of_step = packer.next().packing
        for i in range(4):
            rows = packing_of_step.micro_batch(i)
            made.append(rows["length"][np.argsort(rows["index"])])
    return made[20 : 20 + count]


def predicted(lengths: np.ndarray, cp_size: int) -> dict[str, float]:
    """Time of the slowest rank, us, by strategy; ours also tries the mirrored order of documents."""
    padding = -int(lengths.sum()) % (2 * cp_size)
    tail = [padding] if padding else []

    def slowest(lengths: np.ndarray, strategy: str) -> float:
        padded = np.concatenate((lengths, np.array(tail, np.int64)))
        return sharding.shard(padded, cp_size, strategy, KERNEL, use_native=True).time

    times = {strategy: slowest(lengths, strategy) for strategy in STRATEGIES}
    mirrored = slowest(lengths[sharding.mirrored_order(lengths)], "per-sequence")
    times["per-sequence, mirrored order"] = min(times["per-sequence"], mirrored)
    times["adaptive"] = min(times["adaptive"], mirrored)
    whole = np.zeros(len(lengths), SEGMENT)
    whole["stop"] = lengths
    tiles, query_tiles = KERNEL.count(whole)
    times[LIMIT] = float(KERNEL.time(1, tiles / cp_size, query_tiles / cp_size))
    return times


def balance(quick: bool) -> list[Row]:
    data = distributions(200_000)
    names = [name for name in DATA if name in data]
    cases = [
        (name, window, packing, cp_size)
        for name in (names[:1] if quick else names)
        for window in ((1 << 17,) if quick else (1 << 16, 1 << 17))
        for packing in PACKINGS
        for cp_size in ((4,) if quick else (2, 4, 8, 16))
    ]
    rows = []
    for name, window, packing, cp_size in track(cases, "sharding", console=Console(stderr=True)):
        made = micro_batches(np.minimum(data[name][0], window), window, packing, 20 if quick else 100)
        times = [predicted(lengths, cp_size) for lengths in made]
        total = {strategy: sum(t[strategy] for t in times) for strategy in times[0]}
        gain = total["per-sequence"] - total[LIMIT]
        for strategy, us in total.items():
            rows.append(
                {
                    "data": name,
                    "window": window,
                    "packing": packing,
                    "cp_size": cp_size,
                    "strategy": strategy,
                    "predicted_us": us / len(times),
                    "speedup": total["per-sequence"] / us,
                    "share_of_gain": (total["per-sequence"] - us) / gain if gain else 1.0,
                }
            )
    return rows


def selection(quick: bool) -> Row:
    """Time to choose and make a sharding of 1,000 documents over 16 ranks, native and Python, in one run."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(4.3, 1.2, 1000), 1, 60_000).astype(np.int64)
    lengths[0] += -int(lengths.sum()) % 32
    times: dict[bool, list[float]] = {True: [], False: []}
    for use_native, count in ((True, 300), (False, 2 if quick else 5)):
        for _ in range(count):
            begin = time.perf_counter()
            sharding.shard(lengths, 16, "adaptive", KERNEL, use_native=use_native)
            times[use_native].append((time.perf_counter() - begin) * 1e3)
    return {
        "documents": 1000,
        "cp_size": 16,
        "native_ms": statistics.median(times[True]),
        "native_ms_min": min(times[True]),
        "native_ms_max": max(times[True]),
        "python_ms": statistics.median(times[False]),
    }


def goals(rows: list[Row], selected: Row) -> list[results.Goal]:
    wanted = []
    for row in rows:
        if (row["window"], row["cp_size"], row["strategy"]) == (1 << 17, 4, "adaptive"):
            name = f"{row['data']}, {row['packing']} packing, 128K, CP=4: share of the gain of the limit"
            wanted.append(results.Goal(name=name, value=row["share_of_gain"], goal=0.85, direction=">="))
    name = "choosing for 1,000 documents on 16 ranks, ms"
    wanted.append(results.Goal(name=name, value=selected["native_ms"], goal=0.3, direction="<="))
    return wanted


def draw(rows: list[Row]) -> Path:
    """Share of the attainable gain over CP ranks, F2 at 128K."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), constrained_layout=True, sharey=True)
    styles = {
        "per-sequence, mirrored order": ("#8c8c8c", "^"),
        "paper": ("#d55e00", "o"),
        "adaptive": ("#0072b2", "s"),
    }
    for axis, packing in zip(axes, PACKINGS, strict=True):
        for strategy, (colour, marker) in styles.items():
            here = [r for r in rows if (r["data"], r["window"], r["packing"]) == ("F2", 1 << 17, packing)]
            points = [(r["cp_size"], 100 * r["share_of_gain"]) for r in here if r["strategy"] == strategy]
            axis.plot(*zip(*points, strict=True), color=colour, marker=marker, label=strategy)
        axis.set_xscale("log", base=2)
        axis.set(
            xticks=[2, 4, 8, 16], xticklabels=["2", "4", "8", "16"], xlabel="context-parallel ranks", ylim=(0, 102)
        )
        axis.set_title(f"{packing} packing", loc="left", fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("gain over per-sequence, % of the limit's")
    axes[0].legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 0.3))
    path = Path(__file__).parent.parent / "docs/cp_balance.png"
    figure.savefig(path, dpi=110)
    return path


def show(rows: list[Row], selected: Row, wanted: list[results.Goal]) -> None:
    console = Console(width=140)
    table = Table("data", "window", "packing", "CP", "strategy", "predicted us", "speed-up", "share of gain")
    for r in rows:
        names = (r["data"], str(r["window"]), r["packing"], str(r["cp_size"]), r["strategy"])
        table.add_row(*names, f"{r['predicted_us']:.0f}", f"{r['speedup']:.4f}", f"{r['share_of_gain']:.3f}")
    console.print(table)
    console.print(selected)
    for g in wanted:
        console.print(f"{'holds ' if g.holds else 'MISSED'} {g.name} = {g.value:.4f} ({g.direction} {g.goal:g})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="seconds: F2, 128K, CP=4, nothing written")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a goal is missed")
    args = parser.parse_args()
    rows, selected = balance(args.quick), selection(args.quick)
    wanted = goals(rows, selected)
    show(rows, selected, wanted)
    if not args.quick:
        setup = {"heads": 4, "profile": "h100-fa2", "crossover": CROSSOVER, "S_max": 1.25, "selection": selected}
        print(results.write("cp_balance", settings=setup, rows=rows, goals=wanted), draw(rows))
    if args.check and not all(g.holds for g in wanted):
        sys.exit(1)


if __name__ == "__main__":
    main()
