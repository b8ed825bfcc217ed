"""Checks of packages and head sizes that GPU backends share."""

import importlib
from typing import Any

from torch import Tensor

from megatron_wlb.runtime.backends.protocol import Backend

_MAX_HEAD_SIZE = 256


def import_for(backend: str, module: str, package: str) -> Any:
    """Return the imported `module`; raises ValueError if `package` does not load."""
    try:
        return importlib.import_module(module)
    except (ImportError, OSError) as error:  # OSError: a shared library is missing
        raise ValueError(
            f"attention backend {backend!r} needs {package}, which cannot be imported ({error}); install it, or choose "
            "another backend"
        ) from error


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
