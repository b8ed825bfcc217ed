"""The report as one page, with its pictures."""

from collections.abc import Callable, Iterator
from functools import partial
from html import escape

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from megatron_wlb.cli import pictures
from megatron_wlb.cli.analyze import table
from megatron_wlb.cli.analyze.report import Report, Sample
from megatron_wlb.cli.balance import attention_of_ranks, micro_batch_times
from megatron_wlb.cli.pictures import BLUE, GREY, ORANGE
from megatron_wlb.simulate import SimulatedStep

MOST_BARS = 160
"""Beyond which micro-batches are drawn as an outline."""
_STYLE = """\
.lead { font-size: 1.15rem; border-left: 4px solid #0072b2; padding-left: .75rem; margin: 1rem 0 }
table { border-collapse: collapse; width: 100%; max-width: 48rem; margin: 1rem 0; font-variant-numeric: tabular-nums }
th, td { padding: .2rem 0 .2rem .6rem; text-align: right; white-space: nowrap; border-bottom: 1px solid #e3e3e3 }
th:first-child, td:first-child { text-align: left; white-space: normal; padding-left: 0 }
td.part { padding-left: 1rem !important; color: #555 }
tbody tr:first-child { font-weight: 600 }
:is(th, td):nth-last-child(2) { color: #0072b2 }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: #f3f5f7; padding: .75rem; border-radius: 4px;
      font-size: .85rem }
ul { padding-left: 1.1rem }
@media (max-width: 30rem) { table { font-size: .78rem } th, td { padding-left: .35rem } }
"""


def page(report: Report) -> str:
    """The whole page."""
    sections = [
        pictures.section(title, text, partial(draw, report), height)
        for title, text, draw, height in _PICTURES
        if draw is not ranks or report.setup.job.parallel.cp > 1
    ]
    flags = [f"<h2>{title}</h2><pre>{escape(flags)}</pre>" for title, flags in table.to_paste(report)]
    facts = [f"<li>{escape(fact)}</li>" for fact in table.facts(report)]
    titles, *rows = table.rows(report)
    body = [
        f"<h1>What <code>--wlb</code> would bring</h1><p>{escape(table.job_line(report))}</p>",
        f'<p class="lead">{escape(table.headline(report))}</p>',
        f"<table><thead>{_row(titles, 'th')}</thead><tbody>",
        *(_row(row, "td") for row in rows),
        "</tbody></table>",
        *flags,
        "<main>",
        *sections,
        "</main><h2>What this goes by</h2><ul>",
        *facts,
        "</ul>\n",
    ]
    return pictures.page("What --wlb would bring", "\n".join(body), _STYLE)


def _row(cells: table.Row, tag: str) -> str:
    part = " class=part" if cells[0].startswith(" ") else ""
    others = "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells[1:])
    return f"<tr><{tag}{part}>{escape(cells[0].strip())}</{tag}>{others}</tr>"


def lengths(report: Report, figure: Figure) -> None:
    """Shares by length, one bin a power of 2."""
    data = report.entries["data"]
    edges = np.array([data["up_to"][0] / 2, *data["up_to"]])
    shares = {name: np.array(share) for name, share in data["shares"].items()}
    pictures.shares(figure, edges, shares, report.setup.job.context_length, "share per doubling of length")


def _panels(report: Report, figure: Figure) -> Iterator[tuple[Axes, Sample, str]]:
    """Plain Megatron over --wlb: the step that is shown, and its title."""
    panels = figure.subplots(2, sharex=True, sharey=True)
    for axes, name in zip(panels, ("plain", "ours"), strict=True):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        yield axes, report.examples[name], table.TITLES[name]


def _bars(axes: Axes, values: np.ndarray, mean: float, title: str) -> None:
    """Bars, or an outline of very many; in orange what the largest has over the mean."""
    slowest, count = int(values.argmax()), len(values)
    if count <= MOST_BARS:
        axes.bar(range(count), values, color=BLUE)
        axes.bar(slowest, values[slowest] - mean, bottom=mean, color=ORANGE)
    else:
        axes.stairs(values, np.arange(count + 1) - 0.5, color=BLUE, fill=True)
        axes.plot([slowest, slowest], [mean, values[slowest]], color=ORANGE, linewidth=2)
    axes.axhline(mean, color="black", linewidth=0.8)
    axes.margins(x=0.02)
    axes.set_title(f"{title}: slowest / mean {values[slowest] / mean:.2f}", loc="left", fontsize=10)


def micro_batches(report: Report, figure: Figure) -> None:
    """Time of every micro-batch, data-parallel ranks side by side."""
    job = report.setup.job
    for axes, (step, *_), title in _panels(report, figure):
        times = micro_batch_times(step) * job.model.num_layers / 1e3
        _bars(axes, times.ravel(), float(times.mean()), title)
        for rank in range(1, len(times)):
            axes.axvline(rank * times.shape[1] - 0.5, color=GREY, linewidth=0.6, linestyle=":")
    figure.axes[-1].set_xlabel("micro-batch" + (", by data-parallel rank" if job.parallel.dp > 1 else ""))
    figure.supylabel("time (ms)", fontsize=10)


def ranks(report: Report, figure: Figure) -> None:
    """Attention of the ranks that differ most."""
    for axes, (step, *_), title in _panels(report, figure):
        attention = attention_of_ranks(step)
        worst = attention[(attention.max(axis=1) / attention.mean(axis=1)).argmax()]
        _bars(axes, worst / worst.mean(), 1, title)
    figure.axes[-1].set_xlabel("context-parallel rank")
    figure.supylabel("attention / mean of the ranks", fontsize=10)


def timelines(report: Report, figure: Figure) -> None:
    """Passes of every stage."""
    for axes, (step, _, documents, _), title in _panels(report, figure):
        _timeline(axes, step)
        tokens = sum(int(lengths.sum()) for lengths in documents)
        axes.set_title(f"{title}: {step.time / 1e3:,.0f} ms for {tokens:,} tokens", loc="left", fontsize=10)
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_ylim(report.setup.job.parallel.pp - 0.5, -0.5)
    figure.axes[-1].set_xlabel("ms")
    figure.supylabel("pipeline stage", fontsize=10)


def _timeline(axes: Axes, step: SimulatedStep) -> None:
    slowest = max(step.timelines, key=lambda timeline: timeline.makespan)
    for direction, color in ((0, BLUE), (1, ORANGE)):
        for stage in range(slowest.schedule.num_stages):
            start = slowest.start[direction, stage].ravel() / 1e3
            duration = slowest.end[direction, stage].ravel() / 1e3 - start
            bars = np.stack((start, duration), axis=1).tolist()
            # Thousands of passes are a picture of the order of 100 KB as pixels, and of megabytes as shapes.
            axes.broken_barh(bars, (stage - 0.4, 0.8), color=color, edgecolor="white", linewidth=0.3, rasterized=True)


def alternatives(report: Report, figure: Figure) -> None:
    """The front of the report, and its schemes with --wlb."""
    stars = {}
    for name in ("paper", "ours"):
        numbers = report.entries["schemes"][name]
        stars[table.TITLES[name]] = numbers | {"imbalance_mean": numbers["imbalance"]["work_mean"]}
    pictures.front(figure, report.entries["front"], report.setup.job.context_length, stars)


_PICTURES: tuple[tuple[str, str, Callable[[Report, Figure], None], float], ...] = (
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
