"""Which upstream versions work, and scoped replacements that first check what they replace."""

import contextlib
import importlib
import importlib.util
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

SUPPORTED = ("0.19",)
"""Minor versions of megatron-core that the tests run against."""


def check_version(version: str) -> None:
    """Raises ValueError for a megatron-core that this release was not tested with."""
    if ".".join(version.split(".")[:2]) not in SUPPORTED:
        raise ValueError(
            f"megatron-core {version} is not supported; install one of {', '.join(f'{v}.x' for v in SUPPORTED)}"
        )


@contextlib.contextmanager
def replaced(module: Any, name: str, make: Any, parameters: Sequence[str]) -> Iterator[None]:
    """Replace `module.name` by `make(original)` inside the context.

    `parameters` are those of the original that we rely on. Raises RuntimeError if it is gone or lacks one of them: a
    name that upstream has moved must never be replaced silently.
    """
    original = getattr(module, name, None)
    if original is None:
        raise RuntimeError(f"{module.__name__}.{name} does not exist in this megatron-core; adapt megatron_wlb")
    present = inspect.signature(original).parameters
    if missing := [p for p in parameters if p not in present]:
        raise RuntimeError(
            f"{module.__name__}.{name}({', '.join(present)}) lacks {', '.join(missing)}; adapt megatron_wlb"
        )
    setattr(module, name, make(original))
    try:
        yield
    finally:
        setattr(module, name, original)


@contextlib.contextmanager
def prebuilt_dataset_helpers() -> Iterator[None]:
    """Keep upstream from compiling its dataset helpers: the wheel ships them built, but without their Makefile."""
    utils = importlib.import_module("megatron.core.datasets.utils")
    if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is None:
        yield
        return
    with replaced(utils, "compile_helpers", lambda original: lambda: None, ()):
        yield
