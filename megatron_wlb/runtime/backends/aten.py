"""GPU backend: the varlen FlashAttention that torch ships (FA2, or FA3/FA4 once activated), one call per colour."""

from typing import Any

import torch
from torch import Tensor

from megatron_wlb.runtime.metadata import Colour

_QKV = ("query", "key", "value")
_LENGTHS = ("cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal")
_FORWARD_ARGUMENTS = (*_QKV, *_LENGTHS, "return_debug_mask")
_BACKWARD_ARGUMENTS = ("grad_out", *_QKV, "out", "logsumexp", *_LENGTHS, "rng_state", "unused")

_MAX_HEAD_SIZE = 256


class AtenBackend:
    """`aten::_flash_attention_forward` and `_backward`: causal, aligned to the bottom right of every entry.

    The operators are private to torch, so their schemas are compared with what is passed here: ValueError where a
    version of torch has changed them. Bitwise reproducible under `torch.use_deterministic_algorithms(True)`.
    """

    name = "aten"
    device_types: tuple[str, ...] = ("cuda",)
    dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)

    def __init__(self) -> None:
        _check_schema(torch.ops.aten._flash_attention_forward.default._schema, _FORWARD_ARGUMENTS, num_returns=5)
        _check_schema(torch.ops.aten._flash_attention_backward.default._schema, _BACKWARD_ARGUMENTS, num_returns=3)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, colour: Colour, scale: float) -> tuple[Tensor, Tensor]:
        """See `Backend.forward`."""
        if q.shape[-1] % 8 or q.shape[-1] > _MAX_HEAD_SIZE:
            raise ValueError(
                f"attention backend 'aten' cannot run head size {q.shape[-1]}: it must be a multiple of 8 and at most "
                f"{_MAX_HEAD_SIZE}; choose another kv_channels"
            )
        out, lse, _, _, _ = torch.ops.aten._flash_attention_forward(
            q, k, v, *_lengths(colour), 0.0, True, False, scale=scale
        )
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
    ) -> Tensor:
        """See `Backend.backward`."""
        # The random state of the forward pass, in its dtype; without dropout nobody reads it.
        rng_state = torch.empty(2, dtype=torch.uint64, device=q.device)
        dq, dk_part, dv_part = torch.ops.aten._flash_attention_backward(
            dout, q, k, v, out, lse, *_lengths(colour), 0.0, True, rng_state, rng_state[0], scale=scale
        )
        dk += dk_part
        dv += dv_part
        return dq


def _lengths(colour: Colour) -> tuple[Tensor, Tensor, int, int]:
    # With max_q = 1 the kernel takes every entry for a single query (decoding) and fails on the gap entries, which have
    # none. It is an upper bound, so 2 is as good.
    return colour.cu_q, colour.cu_k, max(colour.max_q, 2), colour.max_k


def _check_schema(schema: Any, positional: tuple[str, ...], num_returns: int) -> None:
    """Raise ValueError unless the operator takes exactly these positional arguments, and `scale` by keyword."""
    names = tuple(argument.name for argument in schema.arguments if not argument.kwarg_only)
    keywords = {argument.name: argument.has_default_value() for argument in schema.arguments if argument.kwarg_only}
    required = [name for name, has_default in keywords.items() if not has_default and name != "scale"]
    if names != positional or "scale" not in keywords or required or len(schema.returns) != num_returns:
        raise ValueError(
            f"attention backend 'aten' was written for torch 2.11 to 2.13, and torch {torch.__version__} has another "
            f"{schema.name}({', '.join((*names, *keywords))}) with {len(schema.returns)} results, where "
            f"({', '.join((*positional, 'scale'))}) with {num_returns} were expected; use a supported torch"
        )
