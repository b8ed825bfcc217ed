"""The report as one page, with pictures."""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from megatron_wlb.cli import pictures
from megatron_wlb.cli.analyze import table
from megatron_wlb.cli.analyze.report import Report, Sample
from megatron_wlb.cli.common import render
from megatron_wlb.cli.pictures import BLUE, COLORS, INK, ORANGE, PAPER, WAITING
from megatron_wlb.pipeline.timeline import Timeline
from megatron_wlb.simulate.step import attention_of_ranks, micro_batch_times

MOST_EDGES = 48
"""Most passes of a stage with white edges; more edges would cover the passes."""
MOST = 16
"""Most micro-batches or ranks that are drawn: more would look the same, and be too narrow to see."""


def page(report: Report, words: dict[str, Any]) -> str:
    """Render the whole page of a report `rendered`; `analyze.html` has the words of its pictures."""

    def picture(title: str, text: str, draw: str, height: float) -> pictures.Section:
        return pictures.section(title, text, partial(_DRAW[draw], report), height)

    parallel = report.setup.job.parallel
    sizes = {"cp": parallel.cp, "pp": parallel.pp, "most_facts": table.MOST_FACTS}
    return render("analyze.html", report=words, picture=picture, **sizes)


def lengths(report: Report, figure: Figure) -> None:
    """Draw shares by document length, one bin per power of 2."""
    documents = report.documents
    edges = np.array([documents.up_to[0] / 2, *documents.up_to])
    shares = {name: np.array(share) for name, share in documents.shares.items()}
    pictures.shares(figure, edges, shares, report.setup.job.context_length, "share per doubling of length")


def time(report: Report, figure: Figure) -> None:
    """Draw where the time of a token goes, with --wlb and without."""
    axes = figure.subplots()
    looks = [*({"color": color} for color in COLORS), WAITING]
    for row, scheme in enumerate(report.schemes):
        left = 0.0
        for (part, seconds), look in zip(table.parts(scheme).items(), looks, strict=True):
            axes.barh(row, seconds, left=left, label="" if row else part, height=0.6, **look)
            left += seconds
        axes.annotate(f"{left:.3g} s", (left, row), (3, 0), textcoords="offset points", va="center", fontsize=9)
    axes.set_yticks(range(len(table.TITLES)), [title.replace(", ", ",\n") for title in table.TITLES])
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("seconds per million tokens")
    figure.legend(loc="outside lower center", ncols=2, fontsize=9)


def _panels(report: Report, figure: Figure, sharex: bool = False) -> Iterator[tuple[Axes, Sample, str]]:
    """Yield axes, step and title of Megatron with the attention of --wlb and, below, of --wlb."""
    panels = figure.subplots(2, sharex=sharex, sharey=True)
    _, *schemes = zip(report.schemes, table.TITLES, strict=True)
    for axes, (scheme, title) in zip(panels, schemes, strict=True):
        yield axes, report.example(scheme), title


def _bars(axes: Axes, values: np.ndarray, mean: float, title: str) -> None:
    """Draw the first `MOST` bars, or those up to the largest; others wait for the largest's excess."""
    slowest, count = int(values.argmax()), min(MOST, len(values))
    shown = np.arange(max(0, slowest + 1 - MOST), max(count, slowest + 1))
    axes.bar(shown, np.where(shown == slowest, mean, values[shown]), color=BLUE)
    axes.bar(slowest, values[slowest] - mean, bottom=mean, **WAITING)
    title += f" ({count} of {len(values)})" * (count < len(values))
    axes.axhline(mean, color=INK, linewidth=0.8)
    axes.margins(x=0.02)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title(title, loc="left", fontsize=10)


def micro_batches(report: Report, figure: Figure) -> None:
    """Draw micro-batches of the data-parallel rank that has the slowest, or sums of all ranks without a pipeline."""
    job = report.setup.job
    for axes, (step, *_), title in _panels(report, figure):
        times = micro_batch_times(step) * job.model.num_layers / 1e6
        mean, shown = float(times.mean()), times[times.max(axis=1).argmax()]
        if job.parallel.pp == 1:
            mean, shown = float(times.sum(axis=1).mean()), times.sum(axis=1)
        _bars(axes, shown, mean, title)
    figure.axes[-1].set_xlabel("micro-batch" if job.parallel.pp > 1 else "data-parallel rank")
    figure.supylabel("seconds", fontsize=10)


def ranks(report: Report, figure: Figure) -> None:
    """Draw attention of the ranks that differ most."""
    for axes, (step, *_), title in _panels(report, figure):
        attention = attention_of_ranks(step)
        worst = attention[(attention.max(axis=1) / attention.mean(axis=1)).argmax()]
        _bars(axes, worst / worst.mean(), 1, title)
    figure.axes[-1].set_xlabel("context-parallel rank")
    figure.supylabel("attention / mean of the ranks", fontsize=10)


def timelines(report: Report, figure: Figure) -> None:
    """Draw the passes of every stage; of many micro-batches as long as one way takes for `MOST`, the same of both."""
    _, *schemes = map(report.example, report.schemes)
    slowest = [max(sample.step.timelines, key=lambda t: t.makespan) for sample in schemes]
    many = max(timeline.end.shape[-1] for timeline in slowest) > MOST
    cut = min(float(timeline.end[..., :MOST].max()) for timeline in slowest) if many else math.inf
    for (axes, _, title), timeline in zip(_panels(report, figure, sharex=True), slowest, strict=True):
        _timeline(axes, timeline, min(cut, timeline.makespan))
        axes.set_title(title, loc="left", fontsize=10)
        axes.yaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes.set_ylim(report.setup.job.parallel.pp - 0.5, -0.5)
    figure.axes[-1].set_xlabel("seconds")
    figure.supylabel("pipeline stage", fontsize=10)


def _timeline(axes: Axes, timeline: Timeline, last: float) -> None:
    for stage in range(timeline.schedule.num_stages):
        axes.barh(stage, last / 1e6, height=0.8, **WAITING)
        forward, backward = (
            np.stack((start, np.minimum(end, last) - start), axis=-1)[start < last]
            for start, end in zip(timeline.start[:, stage], timeline.end[:, stage], strict=True)
        )
        for spans, color in ((forward, BLUE), (backward, ORANGE)):
            bars = (spans / 1e6).tolist()
            edges = {"edgecolor": PAPER, "linewidth": 0.3} if len(bars) <= MOST_EDGES else {"linewidth": 0}
            # Thousands of passes take about 100 KB as pixels, and megabytes as shapes.
            axes.broken_barh(bars, (stage - 0.4, 0.8), color=color, rasterized=True, **edges)


_DRAW: dict[str, Callable[[Report, Figure], None]] = {
    draw.__name__: draw for draw in (time, lengths, micro_batches, ranks, timelines)
}
