"""Style of pictures and pages for phone and desk, and shared pictures."""

import base64
import io
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, PercentFormatter

# Okabe-Ito: distinguishable with every kind of color vision.
GREY, BLUE, ORANGE, GREEN = "#8c8c8c", "#0072b2", "#d55e00", "#009e73"
COLORS = (BLUE, "#56b4e9", GREEN, "#f0e442", "#cc79a7")
"""Colors of the parts of a whole."""
WAITING: Any = {"facecolor": "none", "edgecolor": GREY, "hatch": "////", "linewidth": 0.5}
"""How waiting looks."""
INK, PAPER = "#202124", "#fefefe"
"""Colors of text and of gaps, which pictures of a page change in the dark."""
STYLE: Any = {
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
    "axes.facecolor": "none",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "svg.hashsalt": "megatron_wlb",
}
_COLORS = f"svg{{color:{INK};--paper:#fff}}@media (prefers-color-scheme:dark){{svg{{color:#e4e6ea;--paper:#17191d}}}}"
WIDTH = 4.8
"""In inches."""


class Section(NamedTuple):
    """A part of a page with one picture."""

    title: str
    text: str
    image: str
    """SVG in base64."""


def section(title: str, text: str, draw: Callable[[Figure], None], height: float) -> Section:
    """Draw a part of a page with a picture of `height` inches."""
    buffer = io.StringIO()
    save(buffer, draw, height, format="svg", metadata={"Date": None}, transparent=True)
    image = buffer.getvalue().replace(INK, "currentColor").replace(PAPER, "var(--paper)")
    image = image.replace("</metadata>", f"</metadata><style>{_COLORS}</style>", 1)
    return Section(title, text, base64.b64encode(image.encode()).decode())


def save(file: Any, draw: Callable[[Figure], None], height: float, **options: Any) -> None:
    """Write the picture that `draw` draws to a file object or a file name."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        draw(figure)
        figure.savefig(file, dpi=220, **options)


def shares(figure: Figure, edges: np.ndarray, shares: Mapping[str, np.ndarray], window: int, label: str) -> None:
    """Draw up to three shares over document length, between `edges` [bins + 1]."""
    axes = figure.subplots()
    for (name, share), color, style in zip(shares.items(), (GREY, BLUE, ORANGE), ("-", "--", "-."), strict=False):
        axes.stairs(share, edges, color=color, fill=True, alpha=0.12)
        axes.stairs(share, edges, color=color, linewidth=1.8, linestyle=style, label=name)
    axes.axvline(window, color=INK, linewidth=0.8)
    axes.annotate("window", (window, 1), (-4, -2), xycoords=("data", "axes fraction"), va="top", ha="right",
                  textcoords="offset points", fontsize=9)  # fmt: skip
    seen = np.flatnonzero(np.max(list(shares.values()), axis=0) > 1e-3)
    axes.set_xscale("log", base=2)
    axes.set_xlim(min(edges[seen[0]], window / 1.2), max(edges[-1], window) * 1.2)
    axes.margins(y=0.12)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x / 1024:.0f}K" if x >= 1024 else f"{x:.0f}"))
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.set(xlabel="length of a document (tokens)", ylabel=label)
    figure.legend(loc="outside upper center", ncols=3)
