"""`megatron-wlb tune`: find packing flags for document lengths.

Finds packing flags for documents in file order, or without LENGTHS for those of --data-path, shuffled as in training;
needs neither Megatron nor torch.

    megatron-wlb tune LENGTHS --seq-length C --global-batch-size N --model llama2-7b
    megatron-wlb tune LENGTHS --launch train.log
    megatron-wlb tune --launch train.log

The first half of the steps fits: every tuning of wlb and adaptive packing runs on it, in the layout that the flags
describe. Those that no other one beats in all of time, delay, tokens per step (CV) and S_max then run on the second
half, whose numbers are printed, again without those that are beaten there. Differences that are too small to print
don't count. Time is what `--wlb-micro-batches auto` goes by, which also chooses how many micro-batches adaptive packing
has here: that of simulated steps per work, over the fastest of the table; without a profile in microseconds it goes by
work. Each half is planned as by `megatron-wlb plan --no-flush`; tunings under which a document waits for over half of
it are left out, since they look good only for what they don't run. S_max is tried up to --wlb-max-tokens where that is
given.
"""

import argparse
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron_wlb.cli import common, plan
from megatron_wlb.cli.common import integer, progress, remark, write_json, writer
from megatron_wlb.cli.data import add_lengths, documents_of
from megatron_wlb.cli.flags import add_job_flags, packing_job, with_best_count
from megatron_wlb.cost.work import document_work
from megatron_wlb.job import Job, Packing
from megatron_wlb.micro_batches import step_time
from megatron_wlb.packing.adaptive import FORCED_STEPS, AdaptivePacking
from megatron_wlb.packing.wlb import WlbPacking
from megatron_wlb.plan import metrics
from megatron_wlb.plan.packer import make_packer
from megatron_wlb.plan.stream import DocumentStream, Source
from megatron_wlb.settings import flag_with_value
from megatron_wlb.simulate.passes import untimed

FORMAT = "megatron-wlb-tune"
VERSION = 2
USAGE = "[LENGTHS] [FLAGS | COMMAND | --launch FILE] [--json FILE] [--picture FILE]"
LEAST_STEPS = 20
"""Steps in a half, under which its averages say nothing."""
S_MAX_WINDOWS = (1.1, 1.25, 1.5, 2.0)
"""Or mean micro-batches, where these are longer."""
THRESHOLD_SHARES = tuple(k / 8 for k in range(1, 8))
MAX_QUEUES = 3
MAX_DELAYS = (2 * FORCED_STEPS, 30)
TIMED_WINDOWS = 128
"""About so many windows of documents are timed of a half, in at least `LEAST_TIMED` steps."""
LEAST_TIMED = 4


class Result(NamedTuple):
    """A tuning and its measures."""

    job: Job
    time: float
    """Predicted, of a step per work."""
    summary: metrics.Summary


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    parser.add_argument(
        "--steps",
        type=integer(2 * LEAST_STEPS, 1 << 20),
        default=300,
        metavar="T",
        help="use the documents of the first T steps, half of them held out; default: 300",
    )
    parser.add_argument(
        "--max-late", type=float, default=math.inf, metavar="STEPS", help="bound on the mean delay of a token"
    )
    parser.add_argument("--picture", metavar="FILE.png", help="draw time over delay and over the CV of tokens")
    parser.add_argument("--json", metavar="FILE", help="rows to write; - for standard output, the table on the other")
    add_job_flags(parser)
    add_lengths(parser)


def run(args: argparse.Namespace) -> None:
    """Sweep, print and write. Raises ValueError on wrong input or if nothing is left to recommend."""
    console = common.console(args.json, width=100)
    if args.picture is not None:
        import matplotlib  # noqa: F401  # likewise an extra, and minutes are about to be spent

        if Path(args.picture).suffix != ".png" or not Path(args.picture).resolve().parent.is_dir():
            raise ValueError(f"--picture {args.picture} must end in .png and be in a folder that exists")
    notes = list(args.remarks)
    job = packing_job(args, notes, packing=WlbPacking())
    fit, held_out = _halves(args, job, notes)
    adaptive = _adaptive(args, fit)
    tunings = list(variants(job, _max_tokens(args, job), wlb_packings(job.context_length)))
    tunings += variants(adaptive, _max_tokens(args, adaptive), adaptive_packings())
    with writer(args.json, "--json") as file:
        fits = front(_measured(args, tunings, fit, "fit"))
        tried = _measured(args, [each.job for each in fits], held_out, "held-out")
        rows = sorted(front(tried), key=_objectives)
        entry = {"format": FORMAT, "version": VERSION, "job": job.to_json(), "timed_by": _timed_by(job)}
        halves = {"fit": (0, len(fit)), "held_out": (len(fit), len(fit) + len(held_out))}
        write_json(file, entry | {"documents": halves, "rows": _entries(rows, fits)})
    console.print(_table(rows))
    for number, row in enumerate(rows, 1):
        console.print(f"{number}: {flags_of(row.job)}", soft_wrap=True)
    console.print(
        f"{len(tunings)} tunings on {len(fit)} documents, {len(fits)} of them on {len(held_out)} held-out ones "
        f"({rows[0].summary.steps} steps), whose numbers these are. Time is over the fastest, by {_timed_by(job)}",
        soft_wrap=True,
    )
    remark(notes)
    if args.picture is not None:
        from megatron_wlb.cli import pictures

        points = [_entry(each.job) | _point(each) | {"best": each in rows} for each in tried]
        pictures.save(args.picture, lambda figure: pictures.front(figure, points, job.context_length), 5.6)


def _timed_by(job: Job) -> str:
    """What times go by."""
    why = untimed(job)
    return f"work, since {why}" if why else f"simulation with profile {job.profile.name}"


def _adaptive(args: argparse.Namespace, fit: np.ndarray) -> Job:
    """The job with adaptive packing, and as many micro-batches as training would choose for these documents."""
    default = packing_job(args, [], packing=AdaptivePacking())

    def stream() -> DocumentStream:
        return DocumentStream([Source(lengths=fit)], seed=0, context_length=default.context_length, shuffle=False)

    return with_best_count(args, default, stream)


def _halves(args: argparse.Namespace, job: Job, notes: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Lengths of the documents of the fit steps, and of as many held-out steps behind them."""
    data = documents_of(args, notes)
    if data.shuffle:
        most = args.steps * job.batch_tokens + 2 * job.context_length
        lengths: np.ndarray = data.stream(args.seed, job.context_length, num_epochs=1).take(most)["length"]
    else:
        lengths = np.asarray(data.sources[0].lengths)
    ends = np.cumsum(lengths)
    half_tokens = min(args.steps, int(ends[-1]) // job.batch_tokens) // 2 * job.batch_tokens
    middle = int(np.searchsorted(ends, half_tokens)) + 1
    stop = int(np.searchsorted(ends, ends[middle - 1] + half_tokens)) + 1
    fit, held_out = lengths[:middle], lengths[middle:stop]
    steps = int(min(fit.sum(), held_out.sum())) // job.batch_tokens
    if steps < LEAST_STEPS:
        # The documents at which the halves end may reach far beyond them.
        needed = 2 * (LEAST_STEPS * job.batch_tokens + int(lengths.max()))
        raise ValueError(
            f"{', '.join(data.prefixes)} holds {len(lengths)} documents of {ends[-1]} tokens, {steps} steps in a half, "
            f"where {LEAST_STEPS} are needed; give at least {needed} tokens, about "
            f"{math.ceil(needed * len(lengths) / int(ends[-1]))} documents like these"
        )
    return fit, held_out


def _max_tokens(args: argparse.Namespace, job: Job) -> list[int]:
    """Values of S_max, up to that of the job where flags bound it."""
    unit = math.gcd(job.context_length // 8, 128)  # shared by the ranks of most layouts that windows are
    candidates = s_max_candidates(job, unit)
    if args.wlb_max_tokens is None and args.wlb_memory_budget is None:
        return candidates
    return [s_max for s_max in candidates if s_max < job.max_tokens] + [job.max_tokens]


def s_max_candidates(job: Job, unit: int = 1) -> list[int]:
    """Values of S_max in tokens, multiples of `unit` and of the job's, increasing."""
    unit = math.lcm(job.unit_tokens, unit)
    return [math.ceil(windows * job.least_max_tokens / unit) * unit for windows in S_MAX_WINDOWS]


def adaptive_packings() -> list[Packing]:
    """Adaptive packing under every bound on delay that is tried."""
    return [AdaptivePacking(max_delay_steps=delay) for delay in MAX_DELAYS]


def wlb_packings(context_length: int) -> list[Packing]:
    """Algorithm 1 with all thresholds that are tried."""
    grid = sorted({max(2, int(share * context_length)) for share in THRESHOLD_SHARES})
    chosen = (each for queues in range(1, MAX_QUEUES + 1) for each in combinations(grid, queues))
    return [WlbPacking(outlier_thresholds=thresholds) for thresholds in chosen]


def variants(job: Job, max_tokens: Iterable[int], packings: Iterable[Packing]) -> Iterator[Job]:
    """The job with every one of `packings` at every S_max."""
    packings = list(packings)
    return (replace(job, max_tokens=s_max, packing=packing) for s_max in max_tokens for packing in packings)


def flags_of(job: Job) -> str:
    """The packing of a job, to paste into a training command."""
    settings = {"packing": job.packing.name, **_settings(job.packing)}
    if job.packing.steady_tokens or job.num_micro_batches != job.global_batch_size:
        settings["micro_batches"] = job.num_micro_batches
    settings["max_tokens"] = job.max_tokens
    return " ".join(flag_with_value(name, value) for name, value in settings.items())


def _settings(packing: Packing) -> dict[str, Any]:
    return asdict(packing)  # type: ignore[call-overload, no-any-return]


def _measured(args: argparse.Namespace, tunings: Sequence[Job], lengths: np.ndarray, what: str) -> list[Result]:
    """What tunings come to on documents of `lengths`, of those under which no document waits for long.

    Times are over the least.
    """
    results = []
    with progress(len(tunings), args.json, what) as advance:
        for tuning in tunings:
            result = run_half(lengths, tuning)
            if result is not None:
                results.append(result)
            advance(1)
    if not results:
        raise ValueError(f"documents wait for over half of the {what} steps whatever the tuning; give more documents")
    in_time = [each for each in results if each.summary.late_steps <= args.max_late]
    if not in_time:
        least = min(each.summary.late_steps for each in results)
        raise ValueError(
            f"no tuning keeps --max-late {args.max_late:g}; the {what} steps reach {least:.3f}, give more than that"
        )
    fastest = min(each.time for each in in_time)
    return [each._replace(time=each.time / fastest) for each in in_time]


def run_half(lengths: np.ndarray, job: Job) -> Result | None:
    """Measures of the full global batches of `lengths`; None if a document waits for over half of them."""
    stream = plan.UnflushedStream(
        [Source(lengths=lengths)], seed=0, context_length=job.context_length, shuffle=False, num_epochs=1
    )
    packer = make_packer(stream, job, fingerprint="")
    total = int(lengths.sum())
    batches = total // job.batch_tokens
    timed = min(batches, max(LEAST_TIMED, TIMED_WINDOWS // job.global_batch_size))
    measured, waiting, time, work = [], 0, 0.0, 0.0
    for i, (step, measures) in enumerate(plan.steps(packer, job, batches * job.batch_tokens)):
        measured.append(measures)
        waiting = step.num_waiting
        if (i + 1) * timed // batches > i * timed // batches:  # evenly spread
            time += step_time(job, step.packing)
            work += float(document_work(step.packing.documents["length"], job.crossover_tokens).sum())
    first = min(int(rows["arrival"].min(initial=packer.step)) for rows in packer.waiting().values())
    if not work or 2 * (packer.step - first) > len(measured):
        return None
    return Result(job, time / work, metrics.summarise(measured, num_waiting=waiting))


def front(results: Sequence[Result]) -> list[Result]:
    """Results that no other one beats: as good in everything and better in something, or the same and earlier."""
    points = np.array([_objectives(result) for result in results])
    places = np.arange(len(points))
    kept = []
    for i, point in enumerate(points):
        no_worse, same = (points <= point).all(axis=1), (points == point).all(axis=1)
        if not (no_worse & (~same | (places < i))).any():
            kept.append(results[i])
    return kept


def _objectives(result: Result) -> tuple[float, ...]:
    """Measures that should be small, rounded as they are printed."""
    s = result.summary
    return round(result.time, 2), round(s.late_steps, 2), round(s.token_cv, 3), result.job.max_tokens


def _point(result: Result) -> dict[str, float]:
    """What is drawn of a tuning, and written, as JSON types."""
    return {"time": result.time, "late_steps": result.summary.late_steps, "token_cv": result.summary.token_cv}


def _entry(job: Job) -> dict[str, Any]:
    entry = {"flags": flags_of(job), "policy": job.packing.name}
    return entry | {"micro_batches": job.num_micro_batches, "max_tokens": job.max_tokens}


def _entries(rows: Sequence[Result], fits: Sequence[Result]) -> list[dict[str, Any]]:
    """The recommended tunings as JSON types, with their measures on both halves."""

    def measures(result: Result) -> dict[str, Any]:
        return {"time": result.time} | plan.without_times(result.summary)

    fitted = {each.job: measures(each) for each in fits}
    return [
        _entry(row.job) | _settings(row.job.packing) | {"held_out": measures(row), "fit": fitted[row.job]}
        for row in rows
    ]


def _table(rows: Sequence[Result]) -> Any:
    titles = ("", "time", "late", "at most", "token CV", "S_max / C", "micro-batches", "packing")
    cells = [
        (
            str(number),
            f"{time:.2f}",
            f"{s.late_steps:.2f}",
            f"{s.max_delay_steps}",
            f"{s.token_cv:.3f}",
            f"{job.max_tokens / job.context_length:.3g}",
            f"{job.num_micro_batches}",
            f"{job.packing.name} {','.join(map(str, np.ravel(list(_settings(job.packing).values()))))}",
        )
        for number, (job, time, s) in enumerate(rows, 1)
    ]
    return common.table(titles, cells, text="packing")
