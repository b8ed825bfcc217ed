"""Upstream's pipeline schedules on gloo: in every process of `run_world` one stage, whose passes are timed."""

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import functional as F

from megatron_wlb.pipeline.schedule import Schedule

HEADS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The sizes of a step."""

    hidden: int = 256
    layers: int = 4
    """Per pipeline stage."""
    max_tokens: int = 1024
    steps: int = 8
    """After one that warms up."""


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

    def forward(self, documents: list[int], wait: tuple[float, float] | None) -> torch.Tensor:
        x = self.source.expand(sum(documents), 1, -1) if self.is_first else self.input
        assert x is not None and len(x) == sum(documents)
        if wait is not None:
            return _Waiting.apply(x, *wait)
        return self.layers(x, documents)


def pipeline(schedule: Schedule, size: Size, steps: list[list[list[int]]], computes: bool) -> dict[str, list[Any]]:
    """In the process of every stage: beginnings and ends of its passes, per step, and times of messages in us."""
    stage = dist.get_rank()
    if computes:
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[stage]})
    torch.manual_seed(stage)
    config = _configure(schedule, size)
    from megatron.core.pipeline_parallel import schedules

    chunks = [_Chunk(config, size, is_first=stage == chunk == 0) for chunk in range(schedule.num_chunks)]
    passes: list[tuple[float, float]] = []
    schedules.forward_step = _timed(schedules.forward_step, passes)
    schedules.backward_step = _timed(schedules.backward_step, passes)
    out: dict[str, list[Any]] = {"passes": [], "transfers": []}
    for micro_batches in steps:
        tokens = [sum(documents) for documents in micro_batches]
        out["transfers"].append(_transfer_times(tokens, size.hidden))
        waits = [None if computes else _wait(documents, schedule.num_chunks) for documents in micro_batches]
        feed = list(zip(micro_batches, waits, strict=True))
        passes.clear()
        dist.barrier()
        _step(chunks, feed, tokens, size.max_tokens)
        out["passes"].append(list(passes))
    return out


def _wait(documents: list[int], chunks: int) -> tuple[float, float]:
    """Seconds of a pass forward and backward that waits: more for more tokens, and for longer documents."""
    seconds = sum(1e-4 * n + 1e-7 * n**2 for n in documents) / chunks
    return seconds, 2 * seconds


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
