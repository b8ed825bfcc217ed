"""How pictures look, each as wide as a phone and as legible there as on a desk; the front of packings."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, NullFormatter

# Okabe-Ito: told apart with every kind of colour vision.
GREY, BLUE, ORANGE = "#8c8c8c", "#0072b2", "#d55e00"
STYLE: Any = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "svg.hashsalt": "megatron_wlb",
}
WIDTH = 4.8
"""Inches."""
STARS = (GREY, ORANGE)


def save(file: Any, draw: Callable[[Figure], None], height: float, **options: Any) -> None:
    """Write what `draw` draws to a file, or to its name."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        draw(figure)
        figure.savefig(file, dpi=220, **options)


def front(figure: Figure, rows: Sequence[dict[str, Any]], window: int, stars: Mapping[str, Any] | None = None) -> None:
    """Imbalance over delay and over the variation of tokens, of rows from `tune.point`, and of such by name."""
    named = list(zip((stars or {}).items(), STARS, strict=False))
    most = max([1.1, *(row["max_tokens"] / window for row in rows)])
    colours = matplotlib.colormaps["viridis"].resampled(8)
    shades = {s: colours((s / window - 1) / max(0.1, most - 1)) for s in sorted({row["max_tokens"] for row in rows})}
    labels = {"late_steps": "mean delay (steps)", "token_cv": "tokens per step, CV"}
    for axes, (measure, label) in zip(figure.subplots(2, sharey=True), labels.items(), strict=True):
        for row in rows:
            colour = shades[row["max_tokens"]]
            shape = {"marker": "o" if row["policy"] == "wlb" else "s", "markersize": 6}
            filled = colour if row["best"] else "none"
            at = row[measure], _over_one(row["imbalance_mean"])
            axes.plot(*at, **shape, linestyle="none", color=colour, markerfacecolor=filled, alpha=0.9)
        for (_, row), colour in named:
            at = row[measure], _over_one(row["imbalance_mean"])
            axes.plot(*at, marker="*", markersize=13, color=colour, markeredgecolor="white", linestyle="none")
        axes.set(xlabel=label, ylabel="mean imbalance", yscale="log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{1 + y:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    mark = partial(Line2D, [], [], linestyle="none")
    handles = [
        mark(marker=m, color="black", markerfacecolor="none", label=n) for m, n in (("o", "wlb"), ("s", "adaptive"))
    ]
    handles += [mark(marker="*", markersize=12, color=colour, label=name) for (name, _), colour in named]
    windows = [Patch(color=colour, label=f"S_max {s / window:.3g} windows") for s, colour in shades.items()]
    figure.legend(handles=[*handles, *windows], loc="outside upper center", ncols=2, fontsize=9)


def _over_one(imbalance: float) -> float:
    """For a logarithmic axis; nobody tells 1.0001 from 1."""
    return max(imbalance - 1, 1e-4)
