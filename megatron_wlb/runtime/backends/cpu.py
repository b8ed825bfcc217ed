"""CPU backend on torch's flash attention, with one or two calls per segment.

Query rows [start, stop) of a document see all of its keys [0, start) and, causally, keys [start, stop). A short segment
is one call under a mask, a view of one mask that all segments of a call share. In a long segment the masked half of the
square would cost more than a second call. So one call computes the causal square, another one the prefix of keys that
all queries see, and the results are merged by their log-sum-exps. Given the merged output and log-sum-exp, backward
returns each part's share of the exact gradients, because it recomputes P = exp(scores - lse) and needs nothing else of
the softmax. Half precision is computed in fp32, since the kernel is several times slower in half precision on CPUs
without such units. With a window, queries run in masked blocks, each with the keys that its queries see. Torch's kernel
takes one head size: if values have another one, zeros pad the smaller of the two.

Shapes: n query rows of a call; Hq = Hkv * g heads, head size D; g query heads share a key head.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from megatron_wlb.runtime.backends.protocol import KernelArgs
from megatron_wlb.runtime.encoding import Encoded, offsets

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

_WINDOW_BLOCK = 256
_LONG = 256
"""Segments of at least so many rows run faster in two calls, measured with 8 heads of size 64."""


class SegmentRows(NamedTuple):
    """Query rows [q_start, q_stop), the last rows of keys [k_start, k_stop)."""

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int

    @property
    def k_split(self) -> int:
        """The first key that is also a query; all queries see the keys before it."""
        return self.k_stop - (self.q_stop - self.q_start)


class CpuBackend:
    """Flash attention on the CPU, one or two calls per segment, deterministic.

    With a window it makes one call per 256 rows, of at most 256 + window keys each.
    """

    name = "cpu"
    device_types: tuple[str, ...] = ("cpu",)
    dtypes: tuple[torch.dtype, ...] = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    any_value_size = True

    @staticmethod
    def encode(key_begins: np.ndarray, segments: np.ndarray) -> Encoded:
        """The table [n, 4] of `SegmentRows`."""
        q, k_start = offsets(segments["stop"] - segments["start"]), key_begins[segments["document"]]
        rows = np.stack((q[:-1], q[1:], k_start, k_start + segments["stop"]), axis=1)
        return Encoded(rows.astype(np.int32))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, args: KernelArgs) -> tuple[Tensor, Tensor]:
        """See `Backend.forward`."""
        if q.shape[-1] != v.shape[-1]:
            wide_q, wide_k, wide_v = _of_one_size(q, k, v)
            out, lse = self.forward(wide_q, wide_k, wide_v, args)
            return out[..., : v.shape[-1]].contiguous(), lse
        g = q.shape[1] // k.shape[1]
        out = q.new_empty(q.shape)
        lse = q.new_empty((q.shape[1], q.shape[0]), dtype=torch.promote_types(q.dtype, torch.float32))
        masked, long = _parts(args)
        mask = _Mask(masked, args, g, lse.dtype)
        q = q.to(lse.dtype)
        (qs, os, ms), (ks, vs) = (_grouped(x, g) for x in (q, out, lse.T)), (_heads(x) for x in (k, v))

        def attend(part: SegmentRows, keys: slice, hidden: Tensor | None = None) -> tuple[Tensor, Tensor]:
            k_part, v_part = (x[:, :, keys].to(q.dtype) for x in (ks, vs))
            return _forward(_rows(qs, part), k_part, v_part, attn_mask=hidden, scale=args.scale)

        for part in masked:
            n, (o, m) = part.q_stop - part.q_start, attend(part, slice(part.k_start, part.k_stop), mask(part))
            os.narrow(2, part.q_start, n).copy_(o.unflatten(2, (n, g)))
            ms.narrow(2, part.q_start, n).copy_(m.unflatten(2, (n, g)))
        for part in long:
            queries, keys, prefix = _slices(part)
            k_part, v_part = (_per_group(x[keys].to(q.dtype), g) for x in (k, v))
            o, m = _forward(_by_group(q[queries], g), k_part, v_part, 0.0, True, scale=args.scale)
            o, m = _from_group(o), _from_group(m)
            if prefix is not None:
                o_prefix, m_prefix = (_from_rows(x, g) for x in attend(part, prefix))
                o = torch.lerp(o, o_prefix, torch.sigmoid(m_prefix - m)[..., None])
                m = torch.logaddexp(m, m_prefix)
            out[queries], lse[:, queries] = o, m.T
        return out, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dkv: Tensor, args: KernelArgs
    ) -> Tensor:
        """See `Backend.backward`."""
        if q.shape[-1] != v.shape[-1]:
            dout, wide_q, wide_k, wide_v, out = _of_one_size(dout, q, k, v, out)
            wide = torch.empty((len(k), 2, *wide_k.shape[1:]), dtype=lse.dtype)
            dq = self.backward(dout, wide_q, wide_k, wide_v, out, lse, wide, args._replace(adds_up=False))
            args.store(dkv, *(x[..., : y.shape[-1]] for x, y in zip(wide.unbind(1), (k, v), strict=True)))
            return dq[..., : q.shape[-1]]
        g = q.shape[1] // k.shape[1]
        dq = q.new_empty(q.shape)
        masked, long = _parts(args)
        mask = _Mask(masked, args, g, lse.dtype)
        dout, q, out = (x.to(lse.dtype) for x in (dout, q, out))
        # Parts of a document are summed as well, so in fp32.
        given, dkv = dkv, dkv if dkv.dtype == lse.dtype else dkv.to(lse.dtype)
        if not args.adds_up:
            dkv.zero_()
        grouped, dqs = [_grouped(x, g) for x in (dout, q, out, lse.T)], _grouped(dq, g)
        ks, vs, dks, dvs = (_heads(x) for x in (k, v, *dkv.unbind(1)))

        def gradients(part: SegmentRows, keys: slice, hidden: Tensor | None = None) -> Tensor:
            """dQ of a part; adds its dK and dV to the totals."""
            do, qs, o, m = (_rows(x, part) for x in grouped)
            k_part, v_part = (x[:, :, keys].to(q.dtype) for x in (ks, vs))
            dq_part, *dkv_part = _backward(do, qs, k_part, v_part, o, m, 0.0, False, attn_mask=hidden, scale=args.scale)
            for total, gradient in zip((dks, dvs), dkv_part, strict=True):
                total[:, :, keys].add_(gradient)
            return dq_part

        for part in masked:
            n, dq_part = part.q_stop - part.q_start, gradients(part, slice(part.k_start, part.k_stop), mask(part))
            dqs.narrow(2, part.q_start, n).copy_(dq_part.unflatten(2, (n, g)))
        for part in long:
            queries, keys, prefix = _slices(part)
            do, qs, o, m = (_by_group(x[queries], g) for x in (dout, q, out, lse.T))
            k_part, v_part = (_per_group(x[keys].to(q.dtype), g) for x in (k, v))
            dq_part, dk_part, dv_part = _backward(do, qs, k_part, v_part, o, m, 0.0, True, scale=args.scale)
            dks[0, :, keys] += dk_part.sum(0)
            dvs[0, :, keys] += dv_part.sum(0)
            dq_rows = _from_group(dq_part)
            dq[queries] = dq_rows if prefix is None else dq_rows + _from_rows(gradients(part, prefix), g)
        if given is not dkv:
            given.copy_(dkv)
        return dq


def _of_one_size(*tensors: Tensor) -> list[Tensor]:
    """The tensors [..., any], padded with zeros to the largest last dimension."""
    size = max(x.shape[-1] for x in tensors)
    return [F.pad(x, (0, size - x.shape[-1])) for x in tensors]


def _parts(args: KernelArgs) -> tuple[list[SegmentRows], list[SegmentRows]]:
    """Parts that are one call each, masked if causal, and long segments."""
    masked: list[SegmentRows] = []
    long: list[SegmentRows] = []
    for rows in map(SegmentRows._make, args.table.tolist()):
        if not args.causal:
            masked.append(rows)
        elif args.window is not None and args.window < rows.k_stop - rows.k_start - 1:
            masked += _window_parts(rows, args.window)
        else:
            (long if rows.q_stop - rows.q_start >= _LONG else masked).append(rows)
    return masked, long


def _window_parts(rows: SegmentRows, window: int) -> list[SegmentRows]:
    parts = []
    for q_start in range(rows.q_start, rows.q_stop, _WINDOW_BLOCK):
        q_stop = min(q_start + _WINDOW_BLOCK, rows.q_stop)
        own, k_stop = (rows.k_split + row - rows.q_start for row in (q_start, q_stop))
        parts.append(SegmentRows(q_start, q_stop, max(own - window, rows.k_start), k_stop))
    return parts


class _Mask:
    """The mask of scores [n * g, keys]: -inf after a query and before its window."""

    def __init__(self, parts: list[SegmentRows], args: KernelArgs, g: int, dtype: torch.dtype) -> None:
        self._causal, window = args.causal, args.window
        if not args.causal:
            return
        rows = max((part.q_stop - part.q_start for part in parts), default=0)
        self._prefix, self._g = max((part.k_split - part.k_start for part in parts), default=0), g
        back = torch.arange(rows)[:, None] + self._prefix - torch.arange(self._prefix + rows)
        hidden = back < 0 if window is None else (back < 0) | (back > window)
        self._all = torch.zeros(back.shape, dtype=dtype).masked_fill_(hidden, -torch.inf).repeat_interleave(g, 0)

    def __call__(self, part: SegmentRows) -> Tensor | None:
        if not self._causal:
            return None
        n, keys = part.q_stop - part.q_start, part.k_stop - part.k_start
        return self._all.narrow(0, 0, n * self._g).narrow(1, self._prefix + n - keys, keys)


def _slices(rows: SegmentRows) -> tuple[slice, slice, slice | None]:
    """Queries of a long segment, keys seen causally, and keys seen by all queries."""
    prefix = slice(rows.k_start, rows.k_split) if rows.k_split > rows.k_start else None
    return slice(rows.q_start, rows.q_stop), slice(rows.k_split, rows.k_stop), prefix


# The causal square needs one query row per key, so the heads of a group become the batch dimension, where keys are
# broadcast without a copy. Elsewhere the heads of a group become more query rows of their key head.


def _by_group(x: Tensor, g: int) -> Tensor:
    """[n, Hq, ...] -> [g, Hkv, n, ...], a view."""
    return x.unflatten(1, (-1, g)).transpose(0, 2)


def _from_group(x: Tensor) -> Tensor:
    """[g, Hkv, n, ...] -> [n, Hq, ...]."""
    return x.transpose(0, 2).flatten(1, 2)


def _per_group(x: Tensor, g: int) -> Tensor:
    """[n, Hkv, D] -> [g, Hkv, n, D], broadcast over g."""
    return x.transpose(0, 1).expand(g, -1, -1, -1)


def _grouped(x: Tensor, g: int) -> Tensor:
    """[rows, Hq, ...] -> [1, Hkv, rows, g, ...], a view."""
    return x.unflatten(1, (-1, g)).transpose(0, 1)[None]


def _rows(grouped: Tensor, part: SegmentRows) -> Tensor:
    """The query rows of a part, [1, Hkv, n * g, ...]; a view for g = 1."""
    return grouped.narrow(2, part.q_start, part.q_stop - part.q_start).flatten(2, 3)


def _from_rows(x: Tensor, g: int) -> Tensor:
    """[1, Hkv, n * g, ...] -> [n, Hq, ...]."""
    return x[0].unflatten(1, (-1, g)).transpose(0, 1).flatten(1, 2)


def _heads(x: Tensor) -> Tensor:
    """[n, Hkv, D] -> [1, Hkv, n, D], a view."""
    return x.transpose(0, 1)[None]
