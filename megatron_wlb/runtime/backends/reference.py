"""Reference backend: dense masked attention in float64, the oracle of tests.

Shapes: sq query rows, P keys, Hq = Hkv * g heads, head size D, Dv of values.
"""

import torch
from torch import Tensor

from megatron_wlb.runtime.backends.protocol import KernelArgs
from megatron_wlb.runtime.encoding import varlen


class ReferenceBackend:
    """Dense attention from the varlen encoding alone, with O(Hq * sq * P) memory."""

    name = "reference"
    device_types: tuple[str, ...] = ("cpu", "cuda")
    dtypes: tuple[torch.dtype, ...] = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    any_value_size = True
    encode = staticmethod(varlen)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, args: KernelArgs) -> tuple[Tensor, Tensor]:
        """See `Backend.forward`."""
        scores = _scores(q, k, args)
        out = torch.einsum("hgqk,khd->qhgd", scores.softmax(-1), v.double())
        lse = scores.logsumexp(-1).flatten(0, 1)
        out, lse = out.flatten(1, 2).to(q.dtype), lse.to(torch.promote_types(q.dtype, torch.float32))
        return out.contiguous(), lse.contiguous()

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dkv: Tensor, args: KernelArgs
    ) -> Tensor:
        """See `Backend.backward`."""
        p = (_scores(q, k, args) - lse.double().unflatten(0, (k.shape[1], -1))[..., None]).exp()
        do = _grouped(dout, k.shape[1])
        dp = torch.einsum("qhgd,khd->hgqk", do, v.double())
        delta = (do * _grouped(out, k.shape[1])).sum(-1).permute(1, 2, 0)
        ds = args.scale * p * (dp - delta[..., None])
        dk, dv = torch.einsum("hgqk,qhgd->khd", ds, _grouped(q, k.shape[1])), torch.einsum("hgqk,qhgd->khd", p, do)
        args.store(dkv, dk, dv)
        return torch.einsum("hgqk,khd->qhgd", ds, k.double()).flatten(1, 2).to(q.dtype)


def _grouped(x: Tensor, num_kv_heads: int) -> Tensor:
    """[sq, Hq, D] -> float64 [sq, Hkv, g, D]."""
    return x.double().unflatten(1, (num_kv_heads, -1))


def _scores(q: Tensor, k: Tensor, args: KernelArgs) -> Tensor:
    """Scores, float64 [Hkv, g, sq, P]; -inf where a query does not see a key."""
    scores = args.scale * torch.einsum("qhgd,khd->hgqk", _grouped(q, k.shape[1]), k.double())
    return scores.masked_fill(~_visible(args, q.shape[0], k.shape[0]), float("-inf"))


def _visible(args: KernelArgs, num_queries: int, num_keys: int) -> Tensor:
    """Keys that each query sees, by entry, causality and window: bool [sq, P]."""
    (entry_q, to_end_q), (entry_k, to_end_k) = map(_locate, args.table, (num_queries, num_keys))
    same = entry_q[:, None] == entry_k[None, :]
    if not args.causal:
        return same
    back = to_end_k[None, :] - to_end_q[:, None]
    near = back >= 0 if args.window is None else (back >= 0) & (back <= args.window)
    return same & near


def _locate(cu: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Entry of every row and its distance to the entry's end, int64 [num_rows]."""
    rows = torch.arange(num_rows, device=cu.device)
    entry = torch.searchsorted(cu[1:].long(), rows, right=True)
    return entry, cu[1:].long()[entry] - rows
