"""What GPU backends check about the packages and tensors they are given, with errors that say what to do."""

import importlib
from collections.abc import Iterable
from typing import Any

from torch import Tensor

_MAX_HEAD_SIZE = 256


def import_for(backend: str, module: str, package: str) -> Any:
    """`module`, which comes with `package`. Raises ValueError where that is not installed or does not load."""
    try:
        return importlib.import_module(module)
    except (ImportError, OSError) as error:  # OSError: a shared library that it needs is missing
        raise ValueError(
            f"attention backend {backend!r} needs {package}, which cannot be imported ({error}); install it, or choose "
            "another backend"
        ) from error


def check_arguments(
    backend: str, function: str, parameters: dict[str, bool], given: Iterable[str], versions: str
) -> None:
    """Raise ValueError unless `function` can be called with the keywords `given`.

    `parameters` are its parameters, each with whether it has a default.
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
    """Parameters of an operator's schema, each with whether it has a default."""
    return {argument.name: argument.has_default_value() for argument in schema.arguments}


def check_head_size(backend: str, q: Tensor) -> None:
    """Raise ValueError unless the head size of q [sq, Hq, D] is one that FlashAttention kernels are made for."""
    if q.shape[-1] % 8 or q.shape[-1] > _MAX_HEAD_SIZE:
        raise ValueError(
            f"attention backend {backend!r} cannot run head size {q.shape[-1]}: it must be a multiple of 8 and at most "
            f"{_MAX_HEAD_SIZE}; choose another kv_channels"
        )
