"""Causal attention of packed documents over context-parallel ranks.

Shapes: s local rows, Hq query heads (a multiple of the Hkv key heads), head size D, Dv of values. Attention runs in
rounds (`ShardPlan.rounds`), each a `Round` with n of the rows and P keys. While a round computes, K and V of the next
one arrive, and dK and dV of the last one leave. `kv` holds K and V `side_by_side`: one copy frees the QKV projection,
and one collective moves both.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_wlb.documents import Keys
from megatron_wlb.runtime.all_to_all import (
    GradientExchange,
    GradientSum,
    gradient_group,
    rounds_at_once,
    split_keys,
    start,
    wait,
)
from megatron_wlb.runtime.backends.protocol import Backend, KernelArgs, keys_and_values, owned, side_by_side
from megatron_wlb.runtime.metadata import Call, Round, ShardMetadata
from megatron_wlb.runtime.spans import span


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionOptions:
    """How attention runs; the same on all ranks."""

    backend: Backend
    scale: float | None = None
    """Factor of the scores; by default head size ** -0.5."""
    window: int | None = None
    """Keys that a query sees before its own; None: all of its document."""
    gradients_in_fp32: bool = True
    """Send dK and dV in fp32 (fp64 for fp64), else in the dtype of K and V; they are summed in fp32."""
    exchanged_before: bool = False
    """Rows that K and V are made of are exchanged before attention (`exchange_rows`), which is `attention_to_keys`."""

    def calls(self, round_: Round, head_size: int) -> list[tuple[Call, KernelArgs]]:
        """Return the calls of a round, each with its kernel arguments."""
        scale = head_size**-0.5 if self.scale is None else self.scale
        calls = zip(round_.calls, round_.tables, strict=True)
        return [(c, KernelArgs(table, c.max_q, c.max_k, scale, self.window, round_.causal)) for c, table in calls]


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
    and for a plan with documents in shares.
    """
    k, v = keys_and_values(kv, q.shape[-1])
    _check(q, k, v, sum(round_.gather.shape[0] for round_ in rounds_at_once(metadata)), metadata, options)
    return _ContextParallelAttention.apply(q, kv, None, sink, metadata, None, options)


def send_ahead(node: Any) -> None:
    """Prefetch the first K and V of backward while earlier work computes.

    `node` is `out.grad_fn` of `context_parallel_attention`. All ranks of its group must call in the same order. Saved
    tensors are read here, not again in backward, so a hook that offloads them loads them once.
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
        rounds = _arrived(metadata) if arrived else metadata.rounds_of(options.window)
        arriving = iter(split_keys(kv, rounds)) if arrived else _arriving(kv, rounds, group)
        lse = attend_in_rounds(q, arriving, out, rounds, options)
        if sink is not None:
            for (round_, call), sums in zip(_own_calls(rounds), lse, strict=True):
                score = sink[:, None].to(sums.dtype)
                out[round_.rows][call.rows] *= torch.sigmoid(sums - score).T[:, :, None].to(out.dtype)
                torch.logaddexp(sums, score, out=sums)
        ctx.save_for_backward(q, kv, out, sink, *lse)
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
        if arrived or (len(rounds) == 1 and rounds[0].keys_are_rows):
            each = zip(rounds, split_keys(kv, rounds), by_round(rounds, lses), strict=True)
            dkvs = [
                attend_backward(dout[p.rows], q[p.rows], keys, out[p.rows], sums, dq[p.rows], p, options).to(kv.dtype)
                for p, keys, sums in each
            ]
            dkv = dkvs[0] if len(dkvs) == 1 else torch.cat(dkvs)
            of_keys = (dkv, None) if arrived else keys_and_values(dkv, q.shape[-1])
            return dq, *of_keys, dsink, None, None, None
        dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in keys_and_values(kv, q.shape[-1]))
        lse = by_round(rounds, lses)
        sums: dict[slice, GradientSum] = {}
        for round_ in rounds:
            if round_.of is Keys.OWN:
                dq[round_.rows].zero_()
            sums.setdefault(round_.rows, GradientSum(dk[round_.rows], dv[round_.rows])).left += 1
        leaving: list[GradientExchange] = []
        exchanged = sum(bool(round_.sent) for round_ in rounds)
        beside = gradient_group(group) if group is not None and exchanged > 2 else group
        for i in order:
            round_ = rounds[i]
            rows = round_.rows
            leaving.append(
                GradientExchange(
                    # No variables: they would keep these through the next round.
                    attend_backward(dout[rows], q[rows], next(arriving), out[rows], lse[i], dq[rows], round_, options),
                    sums[rows],
                    round_,
                    beside,
                    None if options.gradients_in_fp32 else kv.dtype,
                )
            )
            if len(leaving) > 1:
                leaving.pop(0).arrive()
        leaving.pop().arrive()
        return dq, dk, dv, dsink, None, None, None


def _begin_backward(ctx: Any) -> tuple[list[Any], list[int], Iterator[Tensor]]:
    """Send the first K and V; return all that is saved, rounds in the order of backward, and their K and V.

    Saved are q, kv, out, the sink or None, and the log-sum-exps of `_own_calls`.
    """
    group, _, rounds, _ = ctx.setup
    saved = list(ctx.saved_tensors)
    # Rounds without an exchange go last, to overlap the last gradients that leave.
    order = sorted(range(len(rounds)), key=lambda i: not rounds[i].sent)
    return saved, order, _arriving(saved[1], [rounds[i] for i in order], group)


def _sink_gradient(sink: Tensor, rounds: Sequence[Round], dout: Tensor, out: Tensor, lses: list[Tensor]) -> Tensor:
    """Return the gradient of `sink` [Hq]; out and log-sum-exps include the sink."""
    gradient = torch.zeros_like(sink, dtype=torch.promote_types(sink.dtype, torch.float32))
    for (round_, call), lse in zip(_own_calls(rounds), lses, strict=True):
        share = torch.exp(sink[:, None] - lse)
        products = dout[round_.rows][call.rows] * out[round_.rows][call.rows]
        gradient -= (share * products.sum(-1, dtype=lse.dtype).T).sum(1)
    return gradient.to(sink.dtype)


def attend_in_rounds(
    q: Tensor, arriving: Iterator[Tensor], out: Tensor, rounds: Sequence[Round], options: AttentionOptions
) -> list[Tensor]:
    """Write attention of q [s, Hq, D] to out, round by round, to the K and V that arrive for each.

    Returns the log-sum-exps of the causal calls.
    """
    lse: list[Tensor] = []
    for round_ in rounds:
        # Shares come after own keys, whose log-sum-exps are the last ones.
        merged = None if round_.causal or not lse else lse[-1]
        lse += attend(q[round_.rows], next(arriving), out[round_.rows], round_, options, merged)
    return lse


def by_round(rounds: Sequence[Round], lses: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return the log-sum-exps of every round's calls, from the list of `attend_in_rounds`."""
    of_causal, found = iter(lses), list[list[Tensor]]()
    for round_ in rounds:
        if round_.causal:
            own = list(islice(of_causal, len(round_.calls)))
        found.append(own if round_.causal else [own[0][:, call.rows].contiguous() for call in round_.calls])
    return found


def attend(
    q: Tensor, kv: Tensor, out: Tensor, round_: Round, options: AttentionOptions, merged: Tensor | None = None
) -> list[Tensor]:
    """Write attention of q [n, Hq, D] to the P keys kv of a round to out.

    kv is `side_by_side`, out [n, Hq, Dv]. Returns one log-sum-exp [Hq, rows] per call; with `merged` [Hq, n], the
    log-sum-exps of out so far, adds these keys to both instead.
    """
    lse, (k, v) = [], keys_and_values(kv, q.shape[-1])
    with span("attention"):
        for call, args in options.calls(round_, q.shape[-1]):
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
    round_: Round,
    options: AttentionOptions,
) -> Tensor:
    """Write dq [n, Hq, D] of `attend`; return this rank's dK and dV, like kv.

    They are in fp32 (fp64 for fp64) if calls or ranks are summed, else in the dtype of kv. For documents in shares,
    out and lse cover all rounds, and dq is added to.
    """
    in_shares = round_.of is Keys.OWN or not round_.causal
    summed = len(round_.calls) > 1 or round_.sent or in_shares
    dtype = torch.promote_types(kv.dtype, torch.float32) if summed else kv.dtype
    dkv = torch.empty_like(kv, dtype=dtype, memory_format=torch.contiguous_format)
    k, v = keys_and_values(kv, q.shape[-1])
    with span("attention backward"):
        for i, ((call, args), sums) in enumerate(zip(options.calls(round_, q.shape[-1]), lse, strict=True)):
            local = dout[call.rows], q[call.rows], k, v, out[call.rows], sums
            gradient = options.backend.backward(*local, dkv, args._replace(adds_up=i > 0))
            if in_shares:
                dq[call.rows] += gradient
            else:
                dq[call.rows] = gradient
    return dkv


def _arrived(metadata: ShardMetadata) -> tuple[Round, ...]:
    """Return the rounds of metadata for keys that are all here."""
    return tuple(replace(round_, sent=(), received=()) for round_ in rounds_at_once(metadata))


def _own_calls(rounds: Sequence[Round]) -> list[tuple[Round, Call]]:
    """Return the causal calls; each keeps a log-sum-exp."""
    return [(round_, call) for round_ in rounds if round_.causal for call in round_.calls]


def _arriving(kv: Tensor, rounds: Sequence[Round], group: dist.ProcessGroup | None) -> Iterator[Tensor]:
    """Return K and V of P rows, round by round, each sent one round ahead, the first at once."""
    started = (start(kv[round_.rows], round_, group) for round_ in rounds)
    under_way = [next(started)]

    def arrived(round_: Round) -> Tensor:
        under_way.extend(islice(started, 1))
        return wait(*under_way.pop(0), round_)

    return map(arrived, rounds)


def _check(q: Tensor, k: Tensor, v: Tensor, keys: int, metadata: ShardMetadata, options: AttentionOptions) -> None:
    """Raise ValueError unless rows and dtypes fit the metadata and the backend."""
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
