"""A simulated step as a timeline (Trace Event Format), as Perfetto shows it."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from megatron_wlb.simulate.step import SimulatedStep
from megatron_wlb.types import document_work


def trace_of(step: SimulatedStep) -> dict[str, Any]:
    """Return the timeline: a process a rank, a thread a stage, an event a pass.

    "F c0 m3" is the forward pass of micro-batch 3 through chunk 0; "W" is deferred weight gradients.
    """
    return {"traceEvents": list(_events(step)), "displayTimeUnit": "ms"}


def _events(step: SimulatedStep) -> Iterator[dict[str, Any]]:
    for rank, (timeline, micro_batches) in enumerate(zip(step.timelines, step.shards, strict=True)):
        yield _named("process", f"data-parallel rank {rank}", pid=rank)
        described = [
            {
                "tokens": int(plan.lengths.sum()),
                "documents": len(plan.lengths),
                "longest": int(plan.lengths.max()),
                "work": int(document_work(plan.lengths, step.job.crossover_tokens).sum()),
                "sharding": plan.strategy,
            }
            for plan in micro_batches
        ]
        for stage in range(timeline.schedule.num_stages):
            yield _named("thread", f"stage {stage}", pid=rank, tid=stage)
            for backward, chunk, micro_batch in timeline.schedule.ops(stage).tolist():
                at = (int(backward), stage, chunk, micro_batch)
                name = f"{'FB'[backward]} c{chunk} m{micro_batch}"
                yield _event(name, rank, stage, timeline.start[at], timeline.end[at], described[micro_batch])
            for begin, duration in timeline.weight_gradients(stage).tolist():
                yield _event("W", rank, stage, begin, begin + duration, {})
            begin = max(t.makespan for t in step.timelines)
            for name in ("gradients", "optimizer", "parameters"):
                yield _event(name, rank, stage, begin, begin + getattr(step, name), {})
                begin += getattr(step, name)


def _named(what: str, name: str, **ids: int) -> dict[str, Any]:
    return {"ph": "M", "name": f"{what}_name", "args": {"name": name}, **ids}


def _event(name: str, pid: int, tid: int, start: float, end: float, args: dict[str, Any]) -> dict[str, Any]:
    times = {"ts": float(np.round(start, 3)), "dur": float(np.round(end - start, 3))}
    return {"ph": "X", "name": name, "cat": name.split()[0], "pid": pid, "tid": tid, **times, "args": args}
