"""The report as one page, with a picture."""

from functools import partial

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from megatron_wlb.cli import pictures
from megatron_wlb.cli.common import render
from megatron_wlb.cli.pictures import BLUE, ORANGE
from megatron_wlb.cli.trial.report import Report


def page(report: Report) -> str:
    """Render the whole page."""
    sections = []
    if any("steps" in turn for turn in report.entries["turns"]):
        text = "Every line is a turn, without the steps that are not counted."
        sections = [pictures.section("Time of a step", text, partial(_draw, report), 3.4)]
    return render("trial.html", report=report, sections=sections)


def _draw(report: Report, figure: Figure) -> None:
    axes = figure.subplots()
    names = set()
    for turn in report.entries["turns"]:
        if "steps" in turn:
            name = "with --wlb" if turn["wlb"] else "without --wlb"
            numbers, times, _ = zip(*turn["steps"], strict=True)
            color = ORANGE if turn["wlb"] else BLUE
            axes.plot(numbers, times, color=color, linewidth=1.2, label="" if name in names else name)
            names.add(name)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="step", ylabel="ms")
    figure.legend(loc="outside upper center", ncols=2)
