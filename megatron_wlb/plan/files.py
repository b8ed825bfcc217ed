"""Appends to logs so that a full disk leaves only whole entries."""

import os
import stat


def append(path: str | os.PathLike[str], data: bytes, flag: str) -> None:
    """Append `data`, all or nothing; to a pipe or a device, as much as it takes.

    Raises OSError, naming the file and its `flag`, on failure, and for a pipe without a reader.
    """
    try:
        # Otherwise opening a pipe without a reader blocks.
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, 0o666)
        try:
            os.set_blocking(descriptor, True)
            _write(descriptor, data)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise OSError(
            error.errno,
            f"cannot append {len(data)} bytes to {flag} {path}: {error.strerror}; free space there, or name a file that"
            " can be written",
        ) from error


def _write(descriptor: int, data: bytes) -> None:
    before = os.fstat(descriptor)
    try:
        while data:  # a nearly full disk takes a part, and fails at the next write
            data = data[os.write(descriptor, data) :]
    except BaseException:
        if stat.S_ISREG(before.st_mode):
            os.ftruncate(descriptor, before.st_size)
        raise
