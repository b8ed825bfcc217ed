"""How evenly each sharding spreads attention over context-parallel ranks, by the kernel model: predicted, not measured.

    python -m benchmarks.cp_balance [--quick] [--check]

Micro-batches of N = 4 by `original` and `adaptive` packing, documents in the order of the stream; a LLaMA2-7B layer at
TP = 8 (4 query heads per rank), the shipped H100 model of one forward launch per call, no communication. The limit is
the attention of whole documents, without a wasted tile, divided by the ranks. Writes benchmarks/results/cp_balance.json
and docs/cp_balance.png.
"""

import statistics
import time
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
from rich.progress import track

from benchmarks import results
from benchmarks.gpu.cases import attention_job
from benchmarks.lengths import CROSSOVER, S_MAX, packed, padded
from benchmarks.packing import distributions
from benchmarks.results import Row
from megatron_wlb.cost.attention import load_profile
from megatron_wlb.plan import native
from megatron_wlb.plan.sharding import STRATEGIES, divide, mirrored_order
from megatron_wlb.plan.types import SEGMENT

KERNEL, _ = load_profile("h100-fa2").kernels(heads=4)
DATA = ("F2", "dist_wlbllm", "demo")
PACKINGS = ("original", "adaptive")
LIMIT = "limit"


def predicted(lengths: np.ndarray, cp: int) -> dict[str, float]:
    """Time of the slowest rank, us, by strategy; ours also tries the mirrored order of documents."""

    def slowest(lengths: np.ndarray, strategy: str) -> float:
        return divide(padded(lengths, 2 * cp), cp, strategy, KERNEL).time

    times = {strategy: slowest(lengths, strategy) for strategy in STRATEGIES}
    mirrored = slowest(lengths[mirrored_order(lengths)], "per-sequence")
    times["per-sequence, mirrored order"] = min(times["per-sequence"], mirrored)
    times["auto"] = min(times["auto"], mirrored)
    whole = np.zeros(len(lengths), SEGMENT)
    whole["stop"] = lengths
    tiles, query_tiles = KERNEL.count(whole)
    times[LIMIT] = float(KERNEL.time(1, tiles / cp, query_tiles / cp))
    return times


def balance(quick: bool) -> list[Row]:
    data = distributions(200_000)
    names = [name for name in DATA if name in data]
    cases = [
        (name, window, packing, cp)
        for name in (names[:1] if quick else names)
        for window in ((1 << 17,) if quick else (1 << 16, 1 << 17))
        for packing in PACKINGS
        for cp in ((4,) if quick else (2, 4, 8, 16))
    ]
    rows = []
    for name, window, packing, cp in track(cases, "sharding"):
        job = attention_job(window, (4, 4), packing=packing)
        made = packed(np.minimum(data[name][0], window), job, 20 if quick else 100)
        times = [predicted(lengths, cp) for lengths in made]
        total = {strategy: sum(t[strategy] for t in times) for strategy in times[0]}
        gain = total["per-sequence"] - total[LIMIT]
        for strategy, us in total.items():
            row = {"data": name, "window": window, "packing": packing, "cp": cp, "strategy": strategy}
            row |= {"predicted_us": us / len(times), "speedup": total["per-sequence"] / us}
            rows.append(row | {"share_of_gain": (total["per-sequence"] - us) / gain if gain else 1.0})
    return rows


def selection(quick: bool) -> Row:
    """Time to choose and make a sharding of 1,000 documents over 16 ranks, native and Python, in one run."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(4.3, 1.2, 1000), 1, 60_000).astype(np.int64)
    lengths[0] += -int(lengths.sum()) % 32
    times: dict[str, list[float]] = {"native": [], "python": []}
    for core, count in ((native.core, 300), (None, 2 if quick else 5)):
        with patch.object(native, "core", core):
            for _ in range(count):
                begin = time.perf_counter()
                divide(lengths, 16, "auto", KERNEL)
                times["native" if core else "python"].append((time.perf_counter() - begin) * 1e3)
    python_ms = statistics.median(times["python"])
    return {"documents": 1000, "cp": 16, **results.spread("native_ms", times["native"]), "python_ms": python_ms}


def goals(rows: list[Row], selected: Row) -> list[results.Goal]:
    wanted = []
    for row in rows:
        if (row["window"], row["cp"], row["strategy"]) == (1 << 17, 4, "auto"):
            name = f"{row['data']}, {row['packing']} packing, 128K, CP=4: share of the gain of the limit"
            wanted.append(results.at_least(name, row["share_of_gain"], 0.85))
    return [*wanted, results.at_most("choosing for 1,000 documents on 16 ranks, ms", selected["native_ms"], 0.3)]


def draw(rows: list[Row]) -> Path:
    """Share of the attainable gain over CP ranks, F2 at 128K."""
    figure = results.figure(10, 3.6)
    axes = figure.subplots(1, 2, sharey=True)
    styles = {
        "per-sequence, mirrored order": ("#8c8c8c", "^"),
        "wlb": ("#d55e00", "o"),
        "auto": ("#0072b2", "s"),
    }
    for axis, packing in zip(axes, PACKINGS, strict=True):
        for strategy, (color, marker) in styles.items():
            here = [r for r in rows if (r["data"], r["window"], r["packing"]) == ("F2", 1 << 17, packing)]
            points = [(r["cp"], 100 * r["share_of_gain"]) for r in here if r["strategy"] == strategy]
            axis.plot(*zip(*points, strict=True), color=color, marker=marker, label=strategy)
        axis.set_xscale("log", base=2)
        axis.set(
            xticks=[2, 4, 8, 16], xticklabels=["2", "4", "8", "16"], xlabel="context-parallel ranks", ylim=(0, 102)
        )
        axis.set_title(f"{packing} packing", loc="left", fontsize=10)
    axes[0].set_ylabel("gain over per-sequence, % of the limit's")
    axes[0].legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 0.3))
    return results.save(figure, "cp_balance")


def main() -> None:
    args = results.parser(__doc__, "seconds: F2, 128K, CP=4, nothing written").parse_args()
    rows, selected = balance(args.quick), selection(args.quick)
    results.show(rows)
    print(selected)
    settings = {"heads": 4, "profile": "h100-fa2", "crossover": CROSSOVER, "S_max": S_MAX, "selection": selected}
    draw_rows = partial(draw, rows)
    results.finish(args, "cp_balance", settings=settings, rows=rows, goals=goals(rows, selected), draw=draw_rows)


if __name__ == "__main__":
    main()
