"""`megatron-wlb compare`: compare the speed and the losses of two runs, or of a run and its predictions.

    megatron-wlb compare base.log wlb.log
    megatron-wlb compare tensorboard-base/ run.jsonl
    megatron-wlb compare run.jsonl

BASE and RUN are the output of Megatron, the file that --wlb-log named, or a folder of TensorBoard with
--log-timers-to-tensorboard. Steps that both have are compared by their number, without the first ones of every start.
The ratio is of tokens per second and GPU. Its error is one standard error over up to 20 blocks of consecutive steps: of
the ratio of means, linearised. It covers the noise of both runs, not another day or other nodes. A log of --wlb-log
alone is compared with the run's own predictions. Skipped steps take time and train no tokens. Runs that differ in
more than --wlb are named; of other models, data or seeds no losses are compared. Logs without Megatron's arguments,
such as Megatron-Bridge's, need --num-gpus and --seq-length.
"""

import argparse
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from megatron_wlb.cli import common
from megatron_wlb.cli.common import Rows, integer, write_json, writer
from megatron_wlb.cli.profile import relative_error
from megatron_wlb.cli.run_log import MOST_DIFFERENCES, OTHER, Line, Log, differences, read, read_step_log
from megatron_wlb.hardware.profile import same_device
from megatron_wlb.settings import printable, short
from megatron_wlb.simulate.step import TIME_SHARES

FORMAT = "megatron-wlb-comparison"
VERSION = 5
USAGE = "[BASE] RUN [--skip K] [--json FILE] [--num-gpus N --seq-length C]"
BLOCKS = 20
"""Most blocks of consecutive steps; neighbors are correlated, so single steps would understate the error."""
SAME_LOSS = 1e-3
"""Relative difference up to which losses are of one step: bf16 rounds otherwise in other micro-batches."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("logs", nargs="+", metavar="[BASE] RUN", help="logs of one or two runs")
    parser.add_argument(
        "--skip",
        type=integer(2, 1 << 20),
        default=10,
        metavar="K",
        help="leave out the first K steps of every start, which warm up; at least 2, default: 10",
    )
    sizes = {"--num-gpus": "GPUs", "--seq-length": "tokens of a window"}
    for flag, what in sizes.items():
        parser.add_argument(flag, type=integer(1, 1 << 26), help=f"{what} of a log without Megatron's arguments")
    parser.add_argument("--json", metavar="FILE", help="the numbers, and both runs' steps; - for standard output")


def run(args: argparse.Namespace) -> None:
    if len(args.logs) > 2:
        raise ValueError(f"{len(args.logs)} logs; give BASE and RUN, or RUN alone")
    console = common.console(args.json, width=120)
    if len(args.logs) == 1:
        found = predicted(args.logs[0], args.skip)
    else:
        found = compared(*(read(name, args.skip, args.num_gpus, args.seq_length) for name in args.logs))
    left_out = f"Left out: the first {args.skip} steps of every start (--skip), or of a folder of TensorBoard."
    said = [*map(printable, (*found.said, left_out))]
    with writer(args.json, "--json") as out:
        write_json(out, {"format": FORMAT, "version": VERSION, "words": said} | found.numbers)
    common.show(console, said, [found.rows])


class Comparison(NamedTuple):
    """Everything that is shown."""

    rows: Rows
    said: list[str]
    """Sentences, the verdict first."""
    numbers: dict[str, Any]
    """As JSON types."""


def compared(base: Log, ran: Log) -> Comparison:
    """Compare two runs. Raises ValueError if they have no steps to compare."""
    if base.padded != ran.padded:
        padded, other = (base, ran) if base.padded else (ran, base)
        raise ValueError(
            f"{padded.name} does not say how many tokens its steps trained, as {other.name} does; give Megatron's "
            "output of both, or --wlb-log of both"
        )
    both, of_step = (base, ran), []
    differ = differences(base.arguments, ran.arguments)
    others = [name for name in differ if name in OTHER]
    edges = np.intersect1d(_edges(base.steps), _edges(ran.steps))
    steps = [_between(log.steps, edges) for log in both]
    common_steps = (steps[0][:, 1] == np.diff(edges)) & (steps[1][:, 1] == np.diff(edges))
    steps = [each[common_steps] for each in steps]
    have_common = len(steps[0]) > 0
    paired = have_common and not others
    if not paired:
        steps = [log.steps for log in both]
    for log, each in zip(both, steps, strict=True):
        if len(each) < 2:
            raise ValueError(f"{log.name} has {len(each)} steps to compare; give longer logs, or a smaller --skip")
        of_step.append(each[:, 1:4].sum(axis=0))
        if not of_step[-1][2]:
            raise ValueError(
                f"{log.name} trained no token in {len(each)} steps: all were skipped; give a later part of it"
            )
    rates = [float(t / s / log.gpus) for log, (_, s, t) in zip(both, of_step, strict=True)]
    value = rates[1] / rates[0]
    error = value * _error(steps, paired)
    rows: Rows = [
        ("", "BASE", "RUN"),
        ("tokens per second and GPU", *(f"{rate:,.1f}" for rate in rates)),
        ("time of a step, ms", *(f"{1e3 * s / n:,.1f}" for n, s, _ in of_step)),
        ("tokens of a step", *(f"{t / n:,.0f}" for n, _, t in of_step)),
        ("steps", *(f"{n:,.0f}" for n, _, _ in of_step)),
        ("GPUs", *(f"{log.gpus:,}" for log in both)),
    ]
    ratio = f"{value:.3f} \N{PLUS-MINUS SIGN} {error:.3f} times BASE's tokens per second and GPU"
    verdict = f"RUN is {'faster' if value > 1 else 'slower'}: {ratio}."
    if abs(value - 1) <= max(2 * error, 1e-9):
        verdict = f"Within noise: RUN has {ratio}."
    said = [
        f"{title}'s loss is not finite {log.diverged}." for title, log in (("BASE", base), ("RUN", ran)) if log.diverged
    ]
    said.append(verdict)
    numbers = dict[str, Any](ratio=value, error=error, paired=paired, differ=differ)
    if differ:
        shown = [f"{name} {short(a)} and {short(b)}" for name, (a, b) in list(differ.items())[:MOST_DIFFERENCES]]
        more = len(differ) - len(shown)
        said.append(f"The runs differ also in: {', '.join(shown)}{f', and {more} more (--json)' * (more > 0)}.")
    if paired:
        said.append(f"Both have {of_step[0][0]:,.0f} of these steps, up to {steps[0][-1, 0]:,.0f}: compared in pairs.")
        said.append(_losses(steps, numbers))
    elif have_common:
        said.append(
            f"Not compared in pairs, and no losses: steps train another model or data ({', '.join(others[:4])})."
        )
    else:
        said.append("They have no step in common: documents differ, and losses do not compare.")
    for title, log, each in zip(("BASE", "RUN"), both, steps, strict=True):
        alone = int(log.steps[:, 1].sum() - each[:, 1].sum())
        skipped = int((each[:, 1] - each[:, 5]).sum())
        remarks = [*log.remarks]
        remarks += [f"{skipped:,} of its steps were skipped: they took time and trained no token."] * (skipped > 0)
        remarks += [f"{alone:,} of its steps are left out: the other log does not have them."] * (alone > 0)
        said += [f"{title}: {each}" for each in remarks]
    if base.padded:
        said.append("Tokens are of whole windows: padding counts.")
    if base.whole != ran.whole:
        said.append("Only Megatron's times include the work before the forward pass; give its log of both to be exact.")
    numbers["steps"] = [[[x if math.isfinite(x) else None for x in row] for row in each.tolist()] for each in steps]
    return Comparison(rows, said, numbers)


def _losses(steps: Sequence[np.ndarray], numbers: dict[str, Any]) -> str:
    """Return whether losses show the same training, and set their largest difference."""
    with np.errstate(invalid="ignore", divide="ignore"):  # losses may be infinite, or 0, and of no step that trained
        a, b = (each[:, 4] / each[:, 5] for each in steps)
        off = np.where(a == b, 0, np.abs(b - a) / np.where(a == 0, np.abs(b), np.abs(a)))
    known = np.flatnonzero(np.isfinite(off))
    if not len(known):
        return "No step has a finite loss in both logs: losses are not compared."
    rest = len(off) - len(known)
    left = f" Not compared: {rest:,} that were skipped, or have no finite loss in both." if rest else ""
    most = known[off[known].argmax()]
    numbers["loss_difference"] = float(off[most])
    if off[most] <= SAME_LOSS:
        where = f"{len(known):,} of them" if rest else "each of them"
        return f"Losses are equal to {off[most]:.1e} at {where}.{left}"
    first = known[(off[known] > SAME_LOSS).argmax()]
    number = int(steps[0][first, 0])
    numbers["losses_part_at"] = number
    return (
        f"Losses diverge at step {number:,}: {a[first]:.6g} and {b[first]:.6g}, by {off[first]:.2%}; at most by "
        f"{off[most]:.2%}, at step {int(steps[0][most, 0]):,}.{left}"
    )


def _error(steps: Sequence[np.ndarray], paired: bool) -> float:
    """Return the standard error of the ratio of tokens per second, over the ratio.

    With seconds a and b and tokens A and B of a block, over their means, it is the standard error of the mean of
    (a - A) - (b - B); of runs without a common step the errors of a - A and b - B, added in squares.
    """
    off = []
    for each in steps:
        blocks = [block[:, 2:4].sum(axis=0) for block in np.array_split(each, min(len(each), BLOCKS))]
        seconds, tokens = (np.array(blocks) / np.mean(blocks, axis=0)).T
        off.append(seconds - tokens)
    every = [off[0] - off[1]] if paired else off
    return math.hypot(*(float(np.std(each, ddof=1)) / math.sqrt(len(each)) for each in every))


def _edges(steps: np.ndarray) -> np.ndarray:
    return np.union1d(steps[:, 0], steps[:, 0] - steps[:, 1])


def _between(steps: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Sum the steps between edges that follow one another; float64 [edges - 1, 6]."""
    parts = np.split(steps, np.searchsorted(steps[:, 0], edges, side="right"))[1:-1]
    ends = edges[1:, None]
    return np.hstack((ends, np.array([part[:, 1:].sum(axis=0) for part in parts]).reshape(-1, 5)))


def predicted(name: str, skip: int) -> Comparison:
    """Compare a `--wlb-log` file with the run's predictions.

    Raises ValueError where it predicted nothing, or by the profile of another device.
    """
    steps = [line for start in read_step_log(name) for line in start[skip:]]
    told = [line for line in steps if line.predicted_ms is not None]
    remedy = "give the run --wlb-profile with the output of `megatron-wlb profile`, or give BASE and RUN"
    if len(told) < 2:
        raise ValueError(f"{name} has {len(told)} predicted steps after --skip {skip}; {remedy}")
    profile, device = told[0].job.profile, told[0].device
    if not same_device(profile.device, device):
        raise ValueError(
            f"{name} ran on {device or 'another device'}, and profile {profile.name} is of {profile.device}; {remedy}"
        )
    measured, expected = (np.array([getattr(line, each) for line in told]) for each in ("step_ms", "predicted_ms"))
    median, p90 = relative_error(expected, measured)
    varies = min(np.ptp(expected), np.ptp(measured)) > 0
    correlation = float(np.corrcoef(expected, measured)[0, 1]) if varies else math.nan
    rows: Rows = [
        ("", "measured", "predicted"),
        ("time of a step, ms", *(f"{each.mean():,.2f}" for each in (measured, expected))),
    ]
    for share in TIME_SHARES:
        rows.append((f"{share}, % of a step", *(_mean(told, how, share) for how in ("measured", "predicted"))))
    verdict = f"Predicted times of a step are off by {median:.1%}, a tenth of them by over {p90:.1%}"
    verdict += f"; their correlation is {correlation:.3f}." if varies else "."
    of = f"{len(told):,} steps on {device or 'an unknown device'}; profile {profile.name}."
    numbers = {"error_median": median, "error_p90": p90, "correlation": correlation if varies else None}
    lines = {"steps": [[line.step, line.step_ms, line.predicted_ms] for line in told]}
    return Comparison(rows, [verdict, of], numbers | lines)


def _mean(steps: Sequence[Line], how: str, share: str) -> str:
    found = [value for line in steps if (value := (getattr(line, how) or {}).get(share)) is not None]
    return f"{100 * np.mean(found) + 0:.1f}" if found else "-"
