"""GPU backends on the packages flash-attn 2 and FlashAttention-3, one varlen call per colour."""

from typing import Any

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from megatron_wlb.runtime.backends.aten import max_queries
from megatron_wlb.runtime.backends.checks import check_arguments, check_head_size, import_for, schema_parameters
from megatron_wlb.runtime.metadata import Colour

_HALF = (torch.float16, torch.bfloat16)


class FlashAttnBackend:
    """flash-attn 2.8: `torch.ops.flash_attn._flash_attn_varlen_forward` and `_backward`.

    Causal, aligned to the bottom right of every entry. Bitwise reproducible under
    `torch.use_deterministic_algorithms(True)`. Raises ValueError where the package is missing, is older (backward of
    2.7 addresses in 32 bits what it sums dQ in, which overflows with many entries), or takes other arguments.
    """

    name = "flash_attn"
    device_types: tuple[str, ...] = ("cuda",)
    dtypes: tuple[torch.dtype, ...] = _HALF

    def __init__(self) -> None:
        version = import_for(self.name, "flash_attn", "flash-attn 2").__version__
        if TorchVersion(version) < "2.8":
            raise ValueError(
                f"attention backend {self.name!r} found flash-attn {version}, whose gradients are wrong where a "
                "micro-batch has many documents; install 2.8 or newer, or choose another backend"
            )
        self._forward = _operator(self.name, "flash_attn", "_flash_attn_varlen_forward", "flash-attn 2.8")
        self._backward = _operator(self.name, "flash_attn", "_flash_attn_varlen_backward", "flash-attn 2.8")

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, colour: Colour, scale: float, window: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """See `Backend.forward`."""
        check_head_size(self.name, q)
        arguments = _call(colour, scale, window) | {"dropout_p": 0.0, "causal": True, "softcap": 0.0}
        out, lse, *_ = self._forward(q=q, k=k, v=v, alibi_slopes=None, return_softmax=False, **arguments)
        return out, lse

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
        """See `Backend.backward`."""
        arguments = _call(colour, scale, window) | {"dropout_p": 0.0, "causal": True, "softcap": 0.0}
        gradients = _gradients(q, k, v)
        self._backward(
            dout=dout, q=q, k=k, v=v, out=out, softmax_lse=lse, alibi_slopes=None, **gradients, **arguments, **_mode()
        )
        return _add(gradients, dk, dv)


class FlashAttn3Backend:
    """FlashAttention-3, package `flash_attn_interface`: `torch.ops.flash_attn_3.fwd` and `bwd`. Compute capability 9.0.

    As `FlashAttnBackend`, but deterministic gradients are refused for head sizes over 192. Torch runs the same kernels
    in the `aten` backend after `torch.nn.attention.activate_flash_attention_impl("FA3")`; this one switches nothing for
    the rest of the process.
    """

    name = "flash_attn_3"
    device_types: tuple[str, ...] = ("cuda",)
    dtypes: tuple[torch.dtype, ...] = _HALF

    def __init__(self) -> None:
        import_for(self.name, "flash_attn_interface", "FlashAttention-3 (flash_attn_interface)")
        self._forward = _operator(self.name, "flash_attn_3", "fwd", "FlashAttention-3 with torch operators")
        self._backward = _operator(self.name, "flash_attn_3", "bwd", "FlashAttention-3 with torch operators")

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, colour: Colour, scale: float, window: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """See `Backend.forward`."""
        check_head_size(self.name, q)
        # num_splits: splitting the keys of few queries saves time in decoding only.
        out, lse, *_ = self._forward(q=q, k=k, v=v, is_causal=True, num_splits=1, **_call(colour, scale, window))
        return out, lse

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
        """See `Backend.backward`."""
        if (mode := _mode())["deterministic"] and q.shape[-1] > 192:
            raise ValueError(
                f"attention backend 'flash_attn_3' has no deterministic gradients for head size {q.shape[-1]}, only up "
                "to 192; switch torch.use_deterministic_algorithms off, or choose another backend"
            )
        gradients = _gradients(q, k, v)
        arguments = _call(colour, scale, window) | {"is_causal": True}
        self._backward(dout=dout, q=q, k=k, v=v, out=out, softmax_lse=lse, **gradients, **arguments, **mode)
        return _add(gradients, dk, dv)


# What is passed, by operator: checked against the operator before the first call.
_COMMON = (
    *("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "softmax_scale"),
    *("window_size_left", "window_size_right"),
)
_GRADIENTS = ("dout", "out", "softmax_lse", "dq", "dk", "dv", "deterministic")
_FLASH_ATTN = ("dropout_p", "causal", "softcap", "alibi_slopes")
_PASSED = {
    "_flash_attn_varlen_forward": (*_COMMON, *_FLASH_ATTN, "return_softmax"),
    "_flash_attn_varlen_backward": (*_COMMON, *_FLASH_ATTN, *_GRADIENTS),
    "fwd": (*_COMMON, "is_causal", "num_splits"),
    "bwd": (*_COMMON, "is_causal", *_GRADIENTS),
}


def _operator(backend: str, namespace: str, name: str, versions: str) -> Any:
    operator = getattr(getattr(torch.ops, namespace), name, None)
    if operator is None:
        raise ValueError(
            f"attention backend {backend!r} was written for {versions}; the installed one has no operator "
            f"{namespace}::{name}; install such a version"
        )
    check_arguments(backend, name, schema_parameters(operator.default._schema), _PASSED[name], versions)
    return operator.default


def _call(colour: Colour, scale: float, window: int | None) -> dict[str, Any]:
    return {
        "cu_seqlens_q": colour.cu_q,
        "cu_seqlens_k": colour.cu_k,
        "max_seqlen_q": max_queries(colour),
        "max_seqlen_k": colour.max_k,
        "softmax_scale": scale,
        "window_size_left": -1 if window is None else window,
        "window_size_right": 0,
    }


def _mode() -> dict[str, bool]:
    return {"deterministic": torch.are_deterministic_algorithms_enabled()}


def _gradients(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:
    """Contiguous dq, dk, dv; the kernels write all of them, of keys without queries too, up to max_seqlen_k."""
    return {"dq": q.new_empty(q.shape), "dk": k.new_empty(k.shape), "dv": v.new_empty(v.shape)}


def _add(gradients: dict[str, Tensor], dk: Tensor, dv: Tensor) -> Tensor:
    dk += gradients["dk"]
    dv += gradients["dv"]
    return gradients["dq"]
