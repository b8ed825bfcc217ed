"""GPU backend on the package FlashAttention-3, one operator per call."""

from typing import Any

import torch
from torch import Tensor

from megatron_wlb.runtime.backends.checks import check_arguments, check_head_size, import_for, schema_parameters
from megatron_wlb.runtime.backends.protocol import KernelArgs
from megatron_wlb.runtime.encoding import varlen

_COMMON = (
    *("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "softmax_scale", "is_causal"),
    *("window_size_left", "window_size_right"),
)
_FORWARD = (*_COMMON, "num_splits")
_BACKWARD = (*_COMMON, "dout", "out", "softmax_lse", "dq", "dk", "dv", "deterministic")
_WRITTEN_FOR = "FlashAttention-3 with torch operators"
_DETERMINISTIC_HEAD_SIZE = 192
"""Largest with deterministic gradients."""


class FlashAttn3Backend:
    """`torch.ops.flash_attn_3.fwd` and `bwd`, for compute capability 9.0.

    They come with package `flash_attn_interface`. Causal masks are aligned to the bottom right of every entry. Bitwise
    reproducible under `torch.use_deterministic_algorithms(True)`, without more memory. Raises ValueError where the
    package is missing or takes other arguments, and on other GPUs, where launching a kernel would end the process.
    """

    name = "flash_attn_3"
    device_types: tuple[str, ...] = ("cuda",)
    dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)
    any_value_size = True
    encode = staticmethod(varlen)

    def __init__(self) -> None:
        import_for(self.name, "flash_attn_interface", "FlashAttention-3 (flash_attn_interface)")
        if torch.cuda.is_available() and (capability := torch.cuda.get_device_capability())[0] != 9:
            raise ValueError(
                f"attention backend {self.name!r} has kernels for compute capability 9.0, not "
                f"{'.'.join(map(str, capability))}; choose another backend"
            )
        self._forward, self._backward = _operator("fwd", _FORWARD), _operator("bwd", _BACKWARD)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, args: KernelArgs) -> tuple[Tensor, Tensor]:
        """See `Backend.forward`."""
        check_head_size(self.name, q, v)
        # Splitting the keys of few queries saves time in decoding only.
        out, lse, *_ = self._forward(q=q, k=k, v=v, num_splits=1, **_arguments(args))
        return out, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dkv: Tensor, args: KernelArgs
    ) -> Tensor:
        """See `Backend.backward`."""
        deterministic = torch.are_deterministic_algorithms_enabled()
        if deterministic and q.shape[-1] > _DETERMINISTIC_HEAD_SIZE:
            raise ValueError(
                f"attention backend {self.name!r} has no deterministic gradients for head size {q.shape[-1]}, only up "
                f"to {_DETERMINISTIC_HEAD_SIZE}; switch torch.use_deterministic_algorithms off, or choose another "
                "backend"
            )
        # Contiguous; the kernels write every row up to max_seqlen_k, also of keys without queries.
        dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
        given = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "softmax_lse": lse, "dq": dq, "dk": dk, "dv": dv}
        self._backward(**given, **_arguments(args), deterministic=deterministic)
        args.store(dkv, dk, dv)
        return dq


def _arguments(args: KernelArgs) -> dict[str, Any]:
    cu_q, cu_k = args.table
    return {
        "cu_seqlens_q": cu_q,
        "cu_seqlens_k": cu_k,
        "max_seqlen_q": args.max_q,
        "max_seqlen_k": args.max_k,
        "softmax_scale": args.scale,
        "is_causal": args.causal,
        "window_size_left": -1 if args.window is None else args.window,
        "window_size_right": 0 if args.causal else -1,
    }


def _operator(name: str, given: tuple[str, ...]) -> Any:
    operator = getattr(torch.ops.flash_attn_3, name, None)
    backend = FlashAttn3Backend.name
    if operator is None:
        raise ValueError(
            f"attention backend {backend!r} was written for {_WRITTEN_FOR}; the installed one has no operator "
            f"flash_attn_3::{name}; install such a version"
        )
    check_arguments(backend, name, schema_parameters(operator.default._schema), given, _WRITTEN_FOR)
    return operator.default
