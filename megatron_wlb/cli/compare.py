"""`megatron-wlb compare`: step times that a run logged against predicted ones, and a profile that predicts better."""

import argparse
import datetime
import json
import math
import platform
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from megatron_wlb.cli import profile
from megatron_wlb.cli.common import integer, progress, remark, writer
from megatron_wlb.cli.job import (
    Planning,
    StepShards,
    add_job_arguments,
    checked_lengths,
    model_of,
    prepare,
    settle,
)
from megatron_wlb.cli.launch import world_size
from megatron_wlb.config import CP_SHARDINGS, MAX_TOKENS, PACKINGS
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
Hold predicted step times against those of a run (--wlb-log).

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
        help="hold predicted step times against a run's log",
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
    from rich.console import Console  # an extra; `main` says which

    if args.output is not None:
        import scipy.optimize  # noqa: F401  # likewise
    if args.output == args.json == "-":
        raise ValueError("--output and --json both go to standard output; name a file for one of them")
    steps, notes = warm(read_log(args.log), args.skip), list(args.remarks)
    least = LEAST_STEPS if args.output is not None else 2
    if len(steps) < least:
        raise ValueError(
            f"{args.log} has {len(steps)} steps after --skip {args.skip}; at least {least} are needed, log more steps"
        )
    planning, found = _prepared(args, steps[0].layout, notes)
    if len(steps) > MOST_STEPS:
        notes.append(f"{MOST_STEPS} of the {len(steps)} steps are simulated, in pairs of neighbours.")
        steps = spread(steps)
    measured = np.array([step.measured_us for step in steps])
    with (
        progress(len(steps), args.output or args.json, "simulating") as advance,
        writer(args.json, "--json") as out,
        writer(args.output) as written,
    ):
        shards, predicted = [], np.empty(len(steps))
        for i, step in enumerate(steps):
            planned = planning.step(step.lengths)
            predicted[i] = simulate_step(planning.job, planned).time
            if written is not None:
                shards.append(planned)
            advance(1)
        rows = {"all steps": errors(predicted, measured)}
        result: dict[str, Any] = {"format": FORMAT, "version": VERSION, **found}
        if written is not None:
            fit = recalibrate(planning.job, shards, measured)
            held_out = np.arange(len(steps)) % 2 == 1
            rows["held-out steps"] = errors(predicted[held_out], measured[held_out])
            rows["held-out steps, recalibrated"] = errors(fit.predicted, measured[held_out])
            result["scales"] = asdict(fit.scales)
            written.write(json.dumps(_profile(args, found, fit.job, fit, rows), indent=1) + "\n")
        result["errors"] = rows
        result["steps"] = [
            {"step": step.number, "measured_us": step.measured_us, "predicted_us": float(us)}
            for step, us in zip(steps, predicted, strict=True)
        ]
        if out is not None:
            out.write(json.dumps(result, indent=1) + "\n")
    console = Console(stderr="-" in (args.output, args.json), width=120, highlight=False)
    console.print(_table(rows, found["profile"]))
    if written is not None:
        console.print(_sentence(fit.scales), soft_wrap=True)
    remark(notes)


def _prepared(args: argparse.Namespace, layout: Mapping[str, Any], notes: list[str]) -> tuple[Planning, dict[str, Any]]:
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
    with Path(path).open(encoding="utf-8") as file:
        lines = enumerate(file, start=1)
        while True:
            try:
                number, line = next(lines)
                entry = json.loads(line)
            except StopIteration:
                break
            except (ValueError, RecursionError) as error:
                # The number of the line is not known where it is not UTF-8.
                where = f"{path}, after step {steps[-1].number}" if steps else path
                why = str(error).split(": line")[0]
                raise ValueError(f"{where}: not JSON ({why}); give the file that --wlb-log named") from error
            where = f"{path}, line {number}"
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
            micro_batches = [
                checked_lengths(each, f"{where}: micro-batch {i}", MAX_TOKENS) for i, each in enumerate(lengths)
            ]
            layout = _layout(entry["layout"], where)
            if steps and layout != steps[0].layout:
                before = steps[0].layout
                changed = ", ".join(f"{n} {before[n]} to {layout[n]}" for n in LAYOUT if before[n] != layout[n])
                raise ValueError(
                    f"{where}: the run goes on in another layout ({changed}); give the lines before it, or those from "
                    "it on, as a file of their own"
                )
            steps.append(
                LoggedStep(number=entry["step"], measured_us=1e3 * measured, lengths=micro_batches, layout=layout)
            )
    return steps


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
    args: argparse.Namespace, found: Mapping[str, Any], job: Job, fit: "Fit", rows: Mapping[str, dict[str, Any]]
) -> dict[str, Any]:
    """What `megatron-wlb profile` writes, and where it comes from."""
    name = Path(args.output).stem if args.output != "-" else f"{job.hardware.attention.name}-recalibrated"
    known = job.hardware.attention
    assert known.backward is not None and known.linear_tflops is not None
    forward, backward = known.linear_tflops
    known = replace(
        known,
        name=name,
        forward=_times(known.forward, 1.0, profile.rounded),
        backward=_times(known.backward, 1.0, profile.rounded),
        linear_tflops=(profile.rounded(forward), profile.rounded(backward)),
    )
    before, after = list(rows.values())[-2:]
    data = profile.entries(known, known.crossover_for(**asdict(job.model)), {"step_time": after})
    if known.gather_us_per_mib or known.scatter_us_per_mib:
        data["us_per_mib"] = {"gather": known.gather_us_per_mib, "scatter": known.scatter_us_per_mib}
    data["recalibrated"] = {
        "log": Path(args.log).name,
        "steps_fitted": fit.steps,
        "scales": asdict(fit.scales),
        "error_before": before,
        **found,
    }
    data["versions"] = {"python": platform.python_version(), "scipy": version("scipy")}
    data["date"] = datetime.date.today().isoformat()
    data["command"] = shlex.join(["megatron-wlb", *args.argv])
    return data


def _table(rows: dict[str, dict[str, Any]], profile_name: str) -> Any:
    from rich.table import Table

    table = Table(box=None)
    table.add_column(f"profile {Path(profile_name).name}", no_wrap=True)
    for title in ("steps", "measured ms", "predicted ms", "error median", "p90", "correlation"):
        table.add_column(title, justify="right", no_wrap=True)
    for title, row in rows.items():
        correlation = "-" if row["correlation"] is None else f"{row['correlation']:.3f}"
        times = [f"{row[name] / 1e3:.2f}" for name in ("measured_us_median", "predicted_us_median")]
        shares = [f"{row[name]:.1%}" for name in ("error_median", "error_p90")]
        table.add_row(title, str(row["steps"]), *times, *shares, correlation)
    return table


def _sentence(scales: Scales) -> str:
    if scales.is_common:
        return (
            f"all times x {scales.attention:.4g} (± {scales.uncertainty[0]:.1%}): the steps are too alike to tell "
            "attention from the rest"
        )
    return (
        f"attention x {scales.attention:.4g} (± {scales.uncertainty[0]:.1%}), linear x {scales.linear:.4g} "
        f"(± {scales.uncertainty[1]:.1%})"
    )
