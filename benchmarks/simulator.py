"""The simulator against pipelines that really ran: upstream's training with `--wlb` on gloo, every pass timed.

    python -m benchmarks.simulator [--quick] [--check]

One process a stage trains micro-batches of varying length. The times of all passes and of messages of the same sizes go
into the simulator; compared are the makespan of the passes of a step and the beginning of each. PP=2 computes, one core
a process. PP=4, for want of four cores, *waits* in its passes; its rows say so. Writes
benchmarks/results/simulator.json.
"""

import functools
import sys
import tempfile
import time
from os import sched_getaffinity
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from benchmarks import results
from benchmarks.results import Row
from benchmarks.training_cpu import arguments, by_turns, train, warm, write_dataset
from megatron_wlb.pipeline.schedule import Schedule
from megatron_wlb.pipeline.timeline import run
from tests.worlds import run_world

WITHIN = 0.05
TOKENS, STEPS = 1024, 8
"""Of a window; after a step that warms up."""
HIDDEN = 128
SIZES = f"--hidden-size {HIDDEN} --num-attention-heads 2 --ffn-hidden-size {2 * HIDDEN}"
CROSSOVER = 50
"""By which packing makes micro-batches of equal work that differ in tokens."""
WAIT = 1e-4
"""Seconds a token that PP=4 waits forward."""


class Layout(NamedTuple):
    stages: int
    chunks: int
    micro_batches: int
    group: int | None = None

    @property
    def name(self) -> str:
        chunks = f" x VPP={self.chunks}" if self.chunks > 1 else ""
        chunks += f" in groups of {self.group}" if self.group else ""
        return f"PP={self.stages}{chunks}, {'computed' if self.stages == 2 else 'waited'}"

    @property
    def flags(self) -> str:
        found = f"--wlb --wlb-micro-batches {self.micro_batches} --pipeline-model-parallel-size {self.stages}"
        found += f" --wlb-max-tokens {2 * TOKENS} {SIZES} --num-layers {self.stages * self.chunks}"
        if self.chunks > 1:
            found += f" --num-virtual-stages-per-pipeline-rank {self.chunks}"
        return found + (f" --microbatch-group-size-per-virtual-pipeline-stage {self.group}" if self.group else "")


LAYOUTS = (Layout(2, 1, 8), Layout(2, 2, 4), Layout(4, 1, 8), Layout(4, 2, 8), Layout(4, 2, 8, 4))
"""Idle for 10 % of a step or more; the last one has upstream's default groups."""


def main() -> None:
    args = results.parser(__doc__, "two steps").parse_args()
    if len(sched_getaffinity(0)) < 2:
        sys.exit("simulator: this process may run on one core only; it needs two")
    steps, lengths = 2 if args.quick else STEPS, np.random.default_rng(0).integers(TOKENS // 16, TOKENS, 1000)
    warm()
    with tempfile.TemporaryDirectory() as folder:
        dataset = write_dataset(Path(folder), lengths)
        rows = [row_of(layout, dataset, steps) for layout in LAYOUTS]
    wanted = [results.at_most(f"{row['layout']}: largest error of a step", row["error_max"], WITHIN) for row in rows]
    results.show(rows)
    settings = {"hidden": HIDDEN, "steps": steps, "backend": "gloo, float32"}
    results.finish(args, "simulator", settings=settings, rows=rows, goals=wanted)


def row_of(layout: Layout, dataset: str, steps: int) -> Row:
    """Train and simulate steps of a layout."""
    argv = arguments(dataset, TOKENS, layout.micro_batches, 1 + steps, layout.flags)
    wait = 0.0 if layout.stages == 2 else WAIT / layout.chunks
    trains = functools.partial(train, argv=argv, first=1, crossover=CROSSOVER, wait=wait)
    ranks = by_turns({"": trains}, layout.stages)[""]
    transfers = run_world(transfer_times, 2, [step["rows"] for step in ranks[0]])[0]
    sizes = {"num_stages": layout.stages, "num_chunks": layout.chunks, "overlap_transfers": layout.chunks > 1}
    found = []
    for of_ranks, transfer in zip(zip(*ranks, strict=True), transfers, strict=True):
        count = len(of_ranks[0]["rows"])
        schedule = Schedule(**sizes, micro_batches_per_rank=count, group_size=of_ranks[0]["group"])
        times = np.empty((2, 2, layout.stages, layout.chunks, count))
        """Beginnings and ends, [2, directions, stages, chunks, micro-batches]."""
        for stage, step in enumerate(of_ranks):
            for op, begin_end in zip(schedule.ops(stage), step["passes"], strict=True):
                times[:, int(op["backward"]), stage, op["chunk"], op["micro_batch"]] = begin_end
        start, end = 1e6 * (times - times.min())
        whole, simulated = float(end.max()), run(schedule, *(end - start), transfer)
        error, off = simulated.makespan / whole - 1, float(np.abs(simulated.start - start).max()) / whole
        idle = 1 - float((end - start).sum()) / whole / layout.stages
        found.append((whole / 1e3, simulated.makespan / 1e3, idle, abs(error), off))
    medians = dict(zip(("measured_ms", "simulated_ms", "idle_share"), np.median(found, axis=0).tolist(), strict=False))
    worst = dict(zip(("error_max", "start_error_max"), np.max(found, axis=0)[-2:].tolist(), strict=True))
    return {"layout": layout.name, "micro_batches": layout.micro_batches, **medians, **worst}


def transfer_times(steps: list[list[int]]) -> list[np.ndarray]:
    """Times of messages of so many rows in us: half a round trip of two processes."""
    rank, found = dist.get_rank(), []
    for rows in steps:
        times = []
        for message in (torch.ones(each, 1, HIDDEN) for each in rows):
            samples = []
            for _ in range(9):
                begin = time.perf_counter()
                for sender in (0, 1):
                    (dist.send if rank == sender else dist.recv)(message, 1 - rank)
                samples.append((time.perf_counter() - begin) / 2)
            times.append(1e6 * np.median(samples))
        found.append(np.array(times))
    return found


if __name__ == "__main__":
    main()
