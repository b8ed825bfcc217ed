"""The interface of attention backends."""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megatron_wlb.runtime.encoding import Encoding


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
    """Keys that a query sees before its own (FlashAttention's window_size_left); None: all of its document."""
    causal: bool = True
    """Queries see keys up to their own position, counted from the end of an entry; otherwise all, without a window."""
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
        """The function that encodes a call for this backend, see `encoding`."""
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
