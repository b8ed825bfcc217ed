"""Attention of a micro-batch from its document lengths alone, and all ranks of a shard plan in one process.

Shapes: P rows in packed order, Hq query heads, Hkv key heads, head size D, Dv of values.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from megatron_wlb.documents import ShardPlan
from megatron_wlb.hardware.profile import KernelModel
from megatron_wlb.runtime import all_to_all, attention
from megatron_wlb.runtime.attention import AttentionOptions
from megatron_wlb.runtime.backends.protocol import keys_and_values, side_by_side
from megatron_wlb.runtime.metadata import ShardMetadata
from megatron_wlb.runtime.reference import expected
from megatron_wlb.sharding.routing import rows
from tests.reference.chunks import per_document, per_sequence
from tests.reference.hybrid import hybrid
from tests.reference.rounds import regrouped

TOLERANCE = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def _hybrid(lengths: np.ndarray, cp: int) -> ShardPlan:
    """Documents on one rank, several or all, in tiles of 4."""
    return hybrid(lengths, cp, 1 / 4, KernelModel(tile_rows=4, launch=0.0, tile=1.0, query_tile=0.0))


def _in_rounds(lengths: np.ndarray, cp: int) -> ShardPlan:
    """Hybrid, documents that are whole by themselves."""
    return regrouped(_hybrid(lengths, cp))


def in_shares(lengths: np.ndarray, cp: int, bounds: tuple[float, ...] = (0.0, 0.1, 0.5, 1.0)) -> ShardPlan:
    """Hybrid, with shared documents in shares: own keys, others in shares with these bounds.

    The first is so small that some queries see no key of it.
    """
    return regrouped(_hybrid(lengths, cp), bounds)


SHARDINGS: dict[str, Callable[[np.ndarray, int], ShardPlan]] = {
    "per-sequence": per_sequence,
    "per-document": per_document,
    "hybrid": _hybrid,
    "in rounds": _in_rounds,
}


def inputs(
    num_rows: int,
    heads: tuple[int, int],
    head_size: int | tuple[int, int],
    dtype: torch.dtype,
    *,
    num_keys: int | None = None,
    device: str = "cpu",
) -> tuple[Tensor, ...]:
    """Random q, k, v, dout for (Hq, Hkv) heads, the same in every process; by default as many keys as rows.

    k and v are interleaved, q and dout views of wider ones, as in use.
    """
    size, value_size = (head_size, head_size) if isinstance(head_size, int) else head_size
    generator = torch.Generator().manual_seed(num_rows)
    shape = (2, heads[1], size) if size == value_size else (heads[1], size + value_size)
    kv = torch.randn(num_keys or num_rows, *shape, generator=generator).to(device, dtype)
    wide = torch.randn(num_rows, 2 * heads[0] + 1, max(size, value_size), generator=generator).to(device, dtype)
    return wide[:, : heads[0], :size], *keys_and_values(kv, size), wide[:, heads[0] : -1, :value_size]


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    lengths: list[int],
    scale: float,
    window: int | None = None,
    sink: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """float64 out, dq, dk, dv, and of a `sink` [Hq] its gradient, of documents by their lengths alone."""
    out, _, *gradients = expected([(n, n) for n in lengths], q, k, v, dout, scale, window, sink=sink)
    return out, *gradients


def local_rows(plan: ShardPlan, cp_rank: int) -> Tensor:
    """Packed rows that a rank holds, int64 [s]."""
    return torch.from_numpy(rows(plan.lengths, plan.shards[cp_rank]))


def all_ranks(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, plan: ShardPlan, options: AttentionOptions
) -> tuple[Tensor, ...]:
    """out, dq, dk, dv in packed order; every rank is a thread, and collectives are copies between them."""
    size = len(plan.shards)
    given, barrier = [()] * size, threading.Barrier(size, timeout=60)

    def exchanged(out, x, out_sizes, sizes, group, async_op):
        given[group.rank()] = x.split(sizes)
        barrier.wait()
        torch.cat([parts[group.rank()] for parts in given], out=out)
        barrier.wait()
        return SimpleNamespace(wait=lambda: None)

    def run(rank):
        try:
            metadata = ShardMetadata.build(plan, rank, options.backend.encode, windows=(options.window,)).to(q.device)
            group = SimpleNamespace(rank=lambda: rank, size=lambda: size) if size > 1 else None
            local = [x[rows[rank]] for x in (q, k, v, dout)]
            return by_hand(*local, metadata, group, options)
        except BaseException:
            barrier.abort()
            raise

    rows = [local_rows(plan, rank).to(q.device) for rank in range(size)]
    with (
        mock.patch.object(all_to_all, "_all_to_all", exchanged),
        mock.patch.object(attention, "gradient_group", lambda group: group),
        ThreadPoolExecutor(size) as threads,
    ):
        parts = zip(*threads.map(run, range(size)), strict=True)
    return tuple(torch.cat(part)[torch.argsort(torch.cat(rows))] for part in parts)


def by_hand(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, metadata: ShardMetadata, group: Any, options: AttentionOptions
) -> tuple[Tensor, ...]:
    """out, dq, dk, dv without autograd, whose thread of a GPU all ranks would share, and which wants a driver."""
    function, ctx = attention._ContextParallelAttention, SimpleNamespace()
    ctx.save_for_backward = lambda *tensors: setattr(ctx, "saved_tensors", tensors)
    if options.exchanged_before:
        moving, moved = all_to_all._ExchangeRows, SimpleNamespace()
        kv = moving.forward(moved, side_by_side(k, v), all_to_all.rounds_at_once(metadata), group)
        out = function.forward(ctx, q, kv, None, None, metadata, None, options)
        dq, dkv, *_ = function.backward(ctx, dout)
        return out, dq, *keys_and_values(moving.backward(moved, dkv)[0], q.shape[-1])
    out = function.forward(ctx, q, k, v, None, metadata, group, options)
    return out, *function.backward(ctx, dout)[:3]


def relative_error(got: Tensor, want: Tensor) -> float:
    """Of norms; a zero counts as one of size 1."""
    return ((got.double() - want).norm() / (want.norm() + want.numel() ** 0.5)).item()


def assert_close(got: tuple[Tensor, ...], want: tuple[Tensor, ...], tolerance: float) -> None:
    """Each of out, perhaps log-sum-exps, dq, dk, dv within `tolerance` of float64."""
    assert [x.shape for x in got] == [y.shape for y in want]
    errors = [relative_error(x, y) for x, y in zip(got, want, strict=True)]
    assert all(error <= tolerance for error in errors), errors  # NaN is none
