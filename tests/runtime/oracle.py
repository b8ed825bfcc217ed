"""Attention of a micro-batch from its document lengths alone, and all ranks of a shard plan in one process.

Shapes: P rows in packed order, Hq query heads, Hkv key heads, head size D.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from megatron_wlb.cost.attention import KernelModel
from megatron_wlb.plan.sharding import hybrid, per_document, per_sequence, segments
from megatron_wlb.plan.types import ShardPlan
from megatron_wlb.runtime.attention import AttentionOptions, attend, attend_backward
from megatron_wlb.runtime.metadata import ShardMetadata

TOLERANCE = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def _hybrid(lengths: np.ndarray, cp: int) -> ShardPlan:
    """Documents on one rank, several or all, in tiles of 4."""
    return hybrid(lengths, cp, 1 / 4, KernelModel(tile_rows=4, launch=0.0, tile=1.0, query_tile=0.0))


SHARDINGS: dict[str, Callable[[np.ndarray, int], ShardPlan]] = {
    "per-sequence": per_sequence,
    "per-document": per_document,
    "hybrid": _hybrid,
}


def inputs(num_rows: int, heads: tuple[int, int], head_size: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Random q, k, v, dout for (Hq, Hkv) heads, the same in every process."""
    generator = torch.Generator().manual_seed(num_rows)
    sizes = (heads[0], heads[1], heads[1], heads[0])
    return tuple(torch.randn(num_rows, h, head_size, generator=generator).to(dtype) for h in sizes)


def dense(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lengths: list[int], scale: float, window: int | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """float64 out, dq, dk, dv: one block-diagonal causal mask, gradients by autograd."""
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    row = torch.arange(len(document))
    visible = ((document[:, None] == document[None, :]) & (row[:, None] >= row[None, :])).to(q.device)
    if window is not None:
        visible &= (row[:, None] - row[None, :] <= window).to(q.device)
    keys, values = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, keys) * scale
    out = torch.einsum("hqk,khd->qhd", scores.masked_fill(~visible, float("-inf")).softmax(-1), values)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), dout.double())


def local_rows(plan: ShardPlan, cp_rank: int) -> Tensor:
    """Packed rows that a rank holds, int64 [s]."""
    return torch.from_numpy(segments.rows(plan.lengths, plan.shards[cp_rank]))


def all_ranks(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, plan: ShardPlan, options: AttentionOptions
) -> tuple[Tensor, ...]:
    """out, dq, dk, dv in packed order, computed shard by shard; collectives are replaced by cat and sum."""
    rows = [local_rows(plan, rank).to(q.device) for rank in range(len(plan.shards))]
    metadata = [
        ShardMetadata.build(plan, rank, options.backend.encode).to(q.device) for rank in range(len(plan.shards))
    ]
    kv = torch.stack((k, v), dim=1)
    sent = [_sent(kv[r], m) for r, m in zip(rows, metadata, strict=True)]
    out, dq, dkv = torch.empty_like(q), torch.empty_like(q), torch.empty_like(kv)
    shares, own = [], []
    for r, m in zip(rows, metadata, strict=True):
        keys = torch.cat((*sent, kv[r[m.own_rows]]))[m.gather_index]
        local_out, local_dq = torch.empty_like(q[r]), torch.empty_like(q[r])
        lse = attend(q[r], keys, local_out, m, options)
        share = attend_backward(dout[r], q[r], keys, local_out, lse, local_dq, m, options)
        out[r], dq[r] = local_out, local_dq
        shares.append(share[m.scatter_index])
        own.append(share[m.own_keys])
    sums = torch.stack(shares).sum(0).chunk(len(rows)) if metadata[0].num_sent else [None] * len(rows)
    for r, m, arrived, mine in zip(rows, metadata, sums, own, strict=True):
        dkv[r[m.own_rows]] = mine.to(k.dtype)
        if arrived is not None:
            dkv[r[m.sent_rows]] = arrived[: len(m.sent_rows)].to(k.dtype)
    return out, dq, *dkv.unbind(1)


def _sent(kv: Tensor, metadata: ShardMetadata) -> Tensor:
    """What a rank sends: NaN where it is padding, which nobody may look at."""
    sent = kv.new_full((metadata.num_sent, *kv.shape[1:]), float("nan"))
    sent[: len(metadata.sent_rows)] = kv[metadata.sent_rows]
    return sent


def relative_error(got: Tensor, want: Tensor) -> float:
    """Of norms; a zero counts as one of size 1."""
    return ((got.double() - want).norm() / (want.norm() + want.numel() ** 0.5)).item()


def assert_close(got: tuple[Tensor, ...], want: tuple[Tensor, ...], tolerance: float) -> None:
    """Each of out, perhaps log-sum-exps, dq, dk, dv within `tolerance` of float64."""
    assert [x.shape for x in got] == [y.shape for y in want]
    errors = [relative_error(x, y) for x, y in zip(got, want, strict=True)]
    assert all(error <= tolerance for error in errors), errors  # NaN is none
