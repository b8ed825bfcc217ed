"""CPU backend on torch's flash attention, one call per block of query rows.

Blocks take views of one mask. Half precision is computed in fp32, which is several times as fast on CPUs without such
units. Torch's kernel takes one head size: zeros pad the smaller of keys and values.

Shapes: n query rows of a block, Hq = Hkv * g heads, head size D; g query heads share a key head.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from megatron_wlb.runtime.backends.protocol import Encoded, KernelArgs, offsets

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

_ROWS = 256
"""Query rows of a block."""


class Block(NamedTuple):
    """Query rows [q_start, q_stop), the last rows of keys [k_start, k_stop)."""

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int


class CpuBackend:
    """Flash attention on the CPU, deterministic."""

    name = "cpu"
    device_types: tuple[str, ...] = ("cpu",)
    dtypes: tuple[torch.dtype, ...] = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    any_value_size = True

    @staticmethod
    def encode(key_begins: np.ndarray, segments: np.ndarray) -> Encoded:
        q, k_start = offsets(segments["stop"] - segments["start"]), key_begins[segments["document"]]
        rows = np.stack((q[:-1], q[1:], k_start, k_start + segments["stop"]), axis=1)
        return Encoded(rows.astype(np.int32))

    @staticmethod
    def spans(table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return table[:, 1].contiguous(), table[:, 2], table[:, 3]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, args: KernelArgs) -> tuple[Tensor, Tensor]:
        if q.shape[-1] != v.shape[-1]:
            wide_q, wide_k, wide_v = _of_one_size(q, k, v)
            out, lse = self.forward(wide_q, wide_k, wide_v, args)
            return out[..., : v.shape[-1]].contiguous(), lse
        g = q.shape[1] // k.shape[1]
        out = q.new_empty(q.shape)
        lse = q.new_empty((q.shape[1], q.shape[0]), dtype=torch.promote_types(q.dtype, torch.float32))
        qs, outs, lses = (_grouped(x, g) for x in (q.to(lse.dtype), out, lse.T))
        ks, vs = (_heads(x.to(lse.dtype)) for x in (k, v))
        for block, mask in _blocks(args, g, lse.dtype):
            keys = slice(block.k_start, block.k_stop)
            given = _rows(qs, block), ks[:, :, keys], vs[:, :, keys]
            for total, part in zip((outs, lses), _forward(*given, attn_mask=mask, scale=args.scale), strict=True):
                _store(total, block, part)
        return out, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dkv: Tensor, args: KernelArgs
    ) -> Tensor:
        if q.shape[-1] != v.shape[-1]:
            dout, wide_q, wide_k, wide_v, out = _of_one_size(dout, q, k, v, out)
            wide = torch.empty((len(k), 2, *wide_k.shape[1:]), dtype=lse.dtype)
            dq = self.backward(dout, wide_q, wide_k, wide_v, out, lse, wide, args._replace(adds_up=False))
            args.store(dkv, *(x[..., : y.shape[-1]] for x, y in zip(wide.unbind(1), (k, v), strict=True)))
            return dq[..., : q.shape[-1]]
        g = q.shape[1] // k.shape[1]
        dq = q.new_empty(q.shape)
        # Blocks of a document are summed as well, so in fp32.
        given, dkv = dkv, dkv.to(lse.dtype)
        if not args.adds_up:
            dkv.zero_()
        grouped = [_grouped(x.to(lse.dtype), g) for x in (dout, q, out, lse.T)]
        dqs, (ks, vs, *totals) = _grouped(dq, g), (_heads(x.to(lse.dtype)) for x in (k, v, *dkv.unbind(1)))
        for block, mask in _blocks(args, g, lse.dtype):
            keys = slice(block.k_start, block.k_stop)
            do, qs, o, m = (_rows(x, block) for x in grouped)
            saved = do, qs, ks[:, :, keys], vs[:, :, keys], o, m
            dq_rows, *dkv_rows = _backward(*saved, 0.0, False, attn_mask=mask, scale=args.scale)
            _store(dqs, block, dq_rows)
            for total, part in zip(totals, dkv_rows, strict=True):
                total[:, :, keys].add_(part)
        if given is not dkv:
            given.copy_(dkv)
        return dq


def _of_one_size(*tensors: Tensor) -> list[Tensor]:
    size = max(x.shape[-1] for x in tensors)
    return [F.pad(x, (0, size - x.shape[-1])) for x in tensors]


def _blocks(args: KernelArgs, g: int, dtype: torch.dtype) -> Iterator[tuple[Block, Tensor | None]]:
    """Yield the blocks of a call, each with its mask of scores, [n * g, keys] or None."""
    segments = list(map(Block._make, args.table.tolist()))
    if not args.causal:
        yield from ((segment, None) for segment in segments)
        return
    blocks = []
    for q_start, q_stop, k_start, k_stop in segments:
        for begin in range(q_start, q_stop, _ROWS):
            end = min(begin + _ROWS, q_stop)
            first = k_start if args.window is None else max(k_start, k_stop - q_stop + begin - args.window)
            blocks.append(Block(begin, end, first, k_stop - q_stop + end))
    rows = max((block.q_stop - block.q_start for block in blocks), default=0)
    prefix = max((b.k_stop - b.k_start - (b.q_stop - b.q_start) for b in blocks), default=0)
    back = torch.arange(rows)[:, None] + prefix - torch.arange(prefix + rows)
    hidden = back < 0 if args.window is None else (back < 0) | (back > args.window)
    mask = torch.zeros(back.shape, dtype=dtype).masked_fill_(hidden, -torch.inf).repeat_interleave(g, 0)
    for block in blocks:
        n, keys = block.q_stop - block.q_start, block.k_stop - block.k_start
        yield block, mask.narrow(0, 0, n * g).narrow(1, prefix + n - keys, keys)


def _grouped(x: Tensor, g: int) -> Tensor:
    """[rows, Hq, ...] -> [1, Hkv, rows, g, ...], a view."""
    return x.unflatten(1, (-1, g)).transpose(0, 1)[None]


def _rows(grouped: Tensor, block: Block) -> Tensor:
    """The query rows of a block, [1, Hkv, n * g, ...]; a view for g = 1."""
    return grouped[:, :, block.q_start : block.q_stop].flatten(2, 3)


def _store(grouped: Tensor, block: Block, values: Tensor) -> None:
    """Write values [1, Hkv, n * g, ...] to the query rows of a block."""
    n = block.q_stop - block.q_start
    grouped[:, :, block.q_start : block.q_stop] = values.unflatten(2, (n, -1))


def _heads(x: Tensor) -> Tensor:
    """[P, Hkv, D] -> [1, Hkv, P, D], a view."""
    return x.transpose(0, 1)[None]
