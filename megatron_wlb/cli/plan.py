"""`megatron-wlb plan`: document lengths in, the micro-batches of every step out, as JSON lines."""

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from functools import cached_property
from typing import Any, TextIO

import numpy as np

from megatron_wlb.cli import job as jobs
from megatron_wlb.cli.common import progress, remark, writer
from megatron_wlb.cli.lengths import FORMATS, read_lengths
from megatron_wlb.plan import metrics, native
from megatron_wlb.plan.packer import PackedStep, Packer, Snapshot, make_packer
from megatron_wlb.plan.stream import DocumentStream, Source

FORMAT = "megatron-wlb-plan"
VERSION = 1

_DESCRIPTION = """\
Plan the micro-batches of all training steps for documents in file order, without Megatron and without torch.

    megatron-wlb plan LENGTHS --seq-length C --global-batch-size N --wlb-packing adaptive --output plan.jsonl
    megatron-wlb plan LENGTHS --output plan.jsonl --launch train.sh

Flags are those of training, and so are their defaults; --wlb-packing may also be ilp, a baseline. Lengths count what is
trained on. A Megatron dataset states tokens instead: of a document of T tokens, T - 1 are trained, since the last has
no successor. Documents of length 0 are left out and counted. Documents longer than the context window are cut at every
multiple of it.

The plan has one JSON object a line: a header; for every step its micro-batches, lists of [document, offset, length];
last a summary and what has not run. The same input gives the same bytes, so planning times are printed, not written.
"""


def register(commands: Any) -> None:
    """Add the command to the subparsers `commands`."""
    parser = commands.add_parser(
        "plan",
        help="plan micro-batches from document lengths",
        usage="%(prog)s LENGTHS --output FILE [FLAGS | LAUNCH LINE | --launch FILE]",
        description=_DESCRIPTION,
    )
    parser.add_argument("lengths", metavar="LENGTHS", help=FORMATS)
    parser.add_argument(
        "--no-flush",
        dest="flush",
        action="store_false",
        help="stop after the last full global batch of N * C tokens, and report what has not run as waiting",
    )
    parser.add_argument("--output", required=True, metavar="FILE", help="plan to write; - for standard output")
    jobs.add_job_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Plan everything and write it. Raises ValueError on wrong input, before the output is touched."""
    notes = list(args.remarks)
    settings = _settings(args, notes)
    lengths = read_lengths(args.lengths)
    count, context_length = args.global_batch_size, args.seq_length
    total = int(lengths.sum())
    until = math.inf if args.flush else total - total % (count * context_length)
    if not until:
        raise ValueError(
            f"{args.lengths} holds {total} tokens, under one global batch of {count} x {context_length}, of which "
            "--no-flush makes no step; leave it out or give more documents"
        )
    stream, packer = in_file_order(lengths, context_length, flush=args.flush, **settings)
    measured: list[metrics.StepMetrics] = []
    with writer(args.output) as file, progress(total, args.output) as advance:
        header = {"format": FORMAT, "version": VERSION, "policy": settings["policy"], "micro_batches": count}
        header |= {"context_length": context_length, "max_tokens": settings["max_tokens"]}
        _write(file, header | {"crossover": settings["crossover_tokens"], "documents": len(lengths)})
        for step, found in steps(packer, count, context_length, settings["crossover_tokens"], until):
            micro_batches = [_references(step.packing.micro_batch(i)) for i in range(len(step.packing))]
            _write(file, {"step": step.step, "micro_batches": micro_batches})
            measured.append(found)
            snapshot = step.snapshot
            advance(found.tokens)
        if not measured:
            raise ValueError("every document waits, so --no-flush leaves no step; leave it out or give more documents")
        waiting = _waiting(stream, snapshot, total)
        summary = metrics.summarise(measured, num_waiting=len(waiting))
        entries = without_times(summary) | {"empty_documents": int((lengths == 0).sum())}
        _write(file, {"summary": entries, "waiting": _references(waiting)})
    _print(summary, entries["empty_documents"])
    remark(notes)


def without_times(summary: metrics.Summary) -> dict[str, Any]:
    """As JSON types; the same input gives the same bytes."""
    return {name: value for name, value in asdict(summary).items() if not name.startswith("plan_ms")}


def _print(summary: metrics.Summary, num_empty: int) -> None:
    print(
        f"{summary.steps} steps, averages of the middle {summary.middle_steps}: imbalance "
        f"{summary.imbalance_mean:.4f} (p95 {summary.imbalance_p95:.4f}), late "
        f"{summary.late_steps:.2f} steps (at most {summary.max_delay_steps}), token CV {summary.token_cv:.3f}; waiting "
        f"{summary.waiting_documents}; empty documents left out {num_empty}; planned in {summary.plan_ms_median:.2f} "
        f"ms a step ({summary.plan_ms_min:.2f} to {summary.plan_ms_max:.2f})",
        file=sys.stderr,
    )


def _settings(args: argparse.Namespace, notes: list[str]) -> dict[str, Any]:
    """What `make_packer` is told; raises ValueError for flags that contradict each other."""
    jobs.require(args, "seq_length", "global_batch_size")
    config = jobs.config_of(args)
    max_tokens, crossover = jobs.max_tokens_of(args, config, None, notes), jobs.crossover_of(args, config, notes)
    return {
        "policy": args.wlb_packing,
        "num_micro_batches": args.global_batch_size,
        "max_tokens": max_tokens,
        "crossover_tokens": crossover,
        "use_native": native.use(config.planner),
        **config.policy_settings(args.seq_length),
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


def in_file_order(
    lengths: np.ndarray, context_length: int, *, flush: bool, **settings: Any
) -> tuple[DocumentStream, Packer]:
    """The stream of documents of `lengths`, and a packer of it with `settings` of `make_packer`."""
    stream = (DocumentStream if flush else UnflushedStream)(
        [Source(pairs=lengths)], seed=0, context_length=context_length, shuffle=False, num_epochs=1
    )
    return stream, make_packer(stream, fingerprint="", **settings)


def steps(
    packer: Packer, num_micro_batches: int, context_length: int, crossover_tokens: int, until: float
) -> Iterator[tuple[PackedStep, metrics.StepMetrics]]:
    """Steps whose global batches end at or before pair `until` of the stream, and what is measured of each."""
    sizes = {"crossover_tokens": crossover_tokens, "context_length": context_length}
    end, batch_tokens = 0, num_micro_batches * context_length
    while not packer.finished and end + batch_tokens <= until:
        begin = time.perf_counter()
        step = packer.next()
        plan_ms = (time.perf_counter() - begin) * 1e3
        first, position = step.snapshot.header["base"]
        end = position + (step.snapshot.header["step"] - first) * batch_tokens
        if end > until:
            return  # all that the last full global batch brought waits, and the packer moved on to get a step
        yield step, metrics.measure(step.packing, step.step, **sizes, plan_ms=plan_ms)


def _waiting(stream: DocumentStream, snapshot: Snapshot, total: int) -> np.ndarray:
    """What had not run at `snapshot`, DOCUMENT [n] in file order: in queues, or still to come."""
    stream.load_state(snapshot.header["stream"])
    return np.sort(np.concatenate([*snapshot.waiting.values(), stream.take(total)]), order=["index", "offset"])


def _references(rows: np.ndarray) -> list[list[int]]:
    """[document, offset, length] of DOCUMENT rows."""
    return np.stack([rows["document"], rows["offset"], rows["length"]], axis=1).tolist()


def _write(file: TextIO, entry: dict[str, Any]) -> None:
    file.write(json.dumps(entry) + "\n")
