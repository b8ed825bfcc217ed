"""`megatron-wlb profile`: measure this device.

Measures the kernel times that context-parallel sharding goes by, and what the rest of a layer takes. From both follows
the crossover length that packing goes by.

    megatron-wlb profile --model llama2-7b --output mine.json
    megatron-wlb profile --hidden-size 4096 --num-attention-heads 32 --ffn-hidden-size 11008 --swiglu --output mine.json

Attention runs as in training, on shards of single, equal and mixed documents, forward and backward apart. Two thirds of
the shards are fitted, the error is that on the others. The linear part of a layer (matrix multiplies, norms,
activation) is kept as TFLOP/s, which hold for other models, too. Takes one or two minutes on a GPU. On a
CPU shapes are smaller, for demonstrations.
"""

import argparse
import contextlib
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron_wlb.cli.calibration import Shape, entries, fit_directions, rounded, shapes
from megatron_wlb.cli.common import progress, provenance, write_json, writer
from megatron_wlb.cli.job import add_model_flags, shape_of
from megatron_wlb.describe.make import make_job
from megatron_wlb.hardware.profile import Profile
from megatron_wlb.model import ModelShape

LONGEST_TOKENS = {"cuda": (131072, 16384), "cpu": (4096, 1024)}
"""Longest document that is measured (in shards of it), without and with --quick."""
LINEAR_TOKENS = {"cuda": 8192, "cpu": 512}
TILE_ROWS = {"cuda": (128,), "cpu": (1, 32, 64, 128)}
"""Where there are several, the one that fits best is taken."""
FLUSH_BYTES = 1 << 30
"""Written before every sample on a GPU: empties its caches, and takes longer than launching what is measured."""

USAGE = "[MODEL FLAGS] --output FILE.json [--quick]"


class Target(NamedTuple):
    """A layer that is measured, by the sizes of `ModelShape`, and what it runs with."""

    model: ModelShape
    device: str
    backend: Any
    dtype: str
    tensors: dict[str, Any]
    """Device and dtype of tensors, as torch takes them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    add_model_flags(parser)
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if there is one")
    parser.add_argument(
        "--backend", default="auto", help="attention backend, as --wlb-attention-backend; default: auto"
    )
    parser.add_argument("--dtype", choices=("bf16", "fp32"), help="default: bf16 on cuda, fp32 on cpu")
    parser.add_argument("--quick", action="store_true", help="smaller shapes and fewer samples")
    parser.add_argument("--output", required=True, metavar="FILE.json", help="profile to write; - for standard output")
    parser.set_defaults(num_layers=1)


def run(args: argparse.Namespace) -> None:
    """Measure, fit, write and print. Raises ValueError on wrong input or if the device cannot run it."""
    import scipy.optimize  # noqa: F401  # extras; `main` says which, before minutes have been spent
    import torch

    target = _target(args)
    chosen = shapes(LONGEST_TOKENS[target.device][args.quick])
    with writer(args.output) as file:
        linear_us, attention_us, two_streams = _measure(args, target, chosen)
        data = _fit(args, target, chosen, linear_us, attention_us, two_streams)
        cpu = f"one thread of an {platform.machine()} CPU"
        data["device"] = torch.cuda.get_device_name() if target.device == "cuda" else cpu
        data |= provenance(args.argv, torch=torch.__version__, cuda=torch.version.cuda)
        write_json(file, data)
    _print(data)


def _target(args: argparse.Namespace) -> Target:
    import torch

    from megatron_wlb.runtime.backends import get_backend

    model = replace(shape_of(args), num_layers=1, padded_vocab_size=0)
    has_gpu = torch.cuda.is_available()
    device = args.device or ("cuda" if has_gpu else "cpu")
    if device == "cuda" and not has_gpu:
        raise ValueError(f"--device cuda, but torch {torch.__version__} finds none; install a driver or choose cpu")
    backend = get_backend(args.backend, device, model.head_sizes)
    dtype = args.dtype or ("bf16" if device == "cuda" else "fp32")
    tensors = {"device": device, "dtype": {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]}
    if tensors["dtype"] not in backend.dtypes:
        raise ValueError(f"attention backend {backend.name} does not run {dtype}; choose another --dtype")
    return Target(model, device, backend, dtype, tensors)


def _measure(
    args: argparse.Namespace, target: Target, chosen: list[Shape]
) -> tuple[tuple[float, float], np.ndarray, bool]:
    """Linear times in us per token, and attention times of the shapes, float64 [shapes, 2] us: forward, backward.

    Last, whether these are of two streams, because that was faster over all shapes.
    """
    import torch

    stopwatch = _stopwatch(target.device, seconds=0.05 if args.quick else 0.3)
    with progress(len(chosen), args.output, "measuring") as advance, _one_thread():
        try:
            linear_us = linear_times(target, LINEAR_TOKENS[target.device], stopwatch)
            one, two = [], []
            for shape in chosen:
                plan, rank = shape
                has_two = target.device == "cuda" and sum(map(bool, map(len, plan.shards[rank].calls))) > 1
                one.append(attention_times(shape, target, stopwatch))
                two.append(attention_times(shape, target, stopwatch, two_streams=True) if has_two else one[-1])
                advance(1)
        except torch.OutOfMemoryError as full:
            raise ValueError("out of device memory; give --quick, or a smaller model") from full
    two_streams = bool(np.sum(two) < np.sum(one))
    return linear_us, np.array(two if two_streams else one), two_streams


def _fit(
    args: argparse.Namespace,
    target: Target,
    chosen: list[Shape],
    linear_us: tuple[float, float],
    us: np.ndarray,
    two_streams: bool,
) -> dict[str, Any]:
    """The profile, its errors and the linear times, as JSON types."""
    model, (forward, backward) = target.model, map(rounded, linear_us)
    shards = [plan.shards[rank] for plan, rank in chosen]
    kernel, error = fit_directions(shards, us, model.num_attention_heads, TILE_ROWS[target.device])
    flops = 2e-6 * model.token_weights  # TFLOP/s x us per token
    profile = Profile(
        name=Path(args.output).stem if args.output != "-" else target.backend.name,
        **kernel,
        linear_tflops=(rounded(flops / linear_us[0]), rounded(2 * flops / linear_us[1])),
        head_size=model.head_size,
        dtype=target.dtype,
        backend=target.backend.name,
        two_streams=two_streams,
    )
    linear = {"forward_us_per_token": forward, "backward_us_per_token": backward}
    linear["tokens"] = LINEAR_TOKENS[target.device]
    linear |= {name: size for name, size in asdict(model).items() if name not in ("num_layers", "padded_vocab_size")}
    job = make_job(model=model, context_length=LONGEST_TOKENS[target.device][0], global_batch_size=1, profile=profile)
    return entries(profile, error) | {"crossover_tokens": job.crossover_tokens, "linear": linear}


def attention_times(
    shape: Shape, target: Target, stopwatch: Callable[..., float], *, two_streams: bool = False
) -> tuple[float, float]:
    """Attention of a rank, forward and backward in us, as it runs when all keys have arrived."""
    import torch

    from megatron_wlb.runtime.attention import AttentionOptions, attend, attend_backward
    from megatron_wlb.runtime.backends import side_by_side
    from megatron_wlb.runtime.metadata import ShardMetadata

    metadata = ShardMetadata.build(*shape, target.backend.encode).to(target.device)
    options = AttentionOptions(backend=target.backend, two_streams=two_streams)
    model = target.model
    q, dout = (
        torch.randn(metadata.num_rows, model.num_attention_heads, size, **target.tensors) for size in model.head_sizes
    )
    (part,) = metadata.parts
    kv = side_by_side(
        *(torch.randn(len(part.gather), model.num_query_groups, size, **target.tensors) for size in model.head_sizes)
    )
    out, dq = torch.empty_like(dout), torch.empty_like(q)
    lse = attend(q, kv, out, part, options)
    return (
        stopwatch(lambda: attend(q, kv, out, part, options)),
        stopwatch(lambda: attend_backward(dout, q, kv, out, lse, dq, part, options)),
    )


def linear_times(target: Target, tokens: int, stopwatch: Callable[..., float]) -> tuple[float, float]:
    """A layer without attention, RoPE and norms of latents, forward and backward, in us per token of `tokens`."""
    import torch
    from torch.nn import functional as F

    model = target.model
    h, ffn, gated = model.hidden_size, model.ffn_hidden_size, model.gated_linear_unit
    latents = model.q_lora_rank, model.kv_lora_rank, model.qk_pos_emb_head_dim
    sizes = [(h,), (h,), (h, model.output_size), (ffn * (1 + gated), h), (h, ffn), *model.projections]
    x, dy = torch.randn(2, tokens, h, **target.tensors)
    leaves = [x.requires_grad_()]
    leaves += [torch.randn(size, **target.tensors).mul_(h**-0.5).requires_grad_() for size in sizes]

    def forward() -> torch.Tensor:
        x, norm1, norm2, projection, up, down, from_hidden, *from_latents = leaves
        y = F.rms_norm(x, (h,), norm1)
        qkv = F.linear(y, from_hidden)
        if from_latents:
            q, kv, _ = qkv.split(latents, dim=1)
            rows = (q if model.q_lora_rank else y, kv)
            qkv = torch.cat([F.linear(*each) for each in zip(rows, from_latents, strict=True)], dim=1)
        x = x + F.linear(qkv[:, : model.output_size], projection)
        y = F.linear(F.rms_norm(x, (h,), norm2), up)
        y = F.silu(y[:, :ffn]) * y[:, ffn:] if gated else F.gelu(y)
        return x + F.linear(y, down)

    y = forward()
    return (
        stopwatch(forward) / tokens,
        stopwatch(lambda: torch.autograd.grad(y, leaves, dy, retain_graph=True)) / tokens,
    )


def _stopwatch(device: str, seconds: float) -> Callable[[Callable[[], Any]], float]:
    """Time of a call in us: of samples for `seconds`, but 3 to 20 of them, after two that warm up.

    The median on a GPU; on a CPU the shortest, since other processes only ever add to it.
    """
    import torch

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
def _one_thread() -> Iterator[None]:
    """Run with one thread, as every rank does on CPUs under torchrun."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _print(data: dict[str, Any]) -> None:
    for direction, rate in zip(("forward", "backward"), data["linear_tflops"], strict=True):
        times, error = data[direction], data["error"][direction]
        print(
            f"{direction}: {times['launch']:.3g} us a launch, {times['tile']:.3g} a tile, {times['query_tile']:.3g} a "
            f"query tile of {data['tile_rows']} rows; error median {error['held_out_median']:.1%}, p90 "
            f"{error['held_out_p90']:.1%} on {error['shapes_held_out']} held-out shapes; linear part "
            f"{data['linear'][f'{direction}_us_per_token']:.3g} us a token, {rate:.3g} "
            "TFLOP/s",
            file=sys.stderr,
        )
    print(f"crossover {data['crossover_tokens']} tokens", file=sys.stderr)
