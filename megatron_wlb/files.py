"""Files: read up to a limit, written whole or not at all, and logs of whole entries."""

import contextlib
import errno
import os
import secrets
import signal
import stat
import sys
import tempfile
import threading
from collections.abc import Iterator
from typing import Any, BinaryIO

INPUTS: set[str] = set()
"""Real paths of the files that this process has opened to read; outputs must not replace them."""


def opened(path: str | os.PathLike[str], remedy: str) -> BinaryIO:
    """Open a file to read. Raises ValueError, with the remedy, for all but a readable file."""
    try:
        # Opening a pipe without a writer would block.
        file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            file.close()
            raise IsADirectoryError(errno.EISDIR, "is a folder, pipe or device")
    except OSError as error:
        why = "is a folder, pipe or device" if error.errno == errno.EISDIR else error.strerror
        raise ValueError(f"{path}: {why}; {remedy}") from None
    INPUTS.add(os.path.realpath(path))
    return file


def read(path: str | os.PathLike[str], most_bytes: int, remedy: str) -> bytes:
    """Read a file of at most `most_bytes`. Raises ValueError as `opened`, and for a larger one."""
    with opened(path, remedy) as file:
        size = os.fstat(file.fileno()).st_size  # 0 in /proc
        try:
            data = file.read(min(most_bytes, max(size, 1 << 16)) + 1)
        except OSError as error:
            raise ValueError(f"{path}: {error.strerror}; {remedy}") from None
    if len(data) > most_bytes:
        raise ValueError(f"{path} has over {most_bytes >> 20} MiB, the limit; {remedy}")
    return data


@contextlib.contextmanager
def ending() -> Iterator[None]:
    """Turn SIGTERM into SystemExit, which cleans up, in the main thread and where no other handler is set."""
    free = threading.current_thread() is threading.main_thread()
    free = free and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if free:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        if free:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextlib.contextmanager
def written(path: str | os.PathLike[str]) -> Iterator[Any]:
    """Open a text file that appears as `path` when complete. Raises OSError.

    A link is replaced, not followed. Nothing is left behind but by SIGKILL.
    """
    temporary = os.path.join(os.path.dirname(os.path.abspath(path)), f".megatron-wlb-{secrets.token_hex(8)}.tmp")
    with ending():
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
            with open(descriptor, "w", encoding="utf-8") as file:
                yield file
                file.flush()
                os.fsync(descriptor)
            os.replace(temporary, path)
        except BaseException as error:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            if isinstance(error, OSError):
                error.filename, error.filename2 = os.fspath(path), None
            raise


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


def check_log(path: str, flag: str) -> None:
    """Raise ValueError unless entries can be appended to a log and there is room in its folder."""
    if os.path.realpath(path) in INPUTS:
        raise ValueError(f"{flag} {path} is a file that the run reads; name another")
    if not os.path.isdir(folder := os.path.dirname(os.path.abspath(path))):
        raise ValueError(f"{flag} {path}: the folder {folder} does not exist; create it or name another")
    try:
        append(path, b"", flag)
    except OSError as error:
        raise ValueError(error.strerror) from error
    check_room(folder, flag, new_files=False)


def check_room(folder: str, flag: str, *, new_files: bool = True) -> None:
    """Raise ValueError if the disk of a folder is full, or `new_files` cannot be made there."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(1 << 16))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        if full or new_files:
            remedy = "free space there" if full else "let it be written"
            raise ValueError(f"{flag} {folder}: {error.strerror}; {remedy}, or name another") from error


def _write(descriptor: int, data: bytes) -> None:
    before = os.fstat(descriptor)
    try:
        while data:  # a nearly full disk takes a part, and fails at the next write
            data = data[os.write(descriptor, data) :]
    except BaseException:
        if stat.S_ISREG(before.st_mode):
            os.ftruncate(descriptor, before.st_size)
        raise
