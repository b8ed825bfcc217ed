"""The result of a trial: numbers, tables and sentences."""

import argparse
import contextlib
import datetime
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from megatron_wlb import __version__
from megatron_wlb.cli import compare, run_log
from megatron_wlb.cli.analyze.report import OTHER_SIMULATED, Steps, measure, steps_of
from megatron_wlb.cli.analyze.setup import Setup
from megatron_wlb.cli.common import Rows
from megatron_wlb.cli.job import run_of
from megatron_wlb.cli.launch import text_of
from megatron_wlb.cli.trial.command import Plan, hidden, shown
from megatron_wlb.cli.trial.turns import SIDES, Turn
from megatron_wlb.hardware.profile import gpu_of
from megatron_wlb.settings import printable

FORMAT = "megatron-wlb-trial"
VERSION = 1
CHANGES = tuple(f"> wlb{words}" for words in (" is on: ", ": differs: ", ": sets ", ": without "))
"""Beginnings of a run's lines that name the changes of --wlb."""


class Report(NamedTuple):
    """Everything that is shown."""

    tone: str
    """"gain", "close" or "loss"."""
    words: list[str]
    """Sentences, the verdict first."""
    tables: list[Rows]
    """The first row of each has its titles."""
    command: str
    entries: dict[str, Any]
    """The numbers, as JSON types."""
    status: int
    """0, or 1 if there is nothing to compare."""


class _Pair(NamedTuple):
    turns: tuple[Turn, Turn]
    ratio: float
    error: float
    loss_difference: float | None


class _Speed(NamedTuple):
    """Tokens per second with --wlb over those without it."""

    ratio: float
    error: float
    """The larger of the standard errors below."""
    error_by_turns: float | None
    """Over pairs; None of one pair."""
    error_within_turns: float
    """Within pairs."""


def reported(args: argparse.Namespace, plan: Plan, ran: Sequence[Turn]) -> Report:
    """Compare the turns of both sides, in pairs by their order."""
    sides = [[turn for turn in ran if turn.side == side and not turn.crash] for side in (0, 1)]
    said = [f"Turn {turn.number}, {SIDES[turn.side]} --wlb, crashed: {turn.crash}" for turn in ran if turn.crash]
    last = _last(plan)
    device, versions = (last.device, last.versions) if last else ("", {})
    pairs: list[_Pair] = []
    for turns in zip(*sides, strict=False):
        with _told(said, f"Turns {turns[0].number} and {turns[1].number} do not compare"):
            numbers = _compared(*turns)
            pairs.append(_Pair(turns, numbers["ratio"], numbers["error"], numbers.get("loss_difference")))
    entries: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "date": datetime.date.today().isoformat(),
        "release": __version__,
        "device": device,
        "versions": versions,
        "gpus": next((turn.run.gpus for turn in ran if turn.run is not None), None),
        "first": plan.first,
        "steps": plan.steps,
        "skip": plan.skip,
        "turns": [_entry(turn) for turn in ran],
        "pairs": [each._asdict() | {"turns": [turn.number for turn in each.turns]} for each in pairs],
    }
    tables: list[Rows] = []
    if pairs:
        speed = _speed(pairs)
        entries |= speed._asdict()
        where = f"{entries['gpus']} x {device or 'an unknown device'}"
        tone, verdict = _verdict(plan, speed, len(pairs), where)
        tables.append(_table(sides, pairs, speed))
        fewer = _fewer(sides[0][-1], last, entries)
        said = [_digests(sides, entries), _losses(sides[0], pairs, entries), *fewer, *said]
        with _told(said, "No speed-up is predicted"):
            ratio = entries["predicted_ratio"] = predicted_ratio(args, device)
            said.append(f"Predicted for {args.gpu or 'the profile'} by megatron-wlb analyze: {ratio:.3f} times.")
        with _told(said, "Times of steps are not compared with predictions"):
            rows, words, entries["times"] = compare.predicted(str(plan.log), plan.skip)
            tables.append([("with --wlb", *rows[0][1:]), *rows[1:]])
            said.append(" ".join(words))
    else:
        none = " and ".join(f"{SIDES[side]} --wlb" for side in (0, 1) if not sides[side])
        tone, verdict = "loss", f"Nothing to compare: no turn {none or 'of both sides'} is left."
    said += [*_changes(sides[1]), *_facts(plan, entries)]
    words, command = plan.words[1], " ".join(plan.words[1])
    if not args.with_paths:
        said, command = [hidden(each, words) for each in said], shown(words)
    said = [*map(printable, (verdict, *said))]
    return Report(tone, said, tables, command, entries | {"words": said, "command": command}, int(not pairs))


@contextlib.contextmanager
def _told(said: list[str], what: str) -> Iterator[None]:
    """Say why something is missing, of which the rest of a report does not depend."""
    try:
        yield
    except ValueError as error:
        said.append(f"{what}: {error}.")


def _compared(one: Turn, other: Turn) -> dict[str, Any]:
    assert one.run is not None and other.run is not None
    return compare.compared(one.run, other.run).numbers


def _rates(turns: Sequence[Turn]) -> tuple[list[float], list[float]]:
    """Return tokens per second and GPU, and milliseconds per step, by turn."""
    sums = [(turn.run.steps[:, 1:4].sum(axis=0), turn.run.gpus) for turn in turns if turn.run is not None]
    return [t / s / gpus for (_, s, t), gpus in sums], [1e3 * s / n for (n, s, _), _ in sums]


def _entry(turn: Turn) -> dict[str, Any]:
    numbers = {"turn": turn.number, "wlb": bool(turn.side), "seconds": turn.seconds, "crashed": bool(turn.crash)}
    if turn.run is None:
        return numbers
    (rate,), (step_ms,) = _rates([turn])
    steps = [[int(row[0]), 1e3 * row[2] / row[1], row[3]] for row in turn.run.steps]
    rates = {"tokens_per_second_per_gpu": rate, "step_ms": step_ms}
    return numbers | rates | {"peak_gib": turn.peak_gib, "steps": steps}


def _speed(pairs: Sequence[_Pair]) -> _Speed:
    ratios = np.array([each.ratio for each in pairs])
    within = math.hypot(*(each.error for each in pairs)) / len(pairs)
    by_turns = float(np.std(ratios, ddof=1)) / math.sqrt(len(pairs)) if len(pairs) > 1 else None
    return _Speed(float(ratios.mean()), max(within, by_turns or 0.0), by_turns, within)


def _verdict(plan: Plan, speed: _Speed, pairs: int, where: str) -> tuple[str, str]:
    """Return the tone and the verdict."""
    certain = abs(speed.ratio - 1) > max(2 * speed.error, 1e-9)
    first = f"--wlb is {'faster' if speed.ratio > 1 else 'slower'}" if certain else "Within noise"
    data = " on mock data" if plan.mock else ""
    return ("gain" if speed.ratio > 1 else "loss") if certain else "close", (
        f"{first}: {speed.ratio:.3f} \N{PLUS-MINUS SIGN} {speed.error:.3f} times as many tokens per second as without "
        f"it, measured{data} in {pairs} pair{'s' * (pairs > 1)} of turns ({where})."
    )


def _table(sides: Sequence[Sequence[Turn]], pairs: Sequence[_Pair], speed: _Speed) -> Rows:
    """Return means of both sides and their turns."""
    rates, times = zip(*map(_rates, sides), strict=True)
    peaks = [max((turn.peak_gib or 0.0 for turn in turns), default=0.0) for turns in sides]
    rows: Rows = [("", "without --wlb", "with --wlb", "ratio")]
    means = (f"{np.mean(each):,.1f}" for each in rates)
    rows.append(("tokens per second and GPU", *means, f"{speed.ratio:.3f}"))
    for each in pairs:
        of_turns = (f"{_rates([turn])[0][0]:,.1f}" for turn in each.turns)
        numbers = " and ".join(str(turn.number) for turn in each.turns)
        rows.append((f"  turns {numbers}", *of_turns, f"{each.ratio:.3f} \N{PLUS-MINUS SIGN} {each.error:.3f}"))
    by_turns = speed.error_by_turns
    rows.append(("  standard error over pairs", "", "", "-" if by_turns is None else f"{by_turns:.3f}"))
    rows.append(("  standard error within pairs", "", "", f"{speed.error_within_turns:.3f}"))
    rows.append(("time of a step, ms", *(f"{np.mean(each):,.1f}" for each in times), ""))
    if all(peaks):
        rows.append(("most memory of a rank, GiB", *(f"{peak:.2f}" for peak in peaks), f"{peaks[1] / peaks[0]:.3f}"))
    return rows


def _digests(sides: Sequence[Sequence[Turn]], entries: dict[str, Any]) -> str:
    """Return at how many steps all turns have one digest."""
    every = [turn.digests for turns in sides for turn in turns]
    steps = sorted(set.intersection(*(set(each) for each in every)))
    other = [step for step in steps if len({each[step] for each in every}) > 1]
    entries["digests"] = {"steps": len(steps), "equal": len(steps) - len(other), "first_other": next(iter(other), None)}
    if not steps:
        return "Digests are not compared: no step has one in all turns."
    if other:
        return (
            f"Digests differ at {len(other):,} of {len(steps):,} steps, first at step {other[0]:,}: there the turns "
            "did not train the same."
        )
    return (
        f"Digests are equal at {len(steps):,} of {len(steps):,} steps, in all turns: the same tokens, positions, "
        "visible keys, targets and weights."
    )


def _losses(without: Sequence[Turn], pairs: Sequence[_Pair], entries: dict[str, Any]) -> str:
    """Return by how much losses differ at most, and by how much without --wlb from turn to turn."""
    own: list[float | None] = []
    for turns in itertools.combinations(without, 2):
        with contextlib.suppress(ValueError):
            own.append(_compared(*turns).get("loss_difference"))
    entries["loss_difference"] = max((x.loss_difference for x in pairs if x.loss_difference is not None), default=None)
    entries["loss_difference_without"] = max((each for each in own if each is not None), default=None)
    with_wlb, alone = entries["loss_difference"], entries["loss_difference_without"]
    if with_wlb is None:
        return "Losses are not compared: no step has a finite one on both sides."
    beside = "" if alone is None else f"; between turns without it, by up to {alone:.1e}"
    return f"Losses with --wlb and without differ by up to {with_wlb:.1e} of their value{beside}."


def predicted_ratio(args: argparse.Namespace, device: str) -> float:
    """Return the speed-up that is predicted over the run as it is. Raises ValueError without a profile of the device.

    It is the prediction of `analyze`, of the first steps alone.
    """
    args.gpu = gpu_of(device)
    if args.gpu is None and args.wlb_profile is None:
        raise ValueError(
            f"there is no profile of {device or 'the device'}; give the run --wlb-profile with the output of "
            "`megatron-wlb profile` there"
        )
    setup = Setup(run_of(args))
    count = min(OTHER_SIMULATED, steps_of(setup.job).simulated)
    run, ours = (measure(scheme, Steps(count, count)) for scheme in (setup.of_run, setup.with_wlb(setup.job)))
    return run.us_per_token / ours.us_per_token


def _last(plan: Plan) -> Any:
    """Return the last line of the file of --wlb-log; None if no turn has written one."""
    with contextlib.suppress(ValueError):
        return run_log.read_step_log(str(plan.log))[-1][-1]
    return None


def _fewer(turn: Turn, last: Any, entries: dict[str, Any]) -> Iterator[str]:
    """Yield that steps with --wlb have fewer micro-batches, which another --micro-batch-size brings without it."""
    assert turn.run is not None
    windows, size = (turn.run.arguments.get(name) for name in ("global_batch_size", "micro_batch_size"))
    before, count = windows // size if windows and size else None, last.num_micro_batches if last else None
    entries["micro_batches"] = [before, count]
    if before and count and count < before:
        yield (
            f"A step has {before:,} micro-batches without --wlb and {count:,} with it, over all data-parallel "
            "ranks. A larger --micro-batch-size may bring a part of the difference without --wlb: try that, too."
        )


def _changes(turns: Sequence[Turn]) -> Iterator[str]:
    """Yield the changes of --wlb, as a run with it prints them."""
    for line in dict.fromkeys(text_of(str(turns[-1].log)).splitlines() if turns else ()):
        if line.startswith(CHANGES):
            text = line.partition(": ")[2]
            yield f"{text[0].upper()}{text[1:]}."


def _facts(plan: Plan, entries: dict[str, Any]) -> Iterator[str]:
    if plan.first:
        yield f"All turns begin from the checkpoint of iteration {plan.first:,}."
    else:
        yield "All turns begin with the same weights: loaded, or made by the seed and the layout, which are the same."
    yield (
        f"A turn trains {plan.steps} steps; the first {plan.skip} are not counted. Errors are standard errors: over "
        "pairs they cover drift from turn to turn, and not other nodes or another day."
    )
    if entries["device"]:
        names = ", ".join(f"{name} {version}" for name, version in entries["versions"].items())
        yield f"{entries['gpus']} x {entries['device']}; {names}."
