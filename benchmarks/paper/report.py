"""The rows as one table, paper / reproduced / ours / limit, and as a picture."""

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import results
from benchmarks.paper.setups import PACKINGS, SEVEN_128, SLOWEST_GPU, SPEEDUPS
from benchmarks.results import Row

COLUMNS = ("paper", "reproduced", "ours, balance alone", "limit of balance", "ours", "limit")
COLORS = {"Fixed-4D": "#8c8c8c", "WLB-LLM": "#d55e00", "ours, balance alone": "#56b4e9", "ours": "#0072b2"}
BASELINES = ("Plain-4D", "per-sequence")
Speedups = dict[tuple[str, str], dict[str, float]]
"""By figure and group (a case, a window, or the average over all of them): scheme -> speed-up."""


def compare(rows: list[Row]) -> list[Row]:
    """Everything the paper states a number for, with ours and the limits beside it; absent where there is none."""
    return [*_gpus(rows), *_packings(rows), *_speedups(rows)]


def of(rows: list[Row], figure: str) -> list[Row]:
    return [r for r in rows if r["figure"] == figure]


def step_seconds(rows: list[Row]) -> dict[str, float]:
    """A check: 20 ms of packing are under 0.65 % of a step of 7B-128K, says the paper, so that it takes over 3.08 s."""
    seconds = {r["case"]: r["step_seconds"] for r in of(rows, "12") if "step_seconds" in r}
    return {"paper, at least": 0.020 / 0.0065, "reproduced": seconds[SEVEN_128.name]}


def speedups(rows: list[Row]) -> Speedups:
    """The speed-ups of Figures 12 to 15, and their averages over cases and windows."""
    groups: dict[tuple[str, str], dict[str, list[float]]] = {}
    for r in rows:
        if r["figure"] in ("12", "13", "14", "15"):
            name = r.get("case") or f"{r['window'] >> 10}K"
            averages = {"12": ("all", name.split("-")[-1]), "15": ("all",)}.get(r["figure"], ())
            for group in (*averages, name):
                groups.setdefault((r["figure"], group), {}).setdefault(r["scheme"], []).append(r["speedup"])
    means = {key: {s: float(np.mean(values)) for s, values in by.items()} for key, by in groups.items()}
    layers = groups["15", "all"]
    ratios = np.divide(layers["WLB-LLM"], layers["per-document"])
    return means | {
        ("15", "all"): {"WLB-LLM": means["15", "all"]["WLB-LLM"], "WLB-LLM over per-document": ratios.mean()}
    }


def _gpus(rows: list[Row]) -> list[Row]:
    by_scheme = {r["scheme"]: r for r in of(rows, "1, 4")}
    lines = []
    for key in [k for k in by_scheme["Plain-4D"] if "," in k]:
        paper = SLOWEST_GPU if key == "attention, slowest / mean" else None
        plain, ours = by_scheme["Plain-4D"][key], by_scheme["ours"][key]
        what = f"8K GPUs, Plain-4D: {key}"
        lines.append({"figure": "1, 4", "what": what, "paper": paper, "reproduced": plain, "ours": ours, "limit": 1.0})
    return lines


def _packings(rows: list[Row]) -> list[Row]:
    lines = []
    for r in of(rows, "table 2"):
        paper, ms = PACKINGS.get(r["packing"], (None, None))
        column = "ours" if r["packing"].startswith("ours") else "reproduced"
        for what, stated, value in (("imbalance", paper, r["imbalance"]), ("ms (measured)", ms, r.get("measured_ms"))):
            lines.append({"figure": "table 2", "what": f"{what}, {r['packing']}", "paper": stated, column: value})
    return lines


def _speedups(rows: list[Row]) -> list[Row]:
    """A line for every scheme of ours or the paper's; WLB-LLM's has ours and the limits beside it."""
    lines = []
    for (figure, group), by_scheme in speedups(rows).items():
        for scheme, value in by_scheme.items():
            if scheme in (*BASELINES, *COLUMNS):
                continue
            beside = {c: by_scheme[c] for c in COLUMNS if c in by_scheme} if scheme == "WLB-LLM" else {}
            column = "ours" if scheme.startswith("ours") else "reproduced"
            paper = SPEEDUPS.get((figure, group, scheme))
            lines.append({"figure": figure, "what": f"{scheme}, {group}", "paper": paper, column: value} | beside)
    return lines


def sensitivity(rows: list[Row]) -> list[Row]:
    """Averages of Figure 12 by variation, and 7B-128K."""
    cases: dict[str, dict[str, Row]] = {}
    for r in of(rows, "sensitivity"):
        cases.setdefault(r["variation"], {})[r["case"]] = r
    lines = []
    for variation, by_case in cases.items():
        line: Row = {"variation": variation}
        for window in ("all", "64K", "128K"):
            values = [r["WLB-LLM"] for case, r in by_case.items() if window in ("all", case.split("-")[1])]
            line[window] = float(np.mean(values)) if values else None
        seven = by_case[SEVEN_128.name]
        ours = f"ours, balance alone, {SEVEN_128.name}"
        lines.append(line | {SEVEN_128.name: seven["WLB-LLM"], ours: seven["ours, balance alone"]})
    return lines


def draw(rows: list[Row], gpus: dict[str, np.ndarray], folder: Path | None = None) -> Path:
    """Figures 1, 12 and 13; `gpus` has times of GPUs by scheme, of one step."""
    figure = results.figure(12, 8)
    axes = figure.subplot_mosaic([["1", "13"], ["12", "12"]])
    _draw_gpus(gpus, axes["1"])
    _draw_parts(speedups(rows)["13", SEVEN_128.name], axes["13"])
    _draw_cases({case: by for (number, case), by in speedups(rows).items() if number == "12"}, axes["12"])
    for number, axis in axes.items():
        axis.legend(frameon=False, fontsize=8)
        axis.set_title(f"Figure {number}", loc="left", fontsize=10)
    figure.suptitle("Simulated under one calibration; crosses: the paper's numbers", x=0.01, ha="left", fontsize=11)
    return results.save(figure, "paper", folder)


def _draw_gpus(gpus: dict[str, np.ndarray], axis: Any) -> None:
    for name, times in gpus.items():
        each = np.sort(times.ravel())
        share = 100 * np.arange(len(each)) / len(each)
        axis.plot(share, each / each.mean(), color=COLORS.get(name, "#333333"), label=name)
    axis.set(xlabel="the 8,192 GPUs of a 405B step, in order, %", ylabel="computation per layer / mean")


def _draw_parts(by_scheme: dict[str, float], axis: Any) -> None:
    names = [name for name in by_scheme if name not in ("Plain-4D", "limit", "limit of balance")]
    for i, name in enumerate(names):
        color = "#e8b48a" if " x " in name else COLORS["ours" if name.startswith("ours") else "WLB-LLM"]
        axis.barh(i, by_scheme[name] - 1, left=1, color=color)
        if paper := SPEEDUPS.get(("13", SEVEN_128.name, name)):
            axis.plot(paper, i, "kx", label="_" * (i > 0) + "paper")
    axis.set_yticks(range(len(names)), names, fontsize=7)
    axis.invert_yaxis()
    axis.set(xlabel=f"speed-up over Plain-4D, {SEVEN_128.name}")


def _draw_cases(by_case: dict[str, dict[str, float]], axis: Any) -> None:
    places = np.arange(len(by_case))
    for i, (scheme, color) in enumerate(COLORS.items()):
        heights = [by_scheme[scheme] - 1 for by_scheme in by_case.values()]
        axis.bar(places + 0.2 * i, heights, 0.19, bottom=1, color=color, label=scheme)
    for limit, style, at in (("limit of balance", "_", 0.4), ("limit", "^", 0.6)):
        axis.plot(
            places + at, [by_scheme[limit] for by_scheme in by_case.values()], style, color="k", ms=5, label=limit
        )
    for i, scheme in enumerate(("Fixed-4D", "WLB-LLM")):
        paper = [(at, SPEEDUPS.get(("12", case, scheme))) for at, case in zip(places + 0.2 * i, by_case, strict=True)]
        axis.plot(*zip(*[point for point in paper if point[1]], strict=True), "kx")
    axis.set_xticks(places + 0.3, [case.replace("-", "\n") for case in by_case], fontsize=8)
    axis.set(ylabel="speed-up over Plain-4D")
