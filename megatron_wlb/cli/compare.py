"""`megatron-wlb compare`: step times that a run logged against predicted ones, and a profile that predicts better."""

import argparse
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from megatron_wlb.cli import common, profile
from megatron_wlb.cli.common import integer, progress, provenance, remark, write_json, writer
from megatron_wlb.cli.job import (
    StepShards,
    add_job_arguments,
    checked_lengths,
    model_of,
    prepare,
    settle,
    shards_of,
)
from megatron_wlb.cli.launch import world_size
from megatron_wlb.config import CP_SHARDINGS, MAX_TOKENS, PACKINGS
from megatron_wlb.plan.step import Layout
from megatron_wlb.plan.workload import KernelTimes, Profile
from megatron_wlb.simulate import Job, simulate_step
from megatron_wlb.simulate.costs import pass_times

FORMAT = "megatron-wlb-comparison"
VERSION = 1
LEAST_STEPS = 8
"""Half of them fitted, half held out."""
MOST_STEPS = 500
"""Simulated, evenly spread over the log: errors need no more, and a step can take a second."""
MOST_FITTED = 64
"""Each is simulated some dozens of times."""
OUTLIER = 0.05
"""Relative errors beyond it count linearly: a step that was disturbed says little."""
LAYOUT: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("TP", "CP", "PP", "VPP", "DP", "crossover"), ()),
    "CP sharding": CP_SHARDINGS,
    "packing": PACKINGS,
}
"""What the log of a run says of its layout, and of what that may be; numbers if nothing."""
MOST_UNCERTAIN = 0.2
"""Standard error of the logarithm of a scale, beyond which attention and the rest cannot be told apart."""

_DESCRIPTION = """\
Compare predicted step times with those of a run (--wlb-log).

    megatron-wlb compare run.jsonl --launch train.sh
    megatron-wlb compare run.jsonl --model llama2-7b --output mine.json

The log states layout, packing, crossover and sharding of the run; flags say the rest (the model, recomputation), and
may repeat that. Logged steps are placed, sharded and simulated as `megatron-wlb simulate` does it. With --output, two
scales, of the times of attention and of everything linear in tokens, are fitted to every other step, and errors are
those on the steps between. The profile that is written serves --wlb-profile and all commands.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedStep:
    """What a run logged of a step."""

    number: int
    measured_us: float
    lengths: list[np.ndarray]
    """Of the documents of every micro-batch."""
    layout: Mapping[str, Any]
    """Of the run; see `LAYOUT`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scales:
    """What the times of a profile are multiplied by, and the standard errors of the logarithms of that."""

    attention: float
    linear: float
    uncertainty: tuple[float, float]
    is_common: bool
    """One scale, since the steps cannot tell two apart."""


def register(commands: Any) -> None:
    """Add the command to the subparsers `commands`."""
    parser = commands.add_parser(
        "compare",
        help="compare predicted step times with a run's log",
        description=_DESCRIPTION,
        usage="%(prog)s RUN.jsonl [--output FILE.json] [--json FILE] [FLAGS | LAUNCH LINE | --launch FILE]",
    )
    parser.add_argument("log", metavar="RUN.jsonl", help="the file that --wlb-log named")
    parser.add_argument(
        "--skip",
        type=integer(0, 1 << 20),
        default=1,
        metavar="K",
        help="leave out the first K steps of every start of the run, which warm up; default: 1",
    )
    parser.add_argument("--output", metavar="FILE.json", help="recalibrated profile to write; - for standard output")
    parser.add_argument("--json", metavar="FILE", help="both times of every step; - for standard output")
    add_job_arguments(parser, wlb_packing=None, wlb_cp_sharding=None)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Simulate, compare, print and write. Raises ValueError on wrong input."""
    console = common.console(args.output, args.json, width=120)
    if args.output is not None:
        import scipy.optimize  # noqa: F401  # likewise an extra
    if args.output == args.json == "-":
        raise ValueError("--output and --json both go to standard output; name a file for one of them")
    notes = list(args.remarks)
    steps = _steps(args, notes)
    job, layout, found = _prepared(args, steps[0].layout, notes)
    measured = np.array([step.measured_us for step in steps])
    with (
        progress(len(steps), args.output or args.json, "simulating") as advance,
        writer(args.json, "--json") as out,
        writer(args.output) as written,
    ):
        predicted, shards = _simulated(job, layout, steps, keep=written is not None, advance=advance)
        rows = {"all steps": errors(predicted, measured)}
        result: dict[str, Any] = {"format": FORMAT, "version": VERSION, **found}
        if written is not None:
            fit = recalibrate(job, shards, measured)
            rows["held-out steps"] = errors(predicted[1::2], measured[1::2])
            rows["held-out steps, recalibrated"] = errors(fit.predicted, measured[1::2])
            result["scales"] = asdict(fit.scales)
            write_json(written, _profile(args, found, fit, rows))
        times = [
            {"step": step.number, "measured_us": step.measured_us, "predicted_us": us}
            for step, us in zip(steps, predicted.tolist(), strict=True)
        ]
        write_json(out, result | {"errors": rows, "steps": times})
    console.print(_table(rows, found["profile"]))
    if written is not None:
        console.print(_sentence(fit.scales), soft_wrap=True)
    remark(notes)


def _steps(args: argparse.Namespace, notes: list[str]) -> list[LoggedStep]:
    """Those of the log that are simulated; raises ValueError if they are too few."""
    steps = warm(read_log(args.log), args.skip)
    least = LEAST_STEPS if args.output is not None else 2
    if len(steps) < least:
        raise ValueError(
            f"{args.log} has {len(steps)} steps after --skip {args.skip}; at least {least} are needed, log more steps"
        )
    if len(steps) <= MOST_STEPS:
        return steps
    notes.append(f"{MOST_STEPS} of the {len(steps)} steps are simulated, in pairs of neighbours.")
    return spread(steps)


def _simulated(
    job: Job, layout: Layout, steps: Sequence[LoggedStep], *, keep: bool, advance: Callable[[int], None]
) -> tuple[np.ndarray, list[StepShards]]:
    """Predicted times, float64 [steps] us, and what was simulated, if that is to be kept."""
    predicted, shards = np.empty(len(steps)), []
    for i, step in enumerate(steps):
        planned = shards_of(job, layout, step.lengths)
        predicted[i] = simulate_step(job, planned).time
        if keep:
            shards.append(planned)
        advance(1)
    return predicted, shards


def _prepared(
    args: argparse.Namespace, layout: Mapping[str, Any], notes: list[str]
) -> tuple[Job, Layout, dict[str, Any]]:
    """How the steps of the run ran, and that as JSON types; raises ValueError for flags of another run."""
    tp, cp, pp, vpp = (layout[name] for name in ("TP", "CP", "PP", "VPP"))
    args.num_gpus = world_size(args)
    stated = {"tensor_model_parallel_size": tp, "context_parallel_size": cp, "pipeline_model_parallel_size": pp}
    stated["num_gpus"] = tp * cp * pp * layout["DP"]
    if args.num_layers_per_virtual_pipeline_stage is None or args.num_virtual_stages_per_pipeline_rank is not None:
        stated["num_virtual_stages_per_pipeline_rank"] = vpp
    else:
        layers = model_of(args, []).num_layers + 2 * args.account_for_loss_in_pipeline_split
        stated["num_layers_per_virtual_pipeline_stage"] = layers // (pp * vpp)
    stated |= {
        f"wlb_{name.lower().replace(' ', '_')}": layout[name] for name in ("packing", "crossover", "CP sharding")
    }
    settle(args, stated, args.log)
    return prepare(args, notes)


def spread(steps: Sequence[LoggedStep]) -> list[LoggedStep]:
    """`MOST_STEPS` of the steps: pairs of neighbours, of which one is fitted and one held out, evenly spread."""
    pairs = np.linspace(0, len(steps) // 2 - 1, MOST_STEPS // 2).astype(int)
    return [steps[2 * i + k] for i in pairs.tolist() for k in (0, 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A job whose profile predicts better."""

    job: Job
    scales: Scales
    steps: int
    """That were fitted."""
    predicted: np.ndarray
    """Times of the held-out steps, float64 [n] us."""


def recalibrate(job: Job, shards: Sequence[StepShards], measured: np.ndarray) -> Fit:
    """Fit scales to every other step, at most `MOST_FITTED`; the steps between are held out."""
    base = replace(job, hardware=replace(job.hardware, attention=explicit(job, shards[0])))
    fitted = range(0, len(shards), 2 * math.ceil(len(shards[::2]) / MOST_FITTED))
    scales = fit_scales(base, [shards[i] for i in fitted], measured[list(fitted)])
    better = scaled(base, scales)
    again = np.array([simulate_step(better, each).time for each in shards[1::2]])
    return Fit(job=better, scales=scales, steps=len(fitted), predicted=again)


def read_log(path: str) -> list[LoggedStep]:
    """The steps of a `--wlb-log` file in the order they ran. Raises ValueError, naming the line, for anything else."""
    steps: list[LoggedStep] = []
    for where, entry in _entries(path):
        step = _logged_step(entry, where)
        if steps and step.layout != steps[0].layout:
            before, layout = steps[0].layout, step.layout
            changed = ", ".join(f"{n} {before[n]} to {layout[n]}" for n in LAYOUT if before[n] != layout[n])
            raise ValueError(
                f"{where}: the run goes on in another layout ({changed}); give the lines before it, or those from it "
                "on, as a file of their own"
            )
        steps.append(step)
    return steps


def _entries(path: str) -> Iterator[tuple[str, Any]]:
    """What the lines of a log hold, and where."""
    where = path
    with Path(path).open(encoding="utf-8") as file:
        try:
            for number, line in enumerate(file, start=1):
                entry = json.loads(line)
                yield f"{path}, line {number}", entry
                # The number of a line is not known where it is not UTF-8.
                where = f"{path}, after step {entry['step']}"
        except (ValueError, RecursionError) as error:
            why = str(error).split(": line")[0]
            raise ValueError(f"{where}: not JSON ({why}); give the file that --wlb-log named") from error


def _logged_step(entry: Any, where: str) -> LoggedStep:
    if not isinstance(entry, dict) or type(entry.get("step")) is not int:
        raise ValueError(f"{where} is no step of a run; give the file that --wlb-log named")
    if not entry.keys() >= {"step_ms", "lengths", "layout"}:
        raise ValueError(f"{where} states no step_ms, lengths or layout; log the run anew")
    measured, lengths = entry["step_ms"], entry["lengths"]
    if type(measured) not in (int, float) or not 0 < measured < math.inf:
        raise ValueError(f"{where}: step_ms is {str(measured)[:40]}; it must be a time over 0")
    if not isinstance(lengths, list):
        given = str(lengths)[:40]
        raise ValueError(f"{where}: lengths is not a list of micro-batches but {given}; log the run anew")
    return LoggedStep(
        number=entry["step"],
        measured_us=1e3 * measured,
        lengths=[checked_lengths(each, f"{where}: micro-batch {i}", MAX_TOKENS) for i, each in enumerate(lengths)],
        layout=_layout(entry["layout"], where),
    )


def _layout(layout: Any, where: str) -> dict[str, Any]:
    found = {name: layout.get(name) if isinstance(layout, dict) else None for name in LAYOUT}
    for name, known in LAYOUT.items():
        value = found[name]
        if not (value in known if known else type(value) is int and 1 <= value <= 1 << 35):
            limit = f"one of {', '.join(known)}" if known else "an integer over 0"
            raise ValueError(f"{where}: layout states {name} {str(value)[:40]}; it must be {limit}")
    return found


def warm(steps: Sequence[LoggedStep], skip: int) -> list[LoggedStep]:
    """Without the first `skip` steps of every start; a run that was resumed goes back in its steps, or has a gap."""
    kept, age = [], 0
    for i, step in enumerate(steps):
        age = age + 1 if i and step.number == steps[i - 1].number + 1 else 0
        if age >= skip:
            kept.append(step)
    return kept


def errors(predicted: np.ndarray, measured: np.ndarray) -> dict[str, Any]:
    """Of predicted step times in us, float64 [n]; the correlation is None where either side does not vary."""
    median, p90 = profile.relative_error(predicted, measured)
    varies = min(np.ptp(predicted), np.ptp(measured)) > 0
    return {
        "steps": len(measured),
        "measured_us_median": float(np.median(measured)),
        "predicted_us_median": float(np.median(predicted)),
        "error_median": median,
        "error_p90": p90,
        "correlation": float(np.corrcoef(predicted, measured)[0, 1]) if varies else None,
    }


def explicit(job: Job, shards: StepShards) -> Profile:
    """The profile of a job, with what the simulator takes from elsewhere: the backward pass, and linear rates.

    Those are of layers; the output layer then runs at them, too.
    """
    known = job.hardware.attention
    backward = known.backward or _times(known.forward, job.hardware.attention_backward)
    rates = known.linear_tflops
    if rates is None:
        layers = pass_times(replace(job, recompute=False), shards[0][:1]).layers
        flops = 2e-6 * job.model.layer_weights / job.tp * float(shards[0][0].lengths.sum()) / job.cp
        rates = flops / float(layers[0].linear[0]), 2 * flops / float(layers[1].linear[0])
    return replace(known, backward=backward, linear_tflops=rates, head_size=job.model.kv_channels)


def scaled(job: Job, scales: Scales) -> Job:
    """A job whose profile, an explicit one, has times multiplied by `scales`."""
    known = job.hardware.attention
    assert known.backward is not None and known.linear_tflops is not None
    forward, backward = known.linear_tflops
    changed = replace(
        known,
        forward=_times(known.forward, scales.attention),
        backward=_times(known.backward, scales.attention),
        linear_tflops=(forward / scales.linear, backward / scales.linear),
    )
    return replace(job, hardware=replace(job.hardware, attention=changed))


def fit_scales(job: Job, plans: Sequence[StepShards], measured: np.ndarray) -> Scales:
    """Scales of an explicit profile under which the steps take what was measured, float64 [n] us; least squares.

    Errors are relative. If steps are too alike to tell attention from the rest, both get one scale.
    """
    from scipy.optimize import least_squares

    def at(logs: np.ndarray) -> Scales:
        attention, linear = np.exp(np.broadcast_to(logs, 2)).tolist()
        return Scales(attention=attention, linear=linear, uncertainty=(math.inf, math.inf), is_common=len(logs) == 1)

    def residuals(logs: np.ndarray) -> np.ndarray:
        changed = scaled(job, at(logs))
        return np.array([simulate_step(changed, plan).time for plan in plans]) / measured - 1

    begin = -np.median(np.log(residuals(np.zeros(2)) + 1))
    for count in (2, 1):
        fit = least_squares(residuals, np.full(count, begin), loss="soft_l1", f_scale=OUTLIER)
        variance = 2 * fit.cost / max(1, len(plans) - count)
        hessian = fit.jac.T @ fit.jac
        if np.linalg.cond(hessian) < 1e12:
            uncertain = np.broadcast_to(np.sqrt(variance * np.diag(np.linalg.inv(hessian))), 2).tolist()
            found = replace(at(fit.x), uncertainty=(uncertain[0], uncertain[1]))
            if count == 1 or max(uncertain) <= MOST_UNCERTAIN:
                return found
    raise ValueError(
        f"the times of {len(plans)} steps do not depend on what is scaled; give the log of this job, and its flags"
    )


def _times(known: KernelTimes, scale: float, rounded: Callable[[float], float] = float) -> KernelTimes:
    return KernelTimes(**{name: rounded(us * scale) for name, us in asdict(known).items()})


def _profile(
    args: argparse.Namespace, found: Mapping[str, Any], fit: Fit, rows: Mapping[str, dict[str, Any]]
) -> dict[str, Any]:
    """What `megatron-wlb profile` writes, and where it comes from."""
    known = fit.job.hardware.attention
    assert known.backward is not None and known.linear_tflops is not None
    forward, backward = known.linear_tflops
    known = replace(
        known,
        name=Path(args.output).stem if args.output != "-" else f"{known.name}-recalibrated",
        forward=_times(known.forward, 1.0, profile.rounded),
        backward=_times(known.backward, 1.0, profile.rounded),
        linear_tflops=(profile.rounded(forward), profile.rounded(backward)),
    )
    before, after = list(rows.values())[-2:]
    data = profile.entries(known, known.crossover_for(fit.job.model), {"step_time": after})
    if known.gather_us_per_mib or known.scatter_us_per_mib:
        data["us_per_mib"] = {"gather": known.gather_us_per_mib, "scatter": known.scatter_us_per_mib}
    fitted = {"log": Path(args.log).name, "steps_fitted": fit.steps, "scales": asdict(fit.scales)}
    data["recalibrated"] = {**fitted, "error_before": before, **found}
    return data | provenance(args.argv, scipy=version("scipy"))


def _table(rows: dict[str, dict[str, Any]], profile_name: str) -> Any:
    text = f"profile {Path(profile_name).name}"
    titles = ("steps", "measured ms", "predicted ms", "error median", "p90", "correlation")
    table = common.table([text, *titles], text=text)
    for title, row in rows.items():
        correlation = "-" if row["correlation"] is None else f"{row['correlation']:.3f}"
        times = [f"{row[name] / 1e3:.2f}" for name in ("measured_us_median", "predicted_us_median")]
        shares = [f"{row[name]:.1%}" for name in ("error_median", "error_p90")]
        table.add_row(title, str(row["steps"]), *times, *shares, correlation)
    return table


def _sentence(scales: Scales) -> str:
    attention, linear = scales.uncertainty
    of_attention = f"{scales.attention:.4g} (± {attention:.1%})"
    if scales.is_common:
        return f"all times x {of_attention}: the steps are too alike to tell attention from the rest"
    return f"attention x {of_attention}, linear x {scales.linear:.4g} (± {linear:.1%})"
