"""Reading `.idx` files written by hand: what they mean, and every way in which they can be broken."""

import os
import re
import struct
import tracemalloc

import numpy as np
import pytest

from megatron_wlb.plan import dataset
from megatron_wlb.plan.dataset import check_index, read_index, read_lengths, suspicious_layout

HEADER = 34
"""Magic, version, dtype code, number of sequences, number of document boundaries."""


def write(folder, lengths, boundaries=(), *, magic=b"MMIDIDX\x00\x00", version=1, code=4, pointers=None, size=None):
    """A `.bin/.idx` pair of sequences of `lengths` tokens; `size`: bytes of the `.bin` file."""
    item_bytes = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 8, 7: 4, 8: 2}.get(code, 4)
    if pointers is None:
        pointers = [item_bytes * sum(lengths[:i]) for i in range(len(lengths))]
    index = magic + struct.pack("<QBQQ", version, code, len(lengths), len(boundaries))
    index += struct.pack(f"<{len(lengths)}i", *lengths)
    index += struct.pack(f"<{len(pointers)}q{len(boundaries)}q", *pointers, *boundaries)
    (folder / "data.idx").write_bytes(index)
    (folder / "data.bin").write_bytes(bytes(item_bytes * sum(lengths) if size is None else size))
    return str(folder / "data")


def refused(prefix, message, readers=(read_index, check_index)):
    for read in readers:
        with pytest.raises(ValueError, match=message):
            read(prefix)


@pytest.mark.parametrize(("code", "item_bytes"), [(1, 1), (2, 1), (3, 2), (4, 4), (5, 8), (6, 8), (7, 4), (8, 2)])
def test_a_document_is_a_sequence_however_many_make_one_of_upstreams(tmp_path, code, item_bytes):
    prefix = write(tmp_path, [3, 1, 0, 4, 2], [0, 0, 2, 2, 4, 5, 5], code=code)
    index = read_index(f"{prefix}.idx")
    assert (check_index(prefix), index.item_bytes) == (5, item_bytes)
    assert index.lengths.tolist() == read_lengths(prefix).tolist() == [3, 1, 0, 4, 2]
    assert index.pointers.tolist() == [place * item_bytes for place in (0, 3, 4, 4, 8)]


def test_of_an_index_nothing_is_held(tmp_path, monkeypatch):
    """Lengths and pointers stay in the file."""
    monkeypatch.setattr(dataset, "_CHUNK", 1000)
    lengths = np.random.default_rng(0).integers(0, 50, 100_000)
    prefix = write(tmp_path, lengths.tolist(), pointers=lengths.cumsum() - lengths, code=1)
    tracemalloc.start()
    index = read_index(prefix)
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < len(lengths) / 10
    assert peak < 3 * len(lengths)
    assert index.lengths.tolist() == lengths.tolist()


def test_an_index_holds_one_descriptor(tmp_path):
    """A blend may have hundreds."""
    prefix = write(tmp_path, [3, 1])
    before = len(os.listdir("/proc/self/fd"))
    held = [read_index(prefix) for _ in range(8)]
    assert len(os.listdir("/proc/self/fd")) == before + len(held)


def test_a_file_that_is_not_there_and_a_folder(tmp_path):
    prefix = write(tmp_path, [3])
    (tmp_path / "data.bin").unlink()
    refused(f"{prefix}.idx", r"data\.bin does not exist; give --data-path the prefix of a .bin/.idx pair$")
    assert read_lengths(prefix).tolist() == [3]
    (tmp_path / "data.idx").unlink()
    every = (read_index, check_index, read_lengths)
    refused(prefix, r"data\.idx does not exist; give --data-path the prefix of a .bin/.idx pair$", every)
    (tmp_path / "data.idx").mkdir()
    refused(prefix, "data.idx is a folder, pipe or device; give --data-path files on a disk$", every)


def test_truncated_index(tmp_path):
    prefix = write(tmp_path, [3, 1, 4], [0, 1, 2, 3])
    whole = (tmp_path / "data.idx").read_bytes()
    for size in range(len(whole)):
        (tmp_path / "data.idx").write_bytes(whole[:size])
        announced = f"its header announces {len(whole)}" if size >= HEADER else f"its header alone needs {HEADER}"
        message = f"data.idx has {size} bytes, {announced}: the file is truncated, build it again$"
        refused(prefix, message, (read_index, check_index, read_lengths))


def test_truncated_bin(tmp_path):
    for size in range(32):
        prefix = write(tmp_path, [3, 1, 4], size=size)
        refused(prefix, rf"data.bin has {size} bytes, .*data.idx describes 32: the file is truncated, build it again$")


SHOWN_BY_THE_WHOLE = [
    ({"lengths": [3, -1, 4], "size": 99}, "holds a negative length or pointer: the file is damaged"),
    ({"pointers": [0, -12, 16]}, "holds a negative length or pointer: the file is damaged"),
    ({"pointers": [0, 2**63 - 1, 16]}, f"data.idx describes {2**63 + 3}: the file is truncated"),
]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"magic": b"NUMPYIDX\x00"}, "is not a Megatron .idx file: it begins with b'NUMPYIDX"),
        ({"version": 2}, "has version 2 and dtype code 4; supported: version 1, codes 1 to 8, build it again$"),
        ({"code": 0}, "has version 1 and dtype code 0; supported"),
        ({"code": 9}, "has version 1 and dtype code 9; supported"),
        ({"pointers": [0, 12, 2**62]}, f"data.idx describes {2**62 + 16}: the file is truncated"),
        ({"pointers": [0, 12, 2**63 - 1]}, f"data.idx describes {2**63 + 15}: the file is truncated"),
        ({"lengths": []}, "holds no document; build it again from a non-empty corpus$"),
        *SHOWN_BY_THE_WHOLE,
    ],
)
def test_damaged_index(tmp_path, changes, message):
    prefix = write(tmp_path, **{"lengths": [3, 1, 4]} | changes)
    if is_hidden := (changes, message) in SHOWN_BY_THE_WHOLE:
        check_index(prefix)
    refused(prefix, message, (read_index,) if is_hidden else (read_index, check_index))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, []),
        ({"pointers": [0, 12, 12, 16]}, []),
        ({"size": 999}, [r"data.bin has 999 bytes, and .*data.idx describes the first 32; rebuild it unless this is"]),
        (
            {"pointers": [0, 12, 4]},
            [
                r"1 of 2 documents of .*data.idx do not begin .* first: document 2 at byte 4, where .* ends at 16\)",
                "20",
            ],
        ),
        ({"pointers": [0, 8, 12]}, [r"1 of 2 documents of .* \(the first: document 1 at byte 8, .* ends at 12", "28"]),
        ({"pointers": [8, 20, 24], "size": 40}, []),
        ({"pointers": [0, 20, 24], "size": 40}, ["1 of 2 documents of "]),
    ],
)
def test_what_is_legal_and_seldom_meant_is_said_with_its_numbers(tmp_path, monkeypatch, changes, said):
    monkeypatch.setattr(dataset, "_LOOKED_AT", 1)  # in blocks
    lengths = [3, 0, 1, 4] if len(changes.get("pointers", ())) == 4 else [3, 1, 4]
    found = suspicious_layout(write(tmp_path, **{"lengths": lengths} | changes))
    assert len(found) == len(said) and all(map(re.search, said, found))
