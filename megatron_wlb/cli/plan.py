"""`megatron-wlb plan`: plan micro-batches from document lengths.

Plans the micro-batches of all training steps, without Megatron and without torch.

    megatron-wlb plan LENGTHS --seq-length C --global-batch-size N --output plan.jsonl
    megatron-wlb plan LENGTHS --output plan.jsonl --launch train.log
    megatron-wlb plan --output plan.jsonl --launch train.log

Flags are those of training, and so are their defaults; --wlb-packing may also be ilp, a baseline. Of what
--wlb-micro-batches auto tries, micro-batches of several windows need --wlb-memory-budget here. Documents come in the
order of the file; without LENGTHS they are those of --data-path, one pass over the training split, shuffled as in
training and numbered through the datasets of a blend. Lengths count what is trained on. A Megatron dataset states
tokens instead: of a document of T tokens, T - 1 are trained, since the last has no successor. Documents of length 0 are
left out and counted. Documents longer than the context window are cut at every multiple of it.

The plan has one JSON object a line: a header; for every step its micro-batches, lists of [document, offset, length];
last a summary and what has not run. The same input gives the same bytes, so planning times are printed, not written.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from typing import Any, TextIO

import numpy as np

from megatron_wlb.cli.common import progress, remark, writer
from megatron_wlb.cli.data import add_lengths, documents_of
from megatron_wlb.cli.flags import add_job_flags, packing_job, with_best_count
from megatron_wlb.job import Job
from megatron_wlb.plan import metrics
from megatron_wlb.plan.packer import PackedStep, Packer, make_packer
from megatron_wlb.plan.stream import DocumentStream

FORMAT = "megatron-wlb-plan"
VERSION = 2
USAGE = "[LENGTHS] --output FILE [FLAGS | COMMAND | --launch FILE]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    parser.add_argument(
        "--no-flush",
        dest="flush",
        action="store_false",
        help="stop after the last full global batch of N * C tokens, and report what has not run as waiting",
    )
    parser.add_argument("--output", required=True, metavar="FILE", help="plan to write; - for standard output")
    add_job_flags(parser)
    add_lengths(parser)


def run(args: argparse.Namespace) -> None:
    """Plan everything and write it. Raises ValueError on wrong input, before the output is touched."""
    notes = list(args.remarks)
    job = packing_job(args, notes)
    data = documents_of(args, notes)
    job = with_best_count(args, job, partial(data.stream, args.seed, job.context_length))
    total = sum(int(source.lengths[:].sum()) for source in data.sources)
    until = math.inf if args.flush else total - total % job.batch_tokens
    if not until:
        raise ValueError(
            f"{', '.join(data.prefixes)} holds {total} tokens, under one global batch of {job.global_batch_size} x "
            f"{job.context_length}, of which --no-flush makes no step; leave it out or give more documents"
        )
    stream = data.stream(args.seed, job.context_length, 1, DocumentStream if args.flush else UnflushedStream)
    packer = make_packer(stream, job, fingerprint="")
    measured: list[metrics.StepMetrics] = []
    with writer(args.output) as file, progress(total, args.output) as advance:
        header = {"format": FORMAT, "version": VERSION, "policy": job.packing.name}
        header |= {"windows": job.global_batch_size, "micro_batches": job.num_micro_batches}
        header |= {"context_length": job.context_length}
        header |= {"max_tokens": job.max_tokens, "crossover": job.crossover_tokens}
        _write(file, header | {"documents": sum(len(source.lengths) for source in data.sources)})
        for step, measures in steps(packer, job, until):
            micro_batches = [_references(step.packing.micro_batch(i)) for i in range(len(step.packing))]
            _write(file, {"step": step.step, "micro_batches": micro_batches})
            measured.append(measures)
            last = step
            advance(measures.tokens)
        if not measured:
            raise ValueError("every document waits, so --no-flush leaves no step; leave it out or give more documents")
        waiting = _waiting(stream, last, total)
        summary = metrics.summarise(measured, num_waiting=len(waiting))
        empty = sum(source.too_short for source in data.sources)
        _write(file, {"summary": without_times(summary) | {"empty_documents": empty}, "waiting": _references(waiting)})
    _print(summary, job.num_micro_batches, empty)
    remark(notes)


def without_times(summary: metrics.Summary) -> dict[str, Any]:
    """A summary as JSON types; the same input gives the same bytes."""
    return {name: value for name, value in asdict(summary).items() if not name.startswith("plan_ms")}


def _print(summary: metrics.Summary, num_micro_batches: int, num_empty: int) -> None:
    print(
        f"{summary.steps} steps of {num_micro_batches} micro-batches, averages of the middle {summary.middle_steps}: "
        f"imbalance {summary.imbalance_mean:.4f} (p95 {summary.imbalance_p95:.4f}), late "
        f"{summary.late_steps:.2f} steps (at most {summary.max_delay_steps}), token CV {summary.token_cv:.3f}; waiting "
        f"{summary.waiting_documents}; empty documents left out {num_empty}; planned in {summary.plan_ms_median:.2f} "
        f"ms a step ({summary.plan_ms_min:.2f} to {summary.plan_ms_max:.2f})",
        file=sys.stderr,
    )


class UnflushedStream(DocumentStream):
    """Says that the data is at its end only to a policy that asks for more than there is.

    The end may lie within the last full global batch; a policy that knew would flush in that step already.
    """

    _ran_out = False

    @property
    def exhausted(self) -> bool:
        return self._ran_out

    def take(self, limit: int) -> np.ndarray:
        rows = super().take(limit)
        self._ran_out = self.position < limit
        return rows


def steps(packer: Packer, job: Job, until: float) -> Iterator[tuple[PackedStep, metrics.StepMetrics]]:
    """Steps whose global batches end at or before token `until` of the stream, and what is measured of each."""
    end = 0
    while not packer.finished and end + job.batch_tokens <= until:
        begin = time.perf_counter()
        step = packer.next()
        plan_ms = (time.perf_counter() - begin) * 1e3
        first, position = step.snapshot.header["base"]
        end = position + (step.snapshot.header["step"] - first) * job.batch_tokens
        if end > until:
            return  # all that the last full global batch brought waits, and the packer moved on to get a step
        yield step, metrics.measure(step.packing, step.step, job, plan_ms=plan_ms)


def _waiting(stream: DocumentStream, last: PackedStep, total: int) -> np.ndarray:
    """Documents that had not run after a step, DOCUMENT [n] in the order of the stream: waiting, or still to come."""
    stream.load_state(last.snapshot.header["stream"])
    return np.sort(np.concatenate([*last.snapshot.waiting.values(), stream.take(total)]), order=["index", "offset"])


def _references(rows: np.ndarray) -> list[list[int]]:
    """[document, offset, length] of DOCUMENT rows."""
    return np.stack([rows["document"], rows["offset"], rows["length"]], axis=1).tolist()


def _write(file: TextIO, entry: dict[str, Any]) -> None:
    file.write(json.dumps(entry) + "\n")
