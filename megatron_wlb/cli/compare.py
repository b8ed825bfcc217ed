"""`megatron-wlb compare`: compare predicted step times with a run's log.

    megatron-wlb compare run.jsonl

The log of a run (--wlb-log) describes its job. Its steps are placed and sharded as in the run, and simulated with the
run's profile or with --wlb-profile. `megatron-wlb profile` measures a better profile.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np

from megatron_wlb import files
from megatron_wlb.cli import common
from megatron_wlb.cli.common import Words, integer, progress, write_json, writer
from megatron_wlb.cli.profile import relative_error
from megatron_wlb.describe.make import job_from_json
from megatron_wlb.hardware.profile import DEFAULT_PROFILE, load_profile
from megatron_wlb.job import MAX_TOKENS, Job, differences
from megatron_wlb.plan.step import shard_step
from megatron_wlb.simulate.step import TIME_SHARES, shares, simulate_step

FORMAT = "megatron-wlb-comparison"
VERSION = 3
USAGE = "RUN.jsonl [--wlb-profile PROFILE] [--skip K] [--json FILE]"
MOST_OF_A_LINE = 1 << 26
"""Most bytes of a step in a log."""
MOST_STEPS = 500
"""Most steps that are simulated, evenly spread over the log: errors need no more, and a step can take a second."""


class LoggedStep(NamedTuple):
    """A step as a run logged it."""

    number: int
    measured_us: float
    lengths: list[np.ndarray]
    """Document lengths of every micro-batch."""
    ranks: np.ndarray | None
    """Micro-batches of every data-parallel rank, if packing dealt them."""
    job: Job
    shares: dict[str, float | None]
    """Shares of the time, by `TIME_SHARES`: {} if the run logged none, None for one that it could not measure."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("log", metavar="RUN.jsonl", help="the file that --wlb-log named")
    parser.add_argument(
        "--wlb-profile",
        metavar="PROFILE",
        help="predict by this profile, a shipped one or a JSON file; default: that of the run, and of one that counts "
        f"attended pairs (flops) {DEFAULT_PROFILE}",
    )
    parser.add_argument(
        "--skip",
        type=integer(0, 1 << 20),
        default=1,
        metavar="K",
        help="leave out the first K steps of every start of the run, which warm up; default: 1",
    )
    parser.add_argument("--json", metavar="FILE", help="both times of every step; - for standard output")


def run(args: argparse.Namespace, words: Words) -> None:
    console = common.console(args.json, width=120)
    notes: list[str] = []
    steps = _steps(args, notes)
    ran = steps[0].job
    profile = ran.profile if args.wlb_profile is None else load_profile(args.wlb_profile)
    if args.wlb_profile is None and profile.counts_pairs:
        notes.append(f"The run's profile counts attended pairs; times are predicted by profile {DEFAULT_PROFILE}.")
        profile = load_profile(DEFAULT_PROFILE)
    job = replace(ran, profile=profile)
    times, parts = [], []
    with progress(len(steps), args.json, "simulating") as advance, writer(args.json, "--json") as out:
        for step in steps:
            simulated = simulate_step(job, shard_step(ran, step.lengths, step.ranks))
            times.append(simulated.time)
            parts.append(shares(simulated))
            advance(1)
        found, both_ways = errors(times, [step.measured_us for step in steps]), in_words(steps, times, parts)
        both = [
            {"step": step.number, "measured_us": step.measured_us, "predicted_us": us}
            for step, us in zip(steps, times, strict=True)
        ]
        result = {"format": FORMAT, "version": VERSION, "job": job.to_json(), "errors": found}
        write_json(out, result | {"in_words": both_ways, "steps": both})
    console.print(_table(found, job.profile.name))
    console.print(_words_table(both_ways))
    for note in notes:
        print(f"- {note}", file=sys.stderr)


def _steps(args: argparse.Namespace, notes: list[str]) -> list[LoggedStep]:
    steps = warm(read_log(args.log), args.skip)
    if len(steps) < 2:
        raise ValueError(f"{args.log} has {len(steps)} steps after --skip {args.skip}; give the log of more steps")
    if len(steps) <= MOST_STEPS:
        return steps
    notes.append(f"{MOST_STEPS} of the {len(steps)} steps are simulated, evenly spread.")
    return [steps[i] for i in np.linspace(0, len(steps) - 1, MOST_STEPS).astype(int).tolist()]


class _Line(msgspec.Struct):
    step: Annotated[int, msgspec.Meta(ge=1)]
    step_ms: Annotated[float, msgspec.Meta(gt=0, lt=1e12)]
    lengths: list[list[Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]]]
    job: Any
    ranks: list[list[int]] | None = None
    measured: dict[str, float | None] | None = None


def read_log(path: str) -> list[LoggedStep]:
    """Read the steps of a `--wlb-log` file. Raises ValueError, naming the line."""
    steps: list[LoggedStep] = []
    remedy = "give the file that --wlb-log named"
    with files.opened(path, remedy) as file:
        for number, line in enumerate(iter(partial(file.readline, MOST_OF_A_LINE), b""), start=1):
            if len(line) == MOST_OF_A_LINE:
                raise ValueError(f"{path}, line {number} has over {MOST_OF_A_LINE >> 20} MiB, the limit; {remedy}")
            try:
                steps.append(_logged_step(line))
            except (ValueError, msgspec.MsgspecError, RecursionError) as error:
                raise ValueError(f"{path}, line {number}: {error or 'nested too deeply'}; {remedy}") from error
            if steps[-1].job != steps[0].job:
                changed = ", ".join(differences(steps[0].job.to_json(), steps[-1].job.to_json()))
                raise ValueError(
                    f"{path}, line {number}: the run goes on as another job ({changed}); give the lines before it, or "
                    "those from it on, as a file of their own"
                )
    return steps


def _logged_step(line: bytes) -> LoggedStep:
    entry = msgspec.json.decode(line, type=_Line)
    for i, lengths in enumerate(entry.lengths):
        if sum(lengths) > MAX_TOKENS:
            raise ValueError(f"micro-batch {i} holds {sum(lengths)} tokens; it must be at most {MAX_TOKENS}")
    micro_batches = [np.array(each, np.int64) for each in entry.lengths]
    ranks = None if entry.ranks is None else np.array(entry.ranks, np.int64)
    if ranks is not None and sorted(ranks.ravel().tolist()) != list(range(len(micro_batches))):
        raise ValueError(f"its ranks do not run each of {len(micro_batches)} micro-batches once")
    job, measured = job_from_json(entry.job), entry.measured or {}
    return LoggedStep(entry.step, 1e3 * entry.step_ms, micro_batches, ranks, job, measured)


def warm(steps: Sequence[LoggedStep], skip: int) -> list[LoggedStep]:
    """Drop the first `skip` steps of every start, where numbers have a gap."""
    steady, age = [], 0
    for i, step in enumerate(steps):
        age = age + 1 if i and step.number == steps[i - 1].number + 1 else 0
        if age >= skip:
            steady.append(step)
    return steady


def errors(times: Sequence[float], measured_us: Sequence[float]) -> dict[str, Any]:
    """Return errors of predicted times; the correlation is None without variation."""
    predicted, measured = np.array(times), np.array(measured_us)
    median, p90 = relative_error(predicted, measured)
    varies = min(np.ptp(predicted), np.ptp(measured)) > 0
    return {
        "steps": len(measured),
        "measured_us_median": float(np.median(measured)),
        "predicted_us_median": float(np.median(predicted)),
        "error_median": median,
        "error_p90": p90,
        "correlation": float(np.corrcoef(predicted, measured)[0, 1]) if varies else None,
    }


def in_words(
    steps: Sequence[LoggedStep], times: Sequence[float], parts: Sequence[dict[str, float]]
) -> dict[str, dict[str, float | None]]:
    """Return mean times and shares, measured (None if not) and predicted.

    `times` in us and `parts`, shares of each step, are predicted. Shares are of the steps that logged theirs, if any.
    """
    tokens, gpus = sum(int(sum(map(np.sum, step.lengths))) for step in steps), steps[0].job.parallel.num_gpus
    told = [(ran.shares, each) for ran, each in zip(steps, parts, strict=True) if ran.shares]
    found: dict[str, dict[str, float | None]] = {}
    for how, us in (("measured", [step.measured_us for step in steps]), ("predicted", times)):
        found[how] = {"us_per_token": sum(us) / tokens, "tokens_per_second_and_gpu": 1e6 * tokens / sum(us) / gpus}
    for name in TIME_SHARES:
        own = [share for ran, _ in told if (share := ran.get(name)) is not None]
        found["measured"][name] = float(np.mean(own)) if own else None
        found["predicted"][name] = float(np.mean([each[name] for _, each in told] or [each[name] for each in parts]))
    return found


def _table(row: dict[str, Any], profile_name: str) -> Any:
    text = f"profile {profile_name}"
    titles = (text, "steps", "measured ms", "predicted ms", "error median", "p90", "correlation")
    correlation = "-" if row["correlation"] is None else f"{row['correlation']:.3f}"
    times = [f"{row[name] / 1e3:.2f}" for name in ("measured_us_median", "predicted_us_median")]
    shares = [f"{row[name]:.1%}" for name in ("error_median", "error_p90")]
    return common.table(titles, [("all steps", str(row["steps"]), *times, *shares, correlation)], text)


def _words_table(found: dict[str, dict[str, float | None]]) -> Any:
    def row(title: str, name: str, digits: int, scale: float = 1) -> tuple[str, ...]:
        values = [each[name] for each in found.values()]
        # Never -0.0.
        return title, *("-" if v is None else f"{round(scale * v, digits) + 0:,.{digits}f}" for v in values)

    rows = [row("time per million tokens, s", "us_per_token", 3)]
    rows.append(row("tokens a second and GPU", "tokens_per_second_and_gpu", 0))
    rows += [row(f"{name}, % of a step", name, 1, 100) for name in TIME_SHARES]
    return common.table(("", *found), rows)
