"""Every kind of input gives the same lengths, and everything broken is named."""

import io
import json
import sys

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from megatron_wlb.cli.lengths import read_lengths
from tests.adapter.datasets import write_index

LENGTHS = [5, 0, 300, 64, 1]


def write_dataset(folder, tokens):
    (folder / "data.bin").write_bytes(bytes(4 * sum(tokens)))
    write_index(folder / "data.idx", np.array(tokens))
    return str(folder / "data")


def write_parquet(path, **columns):
    parquet.write_table(pyarrow.table(columns), path)
    return str(path)


def standard_input(monkeypatch, text):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
    return "-"


def test_all_formats(tmp_path, monkeypatch):
    """Of the tokens of a dataset all but the last are trained."""
    (tmp_path / "x.json").write_text(json.dumps(LENGTHS))
    sources = [tmp_path / "x.json", standard_input(monkeypatch, b" [5,0,\n300, 64,1]\n")]
    for dtype in ("<i8", "<u2", ">i4"):
        np.save(tmp_path / f"{dtype}.npy", np.array(LENGTHS, dtype))
        sources.append(tmp_path / f"{dtype}.npy")
    for kind in (pyarrow.int64(), pyarrow.uint16()):
        columns = {"other": ["a"] * 5, "length": pyarrow.array(LENGTHS, kind)}
        sources.append(write_parquet(tmp_path / f"{kind}.parquet", **columns))
    dataset = write_dataset(tmp_path, [6, 1, 301, 65, 2])
    (tmp_path / "data.bin").unlink()  # not needed
    for source in [*sources, dataset, f"{dataset}.idx"]:
        lengths = read_lengths(str(source))
        assert (lengths.tolist(), lengths.dtype) == (LENGTHS, np.int64)


def refused(source, message):
    with pytest.raises(ValueError, match=message):
        read_lengths(str(source))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1, column 1: not JSON: Expecting value"),
        ("[1, 2,\n 3, oops]", "line 2, column 5: not JSON: Expecting value"),
        ("\udcff", "not a JSON array of integers: .*utf-8"),
        ("[" * 100_000, "not a JSON array of integers"),
        ("[" + "9" * 5000 + "]", "not a JSON array of integers: Exceeds the limit"),
        ('{"length": [1]}', r"holds a JSON dict; give an array of integers, such as \[512, 2048\]"),
        ("[]", "holds no document; give at least one length"),
        ("[0, 0]", "nothing to train: the length of each of its 2 documents is 0"),
        ("[1, -2]", "index 1: -2 trained tokens; a length must be from 0 to 67108864"),
        ("[67108864, 67108865]", "index 1: 67108865 trained tokens; a length must be from 0 to 67108864"),
        ("[1, 2, " + "9" * 50 + "]", "index 2: 9{37}... trained tokens"),
        ("[1, 3.0]", "index 1: 3.0 is not an integer; give trained tokens"),
        ("[1, true]", "index 1: true is not an integer"),
        ("[1, NaN]", "index 1: NaN is not an integer"),
        ("[1, [2]]", r"index 1: \[2\] is not an integer"),
    ],
)
def test_broken_json(tmp_path, monkeypatch, text, message):
    data = text.encode("utf-8", "surrogateescape")
    (tmp_path / "x.json").write_bytes(data)
    refused(tmp_path / "x.json", r"x\.json.*" + message)
    refused(standard_input(monkeypatch, data), "^standard input.*" + message)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.array([1.0, 2.0]), r"holds float64 \[2\]; give one dimension of integers"),
        (np.array([True]), r"holds bool \[1\]"),
        (np.array([[1, 2]]), r"holds int64 \[1, 2\]"),
        (np.array(3), r"holds int64 \[\]"),
        (np.array([1, -1]), "index 1: -1 trained tokens"),
        (np.array([1, 2**64 - 1], np.uint64), "index 1: 18446744073709551615 trained tokens"),
        (np.array([], np.int64), "holds no document"),
        (np.array([{}]), "Object arrays cannot be loaded"),
    ],
)
def test_broken_npy(tmp_path, array, message):
    np.save(tmp_path / "x.npy", array, allow_pickle=True)
    refused(tmp_path / "x.npy", r"x\.npy.*" + message)


def test_damaged_npy(tmp_path):
    path = tmp_path / "x.npy"
    np.save(path, np.arange(100))
    data = path.read_bytes()
    huge = data.replace(b"(100,), }" + b" " * 16, b"(1152921504606846976,), }")
    assert len(huge) == len(data) and huge != data
    for damaged in (huge, *(data[:size] for size in (0, 5, 60, 128, 500))):
        path.write_bytes(damaged)
        refused(path, "is not an .npy file of integers")


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"tokens": [1]}, "has no column 'length', only tokens; rename one"),
        ({"length": [1.5]}, "has a column 'length' of double; give integers, such as int64"),
        ({"length": [True]}, "has a column 'length' of bool"),
        ({"length": [1, None, 3]}, "index 1: the length is null; give an integer"),
        ({"length": [1, 2, -7]}, "index 2: -7 trained tokens"),
        ({"length": pyarrow.array([], pyarrow.int64())}, "holds no document"),
    ],
)
def test_broken_parquet(tmp_path, columns, message):
    refused(write_parquet(tmp_path / "x.parquet", **columns), message)


def test_what_is_no_file_of_its_format(tmp_path):
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 no")
    refused(tmp_path / "bad.parquet", "is not a Parquet file")
    (tmp_path / "data.idx").write_bytes(b"MMIDIDX\x00\x00")
    refused(tmp_path / "data", "the file is truncated")
    for name in ("x.json", "x.npy", "x.parquet"):
        refused(tmp_path / name, f"{name} does not exist or is not a file; give as LENGTHS a Megatron dataset")
    refused(tmp_path / "x.csv", r"x\.csv\.idx does not exist; give as LENGTHS a Megatron dataset")
    (tmp_path / "x.csv").touch()
    refused(tmp_path / "x.csv", r"x\.csv is of another format; give as LENGTHS")
