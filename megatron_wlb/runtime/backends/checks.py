"""Checks of packages, head sizes and memory that GPU backends share."""

import importlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from megatron_wlb.runtime.backends.protocol import Backend

_MAX_HEAD_SIZE = 256
WORKSPACE_SHARE = 0.1
"""Share of GPU memory that deterministic gradients may take: what `simulate.memory.DEVICE_SHARE` leaves free."""


def import_for(backend: str, module: str, package: str) -> Any:
    """The imported `module`; raises ValueError where `package` does not load."""
    try:
        return importlib.import_module(module)
    except (ImportError, OSError) as error:  # OSError: a shared library is missing
        raise ValueError(
            f"attention backend {backend!r} needs {package}, which cannot be imported ({error}); install it, or choose "
            "another backend"
        ) from error


def check_arguments(
    backend: str, function: str, parameters: dict[str, bool], given: Iterable[str], versions: str
) -> None:
    """Raise ValueError unless `function` can be called with the keywords `given`.

    `parameters` maps parameter names to whether they have a default.
    """
    given = set(given)
    unknown = sorted(given - parameters.keys())
    missing = [name for name, has_default in parameters.items() if not has_default and name not in given]
    if unknown or missing:
        raise ValueError(
            f"attention backend {backend!r} was written for {versions}; the installed {function}"
            f"({', '.join(parameters)}) does not take {unknown} or also needs {missing}; install such a version"
        )


def schema_parameters(schema: Any) -> dict[str, bool]:
    """Parameter names of an operator's schema, each with whether it has a default."""
    return {argument.name: argument.has_default_value() for argument in schema.arguments}


def check_head_size(backend: str, q: Tensor, v: Tensor) -> None:
    """Raise ValueError unless FlashAttention has kernels for the sizes D and Dv."""
    for size in (q.shape[-1], v.shape[-1]):
        if size % 8 or size > _MAX_HEAD_SIZE:
            raise ValueError(
                f"attention backend {backend!r} cannot run head size {size}: it must be a multiple of 8 and at most "
                f"{_MAX_HEAD_SIZE}; choose another kv_channels"
            )


def check_value_size(backend: Backend | type[Backend], head_sizes: tuple[int, int]) -> None:
    """Raise ValueError where the backend needs key and value heads of one size."""
    if len(set(head_sizes)) > 1 and not backend.any_value_size:
        raise ValueError(
            f"attention backend {backend.name!r} needs value heads of the size of key heads, {head_sizes[0]}, not "
            f"{head_sizes[1]}; choose flash_attn_3 or te, on GPUs of compute capability 9.0 or later"
        )


def check_workspace(backend: str, needed: int, q: Tensor, k: Tensor) -> None:
    """Raise ValueError where deterministic gradients take too much memory.

    The limit is `WORKSPACE_SHARE` of the GPU's memory. They take `needed` bytes for q [sq, Hq, D] and k [P, Hkv, D].
    """
    most = WORKSPACE_SHARE * torch.cuda.get_device_properties(q.device).total_memory
    if needed > most:
        raise ValueError(
            f"attention backend {backend!r} would take {needed / 2**30:.1f} GiB for deterministic gradients of "
            f"{q.shape[0]} queries and {k.shape[0]} keys with {q.shape[1]} heads, over {WORKSPACE_SHARE:.0%} of the "
            f"GPU's memory, {most / 2**30:.1f}; switch torch.use_deterministic_algorithms (--deterministic-mode) off, "
            "or choose another backend"
        )


def check_sum_of_dq(backend: str, q: Tensor, k: Tensor, num_entries: int) -> None:
    """Raise ValueError where FlashAttention-2 takes too much memory for determinism.

    With deterministic algorithms the kernel keeps one copy of dQ for every thread block that works on the same head of
    an entry: fp32 [ceil(multiprocessors / (entries * heads)), rows + 128 * entries, heads, head size], with the head
    size rounded up to a multiple of 32 (`mha_varlen_bwd` of flash-attn 2.8 and of torch).
    """
    if not torch.are_deterministic_algorithms_enabled():
        return
    rows, heads, size = q.shape
    splits = -(-torch.cuda.get_device_properties(q.device).multi_processor_count // (num_entries * heads))
    check_workspace(backend, 4 * splits * (rows + 128 * num_entries) * heads * (-(-size // 32) * 32), q, k)
