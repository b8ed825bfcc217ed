"""A backend on a small colour against the reference: does it work on this machine?"""

import numpy as np
import torch

from megatron_wlb.runtime.backends.protocol import Backend
from megatron_wlb.runtime.backends.reference import ReferenceBackend
from megatron_wlb.runtime.metadata import Colour, SegmentRows

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
        results = []
        for each in (backend, ReferenceBackend()):
            out, lse = each.forward(q, k, v, colour, 0.1, window=window)
            dk, dv = (torch.zeros(k.shape, device=device) for _ in range(2))
            dq = each.backward(dout, q, k, v, out, lse, colour, 0.1, dk, dv, window=window)
            results.append({"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv})
        got, want = results
        for name, x in want.items():
            error = ((got[name].double() - x.double()).norm() / x.double().norm()).item()
            if not error <= _TOLERANCE:  # NaN, too
                raise ValueError(
                    f"{name} with window {window} differs from the reference by {error:.1e}, where {_TOLERANCE:.1e} is "
                    "allowed; choose another backend"
                )


def colour_of(entries: list[tuple[int, int]], device: torch.device | str) -> Colour:
    """The colour with these entries (queries, keys) on `device`; those without queries are gaps of keys."""
    cu_q, cu_k = (np.concatenate(([0], np.cumsum(x))).astype(np.int32) for x in zip(*entries, strict=True))
    rows = zip(cu_q[:-1].tolist(), cu_q[1:].tolist(), cu_k[:-1].tolist(), cu_k[1:].tolist(), strict=True)
    return Colour(
        q_start=0,
        q_stop=int(cu_q[-1]),
        segments=tuple(SegmentRows(*row) for row in rows if row[1] > row[0]),
        max_q=max(queries for queries, _ in entries),
        max_k=max(keys for _, keys in entries),
        integers=torch.from_numpy(np.concatenate((cu_q, cu_k)).view(np.int64)).to(device),
        cu_start=0,
        entries=len(entries),
    )
