"""What an attention backend is."""

from typing import Protocol

import torch
from torch import Tensor

from megatron_wlb.runtime.metadata import Colour


class Backend(Protocol):
    """Attention of the queries of one colour to the keys of the whole micro-batch, as plain functions.

    Shapes: sq query rows of the colour, P keys of the micro-batch in packed order, Hq query heads, a multiple of the
    Hkv key heads, head size D. Query head h reads key head h // (Hq / Hkv); K and V are never expanded to Hq heads
    over all P rows. Every tensor but `lse` has stride 1 in D and may be strided otherwise.

    With `window` a query sees, besides itself, only as many of the keys before it (window_size_left of FlashAttention);
    None: all of its document. `scale` is positive.
    """

    name: str
    device_types: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, colour: Colour, scale: float, window: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """q [sq, Hq, D], k and v [P, Hkv, D] -> out [sq, Hq, D] and lse [Hq, sq], contiguous.

        lse is the natural logarithm of the sum of exp(scale * q k^T), fp32 (fp64 for fp64 inputs). Raises ValueError
        for a head size that the backend cannot run.
        """
        ...

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        colour: Colour,
        scale: float,
        dk: Tensor,
        dv: Tensor,
        window: int | None = None,
    ) -> Tensor:
        """dq [sq, Hq, D] in the dtype of q; the colour's dK and dV are added into dk and dv [P, Hkv, D].

        The accumulators are fp32 (fp64 for fp64 inputs), so that colours are summed in fp32, and a backend that works
        document by document adds slices without a buffer of P rows for each.
        """
        ...
