"""Attention backends: forward and backward of one colour, and the one place that chooses between them."""

from typing import Protocol

import torch
from torch import Tensor

from megatron_wlb.runtime.backends.aten import AtenBackend
from megatron_wlb.runtime.backends.cpu import CpuBackend
from megatron_wlb.runtime.backends.reference import ReferenceBackend
from megatron_wlb.runtime.metadata import Colour

__all__ = ["BACKENDS", "Backend", "get_backend"]


class Backend(Protocol):
    """Attention of the queries of one colour to the keys of the whole micro-batch, as plain functions.

    Shapes: sq query rows of the colour, P keys of the micro-batch in packed order, Hq query heads, a multiple of the
    Hkv key heads, head size D. Query head h reads key head h // (Hq / Hkv); K and V are never expanded to Hq heads
    over all P rows. Every tensor but `lse` has stride 1 in D and may be strided otherwise.
    """

    name: str
    device_types: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, colour: Colour, scale: float) -> tuple[Tensor, Tensor]:
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
    ) -> Tensor:
        """dq [sq, Hq, D] in the dtype of q; the colour's dK and dV are added into dk and dv [P, Hkv, D].

        The accumulators are fp32 (fp64 for fp64 inputs), so that colours are summed in fp32, and a backend that works
        document by document adds slices without a buffer of P rows for each.
        """
        ...


BACKENDS: dict[str, type[Backend]] = {"aten": AtenBackend, "cpu": CpuBackend, "reference": ReferenceBackend}


def get_backend(name: str, device: torch.device | str) -> Backend:
    """The backend `name`, or for "auto" the fastest one for `device`: aten on cuda, else cpu.

    Raises ValueError for an unknown name and for a backend that cannot run on `device` or with this torch.
    """
    device = torch.device(device)
    choices = ", ".join(("auto", *BACKENDS))
    if name == "auto":
        name = "aten" if device.type == "cuda" else "cpu"
    if name not in BACKENDS:
        raise ValueError(f"unknown attention backend {name!r}; choose one of {choices}")
    backend = BACKENDS[name]()
    if device.type not in backend.device_types:
        runs_on = " and ".join(backend.device_types)
        raise ValueError(
            f"attention backend {name!r} is not available on device {str(device)!r}: it runs on {runs_on}; "
            f"choose one of {choices}"
        )
    return backend
