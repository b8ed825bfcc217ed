"""`megatron-wlb tune`: document lengths in, the packing flags that are worth choosing from out."""

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np

from megatron_wlb.adapter.arguments import config_from_args
from megatron_wlb.cli import common, plan
from megatron_wlb.cli.common import integer, progress, remark, write_json, writer
from megatron_wlb.cli.job import add_job_arguments, crossover_of, max_tokens_of, pasted, require, unit_of
from megatron_wlb.cli.lengths import FORMATS, read_lengths
from megatron_wlb.config import PACKING_MODES, SHORTEST_DELAY_BOUND
from megatron_wlb.plan import metrics, native
from megatron_wlb.plan.packing.adaptive import TOLERANCES

FORMAT = "megatron-wlb-tune"
VERSION = 1
LEAST_STEPS = 20
"""Steps in a half, under which its averages say nothing."""
S_MAX_WINDOWS = (1.1, 1.25, 1.5, 2.0)
THRESHOLD_SHARES = tuple(k / 8 for k in range(1, 8))
MAX_QUEUES = 3
MAX_DELAYS = (SHORTEST_DELAY_BOUND, 20, 30)
BALANCE_TOLERANCES = (0.003, 0.015, 0.05)
AGE_TOLERANCES = (0.002, 0.008, 0.035)

_DESCRIPTION = """\
Find packing flags for documents in file order, without Megatron and without torch.

    megatron-wlb tune LENGTHS --seq-length C --global-batch-size N --model llama2-7b
    megatron-wlb tune LENGTHS --launch train.sh

The first half of the steps fits: every tuning of wlb and adaptive packing runs on it. Those that no other one beats
in all of imbalance, delay, tokens per step (CV) and S_max then run on the second half, whose numbers are printed, again
without those that are beaten there. Differences that are too small to print don't count. Each half is planned as by
`megatron-wlb plan --no-flush`; tunings under which a document waits for over half of it are left out, since they look
good only for what they don't run. Works are those of training: for the crossover, describe the model by its flags.
S_max is tried up to --wlb-max-tokens where that is given.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """A point of the sweep."""

    policy: str
    max_tokens: int
    settings: dict[str, Any]
    """Those of `make_policy` that the sweep chose, apart from S_max."""

    @property
    def flags(self) -> str:
        """To paste into a training command."""
        chosen = {"packing": self.policy, **self.settings, "max_tokens": self.max_tokens}
        return " ".join(pasted("packing_mode" if name == "mode" else name, value) for name, value in chosen.items())


Result = tuple[Tuning, metrics.Summary]


def register(commands: Any) -> None:
    """Add the command to the subparsers `commands`."""
    parser = commands.add_parser(
        "tune",
        help="find packing flags for document lengths",
        description=_DESCRIPTION,
        usage="%(prog)s LENGTHS [FLAGS | LAUNCH LINE | --launch FILE] [--json FILE] [--picture FILE]",
    )
    parser.add_argument("lengths", metavar="LENGTHS", help=FORMATS)
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
    add_job_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Sweep, print and write. Raises ValueError on wrong input or if nothing is left to recommend."""
    # Its lines are never cut: flags are to be pasted.
    console = common.console(args.json, width=300)
    if args.picture is not None:
        import matplotlib  # noqa: F401  # likewise an extra, and hours are about to be spent

        if Path(args.picture).suffix != ".png" or not Path(args.picture).resolve().parent.is_dir():
            raise ValueError(f"--picture {args.picture} must end in .png and be in a folder that exists")
    notes = list(args.remarks)
    sizes, candidates = _sizes(args, notes)
    fit, held_out = _halves(args)
    tunings = list(_tunings(args.seq_length, candidates))
    with writer(args.json, "--json") as file:
        fits = _best(args, tunings, fit, sizes, "fit")
        rows = sorted(_best(args, [t for t, _ in fits], held_out, sizes, "held-out"), key=_objectives)
        entry = {"format": FORMAT, "version": VERSION, "micro_batches": args.global_batch_size}
        entry |= {"context_length": args.seq_length, "crossover": sizes["crossover_tokens"]}
        halves = {"fit": (0, len(fit)), "held_out": (len(fit), len(fit) + len(held_out))}
        write_json(file, entry | {"documents": halves, "rows": _entries(rows, fits)})
    console.print(_table(rows, args.seq_length))
    console.print(
        f"{len(tunings)} tunings on {len(fit)} documents, {len(fits)} of them on {len(held_out)} held-out ones "
        f"({rows[0][1].steps} steps), whose numbers these are"
    )
    remark(notes)
    if args.picture is not None:
        from megatron_wlb.cli import pictures

        points = [point(t, s, best=True) for t, s in rows]
        pictures.save(args.picture, lambda figure: pictures.front(figure, points, args.seq_length), 5.6)


def _sizes(args: argparse.Namespace, notes: list[str]) -> tuple[dict[str, int], list[int]]:
    """N, C and crossover as `run_half` takes them, and values of S_max in tokens."""
    require(args, "seq_length", "global_batch_size")
    window, config = args.seq_length, config_from_args(args)
    crossover = crossover_of(args, config, notes)
    unit = math.lcm(unit_of(args), math.gcd(window // 8, 128))  # shared by the ranks of most layouts that windows are
    candidates = s_max_candidates(window, unit)
    if config.max_tokens is not None or config.memory_budget is not None:
        most = max_tokens_of(args, config, None, notes)
        candidates = [s_max for s_max in candidates if s_max < most] + [most]
    sizes = {"num_micro_batches": args.global_batch_size, "context_length": window, "crossover_tokens": crossover}
    sizes["use_native"] = native.use(config.planner)
    return sizes, candidates


def _best(
    args: argparse.Namespace, tunings: Sequence[Tuning], lengths: np.ndarray, sizes: dict[str, int], what: str
) -> list[Result]:
    """Those tunings that no other one beats on documents of `lengths`."""
    with progress(len(tunings), args.json, what) as advance:
        found = sweep(lengths, tunings, advance, **sizes)
    if not found:
        raise ValueError(f"documents wait for over half of the {what} steps whatever the tuning; give more documents")
    in_time = [(t, s) for t, s in found if s.late_steps <= args.max_late]
    if not in_time:
        least = min(s.late_steps for _, s in found)
        raise ValueError(
            f"no tuning keeps --max-late {args.max_late:g}; the {what} steps reach {least:.3f}, give more than that"
        )
    return front(in_time)


def sweep(lengths: np.ndarray, tunings: Sequence[Tuning], advance: Callable[[int], None], **sizes: Any) -> list[Result]:
    """What `run_half` finds of every tuning that it finds something of. `advance` is told of every tuning."""
    found = []
    for tuning in tunings:
        summary = run_half(lengths, tuning, **sizes)
        if summary is not None:
            found.append((tuning, summary))
        advance(1)
    return found


def run_half(
    lengths: np.ndarray,
    tuning: Tuning,
    *,
    num_micro_batches: int,
    context_length: int,
    crossover_tokens: int,
    use_native: bool,
) -> metrics.Summary | None:
    """Measures of the full global batches of `lengths`; None if a document waits for over half of them."""
    sizes = {"num_micro_batches": num_micro_batches, "crossover_tokens": crossover_tokens}
    settings = {"policy": tuning.policy, "max_tokens": tuning.max_tokens, "use_native": use_native, **tuning.settings}
    _, packer = plan.in_file_order(lengths, context_length, flush=False, **sizes, **settings)
    until = int(lengths.sum())
    until -= until % (num_micro_batches * context_length)
    measured, waiting = [], 0
    for step, found in plan.steps(packer, num_micro_batches, context_length, crossover_tokens, until):
        measured.append(found)
        waiting = step.num_waiting
    first = min(int(rows["arrival"].min(initial=packer.step)) for rows in packer.waiting().values())
    if not measured or 2 * (packer.step - first) > len(measured):
        return None
    return metrics.summarise(measured, num_waiting=waiting)


def front(results: Sequence[Result]) -> list[Result]:
    """Those that no other one beats: as good in everything and better in something, or the same and earlier."""
    points = np.array([_objectives(result) for result in results])
    places = np.arange(len(points))
    kept = []
    for i, point in enumerate(points):
        no_worse, same = (points <= point).all(axis=1), (points == point).all(axis=1)
        if not (no_worse & (~same | (places < i))).any():
            kept.append(results[i])
    return kept


def _objectives(result: Result) -> tuple[float, ...]:
    """Fewer is better in each; as printed."""
    tuning, s = result
    return round(s.imbalance_mean, 4), round(s.late_steps, 3), round(s.token_cv, 3), tuning.max_tokens


def _tunings(context_length: int, max_tokens: Sequence[int]) -> Iterator[Tuning]:
    grid = thresholds_at(THRESHOLD_SHARES, context_length)
    settings: list[tuple[str, dict[str, Any]]] = [
        ("adaptive", {"mode": mode, "max_delay_steps": delay}) for mode, delay in product(PACKING_MODES, MAX_DELAYS)
    ]
    for mode, *tolerances in product(PACKING_MODES, BALANCE_TOLERANCES, AGE_TOLERANCES):
        names = ("balance_tolerance", "age_tolerance")
        changed = {n: x for n, x, own in zip(names, tolerances, TOLERANCES[mode], strict=True) if x != own}
        if changed:
            # Under a tight bound on the delay, documents are forced before their age counts.
            settings.append(("adaptive", {"mode": mode, "max_delay_steps": MAX_DELAYS[-1], **changed}))
    for queues in range(1, MAX_QUEUES + 1):
        settings += [("wlb", {"outlier_thresholds": chosen}) for chosen in combinations(grid, queues)]
    for s_max, (policy, chosen) in product(max_tokens, settings):
        yield Tuning(policy=policy, max_tokens=s_max, settings=chosen)


def thresholds_at(shares: Sequence[float], context_length: int) -> tuple[int, ...]:
    """Lengths from which on documents are outliers, in tokens, increasing, by their shares of the window."""
    return tuple(sorted({max(2, int(share * context_length)) for share in shares}))


def s_max_candidates(context_length: int, unit: int) -> list[int]:
    """Values of S_max in tokens, multiples of `unit`, increasing."""
    return [math.ceil(windows * context_length / unit) * unit for windows in S_MAX_WINDOWS]


def _halves(args: argparse.Namespace) -> tuple[np.ndarray, np.ndarray]:
    """Lengths of the documents of the fit steps, and of as many held-out steps behind them."""
    lengths = read_lengths(args.lengths)
    ends, batch_tokens = np.cumsum(lengths), args.global_batch_size * args.seq_length
    half_tokens = min(args.steps, int(ends[-1]) // batch_tokens) // 2 * batch_tokens
    middle = int(np.searchsorted(ends, half_tokens)) + 1
    stop = int(np.searchsorted(ends, ends[middle - 1] + half_tokens)) + 1
    fit, held_out = lengths[:middle], lengths[middle:stop]
    steps = int(min(fit.sum(), held_out.sum())) // batch_tokens
    if steps < LEAST_STEPS:
        # The documents at which the halves end may reach far beyond them.
        needed = 2 * (LEAST_STEPS * batch_tokens + int(lengths.max()))
        raise ValueError(
            f"{args.lengths} holds {len(lengths)} documents of {ends[-1]} tokens, {steps} steps in a half, where "
            f"{LEAST_STEPS} are needed; give at least {needed} tokens, about "
            f"{math.ceil(needed * len(lengths) / int(ends[-1]))} documents like these"
        )
    return fit, held_out


def point(tuning: Tuning, summary: metrics.Summary, *, best: bool) -> dict[str, Any]:
    """What a picture of the front shows, as JSON types."""
    names = ("imbalance_mean", "imbalance_p95", "late_steps", "max_delay_steps", "token_cv")
    return {"flags": tuning.flags, "policy": tuning.policy, "max_tokens": tuning.max_tokens, "best": best} | {
        name: getattr(summary, name) for name in names
    }


def _entries(rows: Sequence[Result], fits: Sequence[Result]) -> list[dict[str, Any]]:
    """What is recommended, as JSON types, with its measures on both halves."""
    fitted = {tuning.flags: plan.without_times(summary) for tuning, summary in fits}
    return [
        {"flags": t.flags, "policy": t.policy, "max_tokens": t.max_tokens, **t.settings}
        | {"held_out": plan.without_times(s), "fit": fitted[t.flags]}
        for t, s in rows
    ]


def _table(rows: Sequence[Result], context_length: int) -> Any:
    titles = ("imbalance", "p95", "late", "at most", "token CV", "S_max / C", "flags")
    table = common.table(titles, text="flags")
    for tuning, s in rows:
        measures = [f"{s.imbalance_mean:.4f}", f"{s.imbalance_p95:.4f}", f"{s.late_steps:.3f}", f"{s.max_delay_steps}"]
        windows = tuning.max_tokens / context_length
        table.add_row(*measures, f"{s.token_cv:.3f}", f"{windows:.3g}", tuning.flags)
    return table
