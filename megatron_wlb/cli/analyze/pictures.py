"""The pictures of the report, each as wide as a phone and as legible there as on a desk."""

import base64
import io
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter, PercentFormatter

from megatron_wlb.cli.analyze.report import Report, Result, Sample, micro_batch_times
from megatron_wlb.cli.job import attention_of_ranks
from megatron_wlb.simulate import SimulatedStep

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
MOST_BARS = 160
"""Beyond which micro-batches are drawn as an outline."""


def pictures(report: Report) -> Iterator[tuple[str, str, str]]:
    """Title, explanation, and the picture as the address of an <img>, of everything that the job has."""
    for title, text, draw, height in _PICTURES:
        if report.setup.job.cp > 1 or draw is not ranks:
            yield title, text, _address(draw, report, height)


def save(file: Any, draw: Callable[[Figure], None], height: float, **options: Any) -> None:
    """Write what `draw` draws to a file, or to its name."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        draw(figure)
        figure.savefig(file, dpi=220, **options)


def _address(draw: Callable[[Figure, Report], None], report: Report, height: float) -> str:
    buffer = io.BytesIO()
    save(buffer, lambda figure: draw(figure, report), height, format="svg", metadata={"Date": None})
    return f"data:image/svg+xml;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def lengths(figure: Figure, report: Report) -> None:
    """Shares by length, one bin a power of 2."""
    data, axes = report.entries["data"], figure.subplots()
    up_to = np.array(data["up_to"], float)
    edges = np.concatenate(([up_to[0] / 2], up_to))
    for (name, share), colour, style in zip(
        data["shares"].items(), (GREY, BLUE, ORANGE), ("-", "--", "-."), strict=True
    ):
        axes.stairs(share, edges, color=colour, fill=True, alpha=0.12)
        axes.stairs(share, edges, color=colour, linewidth=1.8, linestyle=style, label=name)
    window = report.setup.context_length
    axes.axvline(window, color="black", linewidth=0.8)
    axes.annotate("window", (window, 1), (-4, -2), xycoords=("data", "axes fraction"), va="top", ha="right",
                  textcoords="offset points", fontsize=9)  # fmt: skip
    seen = np.flatnonzero(np.max(list(data["shares"].values()), axis=0) > 1e-3)
    axes.set_xscale("log", base=2)
    axes.set_xlim(edges[seen[0]], edges[-1] * 1.2)
    axes.margins(y=0.12)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x / 1024:.0f}K" if x >= 1024 else f"{x:.0f}"))
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.set(xlabel="length (tokens)", ylabel="share per doubling of length")
    figure.legend(loc="outside upper center", ncols=3)


def _panels(figure: Figure, report: Report) -> Iterator[tuple[Axes, Sample, str]]:
    """Plain Megatron over --wlb: the step that is shown, and its title."""
    panels = figure.subplots(2, sharex=True, sharey=True)
    for axes, result in zip(panels, (report.results[0], report.results[-1]), strict=True):
        yield axes, result.example, result.scheme.title


def micro_batches(figure: Figure, report: Report) -> None:
    """Time of every micro-batch, data-parallel ranks side by side."""
    for axes, (step, *_), title in _panels(figure, report):
        times = micro_batch_times(step) * step.job.model.num_layers / 1e3
        mean, count = float(times.mean()), times.size
        slowest = int(times.argmax())
        if count <= MOST_BARS:
            _bars(axes, times.ravel(), mean, 0.8)
        else:
            axes.stairs(times.ravel(), np.arange(count + 1) - 0.5, color=BLUE, fill=True)
            axes.plot([slowest, slowest], [mean, times.max()], color=ORANGE, linewidth=2)
        for rank in range(1, len(times)):
            axes.axvline(rank * times.shape[1] - 0.5, color=GREY, linewidth=0.6, linestyle=":")
        axes.axhline(mean, color="black", linewidth=0.8)
        axes.set_title(f"{title}: slowest / mean {times.max() / mean:.2f}", loc="left", fontsize=10)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.margins(x=0.02)
    figure.axes[-1].set_xlabel("micro-batch" + (", by data-parallel rank" if report.setup.job.dp > 1 else ""))
    figure.supylabel("time (ms)", fontsize=10)


def _bars(axes: Axes, values: np.ndarray, mean: float, width: float) -> None:
    slowest = int(values.argmax())
    axes.bar(range(len(values)), values, width=width, color=BLUE)
    axes.bar(slowest, values[slowest] - mean, bottom=mean, width=width, color=ORANGE)


def ranks(figure: Figure, report: Report) -> None:
    """Attention of the ranks that differ most."""
    for axes, (step, *_), title in _panels(figure, report):
        attention = attention_of_ranks(step)
        worst = attention[(attention.max(axis=1) / attention.mean(axis=1)).argmax()]
        relative = worst / worst.mean()
        _bars(axes, relative, 1, 0.7)
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_title(f"{title}: slowest / mean {relative.max():.2f}", loc="left", fontsize=10)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.axes[-1].set_xlabel("context-parallel rank")
    figure.supylabel("attention / mean of the ranks", fontsize=10)


def timelines(figure: Figure, report: Report) -> None:
    """Passes of every stage."""
    for axes, (step, _, documents, _), title in _panels(figure, report):
        _timeline(axes, step)
        tokens = sum(int(lengths.sum()) for lengths in documents)
        axes.set_title(f"{title}: {step.time / 1e3:,.0f} ms for {tokens:,} tokens", loc="left", fontsize=10)
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_ylim(step.job.pp - 0.5, -0.5)
    figure.axes[-1].set_xlabel("ms")
    figure.supylabel("pipeline stage", fontsize=10)


def _timeline(axes: Axes, step: SimulatedStep) -> None:
    slowest = max(step.timelines, key=lambda timeline: timeline.makespan)
    for direction, colour in ((0, BLUE), (1, ORANGE)):
        for stage in range(slowest.schedule.num_stages):
            start = slowest.start[direction, stage].ravel() / 1e3
            duration = slowest.end[direction, stage].ravel() / 1e3 - start
            bars = np.stack((start, duration), axis=1).tolist()
            # Thousands of passes are a picture of the order of 100 KB as pixels, and of megabytes as shapes.
            axes.broken_barh(bars, (stage - 0.4, 0.8), color=colour, edgecolor="white", linewidth=0.3, rasterized=True)


def alternatives(figure: Figure, report: Report) -> None:
    """The front of the report, and its schemes with --wlb."""
    front(figure, report.entries["front"], report.setup.context_length, report.results[1:])


def front(figure: Figure, rows: Sequence[dict[str, Any]], window: int, stars: Sequence[Result] = ()) -> None:
    """Imbalance over delay and over the variation of tokens, of rows from `tune.point`."""
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
        for result, colour in zip(stars, STARS, strict=False):
            at = result.numbers[measure], _over_one(result.numbers["imbalance"]["work_mean"])
            axes.plot(*at, marker="*", markersize=13, color=colour, markeredgecolor="white", linestyle="none")
        axes.set(xlabel=label, ylabel="mean imbalance", yscale="log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{1 + y:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    mark = partial(Line2D, [], [], linestyle="none")
    handles = [
        mark(marker=m, color="black", markerfacecolor="none", label=n) for m, n in (("o", "wlb"), ("s", "adaptive"))
    ]
    for result, colour in zip(stars, STARS, strict=False):
        handles.append(mark(marker="*", markersize=12, color=colour, label=result.scheme.title))
    windows = [Patch(color=colour, label=f"S_max {s / window:.3g} windows") for s, colour in shades.items()]
    figure.legend(handles=[*handles, *windows], loc="outside upper center", ncols=2, fontsize=9)


def _over_one(imbalance: float) -> float:
    """For a logarithmic axis; nobody tells 1.0001 from 1."""
    return max(imbalance - 1, 1e-4)


_PICTURES: tuple[tuple[str, str, Callable[[Figure, Report], None], float], ...] = (
    (
        "Documents",
        "Documents by length: their share of all documents, of the tokens, and of the work (attention and the rest, "
        "cut at the window).",
        lengths,
        3.4,
    ),
    (
        "Work of the micro-batches",
        "Predicted time of every micro-batch in the layers of the model, in a typical step, in the order of the "
        "pipeline; CP ranks taken as alike. Orange: what the slowest has over the mean.",
        micro_batches,
        4.4,
    ),
    (
        "Work of the context-parallel ranks",
        "Attention of every CP rank in the micro-batch of that step whose ranks differ most. --wlb takes uneven ranks "
        "where exchanging less of K and V is worth more.",
        ranks,
        4.4,
    ),
    (
        "The pipeline",
        "Forward (blue) and backward (orange) passes of every stage in that step, on the slowest data-parallel rank; "
        "white is waiting. Tokens differ between the two.",
        timelines,
        4.4,
    ),
    (
        "What else could be had",
        "Packings that megatron-wlb tune would try: down and to the left is better. Filled: no other is as good in "
        "imbalance, delay, tokens per step and S_max. Stars: the paper's scheme and --wlb as simulated here.",
        alternatives,
        5.6,
    ),
)
"""Title, explanation, what draws it, and inches."""
