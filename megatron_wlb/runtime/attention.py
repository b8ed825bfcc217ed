"""Causal attention of packed documents over context-parallel ranks: gather K and V, run every colour, save only shards.

Shapes: s local rows, P = cp_size * s rows of the micro-batch in packed order, Hq query heads, a multiple of the Hkv
key heads, head size D. `kv` holds K and V side by side, [rows, 2, Hkv, D], so that one collective and one index_select
move both.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_wlb.runtime.backends import Backend
from megatron_wlb.runtime.metadata import ShardMetadata

# torch 2.13 renames these two and warns at every use of the old names.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    metadata: ShardMetadata,
    group: dist.ProcessGroup | None,
    backend: Backend,
    softmax_scale: float | None = None,
) -> Tensor:
    """Every row attends to the rows up to itself of its own document, wherever these are; differentiable once.

    q [s, Hq, D], k and v [s, Hkv, D] are the local rows in the order of `metadata`; returns out [s, Hq, D]. `group` has
    one rank per shard of the plan (None: a single shard), and all of them must call. `softmax_scale` is D ** -0.5 by
    default. Communication: one all-gather of K and V each in forward and backward, and one fp32 reduce-scatter of dK
    and dV; a single shard communicates nothing. Saved for backward: q, k, v, out and the log-sum-exps.

    Raises ValueError where shapes, dtypes, devices or ranks do not fit each other. Source: WLB-LLM (OSDI'25),
    section 5; the all-gather of K and V follows LLaMA 3 (arXiv 2407.21783, section 3.3.2).
    """
    _check_shapes(q, k, v, metadata)
    _check_placement(q, k, v, metadata, group, backend)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    return _ContextParallelAttention.apply(_dense_heads(q), k, v, metadata, group, backend, scale)


class _ContextParallelAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        metadata: ShardMetadata,
        group: dist.ProcessGroup | None,
        backend: Backend,
        scale: float,
    ) -> Tensor:
        kv = _gather(torch.stack((k, v), dim=1), metadata, group)
        out, lse = attend(q, kv, metadata, backend, scale)
        ctx.save_for_backward(q, k, v, out, *lse)
        ctx.call = metadata, group, backend, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        metadata, group, backend, scale = ctx.call
        q, k, v, out, *lse = ctx.saved_tensors
        kv = _gather(torch.stack((k, v), dim=1), metadata, group)
        dq, dkv = attend_backward(_dense_heads(dout), q, kv, out, lse, metadata, backend, scale)
        dk, dv = _scatter(dkv, metadata, group).to(k.dtype).unbind(1)
        return dq, dk, dv, None, None, None, None


def attend(
    q: Tensor, kv: Tensor, metadata: ShardMetadata, backend: Backend, scale: float
) -> tuple[Tensor, list[Tensor]]:
    """Attention of local queries to all keys: q [s, Hq, D], kv [P, 2, Hkv, D] in packed order.

    Returns out [s, Hq, D] and one log-sum-exp [Hq, rows] per colour.
    """
    k, v = kv.unbind(1)
    parts = [backend.forward(q[c.q_start : c.q_stop], k, v, c, scale) for c in metadata.colours]
    return torch.cat([out for out, _ in parts]), [lse for _, lse in parts]


def attend_backward(
    dout: Tensor,
    q: Tensor,
    kv: Tensor,
    out: Tensor,
    lse: list[Tensor],
    metadata: ShardMetadata,
    backend: Backend,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Gradients of `attend`: dq [s, Hq, D], and this rank's share of dkv [P, 2, Hkv, D] in fp32 (fp64 for fp64)."""
    k, v = kv.unbind(1)
    dkv = torch.zeros(kv.shape, dtype=torch.promote_types(kv.dtype, torch.float32), device=kv.device)
    dk, dv = dkv.unbind(1)
    dq = []
    for colour, colour_lse in zip(metadata.colours, lse, strict=True):
        rows = slice(colour.q_start, colour.q_stop)
        dq.append(backend.backward(dout[rows], q[rows], k, v, out[rows], colour_lse, colour, scale, dk, dv))
    return torch.cat(dq), dkv


def _dense_heads(x: Tensor) -> Tensor:
    """x with stride 1 in the head size, which kernels take for granted; dout of a plain sum, say, has stride 0."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _gather(kv: Tensor, metadata: ShardMetadata, group: dist.ProcessGroup | None) -> Tensor:
    """Local kv [s, 2, Hkv, D] -> that of all ranks in packed order [P, 2, Hkv, D]."""
    if group is not None and group.size() > 1:
        local = kv
        kv = local.new_empty((metadata.num_keys, *local.shape[1:]))
        _all_gather(kv, local, group=group)
    return kv.index_select(0, metadata.gather_index)


def _scatter(dkv: Tensor, metadata: ShardMetadata, group: dist.ProcessGroup | None) -> Tensor:
    """Every rank's share of dkv [P, 2, Hkv, D] in packed order -> the sum, for the local rows [s, 2, Hkv, D]."""
    dkv = dkv.index_select(0, metadata.scatter_index)
    if group is None or group.size() == 1:
        return dkv
    local = dkv.new_empty((metadata.num_rows, *dkv.shape[1:]))
    _reduce_scatter(local, dkv, group=group)
    return local


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, metadata: ShardMetadata) -> None:
    if q.dim() != 3 or k.dim() != 3 or k.shape != v.shape or q.shape[-1] != k.shape[-1]:
        raise ValueError(
            f"q, k, v have shapes {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}; they must be [s, Hq, D], "
            "[s, Hkv, D], [s, Hkv, D]: drop the batch dimension, and give K and V the same head size"
        )
    if q.shape[1] % k.shape[1]:
        raise ValueError(
            f"{q.shape[1]} query heads are not a multiple of {k.shape[1]} key heads; "
            "choose num_query_groups that divides num_attention_heads on every tensor-parallel rank"
        )
    if not q.shape[0] == k.shape[0] == metadata.num_rows:
        raise ValueError(
            f"q has {q.shape[0]} and k has {k.shape[0]} rows, but the shard of context-parallel rank "
            f"{metadata.cp_rank} has {metadata.num_rows}; pass the metadata of the same micro-batch and rank"
        )


def _check_placement(
    q: Tensor, k: Tensor, v: Tensor, metadata: ShardMetadata, group: dist.ProcessGroup | None, backend: Backend
) -> None:
    if not q.dtype == k.dtype == v.dtype or q.dtype not in backend.dtypes:
        raise ValueError(
            f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype}, but attention backend {backend.name!r} runs one of "
            f"{', '.join(map(str, backend.dtypes))} for all three; cast them, or choose another backend"
        )
    if not q.device == k.device == v.device == metadata.integers.device:
        raise ValueError(
            f"q, k, v are on {q.device}, {k.device}, {v.device}, and the metadata on {metadata.integers.device}; "
            "move the metadata once per micro-batch with metadata.to(device, non_blocking=True)"
        )
    place = (0, 1) if group is None else (group.rank(), group.size())
    if place != (metadata.cp_rank, metadata.cp_size):
        raise ValueError(
            f"this is rank {place[0]} of {place[1]} context-parallel ranks, but the metadata is for rank "
            f"{metadata.cp_rank} of {metadata.cp_size}; build it with the rank and size of the group"
        )
