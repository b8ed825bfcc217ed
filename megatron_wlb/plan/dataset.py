"""Document lengths of a Megatron `.bin/.idx` dataset, without torch or megatron.

A document is one of its *sequences*, as in Megatron. The index stays mapped, and is processed in chunks.
"""

import mmap
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_wlb import files
from megatron_wlb.settings import in_range

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = len(_MAGIC) + 8 + 1 + 8 + 8
_ITEM_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 8, 7: 4, 8: 2}  # dtype codes of the format
_CHUNK = 1 << 20
_LOOKED_AT, _BLOCKS = 1 << 16, 256
"""Documents of a block whose order is looked at, and blocks of a dataset: all of up to 16 million documents."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentIndex:
    """Document lengths of a dataset, and where documents begin in its `.bin` file."""

    lengths: np.ndarray
    """Tokens of each document, int32 [documents]."""
    pointers: np.ndarray
    """First byte of each document in the `.bin` file, int64 [documents]."""
    item_bytes: int
    """Bytes of a token there."""


def check_index(prefix: str) -> int:
    """Check the header of `PREFIX.idx` and the size of `PREFIX.bin`, in no time; return the number of documents.

    Raises ValueError if a file is missing, truncated, of another format, or without a document.
    """
    path, binary = _files(prefix)
    index = _mapped(path)
    _check_size(path, binary, int(index.pointers[-1]) + int(index.lengths[-1]) * index.item_bytes)
    return len(index.lengths)


@in_range
def read_index(prefix: str) -> DocumentIndex:
    """Read `PREFIX.idx` and check all of it against `PREFIX.bin`.

    Raises ValueError as `check_index`, and for inconsistent contents.
    """
    path, binary = _files(prefix)
    index = _parse(path)
    chunks = (slice(begin, begin + _CHUNK) for begin in range(0, len(index.lengths), _CHUNK))
    # Unsigned: a damaged pointer near 2^63 must not wrap around to a small one.
    stops = (index.pointers[c].view("<u8") + index.lengths[c].astype("<u8") * index.item_bytes for c in chunks)
    _check_size(path, binary, max(int(stop.max()) for stop in stops))
    return index


def suspicious_layout(prefix: str) -> list[str]:
    """Return findings that are legal in a checked `PREFIX.idx` and seldom intended, with their numbers.

    Writers put documents one behind the other: where they are not, the file may be a subset, or damaged. The same holds
    where the `.bin` file, if it is here, has more bytes than the index describes.
    """
    path, binary = _paths(prefix)
    index = _mapped(path)
    lengths, pointers = index.lengths, index.pointers
    count, elsewhere, end, first = 0, 0, 0, ""
    for begin in range(0, len(lengths), max(_LOOKED_AT, -(-len(lengths) // _BLOCKS))):
        rows = slice(begin, begin + _LOOKED_AT + 1)
        stops = pointers[rows] + lengths[rows].astype(np.int64) * index.item_bytes
        (strange,) = np.nonzero(pointers[rows][1:] != stops[:-1])
        if len(strange) and not first:
            i = int(strange[0])
            first = f"document {begin + i + 1} at byte {pointers[rows][i + 1]}, where the one before ends at {stops[i]}"
        count, elsewhere, end = count + len(stops) - 1, elsewhere + len(strange), max(end, int(stops.max()))
    found = []
    if elsewhere:
        found.append(
            f"{elsewhere} of {count} documents of {path} do not begin where the one before ends (the first: {first})"
        )
    if binary.exists() and (size := binary.stat().st_size) > end:
        found.append(f"{binary} has {size} bytes, and {path} describes the first {end}")
    return [f"{each}; rebuild it unless this is a deliberate subset" for each in found]


def read_lengths(prefix: str) -> np.ndarray:
    """Tokens of each document, int32 [documents], from `PREFIX.idx` alone.

    Raises ValueError as `read_index`, except for faults that only the `.bin` file shows.
    """
    path, _ = _paths(prefix)
    _check_file(path)
    return _parse(path).lengths


def _paths(prefix: str) -> tuple[Path, Path]:
    """Return where the index and the tokens are."""
    prefix = prefix.removesuffix(".idx")
    return Path(f"{prefix}.idx"), Path(f"{prefix}.bin")


def _files(prefix: str) -> tuple[Path, Path]:
    paths = _paths(prefix)
    for file in paths:
        _check_file(file)
    files.INPUTS.update(map(os.path.realpath, paths))
    return paths


def _check_file(path: Path) -> None:
    """Raise ValueError unless the file can be mapped; reading a pipe would block."""
    if not path.exists():
        raise ValueError(f"dataset file {path} does not exist; give --data-path the prefix of a .bin/.idx pair")
    if not path.is_file():
        raise ValueError(f"dataset file {path} is a folder, pipe or device; give --data-path files on a disk")


def _check_size(path: Path, binary: Path, needed: int) -> None:
    if (size := binary.stat().st_size) < needed:
        raise ValueError(f"{binary} has {size} bytes, {path} describes {needed}: the file is truncated, build it again")


def _parse(path: Path) -> DocumentIndex:
    """Return the index of `_mapped`, with all of it checked."""
    index = _mapped(path)
    if (index.lengths < 0).any() or (index.pointers < 0).any():
        raise ValueError(f"{path} holds a negative length or pointer: the file is damaged, build it again")
    return index


def _mapped(path: Path) -> DocumentIndex:
    """Return an index of which the header alone is checked."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < _HEADER:
            raise ValueError(
                f"{path} has {size} bytes, its header alone needs {_HEADER}: the file is truncated, build it again"
            )
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)  # once: a blend may have hundreds
    head = mapped[:_HEADER]
    if head[: len(_MAGIC)] != _MAGIC:
        raise ValueError(
            f"{path} is not a Megatron .idx file: it begins with {head[:9]!r}, not {_MAGIC!r}; give one that "
            "preprocess_data.py wrote"
        )
    version, code = int(np.frombuffer(head, "<u8", 1, 9)[0]), head[17]
    sequences, boundaries = (int(n) for n in np.frombuffer(head, "<u8", 2, 18))
    if version != 1 or code not in _ITEM_BYTES:
        raise ValueError(
            f"{path} has version {version} and dtype code {code}; supported: version 1, codes 1 to 8, build it again"
        )
    needed = _HEADER + 12 * sequences + 8 * boundaries
    if size < needed:
        raise ValueError(
            f"{path} has {size} bytes, its header announces {needed}: the file is truncated, build it again"
        )
    if not sequences:
        raise ValueError(f"{path} holds no document; build it again from a non-empty corpus")
    lengths = np.frombuffer(mapped, "<i4", sequences, _HEADER)
    pointers = np.frombuffer(mapped, "<i8", sequences, _HEADER + 4 * sequences)
    return DocumentIndex(lengths=lengths, pointers=pointers, item_bytes=_ITEM_BYTES[code])
