"""Causal attention of packed documents over context-parallel ranks: gather K and V, run every call, save only shards.

Shapes: s local rows, P keys that they see, e rows that every rank sends (`ShardMetadata`); Hq query heads, a multiple
of the Hkv key heads; head size D. Heads are worked off in groups of h key heads with their query heads, so that K and V
of the next group arrive, and dK and dV of the last one leave, while this one computes. `kv` holds K and V side by side,
[rows, 2, h, D]: they are copied together once, which frees the QKV projection that they are views of, and one
collective and one index_select move both.
"""

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_wlb.runtime.backends import Backend, KernelArgs, owned
from megatron_wlb.runtime.metadata import ShardMetadata

# torch 2.13 renames these two and warns at every use of the old names.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionOptions:
    """How attention runs; the same on all ranks."""

    backend: Backend
    scale: float | None = None
    """Factor of the scores; by default head size ** -0.5."""
    window: int | None = None
    """Keys that a query sees before its own; None: all of its document."""
    head_groups: int = 1
    """Groups of key heads in which K and V are exchanged, a divisor of their number; 1 hides no communication."""
    save_gathered: bool = False
    """Keep the gathered K and V for backward instead of gathering them again: P rows of memory for every layer."""
    two_streams: bool = False
    """Run the first of two calls on a CUDA stream of its own, beside the second."""

    def args(self, metadata: ShardMetadata, head_size: int) -> list[KernelArgs]:
        """What `backend` is given for each call."""
        scale = head_size**-0.5 if self.scale is None else self.scale
        calls = zip(metadata.calls, metadata.tables, strict=True)
        return [KernelArgs(table, call.max_q, call.max_k, scale, self.window) for call, table in calls]


def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    metadata: ShardMetadata,
    group: dist.ProcessGroup | None,
    options: AttentionOptions,
) -> Tensor:
    """Every row attends to the rows up to itself of its own document, wherever these are; differentiable once.

    q [s, Hq, D], k and v [s, Hkv, D] are the local rows in the order of `metadata`; returns out [s, Hq, D]. `group` has
    one rank per shard of the plan (None: a single shard), and all of them must call. Communication, per head group: an
    all-gather of K and V in forward and again in backward, and an fp32 reduce-scatter of dK and dV, all of documents
    that live on more than one rank only. Saved for backward: q, k, v, out and the log-sum-exps, none of them a view of
    anything larger.

    Raises ValueError where shapes, dtypes, devices or ranks do not fit each other. Source: WLB-LLM (OSDI'25),
    section 5; the all-gather of K and V follows LLaMA 3 (arXiv 2407.21783, section 3.3.2).
    """
    _check_shapes(q, k, v, metadata, options)
    _check_placement(q, k, v, metadata, group, options.backend)
    if metadata.num_sent == 0:
        group = None
    return _ContextParallelAttention.apply(q, k, v, metadata, group, options)


class _ContextParallelAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        metadata: ShardMetadata,
        group: dist.ProcessGroup | None,
        options: AttentionOptions,
    ) -> Tensor:
        q, kv = owned(q), torch.stack((k, v), dim=1)
        out = torch.empty_like(q)
        groups = _head_groups(q, k, options.head_groups if group is not None else 1)
        gathered = _gathered(kv, groups, metadata, group)
        lse: list[Tensor] = []
        kept: list[Tensor] = []
        for heads in groups:
            kept.append(next(gathered))
            lse += attend(q[:, heads.q], kept[-1], out[:, heads.q], metadata, options)
            if not options.save_gathered or group is None:
                kept.clear()
        ctx.save_for_backward(q, kv, out, *lse, *kept)
        ctx.setup = metadata, group, options, groups
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        metadata, group, options, groups = ctx.setup
        q, kv, out, *rest = ctx.saved_tensors
        num_calls = len(metadata.calls)
        lse, kept = rest[: len(groups) * num_calls], rest[len(groups) * num_calls :]
        # A gradient may have any strides, that of a plain sum 0.
        dout = dout if dout.stride(-1) == 1 else dout.contiguous()
        dq = torch.empty_like(q)
        if group is None and metadata.keys_are_rows:
            dkv = attend_backward(dout, q, kv, out, lse, dq, metadata, options)
            return dq, *dkv[:-1].to(kv.dtype).unbind(1), None, None, None
        dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in kv.unbind(1))
        gathered = iter(kept) if kept else _gathered(kv, groups, metadata, group)
        under_way: list[_Leaving] = []
        for i, heads in enumerate(groups):
            parts = lse[i * num_calls : (i + 1) * num_calls]
            local = dout[:, heads.q], q[:, heads.q]
            under_way.append(
                _Leaving(
                    # No variables: they would keep these through the next group's.
                    attend_backward(*local, next(gathered), out[:, heads.q], parts, dq[:, heads.q], metadata, options),
                    dk[:, heads.k],
                    dv[:, heads.k],
                    metadata,
                    group,
                )
            )
            if i > 0:
                under_way.pop(0).arrive()
        under_way.pop().arrive()
        return dq, dk, dv, None, None, None


def attend(q: Tensor, kv: Tensor, out: Tensor, metadata: ShardMetadata, options: AttentionOptions) -> list[Tensor]:
    """Attention of local queries q [s, Hq, D] to all keys kv [P, 2, Hkv, D], into out [s, Hq, D].

    Returns one log-sum-exp [Hq, rows] per call.
    """
    streams, lse, (k, v) = _Streams(q, metadata, options), [], kv.unbind(1)
    for i, (call, args) in enumerate(zip(metadata.calls, options.args(metadata, q.shape[-1]), strict=True)):
        with streams.of(i):
            out[call.rows], part = options.backend.forward(q[call.rows], k, v, args)
        lse.append(part)
    streams.join()
    return lse


def attend_backward(
    dout: Tensor,
    q: Tensor,
    kv: Tensor,
    out: Tensor,
    lse: list[Tensor],
    dq: Tensor,
    metadata: ShardMetadata,
    options: AttentionOptions,
) -> Tensor:
    """Gradients of `attend`: into dq [s, Hq, D]; returns this rank's share of dK and dV, [P + 1, 2, Hkv, D].

    In fp32 (fp64 for fp64), in which calls and ranks are summed, or in the dtype of kv if there is one of both. The
    last row is 0: it stands for all rows of the exchange that this rank has no keys for.
    """
    summed = len(metadata.calls) > 1 or metadata.num_sent > 0
    dtype = torch.promote_types(kv.dtype, torch.float32) if summed else kv.dtype
    dkv = torch.empty((metadata.num_keys + 1, *kv.shape[1:]), dtype=dtype, device=kv.device)
    dkv[-1].zero_()
    streams, (k, v) = _Streams(q, metadata, options), kv.unbind(1)
    all_args = options.args(metadata, q.shape[-1])
    for i, (call, args, part) in enumerate(zip(metadata.calls, all_args, lse, strict=True)):
        local = dout[call.rows], q[call.rows], k, v, out[call.rows], part
        args = args._replace(adds_up=i > 0, before_adding=streams.join if i > 0 else None)
        with streams.of(i):
            dq[call.rows] = options.backend.backward(*local, dkv[:-1], args)
    streams.join()
    return dkv


class _Streams:
    """Where calls run: all on the current stream, or with `two_streams` the first of two on another one.

    That begins when all that was queued before has ended, and ends before anything after `join`, so memory that is
    freed on either stream is not written anew while the other reads it.
    """

    def __init__(self, q: Tensor, metadata: ShardMetadata, options: AttentionOptions) -> None:
        self._beside: torch.cuda.Stream | None = None
        if options.two_streams and q.is_cuda and len(metadata.calls) > 1:
            self._beside = _side_stream(q.device)
            self._beside.wait_stream(torch.cuda.current_stream(q.device))

    def of(self, call: int) -> AbstractContextManager[Any]:
        """Within, work is queued where call number `call` runs."""
        return torch.cuda.stream(self._beside) if self._beside is not None and call == 0 else nullcontext()

    def join(self) -> None:
        """What is queued on the current stream from here on runs after the first call."""
        if self._beside is not None:
            torch.cuda.current_stream(self._beside.device).wait_stream(self._beside)


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class _Heads(NamedTuple):
    """A group: query heads, and the key heads that they read."""

    q: slice
    k: slice


def _head_groups(q: Tensor, k: Tensor, count: int) -> list[_Heads]:
    """`count` groups of equal size."""
    h, g = k.shape[1] // count, q.shape[1] // k.shape[1]
    return [_Heads(slice(i * h * g, (i + 1) * h * g), slice(i * h, (i + 1) * h)) for i in range(count)]


def _gathered(
    kv: Tensor, groups: list[_Heads], metadata: ShardMetadata, group: dist.ProcessGroup | None
) -> Iterator[Tensor]:
    """K and V [P, 2, h, D] of one head group after the other; the next ones are on their way while these are used."""
    if group is None and metadata.keys_are_rows:
        yield from (kv[:, :, heads.k] for heads in groups)
        return
    gathers = (_start_gather(kv[:, :, heads.k], metadata, group) for heads in groups)
    under_way = [next(gathers)]
    for _ in groups:
        under_way += islice(gathers, 1)
        yield _arrived(*under_way.pop(0), metadata)


def _start_gather(
    kv: Tensor, metadata: ShardMetadata, group: dist.ProcessGroup | None
) -> tuple[Tensor, dist.Work | None]:
    """The pool [cp * e + own rows, 2, h, D]: what arrives from all ranks, then the local rows that nobody is sent."""
    if group is None:
        return kv, None
    arrived = metadata.cp * metadata.num_sent
    pool = kv.new_empty((arrived + metadata.own_rows.shape[0], *kv.shape[1:]))
    torch.index_select(kv, 0, metadata.own_rows, out=pool[arrived:])
    if metadata.sends_rows:
        sent = kv.contiguous()
    else:
        sent = kv.new_zeros((metadata.num_sent, *kv.shape[1:]))
        torch.index_select(kv, 0, metadata.sent_rows, out=sent[: metadata.sent_rows.shape[0]])
    return pool, _all_gather(pool[:arrived], sent, group=group, async_op=True)


def _arrived(pool: Tensor, work: dist.Work | None, metadata: ShardMetadata) -> Tensor:
    """K and V [P, 2, h, D] of a pool. A function, so that nothing holds the pool while they are used."""
    if work is not None:
        work.wait()
    return pool.index_select(0, metadata.gather_index)


class _Leaving:
    """dK and dV of a head group on their way to the ranks that hold the rows."""

    def __init__(
        self, dkv: Tensor, dk: Tensor, dv: Tensor, metadata: ShardMetadata, group: dist.ProcessGroup | None
    ) -> None:
        """dkv is what `attend_backward` gave; dk and dv [s, h, D] are filled when it has arrived."""
        self._dk, self._dv, self._metadata, self._work = dk, dv, metadata, None
        self._own = dkv.index_select(0, metadata.own_keys)
        if group is not None:
            self._sent = dkv.index_select(0, metadata.scatter_index)
            self._sum = dkv.new_empty((metadata.num_sent, *dkv.shape[1:]))
            self._work = _reduce_scatter(self._sum, self._sent, group=group, async_op=True)

    def arrive(self) -> None:
        """Wait for the sums of all ranks, and write them down."""
        m = self._metadata
        self._write(self._own, m.own_rows)
        if self._work is not None:
            self._work.wait()
            self._write(self._sum, m.sent_rows, m.sends_rows)

    def _write(self, dkv: Tensor, rows: Tensor, all_in_order: bool = False) -> None:
        for local, values in zip((self._dk, self._dv), dkv[: rows.shape[0]].to(self._dk.dtype).unbind(1), strict=True):
            if all_in_order:
                local.copy_(values)
            else:
                local[rows] = values


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, metadata: ShardMetadata, options: AttentionOptions) -> None:
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
    if k.shape[1] % options.head_groups:
        raise ValueError(
            f"{k.shape[1]} key heads cannot be exchanged in {options.head_groups} equal groups; choose a divisor"
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
    if metadata.encode is not backend.encode:
        raise ValueError(
            f"the metadata is encoded for another attention backend than {backend.name!r}; build it with the backend's "
            "encode"
        )
    place = (0, 1) if group is None else (group.rank(), group.size())
    if place != (metadata.cp_rank, metadata.cp):
        raise ValueError(
            f"this is rank {place[0]} of {place[1]} context-parallel ranks, but the metadata is for rank "
            f"{metadata.cp_rank} of {metadata.cp}; build it with the rank and size of the group"
        )
