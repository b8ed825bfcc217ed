"""Small `.bin/.idx` datasets, written by hand so that the tests do not depend on what they test."""

import struct
from pathlib import Path

import numpy as np

VOCABULARY, EOD = 251, 254


def write_index(path: Path, lengths: np.ndarray) -> None:
    """One sequence a document, int32 tokens (dtype code 4)."""
    pointers = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)[:-1])) * 4
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, len(lengths), len(lengths) + 1)
    boundaries = np.arange(len(lengths) + 1, dtype=np.int64)
    path.write_bytes(
        header + lengths.astype(np.int32).tobytes() + pointers.astype(np.int64).tobytes() + boundaries.tobytes()
    )


def write_dataset(prefix: Path, *, seed: int, documents: int) -> str:
    """Random tokens; log-normal lengths with a long tail, some of 0, 1 and 2 tokens. Returns the prefix."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(3.8, 1.2, documents).astype(np.int64) + 2, 2, 700)
    lengths[:3] = (0, 1, 2)
    return write_lengths(prefix, lengths, rng)


def write_lengths(prefix: Path, lengths: np.ndarray, rng: np.random.Generator | None = None) -> str:
    """Random tokens, the last of each document EOD. Returns the prefix."""
    rng = rng or np.random.default_rng(0)
    tokens = rng.integers(0, VOCABULARY, int(lengths.sum()), dtype=np.int32)
    tokens[np.cumsum(lengths)[lengths > 0] - 1] = EOD
    prefix.with_suffix(".bin").write_bytes(tokens.tobytes())
    write_index(prefix.with_suffix(".idx"), lengths)
    return str(prefix)
