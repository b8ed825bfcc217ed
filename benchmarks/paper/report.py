"""The rows as one table, paper / reproduced / ours / limit, and as a picture."""

from pathlib import Path

import numpy as np

from benchmarks import results
from benchmarks.results import Row

OURS = ("ours, balance alone", "ours", "ours, delay, balance alone", "ours, delay")
COLUMNS = ("paper", "reproduced", *OURS, "limit of balance", "limit")
COLORS = {"Fixed-4D": "#8c8c8c", "WLB-LLM": "#d55e00", "ours": "#56b4e9", "ours, delay": "#0072b2"}
PACKINGS = {
    "original": 1.44,
    "fixed, 1 global batches": 1.41,
    "fixed, 2 global batches": 1.22,
    "fixed, 4 global batches": 1.11,
    "fixed, 8 global batches": 1.08,
    "solver, 1 global batches": 1.40,
    "solver, 2 global batches": 1.18,
    "solver, 4 global batches": 1.09,
    "WLB-LLM, 1 queues": 1.24,
    "WLB-LLM, 2 queues": 1.05,
    "WLB-LLM, 3 queues": 1.05,
}
"""Table 2 as reported: imbalance."""
SPEEDUPS = {
    ("12", "all", "WLB-LLM"): 1.23,
    ("12", "64K", "WLB-LLM"): 1.15,
    ("12", "128K", "WLB-LLM"): 1.30,
    ("12", "7B-128K", "WLB-LLM"): 1.33,
    ("12", "all", "Fixed-4D"): 1.03,
    ("15", "64K", "per-document"): 1.01,
    ("15", "128K", "per-document"): 1.07,
    ("15", "all", "WLB-LLM"): 1.075,
    ("15", "all", "WLB-LLM over per-document"): 1.034,
}
"""By figure, case or window or their average, and scheme: the numbers of the text, not those that only bars show."""


def of(rows: list[Row], figure: str) -> list[Row]:
    return [r for r in rows if r["figure"] == figure]


def compare(rows: list[Row]) -> list[Row]:
    """Everything the paper states a number for, with ours and the limits beside it; absent where there is none."""
    lines = []
    for r in of(rows, "table 2"):
        column = r["packing"] if r["packing"] in OURS else "reproduced"
        line = {"figure": "table 2", "what": f"imbalance, {r['packing']}", "paper": PACKINGS.get(r["packing"])}
        lines.append(line | {column: r["imbalance"]})
    for (figure, group), by_scheme in speedups(rows).items():
        for scheme, value in by_scheme.items():
            if scheme in ("Plain-4D", "per-sequence", *COLUMNS):
                continue
            beside = {c: by_scheme[c] for c in COLUMNS if c in by_scheme} if scheme == "WLB-LLM" else {}
            paper = SPEEDUPS.get((figure, group, scheme))
            line = {"figure": figure, "what": f"{scheme}, {group}", "paper": paper, "reproduced": value}
            lines.append(line | beside)
    return lines


def speedups(rows: list[Row]) -> dict[tuple[str, str], dict[str, float]]:
    """Speed-ups by scheme, of every figure and group: a case, a window, or the average over several."""
    groups: dict[tuple[str, str], dict[str, list[float]]] = {}
    for r in rows:
        if r["figure"] in ("12", "15"):
            name = r.get("case") or f"{r['window'] >> 10}K"
            averages = ("all", name.split("-")[-1]) if r["figure"] == "12" else ("all",)
            for group in (*averages, name):
                groups.setdefault((r["figure"], group), {}).setdefault(r["scheme"], []).append(r["speedup"])
    means = {key: {s: float(np.mean(values)) for s, values in by.items()} for key, by in groups.items()}
    layers = groups["15", "all"]
    over = float(np.mean(np.divide(layers["WLB-LLM"], layers["per-document"])))
    averaged = {"WLB-LLM": means["15", "all"]["WLB-LLM"], "WLB-LLM over per-document": over}
    return means | {("15", "all"): averaged}


def draw(rows: list[Row], folder: Path) -> Path:
    """Figure 12, case by case; crosses are the paper's numbers."""
    figure = results.figure(12, 4)
    axis = figure.subplots()
    by_case = {r["case"]: speedups(rows)["12", r["case"]] for r in of(rows, "12")}
    places = np.arange(len(by_case))
    for i, (scheme, color) in enumerate(COLORS.items()):
        heights = [by_scheme[scheme] - 1 for by_scheme in by_case.values()]
        axis.bar(places + 0.2 * i, heights, 0.19, bottom=1, color=color, label=scheme)
        stated = [(at, SPEEDUPS.get(("12", case, scheme))) for at, case in zip(places + 0.2 * i, by_case, strict=True)]
        if found := [point for point in stated if point[1]]:
            axis.plot(*zip(*found, strict=True), "kx")
    for limit, style, at in (("limit of balance", "_", 0.4), ("limit", "^", 0.6)):
        heights = [by_scheme[limit] for by_scheme in by_case.values()]
        axis.plot(places + at, heights, style, color="k", ms=5, label=limit)
    axis.set_xticks(places + 0.3, [case.replace("-", "\n") for case in by_case], fontsize=8)
    axis.set(ylabel="speed-up over Plain-4D, simulated")
    axis.legend(frameon=False, fontsize=8)
    return results.save(figure, "paper", folder)
