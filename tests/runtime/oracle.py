"""Attention of a micro-batch from its document lengths alone, and all ranks of a shard plan in one process.

Shapes: P rows in packed order, Hq query heads, Hkv key heads, head size D.
"""

import torch
from torch import Tensor

from megatron_wlb.plan.types import ShardPlan
from megatron_wlb.runtime.attention import attend, attend_backward
from megatron_wlb.runtime.backends import Backend
from megatron_wlb.runtime.metadata import ShardMetadata

NAMES = ("out", "dq", "dk", "dv")


def inputs(num_rows: int, heads: tuple[int, int], head_size: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Random q, k, v, dout for (Hq, Hkv) heads, the same in every process."""
    generator = torch.Generator().manual_seed(num_rows)
    sizes = (heads[0], heads[1], heads[1], heads[0])
    return tuple(torch.randn(num_rows, h, head_size, generator=generator).to(dtype) for h in sizes)


def dense(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lengths: list[int], scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """float64 out, dq, dk, dv: one block-diagonal causal mask, gradients by autograd."""
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    row = torch.arange(len(document))
    visible = ((document[:, None] == document[None, :]) & (row[:, None] >= row[None, :])).to(q.device)
    keys, values = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, keys) * scale
    out = torch.einsum("hqk,khd->qhd", scores.masked_fill(~visible, float("-inf")).softmax(-1), values)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), dout.double())


def local_rows(plan: ShardPlan, cp_rank: int) -> Tensor:
    """Packed rows that a rank holds, int64 [s]."""
    begins = [0]
    for length in plan.lengths.tolist():
        begins.append(begins[-1] + length)
    colours = plan.shards[cp_rank].colours
    return torch.tensor([begins[d] + i for colour in colours for d, start, stop in colour for i in range(start, stop)])


def all_ranks(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, plan: ShardPlan, backend: Backend, scale: float
) -> tuple[Tensor, ...]:
    """out, dq, dk, dv in packed order, computed shard by shard; collectives are replaced by cat, sum and chunk."""
    rows = [local_rows(plan, rank) for rank in range(len(plan.shards))]
    metadata = [ShardMetadata.build(plan, rank) for rank in range(len(plan.shards))]
    gathered = torch.cat([torch.stack((k[r], v[r]), dim=1) for r in rows])
    out, dq, dkv = torch.empty_like(q), torch.empty_like(q), torch.empty_like(gathered)
    shares = []
    for r, m in zip(rows, metadata, strict=True):
        kv = gathered[m.gather_index]
        out[r], lse = attend(q[r], kv, m, backend, scale)
        dq[r], share = attend_backward(dout[r], q[r], kv, out[r], lse, m, backend, scale)
        shares.append(share[m.scatter_index])
    for r, home in zip(rows, torch.stack(shares).sum(0).chunk(len(rows)), strict=True):
        dkv[r] = home.to(k.dtype)
    return out, dq, *dkv.unbind(1)


def assert_close(got: tuple[Tensor, ...], want: tuple[Tensor, ...], tolerance: float) -> None:
    """Each of out, dq, dk, dv within `tolerance` of float64, as norms; a zero gradient counts as one of size 1."""
    for name, x, y in zip(NAMES, got, want, strict=True):
        error = (x.double() - y).norm() / (y.norm() + y.numel() ** 0.5)
        assert error <= tolerance, f"{name}: relative error {error:.1e} > {tolerance:.1e}"
