"""A backend on a small colour against the reference: does it work on this machine?"""

import numpy as np
import torch

from megatron_wlb.plan.sharding.segments import VarlenCall
from megatron_wlb.runtime.backends.protocol import Backend, Call
from megatron_wlb.runtime.backends.reference import ReferenceBackend
from megatron_wlb.runtime.metadata import Colour

# (queries, keys): gaps, causal squares, prefixes, lengths of 1, nothing divisible by a block.
_ENTRIES = [(0, 70), (130, 130), (0, 1), (67, 200), (1, 1), (0, 300), (2, 150), (1, 90), (0, 5)]
_WINDOWS = (None, 50)
_HEADS, _HEAD_SIZE = (4, 2), 64
_TOLERANCE = 2**-6


def try_backend(backend: Backend, device: torch.device) -> None:
    """Run forward and backward in bf16. Raises ValueError where they differ from float64, else whatever they raise.

    About 200 rows; no random numbers but its own, and the same on every machine.
    """
    colour = colour_of(_ENTRIES, device)
    generator = torch.Generator().manual_seed(0)

    def random(rows: int, heads: int) -> torch.Tensor:
        return torch.randn(rows, heads, _HEAD_SIZE, generator=generator).to(device, torch.bfloat16)

    num_queries, num_keys = (sum(lengths) for lengths in zip(*_ENTRIES, strict=True))
    q, dout = random(num_queries, _HEADS[0]), random(num_queries, _HEADS[0])
    k, v = random(num_keys, 2 * _HEADS[1]).chunk(2, dim=1)
    for window in _WINDOWS:
        call = Call(colour, 0.1, window)
        results = []
        for each in (backend, ReferenceBackend()):
            out, lse = each.forward(q, k, v, call)
            dkv = torch.zeros((num_keys, 2, *k.shape[1:]), device=device)
            dq = each.backward(dout, q, k, v, out, lse, dkv, call)
            results.append((out, lse, dq, *dkv.unbind(1)))
        for name, got, want in zip(("out", "lse", "dq", "dk", "dv"), *results, strict=True):
            error = ((got.double() - want.double()).norm() / want.double().norm()).item()
            if not error <= _TOLERANCE:  # NaN, too
                raise ValueError(
                    f"{name} with window {window} differs from the reference by {error:.1e}, where {_TOLERANCE:.1e} is "
                    "allowed; choose another backend"
                )


def colour_of(entries: list[tuple[int, int]], device: torch.device | str) -> Colour:
    """The colour with these entries (queries, keys) on `device`; those without queries are gaps of keys."""
    cu_q, cu_k = (np.concatenate(([0], np.cumsum(x))).astype(np.int32) for x in zip(*entries, strict=True))
    max_q, max_k = (max(lengths) for lengths in zip(*entries, strict=True))
    integers = torch.from_numpy(np.concatenate((cu_q, cu_k)).view(np.int64)).to(device)
    return Colour.of(VarlenCall(cu_q=cu_q, cu_k=cu_k, max_q=max_q, max_k=max_k), 0, integers, 0)
