"""The simulator against pipelines that really ran: upstream's schedules on gloo, every pass timed.

    python -m benchmarks.simulator [--quick] [--check]

Upstream's own 1F1B and interleaved 1F1B run with our communicator, one process a stage, over micro-batches of varying
length. The times of all passes and of messages of the same sizes go into the simulator; compared are the makespan of
the step and the beginning of each pass. PP=2 computes (attention by documents, MLPs, one core a process). PP=4, for
want of four cores, *waits* in its passes; its rows say so. Writes benchmarks/results/simulator.json.
"""

import os
from dataclasses import dataclass

import numpy as np

from benchmarks import results
from benchmarks.pipelines import HEADS, Size, pipeline
from benchmarks.results import Row
from megatron_wlb.pipeline.schedule import Schedule
from megatron_wlb.pipeline.timeline import Timeline, run
from tests.worlds import run_world

WITHIN = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A pipeline, and whether its passes compute or wait."""

    schedule: Schedule
    computes: bool

    @property
    def name(self) -> str:
        chunks = f" x VPP={self.schedule.num_chunks}" if self.schedule.num_chunks > 1 else ""
        chunks += f" in groups of {self.schedule.group_size}" if self.schedule.group_size else ""
        return f"PP={self.schedule.num_stages}{chunks}, {'computed' if self.computes else 'waited'}"


def _layout(stages: int, chunks: int, count: int, group: int | None = None) -> Layout:
    sizes = {"num_stages": stages, "num_chunks": chunks, "micro_batches_per_rank": count, "group_size": group}
    return Layout(schedule=Schedule(**sizes, overlap_transfers=chunks > 1), computes=stages == 2)


LAYOUTS = (_layout(2, 1, 8), _layout(2, 2, 4), _layout(4, 1, 8), _layout(4, 2, 8), _layout(4, 2, 8, 4))
"""Idle for 10 % of a step or more; the last one has upstream's default groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """A step that ran. Times are in us from the beginning of its first pass."""

    schedule: Schedule
    start: np.ndarray
    """[directions, stages, chunks, micro-batches], as `end`; see `Timeline`."""
    end: np.ndarray
    transfer: np.ndarray
    """[micro-batches]: of a message, when nothing else happens."""

    def simulated(self) -> Timeline:
        """The step as the simulator plays the recorded passes and transfers."""
        forward, backward = self.end - self.start
        return run(self.schedule, forward, backward, self.transfer)

    @property
    def error(self) -> float:
        """Relative error of the simulated makespan."""
        return self.simulated().makespan / float(self.end.max()) - 1

    @property
    def start_error(self) -> float:
        """Largest error of the beginning of a pass, relative to the makespan."""
        return float(np.abs(self.simulated().start - self.start).max() / self.end.max())

    @property
    def idle(self) -> float:
        """Share of the step in which no pass runs, in the mean of all stages."""
        return 1 - float((self.end - self.start).sum() / self.end.max() / self.schedule.num_stages)


def main() -> None:
    args = results.parser(__doc__, "seconds: small passes").parse_args()
    size = Size(hidden=64, max_tokens=512, steps=2) if args.quick else Size()
    rows = [summary(layout, record(layout, size)) for layout in LAYOUTS]
    wanted = [results.at_most(f"{row['layout']}: largest error of a step", row["error_max"], WITHIN) for row in rows]
    shown = ("layout", "measured_ms", "simulated_ms", "error_median", "error_max", "start_error_max", "idle_share")
    results.show(rows, shown, width=120)
    settings = {"hidden": size.hidden, "layers_per_stage": size.layers, "heads": HEADS}
    settings |= {"max_tokens": size.max_tokens, "steps": size.steps, "backend": "gloo, float32"}
    results.finish(args, "simulator", settings=settings, rows=rows, goals=wanted)


def record(layout: Layout, size: Size) -> list[Recording]:
    """Run `size.steps` steps of a layout, each with micro-batches of its own. RuntimeError for want of cores."""
    schedule = layout.schedule
    if layout.computes and len(os.sched_getaffinity(0)) < schedule.num_stages:
        raise RuntimeError(f"{schedule.num_stages} stages that compute need as many cores")
    rng = np.random.default_rng(0)
    steps = [_micro_batches(rng, schedule.micro_batches_per_rank, size.max_tokens) for _ in range(size.steps + 1)]
    ranks = run_world(pipeline, schedule.num_stages, schedule, size, steps, layout.computes, timeout=600)
    recordings = []
    for step in range(1, len(steps)):
        times = np.empty((2, 2, schedule.num_stages, schedule.num_chunks, schedule.micro_batches_per_rank))
        for stage, rank in enumerate(ranks):
            for op, begin_end in zip(schedule.ops(stage), rank["passes"][step], strict=True):
                times[:, int(op["backward"]), stage, op["chunk"], op["micro_batch"]] = begin_end
        start, end = 1e6 * (times - times.min())
        recordings.append(Recording(schedule=schedule, start=start, end=end, transfer=ranks[0]["transfers"][step]))
    return recordings


def summary(layout: Layout, recordings: list[Recording]) -> Row:
    """A row of the results."""
    measured_ms = [float(r.end.max()) / 1e3 for r in recordings]
    errors = np.array([r.error for r in recordings])
    return {
        "layout": layout.name,
        "micro_batches": layout.schedule.micro_batches_per_rank,
        **results.spread("measured_ms", measured_ms),
        "simulated_ms": float(np.median([r.simulated().makespan for r in recordings])) / 1e3,
        "error_median": float(np.median(errors)),
        "error_max": float(np.abs(errors).max()),
        "start_error_max": max(r.start_error for r in recordings),
        "transfer_us": float(np.median([r.transfer for r in recordings])),
        "idle_share": float(np.median([r.idle for r in recordings])),
    }


def _micro_batches(rng: np.random.Generator, count: int, max_tokens: int) -> list[list[int]]:
    """Document lengths of micro-batches of a quarter to all of `max_tokens`."""
    made = []
    for tokens in rng.integers(max_tokens // 4, max_tokens + 1, count).tolist():
        cuts = np.unique(rng.integers(1, tokens, int(rng.integers(0, 6))))
        made.append(np.diff([0, *cuts.tolist(), tokens]).tolist())
    return made


if __name__ == "__main__":
    main()
