"""Stands in for what is compiled of TransformerEngine and Apex where they are not: outputs are allocated, no more."""

import enum
import importlib.util
import math
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from megatron_wlb.rehearse.build import transformer_engine

_DTYPES = {"kInt32": torch.int32, "kFloat32": torch.float32, "kFloat16": torch.float16, "kBFloat16": torch.bfloat16}
"""Torch's types, by the names that TransformerEngine gives them."""
_MEMBER = re.compile(r"\b(?:tex\.([A-Z]\w*)|(NVTE_\w+))\.([A-Z]\w*|k[A-Z]\w+)")
_NAME = re.compile(r"\btex\.([A-Za-z]\w*)")


def install() -> None:
    """Make TransformerEngine's own Python run without its compiled part, and upstream's layers without Apex's."""
    if importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is None:
        apex: Any = ModuleType("fused_weight_gradient_mlp_cuda")
        apex.wgrad_gemm_accum_fp32 = apex.wgrad_gemm_accum_fp16 = lambda x, gradient, weight_gradient: None
        sys.modules[apex.__name__] = apex
    spec = importlib.util.find_spec("transformer_engine")
    if spec is None or transformer_engine():
        os.environ["UB_SKIPMC"] = "1"  # user buffers without multicast
        return
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # its own switch: load no libraries
    compiled = _Compiled("transformer_engine_torch")
    vars(compiled).update({name: value for name, value in globals().items() if name in _STANDS_IN})
    assert spec.origin is not None
    texts = [file.read_text() for file in sorted((Path(spec.origin).parent / "pytorch").rglob("*.py"))]
    members: dict[str, dict[str, int]] = {}
    for text in texts:
        for of_module, imported, member in _MEMBER.findall(text):
            known = members.setdefault(of_module or imported, {})
            known.setdefault(member, len(known))
    for name, values in members.items():
        setattr(compiled, name, enum.IntEnum(name, values))  # type: ignore[misc]
    for text in texts:
        for name in _NAME.findall(text):
            getattr(compiled, name)
    sys.modules[compiled.__name__] = compiled
    if importlib.util.find_spec("onnxscript") is None:
        sys.modules["transformer_engine.pytorch.onnx_extensions"] = _Compiled("onnx_extensions")
    import transformer_engine.common as common

    common.load_framework_extension = lambda framework: None


class _Compiled(ModuleType):
    """A compiled module: what it stands in for, and functions that raise their name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Names(name, (), {}) if name[0].isupper() else _unknown(f"{self.__name__}.{name}")
        setattr(self, name, made)
        return made


class _Names(type):
    """A compiled class, or an enumeration whose members are known by another name only: each is a number."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(cls, name, len(vars(cls)))
        return getattr(cls, name)


def _unknown(name: str) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"{name} is called, and nothing stands in for it; rehearse with --transformer-impl local, or report it "
            "with the job's flags"
        )

    return call


# What a GPT step in bf16 or fp32 calls --------------------------------------------------------------------------------


def _dtype(of: Any, default: torch.dtype) -> torch.dtype:
    if of is None or isinstance(of, torch.dtype):
        return of or default
    return _DTYPES[sys.modules["transformer_engine_torch"].DType(int(of)).name]


def generic_gemm(
    A: torch.Tensor,
    transa: bool,
    B: torch.Tensor,
    transb: bool,
    out: torch.Tensor | None,
    quantizer: Any,
    out_dtype: Any,
    bias: torch.Tensor | None,
    bias_type: Any,
    gelu: bool,
    gelu_in: Any,
    grad: bool,
    *unused: Any,
    comm_overlap: Any = None,
    extra_output: Any = None,
    bulk_overlap: bool = False,
    **options: Any,
) -> tuple[Any, ...]:
    """Column-major, as cuBLAS: rows of B times A. With user buffers, these take what a reduce-scatter reads."""
    if out is None:
        columns = A.shape[0] if transa else A.shape[-1]
        shape = (*((B.shape[-1],) if transb else B.shape[:-1]), columns)
        if comm_overlap is not None and extra_output is not None and not bulk_overlap:
            out = comm_overlap.get_buffer(shape=shape)
        else:
            out = torch.empty(shape, dtype=_dtype(out_dtype, A.dtype), device=A.device)
    of_bias = torch.empty_like(bias) if bias is not None and grad else None
    return out, of_bias, None, extra_output


def rmsnorm_fwd(x: torch.Tensor, weight: Any, eps: float, out: Any, quantizer: Any, dtype: Any, *unused: Any) -> Any:
    """Output, no mean, and 1 / sigma of each row."""
    y = torch.empty_like(x, dtype=_dtype(dtype, x.dtype)) if out is None else out
    return y, None, torch.empty(x.numel() // x.shape[-1], dtype=torch.float32, device=x.device)


def layernorm_fwd(
    x: torch.Tensor, weight: Any, bias: Any, eps: float, out: Any, quantizer: Any, dtype: Any, *unused: Any
) -> Any:
    """Output, mean, and 1 / sigma of each row."""
    y, _, sigma = rmsnorm_fwd(x, weight, eps, out, quantizer, dtype)
    return y, torch.empty_like(sigma), sigma


def rmsnorm_bwd(dz: torch.Tensor, x: torch.Tensor, rsigma: Any, gamma: torch.Tensor, *unused: Any) -> Any:
    """Gradients of the input and of the weight."""
    return torch.empty_like(x), torch.empty_like(gamma)


def layernorm_bwd(dz: torch.Tensor, x: torch.Tensor, mu: Any, rsigma: Any, gamma: torch.Tensor, *unused: Any) -> Any:
    """Gradients of the input, the weight and the bias."""
    return torch.empty_like(x), torch.empty_like(gamma), torch.empty_like(gamma)


def fused_rope_forward(x: torch.Tensor, *unused: Any) -> torch.Tensor:
    """The rotated input."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


fused_rope_backward = fused_rope_forward


def multi_tensor_adam(*unused: Any) -> None:
    """In place."""


multi_tensor_scale = multi_tensor_adam


def multi_tensor_l2norm(chunk: int, noop: Any, tensors: list[list[torch.Tensor]], per_tensor: bool = False) -> Any:
    """Norms of all tensors together, and of each if asked."""
    x = tensors[0][0]
    norms = len(tensors[0]) if per_tensor else 0
    return torch.empty(1, dtype=torch.float32, device=x.device), torch.empty(norms, device=x.device)


class CommOverlap:
    """A user buffer [rows, columns] of `ranks`, which takes a whole tensor, or a rank's share of it, exactly."""

    def __init__(
        self, shape: Sequence[int], dtype: torch.dtype, helper: Any, ranks: int, *unused: Any, **options: Any
    ) -> None:
        self._buffer, self._ranks = torch.empty(tuple(shape), dtype=dtype, device="cuda"), ranks

    def copy_into_buffer(self, x: torch.Tensor, local_chunk: bool = False) -> None:
        """Copy x, a share of the buffer if `local_chunk`."""
        self.get_buffer(local_chunk, x.shape).copy_(x)

    def get_buffer(self, local_chunk: bool = False, shape: Sequence[int] | None = None) -> torch.Tensor:
        """Return the buffer, or a rank's share of it, as `shape`."""
        part = self._buffer[: len(self._buffer) // self._ranks] if local_chunk else self._buffer
        if shape is not None and math.prod(shape) != part.numel():
            raise ValueError(f"a user buffer of {tuple(part.shape)} is asked for {tuple(shape)}; report it")
        return part if shape is None else part.view(tuple(shape))

    def is_fp8_ubuf(self) -> bool:
        """Whether it holds FP8."""
        return self._buffer.dtype == torch.uint8

    def with_cublasmp(self) -> bool:
        """Whether cuBLASMp has taken the place of the buffer."""
        return False


CommOverlapP2P = CommOverlap


class CommOverlapHelper:
    """Takes the groups of ranks that have buffers together."""

    def __init__(self, *groups: Any) -> None:
        pass


def ubuf_built_with_mpi() -> bool:
    """As compiled by default."""
    return False


def device_supports_multicast() -> bool:
    """As a GPU with NVSwitch."""
    return True


def get_stream_priority_range() -> tuple[int, int]:
    """Least and greatest, as of CUDA."""
    return 0, -5


def get_cublasLt_version() -> int:
    """As `cublasLtGetVersion` of the stand-in."""
    return 130000


def get_cudnn_version() -> int:
    """One that TransformerEngine takes."""
    return 92000


def get_num_cublas_streams() -> int:
    """As compiled."""
    return 4


_STANDS_IN = (
    "generic_gemm rmsnorm_fwd layernorm_fwd rmsnorm_bwd layernorm_bwd fused_rope_forward fused_rope_backward "
    "multi_tensor_adam multi_tensor_scale multi_tensor_l2norm get_cublasLt_version get_cudnn_version "
    "get_num_cublas_streams CommOverlap CommOverlapP2P CommOverlapHelper ubuf_built_with_mpi device_supports_multicast "
    "get_stream_priority_range"
).split()
