"""`megatron-wlb profile`: measure this device.

Measures the kernel times that context-parallel sharding uses, and the time of the rest of a layer. Both determine the
crossover length that packing uses.

    megatron-wlb profile --model llama2-7b --output mine.json
    megatron-wlb profile --hidden-size 4096 --num-attention-heads 32 --ffn-hidden-size 11008 --swiglu --output mine.json

Attention runs as in training, on shards of single, equal and mixed documents, with forward and backward timed
separately. The fit uses two thirds of the shards, and the error is measured on the rest. The linear part of a layer
(matrix multiplies, norms, activation) is stored as TFLOP/s, which hold for other models, too. Takes one or two minutes
on a GPU. On a CPU, shapes are smaller, for demonstrations.
"""

import argparse
import datetime
import itertools
import platform
import shlex
import sys
from dataclasses import asdict, fields, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from megatron_wlb import layers
from megatron_wlb.cli.common import progress, write_json, writer
from megatron_wlb.cli.job import add_model_flag
from megatron_wlb.cli.launch import read_flags
from megatron_wlb.describe.arguments import MegatronArguments
from megatron_wlb.describe.make import make_job
from megatron_wlb.describe.shape import model_of
from megatron_wlb.documents import Shard, ShardPlan
from megatron_wlb.hardware.profile import GPUS, KernelModel, KernelTimes, Profile, Versions, gpu_of, load_profile
from megatron_wlb.settings import printable
from megatron_wlb.sharding.select import divide

LONGEST_TOKENS = {"cuda": (131072, 16384), "cpu": (4096, 1024)}
"""Longest document to measure (in shards of it), without and with --quick."""
LINEAR_TOKENS = {"cuda": 8192, "cpu": 512}
TILE_ROWS = {"cuda": (128,), "cpu": (1, 32, 64, 128)}
"""Candidates, of which the best-fitting one is used."""
Shape = tuple[ShardPlan, int]
"""A plan, and the rank whose shard is measured."""
USAGE = "[FLAGS] --output FILE.json [--quick]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_flag(parser)
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if there is one")
    parser.add_argument(
        "--backend", default="auto", help="attention backend: aten, flash_attn_3, te or cpu; default: as in training"
    )
    parser.add_argument("--dtype", choices=("bf16", "fp32"), help="default: bf16 on cuda, fp32 on cpu")
    parser.add_argument("--quick", action="store_true", help="smaller shapes and fewer samples")
    parser.add_argument("--output", required=True, metavar="FILE.json", help="profile to write; - for standard output")


def run(args: argparse.Namespace) -> None:
    import scipy.optimize  # noqa: F401  # extras; `main` says which, before minutes have been spent
    import torch

    from megatron_wlb.runtime import measure

    model = model_of(MegatronArguments.of({"num_layers": 1} | read_flags(args.flags).stated), args.model)
    if layers.assumed(model):
        raise ValueError(f"{layers.UNMEASURED} are not measured; give the sizes of other layers alone")
    target = measure.target_of(model, args.device, args.backend, args.dtype)
    chosen = shapes(LONGEST_TOKENS[target.device][args.quick])
    with writer(args.output) as file:
        linear_us, attention_us = _measure(args, target, chosen)
        versions = Versions(python=platform.python_version(), **measure.versions(target.device))
        known: dict[str, Any] = {"device": measure.device_name(target.device), "versions": versions}
        if target.device == "cuda":
            known["memory_gib"] = round(torch.cuda.get_device_properties().total_memory / 2**30, 1)
        data = _fit(args, target, chosen, linear_us, attention_us, known)
        data |= {"date": datetime.date.today().isoformat(), "command": shlex.join(["megatron-wlb", *args.typed])}
        write_json(file, data)
    _print(data)


def _measure(args: argparse.Namespace, target: Any, chosen: list[Shape]) -> tuple[tuple[float, float], np.ndarray]:
    import torch

    from megatron_wlb.runtime import measure

    stopwatch = measure.stopwatch_of(target.device, seconds=0.05 if args.quick else 0.3)
    with progress(len(chosen), args.output, "measuring") as advance, measure.one_thread():
        try:
            linear_us = measure.linear_times(target, LINEAR_TOKENS[target.device], stopwatch)
            attention_us = []
            for plan, rank in chosen:
                attention_us.append(measure.attention_times(plan, rank, target, stopwatch))
                advance(1)
        except torch.OutOfMemoryError as full:
            raise ValueError("out of device memory; give --quick, or a smaller model") from full
    return linear_us, np.array(attention_us)


def _fit(
    args: argparse.Namespace,
    target: Any,
    chosen: list[Shape],
    linear_us: tuple[float, float],
    us: np.ndarray,
    known: dict[str, Any],
) -> dict[str, Any]:
    """Return the profile, its errors and the linear times, as JSON types.

    The device's shipped profile gives the rest, such as the network and precisions.
    """
    model, (forward, backward) = target.model, map(rounded, linear_us)
    shards = [plan.shards[rank] for plan, rank in chosen]
    kernel, error = fit_directions(shards, us, model.num_attention_heads, TILE_ROWS[target.device])
    flops = 2e-6 * model.token_weights  # TFLOP/s x us per token
    measured = dict(
        name=printable(Path(args.output).stem)[:200] if args.output != "-" else target.backend.name,
        **kernel,
        linear_tflops=(rounded(flops / linear_us[0]), rounded(2 * flops / linear_us[1])),
        head_size=model.head_size,
        dtype=target.dtype,
        backend=target.backend.name,
        **known,
    )
    gpu = gpu_of(known["device"])
    profile = replace(load_profile(GPUS[gpu]), **measured, fp8=None) if gpu else Profile(**measured)
    linear = {"forward_us_per_token": forward, "backward_us_per_token": backward}
    linear["tokens"] = LINEAR_TOKENS[target.device]
    linear |= {name: size for name, size in asdict(model).items() if name not in ("num_layers", "padded_vocab_size")}
    job = make_job(model=model, context_length=LONGEST_TOKENS[target.device][0], global_batch_size=1, profile=profile)
    stated = msgspec.to_builtins(profile)
    kept = {f.name: stated[f.name] for f in fields(Profile) if getattr(profile, f.name) != f.default}
    kept |= {"unit": "us; tile, query_tile and hidden per query head, launch once", "error": error}
    return kept | {"crossover_tokens": job.crossover_tokens, "linear": linear}


def _print(data: dict[str, Any]) -> None:
    for direction, rate in zip(("forward", "backward"), data["linear_tflops"], strict=True):
        times, error = data[direction], data["error"][direction]
        print(
            f"{direction}: {times['launch']:.3g} us a launch, {times['tile']:.3g} a tile, {times['query_tile']:.3g} a "
            f"query tile of {data['tile_rows']} rows, {times['hidden']:.3g} a hidden tile; error median "
            f"{error['held_out_median']:.1%}, p90 {error['held_out_p90']:.1%} on {error['shapes_held_out']} held-out "
            f"shapes; linear part {data['linear'][f'{direction}_us_per_token']:.3g} us a token, {rate:.3g} TFLOP/s",
            file=sys.stderr,
        )
    print(f"crossover {data['crossover_tokens']} tokens", file=sys.stderr)


def shapes(longest: int) -> list[Shape]:
    """Return shards to measure, of up to `longest` tokens per document, always the same."""
    rng = np.random.default_rng(0)
    kernel = KernelModel(tile_rows=128, launch=0.0, tile=1.0, query_tile=1.0)
    shards: list[Shape] = []

    def add(lengths: Any, cp: int = 1, strategy: str = "per-document") -> None:
        plan = divide(np.array(lengths, np.int64), cp, strategy, kernel)
        shards.extend((plan, rank) for rank in sorted({0, cp - 1}))

    for length in sorted({max(8, int(longest / 4 * 0.6**k)) for k in range(14)}):
        add([length])
    equal = sorted({max(8, longest // n) for n in (32, 128, 512, 2048)})
    for total, length in itertools.product((longest // 8, longest // 32), equal):
        add([length] * (total // length))
    for length, cp in itertools.product((longest, longest // 4, longest // 16), (4, 16)):
        add([length], cp)
    for total, cp in itertools.product((longest, longest // 4), (4, 8)):
        for strategy in ("per-sequence", "per-document", "hybrid"):
            ends = np.unique(rng.lognormal(np.log(total / 32), 1.2, 256).astype(np.int64).cumsum().clip(1, total))
            add(np.diff(ends, prepend=0), cp, strategy)
    return shards


def fit_directions(
    shards: list[Shard], us: np.ndarray, heads: int, tile_rows: tuple[int, ...]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return kernel times, best `tile_rows` and errors; `us` is float64 [shards, 2].

    Raises ValueError if the times do not grow with the tiles.
    """
    # A third of the shapes, shuffled, always the same.
    held_out = np.random.default_rng(0).permutation(len(shards)) % 3 == 2
    sizes = {"shapes_fitted": int((~held_out).sum()), "shapes_held_out": int(held_out.sum())}

    def fit_with(rows: int) -> tuple[float, dict[str, Any], dict[str, Any]]:
        counts = np.array([count(s, heads, rows) for s in shards])
        kernel: dict[str, Any] = {"tile_rows": rows}
        error, misfit = {}, 0.0
        for direction, measured in zip(("forward", "backward"), us.T, strict=True):
            kernel[direction] = fit(counts[~held_out], measured[~held_out])
            predicted = predict(kernel[direction], counts)
            median, p90 = relative_error(predicted[held_out], measured[held_out])
            error[direction] = {"held_out_median": median, "held_out_p90": p90, **sizes}
            misfit += float(((predicted / measured - 1)[~held_out] ** 2).sum())
        return misfit, kernel, error

    _, kernel, error = min(map(fit_with, tile_rows), key=itemgetter(0))
    if not kernel["forward"].tile + kernel["backward"].tile:
        raise ValueError("attention took no longer for more tiles; run without --quick, or on an idle machine")
    return kernel, error


def count(shard: Shard, heads: int, tile_rows: int) -> tuple[int, int, int, int]:
    """Return the factors of the `KernelTimes` for a shard."""
    kernel = KernelModel(tile_rows=tile_rows, launch=0.0, tile=0.0, query_tile=0.0)
    launches, tiles, query_tiles, hidden = kernel.count_shard(shard.calls)
    return launches, heads * tiles, heads * query_tiles, heads * hidden


def fit(counts: np.ndarray, us: np.ndarray) -> KernelTimes:
    """Fit relative errors by least squares, no time under 0; counts [n, 4], us [n]. Without hidden tiles [n, 3]."""
    from scipy.optimize import nnls

    relative = counts / us[:, None]
    unit = np.linalg.norm(relative, axis=0)
    unit[unit == 0] = 1  # no tile is hidden in any of them
    shares = nnls(relative / unit, np.ones(len(us)))[0]
    shares[shares < 1e-9 * shares.max()] = 0  # rounding errors
    names = ("launch", "tile", "query_tile", "hidden")
    return KernelTimes(**dict(zip(names, map(rounded, shares / unit), strict=False)))


def predict(times: KernelTimes, counts: np.ndarray) -> np.ndarray:
    """Return predicted times in us, float64 [n], of counts as in `fit`."""
    return counts @ np.array([times.launch, times.tile, times.query_tile, times.hidden])[: counts.shape[-1]]


def relative_error(predicted: np.ndarray, measured: np.ndarray) -> tuple[float, float]:
    """Median and 90th percentile of |predicted / measured - 1|."""
    errors = np.abs(predicted / measured - 1)
    return round(float(np.median(errors)), 4), round(float(np.quantile(errors, 0.9)), 4)


def rounded(x: float) -> float:
    return float(f"{x:.4g}")
