"""A simulated step of a job: its time, where the time goes, and its balance."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np

from megatron_wlb.documents import ShardPlan
from megatron_wlb.hardware.network import Group
from megatron_wlb.job import FP32, Job
from megatron_wlb.pipeline.timeline import Timeline, run
from megatron_wlb.simulate.memory import gpu_weights
from megatron_wlb.simulate.passes import LayerTimes, Passes, pass_times, synchronised

ADAM_BYTES = 30
"""Memory traffic of Adam per parameter: fp32 gradient, fp32 weight and two moments both ways, bf16 weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """Times in us. Arrays over GPUs are [DP rank, stage, CP rank]."""

    job: Job
    shards: tuple[tuple[ShardPlan, ...], ...]
    """Micro-batches of every data-parallel rank, in pipeline order."""
    passes: tuple[Passes, ...]
    timelines: tuple[Timeline, ...]
    gradients: float
    """Time from the end of the last pass until all stages have reduced their gradients."""
    optimizer: float
    parameters: float
    """Time to gather the updated parameters."""

    @property
    def time(self) -> float:
        return max(t.makespan for t in self.timelines) + self.gradients + self.optimizer + self.parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """Where the time of a step goes, in us, mean over GPUs; parts sum to it."""

    attention: float
    linear: float
    tensor: float
    """Exposed tensor-parallel communication."""
    exchange: float
    """Exposed exchange of K, V and their gradients."""
    vocabulary: float
    """Embedding and output layer."""
    launches: float
    """Waiting for the host, which launches kernels."""
    cp_wait: float
    """Waiting for the slowest context-parallel rank, in every layer."""
    ep_wait: float
    """Waiting for the slowest data-parallel rank of those that pool parts of a layer, in every layer."""
    bubble: float
    """Idle time of a pipeline with equal micro-batches: filling, draining, uneven stages and transfers."""
    imbalance: float
    """Further idle time, due to unequal micro-batches."""
    dp_wait: float
    """Waiting for the slowest data-parallel rank."""
    gradients: float
    optimizer: float
    parameters: float


TIME_SHARES = {
    "busy": ("attention", "linear", "vocabulary", "launches", "tensor", "gradients", "optimizer", "parameters"),
    "bubble": ("bubble",),
    "exchange": ("exchange", "cp_wait"),
    "waiting": ("ep_wait", "imbalance", "dp_wait"),
}
"""Names for where a step's time goes, and the `Breakdown` fields that they sum. No plan can save busy time."""


def simulate_step(job: Job, shards: Sequence[Sequence[ShardPlan]]) -> SimulatedStep:
    """Simulate a training step with the distributed optimizer.

    `shards` are micro-batches of every data-parallel rank in pipeline order (`plan.step.shard_step`). Raises ValueError
    if they do not fit the job.
    """
    counts = {len(micro_batches) for micro_batches in shards}
    if len(shards) != job.parallel.dp or len(counts) != 1:
        raise ValueError(
            f"the plan has {[len(m) for m in shards]} micro-batches by data-parallel rank; the job has "
            f"{job.parallel.dp} ranks, which run equally many; plan for them"
        )
    passes = synchronised(job, [pass_times(job, micro_batches) for micro_batches in shards])
    return step_of(job, shards, passes)


def step_of(job: Job, shards: Sequence[Sequence[ShardPlan]], passes: Sequence[Passes]) -> SimulatedStep:
    timelines = tuple(run(job.schedule(len(p.rows)), p.forward, p.backward, p.transfer) for p in passes)
    reduce, optimizer, gather = _update(job)
    ends = np.stack([t.ends for t in timelines])  # [dp, stages]
    return SimulatedStep(
        job=job,
        shards=tuple(map(tuple, shards)),
        passes=tuple(passes),
        timelines=timelines,
        gradients=float((ends.max(axis=0) + reduce).max() - ends.max()),
        optimizer=float(optimizer.max()),
        parameters=float(gather.max()),
    )


def breakdown(step: SimulatedStep) -> Breakdown:
    """Return where the time goes; simulates again with equal micro-batches."""
    busy = float(np.mean([t.busy for t in step.timelines]))
    makespans = [t.makespan for t in step.timelines]
    even = float(np.mean([even_time(step.job, [p]) for p in step.passes]))
    return Breakdown(
        **_in_passes(step),
        bubble=even - busy,
        imbalance=float(np.mean(makespans)) - even,
        dp_wait=max(makespans) - float(np.mean(makespans)),
        gradients=step.gradients,
        optimizer=step.optimizer,
        parameters=step.parameters,
    )


def _in_passes(step: SimulatedStep) -> dict[str, float]:
    job = step.job
    layers = job.layers().sum() / job.parallel.pp

    def per_gpu(part: Callable[[LayerTimes], np.ndarray]) -> float:
        return layers * sum(float(part(layer).sum()) for p in step.passes for layer in p.layers) / job.parallel.dp

    attention = per_gpu(lambda layer: layer.attention.mean(axis=1))
    in_layers = per_gpu(lambda layer: layer.total)
    names = ("linear", "tensor", "exchange", "launches")
    linear, tensor, exchange, launches = (per_gpu(attrgetter(name)) for name in names)
    ep_wait = float(np.mean([p.pool_wait.sum() for p in step.passes])) / job.parallel.pp
    return {
        "attention": attention,
        "linear": linear,
        "tensor": tensor,
        "exchange": exchange,
        "vocabulary": float(np.mean([t.busy for t in step.timelines])) - in_layers - ep_wait,
        "launches": launches,
        "cp_wait": in_layers - attention - linear - tensor - exchange - launches,
        "ep_wait": ep_wait,
    }


def shares(step: SimulatedStep) -> dict[str, float]:
    """Return the fraction of the step's time for each of `TIME_SHARES`; they sum to 1."""
    parts = breakdown(step)
    return {name: sum(getattr(parts, part) for part in of) / step.time for name, of in TIME_SHARES.items()}


def even_time(job: Job, passes: Sequence[Passes]) -> float:
    """Return the makespan of a pipeline in which every micro-batch takes the mean of `passes`."""
    count = len(passes[0].rows)

    def mean(parts: Sequence[np.ndarray]) -> np.ndarray:
        whole = np.concatenate(parts, axis=-1).mean(axis=-1, keepdims=True)
        return np.repeat(whole, count, axis=-1)

    times = (mean([getattr(p, name) for p in passes]) for name in ("forward", "backward", "transfer"))
    return run(job.schedule(count), *times).makespan


def _update(job: Job) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return us of gradients, optimizer and parameters, float64 [stages] each."""
    p, network = job.parallel, job.profile.network
    between = min(p.pp, max(1, network.gpus_per_node // (p.tp * p.cp))) if p.stages_before_dp else 1  # stages in a node
    exposed, byte = 1 - job.profile.dp_overlap, ADAM_BYTES / job.profile.memory_gb_per_s / 1e3
    found = np.zeros((3, p.pp))
    for weights, copies, stride in zip(gpu_weights(job), p.copies, p.shards, strict=True):
        group = Group(size=copies, stride=stride * between)
        if weights.any():
            found[0] += network.collective("reduce_scatter", weights * FP32, group) * exposed
            found[1] += weights / copies * byte
            found[2] += network.collective("all_gather", weights * job.bytes_per_value, group) * exposed
    reduce, optimizer, gather = found
    return reduce, optimizer, gather


def micro_batch_times(step: SimulatedStep) -> np.ndarray:
    """Return us of a layer per micro-batch, with equal CP ranks: float64 [dp, M]."""
    layers = [[each.total - each.slowest + each.attention.mean(axis=1) for each in p.layers] for p in step.passes]
    return np.sum(layers, axis=1)


def attention_of_ranks(step: SimulatedStep) -> np.ndarray:
    """Return us of attention by micro-batch and CP rank: float64 [dp * M, cp]."""
    return np.concatenate([sum(layer.attention for layer in passes.layers) for passes in step.passes])


def imbalances(step: SimulatedStep) -> dict[str, float]:
    """Return slowest over mean of micro-batches, DP ranks and CP ranks."""
    times, attention = micro_batch_times(step), attention_of_ranks(step)
    return {
        "pp": float((times.max(axis=1) / times.mean(axis=1)).mean()),
        "dp": float(times.sum(axis=1).max() / times.sum(axis=1).mean()),
        "cp": float(attention.max(axis=1).sum() / attention.mean(axis=1).sum()) if attention.any() else 1.0,
    }


def trace_of(step: SimulatedStep) -> dict[str, Any]:
    """Return the timeline: a process a rank, a thread a stage, an event a pass.

    "F c0 m3" is the forward pass of micro-batch 3 through chunk 0.
    """
    return {"traceEvents": list(_events(step)), "displayTimeUnit": "ms"}


def _events(step: SimulatedStep) -> Iterator[dict[str, Any]]:
    def named(what: str, name: str, **ids: int) -> dict[str, Any]:
        return {"ph": "M", "name": f"{what}_name", "args": {"name": name}, **ids}

    def event(name: str, start: float, end: float, args: dict[str, Any]) -> dict[str, Any]:
        times = {"ts": float(np.round(start, 3)), "dur": float(np.round(end - start, 3))}
        return {"ph": "X", "name": name, "cat": name.split()[0], "pid": rank, "tid": stage, **times, "args": args}

    for rank, (timeline, micro_batches) in enumerate(zip(step.timelines, step.shards, strict=True)):
        yield named("process", f"data-parallel rank {rank}", pid=rank)
        described = [
            {
                "tokens": int(plan.lengths.sum()),
                "documents": len(plan.lengths),
                "longest": int(plan.lengths.max()),
                "work": int(step.job.work(plan.lengths).sum()),
                "sharding": plan.strategy,
            }
            for plan in micro_batches
        ]
        for stage in range(timeline.schedule.num_stages):
            yield named("thread", f"stage {stage}", pid=rank, tid=stage)
            for backward, chunk, micro_batch in timeline.schedule.ops(stage).tolist():
                at = (int(backward), stage, chunk, micro_batch)
                name = f"{'FB'[backward]} c{chunk} m{micro_batch}"
                yield event(name, timeline.start[at], timeline.end[at], described[micro_batch])
            begin = max(t.makespan for t in step.timelines)
            for name in ("gradients", "optimizer", "parameters"):
                yield event(name, begin, begin + getattr(step, name), {})
                begin += getattr(step, name)
