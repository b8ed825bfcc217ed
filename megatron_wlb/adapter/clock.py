"""Measures a step on every rank: by events on a GPU, by the host clock on a CPU."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.utils import nvtx_range_pop, nvtx_range_push

from megatron_wlb.job import Job
from megatron_wlb.pipeline.timeline import run
from megatron_wlb.runtime import spans


@contextlib.contextmanager
def ranged(name: str) -> Iterator[None]:
    """Name what runs inside, for nsys: upstream's ranges, under `--nvtx-ranges` in the profiled steps."""
    nvtx_range_push(name)
    yield
    nvtx_range_pop(name)


class Clock:
    """Times passes and their waits for the K/V exchange, without synchronising."""

    def __init__(self) -> None:
        self._job: Job
        self._spans: dict[str, list[list[tuple[Any, Any]]]] | None = None
        """Starts and ends, as returned by `_now`, of the parts of every pass."""

    def begin(self) -> None:
        """Start a forward-backward pass. Nothing is recorded until `measure`."""
        self._spans, self._began = None, _now()

    def measure(self, job: Job) -> None:
        """Record this forward-backward pass: it belongs to a training step of this job, to be measured."""
        self._job = job
        self._spans = {"forward": [], "backward": [], "exchange": []}

    @contextlib.contextmanager
    def span(self, what: str) -> Iterator[None]:
        """Time a "forward" or "backward" pass, or an "exchange"; inside `passes`, a part of one."""
        with ranged(f"wlb {what}"):
            if self._spans is None:
                yield
                return
            began = _now()
            yield
            self._spans[what].append([(began, _now())])

    @contextlib.contextmanager
    def passes(self, *ways: str) -> Iterator[None]:
        """Take all that is timed inside for one pass each way, which run by turns."""
        if self._spans is None:
            yield
            return
        found, parts = self._spans, {way: list[list[tuple[Any, Any]]]() for way in ways}
        self._spans = found | parts
        yield
        self._spans = found
        for way in ways:
            found[way].append([part for each in parts[way] for part in each])

    def watch(self, name: spans.Name) -> AbstractContextManager[None]:
        """Return the context of a span of attention: waits for the exchange are timed, the others named."""
        return self.span(name) if name == "exchange" else ranged(f"wlb {name}")

    def shares(self, step_seconds: float | None) -> dict[str, float] | None:
        """Return `measured_shares` of the step; None on ranks without `step_seconds`, and of a step not measured.

        All ranks must call this. Blocks until the device ends backward, as reading the gradient norm has done.
        """
        if self._spans is None:
            return None
        parallel, stage = self._job.parallel, mpu.get_pipeline_model_parallel_rank()
        chunks = self._job.schedule().table()[:, 1]
        passes = np.zeros((2, parallel.pp, parallel.vpp))
        for direction, (name, of) in enumerate((("forward", chunks), ("backward", parallel.vpp - 1 - chunks))):
            np.add.at(passes[direction, stage], of, [_sum(parts) for parts in self._spans[name]])
        exchange = sum(_sum(parts) for parts in self._spans["exchange"])
        span = _seconds(self._began, self._spans["backward"][-1][-1][1])
        device = "cuda" if torch.cuda.is_available() else "cpu"
        sums = torch.tensor([*passes.ravel(), exchange], device=device, dtype=torch.float64)
        longest = torch.tensor([span], device=device, dtype=torch.float64)
        dist.all_reduce(sums)
        dist.all_reduce(longest, op=dist.ReduceOp.MAX)
        if step_seconds is None:
            return None
        *passes_of_all, exchange = (sums / dist.get_world_size()).tolist()
        mean = np.reshape(passes_of_all, passes.shape) * parallel.pp / self._job.micro_batches_per_rank
        return measured_shares(self._job, mean, exchange, float(longest), step_seconds)


def measured_shares(job: Job, passes: np.ndarray, exchange: float, span: float, step: float) -> dict[str, float]:
    """Return the measured counterpart of `simulate.shares`.

    Bubble is the idle time of a pipeline whose micro-batches all take the mean time; waiting is the time by which the
    slowest rank exceeds it. Time after the last pass is busy, and so are waits within a pass. The exchange includes the
    wait for a slower context-parallel rank.

    Args, in one unit of time:
        passes: mean of a forward and of a backward pass, float64 [2, stages, chunks].
        exchange: mean over ranks of exchange waits in a step.
        span: from the start of the step to the end of the last pass on any rank.
        step: time of the step.
    """
    alike = run(job.schedule(), *passes[:, :, :, None]).makespan
    in_passes = float(passes.sum()) * job.micro_batches_per_rank / job.parallel.pp
    times = {
        "busy": in_passes - exchange + step - span,
        "bubble": alike - in_passes,
        "exchange": exchange,
        "waiting": span - alike,
    }
    return {name: part / step for name, part in times.items()}


def _now() -> Any:
    if not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _sum(parts: Sequence[tuple[Any, Any]]) -> float:
    return sum(_seconds(*part) for part in parts)


def _seconds(began: Any, ended: Any) -> float:
    if not torch.cuda.is_available():
        return float(ended - began)
    if not ended.query():  # upstream has read the gradient norm, and it has ended
        ended.synchronize()
    return float(began.elapsed_time(ended)) / 1e3
