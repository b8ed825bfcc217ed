"""The simulator against pipelines that really ran: upstream's schedules on gloo, every pass timed.

    python -m benchmarks.simulator [--quick] [--check]

Upstream's own 1F1B and interleaved 1F1B run with our communicator, one process a stage, over micro-batches of varying
length. The times of all passes and of messages of the same sizes go into the simulator; compared are the makespan of
the step and the beginning of each pass. PP=2 computes (attention by documents, MLPs, one core a process). PP=4, for
want of four cores, *waits* in its passes; its rows say so. Writes benchmarks/results/simulator.json.
"""

import os
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import functional as F

from benchmarks import results
from benchmarks.results import Row
from megatron_wlb.pipeline.schedule import Schedule
from megatron_wlb.pipeline.timeline import run
from tests.worlds import run_world

WITHIN = 0.05
HEADS = 4


class Size(NamedTuple):
    """The sizes of a step."""

    hidden: int = 256
    layers: int = 4
    """Per pipeline stage."""
    max_tokens: int = 1024
    steps: int = 8
    """After one that warms up."""


class Layout(NamedTuple):
    stages: int
    chunks: int
    micro_batches: int
    group: int | None = None

    @property
    def schedule(self) -> Schedule:
        return Schedule(
            num_stages=self.stages,
            num_chunks=self.chunks,
            micro_batches_per_rank=self.micro_batches,
            group_size=self.group,
            overlap_transfers=self.chunks > 1,
        )

    @property
    def computes(self) -> bool:
        """Whether passes compute or wait."""
        return self.stages == 2

    @property
    def name(self) -> str:
        chunks = f" x VPP={self.chunks}" if self.chunks > 1 else ""
        chunks += f" in groups of {self.group}" if self.group else ""
        return f"PP={self.stages}{chunks}, {'computed' if self.computes else 'waited'}"


LAYOUTS = (Layout(2, 1, 8), Layout(2, 2, 4), Layout(4, 1, 8), Layout(4, 2, 8), Layout(4, 2, 8, 4))
"""Idle for 10 % of a step or more; the last one has upstream's default groups."""


def main() -> None:
    args = results.parser(__doc__, "seconds: small passes").parse_args()
    size = Size(hidden=64, max_tokens=512, steps=2) if args.quick else Size()
    rows = [row_of(layout, size) for layout in LAYOUTS]
    wanted = [results.at_most(f"{row['layout']}: largest error of a step", row["error_max"], WITHIN) for row in rows]
    shown = ("layout", "measured_ms", "simulated_ms", "error_median", "error_max", "start_error_max", "idle_share")
    results.show(rows, shown, width=120)
    settings = {"hidden": size.hidden, "layers_per_stage": size.layers, "heads": HEADS}
    settings |= {"max_tokens": size.max_tokens, "steps": size.steps, "backend": "gloo, float32"}
    results.finish(args, "simulator", settings=settings, rows=rows, goals=wanted)


def row_of(layout: Layout, size: Size) -> Row:
    """Run and simulate `size.steps` steps of a layout, each with micro-batches of its own.

    Raises RuntimeError for want of cores.
    """
    schedule, count = layout.schedule, layout.micro_batches
    if layout.computes and len(os.sched_getaffinity(0)) < layout.stages:
        raise RuntimeError(f"{layout.stages} stages that compute need as many cores")
    rng = np.random.default_rng(0)
    steps = [_micro_batches(rng, count, size.max_tokens) for _ in range(size.steps + 1)]
    ranks = run_world(pipeline, layout.stages, layout, size, steps, timeout=600)
    found = []
    for step in range(1, len(steps)):
        times = np.empty((2, 2, layout.stages, layout.chunks, count))
        """Beginnings and ends, [2, directions, stages, chunks, micro-batches]."""
        for stage, rank in enumerate(ranks):
            for op, begin_end in zip(schedule.ops(stage), rank["passes"][step], strict=True):
                times[:, int(op["backward"]), stage, op["chunk"], op["micro_batch"]] = begin_end
        start, end = 1e6 * (times - times.min())
        transfer, whole = ranks[0]["transfers"][step], float(end.max())
        simulated = run(schedule, *(end - start), transfer)
        error, off = simulated.makespan / whole - 1, float(np.abs(simulated.start - start).max()) / whole
        idle = 1 - float((end - start).sum()) / whole / layout.stages
        found.append((whole / 1e3, simulated.makespan / 1e3, error, off, float(np.median(transfer)), idle))
    measured_ms, simulated_ms, errors, start_errors, transfers, idles = zip(*found, strict=True)
    return {
        "layout": layout.name,
        "micro_batches": count,
        **results.spread("measured_ms", measured_ms),
        "simulated_ms": float(np.median(simulated_ms)),
        "error_median": float(np.median(errors)),
        "error_max": float(np.abs(errors).max()),
        "start_error_max": max(start_errors),
        "transfer_us": float(np.median(transfers)),
        "idle_share": float(np.median(idles)),
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
    """The identity, which takes its time forward, and twice that backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        time.sleep(2 * ctx.seconds)
        return gradient, None


class _Chunk(torch.nn.Module):
    """A model chunk as upstream's schedules want it: layers, or their times."""

    def __init__(self, config: Any, size: Size, *, is_first: bool) -> None:
        super().__init__()
        self.config, self.model_type, self.is_first = config, None, is_first
        self.input: torch.Tensor | None = None
        """[tokens, 1, hidden size], but on the first chunk of all."""
        self.layers = _Computing(size.hidden, config.num_layers)
        self.source = torch.nn.Parameter(torch.ones(size.hidden))  # the input, and the target of its gradient

    def set_input_tensor(self, tensor: Any) -> None:
        self.input = tensor[0] if isinstance(tensor, list) else tensor

    def forward(self, documents: list[int], wait: float | None) -> torch.Tensor:
        x = self.source.expand(sum(documents), 1, -1) if self.is_first else self.input
        assert x is not None and len(x) == sum(documents)
        return self.layers(x, documents) if wait is None else _Waiting.apply(x, wait)


def pipeline(layout: Layout, size: Size, steps: list[list[list[int]]]) -> dict[str, list[Any]]:
    """In the process of every stage: beginnings and ends of its passes, per step, and times of messages in us."""
    stage, passes = dist.get_rank(), list[tuple[float, float]]()
    if layout.computes:
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[stage]})
    torch.manual_seed(stage)
    config = _configure(layout.schedule, size)
    from megatron.core.pipeline_parallel import schedules

    chunks = [_Chunk(config, size, is_first=stage == chunk == 0) for chunk in range(layout.chunks)]
    schedules.forward_step = _timed(schedules.forward_step, passes)
    schedules.backward_step = _timed(schedules.backward_step, passes)
    out: dict[str, list[Any]] = {"passes": [], "transfers": []}
    for micro_batches in steps:
        tokens = [sum(documents) for documents in micro_batches]
        out["transfers"].append(_transfer_times(tokens, size.hidden))
        # Seconds of a pass forward that waits: more for more tokens, and for longer documents.
        waits = [sum(1e-4 * n + 1e-7 * n**2 for n in each) / layout.chunks for each in micro_batches]
        feed = [(each, None if layout.computes else wait) for each, wait in zip(micro_batches, waits, strict=True)]
        passes.clear()
        dist.barrier()
        _step(chunks, feed, tokens, size.max_tokens)
        out["passes"].append(list(passes))
    return out


def _configure(schedule: Schedule, size: Size) -> Any:
    """Make this process a stage of upstream's pipeline; upstream's configuration."""
    from megatron_wlb.adapter import cpu

    if "megatron" not in sys.modules:  # else the parent has done it
        cpu.install()
    from megatron.core import mpu
    from megatron.core.transformer import TransformerConfig

    chunks = schedule.num_chunks if schedule.num_chunks > 1 else None
    layout = {"pipeline_model_parallel_size": schedule.num_stages, "virtual_pipeline_model_parallel_size": chunks}
    mpu.initialize_model_parallel(**layout, create_gloo_process_groups=True)
    return TransformerConfig(
        **layout,
        num_layers=size.layers // schedule.num_chunks,  # of a chunk; schedules don't look
        hidden_size=size.hidden,
        num_attention_heads=HEADS,
        microbatch_group_size_per_vp_stage=schedule.group,
        deallocate_pipeline_outputs=True,
        pipeline_dtype=torch.float32,
        variable_seq_lengths=True,
        overlap_p2p_comm=chunks is not None,
        overlap_p2p_comm_warmup_flush=chunks is not None,
        batch_p2p_comm=chunks is None,
        calculate_per_token_loss=True,
        moe_token_dispatcher_type="alltoall",  # asked for with variable lengths, experts or not
    )


def _step(chunks: Sequence[_Chunk], feed: Sequence[Any], tokens: list[int], max_tokens: int) -> None:
    """Forward and backward of a step; `feed` has the arguments of a chunk's calls, by micro-batch."""
    from megatron.core import mpu
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.process_groups_config import ProcessGroupCollection

    from megatron_wlb.adapter.p2p import PlannedP2PCommunicator

    iterators = [iter(feed) for _ in chunks]
    interleaved = len(chunks) > 1
    communicator = PlannedP2PCommunicator(mpu.get_pipeline_model_parallel_group(), chunks[0].config, tokens)
    get_forward_backward_func()(
        forward_step_func=lambda iterator, chunk: (chunk(*next(iterator)), _loss),
        data_iterator=iterators if interleaved else iterators[0],
        model=list(chunks) if interleaved else chunks[0],
        num_microbatches=len(tokens),
        seq_length=max_tokens,
        micro_batch_size=1,
        forward_only=False,
        p2p_communicator=communicator,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )
    communicator.settle()


def _loss(output: torch.Tensor) -> Any:
    loss = output.sum()
    return loss, torch.tensor(output.shape[0]), {"loss": torch.stack([loss.detach(), torch.tensor(1.0)])}


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


if __name__ == "__main__":
    main()
