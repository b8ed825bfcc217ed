"""A picture of result files: Figures 10 and 15 of the paper, and what copies cost."""

import json
from pathlib import Path
from typing import Any

from benchmarks import results

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#8c8c8c")
STRATEGIES = ("per-sequence", "per-document", "wlb", "hybrid", "auto", "oracle")
Row = dict[str, Any]


def draw(files: list[Path], folder: Path = results.DOCS) -> Path:
    """Draw what files of one device hold together; the picture has the name of the first."""
    read = [json.loads(file.read_text()) for file in files]
    rows, data = [row for each in read for row in each["rows"]], read[0]
    figure = results.figure(11, 7)
    axes = figure.subplots(2, 2)
    _kernels([r for r in rows if "entries" in r and r["query_length"] < r["keys"]], *axes[0])
    _shardings([r for r in rows if "strategy" in r and r["cp"] == 4], axes[1, 0])
    _copies([r for r in rows if "method" in r], axes[1, 1])
    for axis in axes.flat:
        if axis.get_legend_handles_labels()[0]:
            axis.legend(frameon=False, fontsize=8, ncols=2, loc="lower left", bbox_to_anchor=(0, 1))
    figure.suptitle(f"{data['device']}, torch {data['versions']['torch']}", x=0.01, ha="left", fontsize=11)
    return results.save(figure, files[0].stem, folder)


def _kernels(rows: list[Row], latency: Any, rate: Any) -> None:
    """Latency and TFLOP/s over query length, all else fixed."""
    for colour, model in zip(COLOURS, dict.fromkeys(r["model"] for r in rows), strict=False):
        here = [r for r in rows if r["model"] == model]
        for direction, style in (("forward", "-"), ("backward", "--")):
            for axis, unit in ((latency, "ms"), (rate, "tflops")):
                points = [(r["query_length"], r[f"{direction}_{unit}"]) for r in here]
                axis.plot(*zip(*points, strict=True), style, color=colour, marker=".", label=f"{model}, {direction}")
    for axis, label in ((latency, "ms"), (rate, "TFLOP/s")):
        axis.set_xscale("log", base=2)
        axis.set(xlabel="query length", ylabel=label)
    latency.set_yscale("log")


def _shardings(rows: list[Row], axis: Any) -> None:
    """Speed over per-sequence sharding at CP=4, with the range over rounds."""
    cases = list(dict.fromkeys((r["model"], r["window"]) for r in rows))
    for i, strategy in enumerate(STRATEGIES):
        here = {(r["model"], r["window"]): r for r in rows if r["strategy"] == strategy}
        for j, case in enumerate(cases):
            if case not in here:
                continue
            row = here[case]
            least, most = (row["speedup"] * row["total_ms"] / row[key] for key in ("max_ms", "min_ms"))
            low, high = max(0.0, row["speedup"] - least), max(0.0, most - row["speedup"])
            axis.bar(
                j + 0.13 * i, row["speedup"], 0.12, yerr=[[low], [high]], color=f"C{i}", label="_" * (j > 0) + strategy
            )
    axis.set_xticks([j + 0.32 for j in range(len(cases))], [f"{m}\n{w // 1024}K" for m, w in cases], fontsize=8)
    axis.set_ylabel("speed over per-sequence, CP=4")
    axis.set_ylim(0.9)


def _copies(rows: list[Row], axis: Any) -> None:
    """Time and memory relative to ours."""
    cases = list(dict.fromkeys((r["model"], r["window"], r["data"]) for r in rows))
    methods = list(dict.fromkeys(r["method"] for r in rows))
    for i, method in enumerate(methods):
        for j, case in enumerate(cases):
            here = {r["method"]: r for r in rows if (r["model"], r["window"], r["data"]) == case}
            ratio = here[method]["total_ms"] / here[methods[0]]["total_ms"]
            axis.bar(j + 0.2 * i, ratio, 0.18, color=COLOURS[i], label="_" * (j > 0) + method)
    axis.set_xticks([j + 0.3 for j in range(len(cases))], [f"{m}, {w // 1024}K\n{d}" for m, w, d in cases], fontsize=8)
    axis.set_ylabel("time over ours")
