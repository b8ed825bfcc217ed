"""Reading `.idx` files written by hand: what they mean, and every way in which they can be broken."""

import struct
import tracemalloc

import numpy as np
import pytest

from megatron_wlb.plan import dataset
from megatron_wlb.plan.dataset import TrainedTokens, read_index, read_tokens, trained_tokens

HEADER = 34
"""Magic, version, dtype code, number of sequences, number of document boundaries."""


def write(folder, lengths, boundaries, *, magic=b"MMIDIDX\x00\x00", version=1, code=4, pointers=None, bin_bytes=None):
    """A `.bin/.idx` pair of sequences of `lengths` tokens; documents are [boundaries[i], boundaries[i + 1])."""
    item_bytes = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 8, 7: 4, 8: 2}.get(code, 4)
    if pointers is None:
        pointers = [item_bytes * sum(lengths[:i]) for i in range(len(lengths))]
    index = magic + struct.pack("<QBQQ", version, code, len(lengths), len(boundaries))
    index += struct.pack(f"<{len(lengths)}i", *lengths)
    index += struct.pack(f"<{len(pointers)}q{len(boundaries)}q", *pointers, *boundaries)
    (folder / "data.idx").write_bytes(index)
    (folder / "data.bin").write_bytes(bytes(item_bytes * sum(lengths) if bin_bytes is None else bin_bytes))
    return str(folder / "data")


NOT_COVERED = "has document boundaries that do not cover its 3 sequences in order; build it again$"


def refused(prefix, message):
    with pytest.raises(ValueError, match=message):
        read_index(prefix)


@pytest.mark.parametrize(("code", "item_bytes"), [(1, 1), (2, 1), (3, 2), (4, 4), (5, 8), (6, 8), (7, 4), (8, 2)])
def test_documents_of_one_and_of_several_sequences(tmp_path, code, item_bytes):
    """Empty documents at the start, in the middle and at the end; an empty sequence within a document."""
    index = read_index(write(tmp_path, [3, 1, 4], [0, 1, 2, 3], code=code))
    assert (len(index), index.tokens.tolist(), index.item_bytes) == (3, [3, 1, 4], item_bytes)
    assert index.pointers.tolist() == [0, 3 * item_bytes, 4 * item_bytes]
    index = read_index(write(tmp_path, [3, 1, 0, 4, 2], [0, 0, 2, 2, 4, 5, 5], code=code))
    assert index.tokens.tolist() == [0, 4, 0, 4, 2, 0]
    assert index.pointers[[1, 3, 4]].tolist() == [0, 4 * item_bytes, 8 * item_bytes]


def test_of_an_index_of_one_sequence_a_document_nothing_is_held(tmp_path, monkeypatch):
    """Lengths and pointers stay in the file."""
    monkeypatch.setattr(dataset, "_CHUNK", 1000)
    lengths = np.random.default_rng(0).integers(0, 50, 100_000)
    prefix = write(
        tmp_path, lengths.tolist(), list(range(len(lengths) + 1)), pointers=lengths.cumsum() - lengths, code=1
    )
    tracemalloc.start()
    index = read_index(prefix)
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < len(lengths) / 10
    assert peak < 3 * len(lengths)
    assert index.tokens.tolist() == read_tokens(prefix).tolist() == lengths.tolist()
    assert index.pointers.tolist() == (lengths.cumsum() - lengths).tolist()


def test_fingerprint_names_the_document_lengths_and_tokens(tmp_path):
    def fingerprint(*arguments):
        return read_index(write(tmp_path, *arguments)).fingerprint

    assert fingerprint([3, 1, 4], [0, 1, 2, 3]) == fingerprint([1, 2, 1, 4], [0, 2, 3, 4])
    assert fingerprint([3, 1, 4], [0, 1, 2, 3]) != fingerprint([3, 1, 4], [0, 2, 3])
    assert fingerprint([3, 1, 4], [0, 1, 2, 3]) != fingerprint([1, 3, 4], [0, 1, 2, 3])
    prefix = write(tmp_path, [100_000], [0, 1])
    before = read_index(prefix).fingerprint
    for at in (0, 16 * (400_000 - 4096) // 31 + 99, 399_999):  # in the sample
        tokens = bytearray(400_000)
        tokens[at] = 1
        (tmp_path / "data.bin").write_bytes(tokens)
        assert read_index(prefix).fingerprint != before


def test_a_file_that_is_not_there_and_a_folder(tmp_path):
    prefix = write(tmp_path, [3], [0, 1])
    (tmp_path / "data.bin").unlink()
    refused(f"{prefix}.idx", r"data\.bin does not exist; give --data-path the prefix of a .bin/.idx pair$")
    (tmp_path / "data.idx").unlink()
    refused(prefix, r"data\.idx does not exist; give --data-path the prefix of a .bin/.idx pair$")
    (tmp_path / "data.idx").mkdir()
    with pytest.raises(ValueError, match="data.idx is a folder, pipe or device; give --data-path files on a disk$"):
        read_tokens(str(tmp_path / "data"))


def test_truncated_index(tmp_path):
    prefix = write(tmp_path, [3, 1, 4], [0, 1, 2, 3])
    whole = (tmp_path / "data.idx").read_bytes()
    for size in range(len(whole)):
        (tmp_path / "data.idx").write_bytes(whole[:size])
        announced = f"its header announces {len(whole)}" if size >= HEADER else f"its header alone needs {HEADER}"
        refused(prefix, f"data.idx has {size} bytes, {announced}: the file is truncated, build it again$")


def test_truncated_bin(tmp_path):
    for size in range(32):
        prefix = write(tmp_path, [3, 1, 4], [0, 1, 2, 3], bin_bytes=size)
        refused(prefix, rf"data.bin has {size} bytes, .*data.idx describes 32: the file is truncated, build it again$")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"magic": b"NUMPYIDX\x00"}, "is not a Megatron .idx file: it begins with b'NUMPYIDX"),
        ({"version": 2}, "has version 2 and dtype code 4; supported: version 1, codes 1 to 8, build it again$"),
        ({"code": 0}, "has version 1 and dtype code 0; supported"),
        ({"code": 9}, "has version 1 and dtype code 9; supported"),
        ({"lengths": [3, -1, 4], "bin_bytes": 99}, "holds a negative length or pointer: the file is damaged"),
        ({"pointers": [0, -12, 16]}, "holds a negative length or pointer: the file is damaged"),
        ({"pointers": [0, 2**62, 16]}, f"data.idx describes {2**62 + 4}: the file is truncated"),
        ({"pointers": [0, 2**63 - 1, 16]}, f"data.idx describes {2**63 + 3}: the file is truncated"),
        ({"boundaries": [0, 1, 2]}, NOT_COVERED),
        ({"boundaries": [1, 2, 3]}, NOT_COVERED),
        ({"boundaries": [0, 2, 1, 3]}, NOT_COVERED),
        ({"boundaries": [0, 4, 3]}, NOT_COVERED),
        (
            {"boundaries": [0, 2**63 - 1, -(2**63), -1, 3]},  # whose differences wrap around to positive ones
            NOT_COVERED,
        ),
        ({"boundaries": [0, 2, 3], "pointers": [0, 16, 12]}, "sequences do not follow each other in .*data.bin"),
        ({"lengths": [], "boundaries": [0]}, "holds no document; build it again from a non-empty corpus$"),
        ({"lengths": [], "boundaries": []}, "holds no document; build it again from a non-empty corpus$"),
    ],
)
def test_damaged_index(tmp_path, changes, message):
    refused(write(tmp_path, **({"lengths": [3, 1, 4], "boundaries": [0, 1, 2, 3]} | changes)), message)


def test_the_last_token_of_a_document_is_a_target_only():
    assert trained_tokens(np.array([0, 1, 2, 9], np.int32)).tolist() == [0, 0, 1, 8]
    assert TrainedTokens(np.array([0, 1, 2, 9]))[1:].tolist() == [0, 1, 8]
