"""Turn the logs of the demo into one self-contained page, and optionally one picture for the README."""

import argparse
import math
from collections import Counter
from pathlib import Path

import matplotlib
import numpy as np
from check_resume import Comparison, Step, compare, read_log
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from megatron_wlb.cli import pictures
from megatron_wlb.cli.common import render
from megatron_wlb.cli.pictures import BLUE, GREY, ORANGE
from megatron_wlb.plan.dataset import read_index


def main() -> None:
    arguments = parse_arguments()
    log, reference = read_log(arguments.log), read_log(arguments.reference_log)
    result = compare(log, reference)
    # A step that ran again after the resume must not count twice.
    steps = list({step["step"]: step for step in log}.values())
    lengths = read_index(arguments.data).tokens
    sections = [
        pictures.section(*DOCUMENTS, lambda figure: draw_lengths(figure, lengths, arguments.context_length), 3.4),
        pictures.section(*PACKING, lambda figure: draw_micro_batches(figure, steps), 4.2),
        pictures.section(*SHARDING, lambda figure: draw_ranks(figure, steps), 4.2),
        pictures.section(*DELAY, lambda figure: draw_delays(figure, steps), 3.4),
        pictures.section(*RESUME, lambda figure: draw_loss(figure, log, reference, result), 3.4),
    ]
    template, title = Path(__file__).with_name("report.html"), "WLB-LLM on Megatron-LM: the demo run"
    page = render(template, title=title, figures=key_figures(steps, result), sections=sections)
    arguments.output.write_text(page)
    if arguments.picture:
        with matplotlib.rc_context(pictures.STYLE | {"font.size": 11}):
            draw_picture(steps).savefig(arguments.picture, dpi=160)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--log", type=Path, required=True, help="--wlb-log of the run that was stopped and resumed")
    parser.add_argument("--reference-log", type=Path, required=True, help="--wlb-log of the uninterrupted run")
    parser.add_argument("--data", required=True, help="prefix given to make_data.py")
    parser.add_argument("--context-length", type=int, default=2048, help="--seq-length of the run")
    parser.add_argument("--output", type=Path, required=True, help="HTML page to write")
    parser.add_argument("--picture", type=Path, help="PNG to write for the README")
    return parser.parse_args()


def key_figures(steps: list[Step], result: Comparison) -> list[tuple[str, str]]:
    def mean(key: str) -> float:
        return float(np.mean([step[key] for step in steps]))

    delays = count_delays(steps)
    delay = sum(late * tokens for late, tokens in delays.items()) / delays.total()
    exact = "yes" if result.difference is None else "no"
    packing = f"{mean('imbalance_original'):.3f} \u2192 {mean('imbalance'):.3f}"
    figures = [
        ("slowest micro-batch / mean, original \u2192 WLB", packing),
        ("mean delay of a token", f"{delay:.2f} steps"),
        ("tokens", f"{sum(step['tokens'] for step in steps):,}"),
        ("steps", f"{len(steps)}"),
        ("resume exact", exact),
        ("largest loss difference", f"{result.max_loss_difference:.2g}"),
    ]
    per_sequence, chosen = cp_imbalances(steps)
    if per_sequence:
        sharding = f"{np.mean(per_sequence):.3f} \u2192 {np.mean(chosen):.3f}"
        figures.insert(1, ("slowest CP rank / mean, per-sequence \u2192 chosen", sharding))
    return figures


DOCUMENTS = (
    "Documents",
    "Documents by length: how many there are, their share of the tokens, and their share of the attention work "
    "(quadratic in length, after cutting at the window).",
)
PACKING = (
    "Work of the micro-batches",
    "Every bar is a micro-batch; both packings read the same stream of documents. Orange: what the slowest has over "
    "the mean of its step, and all others wait for.",
)
SHARDING = (
    "Work of the context-parallel ranks",
    "Attention of every rank in the micro-batches of one step, the one with the median imbalance of per-sequence "
    "sharding. Orange: what the slowest rank has over the mean.",
)
DELAY = ("Delay", "How long tokens wait until documents of their length are enough for all micro-batches.")
RESUME = (
    "Loss across the interruption",
    "The run was killed, resumed from its checkpoint and compared with a run that was left alone.",
)


def draw_lengths(figure: Figure, lengths: np.ndarray, context_length: int) -> None:
    edges = 2.0 ** np.arange(np.floor(np.log2(lengths.min())), np.ceil(np.log2(lengths.max())) + 1, 0.5)
    full, rest = np.divmod(lengths, context_length)
    attention = full * float(context_length) ** 2 + rest.astype(float) ** 2
    weights = {"documents": np.ones(len(lengths)), "tokens": lengths, "attention work": attention}
    shares = {name: np.histogram(lengths, edges, weights=w)[0] / w.sum() for name, w in weights.items()}
    pictures.shares(figure, edges, shares, context_length, "share per half octave")


def draw_micro_batches(figure: Figure, steps: list[Step]) -> None:
    shown = [steps[i] for i in np.unique(np.linspace(0, len(steps) - 1, 4).round().astype(int))]
    panels = figure.subplots(2, sharex=True, sharey=True)
    labels = [f"step {step['step']}" for step in shown]
    for axes, name, key in zip(panels, ("original packing", "WLB packing"), ("original_work", "work"), strict=True):
        draw_groups(axes, [step[key] for step in shown], labels)
        axes.set_title(name, loc="left", fontsize=11)
    figure.supylabel("work / mean of the step", fontsize=11)


def draw_ranks(figure: Figure, steps: list[Step]) -> None:
    sharded = [step for step in steps if len(step["micro_batches"][0]["cp_work"]) > 1]
    if not sharded:
        figure.text(0.5, 0.5, "This run had no context parallelism.", ha="center")
        return
    by_imbalance = sorted(sharded, key=lambda step: float(np.mean(cp_imbalances([step])[0])))
    step = by_imbalance[len(by_imbalance) // 2]
    batches = step["micro_batches"]
    panels = figure.subplots(2, sharex=True, sharey=True)
    for axes, name, key in zip(panels, ("per-sequence", "chosen"), ("cp_work_per_sequence", "cp_work"), strict=True):
        draw_groups(axes, [batch[key] for batch in batches], [str(i + 1) for i in range(len(batches))])
        axes.set_title(name, loc="left", fontsize=11)
    chosen = Counter(batch["strategy"] for batch in batches)
    summary = ", ".join(f"{count} {name}" for name, count in chosen.most_common())
    panels[1].set_title(f"chosen: {summary}", loc="left", fontsize=11)
    panels[1].set_xlabel(f"micro-batch of step {step['step']}")
    figure.supylabel("attention work / mean of the ranks", fontsize=11)


def draw_groups(axes: Axes, groups: list[list[float]], labels: list[str]) -> None:
    """One group of bars for each list, relative to its mean, with what the largest has above it in orange."""
    for position, work in enumerate(groups):
        relative = np.array(work) / np.mean(work)
        slowest = int(relative.argmax())
        left = position - 0.4 + 0.8 * (np.arange(len(work)) + 0.5) / len(work)
        axes.bar(left, relative, width=0.68 / len(work), color=BLUE)
        axes.bar(left[slowest], relative[slowest] - 1, bottom=1, width=0.68 / len(work), color=ORANGE)
        axes.annotate(f"{relative[slowest]:.2f}", (left[slowest], relative[slowest]), (0, 2), ha="center",
                      textcoords="offset points", fontsize=9)  # fmt: skip
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(groups)), labels)
    axes.tick_params(axis="x", length=0)
    axes.margins(x=0.02, y=0.12)


def draw_delays(figure: Figure, steps: list[Step]) -> None:
    axes = figure.subplots()
    delays = count_delays(steps)
    late = np.arange(max(delays) + 1)
    share = np.array([delays[i] for i in late]) / delays.total()
    bars = axes.bar(late, share, color=BLUE, width=0.8)
    if len(late) <= 12:
        axes.bar_label(bars, [f"{value:.1%}" if value else "" for value in share], fontsize=10)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.set(xlabel="steps after the arrival of the document", ylabel="share of tokens")


def draw_loss(figure: Figure, log: list[Step], reference: list[Step], result: Comparison) -> None:
    axes = figure.subplots()
    split = next((i for i in range(1, len(log)) if log[i]["step"] <= log[i - 1]["step"]), len(log))
    axes.plot(*points(reference), color=GREY, linewidth=6, alpha=0.5, label="uninterrupted", solid_capstyle="round")
    axes.plot(
        *points(log[:split]), color=ORANGE, marker="o", markersize=7, markerfacecolor="white", label="until killed"
    )
    if split < len(log):
        axes.plot(*points(log[split:]), color=BLUE, marker=".", linewidth=1.5, label="resumed")
        axes.axvline(log[split - 1]["step"], color="black", linewidth=0.8)
        axes.annotate("killed", (log[split - 1]["step"], 1), (4, -4), xycoords=("data", "axes fraction"), va="top",
                      textcoords="offset points", fontsize=10)  # fmt: skip
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.set_title(f"largest difference {result.max_loss_difference:.2g}", loc="left", fontsize=11)
    axes.legend(loc="lower left")


def draw_picture(steps: list[Step]) -> Figure:
    figure = Figure((11, 4), layout="constrained")
    left, right = figure.subfigures(1, 2, wspace=0.04)
    draw_micro_batches(left, steps)
    draw_ranks(right, steps)
    return figure


def points(steps: list[Step]) -> tuple[list[int], list[float]]:
    return [step["step"] for step in steps], [step["loss"] for step in steps]


def count_delays(steps: list[Step]) -> Counter[int]:
    """Tokens by the number of steps they ran after they arrived."""
    delays: Counter[int] = Counter()
    for step in steps:
        delays.update({int(late): tokens for late, tokens in step["delays_tokens"].items()})
    return delays


def cp_imbalances(steps: list[Step]) -> tuple[list[float], list[float]]:
    """max * CP / total of every micro-batch, per-sequence and as chosen; empty without context parallelism."""
    batches = [batch for step in steps for batch in step["micro_batches"] if len(batch["cp_work"]) > 1]

    def imbalances(key: str) -> list[float]:
        return [max(batch[key]) * len(batch[key]) / math.fsum(batch[key]) for batch in batches]

    return imbalances("cp_work_per_sequence"), imbalances("cp_work")


if __name__ == "__main__":
    main()
