"""`megatron-wlb simulate`: a plan file in, the times of its steps on a job out, and a step's timeline."""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from megatron_wlb.cli import common, plan
from megatron_wlb.cli.common import integer, progress, remark, short, write_json, writer
from megatron_wlb.cli.job import add_job_arguments, checked_lengths, cp_imbalance, prepare, settle, shards_of
from megatron_wlb.config import MAX_TOKENS
from megatron_wlb.plan.metrics import imbalance
from megatron_wlb.plan.packing import POLICIES
from megatron_wlb.plan.step import Layout
from megatron_wlb.plan.workload import document_work
from megatron_wlb.simulate import Job, SimulatedStep, balanced_time, breakdown, simulate_step, write_trace

FORMAT = "megatron-wlb-simulation"
VERSION = 1
PARTS = {
    "attention": "attention",
    "linear": "linear",
    "vocabulary": "embedding and loss",
    "tensor": "tensor-parallel communication",
    "exchange": "context-parallel communication",
    "cp_wait": "waiting for the slowest CP rank",
    "bubble": "pipeline bubble",
    "imbalance": "uneven micro-batches",
    "dp_wait": "waiting for the slowest DP rank",
    "gradients": "gradient reduction",
    "optimizer": "optimizer",
    "parameters": "parameter gathering",
}
"""Of `Breakdown`, in the order of the table."""

_DESCRIPTION = """\
Simulate the training steps of a plan file (`megatron-wlb plan --output`) on GPUs, without GPUs, Megatron or torch.

    megatron-wlb simulate plan.jsonl --launch train.sh
    megatron-wlb simulate plan.jsonl --model llama2-7b --tensor-model-parallel-size 8 --num-gpus 64

Micro-batches are placed on data-parallel ranks, ordered and sharded as in training; a discrete-event simulation of the
pipeline then gives the time of every step, where it goes, and its limit: the time if all micro-batches and all
context-parallel shards were alike. (Uneven micro-batches in a good order, small ones first and last, can be a little
faster.) Times are predictions: `megatron-wlb profile` measures what they go by, `megatron-wlb compare` holds them
against a run.
"""


def register(commands: Any) -> None:
    """Add the command to the subparsers `commands`."""
    parser = commands.add_parser(
        "simulate",
        help="predict the step times of a plan file",
        description=_DESCRIPTION,
        usage="%(prog)s PLAN.jsonl [--json FILE] [--trace FILE.json] [FLAGS | LAUNCH LINE | --launch FILE]",
    )
    parser.add_argument("plan", metavar="PLAN.jsonl", help="what `megatron-wlb plan` wrote; - for standard input")
    parser.add_argument("--steps", type=integer(1, 1 << 35), metavar="T", help="only the first T steps")
    parser.add_argument("--trace", metavar="FILE.json", help="timeline of a step, for Perfetto or chrome://tracing")
    parser.add_argument("--trace-step", type=integer(0, 1 << 35), metavar="T", help="which step; default: 0")
    parser.add_argument("--json", metavar="FILE", help="times to write; - for standard output, the table on the other")
    add_job_arguments(parser, wlb_packing=None)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Simulate, print and write. Raises ValueError on wrong input."""
    console = common.console(args.json, width=120)
    if args.trace_step is not None and args.trace is None:
        raise ValueError("--trace-step is for --trace; name its file")
    if args.trace is not None and not Path(args.trace).resolve().parent.is_dir():
        raise ValueError(f"--trace {args.trace}: its folder does not exist; create it or name another")
    notes = list(args.remarks)
    with (
        nullcontext(sys.stdin) if args.plan == "-" else Path(args.plan).open(encoding="utf-8") as file,
        progress(_size(args.plan), args.json, "simulating") as advance,
        writer(args.json, "--json") as out,
    ):
        source = PlanFile(file, "standard input" if args.plan == "-" else args.plan)
        header = source.header
        sizes = {"global_batch_size": header["micro_batches"], "seq_length": header["context_length"]}
        settle(args, sizes | {"wlb_packing": header["policy"], "wlb_crossover": header["crossover"]}, source.name)
        job, layout, found = prepare(args, notes)
        entries, traced = _simulated(job, layout, source, args.steps, args.trace_step or 0, advance)
        if args.trace is not None:
            if traced is None:
                raise ValueError(
                    f"--trace-step {args.trace_step}: {source.name} has {len(entries)} steps from 0; give one of them"
                )
            write_trace(args.trace, traced)
        result = {"format": FORMAT, "version": VERSION, **found, "plan": header}
        result |= {"left_out": edge_of(entries), "mean": mean_of(entries), "steps": entries}
        write_json(out, result)
    console.print(_table(result))
    console.print(_sentence(result, job.num_gpus), soft_wrap=True)
    remark(notes)


def _simulated(
    job: Job, layout: Layout, source: "PlanFile", most: int | None, traced: int, advance: Callable[[int], None]
) -> tuple[list[dict[str, Any]], SimulatedStep | None]:
    """What is written of every step, and step `traced`."""
    entries: list[dict[str, Any]] = []
    kept_step = None
    for number, lengths in source.steps(most):
        step = simulate_step(job, shards_of(job, layout, lengths))
        work = [document_work(each, layout.crossover_tokens).sum() for each in lengths]
        entries.append(
            {
                "step": number,
                "time_us": step.time,
                "limit_us": balanced_time(step),
                "tokens": int(sum(each.sum() for each in lengths)),
                "imbalance": imbalance(np.array(work)),
                "cp_imbalance": cp_imbalance(step),
                "breakdown_us": asdict(breakdown(step)),
            }
        )
        if number == traced:
            kept_step = step
        advance(source.last_line_size)
    return entries, kept_step


def edge_of(entries: list[dict[str, Any]]) -> int:
    """Steps at either end that means leave out, as those of `metrics.summarise` do: queues fill and drain there."""
    return len(entries) // 10


def kept(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    edge = edge_of(entries)
    return entries[edge : len(entries) - edge]


def mean_of(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over steps without those at the ends; of_limit is the limit over the time."""
    entries = kept(entries)
    parts = {part: float(np.mean([e["breakdown_us"][part] for e in entries])) for part in PARTS}
    names = ("time_us", "limit_us", "tokens", "imbalance", "cp_imbalance")
    means = {name: float(np.mean([e[name] for e in entries])) for name in names}
    return {**means, "of_limit": means["limit_us"] / means["time_us"], "breakdown_us": parts}


class PlanFile:
    """What `megatron-wlb plan` wrote, read line by line. Raises ValueError, naming the line, where it is not that."""

    def __init__(self, file: TextIO, name: str) -> None:
        self._file, self.name, self._line = file, name, 0
        self.last_line_size = 0
        self.header = self._read("a header")
        if self.header.get("format") != plan.FORMAT or self.header.get("version") != plan.VERSION:
            raise self._wrong(f"no header of {plan.FORMAT} version {plan.VERSION}")
        limits = (1 << 20, MAX_TOKENS, MAX_TOKENS, 1 << 35)
        for name, most in zip(("micro_batches", "context_length", "max_tokens", "crossover"), limits, strict=True):
            value = self.header.get(name)
            if type(value) is not int or not 1 <= value <= most:
                raise self._wrong(f"{name} is {short(json.dumps(value))}; it must be an integer from 1 to {most}")
        policy = self.header.get("policy")
        if policy not in POLICIES:
            raise self._wrong(f"policy is {short(json.dumps(policy))}; it must be one of {', '.join(POLICIES)}")

    def steps(self, most: int | None) -> Iterator[tuple[int, list[np.ndarray]]]:
        """Number of every step and the lengths of the documents of its micro-batches, int64 [n] each."""
        number = 0
        while most is None or number < most:
            entry = self._read("a step, or the summary")
            if "summary" in entry:
                break
            micro_batches = entry.get("micro_batches")
            if entry.get("step") != number or not isinstance(micro_batches, list):
                raise self._wrong(f"it is not step {number} of the plan")
            count = self.header["micro_batches"]
            if len(micro_batches) != count:
                raise self._wrong(f"{len(micro_batches)} micro-batches, where the plan has {count} a step")
            lengths = [self._lengths(i, micro_batch) for i, micro_batch in enumerate(micro_batches)]
            if not sum(map(len, lengths)):
                raise self._wrong("all micro-batches are empty")
            yield number, lengths
            number += 1
        if not number:
            raise ValueError(f"{self.name} holds no step; plan more documents")

    def _lengths(self, i: int, micro_batch: Any) -> np.ndarray:
        if not isinstance(micro_batch, list) or not all(isinstance(d, list) and len(d) == 3 for d in micro_batch):
            raise self._wrong(f"micro-batch {i} is not a list of [document, offset, length]")
        try:
            lengths = checked_lengths([d[2] for d in micro_batch], f"micro-batch {i}", self.header["context_length"])
        except ValueError as error:
            raise self._wrong(str(error)) from error
        if lengths.sum() > self.header["max_tokens"]:
            raise self._wrong(
                f"micro-batch {i} holds {lengths.sum()} tokens, over max_tokens {self.header['max_tokens']} of the plan"
            )
        return lengths

    def _read(self, what: str) -> dict[str, Any]:
        self._line += 1
        try:
            line = self._file.readline()
            entry = json.loads(line) if line else None
        except (ValueError, RecursionError) as error:  # not UTF-8, thousands of digits, thousands of brackets
            raise self._wrong(f"not JSON ({str(error).split(': line')[0]})") from error
        if not line:
            raise self._wrong(f"the file ends where {what} should be, as if it were cut off")
        if not isinstance(entry, dict):
            raise self._wrong(f"a JSON {type(entry).__name__}, where {what} should be")
        self.last_line_size = len(line)
        return entry

    def _wrong(self, message: str) -> ValueError:
        return ValueError(f"{self.name}, line {self._line}: {message}; give what `megatron-wlb plan` wrote")


def _size(source: str) -> int:
    return Path(source).stat().st_size if source != "-" and Path(source).is_file() else 0


def _table(result: dict[str, Any]) -> Any:
    mean, slowest = result["mean"], max(kept(result["steps"]), key=lambda e: e["time_us"])
    table = common.table(["", "mean ms", "share", f"step {slowest['step']}, the slowest, ms"], text="")

    def add(title: str, us: float, of_slowest: float, style: str = "") -> None:
        share = f"{us / mean['time_us']:.1%}"
        table.add_row(title, f"{us / 1e3:.2f}", share, f"{of_slowest / 1e3:.2f}", style=style)

    add("step", mean["time_us"], slowest["time_us"], "bold")
    for part, title in PARTS.items():
        us, of_slowest = mean["breakdown_us"][part], slowest["breakdown_us"][part]
        if abs(us) > 1e-6 * mean["time_us"] or abs(of_slowest) > 1e-6 * mean["time_us"]:
            add(f"  {title}", us, of_slowest)
    add("limit: all alike", mean["limit_us"], slowest["limit_us"], "bold")
    return table


def _sentence(result: dict[str, Any], gpus: int) -> str:
    mean, edge = result["mean"], result["left_out"]
    without = f" without {edge} at either end, where queues fill and drain," if edge else ""
    return (
        f"{len(result['steps'])} steps{without} on {gpus} GPUs, simulated with profile {result['profile']}: "
        f"{mean['of_limit']:.1%} of the limit's speed; imbalance of micro-batches {mean['imbalance']:.3f}, of CP ranks "
        f"{mean['cp_imbalance']:.3f}; {1e6 * mean['tokens'] / mean['time_us'] / gpus:.0f} tokens a second and GPU"
    )
