"""Measures attention and the rest of a layer on this device, to fit a profile to."""

import contextlib
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import metadata
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from megatron_wlb.documents import ShardPlan
from megatron_wlb.model import ModelShape
from megatron_wlb.runtime.attention import AttentionOptions, attend_backward, attend_in_rounds, by_round
from megatron_wlb.runtime.backends import get_backend
from megatron_wlb.runtime.backends.protocol import Backend, side_by_side
from megatron_wlb.runtime.metadata import ShardMetadata

FLUSH_BYTES = 1 << 30
"""Written before every sample on a GPU: empties its caches, and outlasts the launch of the measured kernels."""


class Target(NamedTuple):
    """A layer to measure, and the backend that runs it."""

    model: ModelShape
    device: str
    backend: Backend
    dtype: str
    tensors: dict[str, Any]
    """Device and dtype, as torch's factories take them."""


def device_name(device: str) -> str:
    """Return the name of "cuda" or "cpu" in profiles and logs."""
    return torch.cuda.get_device_name() if device == "cuda" else f"one thread of an {platform.machine()} CPU"


def versions(device: str) -> dict[str, str | None]:
    """Return the versions of what runs kernels on "cuda" or "cpu", by the fields of profiles."""
    found: dict[str, str | None] = {"torch": str(torch.__version__)}
    if device == "cuda":
        found |= {"cuda": torch.version.cuda, "cudnn": str(torch.backends.cudnn.version())}
        for package in ("transformer_engine", "flash_attn_3"):
            with contextlib.suppress(metadata.PackageNotFoundError):
                found[package] = metadata.version(package)
    return found


def target_of(model: ModelShape, device: str | None, backend: str, dtype: str | None) -> Target:
    """Return a layer of the model on `device`, by default the GPU or else the CPU.

    Default dtype: bf16 on a GPU, fp32 on a CPU. Raises ValueError for a missing device, and if the backend does not run
    on it or in that dtype.
    """
    has_gpu = torch.cuda.is_available()
    device = device or ("cuda" if has_gpu else "cpu")
    if device == "cuda" and not has_gpu:
        raise ValueError(f"--device cuda, but torch {torch.__version__} finds none; install a driver or choose cpu")
    chosen = get_backend(backend, device, model.head_sizes)
    dtype = dtype or ("bf16" if device == "cuda" else "fp32")
    tensors: dict[str, Any] = {"device": device, "dtype": {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]}
    if tensors["dtype"] not in chosen.dtypes:
        raise ValueError(f"attention backend {chosen.name} does not run {dtype}; choose another --dtype")
    return Target(replace(model, num_layers=1, padded_vocab_size=0), device, chosen, dtype, tensors)


def attention_times(
    plan: ShardPlan, cp_rank: int, target: Target, stopwatch: Callable[..., float]
) -> tuple[float, float]:
    """Return forward and backward of a rank's attention in all rounds, with the keys of each there, in us."""
    metadata = ShardMetadata.build(plan, cp_rank, target.backend.encode).to(target.device)
    options, model = AttentionOptions(backend=target.backend), target.model
    q, dout = (
        torch.randn(metadata.num_rows, model.num_attention_heads, size, **target.tensors) for size in model.head_sizes
    )
    rounds, heads = metadata.rounds_of(None), model.num_query_groups
    keys = [
        side_by_side(*(torch.randn(len(round_.gather), heads, size, **target.tensors) for size in model.head_sizes))
        for round_ in rounds
    ]
    out, dq = torch.empty_like(dout), torch.empty_like(q)

    def forward() -> list[torch.Tensor]:
        return attend_in_rounds(q, iter(keys), out, rounds, options)

    def backward() -> None:
        for round_, kv, sums in zip(rounds, keys, by_round(rounds, lse), strict=True):
            rows = round_.rows
            attend_backward(dout[rows], q[rows], kv, out[rows], sums, dq[rows], round_, options)

    lse = forward()
    return stopwatch(forward), stopwatch(backward)


def linear_times(target: Target, tokens: int, stopwatch: Callable[..., float]) -> tuple[float, float]:
    """Return forward and backward of a layer without attention, in us per token."""
    model = target.model
    h, ffn, gated = model.hidden_size, model.ffn_hidden_size, model.gated_linear_unit
    sizes = [(h,), (h,), (h, model.output_size), (ffn * (1 + gated), h), (h, ffn), *model.projections]
    x, dy = torch.randn(2, tokens, h, **target.tensors)
    leaves = [x.requires_grad_()]
    leaves += [torch.randn(size, **target.tensors).mul_(h**-0.5).requires_grad_() for size in sizes]

    def forward() -> torch.Tensor:
        x, norm1, norm2, projection, up, down, from_hidden, *expanding = leaves
        y = F.rms_norm(x, (h,), norm1)
        qkv = F.linear(y, from_hidden)
        if expanding:
            q, kv, _ = qkv.split(model.compressed, dim=1)
            rows = (q if q.numel() else y, kv)
            qkv = torch.cat([F.linear(*each) for each in zip(rows, expanding, strict=True)], dim=1)
        x = x + F.linear(qkv[:, : model.output_size], projection)
        y = F.linear(F.rms_norm(x, (h,), norm2), up)
        y = F.silu(y[:, :ffn]) * y[:, ffn:] if gated else F.gelu(y)
        return x + F.linear(y, down)

    y = forward()
    return (
        stopwatch(forward) / tokens,
        stopwatch(lambda: torch.autograd.grad(y, leaves, dy, retain_graph=True)) / tokens,
    )


def stopwatch_of(device: str, seconds: float) -> Callable[[Callable[[], Any]], float]:
    """Return a function that measures a call in us.

    Takes 3 to 20 samples in `seconds` after two to warm up: the median on a GPU; on a CPU the shortest.
    """
    if device == "cuda":
        flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def sample(call: Callable[[], Any]) -> float:
        if device == "cpu":
            started = time.perf_counter()
            call()
            return (time.perf_counter() - started) * 1e6
        flush.zero_()
        begin.record()
        call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3

    def measure(call: Callable[[], Any]) -> float:
        for _ in range(2):
            sample(call)
        started = time.perf_counter()
        samples: list[float] = []
        while len(samples) < 3 or (len(samples) < 20 and time.perf_counter() < started + seconds):
            samples.append(sample(call))
        return statistics.median(samples) if device == "cuda" else min(samples)

    return measure


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Run with one thread inside, as torchrun's ranks do on CPUs."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
