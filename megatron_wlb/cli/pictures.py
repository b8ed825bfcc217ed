"""How pictures and pages look, as wide as a phone and as legible there as on a desk, and pictures that several draw."""

import base64
import html
import io
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, PercentFormatter

# Okabe-Ito: told apart with every kind of color vision.
GREY, BLUE, ORANGE, GREEN = "#8c8c8c", "#0072b2", "#d55e00", "#009e73"
COLORS = (BLUE, "#56b4e9", GREEN, "#f0e442", ORANGE, "#cc79a7", GREY)
"""Of parts of a whole."""
STYLE: Any = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "svg.hashsalt": "megatron_wlb",
}
WIDTH = 4.8
"""Inches."""
_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 76rem; margin: 0 auto;
       padding: 1rem }}
h1 {{ font-size: 1.5rem; margin: .5rem 0 }}
h2 {{ font-size: 1.05rem; margin: 0 0 .25rem }}
p {{ margin: 0 0 .5rem }}
main {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(26rem, 100%), 1fr)); gap: 2rem;
       margin: 1.5rem 0 }}
section p, li {{ font-size: .9rem; color: #444; overflow-wrap: anywhere }}
img {{ width: 100%; max-width: 36rem; height: auto }}
{style}</style>
{body}</html>
"""


def page(title: str, body: str, style: str = "") -> str:
    """An HTML page that needs nothing else: no script, no font, no file beside it."""
    return _PAGE.format(title=html.escape(title), body=body, style=style)


def section(title: str, text: str, draw: Callable[[Figure], None], height: float) -> str:
    """A part of a page's <main> with one picture, `height` inches high."""
    buffer = io.BytesIO()
    save(buffer, draw, height, format="svg", metadata={"Date": None})
    title, image = html.escape(title), base64.b64encode(buffer.getvalue()).decode()
    return (
        f'<section><h2>{title}</h2><p>{html.escape(text)}</p><img alt="{title}" '
        f'src="data:image/svg+xml;base64,{image}"></section>'
    )


def save(file: Any, draw: Callable[[Figure], None], height: float, **options: Any) -> None:
    """Write what `draw` draws to a file, or to its name."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        draw(figure)
        figure.savefig(file, dpi=220, **options)


def shares(figure: Figure, edges: np.ndarray, shares: Mapping[str, np.ndarray], window: int, label: str) -> None:
    """Up to three shares over the length of documents, [bins] each between `edges` [bins + 1] in tokens."""
    axes = figure.subplots()
    for (name, share), color, style in zip(shares.items(), (GREY, BLUE, ORANGE), ("-", "--", "-."), strict=False):
        axes.stairs(share, edges, color=color, fill=True, alpha=0.12)
        axes.stairs(share, edges, color=color, linewidth=1.8, linestyle=style, label=name)
    axes.axvline(window, color="black", linewidth=0.8)
    axes.annotate("window", (window, 1), (-4, -2), xycoords=("data", "axes fraction"), va="top", ha="right",
                  textcoords="offset points", fontsize=9)  # fmt: skip
    seen = np.flatnonzero(np.max(list(shares.values()), axis=0) > 1e-3)
    axes.set_xscale("log", base=2)
    axes.set_xlim(edges[seen[0]], edges[-1] * 1.2)
    axes.margins(y=0.12)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x / 1024:.0f}K" if x >= 1024 else f"{x:.0f}"))
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.set(xlabel="length of a document (tokens)", ylabel=label)
    figure.legend(loc="outside upper center", ncols=3)


def front(figure: Figure, rows: Sequence[Mapping[str, Any]], window: int) -> None:
    """Time over delay and over the variation of tokens, of rows as tune has them; the best are filled."""
    most = max([1.1, *(row["max_tokens"] / window for row in rows)])
    colors = matplotlib.colormaps["viridis"].resampled(8)
    shades = {s: colors((s / window - 1) / max(0.1, most - 1)) for s in sorted({row["max_tokens"] for row in rows})}
    labels = {"late_steps": "mean delay (steps)", "token_cv": "tokens per step, CV"}
    for axes, (measure, label) in zip(figure.subplots(2, sharey=True), labels.items(), strict=True):
        for row in rows:
            color = shades[row["max_tokens"]]
            shape = {"marker": "o" if row["policy"] == "wlb" else "s", "markersize": 6}
            filled = color if row["best"] else "none"
            axes.plot(
                row[measure], row["time"], **shape, linestyle="none", color=color, markerfacecolor=filled, alpha=0.9
            )
        axes.set(xlabel=label, ylabel="time / fastest")
    mark = partial(Line2D, [], [], linestyle="none")
    handles = [
        mark(marker=m, color="black", markerfacecolor="none", label=n) for m, n in (("o", "wlb"), ("s", "adaptive"))
    ]
    windows = [Patch(color=color, label=f"S_max {s / window:.3g} windows") for s, color in shades.items()]
    figure.legend(handles=[*handles, *windows], loc="outside upper center", ncols=2, fontsize=9)
