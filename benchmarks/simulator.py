"""The simulator against pipelines that really ran: upstream's schedules on gloo, every pass timed.

    python -m benchmarks.simulator [--quick] [--check] [--record FILE.json]

Upstream's own 1F1B and interleaved 1F1B run with our communicator, one process a stage, over micro-batches of varying
length. The times of all passes and of messages of the same sizes go into the simulator; compared are the makespan of
the step, and when each pass begins. PP=2 computes (attention by documents, MLPs, one core a process). PP=4 does not,
for want of four cores: its passes *wait* for as long as they took when one process computed the same micro-batches, and
its rows say so. Writes benchmarks/results/simulator.json; --record keeps, of every layout, the step in which stages
wait most.
"""

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import functional as F

from benchmarks import pipelines, results
from benchmarks.results import Row
from megatron_wlb.pipeline.schedule import Schedule
from megatron_wlb.pipeline.timeline import Timeline, run
from tests.worlds import run_world

HEADS = 4
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


LAYOUTS = tuple(
    Layout(
        schedule=Schedule(
            num_stages=stages,
            num_chunks=chunks,
            num_micro_batches=count,
            group_size=group,
            hidden_transfers=chunks > 1,
        ),
        computes=stages == 2,
    )
    for stages, chunks, count, group in (
        *((2, 1, 8, None), (2, 2, 4, None), (4, 1, 8, None), (4, 2, 8, None)),  # idle for 10 % of a step or more
        (4, 2, 8, 4),  # upstream's default, with the passes of the one before
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """What a step computes."""

    hidden: int = 256
    layers: int = 4
    """Per pipeline stage."""
    max_tokens: int = 1024
    steps: int = 8
    """After one that warms up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """A step that ran. Times are in us from the beginning of its first pass."""

    schedule: Schedule
    tokens: list[int]
    """Tokens of every micro-batch."""
    start: np.ndarray
    """[directions, stages, chunks, micro-batches], as `end`; see `Timeline`."""
    end: np.ndarray
    transfer: np.ndarray
    """[micro-batches]: of a message, when nothing else happens."""

    def simulated(self) -> Timeline:
        """The simulator's account of the recorded passes and transfers."""
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

    def to_json(self) -> Row:
        """Whole us."""
        arrays = {name: getattr(self, name).round().astype(int).tolist() for name in ("start", "end", "transfer")}
        return {"schedule": asdict(self.schedule), "tokens": self.tokens, **arrays}

    @classmethod
    def from_json(cls, data: Row) -> "Recording":
        arrays = {name: np.array(data[name], np.float64) for name in ("start", "end", "transfer")}
        return cls(schedule=Schedule(**data["schedule"]), tokens=data["tokens"], **arrays)


def main() -> None:
    parser = results.parser(__doc__, "seconds: small passes, nothing written")
    parser.add_argument("--record", metavar="FILE.json", help="keep the step of every layout with most waits")
    args = parser.parse_args()
    size = Size(hidden=64, max_tokens=512, steps=2) if args.quick else Size()
    runs = [(layout, record(layout, size)) for layout in LAYOUTS]
    rows = [summary(layout, recordings) for layout, recordings in runs]
    wanted = [results.at_most(f"{row['layout']}: largest error of a step", row["error_max"], WITHIN) for row in rows]
    shown = ("layout", "measured_ms", "simulated_ms", "error_median", "error_max", "start_error_max", "idle_share")
    results.show(rows, shown, width=120)
    if args.record is not None:
        kept = {layout.name: max(recordings, key=lambda r: r.idle).to_json() for layout, recordings in runs}
        Path(args.record).write_text(json.dumps(kept, separators=(",", ":")).replace('},"PP', '},\n"PP') + "\n")
    settings = {"hidden": size.hidden, "layers_per_stage": size.layers, "heads": HEADS}
    settings |= {"max_tokens": size.max_tokens, "steps": size.steps, "backend": "gloo, float32"}
    results.finish(args, "simulator", settings=settings, rows=rows, goals=wanted)


def record(layout: Layout, size: Size) -> list[Recording]:
    """Run `size.steps` steps of a layout, each with micro-batches of its own. RuntimeError for want of cores."""
    schedule = layout.schedule
    if layout.computes and len(os.sched_getaffinity(0)) < schedule.num_stages:
        raise RuntimeError(f"{schedule.num_stages} stages that compute need as many cores")
    rng = np.random.default_rng(0)
    steps = [_micro_batches(rng, schedule.num_micro_batches, size.max_tokens) for _ in range(size.steps + 1)]
    waits = None
    if not layout.computes:
        (waits,) = run_world(_passes_alone, 1, schedule, size, steps, timeout=300)
    ranks = run_world(_pipeline, schedule.num_stages, schedule, size, steps, waits, timeout=600)
    recordings = []
    for step, documents in list(enumerate(steps))[1:]:
        times = np.empty((2, 2, schedule.num_stages, schedule.num_chunks, schedule.num_micro_batches))
        for stage, rank in enumerate(ranks):
            for op, begin_end in zip(schedule.ops(stage), rank["passes"][step], strict=True):
                times[:, int(op["backward"]), stage, op["chunk"], op["micro_batch"]] = begin_end
        start, end = 1e6 * (times - times.min())
        tokens = [sum(lengths) for lengths in documents]
        recordings.append(
            Recording(schedule=schedule, tokens=tokens, start=start, end=end, transfer=ranks[0]["transfers"][step])
        )
    return recordings


def summary(layout: Layout, recordings: list[Recording]) -> Row:
    """A row of the results."""
    measured_ms = [float(r.end.max()) / 1e3 for r in recordings]
    errors = np.array([r.error for r in recordings])
    return {
        "layout": layout.name,
        "micro_batches": layout.schedule.num_micro_batches,
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


class _Computing(torch.nn.Module):
    """Some transformer layers without norms: attention within every document, and an MLP."""

    def __init__(self, hidden: int, layers: int) -> None:
        super().__init__()
        sizes = [(3 * hidden, hidden), (hidden, hidden), (4 * hidden, hidden), (hidden, 4 * hidden)]
        self.weights = torch.nn.ParameterList(
            [torch.nn.Parameter(torch.randn(shape) * shape[1] ** -0.5) for _ in range(layers) for shape in sizes]
        )

    def forward(self, x: torch.Tensor, documents: list[int]) -> torch.Tensor:
        for layer in range(0, len(self.weights), 4):
            qkv, projection, up, down = self.weights[layer : layer + 4]
            heads = F.linear(x, qkv).view(len(x), 3, HEADS, -1).movedim(0, 2)  # [3, heads, tokens, head size]
            attended = [F.scaled_dot_product_attention(*d, is_causal=True) for d in heads.split(documents, dim=2)]
            x = x + F.linear(torch.cat(attended, dim=1).movedim(0, 1).reshape(x.shape), projection)
            x = x + F.linear(F.gelu(F.linear(x, up)), down)
        return x


class _Waiting(torch.autograd.Function):
    """The identity, which takes its time in both directions."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: float, backward: float) -> torch.Tensor:
        ctx.backward_seconds = backward
        time.sleep(forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        time.sleep(ctx.backward_seconds)
        return gradient, None, None


class _Chunk(pipelines.Chunk):
    """Layers, or their times."""

    def __init__(self, config: Any, size: Size, *, is_first: bool) -> None:
        super().__init__(config)
        self.is_first = is_first
        self.layers = _Computing(size.hidden, config.num_layers)
        self.source = torch.nn.Parameter(torch.ones(size.hidden))  # the input, and what its gradient is for

    def forward(self, documents: list[int], wait: tuple[float, float] | None) -> torch.Tensor:
        x = self.source.expand(sum(documents), 1, -1) if self.is_first else self.input
        assert x is not None and len(x) == sum(documents)
        if wait is not None:
            return _Waiting.apply(x, *wait)
        return self.layers(x, documents)


def _passes_alone(schedule: Schedule, size: Size, steps: list[list[list[int]]]) -> np.ndarray:
    """Seconds of all passes where one process computes the whole model: [steps, 2, stages, chunks, micro-batches]."""
    _pin(0)
    torch.manual_seed(0)
    shape = (schedule.num_stages, schedule.num_chunks)
    model = [_Computing(size.hidden, size.layers // schedule.num_chunks) for _ in range(int(np.prod(shape)))]
    seconds = np.empty((len(steps), 2, *shape, schedule.num_micro_batches))
    for step, micro_batches in enumerate(steps):
        for m, documents in enumerate(micro_batches):
            x = torch.ones(sum(documents), 1, size.hidden)
            inputs, outputs = [], []
            for virtual, chunk in enumerate(model):
                inputs.append(x.detach().requires_grad_())
                begin = time.perf_counter()
                x = chunk(inputs[-1], documents)
                seconds[step, 0, virtual % shape[0], virtual // shape[0], m] = time.perf_counter() - begin
                outputs.append(x)
            gradient = torch.ones_like(x)
            for virtual in reversed(range(len(model))):
                begin = time.perf_counter()
                outputs[virtual].backward(gradient)
                seconds[step, 1, virtual % shape[0], virtual // shape[0], m] = time.perf_counter() - begin
                gradient = inputs[virtual].grad
    return seconds


def _pipeline(
    schedule: Schedule, size: Size, steps: list[list[list[int]]], waits: np.ndarray | None
) -> dict[str, list[Any]]:
    """In the process of every stage: when its passes began and ended, per step, and how long messages take in us."""
    stage = dist.get_rank()
    if waits is None:
        _pin(stage)
    torch.manual_seed(stage)
    config = pipelines.begin(
        schedule.num_chunks,
        num_layers=size.layers // schedule.num_chunks,  # of a chunk; schedules don't look
        hidden_size=size.hidden,
        num_attention_heads=HEADS,
        microbatch_group_size_per_vp_stage=schedule.group,
        deallocate_pipeline_outputs=True,
    )
    from megatron.core.pipeline_parallel import schedules

    chunks = [_Chunk(config, size, is_first=stage == chunk == 0) for chunk in range(schedule.num_chunks)]
    passes: list[tuple[float, float]] = []
    schedules.forward_step = _timed(schedules.forward_step, passes)
    schedules.backward_step = _timed(schedules.backward_step, passes)
    out: dict[str, list[Any]] = {"passes": [], "transfers": []}
    for step, micro_batches in enumerate(steps):
        tokens = [sum(documents) for documents in micro_batches]
        out["transfers"].append(_transfer_times(tokens, size.hidden))
        feeds: list[Any] = []
        for chunk in range(schedule.num_chunks):
            own = waits[step, :, stage, chunk].T.tolist() if waits is not None else [None] * len(tokens)
            feeds.append(list(zip(micro_batches, own, strict=True)))
        passes.clear()
        dist.barrier()
        pipelines.step(chunks, feeds, pipelines.planned(config, tokens), size.max_tokens)
        out["passes"].append(list(passes))
    return out


def _timed(function: Any, passes: list[tuple[float, float]]) -> Any:
    """The clock is the same in all processes of a machine."""

    def call(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        result = function(*args, **kwargs)
        passes.append((begin, time.perf_counter()))
        return result

    return call


def _transfer_times(tokens: list[int], hidden: int, repeats: int = 9) -> np.ndarray:
    """Times of the messages of micro-batches in us, [micro-batches]: half a round trip of the first two stages."""
    rank, times = dist.get_rank(), np.zeros(len(tokens))
    dist.barrier()
    if rank < 2:
        for m, rows in enumerate(tokens):
            message, samples = torch.ones(rows, 1, hidden), []
            for _ in range(repeats):
                begin = time.perf_counter()
                for sender in (0, 1):
                    (dist.send if rank == sender else dist.recv)(message, 1 - rank)
                samples.append((time.perf_counter() - begin) / 2)
            times[m] = 1e6 * np.median(samples)
    dist.barrier()
    return times


def _pin(core: int) -> None:
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[core]})


if __name__ == "__main__":
    main()
