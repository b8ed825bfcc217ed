"""`megatron-wlb tune`: find packing flags for document lengths.

Finds packing flags for documents in file order, or without LENGTHS for those of --data-path, shuffled as in training;
needs neither Megatron nor torch.

    megatron-wlb tune LENGTHS --seq-length C --global-batch-size N --model llama2-7b
    megatron-wlb tune LENGTHS --launch train.sh
    megatron-wlb tune --launch train.sh

The first half of the steps fits: every tuning of wlb and adaptive packing runs on it. Those that no other one beats
in all of imbalance, delay, tokens per step (CV) and S_max then run on the second half, whose numbers are printed, again
without those that are beaten there. Differences that are too small to print don't count. Each half is planned as by
`megatron-wlb plan --no-flush`; tunings under which a document waits for over half of it are left out, since they look
good only for what they don't run. Works are those of training: for the crossover, describe the model by its flags.
S_max is tried up to --wlb-max-tokens where that is given.
"""

import argparse
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from megatron_wlb.cli import common, plan
from megatron_wlb.cli.common import integer, progress, remark, write_json, writer
from megatron_wlb.cli.data import add_lengths, documents_of
from megatron_wlb.cli.flags import add_job_flags, packing_job
from megatron_wlb.job import Job
from megatron_wlb.plan import metrics
from megatron_wlb.plan.packer import make_packer
from megatron_wlb.plan.packing.adaptive import AdaptivePacking
from megatron_wlb.plan.packing.adaptive_core import FORCED_STEPS
from megatron_wlb.plan.packing.base import Packing
from megatron_wlb.plan.packing.wlb import WlbPacking
from megatron_wlb.plan.stream import Source
from megatron_wlb.settings import flag_with_value

FORMAT = "megatron-wlb-tune"
VERSION = 1
USAGE = "[LENGTHS] [FLAGS | LAUNCH LINE | --launch FILE] [--json FILE] [--picture FILE]"
LEAST_STEPS = 20
"""Steps in a half, under which its averages say nothing."""
S_MAX_WINDOWS = (1.1, 1.25, 1.5, 2.0)
THRESHOLD_SHARES = tuple(k / 8 for k in range(1, 8))
MAX_QUEUES = 3
MAX_DELAYS = (2 * FORCED_STEPS, 30)

Result = tuple[Job, metrics.Summary]
"""A tuning and its measures."""


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
    parser.add_argument("--picture", metavar="FILE.png", help="draw imbalance over delay and over the CV of tokens")
    parser.add_argument("--json", metavar="FILE", help="rows to write; - for standard output, the table on the other")
    add_job_flags(parser)
    add_lengths(parser)


def run(args: argparse.Namespace) -> None:
    """Sweep, print and write. Raises ValueError on wrong input or if nothing is left to recommend."""
    # Its lines are never cut: flags are to be pasted.
    console = common.console(args.json, width=300)
    if args.picture is not None:
        import matplotlib  # noqa: F401  # likewise an extra, and hours are about to be spent

        if Path(args.picture).suffix != ".png" or not Path(args.picture).resolve().parent.is_dir():
            raise ValueError(f"--picture {args.picture} must end in .png and be in a folder that exists")
    notes = list(args.remarks)
    job = packing_job(args, notes, alike=True)
    tunings = list(variants(job, _max_tokens(args, job), _packings(job.context_length)))
    fit, held_out = _halves(args, job, notes)
    with writer(args.json, "--json") as file:
        fits = _best(args, tunings, fit, "fit")
        rows = sorted(_best(args, [t for t, _ in fits], held_out, "held-out"), key=_objectives)
        entry = {"format": FORMAT, "version": VERSION, "micro_batches": job.num_micro_batches}
        entry |= {"context_length": job.context_length, "crossover": job.crossover_tokens}
        halves = {"fit": (0, len(fit)), "held_out": (len(fit), len(fit) + len(held_out))}
        write_json(file, entry | {"documents": halves, "rows": _entries(rows, fits)})
    console.print(_table(rows))
    console.print(
        f"{len(tunings)} tunings on {len(fit)} documents, {len(fits)} of them on {len(held_out)} held-out ones "
        f"({rows[0][1].steps} steps), whose numbers these are"
    )
    remark(notes)
    if args.picture is not None:
        from megatron_wlb.cli import pictures

        points = [point(*row, best=True) for row in rows]
        pictures.save(args.picture, lambda figure: pictures.front(figure, points, job.context_length), 5.6)


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
    return [math.ceil(windows * job.context_length / unit) * unit for windows in S_MAX_WINDOWS]


def thresholds_at(shares: Sequence[float], context_length: int) -> tuple[int, ...]:
    """Lengths from which on documents are outliers, in tokens, increasing, by their shares of the window."""
    return tuple(sorted({max(2, int(share * context_length)) for share in shares}))


def _packings(context_length: int) -> Iterator[Packing]:
    for delay in MAX_DELAYS:
        yield AdaptivePacking(max_delay_steps=delay)
    grid = thresholds_at(THRESHOLD_SHARES, context_length)
    for queues in range(1, MAX_QUEUES + 1):
        for thresholds in combinations(grid, queues):
            yield WlbPacking(outlier_thresholds=thresholds)


def variants(job: Job, max_tokens: Iterable[int], packings: Iterable[Packing]) -> Iterator[Job]:
    """The job with every one of `packings` at every S_max."""
    packings = list(packings)
    return (replace(job, max_tokens=s_max, packing=packing) for s_max in max_tokens for packing in packings)


def flags_of(job: Job) -> str:
    """The packing of a job, to paste into a training command."""
    settings = {"packing": job.packing.name, **_settings(job.packing), "max_tokens": job.max_tokens}
    return " ".join(flag_with_value(name, value) for name, value in settings.items())


def _settings(packing: Packing) -> dict[str, Any]:
    return asdict(packing)  # type: ignore[call-overload, no-any-return]


def _best(args: argparse.Namespace, tunings: Sequence[Job], lengths: np.ndarray, what: str) -> list[Result]:
    """The tunings that no other one beats on documents of `lengths`."""
    with progress(len(tunings), args.json, what) as advance:
        results = sweep(lengths, tunings, advance)
    if not results:
        raise ValueError(f"documents wait for over half of the {what} steps whatever the tuning; give more documents")
    in_time = [(t, s) for t, s in results if s.late_steps <= args.max_late]
    if not in_time:
        least = min(s.late_steps for _, s in results)
        raise ValueError(
            f"no tuning keeps --max-late {args.max_late:g}; the {what} steps reach {least:.3f}, give more than that"
        )
    return front(in_time)


def sweep(lengths: np.ndarray, tunings: Sequence[Job], advance: Callable[[int], None]) -> list[Result]:
    """`run_half` of every tuning that passes it; calls `advance(1)` after each."""
    results = []
    for tuning in tunings:
        summary = run_half(lengths, tuning)
        if summary is not None:
            results.append((tuning, summary))
        advance(1)
    return results


def run_half(lengths: np.ndarray, job: Job) -> metrics.Summary | None:
    """Measures of the full global batches of `lengths`; None if a document waits for over half of them."""
    stream = plan.UnflushedStream(
        [Source(lengths=lengths)], seed=0, context_length=job.context_length, shuffle=False, num_epochs=1
    )
    packer = make_packer(stream, job, fingerprint="")
    total = int(lengths.sum())
    measured, waiting = [], 0
    for step, measures in plan.steps(packer, job, total - total % job.batch_tokens):
        measured.append(measures)
        waiting = step.num_waiting
    first = min(int(rows["arrival"].min(initial=packer.step)) for rows in packer.waiting().values())
    if not measured or 2 * (packer.step - first) > len(measured):
        return None
    return metrics.summarise(measured, num_waiting=waiting)


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
    job, s = result
    return round(s.imbalance_mean, 4), round(s.late_steps, 3), round(s.token_cv, 3), job.max_tokens


def point(job: Job, summary: metrics.Summary, *, best: bool) -> dict[str, Any]:
    """A tuning in a picture of the front, as JSON types."""
    names = ("imbalance_mean", "imbalance_p95", "late_steps", "max_delay_steps", "token_cv")
    return _entry(job) | {"best": best} | {name: getattr(summary, name) for name in names}


def _entry(job: Job) -> dict[str, Any]:
    return {"flags": flags_of(job), "policy": job.packing.name, "max_tokens": job.max_tokens}


def _entries(rows: Sequence[Result], fits: Sequence[Result]) -> list[dict[str, Any]]:
    """The recommended tunings as JSON types, with their measures on both halves."""
    fitted = {job: plan.without_times(summary) for job, summary in fits}
    return [
        _entry(job) | _settings(job.packing) | {"held_out": plan.without_times(s), "fit": fitted[job]}
        for job, s in rows
    ]


def _table(rows: Sequence[Result]) -> Any:
    titles = ("imbalance", "p95", "late", "at most", "token CV", "S_max / C", "flags")
    cells = [
        (
            f"{s.imbalance_mean:.4f}",
            f"{s.imbalance_p95:.4f}",
            f"{s.late_steps:.3f}",
            f"{s.max_delay_steps}",
            f"{s.token_cv:.3f}",
            f"{job.max_tokens / job.context_length:.3g}",
            flags_of(job),
        )
        for job, s in rows
    ]
    return common.table(titles, cells, text="flags")
