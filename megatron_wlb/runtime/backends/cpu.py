"""CPU backend: per segment a causal square and an unmasked prefix of keys, merged by their log-sum-exps.

Query rows [start, stop) of a document see all of its keys [0, start) and, causally, [start, stop). Torch's CPU flash
attention runs each part and returns its log-sum-exp. Given the merged output and log-sum-exp, its backward returns each
part's share of the exact gradients, since it recomputes P = exp(scores - lse) and needs nothing else of the softmax.
Where a window hides keys, queries are worked off in blocks, each with the keys that one of them sees and a mask.

Shapes: n query rows of a segment, Hq = Hkv * g heads, head size D; g query heads share a key head.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_wlb.runtime.metadata import Colour, SegmentRows

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

_WINDOW_BLOCK = 256


class CpuBackend:
    """Flash attention on the CPU, one or two calls per segment; the same result in every run.

    With a window one call per 256 rows, of at most 256 + window keys each.
    """

    name = "cpu"
    device_types: tuple[str, ...] = ("cpu",)
    dtypes: tuple[torch.dtype, ...] = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, colour: Colour, scale: float, window: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """See `Backend.forward`."""
        g = q.shape[1] // k.shape[1]
        out = q.new_empty(q.shape)
        lse = q.new_empty((q.shape[1], q.shape[0]), dtype=torch.promote_types(q.dtype, torch.float32))
        for queries, keys, prefix, mask in _parts(colour, window, q.dtype):
            o, m = _forward(
                _by_group(q[queries], g),
                _per_group(k[keys], g),
                _per_group(v[keys], g),
                0.0,
                mask is None,
                attn_mask=mask,
                scale=scale,
            )
            o, m = _from_group(o), _from_group(m)
            if prefix is not None:
                o_prefix, m_prefix = _forward(
                    _by_row(q[queries], g), _heads(k[prefix]), _heads(v[prefix]), 0.0, False, scale=scale
                )
                o_prefix, m_prefix = _from_row(o_prefix, g), _from_row(m_prefix, g)
                o = torch.lerp(o.to(m.dtype), o_prefix.to(m.dtype), torch.sigmoid(m_prefix - m)[..., None])
                m = torch.logaddexp(m, m_prefix)
            out[queries], lse[:, queries] = o, m.T
        return out, lse

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        colour: Colour,
        scale: float,
        dk: Tensor,
        dv: Tensor,
        window: int | None = None,
    ) -> Tensor:
        """See `Backend.backward`."""
        g = q.shape[1] // k.shape[1]
        dq = q.new_empty(q.shape)
        for queries, keys, prefix, mask in _parts(colour, window, q.dtype):
            do, qs, o, m = dout[queries], q[queries], out[queries], lse[:, queries].T
            dq_part, dk_part, dv_part = _backward(
                _by_group(do, g),
                _by_group(qs, g),
                _per_group(k[keys], g),
                _per_group(v[keys], g),
                _by_group(o, g),
                _by_group(m, g),
                0.0,
                mask is None,
                attn_mask=mask,
                scale=scale,
            )
            dq_rows = _from_group(dq_part)
            dk[keys] += dk_part.sum(0, dtype=dk.dtype).transpose(0, 1)
            dv[keys] += dv_part.sum(0, dtype=dv.dtype).transpose(0, 1)
            if prefix is not None:
                do, qs, o, m = (_by_row(x, g) for x in (do, qs, o, m))
                dq_part, dk_part, dv_part = _backward(
                    do, qs, _heads(k[prefix]), _heads(v[prefix]), o, m, 0.0, False, scale=scale
                )
                dq_rows = dq_rows.to(dk.dtype) + _from_row(dq_part, g)
                dk[prefix] += dk_part[0].transpose(0, 1)
                dv[prefix] += dv_part[0].transpose(0, 1)
            dq[queries] = dq_rows
        return dq


def _parts(
    colour: Colour, window: int | None, dtype: torch.dtype
) -> Iterator[tuple[slice, slice, slice | None, Tensor | None]]:
    """Queries, keys that they see causally or by the mask, and keys that all of them see, of every call."""
    for rows in colour.segments:
        if window is not None and window < rows.k_stop - rows.k_start - 1:
            yield from _window_parts(rows, window, dtype)
        else:
            prefix = slice(rows.k_start, rows.k_split) if rows.k_split > rows.k_start else None
            yield slice(rows.q_start, rows.q_stop), slice(rows.k_split, rows.k_stop), prefix, None


def _window_parts(rows: SegmentRows, window: int, dtype: torch.dtype) -> Iterator[tuple[slice, slice, None, Tensor]]:
    for q_start in range(rows.q_start, rows.q_stop, _WINDOW_BLOCK):
        q_stop = min(q_start + _WINDOW_BLOCK, rows.q_stop)
        own, k_stop = (rows.k_split + row - rows.q_start for row in (q_start, q_stop))
        k_start = max(own - window, rows.k_start)
        back = torch.arange(own, k_stop)[:, None] - torch.arange(k_start, k_stop)[None, :]
        mask = torch.zeros(back.shape, dtype=dtype).masked_fill((back < 0) | (back > window), float("-inf"))
        yield slice(q_start, q_stop), slice(k_start, k_stop), None, mask


# The causal square needs one query row per key, so the heads of a group go to the batch dimension, where keys can be
# broadcast without a copy. The prefix has no mask, so there they become more query rows of the same key head.


def _by_group(x: Tensor, g: int) -> Tensor:
    """[n, Hq, ...] -> [g, Hkv, n, ...], a view."""
    return x.unflatten(1, (-1, g)).transpose(0, 2)


def _from_group(x: Tensor) -> Tensor:
    """[g, Hkv, n, ...] -> [n, Hq, ...]."""
    return x.transpose(0, 2).flatten(1, 2)


def _per_group(x: Tensor, g: int) -> Tensor:
    """[n, Hkv, D] -> [g, Hkv, n, D], the same for every g."""
    return x.transpose(0, 1).expand(g, -1, -1, -1)


def _by_row(x: Tensor, g: int) -> Tensor:
    """[n, Hq, ...] -> [1, Hkv, n * g, ...]."""
    return x.unflatten(1, (-1, g)).transpose(0, 1).flatten(1, 2)[None]


def _from_row(x: Tensor, g: int) -> Tensor:
    """[1, Hkv, n * g, ...] -> [n, Hq, ...]."""
    return x[0].unflatten(1, (-1, g)).transpose(0, 1).flatten(1, 2)


def _heads(x: Tensor) -> Tensor:
    """[n, Hkv, D] -> [1, Hkv, n, D], a view."""
    return x.transpose(0, 1)[None]
