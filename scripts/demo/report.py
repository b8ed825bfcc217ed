"""What the demo measured, in a sentence and as one self-contained page."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from megatron_wlb.cli import pictures
from megatron_wlb.cli.common import render
from megatron_wlb.cli.pictures import BLUE, GREY, INK, ORANGE
from megatron_wlb.simulate.step import TIME_SHARES

type Step = dict[str, Any]
"""An entry of `--wlb-log`; of the report, with "ranks": the passes of every rank, as `run.train` writes them."""


def ratio(plain: Sequence[Step], ours: Sequence[Step]) -> tuple[float, float]:
    """Plain's seconds per token over those of --wlb in the same steps, and its standard error (nan of one step)."""
    a, b = (np.array([step["step_ms"] for step in steps]) for steps in (plain, ours))
    tokens = [sum(step["tokens"] for step in steps) for steps in (plain, ours)]
    value = float(a.sum() / tokens[0] / (b.sum() / tokens[1]))
    if len(a) < 2:
        return value, math.nan
    # Of a ratio of means. Times are held against work, since steps differ in their documents, and whole runs do not;
    # what else the machine does in a step hits both, and cancels.
    own, others = (np.array([sum(step["work"]) for step in steps], float) for steps in (plain, ours))
    off = a / a.mean() - own / own.mean() - b / b.mean() + others / others.mean()
    return value, float(value * np.std(off, ddof=1) / math.sqrt(len(a)))


def judge(value: float, error: float) -> tuple[str, str]:
    """A ratio in words, and its tone on the page."""
    number = f"{value:.2f} \u00b1 {error:.2f}"
    if abs(value - 1) <= 2 * error:
        return f"No difference is certain: {number} times as many tokens a second with --wlb", "close"
    return f"{number} times as many tokens a second with --wlb", "gain" if value > 1 else "loss"


def write(
    folder: Path, plain: list[Step], ours: list[Step], *, warm: int, prediction: str, resumed: str, on: str
) -> str:
    """Write FOLDER/report.html and what it shows as JSON; returns the verdict.

    The first `warm` steps of both count for the losses only.
    """
    for name, steps in (("plain", plain), ("--wlb", ours)):
        files = sorted(folder.glob(f"{name}-*.jsonl"))
        ranks = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
        steps[:] = [step | {"ranks": [rank[i] for rank in ranks]} for i, step in enumerate(steps)]
    measured = plain[warm:], ours[warm:]
    value, error = ratio(*measured)
    verdict, tone = judge(value, error)
    rows = table(*measured)[: None if on.endswith("cores") else -1]
    about = (
        f"A small GPT on {on}: {len(plain) - warm} steps of Megatron's packing and of --wlb, by turns in every step, "
        "with the same attention, on the same tokens. Speed is by the clock; what else runs here makes it less "
        "certain, and changes the CPU time of the slower rank less."
    )
    sections = [
        pictures.section(
            "A step on both ranks",
            "Forward (blue) and backward (orange) as measured, in the step whose times are nearest to the mean. Gaps "
            "are waiting. At the line the step ends, after the sum of gradients and the optimizer.",
            lambda figure: timelines(figure, *measured),
            4.4,
        ),
        pictures.section(
            "Every step",
            "Seconds of every step. A busy machine lengthens both.",
            lambda figure: times(figure, plain, ours),
            3.4,
        ),
        pictures.section(
            "Loss",
            "Every step trains the same tokens in both, to the same loss.",
            lambda figure: losses(figure, plain, ours),
            3.4,
        ),
    ]
    values = {"prediction": prediction, "resumed": resumed, "about": about, "rows": rows, "sections": sections}
    page = render(Path(__file__).with_name("report.html"), verdict=verdict, tone=tone, **values)
    (folder / "report.html").write_text(page)
    numbers = {"ratio": value, "error": error, "on": on, "warm": warm, "verdict": verdict, "table": rows}
    (folder / "report.json").write_text(json.dumps(numbers | {"plain": plain, "--wlb": ours}))
    return verdict


def table(plain: list[Step], ours: list[Step]) -> list[tuple[str, ...]]:
    """Rows of what was measured, --wlb first; the last is for CPUs only."""

    def row(title: str, show: Any) -> tuple[str, ...]:
        return title, show(ours), show(plain)

    def mean(steps: list[Step], part: str) -> float:
        return sum(s["measured"][part] * s["step_ms"] for s in steps) / sum(s["step_ms"] for s in steps)

    def total(steps: list[Step], key: str) -> float:
        return float(sum(step[key] for step in steps))

    def slowest(steps: list[Step]) -> float:
        computing = [[sum(each[3] for each in rank["passes"]) for rank in step["ranks"]] for step in steps]
        return float(np.mean([max(ranks) for ranks in computing]))

    return [
        ("", "--wlb", "plain"),
        row("tokens a second", lambda s: f"{1e3 * total(s, 'tokens') / total(s, 'step_ms'):,.0f}"),
        *(
            row(f"{part}, % of a step", lambda s, part=part: f"{100 * mean(s, part) + 0:.1f}")
            for part in TIME_SHARES
            if part != "bubble"
        ),
        row("loss, mean of the last five steps", lambda s: f"{np.mean([x['loss'] for x in s[-5:]]):.3f}"),
        row("CPU time of the slower rank, s a step", lambda s: f"{slowest(s):.2f}"),
    ]


def timelines(figure: Figure, plain: list[Step], ours: list[Step]) -> None:
    """Draw the passes of every rank in one step, plain above."""
    means = [np.mean([step["step_ms"] for step in steps]) for steps in (plain, ours)]
    far = [
        abs(a["step_ms"] / means[0] - 1) + abs(b["step_ms"] / means[1] - 1) for a, b in zip(plain, ours, strict=True)
    ]
    chosen = int(np.argmin(far))
    for axes, (name, steps) in zip(figure.subplots(2, sharex=True), (("plain", plain), ("--wlb", ours)), strict=True):
        step = steps[chosen]
        begin = min(rank["begin"] for rank in step["ranks"])
        end = max(rank["end"] for rank in step["ranks"]) - begin
        for i, rank in enumerate(step["ranks"]):
            for kind, color in (("forward", BLUE), ("backward", ORANGE)):
                spans = [(start - begin, stop - start) for what, start, stop, _ in rank["passes"] if what == kind]
                axes.broken_barh(spans, (i - 0.4, 0.8), color=color)
        axes.axvline(end, color=INK, linewidth=1)
        axes.set_title(f"{name}, step {step['step']}: {end:.2f} s", loc="left", fontsize=10)
        axes.set_yticks(range(len(step["ranks"])))
        axes.set_ylim(len(step["ranks"]) - 0.5, -0.5)
    figure.axes[-1].set_xlabel("seconds")
    figure.supylabel("data-parallel rank", fontsize=10)


def times(figure: Figure, plain: list[Step], ours: list[Step]) -> None:
    """Draw seconds over steps."""
    _both(figure, plain, ours, lambda step: step["step_ms"] / 1e3, "seconds of a step").set_ylim(bottom=0)


def losses(figure: Figure, plain: list[Step], ours: list[Step]) -> None:
    """Draw both loss curves over each other."""
    _both(figure, plain, ours, lambda step: step["loss"], "loss (nats per token)")


def _both(figure: Figure, plain: list[Step], ours: list[Step], value: Any, label: str) -> Any:
    axes = figure.subplots()
    for name, steps, color, marker in (("plain", plain, GREY, "o"), ("--wlb", ours, BLUE, ".")):
        axes.plot(
            [step["step"] for step in steps], [value(step) for step in steps], color=color, marker=marker, label=name
        )
    axes.set(xlabel="step", ylabel=label)
    axes.legend()
    return axes
