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
    """Return the imported `module`; raises ValueError if `package` does not load."""
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


def checked_operator(backend: str, namespace: Any, name: str, given: Iterable[str], versions: str) -> Any:
    """Return an operator of `namespace`, if its schema takes the keywords `given`."""
    operator = getattr(namespace, name, None)
    if operator is None:
        raise ValueError(
            f"attention backend {backend!r} was written for {versions}; the installed one has no operator "
            f"{namespace.name}::{name}; install such a version"
        )
    parameters = {each.name: each.has_default_value() for each in operator.default._schema.arguments}
    check_arguments(backend, name, parameters, given, versions)
    return operator.default


def check_head_size(backend: str, q: Tensor, v: Tensor) -> None:
    """Raise ValueError unless the kernels support the sizes D and Dv."""
    for size in (q.shape[-1], v.shape[-1]):
        if size % 8 or size > _MAX_HEAD_SIZE:
            raise ValueError(
                f"attention backend {backend!r} cannot run head size {size}: it must be a multiple of 8 and at most "
                f"{_MAX_HEAD_SIZE}; choose another kv_channels"
            )


def check_value_size(backend: Backend | type[Backend], head_sizes: tuple[int, int]) -> None:
    """Raise ValueError if the backend needs value heads of the size of key heads."""
    if len(set(head_sizes)) > 1 and not backend.any_value_size:
        raise ValueError(
            f"attention backend {backend.name!r} needs value heads of the size of key heads, {head_sizes[0]}, not "
            f"{head_sizes[1]}; choose flash_attn_3 or te, on GPUs of compute capability 9.0 or later"
        )


def check_workspace(backend: str, needed: int, q: Tensor, k: Tensor) -> None:
    """Raise ValueError if deterministic gradients take too much memory.

    They take `needed` bytes for q [sq, Hq, D] and k [P, Hkv, D]; the limit is `WORKSPACE_SHARE` of the GPU's memory.
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
    """Raise ValueError if FlashAttention-2 takes too much memory for determinism.

    Its kernel then keeps a copy of dQ for every thread block of a head of an entry: fp32 [ceil(multiprocessors /
    (entries * heads)), rows + 128 * entries, heads, head size], with head sizes rounded up to a multiple of 32
    (`mha_varlen_bwd` of flash-attn 2.8 and of torch).
    """
    if not torch.are_deterministic_algorithms_enabled():
        return
    rows, heads, size = q.shape
    splits = -(-torch.cuda.get_device_properties(q.device).multi_processor_count // (num_entries * heads))
    check_workspace(backend, 4 * splits * (rows + 128 * num_entries) * heads * (-(-size // 32) * 32), q, k)
