"""Causal attention of packed documents over context-parallel ranks.

Shapes: s local rows; Hq query heads, a multiple of the Hkv key heads; head size D, Dv of values. Attention runs in
rounds (`ShardPlan.rounds`), each for a set of documents with n of the rows and P keys, and for h of the key heads with
their query heads. While a round computes, K and V of the next one arrive, and dK and dV of the last one leave. `kv`
holds K and V `side_by_side`: one copy frees the QKV projection, and one collective moves both.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_wlb.runtime.all_to_all import Leaving, Sum, begin, finish, of_gradients, only_part
from megatron_wlb.runtime.backends.protocol import Backend, KernelArgs, keys_and_values, owned, side_by_side
from megatron_wlb.runtime.metadata import Call, Part, ShardMetadata
from megatron_wlb.sharding.routing import OWN


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionOptions:
    """How attention runs; the same on all ranks."""

    backend: Backend
    scale: float | None = None
    """Factor of the scores; by default head size ** -0.5."""
    window: int | None = None
    """Keys that a query sees before its own; None: all of its document."""
    save_gathered: bool = False
    """Keep exchanged keys for backward instead of sending them again: memory in every layer."""
    gradients_in_fp32: bool = True
    """Send dK and dV in fp32 (fp64 for fp64), else in the dtype of K and V; they are summed in fp32."""
    latents: bool = False
    """The model moves latents by `exchange_rows`, and calls `attention_to_keys`."""

    def calls(self, part: Part, head_size: int) -> list[tuple[Call, KernelArgs]]:
        """Return the calls of a part, each with its kernel arguments."""
        scale = head_size**-0.5 if self.scale is None else self.scale
        calls = zip(part.calls, part.tables, strict=True)
        return [(c, KernelArgs(table, c.max_q, c.max_k, scale, self.window, part.causal)) for c, table in calls]


def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    metadata: ShardMetadata,
    group: dist.ProcessGroup | None,
    options: AttentionOptions,
    sink: Tensor | None = None,
) -> Tensor:
    """Return attention of every row to its document up to itself, [s, Hq, Dv].

    q [s, Hq, D], k [s, Hkv, D], v [s, Hkv, Dv] are the local rows in the order of `metadata`. With `sink` [Hq], every
    row also attends to a key of value 0 with its head's score. All ranks of `group` (None: a single one) must call.
    Every round with documents on several ranks takes an all-to-all of K and V in forward, another in backward, and one
    of gradients. Differentiable once; saves q, k, v, out and the log-sum-exps, none of them a view of a larger tensor.

    Raises ValueError if rows or dtypes do not fit. Source: WLB-LLM (OSDI'25), section 5.
    """
    _check(q, k, v, metadata.num_rows, metadata, options)
    return _ContextParallelAttention.apply(q, k, v, sink, metadata, group, options)


def attention_to_keys(
    q: Tensor, kv: Tensor, metadata: ShardMetadata, options: AttentionOptions, sink: Tensor | None = None
) -> Tensor:
    """Return attention of local queries to keys that are all here, [s, Hq, Dv].

    q [s, Hq, D] are the local rows; kv is K [P, Hkv, D] and V [P, Hkv, Dv], `side_by_side`, of the rows of
    `exchange_rows`. Saves kv itself, so that its storage may be freed and computed again. Raises ValueError as above,
    and for a plan of several rounds.
    """
    k, v = keys_and_values(kv, q.shape[-1])
    _check(q, k, v, only_part(metadata).gather.shape[0], metadata, options)
    return _ContextParallelAttention.apply(q, kv, None, sink, metadata, None, options)


def send_ahead(node: Any) -> None:
    """Prefetch the first K and V of backward while earlier work computes.

    `node` is `out.grad_fn` of `context_parallel_attention`. All ranks of its group must call in the same order.
    """
    node.begun = _begin_backward(node)


class _ContextParallelAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        sink: Tensor | None,
        metadata: ShardMetadata,
        group: dist.ProcessGroup | None,
        options: AttentionOptions,
    ) -> Tensor:
        """Without v, k holds K and V of all keys, `side_by_side`."""
        q, kv, arrived = owned(q), k if v is None else side_by_side(k, v), v is None
        out = q.new_empty((*q.shape[:2], keys_and_values(kv, q.shape[-1])[1].shape[-1]))
        rounds = _rounds(q, k, metadata, arrived)
        arriving = _arriving(kv, rounds, group)
        lse: list[Tensor] = []
        merged: dict[int, Tensor] = {}
        kept: list[Tensor] = []
        for round in rounds:
            part = round.part
            kept.append(next(arriving))
            into = None if part.causal else merged.get(part.of[0])
            lse += attend(q[round.q], kept[-1], out[round.q], part, options, into)
            if part.of[1] == OWN and part.calls:
                merged[part.of[0]] = lse[-1]
            if not (options.save_gathered and part.sent):
                kept.pop()
        if sink is not None:
            for (round, call), sums in zip(_own_calls(rounds), lse, strict=True):
                score = sink[round.q[1], None].to(sums.dtype)
                out[round.q][call.rows] *= torch.sigmoid(sums - score).T[:, :, None].to(out.dtype)
                torch.logaddexp(sums, score, out=sums)
        ctx.save_for_backward(q, kv, out, sink, *lse, *kept)
        ctx.setup, ctx.begun = (group, options, rounds, arrived), None
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        group, options, rounds, arrived = ctx.setup
        (q, kv, out, sink, *lses), order, arriving = ctx.begun or _begin_backward(ctx)
        ctx.begun = None
        # A gradient may have any strides: the gradient of a plain sum has 0.
        dout = dout if dout.stride(-1) == 1 else dout.contiguous()
        dq, dsink = torch.empty_like(q), None
        if sink is not None and ctx.needs_input_grad[3]:
            dsink = _sink_gradient(sink, rounds, dout, out, lses)
        if len(rounds) == 1 and rounds[0].part.keys_are_rows:
            dkv = attend_backward(dout, q, kv, out, lses, dq, rounds[0].part, options).to(kv.dtype)
            of_keys = (dkv, None) if arrived else keys_and_values(dkv, q.shape[-1])
            return dq, *of_keys, dsink, None, None, None
        dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in keys_and_values(kv, q.shape[-1]))
        lse: dict[int, list[Tensor]] = {}
        for i, round in enumerate(rounds):
            number, keys = round.part.of
            if round.part.causal:
                lse[i] = [lses.pop(0) for _ in round.part.calls]
            else:
                own = next(j for j, other in enumerate(rounds) if other.part.of == (number, OWN))
                lse[i] = [lse[own][0][:, call.rows].contiguous() for call in round.part.calls]
            if keys == OWN:
                dq[round.q].zero_()
        sums: dict[tuple[int, int], Sum] = {}
        for round in rounds:
            sums.setdefault(round.rows_and_heads, Sum(dk[round.k], dv[round.k])).left += 1
        leaving: list[Leaving] = []
        exchanged = sum(bool(round.part.sent) for round in rounds)
        beside = of_gradients(group) if group is not None and exchanged > 2 else group
        for i in order:
            round = rounds[i]
            local = dout[round.q], q[round.q]
            leaving.append(
                Leaving(
                    # No variables: they would keep these through the next round.
                    attend_backward(*local, next(arriving), out[round.q], lse[i], dq[round.q], round.part, options),
                    sums[round.rows_and_heads],
                    round.part,
                    beside,
                    None if options.gradients_in_fp32 else kv.dtype,
                )
            )
            if len(leaving) > 1:
                leaving.pop(0).arrive()
        leaving.pop().arrive()
        return dq, dk, dv, dsink, None, None, None


class _Begun(NamedTuple):
    """A backward whose first K and V are on their way."""

    saved: list[Any]
    """q, kv, out, the sink or None, and the log-sum-exps of `_own_calls`."""
    order: list[int]
    """Rounds in the order in which backward runs them."""
    arriving: Iterator[Tensor]


def _begin_backward(ctx: Any) -> _Begun:
    group, _, rounds, _ = ctx.setup
    q, kv, out, sink, *rest = ctx.saved_tensors
    calls = len(_own_calls(rounds))
    # Rounds without an exchange go last, to overlap the last gradients that leave.
    order = sorted(range(len(rounds)), key=lambda i: not rounds[i].part.sent)
    arriving = _arriving(kv, [rounds[i] for i in order], group, kept=rest[calls:])
    return _Begun([q, kv, out, sink, *rest[:calls]], order, arriving)


def _sink_gradient(sink: Tensor, rounds: list["_Round"], dout: Tensor, out: Tensor, lses: list[Tensor]) -> Tensor:
    """Return the gradient of `sink` [Hq]; out and log-sum-exps include the sink."""
    gradient = torch.zeros_like(sink, dtype=torch.promote_types(sink.dtype, torch.float32))
    for (round, call), lse in zip(_own_calls(rounds), lses, strict=True):
        share = torch.exp(sink[round.q[1], None] - lse)
        products = dout[round.q][call.rows] * out[round.q][call.rows]
        gradient[round.q[1]] -= (share * products.sum(-1, dtype=lse.dtype).T).sum(1)
    return gradient.to(sink.dtype)


def attend(
    q: Tensor, kv: Tensor, out: Tensor, part: Part, options: AttentionOptions, merged: Tensor | None = None
) -> list[Tensor]:
    """Write attention of q [n, Hq, D] to the P keys kv of a part to out.

    kv is `side_by_side`, out [n, Hq, Dv]. Returns one log-sum-exp [Hq, rows] per call; with `merged` [Hq, n], the
    log-sum-exps of out so far, adds these keys to both instead.
    """
    lse, (k, v) = [], keys_and_values(kv, q.shape[-1])
    for call, args in options.calls(part, q.shape[-1]):
        values, sums = options.backend.forward(q[call.rows], k, v, args)
        if merged is None:
            out[call.rows] = values
            lse.append(sums)
        else:
            before = merged[:, call.rows]
            share = torch.sigmoid(sums - before).T.to(out.dtype)
            out[call.rows].lerp_(values, share[:, :, None])
            merged[:, call.rows] = torch.logaddexp(before, sums)
    return lse


def attend_backward(
    dout: Tensor,
    q: Tensor,
    kv: Tensor,
    out: Tensor,
    lse: list[Tensor],
    dq: Tensor,
    part: Part,
    options: AttentionOptions,
) -> Tensor:
    """Write dq [n, Hq, D] of `attend`; return this rank's dK and dV, like kv.

    They are in fp32 (fp64 for fp64) if calls or ranks are summed, else in the dtype of kv. For a document in parts, out
    and lse cover all parts, and dq is added to.
    """
    summed = len(part.calls) > 1 or part.sent or part.of[1] is not None
    dtype = torch.promote_types(kv.dtype, torch.float32) if summed else kv.dtype
    dkv = torch.empty_like(kv, dtype=dtype, memory_format=torch.contiguous_format)
    k, v = keys_and_values(kv, q.shape[-1])
    for i, ((call, args), sums) in enumerate(zip(options.calls(part, q.shape[-1]), lse, strict=True)):
        local = dout[call.rows], q[call.rows], k, v, out[call.rows], sums
        gradient = options.backend.backward(*local, dkv, args._replace(adds_up=i > 0))
        if part.of[1] is None:
            dq[call.rows] = gradient
        else:
            dq[call.rows] += gradient
    return dkv


class _Round(NamedTuple):
    """A round: its index into q, out, dq and lse, its index into k and v, its part."""

    q: tuple[slice, slice]
    k: tuple[slice, slice]
    part: Part

    @property
    def rows_and_heads(self) -> tuple[int, int]:
        """Key that the parts of a document share."""
        return self.part.of[0], self.k[1].start


def _rounds(q: Tensor, k: Tensor, metadata: ShardMetadata, arrived: bool = False) -> list[_Round]:
    """Return the rounds of q [s, Hq, D] and k; `arrived`: k has all keys."""
    if arrived:
        part = replace(only_part(metadata), sent=(), received=(), keys_are_rows=True)
        return [_Round((part.rows, slice(None)), (slice(None), slice(None)), part)]
    parts, per_key = {part.of: part for part in metadata.parts}, q.shape[1] // k.shape[1]
    rounds = []
    for number, heads, keys in metadata.rounds:
        part, (first, stop) = parts[number, keys], heads or (0, k.shape[1])
        query_heads = slice(first * per_key, stop * per_key)
        rounds.append(_Round((part.rows, query_heads), (part.rows, slice(first, stop)), part))
    return rounds


def _own_calls(rounds: list[_Round]) -> list[tuple[_Round, Call]]:
    """Return the causal calls; each keeps a log-sum-exp."""
    return [(round, call) for round in rounds if round.part.causal for call in round.part.calls]


def _arriving(
    kv: Tensor, rounds: list[_Round], group: dist.ProcessGroup | None, kept: list[Tensor] | None = None
) -> Iterator[Tensor]:
    """Yield K and V of P rows, round by round, each sent one round ahead, the first at once.

    With `kept`, the keys of rounds with an exchange, nothing is sent.
    """
    of_round = (kv[round.k[0], ..., round.k[1], :] for round in rounds)
    if kept:
        pairs = zip(rounds, of_round, strict=True)
        return (kept.pop(0) if round.part.sent else finish(own, None, round.part) for round, own in pairs)
    starts = (begin(own, round.part, group) for round, own in zip(rounds, of_round, strict=True))
    return _ahead(rounds, starts, [next(starts)])


def _ahead(
    rounds: list[_Round],
    starts: Iterator[tuple[Tensor, dist.Work | None]],
    under_way: list[tuple[Tensor, dist.Work | None]],
) -> Iterator[Tensor]:
    for round in rounds:
        under_way += islice(starts, 1)
        yield finish(*under_way.pop(0), round.part)


def _check(q: Tensor, k: Tensor, v: Tensor, keys: int, metadata: ShardMetadata, options: AttentionOptions) -> None:
    """Raise ValueError unless rows and dtypes are those of the metadata and the backend."""
    if (q.shape[0], k.shape[0]) != (metadata.num_rows, keys):
        raise ValueError(
            f"q has {q.shape[0]} and k has {k.shape[0]} rows, but the shard of context-parallel rank "
            f"{metadata.cp_rank} has {metadata.num_rows} and {keys}; pass the metadata of the same micro-batch and rank"
        )
    backend = options.backend
    if not q.dtype == k.dtype == v.dtype or q.dtype not in backend.dtypes:
        raise ValueError(
            f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype}, but attention backend {backend.name!r} runs one of "
            f"{', '.join(map(str, backend.dtypes))} for all three; cast them, or choose another backend"
        )
