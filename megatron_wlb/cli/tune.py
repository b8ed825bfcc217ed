"""`megatron-wlb tune`: document lengths in, the packing flags that are worth choosing from out."""

import argparse
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np

from megatron_wlb.cli import plan
from megatron_wlb.cli.lengths import read_lengths
from megatron_wlb.config import PACKING_MODES
from megatron_wlb.plan import metrics
from megatron_wlb.plan.packer import make_packer
from megatron_wlb.plan.packing.adaptive import SHORTEST_DELAY_BOUND, TOLERANCES
from megatron_wlb.plan.stream import Source

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

The first half of the steps fits: every tuning of wlb and adaptive packing runs on it. Those that no other one beats
in all of imbalance, delay, tokens per step (CV) and S_max then run on the second half, whose numbers are printed, again
without those that are beaten there. Differences that are too small to print don't count. Each half is planned as by
`megatron-wlb plan --no-flush`; tunings under which a document waits for over half of it are left out, since they look
good only for what they don't run.
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
        names = {"mode": "packing-mode"}
        chosen = {"packing": self.policy, **self.settings, "max_tokens": self.max_tokens}
        return " ".join(
            f"--wlb-{names.get(name, name.replace('_', '-'))} "
            + (",".join(map(str, value)) if isinstance(value, tuple) else str(value))
            for name, value in chosen.items()
        )


Result = tuple[Tuning, metrics.Summary]


def register(commands: Any) -> None:
    """Add the command to the subparsers `commands`."""
    parser = commands.add_parser(
        "tune",
        help="find packing flags for document lengths",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    plan.add_data_arguments(parser)
    parser.add_argument(
        "--max-tokens",
        type=plan.increasing,
        metavar="a,b",
        help="longest micro-batches in tokens to try, each at least C; default: "
        f"{', '.join(map(str, S_MAX_WINDOWS))} windows",
    )
    parser.add_argument(
        "--steps",
        type=plan.integer(2 * LEAST_STEPS, 1 << 20),
        default=300,
        metavar="T",
        help="use the documents of the first T steps, half of them held out; default: 300",
    )
    parser.add_argument(
        "--max-late", type=_steps, default=math.inf, metavar="STEPS", help="bound on the mean delay of a token"
    )
    parser.add_argument("--picture", metavar="FILE.png", help="draw imbalance over delay and over the CV of tokens")
    parser.add_argument("--json", metavar="FILE", help="rows to write; - for standard output, the table on the other")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Sweep, print and write. Raises ValueError on wrong input or if nothing is left to recommend."""
    from rich.console import Console  # an extra; `main` says which

    draw = _painter(args.picture) if args.picture is not None else None
    unit = math.gcd(args.context_length, 128)  # micro-batches are shared by ranks as windows are
    candidates = args.max_tokens or [math.ceil(s * args.context_length / unit) * unit for s in S_MAX_WINDOWS]
    crossover = plan.checked_crossover(args, *candidates)
    sizes = {
        "num_micro_batches": args.micro_batches,
        "context_length": args.context_length,
        "crossover_tokens": crossover,
    }
    fit, held_out = _halves(args)
    tunings = list(_tunings(args.context_length, candidates))

    def evaluate(chosen: Sequence[Tuning], lengths: np.ndarray, what: str) -> list[Result]:
        with plan.progress(len(chosen), args.json, what) as advance:
            found = []
            for tuning in chosen:
                summary = run_half(lengths, tuning, **sizes)
                if summary is not None:
                    found.append((tuning, summary))
                advance(1)
        if not found:
            raise ValueError(
                f"documents wait for over half of the {what} steps whatever the tuning; give more documents"
            )
        in_time = [(t, s) for t, s in found if s.late_steps <= args.max_late]
        if not in_time:
            least = min(s.late_steps for _, s in found)
            raise ValueError(
                f"no tuning keeps --max-late {args.max_late:g}; the {what} steps reach {least:.3f}, give more than that"
            )
        return front(in_time)

    with plan.writer(args.json, "--json") if args.json is not None else nullcontext() as file:
        fits = evaluate(tunings, fit, "fit")
        fitted = {tuning.flags: summary for tuning, summary in fits}
        rows = sorted(evaluate([t for t, _ in fits], held_out, "held-out"), key=_objectives)
        if file is not None:
            halves = {"fit": (0, len(fit)), "held_out": (len(fit), len(fit) + len(held_out))}
            entry = {
                "format": FORMAT,
                "version": VERSION,
                "micro_batches": args.micro_batches,
                "context_length": args.context_length,
                "crossover": crossover,
                "documents": halves,
                "rows": [
                    {"flags": t.flags, "policy": t.policy, "max_tokens": t.max_tokens, **t.settings}
                    | {"held_out": _measures(s), "fit": _measures(fitted[t.flags])}
                    for t, s in rows
                ],
            }
            file.write(json.dumps(entry, indent=1) + "\n")
    console = Console(stderr=args.json == "-", width=300, highlight=False)  # never cut flags that are to be pasted
    console.print(_table(rows, args.context_length))
    console.print(
        f"{len(tunings)} tunings on {len(fit)} documents, {len(fits)} of them on {len(held_out)} held-out ones "
        f"({rows[0][1].steps} steps), whose numbers these are"
    )
    if draw is not None:
        draw(rows, args.context_length)


def run_half(
    lengths: np.ndarray, tuning: Tuning, *, num_micro_batches: int, context_length: int, crossover_tokens: int
) -> metrics.Summary | None:
    """Measures of the full global batches of `lengths`; None if a document waits for over half of them."""
    stream = plan.UnflushedStream(
        [Source(pairs=lengths)], seed=0, context_length=context_length, shuffle=False, num_epochs=1
    )
    packer = make_packer(
        stream,
        num_micro_batches=num_micro_batches,
        crossover_tokens=crossover_tokens,
        policy=tuning.policy,
        max_tokens=tuning.max_tokens,
        fingerprint="",
        **tuning.settings,
    )
    batch_tokens = num_micro_batches * context_length
    measured, waiting = [], 0
    for step, _ in plan.steps(packer, batch_tokens, int(lengths.sum()) // batch_tokens * batch_tokens):
        measured.append(
            metrics.measure(step.packing, step.step, crossover_tokens=crossover_tokens, context_length=context_length)
        )
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
    tuning, summary = result
    return (
        round(summary.imbalance_mean, 4),
        round(summary.late_steps, 3),
        round(summary.token_cv, 3),
        tuning.max_tokens,
    )


def _tunings(context_length: int, max_tokens: Sequence[int]) -> Iterator[Tuning]:
    grid = sorted({max(2, int(share * context_length)) for share in THRESHOLD_SHARES})
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


def _halves(args: argparse.Namespace) -> tuple[np.ndarray, np.ndarray]:
    """Lengths of the documents of the fit steps, and of as many held-out steps behind them."""
    lengths = read_lengths(args.lengths)
    ends, batch_tokens = np.cumsum(lengths), args.micro_batches * args.context_length
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


def _measures(summary: metrics.Summary) -> dict[str, Any]:
    return {name: value for name, value in asdict(summary).items() if not name.startswith("plan_ms")}


def _table(rows: Sequence[Result], context_length: int) -> Any:
    from rich.table import Table

    table = Table(box=None)
    for title in ("imbalance", "p95", "late", "at most", "token CV", "S_max / C"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("flags", no_wrap=True)
    for tuning, s in rows:
        table.add_row(
            f"{s.imbalance_mean:.4f}",
            f"{s.imbalance_p95:.4f}",
            f"{s.late_steps:.3f}",
            str(s.max_delay_steps),
            f"{s.token_cv:.3f}",
            f"{tuning.max_tokens / context_length:.3g}",
            tuning.flags,
        )
    return table


def _painter(picture: str) -> Callable[[Sequence[Result], int], None]:
    """Draws results into the file `picture`. Raises what would keep it from that before hours have been spent."""
    import matplotlib  # an extra; `main` says which

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    path = Path(picture)
    if path.suffix != ".png" or not path.resolve().parent.is_dir():
        raise ValueError(f"--picture {picture} must end in .png and be in a folder that exists")

    def draw(rows: Sequence[Result], context_length: int) -> None:
        figure, axes = plt.subplots(1, 2, figsize=(11, 4), sharey=True, constrained_layout=True)
        largest = max(tuning.max_tokens for tuning, _ in rows) / context_length
        for axis, measure, label in zip(
            axes, ("late_steps", "token_cv"), ("mean delay (steps)", "tokens per step, CV"), strict=True
        ):
            for policy, marker in (("wlb", "o"), ("adaptive", "s")):
                here = [(getattr(s, measure), s.imbalance_mean, t.max_tokens) for t, s in rows if t.policy == policy]
                x, y, s_max = np.array(here, float).reshape(-1, 3).T
                points = axis.scatter(
                    x, y, c=s_max / context_length, vmin=1, vmax=largest, cmap="viridis", marker=marker, label=policy
                )
            axis.set(xlabel=label)
            axis.spines[["top", "right"]].set_visible(False)
        axes[0].set_ylabel("mean imbalance")
        axes[0].legend(frameon=False)
        figure.colorbar(points, ax=axes, label="S_max (windows)")
        figure.suptitle("Held-out steps: down and to the left is better", x=0.01, ha="left", fontsize=11)
        figure.savefig(path, dpi=110)
        plt.close(figure)

    return draw


def _steps(text: str) -> float:
    """An argparse type: a number of steps that is not negative."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of steps, such as 0.5")
    return value
