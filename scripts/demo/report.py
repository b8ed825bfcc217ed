"""The measurements of the demo, in a sentence and as one self-contained page."""

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

type Step = dict[str, Any]
"""An entry of `--wlb-log`; of the report, with "ranks": the passes of every rank, as `run.train` writes them."""


def ratio(plain: Sequence[Step], ours: Sequence[Step]) -> tuple[float, float]:
    """Megatron's seconds per token over those of --wlb in the same steps, and its standard error (nan of one step)."""
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


NOISE = 0.1
"""Standard error from which a ratio of times says nothing."""
_HEADINGS = {
    "gain": "The same tokens, in less time",
    "loss": "The same tokens, in more time",
    "close": "The same tokens, without a certain difference in time",
    "noise": "The same tokens, on a machine that is too busy to time them",
}
"""Headings over the race, by the tone of the verdict."""


def judge(value: float, error: float) -> tuple[str, str]:
    """A ratio in words, and its tone on the page."""
    number = f"{value:.2f} \u00b1 {error:.2f}"
    if not error <= NOISE:
        return f"This machine is too busy to measure: {number} is noise", "noise"
    number += " times as many tokens per second with --wlb as with Megatron's windows"
    if abs(value - 1) <= 2 * error:
        return f"Within noise: {number}", "close"
    return number, "gain" if value > 1 else "loss"


def nothing(predicted: float, value: float, error: float) -> str:
    """What documents brought that are all alike."""
    measured = f"{value:.2f} \u00b1 {error:.2f} measured"
    if not error <= NOISE:
        measured = f"this machine is too busy to measure it ({measured})"
    return f"Documents that are all alike, where nothing can be gained: {predicted:.2f} predicted, {measured}."


def write(
    folder: Path,
    plain: list[Step],
    ours: list[Step],
    *,
    warm: int,
    on: str,
    prediction: float,
    resumed: str,
    nothing: str,
) -> str:
    """Write FOLDER/report.html and its numbers as JSON; returns the verdict.

    The first `warm` steps of both count for the losses only.
    """
    for name, steps in (("megatron", plain), ("wlb", ours)):
        files = sorted(folder.glob(f"{name}-*.jsonl"))
        ranks = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
        steps[:] = [step | {"ranks": [rank[i] for rank in ranks]} for i, step in enumerate(steps)]
    measured = plain[warm:], ours[warm:]
    value, error = ratio(*measured)
    said, tone = judge(value, error)
    verdict = f"{said}; predicted {prediction:.2f}"
    rows = table(*measured)[: None if on.endswith("cores") else -1]
    about = (
        f"A small GPT on {on}: {len(plain) - warm} steps of Megatron's windows and of --wlb's micro-batches, "
        "by turns, on the same tokens. Both have the attention of --wlb, inside documents: Megatron's own needs a GPU "
        "for that. A fifth of the tokens are in documents of about half a window, the "
        "rest in short ones, which suits --wlb. Speed is by the clock; \u00b1 is a standard error over steps."
    )
    chart = pictures.section
    sections = [
        chart(_HEADINGS[tone], "Tokens trained over seconds of training.",
              lambda figure: race(figure, *measured), 3.2),
        chart("Where the time goes", "Seconds of training, mean of the ranks: computing, and waiting for each other.",
              lambda figure: waits(figure, *measured), 2.2),
        chart("Predicted and measured", "A dot is a step; on the line they agree. The profile was measured first.",
              lambda figure: predictions(figure, *measured), 3.6),
        chart("Loss", "Every step trains the same tokens, to the same loss.",
              lambda figure: losses(figure, plain, ours), 3.2),
        chart("One step on both ranks",
              "Forward (blue) and backward (orange) as measured, in the step whose times are nearest to the mean. Gaps "
              "are waiting. At the line the step ends, after the sum of gradients and the optimizer.",
              lambda figure: timelines(figure, *measured), 4.2),
    ]  # fmt: skip
    values = {"resumed": resumed, "nothing": nothing, "about": about, "rows": rows, "sections": sections}
    shown = "close" if tone == "noise" else tone
    page = render(Path(__file__).with_name("report.html"), verdict=verdict, tone=shown, **values)
    (folder / "report.html").write_text(page)
    numbers = {"ratio": value, "error": error, "predicted": prediction, "on": on, "warm": warm, "verdict": verdict}
    (folder / "report.json").write_text(json.dumps(numbers | {"table": rows, "megatron": plain, "wlb": ours}))
    return verdict


def table(plain: list[Step], ours: list[Step]) -> list[tuple[str, ...]]:
    """Rows of what was measured, Megatron's way first; the last is for CPUs only."""

    def row(title: str, show: Any) -> tuple[str, ...]:
        return title, show(plain), show(ours)

    def total(steps: list[Step], key: str) -> float:
        return float(sum(step[key] for step in steps))

    def slowest(steps: list[Step]) -> float:
        computing = [[sum(each[3] for each in rank["passes"]) for rank in step["ranks"]] for step in steps]
        return float(np.mean([max(ranks) for ranks in computing]))

    return [
        ("", "Megatron's windows", "--wlb"),
        row("tokens per second", lambda s: f"{1e3 * total(s, 'tokens') / total(s, 'step_ms'):,.0f}"),
        row("waiting, % of a step", lambda s: f"{100 * (1 - share(s, 'measured')):.1f}"),
        row("  predicted", lambda s: f"{100 * (1 - share(s, 'predicted')):.1f}"),
        row("loss, mean of the last five steps", lambda s: f"{np.mean([x['loss'] for x in s[-5:]]):.3f}"),
        row("CPU time of the slower rank, s per step", lambda s: f"{slowest(s):.2f}"),
    ]


def share(steps: list[Step], source: str) -> float:
    """Share of the time of steps that computes, measured or predicted."""
    time = f"{'step' if source == 'measured' else source}_ms"
    return float(sum(s[source]["busy"] * s[time] for s in steps) / sum(s[time] for s in steps))


WAYS = (("Megatron's windows", GREY), ("--wlb", BLUE))


def race(figure: Figure, plain: list[Step], ours: list[Step]) -> None:
    """Draw tokens over seconds."""
    axes = figure.subplots()
    for (name, color), steps in zip(WAYS, (plain, ours), strict=True):
        seconds, tokens = (np.cumsum([0, *(step[key] for step in steps)]) / 1e3 for key in ("step_ms", "tokens"))
        axes.plot(seconds, tokens, color=color, linewidth=2, label=name)
        axes.plot(seconds[-1:], tokens[-1:], color=color, marker="o")
        axes.annotate(f"{name} {seconds[-1]:.1f} s", (seconds[-1], tokens[-1]), (-6, 0 if color == BLUE else -14),
                      textcoords="offset points", ha="right", color=color)  # fmt: skip
    axes.set(xlabel="seconds of training", ylabel="thousand tokens trained", xlim=(0, None), ylim=(0, None))


def waits(figure: Figure, plain: list[Step], ours: list[Step]) -> None:
    """Draw seconds of computing and of waiting."""
    axes = figure.subplots()
    for y, steps in enumerate((plain, ours)):
        seconds, computing = sum(step["step_ms"] for step in steps) / 1e3, share(steps, "measured")
        axes.barh(y, seconds * computing, color=BLUE)
        axes.barh(y, seconds * (1 - computing), left=seconds * computing, **pictures.WAITING)
        axes.annotate(f"{1 - computing:.0%} waiting", (seconds, y), (5, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(WAYS)), [name for name, _ in WAYS])
    axes.invert_yaxis()
    axes.margins(x=0.3)
    axes.set_xlabel("seconds")


def predictions(figure: Figure, plain: list[Step], ours: list[Step]) -> None:
    """Draw measured over predicted seconds of every step."""
    axes = figure.subplots()
    most = 0.0
    for (name, color), steps in zip(WAYS, (plain, ours), strict=True):
        predicted, measured = ([step[key] / 1e3 for step in steps] for key in ("predicted_ms", "step_ms"))
        axes.scatter(predicted, measured, color=color, s=18, label=name)
        most = max(most, *predicted, *measured)
    axes.plot((0, most), (0, most), color=INK, linewidth=0.8)
    axes.set(xlabel="predicted seconds of a step", ylabel="measured seconds")
    axes.legend()


def timelines(figure: Figure, plain: list[Step], ours: list[Step]) -> None:
    """Draw the passes of every rank in one step, Megatron's way above."""
    means = [np.mean([step["step_ms"] for step in steps]) for steps in (plain, ours)]
    far = [
        abs(a["step_ms"] / means[0] - 1) + abs(b["step_ms"] / means[1] - 1) for a, b in zip(plain, ours, strict=True)
    ]
    chosen = int(np.argmin(far))
    for axes, (name, _), steps in zip(figure.subplots(2, sharex=True), WAYS, (plain, ours), strict=True):
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


def losses(figure: Figure, plain: list[Step], ours: list[Step]) -> None:
    """Draw both loss curves over each other."""
    axes = figure.subplots()
    for (name, color), steps, marker in zip(WAYS, (plain, ours), ("o", "."), strict=True):
        axes.plot([s["step"] for s in steps], [s["loss"] for s in steps], color=color, marker=marker, label=name)
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.legend()
