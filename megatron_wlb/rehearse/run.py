"""Runs chosen ranks of a job, a process each, and judges what they say."""

import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from megatron_wlb.job import Parallel
from megatron_wlb.rehearse import record
from megatron_wlb.rehearse.build import library
from megatron_wlb.rehearse.match import Item, match, program
from megatron_wlb.rehearse.task import Task

WARM = 2
"""Steps in which the allocator finds its sizes: their retries do not count."""
ROOM = 0.95
"""Share of a card that may be reserved: the rest is for what a rehearsal does not see, the context and NCCL."""
CLOSE, CLOSE_GIB = 0.05, 0.25
"""By which prediction and rehearsal may differ, the larger of the two: workspaces of kernels are not predicted."""


def chosen(p: Parallel) -> list[int]:
    """Return a rank of every kind: each stage, at both ends of its context-parallel and data-parallel ranks."""
    ends = itertools.product(range(p.pp), *({0, size - 1} for size in (p.dp, p.cp)))
    return sorted(((stage * p.dp + dp) * p.cp + cp) * p.tp for stage, dp, cp in ends)


def rehearse(
    task: Task, ranks: Sequence[int], advance: Callable[[int], None]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Run ranks, as many at a time as there are processors.

    Returns what each saw, of the last step and of all, and what is wrong with the NCCL calls of all ranks together if
    all of them ran, [] if nothing.

    `advance` is told of steps that have ended. Raises ValueError with the reason if a rank ends before its first step
    for another reason than memory.
    """
    folder = library()
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "OMP_NUM_THREADS": "1", **os.environ}
    environment |= {"LD_PRELOAD": str(folder / "libcuda.so.1"), "LD_LIBRARY_PATH": str(folder)}
    with tempfile.TemporaryDirectory() as results, ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:

        def run(rank: int) -> tuple[dict[str, Any], list[Item]]:
            given = Path(results, f"{rank}.task")
            given.write_bytes(msgspec.json.encode(msgspec.structs.replace(task, rank=rank, folder=results)))
            command = [sys.executable, "-m", "megatron_wlb.rehearse.worker", str(given)]
            with (
                Path(results, f"{rank}.txt").open("w+") as said,
                subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, text=True, env=environment) as process,
            ):
                assert process.stdout is not None
                done = 0
                for line in process.stdout:
                    advance(int(line) - done)
                    done = int(line)
                advance(task.steps - done)
            written = Path(results, f"{rank}.json")
            result: dict[str, Any] = json.loads(written.read_text()) if written.exists() else {"error": "SystemExit"}
            error = result.get("error")
            if error and error.startswith("SystemExit"):  # what was wrong is in its own words
                said_so = re.search(r": error\b[^:]*: (.+)", Path(results, f"{rank}.txt").read_text())
                error = said_so[1] if said_so else error
            if error and "OutOfMemoryError" not in error:
                raise ValueError(f"rank {rank} ended with status {process.returncode}: {error.partition('\n')[0]}")
            records = record.read(results, rank)
            return entry(result, record.summary(result, records)), program(result, records) if whole else []

        whole = len(ranks) == task.world_size
        seen, programs = zip(*pool.map(run, ranks), strict=True)
        fitting = whole and not any(rank["out_of_memory"] for rank in seen)
        wrong = [said for one_queue in (True, False) for said in match(programs, one_queue)] if fitting else []
        return list(seen), list(dict.fromkeys(wrong))


def entry(result: dict[str, Any], seen: dict[str, Any]) -> dict[str, Any]:
    """Return the description of a rank, JSON types: sizes in GiB, counts of the last step."""
    steps, gib = result["steps"], 2**30
    return {
        "rank": result["rank"],
        "predicted_gib": round(max((step["predicted"] for step in steps), default=0) / gib, 2),
        "allocated_gib": round(max((step["allocated"] for step in steps), default=0) / gib, 2),
        "reserved_gib": round(max((step["reserved"] for step in steps), default=0) / gib, 2),
        "retries": sum(step["retries"] for step in steps[WARM:]),
        "out_of_memory": result.get("error"),
        "syncs_per_step": sum(seen["syncs"].values()),
        "copies_per_step": sum(seen["copies_to_host"].values()),
        **seen,
        "steps": steps,
    }


def verdict(ranks: list[dict[str, Any]], gpu_gib: float, wrong: Sequence[str] = ()) -> tuple[str, str]:
    """Return whether a job fits, and what to do if not; `wrong`: with its NCCL calls."""
    if wrong:
        return "hangs", f"{wrong[0]}; report it with the flags"
    smaller = "give a smaller --wlb-max-tokens, or --wlb-defer-weight-gradients off"
    if worst := [r for r in ranks if r["out_of_memory"]]:
        return "does not fit", f"rank {worst[0]['rank']} runs out of memory; {smaller}, or recompute activations"
    if worst := [r for r in ranks if r["retries"] or r["reserved_gib"] > ROOM * gpu_gib]:
        r = max(worst, key=lambda r: (r["retries"], r["reserved_gib"]))
        return "thrashes", (
            f"rank {r['rank']} reserves {r['reserved_gib']:.1f} of {gpu_gib:.1f} GiB and frees cached memory "
            f"{r['retries']} times; {smaller}, or set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True if it is not"
        )
    r = max(ranks, key=lambda r: abs(r["predicted_gib"] - r["allocated_gib"]) / r["allocated_gib"])
    if abs(r["predicted_gib"] - r["allocated_gib"]) > max(CLOSE * r["allocated_gib"], CLOSE_GIB):
        return "disagrees", (
            f"rank {r['rank']} allocates {r['allocated_gib']:.1f} GiB where {r['predicted_gib']:.1f} were predicted; "
            "it fits, but an S_max of auto may be wrong: report it with the flags"
        )
    return "fits", ""
