"""`megatron-wlb plan`: document lengths in, the micro-batches of every step out, as JSON lines."""

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from megatron_wlb.cli.lengths import FORMATS, read_lengths
from megatron_wlb.config import MAX_TOKENS, PACKING_MODES, PLANNERS, WlbConfig
from megatron_wlb.plan import metrics, native
from megatron_wlb.plan.packer import PackedStep, Packer, make_packer
from megatron_wlb.plan.packing import POLICIES
from megatron_wlb.plan.stream import DocumentStream, Source
from megatron_wlb.plan.types import DOCUMENT
from megatron_wlb.plan.workload import load_profile

FORMAT = "megatron-wlb-plan"
VERSION = 1
DEFAULT_CROSSOVER = 51_200
"""About that of a 7B model on an H100 (the paper's main setting)."""
_FLAGS_OF = {
    "outlier_thresholds": ("wlb",),
    "mode": ("adaptive",),
    "max_delay_steps": ("adaptive",),
    "balance_tolerance": ("adaptive",),
    "age_tolerance": ("adaptive",),
    "global_batches": ("fixed", "ilp"),
}
"""Flags that only some policies look at; with another one they would do nothing, and are refused."""

_DESCRIPTION = """\
Plan the micro-batches of all training steps for documents in file order, without Megatron and without torch.

Lengths count what is trained on. A Megatron dataset states tokens instead: of a document of T tokens, T - 1 are
trained, since the last has no successor. Documents of length 0 are left out and counted. Documents longer than
the context window are cut at every multiple of it.

The plan has one JSON object a line: a header; for every step its micro-batches, lists of [document, offset, length];
last a summary and what has not run. The same input gives the same bytes, so planning times are printed, not written.
"""


def register(commands: Any) -> None:
    """Add the command to the subparsers `commands`."""
    parser = commands.add_parser(
        "plan",
        help="plan micro-batches from document lengths",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    positive = integer(1, 1 << 35)
    add_data_arguments(parser)
    parser.add_argument(
        "--max-tokens",
        type=integer(1, MAX_TOKENS),
        metavar="S",
        help="longest micro-batch in tokens, at least C; default: 1.25 C",
    )
    parser.add_argument("--policy", choices=POLICIES, required=True, help="how documents become micro-batches")
    parser.add_argument(
        "--mode", choices=PACKING_MODES, help="adaptive: what the policy keeps close; default: constant-tokens"
    )
    parser.add_argument(
        "--outlier-thresholds",
        type=increasing,
        metavar="a,b",
        help="wlb: lengths from which documents wait in queues; default: a quarter and a half of C",
    )
    parser.add_argument(
        "--global-batches", type=positive, metavar="k", help="fixed, ilp: steps that are packed at once; default: 1"
    )
    parser.add_argument(
        "--max-delay-steps", type=positive, metavar="D", help="adaptive: bound on the delay of every document"
    )
    parser.add_argument(
        "--balance-tolerance",
        type=float,
        metavar="X",
        help="adaptive: a step is balanced if its largest micro-batch has at most 1 + X times the mean work",
    )
    parser.add_argument(
        "--age-tolerance",
        type=float,
        metavar="X",
        help="adaptive: added to the balance tolerance for every step that the oldest document of a step is late",
    )
    parser.add_argument(
        "--no-flush",
        dest="flush",
        action="store_false",
        help="stop after the last full global batch of N * C tokens, and report what has not run as waiting",
    )
    parser.add_argument(
        "--planner", choices=PLANNERS, default="auto", help="packing core; both give the same plans (default: auto)"
    )
    parser.add_argument("--output", required=True, metavar="FILE", help="plan to write; - for standard output")
    parser.set_defaults(run=run)


def add_data_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what documents are packed into micro-batches of what: LENGTHS, N, C and the crossover."""
    parser.add_argument("lengths", metavar="LENGTHS", help=FORMATS)
    parser.add_argument(
        "--micro-batches", type=integer(1, 1 << 20), required=True, metavar="N", help="micro-batches per step"
    )
    parser.add_argument(
        "--context-length", type=integer(1, MAX_TOKENS), required=True, metavar="C", help="context window in tokens"
    )
    crossover = parser.add_mutually_exclusive_group()
    crossover.add_argument(
        "--crossover",
        type=integer(1, 1 << 35),
        metavar="Lc",
        help="document length in tokens at which attention costs as much as everything else; default: "
        f"{DEFAULT_CROSSOVER}",
    )
    crossover.add_argument("--profile", metavar="FILE", help="take the crossover from a profile")


def run(args: argparse.Namespace) -> None:
    """Plan everything and write it. Raises ValueError on wrong input, before the output is touched."""
    settings = _settings(args)
    lengths = read_lengths(args.lengths)
    total, batch_tokens = int(lengths.sum()), args.micro_batches * args.context_length
    until = math.inf if args.flush else total // batch_tokens * batch_tokens
    if not until:
        raise ValueError(
            f"{args.lengths} holds {total} tokens, under one global batch of {args.micro_batches} x "
            f"{args.context_length}, of which --no-flush makes no step; leave it out or give more documents"
        )
    stream = (DocumentStream if args.flush else UnflushedStream)(
        [Source(pairs=lengths)], seed=0, context_length=args.context_length, shuffle=False, num_epochs=1
    )
    packer = make_packer(stream, policy=args.policy, fingerprint="", **settings)
    measured: list[metrics.StepMetrics] = []
    state = packer.state()
    with writer(args.output) as file, progress(total, args.output) as advance:
        _write(file, _header(args.policy, args.context_length, settings, len(lengths)))
        for step, plan_ms in steps(packer, batch_tokens, until):
            micro_batches = [_references(step.packing.micro_batch(i)) for i in range(len(step.packing))]
            _write(file, {"step": step.step, "micro_batches": micro_batches})
            measured.append(
                metrics.measure(
                    step.packing,
                    step.step,
                    crossover_tokens=settings["crossover_tokens"],
                    context_length=args.context_length,
                    plan_ms=plan_ms,
                )
            )
            state = step.state
            advance(measured[-1].tokens)
        if not measured:
            raise ValueError("every document waits, so --no-flush leaves no step; leave it out or give more documents")
        waiting = _waiting(stream, state, total)
        summary = metrics.summarise(measured, num_waiting=len(waiting))
        # Without times, so that the same input gives the same bytes.
        entries = {name: value for name, value in asdict(summary).items() if not name.startswith("plan_ms")}
        entries["empty_documents"] = int((lengths == 0).sum())
        _write(file, {"summary": entries, "waiting": _references(waiting)})
    _print(summary, entries["empty_documents"])


def _print(summary: metrics.Summary, num_empty: int) -> None:
    print(
        f"{summary.steps} steps: imbalance {summary.imbalance_mean:.4f} (p95 {summary.imbalance_p95:.4f}), late "
        f"{summary.late_steps:.2f} steps (at most {summary.max_delay_steps}), token CV {summary.token_cv:.3f}; waiting "
        f"{summary.waiting_documents}; empty documents left out {num_empty}; planned in {summary.plan_ms_median:.2f} "
        f"ms a step ({summary.plan_ms_min:.2f} to {summary.plan_ms_max:.2f})",
        file=sys.stderr,
    )


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """What `make_packer` is told. Raises ValueError for flags that contradict each other or would do nothing."""
    for name, policies in _FLAGS_OF.items():
        if getattr(args, name) is not None and args.policy not in policies:
            raise ValueError(
                f"--{name.replace('_', '-')} is for --policy {' and '.join(policies)}; leave it out for {args.policy}"
            )
    max_tokens = args.max_tokens or math.ceil(1.25 * args.context_length)
    if args.planner == "native" and not native.AVAILABLE:
        raise ValueError("--planner native, but the native core was not built; reinstall with a C++ compiler")
    optional = {
        "mode": args.mode,
        "max_delay_steps": args.max_delay_steps,
        "balance_tolerance": args.balance_tolerance,
        "age_tolerance": args.age_tolerance,
        "num_global_batches": args.global_batches,
    }
    return {
        "num_micro_batches": args.micro_batches,
        "max_tokens": max_tokens,
        "crossover_tokens": checked_crossover(args, max_tokens),
        "outlier_thresholds": WlbConfig(outlier_thresholds=args.outlier_thresholds).thresholds_for(args.context_length),
        "use_native": native.AVAILABLE and args.planner != "python",
        **{name: value for name, value in optional.items() if value is not None},
    }


def checked_crossover(args: argparse.Namespace, *max_tokens: int) -> int:
    """The crossover of the arguments of `add_data_arguments`. Raises ValueError if they clash with a value of S_max."""
    context_length, num_micro_batches = args.context_length, args.micro_batches
    crossover = args.crossover or DEFAULT_CROSSOVER
    if args.profile is not None:
        crossover = load_profile(args.profile).crossover_tokens
        if crossover is None:
            raise ValueError(f"profile {args.profile} states no crossover_tokens; add it or give --crossover instead")
    for s_max in max_tokens:
        if s_max < context_length:
            raise ValueError(
                f"--max-tokens {s_max} is under --context-length {context_length}: a document of a full window would "
                f"fit nowhere; give at least {context_length}"
            )
        if num_micro_batches * s_max * (context_length + crossover) >= 1 << 63:
            raise ValueError(
                f"the work of {num_micro_batches} micro-batches of {s_max} tokens at a crossover of {crossover} "
                "overflows 64 bits; lower one of them"
            )
    return int(crossover)


def _header(policy: str, context_length: int, settings: dict[str, Any], num_documents: int) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "version": VERSION,
        "policy": policy,
        "micro_batches": settings["num_micro_batches"],
        "context_length": context_length,
        "max_tokens": settings["max_tokens"],
        "crossover": settings["crossover_tokens"],
        "documents": num_documents,
    }


class UnflushedStream(DocumentStream):
    """Says that the data is at its end only to a policy that asks for more than there is.

    The end may lie within the last full global batch; a policy that knew would flush in that step already.
    """

    _asked_beyond = False

    @cached_property
    def _total(self) -> int:
        return sum(int(source.pairs.sum()) for source in self.sources)

    @property
    def exhausted(self) -> bool:
        return self._asked_beyond and super().exhausted

    def take(self, limit: int) -> np.ndarray:
        self._asked_beyond = limit > self._total
        return super().take(limit)


def steps(packer: Packer, batch_tokens: int, until: float) -> Iterator[tuple[PackedStep, float]]:
    """Steps whose global batches end at or before pair `until` of the stream, and the milliseconds each took."""
    state = packer.state()
    while not packer.finished and _batches_end(state, batch_tokens) + batch_tokens <= until:
        begin = time.perf_counter()
        step = packer.next()
        plan_ms = (time.perf_counter() - begin) * 1e3
        state = step.state
        if _batches_end(state, batch_tokens) > until:
            return  # all that the last full global batch brought waits, and the packer moved on to get a step
        yield step, plan_ms


def _batches_end(state: dict[str, Any], batch_tokens: int) -> int:
    """Pair of the stream at which the global batch of the last planned step ends."""
    step, position = state["base"]
    return int(position + (state["step"] - step) * batch_tokens)


def _waiting(stream: DocumentStream, state: dict[str, Any], total: int) -> np.ndarray:
    """What had not run when the packer was in `state`, DOCUMENT [n] in file order: in queues, or still to come."""
    queues = [np.array([tuple(row) for row in rows], DOCUMENT) for rows in state["waiting"].values()]
    stream.load_state(state["stream"])
    return np.sort(np.concatenate([*queues, stream.take(total)]), order=["index", "offset"])


def _references(rows: np.ndarray) -> list[list[int]]:
    """[document, offset, length] of DOCUMENT rows."""
    return np.stack([rows["document"], rows["offset"], rows["length"]], axis=1).tolist()


def _write(file: TextIO, entry: dict[str, Any]) -> None:
    file.write(json.dumps(entry) + "\n")


@contextmanager
def writer(output: str, flag: str = "--output") -> Iterator[TextIO]:
    """A file that appears under its name only when it is complete; - for standard output."""
    if output == "-":
        yield sys.stdout
        sys.stdout.flush()
        return
    path = Path(output).resolve()
    if path.exists() and not path.is_file():
        with path.open("w") as file:  # a pipe or /dev/null, which must not be replaced
            yield file
        return
    if not path.parent.is_dir():
        raise ValueError(f"{flag} {output}: the folder {path.parent} does not exist; create it or name another")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w") as file:
            yield file
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def progress(total: int, output: str | None, text: str = "planning") -> Iterator[Callable[[int], None]]:
    """A bar up to `total` on standard error, if that is a terminal without the output, and rich is installed."""
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        yield lambda amount: None
        return
    shown = sys.stderr.isatty() and not (output == "-" and sys.stdout.isatty())
    with Progress(console=Console(stderr=True), transient=True, disable=not shown) as bar:
        task = bar.add_task(text, total=total)
        yield lambda amount: bar.advance(task, amount)


def integer(least: int, most: int) -> Callable[[str], int]:
    """An argparse type: integers from `least` to `most`."""

    def parse(text: str) -> int:
        if not text.isascii() or not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} must be an integer from {least} to {most}")
        return int(text)

    return parse


def increasing(text: str) -> tuple[int, ...]:
    """An argparse type: integers in increasing order, with commas between them."""
    parse = integer(1, MAX_TOKENS)
    values = tuple(parse(part) for part in text.split(","))
    if list(values) != sorted(set(values)):
        raise argparse.ArgumentTypeError(f"{text!r} must be in increasing order, such as 32768,65536")
    return values
