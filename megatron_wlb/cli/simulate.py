"""`megatron-wlb simulate`: predict the step times of a plan file.

Simulates the training steps of a plan file (`megatron-wlb plan --output`) on GPUs, without GPUs, Megatron or torch.

    megatron-wlb simulate plan.jsonl --launch train.log
    megatron-wlb simulate plan.jsonl --model llama2-7b --tensor-model-parallel-size 8 --num-gpus 64

Micro-batches are placed on data-parallel ranks, ordered and sharded as in training; a discrete-event simulation of the
pipeline then gives the time of every step, where it goes, and its limit of balance: the time if all micro-batches and
all context-parallel shards were alike. (Uneven micro-batches in a good order, small ones first and last, can be a
little faster.) Times are predictions: `megatron-wlb profile` measures what they go by, `megatron-wlb compare` holds
them against a run.
"""

import argparse
import json
import sys
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from megatron_wlb.cli import common, plan
from megatron_wlb.cli.balance import imbalances
from megatron_wlb.cli.common import integer, progress, remark, short, write_json, writer
from megatron_wlb.cli.flags import add_job_flags, job_of, settle
from megatron_wlb.cli.steps import lengths_of, parse_lines
from megatron_wlb.cost.work import document_work
from megatron_wlb.job import MAX_TOKENS, Job
from megatron_wlb.packing import POLICIES
from megatron_wlb.plan import metrics
from megatron_wlb.plan.metrics import imbalance
from megatron_wlb.plan.step import shard_step
from megatron_wlb.simulate import SHARES, SimulatedStep, balanced_time, breakdown, simulate_step, write_trace

FORMAT = "megatron-wlb-simulation"
VERSION = 2
USAGE = "PLAN.jsonl [--json FILE] [--trace FILE.json] [FLAGS | COMMAND | --launch FILE]"
PARTS = {
    "attention": "attention",
    "linear": "linear",
    "vocabulary": "embedding and loss",
    "tensor": "tensor-parallel communication",
    "gradients": "gradient reduction",
    "optimizer": "optimizer",
    "parameters": "parameter gathering",
    "bubble": "bubble",
    "exchange": "context-parallel communication",
    "cp_wait": "waiting for the slowest CP rank",
    "ep_wait": "waiting for the slowest EP rank",
    "imbalance": "uneven micro-batches",
    "dp_wait": "waiting for the slowest DP rank",
}
"""What fields of `Breakdown` are called."""
_LIMITS = dict.fromkeys(("windows", "micro_batches"), 1 << 20) | {"crossover": 1 << 35}
_LIMITS |= dict.fromkeys(("context_length", "max_tokens"), MAX_TOKENS)
"""Sizes in the header of a plan, and the largest that is allowed."""
Step = list[np.ndarray]
"""The lengths of the documents of every micro-batch of a step, int64 [n] each."""
_REMEDY = "give what `megatron-wlb plan` wrote"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    parser.add_argument("plan", metavar="PLAN.jsonl", help="what `megatron-wlb plan` wrote; - for standard input")
    parser.add_argument("--steps", type=integer(1, 1 << 35), metavar="T", help="only the first T steps")
    parser.add_argument("--trace", metavar="FILE.json", help="timeline of a step, for Perfetto or chrome://tracing")
    parser.add_argument("--trace-step", type=integer(0, 1 << 35), metavar="T", help="which step; default: 0")
    parser.add_argument("--json", metavar="FILE", help="times to write; - for standard output, the table on the other")
    add_job_flags(parser, wlb_packing=None)


def run(args: argparse.Namespace) -> None:
    """Simulate, print and write. Raises ValueError on wrong input."""
    console = common.console(args.json, width=120)
    if args.trace_step is not None and args.trace is None:
        raise ValueError("--trace-step is for --trace; name its file")
    if args.trace is not None and not Path(args.trace).resolve().parent.is_dir():
        raise ValueError(f"--trace {args.trace}: its folder does not exist; create it or name another")
    name = "standard input" if args.plan == "-" else args.plan
    with nullcontext(sys.stdin.buffer) if args.plan == "-" else Path(args.plan).open("rb") as file:
        header, steps = read_plan(file, name, args.steps)
    traced = args.trace_step or 0
    if args.trace is not None and traced >= len(steps):
        raise ValueError(f"--trace-step {traced}: {name} has {len(steps)} steps from 0; give one of them")
    notes = list(args.remarks)
    sizes = {"global_batch_size": header["windows"], "seq_length": header["context_length"]}
    settle(args, sizes | {"wlb_packing": header["policy"], "wlb_crossover": header["crossover"]}, name)
    job = job_of(args, notes, num_micro_batches=header["micro_batches"], max_tokens=header["max_tokens"])
    entries = []
    with writer(args.json, "--json") as out, progress(len(steps), args.json, "simulating") as advance:
        for number, lengths in enumerate(steps):
            step = simulate_step(job, shard_step(job, lengths))
            entries.append({"step": number} | _entry(job, lengths, step))
            if args.trace is not None and number == traced:
                write_trace(args.trace, step)
            advance(1)
        result: dict[str, Any] = {"format": FORMAT, "version": VERSION, "job": job.to_json(), "plan": header}
        result |= {"left_out": metrics.edge(len(entries)), "mean": _mean(_middle(entries)), "steps": entries}
        write_json(out, result)
    console.print(_table(result))
    console.print(_sentence(result, job), soft_wrap=True)
    remark(notes)


def read_plan(file: Iterable[bytes], name: str, most: int | None = None) -> tuple[dict[str, Any], list[Step]]:
    """The header of a plan and its first `most` steps.

    Raises ValueError, naming the line, for what `megatron-wlb plan` did not write, or not to its end.
    """
    header: dict[str, Any] = {}
    steps: list[Step] = []

    def parse(entry: dict[str, Any]) -> bool:
        """Whether this was the last line of interest."""
        if not header:
            _check_header(entry)
            header.update(entry)
        elif "summary" in entry:
            return True
        else:
            steps.append(_micro_batches(entry, len(steps), header))
        return len(steps) == most

    if not any(parse_lines(file, name, _REMEDY, parse)):
        raise ValueError(f"{name} ends without a summary, as if it were cut off; {_REMEDY}")
    if not steps:
        raise ValueError(f"{name} holds no step; plan more documents")
    return header, steps


def _check_header(entry: dict[str, Any]) -> None:
    if entry.get("format") != plan.FORMAT or entry.get("version") != plan.VERSION:
        raise ValueError(f"no header of {plan.FORMAT} version {plan.VERSION}")
    for name, most in _LIMITS.items():
        value = entry.get(name)
        if type(value) is not int or not 1 <= value <= most:
            raise ValueError(f"{name} is {short(json.dumps(value))}; it must be an integer from 1 to {most}")
    policy = entry.get("policy")
    if not isinstance(policy, str) or policy not in POLICIES:
        raise ValueError(f"policy is {short(json.dumps(policy))}; it must be one of {', '.join(POLICIES)}")


def _micro_batches(entry: dict[str, Any], number: int, header: dict[str, Any]) -> Step:
    micro_batches, count = entry.get("micro_batches"), header["micro_batches"]
    if entry.get("step") != number or not isinstance(micro_batches, list):
        raise ValueError(f"it is not step {number} of the plan")
    if len(micro_batches) != count:
        raise ValueError(f"{len(micro_batches)} micro-batches, where the plan has {count} a step")
    if not any(micro_batches):
        raise ValueError("all micro-batches are empty")
    step = []
    for i, micro_batch in enumerate(micro_batches):
        if not isinstance(micro_batch, list) or not all(isinstance(d, list) and len(d) == 3 for d in micro_batch):
            raise ValueError(f"micro-batch {i} is not a list of [document, offset, length]")
        step.append(lengths_of([d[2] for d in micro_batch], i, header["context_length"], header["max_tokens"]))
    return step


def _entry(job: Job, lengths: Step, step: SimulatedStep) -> dict[str, Any]:
    """What is written of a step."""
    work = np.array([document_work(each, job.crossover_tokens).sum() for each in lengths])
    return {
        "time_us": step.time,
        "limit_us": balanced_time(step),
        "tokens": int(sum(each.sum() for each in lengths)),
        "imbalance": imbalance(work),
        "cp_imbalance": imbalances(step)["cp"],
        "breakdown_us": asdict(breakdown(step)),
    }


def _middle(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    left_out = metrics.edge(len(entries))
    return entries[left_out : len(entries) - left_out]


def _mean(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over steps; of_limit is the limit over the time."""
    names = ("time_us", "limit_us", "tokens", "imbalance", "cp_imbalance")
    means = {name: float(np.mean([e[name] for e in entries])) for name in names}
    parts = {part: float(np.mean([e["breakdown_us"][part] for e in entries])) for part in PARTS}
    return {**means, "of_limit": means["limit_us"] / means["time_us"], "breakdown_us": parts}


def _table(result: dict[str, Any]) -> Any:
    mean, slowest = result["mean"], max(_middle(result["steps"]), key=lambda e: e["time_us"])
    step, limit = mean["time_us"], "limit of balance"
    rows = [("step", step, slowest["time_us"])]
    for name, parts in SHARES.items():
        both = [(PARTS[part], mean["breakdown_us"][part], slowest["breakdown_us"][part]) for part in parts]
        rows.append((f"  {name}", sum(us for _, us, _ in both), sum(us for _, _, us in both)))
        if len(parts) > 1:
            rows += [(f"    {title}", *times) for title, *times in both if max(map(abs, times)) > 1e-6 * step]
    rows.append((limit, mean["limit_us"], slowest["limit_us"]))
    cells = [(title, f"{us / 1e3:.2f}", f"{us / step:.1%}", f"{most / 1e3:.2f}") for title, us, most in rows]
    titles = ("", "mean ms", "share", f"step {slowest['step']}, the slowest, ms")
    return common.table(titles, cells, bold=("step", limit))


def _sentence(result: dict[str, Any], job: Job) -> str:
    mean, edge, gpus = result["mean"], result["left_out"], job.parallel.num_gpus
    without = f" without {edge} at either end, where queues fill and drain," if edge else ""
    beside, wait = job.parallel.expert_dp_ranks, mean["breakdown_us"]["ep_wait"] / mean["time_us"]
    experts = f"; {beside} data-parallel ranks divide experts and wait for each other {wait:.1%} of the time"
    us_per_token = mean["time_us"] / mean["tokens"]
    return (
        f"{len(result['steps'])} steps{without} on {gpus} GPUs, simulated with profile {job.profile.name}: "
        f"{mean['of_limit']:.1%} of the speed at the limit of balance; imbalance of micro-batches "
        f"{mean['imbalance']:.3f}, of CP ranks {mean['cp_imbalance']:.3f}; {us_per_token:.3f} s per million tokens, "
        f"{1e6 / us_per_token / gpus:,.0f} tokens a second and GPU" + experts * (beside > 1)
    )
