"""GPU backends on FlashAttention: version 2, which torch ships, and the package of version 3."""

from typing import Any

import torch
from torch import Tensor

from megatron_wlb.runtime.backends.protocol import KernelArgs, check_head_size, import_for, varlen, varlen_spans

_DETERMINISTIC_HEAD_SIZE = 192
"""Largest head size for which version 3 has deterministic gradients."""


class AtenBackend:
    """`aten::_flash_attention_forward` and `_backward`, one operator per call.

    Bitwise reproducible under `torch.use_deterministic_algorithms(True)`: dQ is then summed in a workspace, the
    larger the fewer entries a call has. Replacing the operators by FlashAttention-3 for the whole process is not
    supported.
    """

    name = "aten"
    device_types: tuple[str, ...] = ("cuda",)
    dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)
    any_value_size = False
    encode = staticmethod(varlen)
    spans = staticmethod(varlen_spans)

    def __init__(self) -> None:
        self._forward = torch.ops.aten._flash_attention_forward.default
        self._backward = torch.ops.aten._flash_attention_backward.default

    def forward(self, q: Tensor, k: Tensor, v: Tensor, args: KernelArgs) -> tuple[Tensor, Tensor]:
        check_head_size(self.name, q, v)
        out, lse, _, _, _ = self._forward(query=q, key=k, value=v, return_debug_mask=False, **_arguments_of_2(args))
        return out, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dkv: Tensor, args: KernelArgs
    ) -> Tensor:
        # The random state of forward; the kernel does not read it without dropout.
        rng_state = torch.empty(2, dtype=torch.uint64, device=q.device)
        state = {"grad_out": dout, "out": out, "logsumexp": lse, "rng_state": rng_state, "unused": rng_state[0]}
        dq, dk, dv = self._backward(query=q, key=k, value=v, **state, **_arguments_of_2(args))
        args.store(dkv, dk, dv)
        return dq


def _arguments_of_2(args: KernelArgs) -> dict[str, Any]:
    cu_q, cu_k = args.table
    return {
        "cum_seq_q": cu_q,
        "cum_seq_k": cu_k,
        "max_q": args.max_q,
        "max_k": args.max_k,
        "dropout_p": 0.0,
        "is_causal": args.causal,
        "scale": args.scale,
        "window_size_left": args.window,
        "window_size_right": None if args.window is None else 0,
    }


class FlashAttn3Backend:
    """Operators of `flash_attn_interface`, for compute capability 9.0.

    Bitwise reproducible under `torch.use_deterministic_algorithms(True)`, without more memory. Raises ValueError if the
    package is missing, and on other GPUs, where launching a kernel would end the process.
    """

    name = "flash_attn_3"
    device_types: tuple[str, ...] = ("cuda",)
    dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)
    any_value_size = True
    encode = staticmethod(varlen)
    spans = staticmethod(varlen_spans)

    def __init__(self) -> None:
        import_for(self.name, "flash_attn_interface", "FlashAttention-3 (flash_attn_interface)")
        if torch.cuda.is_available() and (capability := torch.cuda.get_device_capability())[0] != 9:
            raise ValueError(
                f"attention backend {self.name!r} has kernels for compute capability 9.0, not "
                f"{'.'.join(map(str, capability))}; choose another backend"
            )
        operators = torch.ops.flash_attn_3
        self._forward, self._backward = operators.fwd.default, operators.bwd.default

    def forward(self, q: Tensor, k: Tensor, v: Tensor, args: KernelArgs) -> tuple[Tensor, Tensor]:
        check_head_size(self.name, q, v)
        # Splitting the keys of few queries saves time in decoding only.
        out, lse, *_ = self._forward(q=q, k=k, v=v, num_splits=1, **_arguments_of_3(args))
        return out, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dkv: Tensor, args: KernelArgs
    ) -> Tensor:
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
        self._backward(**given, **_arguments_of_3(args), deterministic=deterministic)
        args.store(dkv, dk, dv)
        return dq


def _arguments_of_3(args: KernelArgs) -> dict[str, Any]:
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
