"""`megatron-wlb profile`: measure attention and the rest of a layer on this device, and write what planning goes by."""

import argparse
import contextlib
import itertools
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron_wlb.cli.common import progress, provenance, write_json, writer
from megatron_wlb.cli.job import add_model_arguments, model_of
from megatron_wlb.plan.sharding.select import shard
from megatron_wlb.plan.types import Shard, ShardPlan
from megatron_wlb.plan.workload import KernelModel, KernelTimes, ModelShape, Profile, load_profile

LONGEST_TOKENS = {"cuda": (131072, 16384), "cpu": (4096, 1024)}
"""Longest document that is measured (in shards of it), without and with --quick."""
LINEAR_TOKENS = {"cuda": 8192, "cpu": 512}
TILE_ROWS = {"cuda": (128,), "cpu": (1, 32, 64, 128)}
"""Where there are several, the one that fits best is taken."""
FLUSH_BYTES = 1 << 30
"""Written before every sample on a GPU: empties its caches, and takes longer than launching what is measured."""

_DESCRIPTION = """\
Measure the kernel times that context-parallel sharding goes by, and the crossover length that packing goes by.

    megatron-wlb profile --model llama2-7b --output mine.json
    megatron-wlb profile --hidden-size 4096 --num-attention-heads 32 --ffn-hidden-size 11008 --swiglu --output mine.json

Attention runs as in training, on shards of single, equal and mixed documents, forward and backward apart. Two thirds of
the shards are fitted, the error is that on the others. The linear part of a layer (matrix multiplies, norms,
activation) gives the crossover of this model, and as TFLOP/s that of others. Takes one or two minutes on a GPU. On a
CPU shapes are smaller, for demonstrations.
"""

Shape = tuple[ShardPlan, int]
"""A plan, and the rank whose shard is measured."""


class Target(NamedTuple):
    """A layer that is measured, by the sizes of `ModelShape`, and what it runs with."""

    model: ModelShape
    device: str
    backend: Any
    dtype: str
    tensors: dict[str, Any]
    """Device and dtype of tensors, as torch takes them."""


def register(commands: Any) -> None:
    """Add the command to the subparsers `commands`."""
    parser = commands.add_parser("profile", help="measure this device", description=_DESCRIPTION)
    add_model_arguments(parser)
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if there is one")
    parser.add_argument(
        "--backend", default="auto", help="attention backend, as --wlb-attention-backend; default: auto"
    )
    parser.add_argument("--dtype", choices=("bf16", "fp32"), help="default: bf16 on cuda, fp32 on cpu")
    parser.add_argument("--quick", action="store_true", help="smaller shapes and fewer samples")
    parser.add_argument(
        "--collectives-from",
        metavar="PROFILE",
        help="copy us_per_mib, the time to exchange K and V, which is not measured, from a shipped profile or a JSON "
        "file; default: h100-fa2 on cuda, on cpu none",
    )
    parser.add_argument("--output", required=True, metavar="FILE.json", help="profile to write; - for standard output")
    parser.set_defaults(run=run, num_layers=1)


def run(args: argparse.Namespace) -> None:
    """Measure, fit, write and print. Raises ValueError on wrong input or if the device cannot run it."""
    import scipy.optimize  # noqa: F401  # an extra; `main` says which, before minutes have been spent

    target = _target(args)
    collectives = args.collectives_from or ("h100-fa2" if target.device == "cuda" else None)
    copied = load_profile(collectives) if collectives is not None else None
    chosen = shapes(LONGEST_TOKENS[target.device][args.quick])
    with writer(args.output) as file:
        linear_us, attention_us = _measured(args, target, chosen)
        data = _fitted(args, target, chosen, linear_us, attention_us)
        if copied is not None:
            data["us_per_mib"] = {"gather": copied.gather_us_per_mib, "scatter": copied.scatter_us_per_mib}
        data |= _origin(args, target.device)
        write_json(file, data)
    _print(data)


def _target(args: argparse.Namespace) -> Target:
    torch = _torch()
    from megatron_wlb.runtime.backends import get_backend

    model = replace(model_of(args, []), num_layers=1, padded_vocab_size=0)
    device = _device(args.device)
    backend = get_backend(args.backend, device)
    dtype = args.dtype or ("bf16" if device == "cuda" else "fp32")
    tensors = {"device": device, "dtype": {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]}
    if tensors["dtype"] not in backend.dtypes:
        raise ValueError(f"attention backend {backend.name} does not run {dtype}; choose another --dtype")
    return Target(model, device, backend, dtype, tensors)


def _measured(args: argparse.Namespace, target: Target, chosen: list[Shape]) -> tuple[tuple[float, float], np.ndarray]:
    """Linear times in us per token, and attention times of the shapes, float64 [shapes, 2] us: forward, backward."""
    stopwatch = _stopwatch(target.device, seconds=0.05 if args.quick else 0.3)
    with progress(len(chosen), args.output, "measuring") as advance, _one_thread():
        try:
            linear_us = linear_times(target, LINEAR_TOKENS[target.device], stopwatch)
            times = []
            for shape in chosen:
                times.append(attention_times(shape, target, stopwatch))
                advance(1)
        except _torch().OutOfMemoryError as full:
            raise ValueError("out of device memory; give --quick, or a smaller model") from full
    return linear_us, np.array(times)


def _fitted(
    args: argparse.Namespace, target: Target, chosen: list[Shape], linear_us: tuple[float, float], us: np.ndarray
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
        head_size=model.kv_channels,
        dtype=target.dtype,
        backend=target.backend.name,
    )
    linear = {"forward_us_per_token": forward, "backward_us_per_token": backward}
    linear["tokens"] = LINEAR_TOKENS[target.device]
    linear |= {name: size for name, size in asdict(model).items() if name not in ("num_layers", "padded_vocab_size")}
    return entries(profile, profile.crossover_for(model), error) | {"linear": linear}


def shapes(longest: int) -> list[Shape]:
    """Shards to measure, of documents of up to `longest` tokens (a power of two from 512 on); the same in every run.

    Single documents; equal documents packed; first and last chunks of single documents; mixed documents in all three
    shardings. Whatever cost is common to a kind is in the fit as well as among what is held out.
    """
    rng = np.random.default_rng(0)
    kernel = KernelModel(tile_rows=128, launch=0.0, tile=1.0, query_tile=1.0)
    made: list[Shape] = []

    def add(lengths: Any, cp_size: int = 1, strategy: str = "per-document") -> None:
        sharded = shard(np.array(lengths, np.int64), cp_size, strategy, kernel, use_native=False)
        made.extend((sharded, rank) for rank in sorted({0, cp_size - 1}))

    for length in sorted({max(8, int(longest / 4 * 0.6**k)) for k in range(14)}):
        add([length])
    equal = sorted({max(8, longest // n) for n in (32, 128, 512, 2048)})
    for total, length in itertools.product((longest // 8, longest // 32), equal):
        add([length] * (total // length))
    for length, cp_size in itertools.product((longest, longest // 4, longest // 16), (4, 16)):
        add([length], cp_size)
    for total, cp_size in itertools.product((longest, longest // 4), (4, 8)):
        for strategy in ("per-sequence", "per-document", "hybrid"):
            ends = np.unique(rng.lognormal(np.log(total / 32), 1.2, 256).astype(np.int64).cumsum().clip(1, total))
            add(np.diff(ends, prepend=0), cp_size, strategy)
    return made


def fit_directions(
    shards: list[Shard], us: np.ndarray, heads: int, tile_rows: tuple[int, ...]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tile rows (those of `tile_rows` that fit best) and kernel times, and the errors of these, by direction.

    `us` is float64 [shards, 2], forward and backward. Raises ValueError if the times do not grow with the tiles.
    """
    held_out = held_out_shapes(len(shards))
    sizes = {"shapes_fitted": int((~held_out).sum()), "shapes_held_out": int(held_out.sum())}
    best: tuple[float, dict[str, Any], dict[str, Any]] | None = None
    for rows in tile_rows:
        counts = np.array([count(s, heads, rows) for s in shards])
        kernel: dict[str, Any] = {"tile_rows": rows}
        error, misfit = {}, 0.0
        for direction, measured in zip(("forward", "backward"), us.T, strict=True):
            kernel[direction] = fit(counts[~held_out], measured[~held_out])
            predicted = predict(kernel[direction], counts)
            median, p90 = relative_error(predicted[held_out], measured[held_out])
            error[direction] = {"held_out_median": median, "held_out_p90": p90, **sizes}
            misfit += float(((predicted / measured - 1)[~held_out] ** 2).sum())
        if best is None or misfit < best[0]:
            best = misfit, kernel, error
    assert best is not None
    _, kernel, error = best
    if not kernel["forward"].tile + kernel["backward"].tile:
        raise ValueError("attention took no longer for more tiles; run without --quick, or while nothing else runs")
    return kernel, error


def held_out_shapes(num_shapes: int) -> np.ndarray:
    """bool [num_shapes]: a third, the same in every run; shuffled, since `shapes` repeats itself."""
    return np.random.default_rng(0).permutation(num_shapes) % 3 == 2


def count(shard: Shard, heads: int, tile_rows: int) -> tuple[int, int, int]:
    """What the launch, tile and query_tile of `KernelTimes` are multiplied with for a shard."""
    kernel = KernelModel(tile_rows=tile_rows, launch=0.0, tile=0.0, query_tile=0.0)
    launches, tiles, query_tiles = kernel.count_shard(shard.colours)
    return launches, heads * tiles, heads * query_tiles


def fit(counts: np.ndarray, us: np.ndarray) -> KernelTimes:
    """Least squares of relative errors, no constant under 0, to 4 digits; counts [n, 3] as from `count`, us [n]."""
    from scipy.optimize import nnls

    relative = counts / us[:, None]
    unit = np.linalg.norm(relative, axis=0)
    shares = nnls(relative / unit, np.ones(len(us)))[0]
    shares[shares < 1e-9 * shares.max()] = 0  # of rounding errors
    launch, tile, query_tile = map(rounded, shares / unit)
    return KernelTimes(launch=launch, tile=tile, query_tile=query_tile)


def predict(times: KernelTimes, counts: np.ndarray) -> np.ndarray:
    """Times in us, float64 [n], of counts [n, 3]."""
    return counts @ np.array([times.launch, times.tile, times.query_tile])


def relative_error(predicted: np.ndarray, measured: np.ndarray) -> tuple[float, float]:
    """Median and 90th percentile of |predicted / measured - 1|."""
    errors = np.abs(predicted / measured - 1)
    return round(float(np.median(errors)), 4), round(float(np.quantile(errors, 0.9)), 4)


def rounded(x: float) -> float:
    """To 4 significant digits."""
    return float(f"{x:.4g}")


def attention_times(shape: Shape, target: Target, stopwatch: Callable[..., float]) -> tuple[float, float]:
    """Of a rank's attention forward and backward in us, as it runs when all keys have arrived."""
    import torch

    from megatron_wlb.runtime.attention import AttentionOptions, attend, attend_backward
    from megatron_wlb.runtime.metadata import ShardMetadata

    metadata = ShardMetadata.build(*shape, target.device)
    options = AttentionOptions(backend=target.backend)
    model = target.model
    heads, key_heads, head_size = model.num_attention_heads, model.num_query_groups, model.kv_channels
    q, dout = torch.randn(2, metadata.num_rows, heads, head_size, **target.tensors)
    k, v = torch.randn(metadata.num_keys, 2, key_heads, head_size, **target.tensors).unbind(1)
    out, dq = torch.empty_like(q), torch.empty_like(q)
    lse = attend(q, k, v, out, metadata, options)
    return (
        stopwatch(lambda: attend(q, k, v, out, metadata, options)),
        stopwatch(lambda: attend_backward(dout, q, k, v, out, lse, dq, metadata, options)),
    )


def linear_times(target: Target, tokens: int, stopwatch: Callable[..., float]) -> tuple[float, float]:
    """Of a layer without attention and RoPE, forward and backward, in us per token of a micro-batch of `tokens`."""
    import torch
    from torch.nn import functional as F

    model = target.model
    h, ffn, gated = model.hidden_size, model.ffn_hidden_size, model.gated_linear_unit
    query, qkv = model.query_size, model.query_size + 2 * model.key_size
    sizes = [(h,), (qkv, h), (h, query), (h,), (ffn * (1 + gated), h), (h, ffn)]
    x, dy = torch.randn(2, tokens, h, **target.tensors)
    leaves = [x.requires_grad_()]
    leaves += [torch.randn(size, **target.tensors).mul_(h**-0.5).requires_grad_() for size in sizes]

    def forward() -> torch.Tensor:
        x, norm1, to_qkv, projection, norm2, up, down = leaves
        attended = F.linear(F.rms_norm(x, (h,), norm1), to_qkv)[:, :query]
        x = x + F.linear(attended, projection)
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
    """As torchrun has it on CPUs, where every rank gets one."""
    torch = _torch()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _torch() -> Any:
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ValueError("torch is not installed; pip install 'megatron-wlb[train]'") from error
    return torch


def _device(wanted: str | None) -> str:
    torch = _torch()
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device cuda, but torch {torch.__version__} finds none; install a driver or choose cpu")
    return wanted or ("cuda" if torch.cuda.is_available() else "cpu")


def entries(profile: Profile, crossover_tokens: int, error: dict[str, Any]) -> dict[str, Any]:
    """What `load_profile` reads, and the errors."""
    assert profile.backward is not None and profile.linear_tflops is not None
    return {
        "name": profile.name,
        "kernel": {
            "tile_rows": profile.tile_rows,
            "forward": asdict(profile.forward),
            "backward": asdict(profile.backward),
            "head_size": profile.head_size,
            "dtype": profile.dtype,
            "backend": profile.backend,
        },
        "unit": "us; tile and query_tile per query head, launch once",
        "error": error,
        "crossover_tokens": crossover_tokens,
        "linear_tflops": dict(zip(("forward", "backward"), profile.linear_tflops, strict=True)),
    }


def _origin(args: argparse.Namespace, device: str) -> dict[str, Any]:
    torch = _torch()
    name = torch.cuda.get_device_name() if device == "cuda" else f"one thread of an {platform.machine()} CPU"
    return {"device": name, **provenance(args.argv, torch=torch.__version__, cuda=torch.version.cuda)}


def _print(data: dict[str, Any]) -> None:
    for direction in ("forward", "backward"):
        times, error = data["kernel"][direction], data["error"][direction]
        print(
            f"{direction}: {times['launch']:.3g} us a launch, {times['tile']:.3g} a tile, {times['query_tile']:.3g} a "
            f"query tile of {data['kernel']['tile_rows']} rows; error median {error['held_out_median']:.1%}, p90 "
            f"{error['held_out_p90']:.1%} on {error['shapes_held_out']} held-out shapes; linear part "
            f"{data['linear'][f'{direction}_us_per_token']:.3g} us a token, {data['linear_tflops'][direction]:.3g} "
            "TFLOP/s",
            file=sys.stderr,
        )
    print(f"crossover {data['crossover_tokens']} tokens", file=sys.stderr)
