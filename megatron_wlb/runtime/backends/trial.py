"""A small call that checks a backend against the reference on this machine."""

import numpy as np
import torch

from megatron_wlb.runtime.backends.protocol import Backend, KernelArgs, keys_and_values, side_by_side
from megatron_wlb.runtime.backends.reference import ReferenceBackend
from megatron_wlb.sharding.segments import document_begins
from megatron_wlb.types import SEGMENT

# (queries, keys): gaps, causal squares, prefixes, lengths of 1, nothing divisible by a block.
_ENTRIES = [(0, 70), (130, 130), (0, 1), (67, 200), (1, 1), (0, 300), (2, 150), (1, 90), (0, 5)]
_WINDOWS = (None, 50)
_HEADS = (4, 2)
HEAD_SIZES = (64, 64)
"""Head sizes of keys and values that the trial uses by default."""
_TOLERANCE = 2**-6


def try_backend(backend: Backend, device: torch.device, head_sizes: tuple[int, int] = HEAD_SIZES) -> None:
    """Raise ValueError unless forward and backward in bf16 agree with float64.

    Heads have `head_sizes`. Errors of the backend pass through. Runs about 200 rows, the same on every machine.
    """
    generator = torch.Generator().manual_seed(0)

    def random(rows: int, heads: int, size: int) -> torch.Tensor:
        return torch.randn(rows, heads, size, generator=generator).to(device, torch.bfloat16)

    num_queries, num_keys = (sum(lengths) for lengths in zip(*_ENTRIES, strict=True))
    q, dout = (random(num_queries, _HEADS[0], size) for size in head_sizes)
    kv = side_by_side(*(random(num_keys, _HEADS[1], size) for size in head_sizes))
    k, v = keys_and_values(kv, head_sizes[0])
    for window in _WINDOWS:
        results = []
        for each in (backend, ReferenceBackend()):
            args = kernel_args(each, _ENTRIES, device, 0.1, window)
            out, lse = each.forward(q, k, v, args)
            dkv = torch.zeros(kv.shape, device=device)
            dq = each.backward(dout, q, k, v, out, lse, dkv, args)
            results.append((out, lse, dq, *keys_and_values(dkv, head_sizes[0])))
        for name, got, want in zip(("out", "lse", "dq", "dk", "dv"), *results, strict=True):
            error = ((got.double() - want.double()).norm() / want.double().norm()).item()
            if not error <= _TOLERANCE:  # NaN, too
                raise ValueError(
                    f"{name} with window {window} differs from the reference by {error:.1e}, where {_TOLERANCE:.1e} is "
                    "allowed; choose another backend"
                )


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
