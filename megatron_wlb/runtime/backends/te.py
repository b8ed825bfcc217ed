"""GPU backend on TransformerEngine: cuDNN's fused attention over packed rows."""

import functools
import inspect
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_wlb.runtime.backends.protocol import Encoded, KernelArgs, check_head_size, import_for, offsets, owned

_MODULE, _PACKAGE = "transformer_engine.pytorch", "transformer-engine[pytorch]"
_LEAST_ENTRIES = 32
_LARGEST_HEAD = 128
"""Of values; with 192 and 256 gradients had NaN (cuDNN 9.19 on an H100)."""
# Since 2.15 the layouts of results are arguments; before, the dtype of the gradients was.
_FORMATS_OF_RESULTS = {"o_format": "thd", "do_format": "thd"}
_LAYOUT_OF_GRADIENTS = "dqkv_layout"


class TeBackend:
    """`fused_attn_fwd` and `fused_attn_bwd` of TransformerEngine 2.2 to 2.20.

    They need cuDNN 9.7 or newer, from 2.20 on 9.12, and compute capability 9.0. cuDNN takes the first key of an entry
    from a separate array (padded offsets), so keys without a reader are skipped. It builds a plan for every number of
    entries, rows and keys, all rounded up: the first steps are slow. Where a mask is aligned to the bottom right,
    backward also takes the time of tiles that it hides (cuDNN 9.19 on an H100, `cp_attention_h100.json`). So a call of
    whole documents has one that is aligned to the top left, and plans count these tiles (`KernelTimes.hidden`).
    Deterministic under `torch.use_deterministic_algorithms(True)`: on 9.0 for few rows, since cuDNN's workspace grows
    with queries times keys, on 10.0 from cuDNN 9.18.1 on.

    Raises ValueError if the package is missing, and at the first call if cuDNN is too old to pack log-sum-exps; cuDNN
    raises RuntimeError for a call that it cannot run.
    """

    name = "te"
    device_types: tuple[str, ...] = ("cuda",)
    dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)
    any_value_size = True

    @staticmethod
    def encode(key_begins: np.ndarray, segments: np.ndarray) -> Encoded:
        """Return the table [cu_q, cu_k, k_begins], [3, n + 1], of entries with queries.

        Whole documents, which have as many keys, have [cu_q, k_begins]. Empty entries bring n to a power of two:
        TransformerEngine no longer rounds n from 2.18 on.
        """
        empty = max(_LEAST_ENTRIES, 1 << (len(segments) - 1).bit_length()) - len(segments)
        q, k = segments["stop"] - segments["start"], segments["stop"]
        k_begins = np.append(key_begins[segments["document"]], np.full(empty + 1, key_begins[-1]))
        rows = [q, k] if segments["start"].any() else [q]
        table = np.stack((*offsets(np.pad(rows, ((0, 0), (0, empty)))), k_begins.astype(np.int32)))
        return Encoded(table, max_q=int(q.max()), max_k=int(k.max()))

    @staticmethod
    def spans(table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        queries, keys, first = table[0], table[-2], table[-1, :-1]
        return queries[1:], first, first + keys.diff()

    def __init__(self) -> None:
        te = import_for(self.name, f"{_MODULE}.cpp_extensions.fused_attn", _PACKAGE)
        self._engine = te.FusedAttnBackend["F16_arbitrary_seqlen"]
        self._forward = _function(te.fused_attn_fwd)
        self._backward = _function(te.fused_attn_bwd)
        self._dtypes: dict[torch.dtype, Any] = {}
        self._states_layout = _LAYOUT_OF_GRADIENTS in inspect.signature(te.fused_attn_bwd).parameters
        if "dqkv_dtype" in inspect.signature(te.fused_attn_bwd).parameters:
            constants = import_for(self.name, f"{_MODULE}.constants", _PACKAGE)
            self._dtypes = constants.TE_DType

    def forward(self, q: Tensor, k: Tensor, v: Tensor, args: KernelArgs) -> tuple[Tensor, Tensor]:
        check_head_size(self.name, q, v)
        if v.shape[-1] > _LARGEST_HEAD:
            raise ValueError(
                f"attention backend 'te' gave NaN in gradients of head size {v.shape[-1]} of values, and allows "
                f"at most {_LARGEST_HEAD}; choose another backend"
            )
        arguments = self._arguments(q, k, v, args)
        out, aux, *_ = self._forward(is_training=True, rng_gen=_generator(q.device), **arguments)
        stats = aux[0]
        if stats.dim() != 3:
            raise ValueError(
                f"attention backend 'te' got log-sum-exps of shape {tuple(stats.shape)}, where packed ones [rows, "
                "heads, 1] were expected: cuDNN is older than 9.6, or pads them for this GPU (capability 12.0); use "
                "a newer cuDNN, or choose another backend"
            )
        # In memory it is [rows, heads]; older versions round the number of rows up.
        return out.view(*q.shape[:2], v.shape[-1]), owned(stats[: q.shape[0], :, 0]).T

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dkv: Tensor, args: KernelArgs
    ) -> Tensor:
        arguments = self._arguments(q, k, v, args)
        gradients = {"dqkv_dtype": self._dtypes[q.dtype]} if self._dtypes else {}
        if self._states_layout:
            gradients[_LAYOUT_OF_GRADIENTS] = arguments["qkv_layout"]
        aux = [lse.T.contiguous()[:, :, None], _no_random_state(q.device)]
        dq, dk, dv, *_ = self._backward(
            o=out.contiguous(),
            d_o=dout.contiguous(),
            aux_ctx_tensors=aux,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            **arguments,
            **gradients,
        )
        # Gradients of keys between the entries are 0: TransformerEngine clears gradients of packed rows first.
        args.store(dkv, dk, dv)
        return dq

    def _arguments(self, q: Tensor, k: Tensor, v: Tensor, args: KernelArgs) -> dict[str, Any]:
        cu_q, cu_k, k_begins = args.table[0], args.table[-2], args.table[-1]
        causal = "padding_causal" if len(args.table) == 2 else "padding_causal_bottom_right"
        layout = "thd_t2hd" if k.shape == v.shape else "thd_thd_thd"
        k, v = _side_by_side(k, v) if k.shape == v.shape else (k.contiguous(), v.contiguous())
        return {
            "max_seqlen_q": args.max_q,
            "max_seqlen_kv": args.max_k,
            "cu_seqlens_q": cu_q,
            "cu_seqlens_kv": cu_k,
            "cu_seqlens_q_padded": cu_q,
            "cu_seqlens_kv_padded": k_begins,
            "q": q.contiguous(),
            "k": k,
            "v": v,
            "fake_dtype": q.dtype,
            "fused_attention_backend": self._engine,
            "attn_scale": args.scale,
            "window_size": (-1 if args.window is None else args.window, 0 if args.causal else -1),
            "attn_mask_type": causal if args.causal else "padding",
            "qkv_layout": layout,
            "attn_bias_type": "no_bias",
            "dropout": 0.0,
        }


def _side_by_side(k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Return K and V as halves of one tensor [P, 2, Hkv, D], copied unless they are."""
    _, heads, size = k.shape
    strides = (2 * heads * size, size, 1)
    if k.stride() == v.stride() == strides and v.data_ptr() - k.data_ptr() == heads * size * k.itemsize:
        return k, v
    return torch.stack((k, v), dim=1).unbind(1)


def _function(function: Any) -> Any:
    known = inspect.signature(function).parameters
    return functools.partial(function, **{name: value for name, value in _FORMATS_OF_RESULTS.items() if name in known})


@functools.cache
def _generator(device: torch.device) -> torch.Generator:
    """Return a generator for forward, which draws random numbers even without dropout."""
    return torch.Generator(device)


@functools.cache
def _no_random_state(device: torch.device) -> Tensor:
    """Return a random state for backward, which does not read it without dropout."""
    return torch.zeros(2, dtype=torch.int64, device=device)
