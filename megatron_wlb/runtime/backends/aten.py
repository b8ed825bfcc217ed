"""GPU backend: the varlen FlashAttention that torch ships (FA2, or FA3/FA4 once activated), one operator per call."""

from typing import Any

import torch
from torch import Tensor

from megatron_wlb.runtime.backends.checks import check_head_size
from megatron_wlb.runtime.backends.protocol import KernelArgs
from megatron_wlb.runtime.encoding import varlen

_QKV = ("query", "key", "value")
_LENGTHS = ("cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal")
_FORWARD_ARGUMENTS = (*_QKV, *_LENGTHS, "return_debug_mask")
_BACKWARD_ARGUMENTS = ("grad_out", *_QKV, "out", "logsumexp", *_LENGTHS, "rng_state", "unused")
_KEYWORDS = ("scale", "window_size_left", "window_size_right")


class AtenBackend:
    """`aten::_flash_attention_forward` and `_backward`: causal, aligned to the bottom right of every entry.

    The operators are private to torch, so their schemas are compared with what is passed here: ValueError where a
    version of torch has changed them. Bitwise reproducible under `torch.use_deterministic_algorithms(True)`.

    `torch.nn.attention.activate_flash_attention_impl("FA3")` (needs the package `flash_attn_interface`) or `"FA4"`
    (`flash_attn.cute`; 4.0.0b36 returns more than torch before 2.14.1 takes) puts other kernels under the same two
    operators for the whole process, so this backend then runs them without knowing. Whoever wants that activates before
    the first step, on every rank. FA3 needs compute capability 9.0 and refuses deterministic gradients for head sizes
    over 192; FA4 needs 9.0, or 10.0 and a head size up to 128 or of 256. Log-sum-exps have the same shape, windows
    work, and torch calls both a prototype. Neither has been tried with entries without queries; `choose_backend` tries
    what is active.
    """

    name = "aten"
    device_types: tuple[str, ...] = ("cuda",)
    dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)
    encode = staticmethod(varlen)

    def __init__(self) -> None:
        _check_schema(torch.ops.aten._flash_attention_forward.default._schema, _FORWARD_ARGUMENTS, num_returns=5)
        _check_schema(torch.ops.aten._flash_attention_backward.default._schema, _BACKWARD_ARGUMENTS, num_returns=3)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, args: KernelArgs) -> tuple[Tensor, Tensor]:
        """See `Backend.forward`."""
        check_head_size(self.name, q)
        out, lse, _, _, _ = torch.ops.aten._flash_attention_forward(
            q, k, v, *_lengths(args), 0.0, True, False, scale=args.scale, **_window(args)
        )
        return out, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dkv: Tensor, args: KernelArgs
    ) -> Tensor:
        """See `Backend.backward`."""
        # The random state of the forward pass, in its dtype; without dropout nobody reads it.
        rng_state = torch.empty(2, dtype=torch.uint64, device=q.device)
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            dout,
            q,
            k,
            v,
            out,
            lse,
            *_lengths(args),
            0.0,
            True,
            rng_state,
            rng_state[0],
            scale=args.scale,
            **_window(args),
        )
        args.store(dkv, dk, dv)
        return dq


def _lengths(args: KernelArgs) -> tuple[Tensor, Tensor, int, int]:
    cu_q, cu_k = args.table
    return cu_q, cu_k, args.max_q, args.max_k


def _window(args: KernelArgs) -> dict[str, int]:
    return {} if args.window is None else {"window_size_left": args.window, "window_size_right": 0}


def _check_schema(schema: Any, positional: tuple[str, ...], num_returns: int) -> None:
    """Raise ValueError unless the operator takes exactly these positional arguments, and `_KEYWORDS` by keyword."""
    names = tuple(argument.name for argument in schema.arguments if not argument.kwarg_only)
    keywords = {argument.name: argument.has_default_value() for argument in schema.arguments if argument.kwarg_only}
    required = [name for name, has_default in keywords.items() if not has_default and name not in _KEYWORDS]
    if names != positional or not keywords.keys() >= set(_KEYWORDS) or required or len(schema.returns) != num_returns:
        raise ValueError(
            f"attention backend 'aten' was written for torch 2.11 to 2.15, and torch {torch.__version__} has another "
            f"{schema.name}({', '.join((*names, *keywords))}) with {len(schema.returns)} results, where "
            f"({', '.join((*positional, *_KEYWORDS))}) with {num_returns} were expected; use a supported torch"
        )
