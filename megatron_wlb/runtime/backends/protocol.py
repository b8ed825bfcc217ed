"""The interface of attention backends, and their shared parts.

A backend's `encode` makes a table of a call, once per micro-batch, maybe in a DataLoader's worker. It takes
`key_begins`, int64 [documents + 1], the offsets of the documents' keys among the keys of the rank (`Exchange`), and
`segments`, SEGMENT [n] of a call, n >= 1.
"""

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from megatron_wlb.sharding.routing import ranges


class Encoded(NamedTuple):
    """An attention call as a backend takes it."""

    table: np.ndarray
    """int32, contiguous; the backend defines its shape and meaning."""
    max_q: int = 0
    """Queries, and keys, of the longest entry."""
    max_k: int = 0


Encoding = Callable[[np.ndarray, np.ndarray], Encoded]
Spans = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]
"""Of a table: the query behind each entry's last, its first key, and the key behind its last, int32 [entries] each."""


def owned(x: Tensor) -> Tensor:
    """Return x, or a contiguous copy of a view, which would keep its base alive."""
    whole = x.is_contiguous() and x.untyped_storage().nbytes() == x.nbytes
    return x if whole else x.clone(memory_format=torch.contiguous_format)


def side_by_side(k: Tensor, v: Tensor) -> Tensor:
    """Return K and V in one tensor: [P, 2, Hkv, D], or [P, Hkv, D + Dv]."""
    return torch.stack((k, v), dim=1) if k.shape == v.shape else torch.cat((k, v), dim=-1)


def keys_and_values(kv: Tensor, head_size: int) -> tuple[Tensor, ...]:
    """Return K [P, Hkv, D = head_size] and V of `side_by_side`, as views."""
    return kv.unbind(1) if kv.dim() == 4 else kv.split((head_size, kv.shape[-1] - head_size), dim=-1)


class KernelArgs(NamedTuple):
    """Arguments of an attention call besides q, k and v."""

    table: Tensor
    """int32 from the backend's `encode`, on the device of q."""
    max_q: int
    max_k: int
    scale: float
    """Factor of the scores; positive."""
    window: int | None = None
    """Keys that a query sees before its own; None: all of its document."""
    causal: bool = True
    """Queries see keys up to their own position, counted from the end of an entry; else all, without a window."""
    adds_up: bool = True
    """Backward adds dK and dV to `dkv`; otherwise it overwrites all of `dkv`."""

    def store(self, dkv: Tensor, dk: Tensor, dv: Tensor) -> None:
        """Add or write dK [P, Hkv, D] and dV [P, Hkv, Dv] to dkv (`side_by_side`)."""
        for total, part in zip(keys_and_values(dkv, dk.shape[-1]), (dk, dv), strict=True):
            if self.adds_up:
                total.add_(part)
            else:
                total.copy_(part)


class Backend(Protocol):
    """Attention of one call's queries to all keys of the rank.

    Shapes: sq query rows of the call, P keys, Hq query heads, a multiple of the Hkv key heads, head size D of queries
    and keys, Dv of values. Query head h reads key head h // (Hq / Hkv). Every tensor but `lse` has stride 1 in its last
    dimension and any strides in the others; k and v may be views of one tensor (`side_by_side`).
    """

    name: str
    device_types: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    any_value_size: bool
    """Dv may differ from D."""

    @property
    def encode(self) -> Encoding:
        """The function that encodes a call for this backend."""
        ...

    @property
    def spans(self) -> Spans:
        """The function that reads a table of `encode`."""
        ...

    def forward(self, q: Tensor, k: Tensor, v: Tensor, args: KernelArgs) -> tuple[Tensor, Tensor]:
        """Return out [sq, Hq, Dv], contiguous, and lse [Hq, sq].

        q is [sq, Hq, D], k [P, Hkv, D], v [P, Hkv, Dv]. Neither result is a view of a larger tensor. lse is the natural
        logarithm of the sum of exp(scale * q k^T), fp32 (fp64 for fp64 inputs). Raises ValueError for a head size that
        the backend lacks.
        """
        ...

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dkv: Tensor, args: KernelArgs
    ) -> Tensor:
        """Return dq [sq, Hq, D] in the dtype of q; write dK and dV to dkv.

        dkv (`side_by_side`) is fp32 (fp64 for fp64) if it sums calls (`KernelArgs.adds_up`); otherwise it may be of k's
        dtype.
        """
        ...


_GAP_ROWS = 4096
"""Longest piece of a gap, unless an entry with queries is longer."""


def varlen(key_begins: np.ndarray, segments: np.ndarray) -> Encoded:
    """Return the table [cu_q, cu_k], [2, entries + 1], of a varlen call over all keys.

    Entry e attends query rows [cu_q[e], cu_q[e + 1]) to keys [cu_k[e], cu_k[e + 1]), causally, aligned to the bottom
    right. Entries without queries (gaps) skip keys that the call does not read, so no K/V is copied. Gaps count in
    max_k, since backward kernels write dK only up to max_k. They start max_k / 128 blocks per entry, so long gaps are
    cut.
    """
    begins = key_begins[segments["document"]]
    longest = max(_GAP_ROWS, int(segments["stop"].max()))
    # Interleave gap, entry, gap, entry, ..., gap; an empty gap comes in 0 pieces.
    cu_k = np.concatenate(([0], np.stack([begins, begins + segments["stop"]], axis=1).ravel(), key_begins[-1:]))
    q, k = np.zeros(2 * len(segments) + 1, np.int64), np.diff(cu_k)
    q[1::2] = segments["stop"] - segments["start"]
    pieces = -(-k // longest)
    q, k = np.repeat(q, pieces), np.repeat(k, pieces)
    piece = ranges(np.zeros_like(pieces), pieces)
    k = np.clip(k - piece * longest, 0, longest)
    # With max_q = 1 FlashAttention assumes decoding, and fails on gaps; max_q is an upper bound.
    return Encoded(offsets(np.stack((q, k))), max_q=max(2, int(q.max())), max_k=int(k.max()))


def varlen_spans(table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """See `Spans`, of the table of `varlen`."""
    return table[0, 1:], table[1, :-1], table[1, 1:]


def offsets(lengths: np.ndarray) -> np.ndarray:
    """Return offsets of entries, int32 [..., entries + 1], from int64 `lengths`."""
    bounds = np.zeros((*lengths.shape[:-1], lengths.shape[-1] + 1), np.int32)
    np.cumsum(lengths, axis=-1, out=bounds[..., 1:])
    return bounds


_MAX_HEAD_SIZE = 256


def import_for(backend: str, module: str, package: str) -> Any:
    """Return the imported `module`; raises ValueError if `package` does not load."""
    try:
        return importlib.import_module(module)
    except (ImportError, OSError) as error:  # OSError: a shared library is missing
        raise ValueError(
            f"attention backend {backend!r} needs {package}, which cannot be imported ({error}); install it, or choose "
            "another backend"
        ) from error


def check_head_size(backend: str, q: Tensor, v: Tensor) -> None:
    """Raise ValueError unless the kernels support the sizes D and Dv."""
    for size in (q.shape[-1], v.shape[-1]):
        if size % 8 or size > _MAX_HEAD_SIZE:
            raise ValueError(
                f"attention backend {backend!r} cannot run head size {size}: it must be a multiple of 8 and at most "
                f"{_MAX_HEAD_SIZE}; choose another kv_channels"
            )


def check_value_size(backend: Backend | type[Backend], head_sizes: tuple[int, int]) -> None:
    """Raise ValueError if the backend needs value heads of the size of key heads."""
    if len(set(head_sizes)) > 1 and not backend.any_value_size:
        raise ValueError(
            f"attention backend {backend.name!r} needs value heads of the size of key heads, {head_sizes[0]}, not "
            f"{head_sizes[1]}; choose flash_attn_3 or te, on GPUs of compute capability 9.0 or later"
        )
