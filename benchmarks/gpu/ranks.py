"""Context-parallel ranks played one after the other in one process, and ways to run the attention of one.

Shapes: L rows of the micro-batch, s of them local; P keys that they see; N rows of all key prefixes together; Hq query
heads, a multiple of the Hkv key heads; head size D. K and V lie side by side, [rows, 2, Hkv, D], as in training.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from megatron_wlb.runtime.attention import AttentionOptions, attend, attend_backward
from megatron_wlb.runtime.backends import Backend, KernelArgs
from megatron_wlb.runtime.backends.cpu import CpuBackend, SegmentRows
from megatron_wlb.runtime.backends.trial import kernel_args
from megatron_wlb.runtime.metadata import ShardMetadata
from megatron_wlb.sharding import segments
from megatron_wlb.sharding.routing import exchange
from megatron_wlb.types import ShardPlan


class Rows(NamedTuple):
    """Tensors of a micro-batch or of a rank; on a rank, `kv` has the keys."""

    q: Tensor
    """[L or s, Hq, D]."""
    kv: Tensor
    """[L or P, 2, Hkv, D]."""
    dout: Tensor
    """[L or s, Hq, D]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """What a rank is given; integers on the device."""

    metadata: ShardMetadata
    segments: list[SegmentRows]
    """Local rows and keys of its segments, in the order of the local rows."""
    rows: Tensor
    """Rows of the micro-batch that it holds, int64 [s]."""
    keys: Tensor
    """Rows of the micro-batch that are its keys, int64 [P]."""

    def local(self, micro_batch: Rows) -> Rows:
        """The tensors that the rank has once K and V have been gathered."""
        q, kv, dout = micro_batch
        return Rows(q.index_select(0, self.rows), kv.index_select(0, self.keys), dout.index_select(0, self.rows))


def ranks(plan: ShardPlan, backend: Backend, device: torch.device) -> list[Rank]:
    """All ranks of a plan whose documents are one set."""
    metadata = [ShardMetadata.build(plan, rank, backend.encode).to(device) for rank in range(len(plan.shards))]
    rows = [torch.from_numpy(segments.rows(plan.lengths, shard)).to(device) for shard in plan.shards]
    moved = [exchange(plan, rank, 0) for rank in range(len(plan.shards))]
    tables = [
        CpuBackend.encode(m.key_begins, np.concatenate(shard.calls)).table
        for m, shard in zip(moved, plan.shards, strict=True)
    ]
    begins = segments.document_begins(plan.lengths)[:-1]
    keys = [segments.ranges(begins, begins + np.diff(m.key_begins)) for m in moved]
    return [
        Rank(
            metadata=m,
            segments=[SegmentRows(*row) for row in table.tolist()],
            rows=r,
            keys=torch.from_numpy(of_rank).to(device),
        )
        for r, m, table, of_rank in zip(rows, metadata, tables, keys, strict=True)
    ]


def random_rows(count: int, heads: tuple[int, int], head_size: int, dtype: torch.dtype, device: torch.device) -> Rows:
    """Random tensors of `count` rows for (Hq, Hkv) heads; the same in every run on a device."""
    generator = torch.Generator(device).manual_seed(count)
    shapes = ((heads[0],), (2, heads[1]), (heads[0],))
    return Rows(*(torch.randn(count, *s, head_size, generator=generator, device=device, dtype=dtype) for s in shapes))


class Method(Protocol):
    """Attention of one rank. `forward` gives out and all else that stays in memory until `backward`."""

    def forward(self, local: Rows) -> tuple[Tensor, ...]: ...

    def backward(self, local: Rows, saved: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """dq [s, Hq, D] and this rank's share of dK and dV [P, 2, Hkv, D]."""


MakeMethod = Callable[[Rank, AttentionOptions], Method]


def both(method: Method, local: Rows) -> tuple[Tensor, Tensor, Tensor]:
    """Forward and backward: out, dq, dkv."""
    saved = method.forward(local)
    return saved[0], *method.backward(local, saved)


class CopyFree:
    """Ours: calls over all keys of the rank, their dK and dV summed in fp32."""

    def __init__(self, rank: Rank, options: AttentionOptions) -> None:
        (self._part,), self._options = rank.metadata.parts, options

    def forward(self, local: Rows) -> tuple[Tensor, ...]:
        out = torch.empty_like(local.q)
        return out, *attend(local.q, local.kv, out, self._part, self._options)

    def backward(self, local: Rows, saved: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        out, *lse = saved
        q, kv, dout = local
        dq = torch.empty_like(q)
        return dq, attend_backward(dout, q, kv, out, lse, dq, self._part, self._options)


class PrefixCopies:
    """K and V up to the end of every segment copied one after the other, then one call, in which nothing is shared.

    After the implementation that DistCA compares itself with (hao-ai-lab/DistCA, baseline/wlbllm_original): copies by
    `torch.cat`, kept for backward, dK and dV summed segment by segment in their own dtype. In its favour, one call for
    the two there. With `dtype` float32 sums are as exact as ours.
    """

    def __init__(self, rank: Rank, options: AttentionOptions, dtype: torch.dtype | None = None) -> None:
        self._backend, self._scale, self._dtype = options.backend, options.scale, dtype
        self._prefixes = [slice(s.k_start, s.k_stop) for s in rank.segments]
        self._entries = [(s.q_stop - s.q_start, s.k_stop - s.k_start) for s in rank.segments]
        self._args = kernel_args(self._backend, self._entries, rank.keys.device, 1.0)

    def forward(self, local: Rows) -> tuple[Tensor, ...]:
        kv = torch.cat([local.kv[prefix] for prefix in self._prefixes])
        return *self._backend.forward(local.q, *kv.unbind(1), self._scaled(local)), kv

    def backward(self, local: Rows, saved: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        out, lse, kv = saved
        given = local.dout, local.q, *kv.unbind(1), out, lse, self._scaled(local)
        dq, *gradients = gradients_of(self._backend, *given)
        rows, _, *head = local.kv.shape
        dkv = local.kv.new_zeros((2, rows, *head), dtype=self._dtype)  # dK and dV contiguous, as there
        for total, gradient in zip(dkv, gradients, strict=True):
            parts = gradient.split([keys for _, keys in self._entries])
            for prefix, part in zip(self._prefixes, parts, strict=True):
                total[prefix].add_(part)
        return dq, dkv.transpose(0, 1)

    def _scaled(self, local: Rows) -> KernelArgs:
        return self._args._replace(scale=self._scale or local.q.shape[-1] ** -0.5)


def gradients_of(
    backend: Backend, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, args: KernelArgs
) -> tuple[Tensor, ...]:
    """dq, dk, dv of a call; straight from the operator where our backend would bring dk and dv to fp32."""
    if backend.name == "aten":
        state = torch.empty(2, dtype=torch.uint64, device=q.device)
        lengths = *args.table, args.max_q, args.max_k
        return torch.ops.aten._flash_attention_backward(
            dout, q, k, v, out, lse, *lengths, 0.0, True, state, state[0], scale=args.scale
        )
    dkv = k.new_empty((len(k), 2, *k.shape[1:]), dtype=torch.promote_types(k.dtype, torch.float32))
    return backend.backward(dout, q, k, v, out, lse, dkv, args._replace(adds_up=False)), *dkv.unbind(1)
