"""The pictures of the report."""

import base64
import io
from collections.abc import Callable, Iterator

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from megatron_wlb.cli.analyze.report import Report, Sample, micro_batch_times
from megatron_wlb.cli.job import attention_of_ranks
from megatron_wlb.cli.pictures import BLUE, GREY, ORANGE, front, save
from megatron_wlb.simulate import SimulatedStep

MOST_BARS = 160
"""Beyond which micro-batches are drawn as an outline."""


def pictures(report: Report) -> Iterator[tuple[str, str, str]]:
    """Title, explanation, and the picture as the address of an <img>, of everything that the job has."""
    for title, text, draw, height in _PICTURES:
        if report.setup.job.cp > 1 or draw is not ranks:
            yield title, text, _address(draw, report, height)


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
    stars = {
        r.scheme.title: r.numbers | {"imbalance_mean": r.numbers["imbalance"]["work_mean"]} for r in report.results[1:]
    }
    front(figure, report.entries["front"], report.setup.context_length, stars)


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
