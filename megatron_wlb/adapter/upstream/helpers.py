"""Upstream's dataset helpers, which a wheel has built."""

import contextlib
import importlib
import importlib.util
from collections.abc import Iterator

from megatron_wlb.adapter.upstream.replaced import replaced


@contextlib.contextmanager
def prebuilt_dataset_helpers(where: str = "megatron.core.datasets.utils") -> Iterator[None]:
    """Skip compilation of upstream's dataset helpers by `where` if they are built: wheels have no Makefile."""
    module = importlib.import_module(where)
    if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is None:
        yield
        return
    with replaced(module, "compile_helpers", lambda original: lambda: None, ()):
        yield
