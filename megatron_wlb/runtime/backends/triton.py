"""GPU backend that needs nothing but torch and triton: one kernel forward and two backward."""

import torch
from torch import Tensor

from megatron_wlb.runtime.backends.checks import check_head_size, import_for
from megatron_wlb.runtime.backends.protocol import KernelArgs, keys_and_values
from megatron_wlb.runtime.encoding import varlen

# More keys than any entry has, so that kernels need not know of a case without a window.
_NO_WINDOW = 1 << 30


class TritonBackend:
    """Kernels of `triton_kernels`: no atomics, so every run gives the same bits; no copies of K and V for query heads.

    Head sizes are multiples of 8 up to 256 and computed as the next power of two. fp32 inputs are multiplied in full
    fp32, not TF32. Raises ValueError where triton is not installed.
    """

    name = "triton"
    device_types: tuple[str, ...] = ("cuda",)
    dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16, torch.float32)
    any_value_size = True
    encode = staticmethod(varlen)

    def __init__(self) -> None:
        self._kernels = import_for(self.name, "megatron_wlb.runtime.backends.triton_kernels", "triton")

    def forward(self, q: Tensor, k: Tensor, v: Tensor, args: KernelArgs) -> tuple[Tensor, Tensor]:
        """See `Backend.forward`."""
        check_head_size(self.name, q, v)
        out = q.new_empty((*q.shape[:2], v.shape[-1]))
        lse = q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)
        sizes = _sizes(q, k, v)
        self._kernels.forward_kernel[_grid(q, args, sizes["BLOCK_Q"])](
            q, k, v, out, lse, *_arguments(q, args), *_strides(q, k, v, out), **sizes
        )
        return out, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dkv: Tensor, args: KernelArgs
    ) -> Tensor:
        """See `Backend.backward`."""
        dq, delta, sizes = q.new_empty(q.shape), torch.empty_like(lse), _sizes(q, k, v)
        arguments, (dk, dv) = _arguments(q, args), keys_and_values(dkv, k.shape[-1])
        if not args.adds_up:
            dkv.zero_()  # the kernels leave keys out that nobody reads
        self._kernels.dq_kernel[_grid(q, args, sizes["BLOCK_Q"])](
            dout, q, k, v, out, lse, dq, delta, *arguments, *_strides(dout, q, k, v, out, dq), **sizes
        )
        args.wait_to_add()
        self._kernels.dkv_kernel[_grid(k, args, sizes["BLOCK_K"])](
            dout, q, k, v, lse, delta, dk, dv, *arguments, *_strides(dout, q, k, v, dk, dv), **sizes
        )
        return dq


def _grid(x: Tensor, args: KernelArgs, block: int) -> tuple[int, int]:
    return x.shape[0] // block + _entries(args), x.shape[1]


def _arguments(q: Tensor, args: KernelArgs) -> tuple[Tensor, Tensor, int, int, float, int, int]:
    cu_q, cu_k = args.table
    window = _NO_WINDOW if args.window is None else args.window
    return cu_q, cu_k, _entries(args), q.shape[0], args.scale, window, int(args.causal)


def _entries(args: KernelArgs) -> int:
    return args.table.shape[1] - 1


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(stride for x in tensors for stride in x.stride()[:2])


def _sizes(q: Tensor, k: Tensor, v: Tensor) -> dict[str, int]:
    """Compile-time arguments. Blocks are the largest that compile for H100 with next to no spilled registers."""
    padded, v_padded = (max(16, 1 << (x.shape[-1] - 1).bit_length()) for x in (q, v))
    full, widest = q.dtype == torch.float32, max(padded, v_padded)
    block = (64 if widest <= 128 else 32) >> full
    return {
        "GROUP": q.shape[1] // k.shape[1],
        "D": q.shape[-1],
        "D_PAD": padded,
        "DV": v.shape[-1],
        "DV_PAD": v_padded,
        "BLOCK_Q": block,
        "BLOCK_K": block,
        "num_warps": 8 if full or widest > 64 else 4,
        "num_stages": 2,
    }
