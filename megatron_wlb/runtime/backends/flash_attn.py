"""GPU backends on the packages flash-attn 2 and FlashAttention-3, one operator per call."""

from typing import Any

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from megatron_wlb.runtime.backends.checks import (
    check_arguments,
    check_head_size,
    check_sum_of_dq,
    import_for,
    schema_parameters,
)
from megatron_wlb.runtime.backends.protocol import KernelArgs
from megatron_wlb.runtime.encoding import varlen

# Passed to every operator, and to backward ones besides: checked against the operator before the first call.
_COMMON = (
    *("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "softmax_scale"),
    *("window_size_left", "window_size_right"),
)
_GRADIENTS = ("dout", "out", "softmax_lse", "dq", "dk", "dv", "deterministic")


class _Operators:
    """Two operators of a package; they differ between packages in what is passed beside `_COMMON`."""

    name: str
    device_types: tuple[str, ...] = ("cuda",)
    dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)
    any_value_size = False
    encode = staticmethod(varlen)

    def __init__(
        self,
        namespace: str,
        names: tuple[str, str],
        versions: str,
        causal: str,
        always: dict[str, Any],
        in_forward: dict[str, Any],
    ) -> None:
        """`causal` is the name of the argument that says so."""
        given, self._causal, self._always, self._in_forward = (*_COMMON, causal, *always), causal, always, in_forward
        self._forward = _operator(self.name, namespace, names[0], (*given, *in_forward), versions)
        self._backward = _operator(self.name, namespace, names[1], (*given, *_GRADIENTS), versions)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, args: KernelArgs) -> tuple[Tensor, Tensor]:
        """See `Backend.forward`."""
        check_head_size(self.name, q, v)
        out, lse, *_ = self._forward(q=q, k=k, v=v, **self._arguments(args), **self._in_forward)
        return out, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dkv: Tensor, args: KernelArgs
    ) -> Tensor:
        """See `Backend.backward`."""
        # Contiguous; the kernels write all of them, of keys without queries too, up to max_seqlen_k.
        dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
        given = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "softmax_lse": lse, "dq": dq, "dk": dk, "dv": dv}
        deterministic = torch.are_deterministic_algorithms_enabled()
        self._backward(**given, **self._arguments(args), deterministic=deterministic)
        args.store(dkv, dk, dv)
        return dq

    def _arguments(self, args: KernelArgs) -> dict[str, Any]:
        cu_q, cu_k = args.table
        return {
            "cu_seqlens_q": cu_q,
            "cu_seqlens_k": cu_k,
            "max_seqlen_q": args.max_q,
            "max_seqlen_k": args.max_k,
            "softmax_scale": args.scale,
            "window_size_left": -1 if args.window is None else args.window,
            "window_size_right": 0 if args.causal else -1,
            self._causal: args.causal,
            **self._always,
        }


class FlashAttnBackend(_Operators):
    """flash-attn 2.8: `torch.ops.flash_attn._flash_attn_varlen_forward` and `_backward`.

    Causal, aligned to the bottom right of every entry. Bitwise reproducible under
    `torch.use_deterministic_algorithms(True)`. Raises ValueError where the package is missing, is older (backward of
    2.7 addresses in 32 bits what it sums dQ in, which overflows with many entries), or takes other arguments, and in
    backward where deterministic gradients take too much memory, see `check_sum_of_dq`.
    """

    name = "flash_attn"

    def __init__(self) -> None:
        # The module, because flash-attn-4 has a package flash_attn, too, with nothing but flash_attn.cute.
        import_for(self.name, "flash_attn.flash_attn_interface", "flash-attn 2")
        version = import_for(self.name, "flash_attn", "flash-attn 2").__version__
        if TorchVersion(version) < "2.8":
            raise ValueError(
                f"attention backend {self.name!r} found flash-attn {version}, whose gradients are wrong where a "
                "micro-batch has many documents; install 2.8 or newer, or choose another backend"
            )
        super().__init__(
            "flash_attn",
            ("_flash_attn_varlen_forward", "_flash_attn_varlen_backward"),
            "flash-attn 2.8",
            causal="causal",
            always={"dropout_p": 0.0, "softcap": 0.0, "alibi_slopes": None},
            in_forward={"return_softmax": False},
        )

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dkv: Tensor, args: KernelArgs
    ) -> Tensor:
        """See `Backend.backward`."""
        check_sum_of_dq(self.name, q, k, args.table.shape[1] - 1)
        return super().backward(dout, q, k, v, out, lse, dkv, args)


class FlashAttn3Backend(_Operators):
    """FlashAttention-3, package `flash_attn_interface`: `torch.ops.flash_attn_3.fwd` and `bwd`. Compute capability 9.0.

    As `FlashAttnBackend`, but value heads may have another size, and deterministic gradients are refused for head sizes
    over 192, and take no more memory. Raises ValueError on other GPUs, where it would end the process as it starts a
    kernel.
    """

    name = "flash_attn_3"
    any_value_size = True

    def __init__(self) -> None:
        import_for(self.name, "flash_attn_interface", "FlashAttention-3 (flash_attn_interface)")
        if torch.cuda.is_available() and (capability := torch.cuda.get_device_capability())[0] != 9:
            raise ValueError(
                f"attention backend {self.name!r} has kernels for compute capability 9.0, not "
                f"{'.'.join(map(str, capability))}; choose another backend"
            )
        super().__init__(
            "flash_attn_3",
            ("fwd", "bwd"),
            "FlashAttention-3 with torch operators",
            causal="is_causal",
            always={},
            in_forward={"num_splits": 1},  # splitting the keys of few queries saves time in decoding only
        )

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dkv: Tensor, args: KernelArgs
    ) -> Tensor:
        """See `Backend.backward`."""
        if torch.are_deterministic_algorithms_enabled() and q.shape[-1] > 192:
            raise ValueError(
                f"attention backend 'flash_attn_3' has no deterministic gradients for head size {q.shape[-1]}, only up "
                "to 192; switch torch.use_deterministic_algorithms off, or choose another backend"
            )
        return super().backward(dout, q, k, v, out, lse, dkv, args)


def _operator(backend: str, namespace: str, name: str, given: tuple[str, ...], versions: str) -> Any:
    operator = getattr(getattr(torch.ops, namespace), name, None)
    if operator is None:
        raise ValueError(
            f"attention backend {backend!r} was written for {versions}; the installed one has no operator "
            f"{namespace}::{name}; install such a version"
        )
    check_arguments(backend, name, schema_parameters(operator.default._schema), given, versions)
    return operator.default
