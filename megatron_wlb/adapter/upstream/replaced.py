"""Replacements of upstream's functions while a context lasts, after a check of names and parameters."""

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

from megatron_wlb.adapter.upstream.versions import NEWER


@contextlib.contextmanager
def replaced(module: Any, name: str, make: Any, parameters: Sequence[str]) -> Iterator[None]:
    """Replace `module.name` by `make(original)` inside the context.

    `parameters` names the original's that this plugin relies on. Raises RuntimeError if upstream has changed them.
    """
    original = getattr(module, name, None)
    if original is None:
        raise RuntimeError(f"{module.__name__}.{name} does not exist {NEWER}")
    present = inspect.signature(original).parameters
    if missing := [p for p in parameters if p not in present]:
        raise RuntimeError(
            f"{module.__name__}.{name}({', '.join(present)}) lacks {', '.join(missing)}, which --wlb needs, {NEWER}"
        )
    setattr(module, name, make(original))
    try:
        yield
    finally:
        setattr(module, name, original)
