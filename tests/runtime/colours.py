"""Colours made by hand, and the attention of one in float64 from its segments alone.

Shapes: sq query rows, P keys, Hq query heads, Hkv key heads, head size D.
"""

import torch
from torch import Tensor

from megatron_wlb.runtime.metadata import Colour

# Entries (queries, keys) of a colour; (0, n) is a gap of n keys.
COLOURS = {
    "square": [(40, 40)],
    "prefix": [(24, 90)],
    "one row": [(1, 1)],
    "one row, many keys": [(1, 77)],
    "ones": [(1, 1)] * 9,
    "gaps": [(0, 5), (7, 30), (0, 1), (33, 33), (0, 70)],
    "many": [(3, 3), (0, 2), (1, 9), (17, 17), (64, 64), (0, 65), (65, 129), (2, 130)],
    "giant": [(0, 3), (1, 1), (150, 260), (0, 4), (2, 2)],
}
WINDOWS = [None, 0, 1, 20, 64, 300]
NAMES = ("out", "lse", "dq", "dk", "dv")


def tensors(colour: Colour, heads: tuple[int, int], head_size: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Random q, k, v, dout for (Hq, Hkv) heads; k and v interleaved, q and dout as views of wider ones, as in use."""
    generator = torch.Generator().manual_seed(head_size)
    num_queries, num_keys = colour.q_stop, int(colour.cu_k[-1])
    device = colour.integers.device
    kv = torch.randn(num_keys, 2, heads[1], head_size, generator=generator).to(device, dtype)
    wide = torch.randn(num_queries, 2 * heads[0] + 1, head_size, generator=generator).to(device, dtype)
    return wide[:, : heads[0]], *kv.unbind(1), wide[:, heads[0] : -1]


def run(backend, q, k, v, dout, call) -> tuple[Tensor, ...]:
    """out, lse, dq, dk, dv of a backend; dk and dv are added to ones, which are taken away again.

    In place of NaN they are the same, and the same rounded where they are given in the dtype of k.
    """
    out, lse = backend.forward(q, k, v, call)
    dtype = torch.promote_types(k.dtype, torch.float32)
    dkv = torch.ones((k.shape[0], 2, *k.shape[1:]), dtype=dtype, device=k.device)
    dq = backend.backward(dout, q, k, v, out, lse, dkv, call)
    for dtype in (dkv.dtype, k.dtype):
        alone = torch.full_like(dkv, float("nan"), dtype=dtype)
        backend.backward(dout, q, k, v, out, lse, alone, call._replace(adds_up=False))
        on_cpu = k.device.type == "cpu"
        eps = torch.finfo(dtype if on_cpu else k.dtype).eps  # a GPU's kernels may sum in another order
        torch.testing.assert_close(alone.double(), dkv.double() - 1, rtol=eps, atol=2e-6 if on_cpu else eps)
    assert out.dtype == dq.dtype == q.dtype and out.is_contiguous() and lse.is_contiguous()
    return out, lse, dq, *(dkv - 1).unbind(1)


def expected(q, k, v, dout, call) -> tuple[Tensor, ...]:
    """The same in float64, one segment after the other, gradients by autograd."""
    colour, scale, window, _ = call
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    outs, lses = [], []
    for rows in colour.segments:
        keys = slice(rows.k_start, rows.k_stop)
        k_heads, v_heads = (x[keys].repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        scores = scale * torch.einsum("qhd,khd->hqk", q[rows.q_start : rows.q_stop], k_heads)
        back = torch.arange(rows.k_split, rows.k_stop)[:, None] - torch.arange(rows.k_start, rows.k_stop)[None, :]
        hidden = (back < 0) | (back > (rows.k_stop if window is None else window))
        scores = scores.masked_fill(hidden.to(q.device), float("-inf"))
        outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v_heads))
        lses.append(scores.logsumexp(-1))
    out, lse = torch.cat(outs), torch.cat(lses, dim=1)
    return out.detach(), lse.detach(), *torch.autograd.grad(out, (q, k, v), dout.double())


def assert_close(got: tuple[Tensor, ...], want: tuple[Tensor, ...], tolerance: float) -> None:
    """Each of out, lse, dq, dk, dv within `tolerance` of float64, as norms; a zero counts as one of size 1."""
    for name, x, y in zip(NAMES, got, want, strict=True):
        assert x.shape == y.shape
        error = (x.double() - y).norm() / (y.norm() + y.numel() ** 0.5)
        assert error <= tolerance, f"{name}: relative error {error:.1e} > {tolerance:.1e}"
