"""Limits that a machine may set."""

import contextlib
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def limited(kind: int, value: int) -> Iterator[None]:
    """A soft limit of this process, such as `resource.RLIMIT_NOFILE`."""
    soft, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (value, hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, (soft, hard))


def files_up_to(size: int) -> contextlib.AbstractContextManager[None]:
    """No file may become larger; a write beyond is cut, and the next one fails, as on a full disk."""
    return limited(resource.RLIMIT_FSIZE, size)
