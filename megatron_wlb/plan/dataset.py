"""Document lengths of a Megatron `.bin/.idx` dataset, without torch or megatron.

The usual index, one sequence per document, stays mapped, and is processed in chunks.
"""

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_wlb import files

_MAGIC = b"MMIDIDX\x00\x00"
_ITEM_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 8, 7: 4, 8: 2}  # dtype codes of the format
_CHUNK = 1 << 20
_SAMPLES, _SAMPLE_BYTES = 32, 4096
"""Parts of a `.bin` file that its fingerprint covers, and bytes of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentIndex:
    """Document lengths of a dataset, and where documents begin in its `.bin` file."""

    prefix: str
    tokens: np.ndarray
    """Tokens of each document, int32 or int64 [documents]."""
    pointers: np.ndarray
    """First byte of each document in the `.bin` file, int64 [documents]."""
    item_bytes: int
    bytes: int
    """Size of the `.bin` file."""
    fingerprint: str
    """Digest of the lengths, of the size of the `.bin` file and of a sample of it."""

    def __len__(self) -> int:
        return len(self.tokens)


def read_index(prefix: str) -> DocumentIndex:
    """Read `PREFIX.idx` and check it against `PREFIX.bin`.

    Raises ValueError if a file is missing, truncated, of another format, inconsistent, or without a document.
    """
    prefix = prefix.removesuffix(".idx")
    path, binary = Path(prefix + ".idx"), Path(prefix + ".bin")
    for file in (path, binary):
        _check_file(file)
    lengths, pointers, documents, item_bytes = _parse(path)
    tokens = _tokens(path, lengths, documents)
    # Unsigned: a damaged pointer near 2^63 must not wrap around to a small one.
    stops = (pointers[c].view("<u8") + lengths[c].astype("<u8") * item_bytes for c in _chunks(len(lengths)))
    needed = max((int(stop.max()) for stop in stops), default=0)
    if (size := binary.stat().st_size) < needed:
        raise ValueError(f"{binary} has {size} bytes, {path} describes {needed}: the file is truncated, build it again")
    begins = pointers
    if tokens is not lengths:
        inside = np.ones(len(lengths), bool)
        inside[documents[1:-1][documents[1:-1] < len(lengths)]] = inside[:1] = False
        gaps = pointers[1:] != pointers[:-1] + lengths[:-1].astype(np.int64) * item_bytes
        if (gaps & inside[1:]).any():
            raise ValueError(
                f"{path} has a document whose sequences do not follow each other in {binary}; build it again"
            )
        # A trailing empty document begins no sequence; its pointer may have any value.
        begins = np.concatenate((pointers, [needed]))[documents[:-1]]
    digest = hashlib.blake2b(digest_size=16)
    for c in _chunks(len(tokens)):
        digest.update(tokens[c].astype("<i8"))
    digest.update(repr((size, item_bytes)).encode())
    with binary.open("rb") as sampled:
        for begin in np.linspace(0, max(0, size - _SAMPLE_BYTES), _SAMPLES).astype(int).tolist():
            sampled.seek(begin)
            digest.update(sampled.read(_SAMPLE_BYTES))
    return DocumentIndex(
        prefix=prefix,
        tokens=tokens,
        pointers=begins,
        item_bytes=item_bytes,
        bytes=size,
        fingerprint=digest.hexdigest(),
    )


def read_tokens(prefix: str) -> np.ndarray:
    """Tokens of each document, int64 [documents], from `PREFIX.idx` alone.

    Raises ValueError as `read_index`, but for what only the `.bin` file shows.
    """
    path = Path(prefix.removesuffix(".idx") + ".idx")
    _check_file(path)
    lengths, _, documents, _ = _parse(path)
    return _tokens(path, lengths, documents).astype(np.int64, copy=False)


def trained_tokens(tokens: Any) -> Any:
    """Return the trained tokens of documents: the last one is only a target."""
    return np.maximum(tokens - 1, 0)


class TrainedTokens:
    """Trained tokens computed on access; `tokens`, int32 [documents], may stay mapped."""

    def __init__(self, tokens: np.ndarray) -> None:
        self._tokens = tokens

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, rows: Any) -> Any:
        return trained_tokens(self._tokens[rows])


def _check_file(path: Path) -> None:
    """Raise ValueError unless the file can be mapped; reading a pipe would block."""
    if not path.exists():
        raise ValueError(f"dataset file {path} does not exist; give --data-path the prefix of a .bin/.idx pair")
    if not path.is_file():
        raise ValueError(f"dataset file {path} is a folder, pipe or device; give --data-path files on a disk")


def _tokens(path: Path, lengths: np.ndarray, documents: np.ndarray) -> np.ndarray:
    """Tokens of each document; `lengths` itself if every document is one sequence."""
    if len(documents) < 2:
        raise ValueError(f"{path} holds no document; build it again from a non-empty corpus")
    # The most distinct boundaries that there can be: every document is one sequence.
    if len(documents) == len(lengths) + 1 and (documents[1:] > documents[:-1]).all():
        return lengths
    ends = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
    tokens: np.ndarray = np.diff(ends[documents])
    return tokens


def _chunks(size: int) -> Iterator[slice]:
    return (slice(begin, begin + _CHUNK) for begin in range(0, size, _CHUNK))


def _parse(path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Return sequence lengths, pointers, document boundaries, and bytes per token."""
    files.INPUTS.update(os.path.realpath(path.with_suffix(suffix)) for suffix in (".idx", ".bin"))
    size = path.stat().st_size
    header = len(_MAGIC) + 8 + 1 + 8 + 8
    with path.open("rb") as file:
        head = file.read(header)
    if len(head) < header:
        raise ValueError(
            f"{path} has {size} bytes, its header alone needs {header}: the file is truncated, build it again"
        )
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
    needed = header + 12 * sequences + 8 * boundaries
    if size < needed:
        raise ValueError(
            f"{path} has {size} bytes, its header announces {needed}: the file is truncated, build it again"
        )
    lengths = np.memmap(path, "<i4", "r", header, (sequences,)) if sequences else np.empty(0, "<i4")
    pointers = np.memmap(path, "<i8", "r", header + 4 * sequences, (sequences,)) if sequences else np.empty(0, "<i8")
    documents = (
        np.memmap(path, "<i8", "r", header + 12 * sequences, (boundaries,)) if boundaries else np.empty(0, "<i8")
    )
    if (lengths < 0).any() or (pointers < 0).any():
        raise ValueError(f"{path} holds a negative length or pointer: the file is damaged, build it again")
    if boundaries and (documents[0] != 0 or documents[-1] != sequences or (documents[1:] < documents[:-1]).any()):
        raise ValueError(
            f"{path} has document boundaries that do not cover its {sequences} sequences in order; build it again"
        )
    return np.asarray(lengths), np.asarray(pointers), np.asarray(documents), _ITEM_BYTES[code]
