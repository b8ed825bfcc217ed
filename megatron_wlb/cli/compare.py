"""`megatron-wlb compare`: compare the speed and the losses of two runs, or of a run and its predictions.

    megatron-wlb compare base.log wlb.log
    megatron-wlb compare tensorboard-base/ run.jsonl
    megatron-wlb compare run.jsonl

BASE and RUN are what Megatron printed, the file that --wlb-log named, or a folder of TensorBoard with
--log-timers-to-tensorboard. Steps that both have are compared by their number, without the first ones of every start.
The ratio is of tokens a second and GPU. Its error is one standard error over up to 20 blocks of consecutive steps: of
the ratio of means, linearised. It covers the noise of both runs, not another day or other nodes. A log of --wlb-log
alone is compared with what the run itself predicted.
"""

import argparse
import math
import os
import re
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np

from megatron_wlb import files
from megatron_wlb.cli import common, launch
from megatron_wlb.cli.common import integer, write_json, writer
from megatron_wlb.cli.profile import relative_error
from megatron_wlb.describe.arguments import MegatronArguments
from megatron_wlb.hardware.profile import alike
from megatron_wlb.simulate.step import TIME_SHARES

FORMAT = "megatron-wlb-comparison"
VERSION = 4
USAGE = "[BASE] RUN [--skip K] [--json FILE]"
MOST_OF_A_STEP = 1 << 26
"""Most bytes of a step in a log."""
BLOCKS = 20
"""Most blocks of consecutive steps; neighbours are alike, so single steps would understate the error."""
SAME_LOSS = 1e-3
"""Relative difference up to which losses are of one step: bf16 rounds otherwise in other micro-batches."""
_REMEDY = "give what Megatron printed, the file that --wlb-log named, or a folder of TensorBoard"
_ITERATION = re.compile(r" iteration +(\d+)/ *\d+ \|(.*)")
_TIME, _SAMPLES, _LOSS = "elapsed time per iteration (ms)", "global batch size", "lm loss"


class Log(NamedTuple):
    """The steps of a run."""

    name: str
    gpus: int
    steps: np.ndarray
    """Float64 [n, 5]: number of the last step, how many steps, their seconds, tokens and sum of losses (nan)."""
    padded: bool = False
    """Its tokens are of whole windows, whatever they hold."""
    whole: bool = True
    """Its times are of iterations, not from the forward pass on."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("logs", nargs="+", metavar="[BASE] RUN", help="logs of one or two runs")
    parser.add_argument(
        "--skip",
        type=integer(2, 1 << 20),
        default=10,
        metavar="K",
        help="leave out the first K steps of every start, which warm up; at least 2, default: 10",
    )
    parser.add_argument("--json", metavar="FILE", help="the numbers, and both runs' steps; - for standard output")


def run(args: argparse.Namespace) -> None:
    if len(args.logs) > 2:
        raise ValueError(f"{len(args.logs)} logs; give BASE and RUN, or RUN alone")
    console = common.console(args.json, width=120, markup=False)
    if len(args.logs) == 1:
        rows, said, numbers = predicted(args.logs[0], args.skip)
    else:
        rows, said, numbers = compared(*(read(name, args.skip) for name in args.logs))
    said.append(f"Left out: the first {args.skip} steps of every start (--skip), or of a folder of TensorBoard.")
    said = [*map(files.printable, said)]
    with writer(args.json, "--json") as out:
        write_json(out, {"format": FORMAT, "version": VERSION, "words": said} | numbers)
    console.print(said[0], style="bold", soft_wrap=True)
    console.print(common.table(rows[0], rows[1:]))
    for sentence in said[1:]:
        console.print(f"- {sentence}", soft_wrap=True)


def compared(base: Log, ran: Log) -> tuple[list[tuple[str, ...]], list[str], dict[str, Any]]:
    """Return a table, sentences of which the first is the verdict, and the numbers. Raises ValueError."""
    if base.padded != ran.padded:
        padded, other = (base, ran) if base.padded else (ran, base)
        raise ValueError(
            f"{padded.name} does not say how many tokens its steps trained, as {other.name} does; give what Megatron "
            "printed of both, or --wlb-log of both"
        )
    both, of_step = (base, ran), []
    edges = np.intersect1d(_edges(base.steps), _edges(ran.steps))
    steps = [_between(log.steps, edges) for log in both]
    common_steps = (steps[0][:, 1] == np.diff(edges)) & (steps[1][:, 1] == np.diff(edges))
    steps = [each[common_steps] for each in steps]
    paired = len(steps[0]) > 0
    if not paired:
        steps = [log.steps for log in both]
    for log, each in zip(both, steps, strict=True):
        if len(each) < 2:
            raise ValueError(f"{log.name} has {len(each)} steps to compare; give longer logs, or a smaller --skip")
        of_step.append(each[:, 1:4].sum(axis=0))
    rates = [float(t / s / log.gpus) for log, (_, s, t) in zip(both, of_step, strict=True)]
    value = rates[1] / rates[0]
    error = value * _error(steps, paired)
    rows: list[tuple[str, ...]] = [
        ("", "BASE", "RUN"),
        ("tokens a second and GPU", *(f"{rate:,.1f}" for rate in rates)),
        ("time of a step, ms", *(f"{1e3 * s / n:,.1f}" for n, s, _ in of_step)),
        ("tokens of a step", *(f"{t / n:,.0f}" for n, _, t in of_step)),
        ("steps", *(f"{n:,.0f}" for n, _, _ in of_step)),
        ("GPUs", *(f"{log.gpus:,}" for log in both)),
    ]
    ratio = f"{value:.3f} \N{PLUS-MINUS SIGN} {error:.3f} times BASE's tokens a second and GPU"
    verdict = f"RUN is {'faster' if value > 1 else 'slower'}: {ratio}."
    if abs(value - 1) <= 2 * error:
        verdict = f"No difference is certain: RUN has {ratio}."
    said, numbers = [verdict], dict[str, Any](ratio=value, error=error, paired=paired)
    if paired:
        said.append(f"Both have {of_step[0][0]:,.0f} of these steps, up to {steps[0][-1, 0]:,.0f}: compared in pairs.")
        said.append(_losses(steps, numbers))
    else:
        said.append("They have no step in common: documents differ, and losses do not compare.")
    if base.padded:
        said.append("Tokens are of whole windows: padding counts.")
    if base.whole != ran.whole:
        said.append("Only Megatron's times have what comes before the forward pass; give its log of both to be exact.")
    numbers["steps"] = [[[x if math.isfinite(x) else None for x in row] for row in each.tolist()] for each in steps]
    return rows, said, numbers


def _losses(steps: Sequence[np.ndarray], numbers: dict[str, Any]) -> str:
    """Return whether losses are those of the same training, and set what differs most."""
    a, b = (each[:, 4] / each[:, 1] for each in steps)
    with np.errstate(invalid="ignore", divide="ignore"):  # losses may be infinite, or 0
        off = np.abs(b / a - 1)
    known = np.flatnonzero(np.isfinite(off))
    if not len(known):
        return "No step has a loss in both logs."
    most = known[off[known].argmax()]
    numbers["loss_difference"] = float(off[most])
    if off[most] <= SAME_LOSS:
        where = "each of them" if len(known) == len(off) else f"{len(known):,} of them; at the others a log has none"
        return f"Losses are equal to {off[most]:.1e} at {where}."
    first = known[(off[known] > SAME_LOSS).argmax()]
    number = int(steps[0][first, 0])
    numbers["losses_part_at"] = number
    return (
        f"Losses part at step {number:,}: {a[first]:.6g} and {b[first]:.6g}, by {off[first]:.2%}; at most by "
        f"{off[most]:.2%}, at step {int(steps[0][most, 0]):,}."
    )


def _error(steps: Sequence[np.ndarray], paired: bool) -> float:
    """Return the standard error of the ratio of tokens a second, over that ratio.

    With seconds a and b and tokens A and B of a block, over their means, it is the standard error of the mean of
    (a - A) - (b - B); of runs without a common step those of a - A and b - B, added in squares.
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
    """Sum the steps between edges that follow one another; float64 [edges - 1, 5]."""
    parts = np.split(steps, np.searchsorted(steps[:, 0], edges, side="right"))[1:-1]
    ends = edges[1:, None]
    return np.hstack((ends, np.array([part[:, 1:].sum(axis=0) for part in parts]).reshape(-1, 4)))


def read(name: str, skip: int) -> Log:
    """Read a log of any kind, without the first `skip` steps of every start. Raises ValueError for others."""
    if os.path.isdir(name) or "tfevents" in os.path.basename(name):
        return _of_tensorboard(name, skip)
    with files.opened(name, _REMEDY) as file:
        first = file.read(64).lstrip()
    return _of_step_log(name, skip) if first[:1] == b"{" else _of_text(name, skip)


def _log(name: str, gpus: int, starts: Sequence[Sequence[tuple[float, ...]]], skip: int, **more: Any) -> Log:
    """Make a log of starts, each a list of rows of `Log.steps`; of steps that ran twice, the later counts."""
    warm: dict[float, tuple[float, ...]] = {}
    for start in starts:
        first = start[0][0] - start[0][1] + skip if start else 0
        warm |= {row[0]: row for row in start if row[0] - row[1] >= first}
    return Log(name, gpus, np.array([warm[number] for number in sorted(warm)]).reshape(-1, 5), **more)


def _of_text(name: str, skip: int) -> Log:
    """Read the lines of `training_log`, each the mean of up to `log_interval` steps since the one before.

    The second of a start holds its first step, too, and is left out as one of its first steps.
    """
    text = launch.text_of(name, "give its arguments and the lines of its iterations alone")
    if launch.END_OF_ARGUMENTS not in text:
        raise ValueError(f"{name} has no arguments as Megatron prints them, nor steps of --wlb-log; {_REMEDY}")
    for what in ("world_size", "seq_length", "log_interval", "sft", "wlb_documents"):
        if len(found := set(re.findall(rf"\s{what} \.+ (\S+)", text))) > 1:
            raise ValueError(
                f"{name} is of runs with {what} {' and '.join(sorted(found))}; give each as a file of its own"
            )
    stated = launch.arguments_of(text, name).stated
    arguments, interval = MegatronArguments.of(stated), stated.get("log_interval")
    if not arguments.seq_length or not arguments.world_size or not isinstance(interval, int):
        raise ValueError(f"{name}: its arguments lack seq_length, world_size or log_interval; {_REMEDY}")
    starts: list[list[tuple[float, ...]]] = []
    for begun in text.split(launch.END_OF_ARGUMENTS):
        starts.append([])
        before = 1 << 32
        for number, fields in _ITERATION.findall(begun):
            last = int(number[:9])
            count, before = min(last - before, interval) if before < last else 1, last  # a line may be lost
            # From behind: what stands first is the iteration's, and what follows may be of another, or of a rank.
            each = (field.partition(":") for field in reversed(fields.split("|")))
            values = {key.strip(): value for key, _, value in each}
            try:
                ms, samples, loss = float(values[_TIME]), int(values[_SAMPLES]), float(values.get(_LOSS, "nan"))
            except (KeyError, ValueError):
                continue  # a line that another process broke
            if 0 < ms < 1e12 and 0 < samples < 1 << 32 and last:
                row = (ms / 1e3, samples * arguments.seq_length, loss)
                starts[-1].append((last, count, *(count * each for each in row)))
    if not any(starts):
        raise ValueError(f"{name} has no line of an iteration; {_REMEDY}")
    padded = bool(stated.get("sft")) or stated.get("wlb_documents") == "whole"
    return _log(name, arguments.world_size, starts, skip, padded=padded)


class _Parallel(msgspec.Struct):
    tp: Annotated[int, msgspec.Meta(ge=1)]
    cp: Annotated[int, msgspec.Meta(ge=1)]
    pp: Annotated[int, msgspec.Meta(ge=1)]
    dp: Annotated[int, msgspec.Meta(ge=1)]


class _Profile(msgspec.Struct):
    name: str
    device: str | None = None


class _Job(msgspec.Struct):
    parallel: _Parallel
    profile: _Profile


class _Line(msgspec.Struct):
    """A step as a run logged it, as far as it is read."""

    step: Annotated[int, msgspec.Meta(ge=1)]
    step_ms: Annotated[float, msgspec.Meta(gt=0, lt=1e12)]
    tokens: Annotated[int, msgspec.Meta(ge=1)]
    job: _Job
    loss: float | None = None
    device: str = ""
    predicted_ms: Annotated[float, msgspec.Meta(gt=0, lt=1e12)] | None = None
    predicted: dict[str, float] | None = None
    measured: dict[str, float | None] | None = None


def read_step_log(path: str) -> list[list[_Line]]:
    """Read a `--wlb-log` file: the steps of every start. Raises ValueError, naming the line."""
    starts: list[list[_Line]] = []
    remedy = "give the file that --wlb-log named"
    with files.opened(path, remedy) as file:
        for number, text in enumerate(iter(partial(file.readline, MOST_OF_A_STEP), b""), start=1):
            if len(text) == MOST_OF_A_STEP:
                raise ValueError(f"{path}, line {number} has over {MOST_OF_A_STEP >> 20} MiB, the limit; {remedy}")
            try:
                line = msgspec.json.decode(text, type=_Line)
            except (ValueError, msgspec.MsgspecError, RecursionError) as error:
                raise ValueError(f"{path}, line {number}: {error or 'nested too deeply'}; {remedy}") from error
            if not starts or line.step != starts[-1][-1].step + 1:
                starts.append([])
            starts[-1].append(line)
    if starts and any(_gpus(line) != _gpus(starts[0][0]) for start in starts for line in start):
        raise ValueError(f"{path} is of runs on other numbers of GPUs; give the lines of one as a file of their own")
    if not starts:
        raise ValueError(f"{path} has no step; {remedy}")
    return starts


def _gpus(line: _Line) -> int:
    each = line.job.parallel
    return each.tp * each.cp * each.pp * each.dp


def _of_step_log(name: str, skip: int) -> Log:
    starts = read_step_log(name)

    def row(line: _Line) -> tuple[float, ...]:
        loss = math.nan if line.loss is None else line.loss
        return line.step, 1, line.step_ms / 1e3, line.tokens, loss

    return _log(name, _gpus(starts[0][0]), [[*map(row, start)] for start in starts], skip, whole=False)


def _of_tensorboard(name: str, skip: int) -> Log:
    """Read what Megatron and `--wlb` write for TensorBoard."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(name, {"scalars": 0, "tensors": 0}).Reload()
    scalars, tensors = (events.Tags()[kind] for kind in ("scalars", "tensors"))

    def values(tag: str) -> dict[int, float]:
        return {event.step: event.value for event in events.Scalars(tag)} if tag in scalars else {}

    def argument(what: str) -> str:
        tag = f"{what}/text_summary"
        return events.Tensors(tag)[-1].tensor_proto.string_val[0].decode() if tag in tensors else ""

    def number(what: str) -> int:
        if not (text := argument(what)).isdecimal():
            raise ValueError(f"{name} has no {what} of Megatron's arguments; {_REMEDY}")
        return int(text)

    losses, ours = values("lm loss"), values("wlb/step_ms")
    trained, spent = values("wlb/tokens"), values("iteration-time")
    rows: list[tuple[float, ...]] = []
    if ours:
        rows = [(n, 1, ms / 1e3, trained[n], losses.get(n, math.nan)) for n, ms in ours.items() if n in trained]
    elif spent:
        tokens, numbers = number("global_batch_size") * number("seq_length"), [*spent]
        before = 2 * numbers[0] - numbers[1] if numbers[1:] else 0  # it may begin with a checkpoint
        for n, seconds in spent.items():
            count, own = n - before, [losses.get(i, math.nan) for i in range(before + 1, n + 1)]
            rows.append((n, count, count * seconds, count * tokens, sum(own)))
            before = n
    if not rows:
        raise ValueError(f"{name} has no times of steps; add --log-timers-to-tensorboard to the run, or {_REMEDY}")
    padded = not ours and (argument("sft") == "True" or argument("wlb_documents") == "whole")
    return _log(name, number("world_size"), [rows], skip, padded=padded, whole=not ours)


def predicted(name: str, skip: int) -> tuple[list[tuple[str, ...]], list[str], dict[str, Any]]:
    """Compare a `--wlb-log` file with what the run predicted.

    Raises ValueError where it predicted nothing, or by the profile of another device.
    """
    steps = [line for start in read_step_log(name) for line in start[skip:]]
    told = [line for line in steps if line.predicted_ms is not None]
    remedy = "give the run --wlb-profile with what `megatron-wlb profile` measured, or give BASE and RUN"
    if len(told) < 2:
        raise ValueError(f"{name} has {len(told)} predicted steps after --skip {skip}; {remedy}")
    profile, device = told[0].job.profile, told[0].device
    if not alike(profile.device, device):
        raise ValueError(
            f"{name} ran on {device or 'another device'}, and profile {profile.name} is of {profile.device}; {remedy}"
        )
    measured, expected = (np.array([getattr(line, each) for line in told]) for each in ("step_ms", "predicted_ms"))
    median, p90 = relative_error(expected, measured)
    varies = min(np.ptp(expected), np.ptp(measured)) > 0
    correlation = float(np.corrcoef(expected, measured)[0, 1]) if varies else math.nan
    rows: list[tuple[str, ...]] = [
        ("", "measured", "predicted"),
        ("time of a step, ms", *(f"{each.mean():,.2f}" for each in (measured, expected))),
    ]
    for share in TIME_SHARES:
        rows.append((f"{share}, % of a step", *(_mean(told, how, share) for how in ("measured", "predicted"))))
    verdict = f"Predicted times of a step are off by {median:.1%}, a tenth of them by over {p90:.1%}"
    verdict += f"; their correlation is {correlation:.3f}." if varies else "."
    of = f"{len(told):,} steps on {device or 'an unknown device'}; profile {profile.name}."
    numbers = {"error_median": median, "error_p90": p90, "correlation": correlation if varies else None}
    return rows, [verdict, of], numbers | {"steps": [[line.step, line.step_ms, line.predicted_ms] for line in told]}


def _mean(steps: Sequence[_Line], how: str, share: str) -> str:
    found = [value for line in steps if (value := (getattr(line, how) or {}).get(share)) is not None]
    return f"{100 * np.mean(found) + 0:.1f}" if found else "-"
