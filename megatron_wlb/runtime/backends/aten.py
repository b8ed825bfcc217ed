"""GPU backend on the varlen FlashAttention-2 that torch ships."""

from typing import Any

import torch
from torch import Tensor

from megatron_wlb.runtime.backends.checks import check_head_size
from megatron_wlb.runtime.backends.protocol import KernelArgs
from megatron_wlb.runtime.encoding import varlen


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

    def __init__(self) -> None:
        self._forward = torch.ops.aten._flash_attention_forward.default
        self._backward = torch.ops.aten._flash_attention_backward.default

    def forward(self, q: Tensor, k: Tensor, v: Tensor, args: KernelArgs) -> tuple[Tensor, Tensor]:
        """See `Backend.forward`."""
        check_head_size(self.name, q, v)
        out, lse, _, _, _ = self._forward(query=q, key=k, value=v, return_debug_mask=False, **_arguments(args))
        return out, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dkv: Tensor, args: KernelArgs
    ) -> Tensor:
        """See `Backend.backward`."""
        # The random state of forward; the kernel does not read it without dropout.
        rng_state = torch.empty(2, dtype=torch.uint64, device=q.device)
        state = {"grad_out": dout, "out": out, "logsumexp": lse, "rng_state": rng_state, "unused": rng_state[0]}
        dq, dk, dv = self._backward(query=q, key=k, value=v, **state, **_arguments(args))
        args.store(dkv, dk, dv)
        return dq


def _arguments(args: KernelArgs) -> dict[str, Any]:
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
