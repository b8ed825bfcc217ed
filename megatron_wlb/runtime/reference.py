"""A small call that checks a backend against float64 on this machine."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from megatron_wlb.documents import SEGMENT
from megatron_wlb.runtime.backends.protocol import Backend, KernelArgs, keys_and_values, side_by_side
from megatron_wlb.sharding.routing import document_begins

# (queries, keys): gaps, causal squares, prefixes, lengths of 1, nothing divisible by a block; then squares alone.
_ENTRIES = [(0, 70), (130, 130), (0, 1), (67, 200), (1, 1), (0, 300), (2, 150), (1, 90), (0, 5)]
_SQUARES = [(0, 70), (130, 130), (1, 1), (0, 5), (67, 67)]
_WINDOWS = (None, 50)
_HEADS, _SCALE = (4, 2), 0.1
HEAD_SIZES = (64, 64)
"""Head sizes of keys and values that the trial uses by default."""
_TOLERANCE = 2**-6


def try_backend(backend: Backend, device: torch.device, head_sizes: tuple[int, int] = HEAD_SIZES) -> None:
    """Raise ValueError unless forward and backward in bf16 agree with float64.

    Errors of the backend pass through. Runs about 400 rows, the same on every machine.
    """
    for entries in (_ENTRIES, _SQUARES):
        _try(entries, backend, device, head_sizes)


def _try(entries: list[tuple[int, int]], backend: Backend, device: torch.device, head_sizes: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)

    def random(rows: int, heads: int, size: int) -> Tensor:
        return torch.randn(rows, heads, size, generator=generator).to(device, torch.bfloat16)

    num_queries, num_keys = (sum(lengths) for lengths in zip(*entries, strict=True))
    q, dout = (random(num_queries, _HEADS[0], size) for size in head_sizes)
    kv = side_by_side(*(random(num_keys, _HEADS[1], size) for size in head_sizes))
    k, v = keys_and_values(kv, head_sizes[0])
    for window in _WINDOWS:
        args = kernel_args(backend, entries, device, _SCALE, window)
        out, lse = backend.forward(q, k, v, args)
        dkv = torch.zeros(kv.shape, device=device)
        dq = backend.backward(dout, q, k, v, out, lse, dkv, args)
        results = out, lse, dq, *keys_and_values(dkv, head_sizes[0])
        wanted = expected(entries, q, k, v, dout, _SCALE, window)
        for name, got, want in zip(("out", "lse", "dq", "dk", "dv"), results, wanted, strict=True):
            error = ((got.double() - want).norm() / want.norm()).item()
            if not error <= _TOLERANCE:  # NaN, too
                raise ValueError(
                    f"{name} with window {window} differs from float64 by {error:.1e}, where {_TOLERANCE:.1e} is "
                    "allowed; choose another backend"
                )


def expected(
    entries: Sequence[tuple[int, int]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    scale: float,
    window: int | None = None,
    causal: bool = True,
    sink: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Return out, lse, dq, dk, dv, and of a `sink` [Hq] its gradient, in float64."""
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v, *(() if sink is None else (sink,)))]
    outs, lses = [], []
    with torch.enable_grad():
        for scores, values in scores_and_values(entries, leaves[0], leaves[1], leaves[2], scale, window, causal):
            if sink is not None:
                scores = torch.cat((scores, leaves[3][:, None, None].expand(-1, scores.shape[1], 1)), dim=-1)
                values = torch.cat((values, torch.zeros_like(values[:1])))
            outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), values))
            lses.append(scores.logsumexp(-1))
        out, lse = torch.cat(outs), torch.cat(lses, dim=1)
        return out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout.double())


def scores_and_values(
    entries: Sequence[tuple[int, int]], q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, causal: bool
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the scores [Hq, queries, keys] and values [keys, Hq, Dv] of every entry."""
    queries, keys = zip(*entries, strict=True)
    for q_part, k_part, v_part in zip(q.split(queries), k.split(keys), v.split(keys), strict=True):
        k_heads, v_heads = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k_part, v_part))
        scores = scale * torch.einsum("qhd,khd->hqk", q_part, k_heads)
        num_queries, num_keys = scores.shape[1:]
        back = torch.arange(num_keys - num_queries, num_keys)[:, None] - torch.arange(num_keys)[None, :]
        hidden = (back < 0) | (back > (num_keys if window is None else window))
        yield scores.masked_fill(hidden.to(q.device), float("-inf")) if causal else scores, v_heads


def kernel_args(
    backend: Backend,
    entries: list[tuple[int, int]],
    device: torch.device | str,
    scale: float,
    window: int | None = None,
) -> KernelArgs:
    """Return the arguments of a call with entries (queries, keys); 0 queries: a gap."""
    queries, keys = np.array(entries, np.int64).T
    segments = np.zeros(len(entries), SEGMENT)
    segments["document"], segments["start"], segments["stop"] = np.arange(len(entries)), keys - queries, keys
    table, max_q, max_k = backend.encode(document_begins(keys), segments[queries > 0])
    return KernelArgs(torch.from_numpy(table).to(device), max_q, max_k, scale, window)
