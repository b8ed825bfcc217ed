"""Attention calls made by hand, and a backend that computes them in float64.

Shapes: sq query rows, P keys, Hq query heads, Hkv key heads, head size D, Dv of values.
"""

import numpy as np
import torch
from torch import Tensor

from megatron_wlb.runtime.backends.protocol import Backend, KernelArgs, keys_and_values, side_by_side, varlen
from megatron_wlb.runtime.reference import expected, kernel_args, scores_and_values
from tests.runtime.oracle import TOLERANCE, assert_close, inputs

# Entries (queries, keys) of a call; (0, n) is a gap of n keys.
CALLS = {
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
# As in shares of a document: queries that see all keys of their entry, some of them more than there are keys.
FULL = {"few keys": [(40, 7)], "one key": [(1, 1), (9, 1)], "many": [(3, 90), (0, 5), (130, 64), (0, 70), (64, 129)]}
ALL = {name: (entries, True) for name, entries in CALLS.items()}
ALL |= {f"full, {name}": (entries, False) for name, entries in FULL.items()}
"""Entries, and whether they are causal; without, there is no window."""


def check(
    backend: Backend,
    entries: list[tuple[int, int]],
    heads: tuple[int, int] = (4, 2),
    head_size: int | tuple[int, int] = 16,
    dtype: torch.dtype = torch.float32,
    *,
    scale: float = 0.3,
    window: int | None = None,
    causal: bool = True,
    device: str = "cpu",
    tolerance: float | None = None,
) -> tuple[Tensor, ...]:
    """out, lse, dq, dk, dv of a backend on random numbers, which are as in float64."""
    window = window if causal else None
    num_rows, num_keys = np.sum(entries, axis=0).tolist()
    given = inputs(num_rows, heads, head_size, dtype, num_keys=num_keys, device=device)
    got = run(backend, *given, kernel_args(backend, entries, device, scale, window)._replace(causal=causal))
    assert_close(got, expected(entries, *given, scale, window, causal), tolerance or TOLERANCE[dtype])
    return got


def run(backend: Backend, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, args: KernelArgs) -> tuple[Tensor, ...]:
    """out, lse, dq, dk, dv of a backend; dk and dv are added to ones, which are taken away again.

    In place of NaN they are the same, and the same rounded where they are given in the dtype of k.
    """
    out, lse = backend.forward(q, k, v, args)
    dtype = torch.promote_types(k.dtype, torch.float32)
    dkv = torch.ones_like(side_by_side(k, v), dtype=dtype)
    dq = backend.backward(dout, q, k, v, out, lse, dkv, args)
    for dtype in (dkv.dtype, k.dtype):
        alone = torch.full_like(dkv, float("nan"), dtype=dtype)
        backend.backward(dout, q, k, v, out, lse, alone, args._replace(adds_up=False))
        on_cpu = k.device.type == "cpu"
        eps = torch.finfo(dtype if on_cpu else k.dtype).eps  # a GPU's kernels may sum in another order
        torch.testing.assert_close(alone.double(), dkv.double() - 1, rtol=eps, atol=2e-6 if on_cpu else eps)
    assert out.dtype == dq.dtype == q.dtype and out.is_contiguous()
    assert all(x.untyped_storage().nbytes() == x.nbytes for x in (out, lse))
    return out, lse, dq, *keys_and_values(dkv - 1, k.shape[-1])


class Float64:
    """Attention in float64 from the varlen table alone, gradients by autograd."""

    name = "float64"
    device_types = ("cpu",)
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    any_value_size = True
    encode = staticmethod(varlen)

    def forward(self, q, k, v, args):
        given = scores_and_values(_entries(args), q.double(), k.double(), v.double(), *args[3:6])
        both = [(torch.einsum("hqk,khd->qhd", s.softmax(-1), values), s.logsumexp(-1)) for s, values in given]
        out, lse = torch.cat([out for out, _ in both]), torch.cat([lse for _, lse in both], dim=1)
        return out.to(q.dtype), lse.to(torch.promote_types(q.dtype, torch.float32))

    def backward(self, dout, q, k, v, out, lse, dkv, args):
        assert lse.is_contiguous() and all(x.stride(-1) == 1 for x in (dout, q, k, v, out, dkv))
        leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
        dout, queries = dout.double(), [queries for queries, _ in _entries(args)]
        delta = (dout * out.double()).sum(-1).T
        parts = dout.split(queries), lse.double().split(queries, dim=1), delta.split(queries, dim=1)
        with torch.enable_grad():
            given, total = scores_and_values(_entries(args), *leaves, *args[3:6]), 0.0
            for (scores, values), do, sums, d in zip(given, *parts, strict=True):
                p = (scores - sums[..., None]).exp()
                total += torch.einsum("hqk,khd,qhd->", p, values, do) - (p * d[..., None]).sum()
            dq, dk, dv = torch.autograd.grad(total, leaves)
        args.store(dkv, dk, dv)
        return dq.to(q.dtype)


def _entries(args: KernelArgs) -> list[list[int]]:
    queries, keys = args.table.diff()
    assert args.max_q >= int(queries.max()) and args.max_k >= int(keys.max())
    return args.table.diff().T.tolist()
