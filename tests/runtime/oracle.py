"""Attention of a micro-batch from its document lengths alone, and all ranks of a shard plan in one process.

Shapes: P rows in packed order, Hq query heads, Hkv key heads, head size D, Dv of values.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from megatron_wlb.hardware.profile import KernelModel
from megatron_wlb.runtime.attention import AttentionOptions, attend, attend_backward
from megatron_wlb.runtime.backends import keys_and_values, side_by_side
from megatron_wlb.runtime.metadata import ShardMetadata
from megatron_wlb.sharding import segments
from megatron_wlb.sharding.routing import OWN
from megatron_wlb.sharding.volume import Held
from megatron_wlb.types import Round, ShardPlan
from tests.reference.chunks import per_document, per_sequence
from tests.reference.hybrid import hybrid
from tests.reference.rounds import regrouped

TOLERANCE = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def _hybrid(lengths: np.ndarray, cp: int) -> ShardPlan:
    """Documents on one rank, several or all, in tiles of 4."""
    return hybrid(lengths, cp, 1 / 4, KernelModel(tile_rows=4, launch=0.0, tile=1.0, query_tile=0.0))


def _in_rounds(lengths: np.ndarray, cp: int) -> ShardPlan:
    """Hybrid, documents that are whole by themselves, and the others in two sets."""
    plan = _hybrid(lengths, cp)
    shared = Held(plan).is_shared
    return regrouped(plan, np.where(shared, 1 + shared.cumsum() % min(2, shared.sum() or 1), 0))


def in_parts(lengths: np.ndarray, cp: int) -> ShardPlan:
    """Hybrid, with shared documents in three sets, two of which are computed in parts: own keys, others in two shares.

    Shares are so small that some queries see no key of one.
    """
    plan = _hybrid(lengths, cp)
    (shared,) = np.nonzero(Held(plan).is_shared)
    sets, rounds = np.zeros(len(lengths), np.int64), []
    sets[shared] = 1 + np.arange(len(shared)) % 3
    for number in range(1, 1 + min(3, len(shared))):
        rounds += [Round(number, keys=keys) for keys in ((OWN, (0, 0.1), (0.1, 1)) if number < 3 else (None,))]
    return regrouped(plan, sets, rounds)


SHARDINGS: dict[str, Callable[[np.ndarray, int], ShardPlan]] = {
    "per-sequence": per_sequence,
    "per-document": per_document,
    "hybrid": _hybrid,
    "in rounds": _in_rounds,
}


def inputs(
    num_rows: int, heads: tuple[int, int], head_size: int | tuple[int, int], dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """Random q, k, v, dout for (Hq, Hkv) heads, the same in every process."""
    generator = torch.Generator().manual_seed(num_rows)
    size, value_size = (head_size, head_size) if isinstance(head_size, int) else head_size
    shapes = ((heads[0], size), (heads[1], size), (heads[1], value_size), (heads[0], value_size))
    return tuple(torch.randn(num_rows, *shape, generator=generator).to(dtype) for shape in shapes)


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
    """float64 out, dq, dk, dv, and of a `sink` [Hq] its gradient: one block-diagonal causal mask, gradients by
    autograd."""
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    row = torch.arange(len(document))
    visible = ((document[:, None] == document[None, :]) & (row[:, None] >= row[None, :])).to(q.device)
    if window is not None:
        visible &= (row[:, None] - row[None, :] <= window).to(q.device)
    keys, values = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, keys) * scale
    scores, sinks = scores.masked_fill(~visible, float("-inf")), ()
    if sink is not None:
        sinks = (sink.detach().double().requires_grad_(),)
        scores = torch.cat((scores, sinks[0][:, None, None].expand(-1, len(q), 1)), dim=-1)
        values = torch.cat((values, torch.zeros_like(values[:1])))
    out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
    return out.detach(), *torch.autograd.grad(out, (q, k, v, *sinks), dout.double())


def local_rows(plan: ShardPlan, cp_rank: int) -> Tensor:
    """Packed rows that a rank holds, int64 [s]."""
    return torch.from_numpy(segments.rows(plan.lengths, plan.shards[cp_rank]))


def all_ranks(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, plan: ShardPlan, options: AttentionOptions
) -> tuple[Tensor, ...]:
    """out, dq, dk, dv in packed order, computed shard by shard; collectives are replaced by cat and sum."""
    ranks = range(len(plan.shards))
    rows = [local_rows(plan, rank).to(q.device) for rank in ranks]
    metadata = [ShardMetadata.build(plan, rank, options.backend.encode).to(q.device) for rank in ranks]
    kv = side_by_side(k, v)
    out, dq, dkv = torch.empty_like(dout), torch.zeros_like(q), torch.zeros_like(kv, dtype=_summed(k.dtype))
    keys, lse, merged = {}, {}, [{} for _ in ranks]
    rounds = list(enumerate(zip(*(m.parts for m in metadata), strict=True)))
    for i, parts in rounds:
        held = [r[part.rows] for r, part in zip(rows, parts, strict=True)]
        arrived = _exchanged([kv[r][p.sent_rows] for r, p in zip(held, parts, strict=True)], [p.sent for p in parts])
        for rank, (r, part, others) in enumerate(zip(held, parts, arrived, strict=True)):
            keys[i, rank] = torch.cat((others, kv[r][part.own_rows]))[part.gather]
            local = out[r]
            into = None if part.causal else merged[rank].get(part.of[0])
            lse[i, rank] = attend(q[r], keys[i, rank], local, part, options, into)
            out[r] = local
            if part.of[1] == OWN and part.calls:
                (merged[rank][part.of[0]],) = lse[i, rank]
    for i, parts in rounds:
        held, back = [r[part.rows] for r, part in zip(rows, parts, strict=True)], []
        for rank, (r, part) in enumerate(zip(held, parts, strict=True)):
            sums = lse[i, rank]
            if not part.causal:
                sums = [merged[rank][part.of[0]][:, call.rows].contiguous() for call in part.calls]
            local = dq[r]
            share = attend_backward(dout[r], q[r], keys[i, rank], out[r], sums, local, part, options)
            dq[r] = local
            dkv[r[part.own_rows]] += share[part.own_keys]
            leaving = share[part.arrived_keys]
            back.append(leaving if options.gradients_in_fp32 else leaving.to(k.dtype).to(leaving.dtype))
        for r, part, others in zip(held, parts, _exchanged(back, [p.received for p in parts]), strict=True):
            if part.sent:
                dkv.index_add_(0, r[part.sent_rows], others)
    return out, dq, *keys_and_values(dkv.to(k.dtype), k.shape[-1])


def _summed(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _exchanged(given: list[Tensor], sizes: list[tuple[int, ...]]) -> list[Tensor]:
    """What arrives at every rank where rank r gives its `given` in parts of `sizes[r]`; () is nothing to anybody."""
    parts = [x.split(list(size)) if size else [x] * len(given) for x, size in zip(given, sizes, strict=True)]
    return [torch.cat([of[rank] for of in parts]) for rank in range(len(given))]


def relative_error(got: Tensor, want: Tensor) -> float:
    """Of norms; a zero counts as one of size 1."""
    return ((got.double() - want).norm() / (want.norm() + want.numel() ** 0.5)).item()


def assert_close(got: tuple[Tensor, ...], want: tuple[Tensor, ...], tolerance: float) -> None:
    """Each of out, perhaps log-sum-exps, dq, dk, dv within `tolerance` of float64."""
    assert [x.shape for x in got] == [y.shape for y in want]
    errors = [relative_error(x, y) for x, y in zip(got, want, strict=True)]
    assert all(error <= tolerance for error in errors), errors  # NaN is none
