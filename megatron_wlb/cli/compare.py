"""`megatron-wlb compare`: compare predicted step times with a run's log.

    megatron-wlb compare run.jsonl
    megatron-wlb compare run.jsonl --output mine.json

The log of a run (--wlb-log) describes its job. Its steps are placed and sharded as they were, and simulated,
with the run's profile or --wlb-profile. With --output, two scales, of the times of
attention and of everything linear in tokens, are fitted to every other step, and errors are those on the steps between.
The profile that is written serves --wlb-profile and all commands.
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np

from megatron_wlb.cli import common
from megatron_wlb.cli.calibration import entries, relative_error
from megatron_wlb.cli.common import integer, progress, provenance, remark, write_json, writer
from megatron_wlb.cli.job import DEFAULT_PROFILE
from megatron_wlb.describe.make import job_from_json
from megatron_wlb.hardware.profile import Profile, load_profile
from megatron_wlb.job import MAX_TOKENS, Job, Recompute, differences
from megatron_wlb.plan.step import shard_step
from megatron_wlb.simulate import SHARES, shares, simulate_step
from megatron_wlb.simulate.passes import pass_times
from megatron_wlb.types import ShardPlan

FORMAT = "megatron-wlb-comparison"
VERSION = 2
USAGE = "RUN.jsonl [--wlb-profile PROFILE] [--skip K] [--output FILE.json] [--json FILE]"
LEAST_STEPS = 8
"""Half of them fitted, half held out."""
MOST_STEPS = 500
"""Simulated, evenly spread over the log: errors need no more, and a step can take a second."""
MOST_FITTED = 64
"""Each is simulated some dozens of times."""
OUTLIER = 0.05
"""Relative errors beyond it count linearly: a step that was disturbed says little."""
MOST_UNCERTAIN = 0.2
"""Standard error of the logarithm of a scale, beyond which attention and the rest cannot be told apart."""

StepShards = list[list[ShardPlan]]
"""Micro-batches of every data-parallel rank, in pipeline order."""


class LoggedStep(NamedTuple):
    """What a run logged of a step."""

    number: int
    measured_us: float
    lengths: list[np.ndarray]
    """Lengths of the documents of every micro-batch."""
    job: Job
    shares: dict[str, float | None]
    """What of the time is busy and so on, by `SHARES`: {} where the run did not tell, None where it could not."""


class Scales(NamedTuple):
    """What the times of a profile are multiplied by, and the standard errors of the logarithms of that."""

    attention: float
    linear: float
    uncertainty: tuple[float, ...]
    is_common: bool
    """One scale, since the steps cannot tell two apart."""
    steps_fitted: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
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
    parser.add_argument("--output", metavar="FILE.json", help="recalibrated profile to write; - for standard output")
    parser.add_argument("--json", metavar="FILE", help="both times of every step; - for standard output")


def run(args: argparse.Namespace) -> None:
    """Simulate, compare, print and write. Raises ValueError on wrong input."""
    console = common.console(args.output, args.json, width=120)
    if args.output is not None:
        import scipy.optimize  # noqa: F401  # likewise an extra
    if args.output == args.json == "-":
        raise ValueError("--output and --json both go to standard output; name a file for one of them")
    notes: list[str] = []
    steps = _steps(args, notes)
    ran = steps[0].job
    job = replace(ran, profile=_profile_of(args, ran, notes))
    measured = np.array([step.measured_us for step in steps])
    with (
        progress(len(steps), args.output or args.json, "simulating") as advance,
        writer(args.json, "--json") as out,
        writer(args.output) as written,
    ):
        shards, times, parts = [], [], []
        for step in steps:
            shards.append(shard_step(ran, step.lengths))
            simulated = simulate_step(job, shards[-1])
            times.append(simulated.time)
            parts.append(shares(simulated))
            advance(1)
        predicted = np.array(times)
        words = in_words(steps, times, parts)
        rows = {"all steps": errors(predicted, measured)}
        result: dict[str, Any] = {"format": FORMAT, "version": VERSION, "job": job.to_json()}
        if written is not None:
            better, scales = recalibrate(job, shards, measured)
            again = np.array([simulate_step(better, each).time for each in shards[1::2]])
            rows["held-out steps"] = errors(predicted[1::2], measured[1::2])
            rows["held-out steps, recalibrated"] = errors(again, measured[1::2])
            result["scales"] = scales._asdict()
            write_json(written, _file(args, job, better, result["scales"], list(rows.values())[1:]))
        both = [
            {"step": step.number, "measured_us": step.measured_us, "predicted_us": us}
            for step, us in zip(steps, times, strict=True)
        ]
        write_json(out, result | {"errors": rows, "in_words": words, "steps": both})
    console.print(_table(rows, job.profile.name))
    console.print(_words_table(words))
    if written is not None:
        console.print(_sentence(scales), soft_wrap=True)
    remark(notes)


def _steps(args: argparse.Namespace, notes: list[str]) -> list[LoggedStep]:
    """The steps of the log that are simulated; raises ValueError if they are too few."""
    steps = warm(read_log(args.log), args.skip)
    least = LEAST_STEPS if args.output is not None else 2
    if len(steps) < least:
        raise ValueError(
            f"{args.log} has {len(steps)} steps after --skip {args.skip}; at least {least} are needed, log more steps"
        )
    if len(steps) <= MOST_STEPS:
        return steps
    notes.append(f"{MOST_STEPS} of the {len(steps)} steps are simulated, in pairs of neighbours.")
    # Of each pair one is fitted and one held out.
    pairs = np.linspace(0, len(steps) // 2 - 1, MOST_STEPS // 2).astype(int)
    return [steps[2 * i + k] for i in pairs.tolist() for k in (0, 1)]


def _profile_of(args: argparse.Namespace, ran: Job, notes: list[str]) -> Profile:
    """What the steps of a run are predicted by."""
    if args.wlb_profile is None and ran.profile.counts_pairs:
        notes.append(f"The run's profile counts attended pairs; times are predicted by profile {DEFAULT_PROFILE}.")
        return load_profile(DEFAULT_PROFILE)
    return load_profile(args.wlb_profile) if args.wlb_profile is not None else ran.profile


class _Line(msgspec.Struct):
    """What is read of a line of the log."""

    step: int
    step_ms: Annotated[float, msgspec.Meta(gt=0, lt=1e12)]
    lengths: list[list[Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]]]
    job: Any
    measured: dict[str, float | None] | None = None


def read_log(path: str) -> list[LoggedStep]:
    """The steps of a `--wlb-log` file in the order they ran. Raises ValueError, naming the line, for anything else."""
    steps: list[LoggedStep] = []
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                steps.append(_logged_step(line))
            except (ValueError, msgspec.MsgspecError, RecursionError) as error:
                raise ValueError(
                    f"{path}, line {number}: {error or 'nested too deeply'}; give the file that --wlb-log named"
                ) from error
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
    return LoggedStep(entry.step, 1e3 * entry.step_ms, micro_batches, job_from_json(entry.job), entry.measured or {})


def warm(steps: Sequence[LoggedStep], skip: int) -> list[LoggedStep]:
    """Without the first `skip` steps of every start; a run that was resumed goes back in its steps, or has a gap."""
    steady, age = [], 0
    for i, step in enumerate(steps):
        age = age + 1 if i and step.number == steps[i - 1].number + 1 else 0
        if age >= skip:
            steady.append(step)
    return steady


def errors(predicted: np.ndarray, measured: np.ndarray) -> dict[str, Any]:
    """How far predicted step times in us, float64 [n], are off; the correlation is None where either side is even."""
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
    """What a report of `analyze` says of time, measured and predicted, means over steps.

    Shares are those of the steps of which the run told its own, or of all; None is what it could not tell.

    Args:
        steps: as logged.
        times: as predicted, us.
        parts: predicted shares of each.
    """
    tokens, gpus = sum(int(sum(map(np.sum, step.lengths))) for step in steps), steps[0].job.parallel.num_gpus
    told = [(ran.shares, each) for ran, each in zip(steps, parts, strict=True) if ran.shares]
    found: dict[str, dict[str, float | None]] = {}
    for how, us in (("measured", [step.measured_us for step in steps]), ("predicted", times)):
        found[how] = {"us_per_token": sum(us) / tokens, "tokens_per_second_and_gpu": 1e6 * tokens / sum(us) / gpus}
    for name in SHARES:
        own = [share for ran, _ in told if (share := ran.get(name)) is not None]
        found["measured"][name] = float(np.mean(own)) if own else None
        found["predicted"][name] = float(np.mean([each[name] for _, each in told] or [each[name] for each in parts]))
    return found


def recalibrate(job: Job, shards: Sequence[StepShards], measured: np.ndarray) -> tuple[Job, Scales]:
    """The job with a profile that is fitted to every other step, at most `MOST_FITTED`; the rest are held out."""
    base = replace(job, profile=complete_profile(job, shards[0]))
    sample = range(0, len(shards), 2 * math.ceil(len(shards[::2]) / MOST_FITTED))
    scales = fit_scales(base, [shards[i] for i in sample], measured[list(sample)])
    return scale(base, scales.attention, scales.linear), scales


def complete_profile(job: Job, shards: StepShards) -> Profile:
    """The profile of a job, with what the simulator takes from elsewhere: the backward pass, and linear rates.

    Those are of layers; the output layer then runs at them, too.
    """
    profile, rates = job.profile, job.profile.linear_tflops
    if rates is None:
        forward, backward = pass_times(replace(job, recompute=Recompute()), shards[0][:1]).layers
        tokens = int(shards[0][0].lengths.sum()) / job.parallel.cp
        flops = 2e-6 * job.model.layer_weights / job.parallel.tp * tokens
        rates = flops / float(forward.linear[0]), 2 * flops / float(backward.linear[0])
    times = profile.backward or profile.forward.scaled(profile.attention_backward)
    return replace(profile, backward=times, linear_tflops=rates, head_size=job.model.head_size)


def scale(job: Job, attention: float, linear: float) -> Job:
    """A job with a complete profile, times of attention and of everything linear in tokens multiplied."""
    profile = job.profile
    assert profile.backward is not None and profile.linear_tflops is not None
    forward, backward = profile.linear_tflops
    scaled = replace(
        profile,
        forward=profile.forward.scaled(attention),
        backward=profile.backward.scaled(attention),
        linear_tflops=(forward / linear, backward / linear),
    )
    return replace(job, profile=scaled)


def fit_scales(job: Job, steps: Sequence[StepShards], measured: np.ndarray) -> Scales:
    """Scales of a complete profile under which the steps take what was measured, float64 [n] us; least squares.

    Errors are relative. If steps are too alike to tell attention from the rest, both get one scale.
    """
    from scipy.optimize import least_squares

    def residuals(logs: np.ndarray) -> np.ndarray:
        scaled = scale(job, *np.exp(np.broadcast_to(logs, 2)).tolist())
        return np.array([simulate_step(scaled, step).time for step in steps]) / measured - 1

    begin = -np.median(np.log(residuals(np.zeros(2)) + 1))
    for count in (2, 1):
        fit = least_squares(residuals, np.full(count, begin), loss="soft_l1", f_scale=OUTLIER)
        variance = 2 * fit.cost / max(1, len(steps) - count)
        hessian = fit.jac.T @ fit.jac
        if np.linalg.cond(hessian) < 1e12:
            deviation = np.broadcast_to(np.sqrt(variance * np.diag(np.linalg.inv(hessian))), 2)
            if count == 1 or deviation.max() <= MOST_UNCERTAIN:
                attention, linear = np.exp(np.broadcast_to(fit.x, 2)).tolist()
                return Scales(attention, linear, tuple(deviation.tolist()), count == 1, len(steps))
    raise ValueError(f"the times of {len(steps)} steps do not depend on what is scaled; give the log of more steps")


def _file(
    args: argparse.Namespace, job: Job, better: Job, scales: dict[str, Any], held_out: list[dict[str, Any]]
) -> dict[str, Any]:
    """What `megatron-wlb profile` writes, and where it comes from."""
    name = Path(args.output).stem if args.output != "-" else f"{job.profile.name}-recalibrated"
    before, after = held_out
    fitted = {"log": Path(args.log).name, "scales": scales, "error_before": before, "job": job.to_json()}
    return {
        **entries(replace(better.profile, name=name), {"step_time": after}),
        "recalibrated": fitted,
        **provenance(args.argv, scipy=version("scipy")),
    }


def _table(rows: dict[str, dict[str, Any]], profile_name: str) -> Any:
    text = f"profile {profile_name}"
    titles = (text, "steps", "measured ms", "predicted ms", "error median", "p90", "correlation")
    cells = []
    for title, row in rows.items():
        correlation = "-" if row["correlation"] is None else f"{row['correlation']:.3f}"
        times = [f"{row[name] / 1e3:.2f}" for name in ("measured_us_median", "predicted_us_median")]
        shares = [f"{row[name]:.1%}" for name in ("error_median", "error_p90")]
        cells.append((title, str(row["steps"]), *times, *shares, correlation))
    return common.table(titles, cells, text)


def _words_table(found: dict[str, dict[str, float | None]]) -> Any:
    def row(title: str, name: str, digits: int, scale: float = 1) -> tuple[str, ...]:
        values = [each[name] for each in found.values()]
        # Never -0.0.
        return title, *("-" if v is None else f"{round(scale * v, digits) + 0:,.{digits}f}" for v in values)

    rows = [row("time per million tokens, s", "us_per_token", 3)]
    rows.append(row("tokens a second and GPU", "tokens_per_second_and_gpu", 0))
    rows += [row(f"{name}, % of a step", name, 1, 100) for name in SHARES]
    return common.table(("", *found), rows)


def _sentence(scales: Scales) -> str:
    attention, linear = scales.uncertainty
    of_attention = f"{scales.attention:.4g} (± {attention:.1%})"
    if scales.is_common:
        return f"all times x {of_attention}: the steps are too alike to tell attention from the rest"
    return f"attention x {of_attention}, linear x {scales.linear:.4g} (± {linear:.1%})"
