"""The rows as one table, paper / reproduced / ours / limit, and as a picture."""

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import results
from benchmarks.paper import speed
from benchmarks.paper.setups import REPORTED, SEVEN_128
from benchmarks.results import Row

COLUMNS = ("paper", "reproduced", "ours, balance alone", "limit of balance", "ours", "limit")
COLOURS = {"Fixed-4D": "#8c8c8c", "WLB-LLM": "#d55e00", "ours, balance alone": "#56b4e9", "ours": "#0072b2"}


def compare(rows: list[Row]) -> list[Row]:
    """Everything the paper states a number for, with ours and the limits beside it; absent where there is none."""
    return [*_gpus(rows), *_packings(rows), *_averages(rows), *_breakdown(rows), *_windows(rows), *_layer(rows)]


def step_seconds(rows: list[Row]) -> dict[str, float]:
    """A check: 20 ms of packing are under 0.65 % of a step of 7B-128K, says the paper, so that it takes over 3.08 s."""
    found = {r["case"]: r["step_seconds"] for r in of(rows, "12") if "step_seconds" in r}
    return {"paper, at least": 0.020 / 0.0065, "reproduced": found[SEVEN_128.name]}


def of(rows: list[Row], figure: str) -> list[Row]:
    return [r for r in rows if r["figure"] == figure]


def _line(figure: str, what: str, paper: float | None, found: dict[str, float], reproduced: str = "WLB-LLM") -> Row:
    columns = {c: found[c] for c in COLUMNS[2:] if c in found}
    return {"figure": figure, "what": what, "paper": paper, "reproduced": found.get(reproduced), **columns}


def _gpus(rows: list[Row]) -> list[Row]:
    by_scheme = {r["scheme"]: r for r in of(rows, "1, 4")}
    lines = []
    for key in [k for k in by_scheme["Plain-4D"] if "," in k]:
        paper = REPORTED["figure 1"]["slowest GPU"] if key == "attention, slowest / mean" else None
        plain, ours = by_scheme["Plain-4D"][key], by_scheme["ours"][key]
        what = f"8K GPUs, Plain-4D: {key}"
        lines.append({"figure": "1, 4", "what": what, "paper": paper, "reproduced": plain, "ours": ours, "limit": 1.0})
    return lines


def _packings(rows: list[Row]) -> list[Row]:
    lines = []
    for r in of(rows, "table 2"):
        paper, ms = REPORTED["table 2"].get(r["packing"], (None, None))
        column = "ours" if r["packing"].startswith("ours") else "reproduced"
        for what, stated, value in (("imbalance", paper, r["imbalance"]), ("ms (measured)", ms, r.get("measured_ms"))):
            lines.append({"figure": "table 2", "what": f"{what}, {r['packing']}", "paper": stated, column: value})
    return lines


def _averages(rows: list[Row]) -> list[Row]:
    twelve = of(rows, "12")
    averages, lines = speed.averages(twelve), []
    for scheme in ("Fixed-4D", "WLB-LLM"):
        for group in ("all", "64K", "128K"):
            if group in averages[scheme]:
                found = {n: by[group] for n, by in averages.items() if scheme == "WLB-LLM" or n == scheme}
                paper = REPORTED["figure 12"][scheme].get(group)
                lines.append(_line("12", f"{scheme}, {group}", paper, found, scheme))
    for case in dict.fromkeys(r["case"] for r in twelve):
        found = {r["scheme"]: r["speedup"] for r in twelve if r["case"] == case}
        lines.append(_line("12", f"WLB-LLM, {case}", REPORTED["figure 12"]["WLB-LLM"].get(case), found))
    return lines


def _breakdown(rows: list[Row]) -> list[Row]:
    found = {r["scheme"]: r["speedup"] for r in of(rows, "13")}
    left_out = ("Plain-4D", *COLUMNS[2:])
    reported = REPORTED["figure 13"]
    lines = []
    for name, value in found.items():
        if name.startswith("ours: "):
            lines.append({"figure": "13", "what": name[6:], "ours": value})
        elif name not in left_out:
            more = found if name == "WLB-LLM" else {}
            lines.append(_line("13", name, reported.get(name), more | {name: value}, name))
    return lines


def _windows(rows: list[Row]) -> list[Row]:
    lines = []
    for window in dict.fromkeys(r["window"] for r in of(rows, "14")):
        found = {r["scheme"]: r["speedup"] for r in of(rows, "14") if r["window"] == window}
        lines.append(_line("14", f"WLB-LLM, {window >> 10}K", REPORTED["figure 14"].get(window >> 10), found))
    return lines


def _layer(rows: list[Row]) -> list[Row]:
    reported, lines = REPORTED["figure 15"], []
    means: dict[str, list[float]] = {}
    for window in dict.fromkeys(r["window"] for r in of(rows, "15")):
        found = {r["scheme"]: r["speedup"] for r in of(rows, "15") if r["window"] == window}
        left_out = ("per-sequence", *COLUMNS[2:])
        for scheme in (s for s in found if s not in left_out):
            more = found if scheme == "WLB-LLM" else {scheme: found[scheme]}
            paper = reported.get((window >> 10, scheme))
            lines.append(_line("15", f"{scheme} over per-sequence, {window >> 10}K", paper, more, scheme))
        for name, over in (("WLB-LLM", 1.0), ("per-document", found["per-document"])):
            means.setdefault(name, []).append(found["WLB-LLM"] / over)
    for name, over in (("WLB-LLM", "per-sequence"), ("per-document", "per-document")):
        found = {"WLB-LLM": float(np.mean(means[name]))}
        lines.append(_line("15", f"WLB-LLM over {over}, both windows", reported[name], found))
    return lines


def draw(rows: list[Row], gpus: dict[str, np.ndarray], folder: Path | None = None) -> Path:
    """All figures on one page; `gpus` has times of GPUs by scheme, of one step."""
    figure = results.figure(12, 11)
    axes = figure.subplots(3, 2)
    _draw_gpus(gpus, axes[0, 0])
    _draw_packings(of(rows, "table 2"), axes[0, 1])
    _draw_cases(of(rows, "12"), axes[1, 0])
    _draw_breakdown(of(rows, "13"), axes[1, 1])
    _draw_windows(of(rows, "14"), axes[2, 0])
    _draw_layer(of(rows, "15"), axes[2, 1])
    for axis in axes.flat:
        axis.legend(frameon=False, fontsize=8)
    figure.suptitle("Simulated under one calibration; crosses: the paper's numbers", x=0.01, ha="left", fontsize=11)
    return results.save(figure, "paper", folder)


def _draw_gpus(gpus: dict[str, np.ndarray], axis: Any) -> None:
    for name, times in gpus.items():
        each = np.sort(times.ravel())
        share = 100 * np.arange(len(each)) / len(each)
        axis.plot(share, each / each.mean(), color=COLOURS.get(name, "#333333"), label=name)
    axis.set(xlabel="GPUs of a 405B step, in order, %", ylabel="computation per layer / mean")
    axis.set_title("Figure 1: 8,192 GPUs", loc="left", fontsize=10)


def _draw_packings(rows: list[Row], axis: Any) -> None:
    families = [r["packing"].split(",")[0].replace("original", "Fixed-4D").replace("fixed", "Fixed-4D") for r in rows]
    bars = [(r["packing"], r["imbalance"], COLOURS.get(f, "#bbbbbb")) for r, f in zip(rows, families, strict=True)]
    _draw_bars(axis, bars, {name: imbalance for name, (imbalance, _) in REPORTED["table 2"].items()})
    axis.set(xlabel="imbalance of forward latency")
    axis.set_title("Table 2: 7B-128K", loc="left", fontsize=10)


def _draw_breakdown(rows: list[Row], axis: Any) -> None:
    colours = {r["scheme"]: COLOURS["ours" if r["scheme"].startswith("ours") else "WLB-LLM"] for r in rows}
    colours |= {name: "#e8b48a" for name in colours if " x " in name}
    left_out = ("Plain-4D", "limit", "limit of balance")
    bars = [(r["scheme"], r["speedup"], colours[r["scheme"]]) for r in rows if r["scheme"] not in left_out]
    _draw_bars(axis, bars, REPORTED["figure 13"])
    axis.set(xlabel="speed-up over Plain-4D")
    axis.set_title("Figure 13: 7B-128K", loc="left", fontsize=10)


def _draw_bars(axis: Any, bars: list[tuple[str, float, str]], paper: dict[str, float]) -> None:
    """(name, value, colour) from 1 on, with crosses at what the paper reports."""
    for i, (name, value, colour) in enumerate(bars):
        axis.barh(i, value - 1, left=1, color=colour)
        if name in paper:
            axis.plot(paper[name], i, "kx", label="_" * (i > 0) + "paper")
    axis.set_yticks(range(len(bars)), [name for name, *_ in bars], fontsize=7)
    axis.invert_yaxis()


def _draw_cases(rows: list[Row], axis: Any) -> None:
    cases = list(dict.fromkeys(r["case"] for r in rows))
    value = {(r["case"], r["scheme"]): r["speedup"] for r in rows}
    for i, (scheme, colour) in enumerate(COLOURS.items()):
        heights = [value[case, scheme] - 1 for case in cases]
        axis.bar(np.arange(len(cases)) + 0.2 * i, heights, 0.19, bottom=1, color=colour, label=scheme)
    for limit, style in (("limit of balance", "_"), ("limit", "^")):
        places = np.arange(len(cases)) + (0.4 if limit == "limit of balance" else 0.6)
        axis.plot(places, [value[c, limit] for c in cases], style, color="k", ms=5, label=limit)
    if SEVEN_128.name in cases:
        axis.plot(cases.index(SEVEN_128.name) + 0.2, REPORTED["figure 12"]["WLB-LLM"]["7B-128K"], "kx")
    axis.set_xticks(np.arange(len(cases)) + 0.3, [c.replace("-", "\n") for c in cases], fontsize=8)
    axis.set(ylabel="speed-up over Plain-4D")
    axis.set_title("Figure 12", loc="left", fontsize=10)


def _draw_windows(rows: list[Row], axis: Any) -> None:
    for scheme, colour in {**COLOURS, "limit of balance": "#999999", "limit": "#333333"}.items():
        points = [(r["window"] >> 10, r["speedup"]) for r in rows if r["scheme"] == scheme]
        if points:
            axis.plot(*zip(*points, strict=True), marker=".", color=colour, label=scheme)
    axis.plot(*zip(*REPORTED["figure 14"].items(), strict=True), "kx", label="paper")
    axis.set(xlabel="context window (K tokens)", ylabel="speed-up over Plain-4D")
    axis.set_title("Figure 14: 7B", loc="left", fontsize=10)


def _draw_layer(rows: list[Row], axis: Any) -> None:
    windows = list(dict.fromkeys(r["window"] for r in rows))
    schemes = [s for s in dict.fromkeys(r["scheme"] for r in rows) if s != "per-sequence" and " x " not in s]
    for i, scheme in enumerate(schemes):
        for j, window in enumerate(windows):
            (found,) = [r["speedup"] for r in rows if (r["window"], r["scheme"]) == (window, scheme)]
            axis.bar(j + 0.14 * i, found - 1, 0.13, bottom=1, color=f"C{i}", label="_" * (j > 0) + scheme)
            paper = REPORTED["figure 15"].get((window >> 10, scheme))
            if paper:
                axis.plot(j + 0.14 * i, paper, "kx")
    axis.set_xticks(np.arange(len(windows)) + 0.35, [f"{w >> 10}K" for w in windows])
    axis.set(ylabel="speed-up over per-sequence")
    axis.set_title("Figure 15: a layer at CP = 4", loc="left", fontsize=10)
