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


def test_json(tmp_path):
    path = tmp_path / "x.json"
    path.write_text(json.dumps(LENGTHS))
    lengths = read_lengths(str(path))
    assert lengths.tolist() == LENGTHS
    assert lengths.dtype == np.int64


@pytest.mark.parametrize("dtype", ["<i8", "<u2", ">i4"])
def test_npy(tmp_path, dtype):
    np.save(tmp_path / "x.npy", np.array(LENGTHS, dtype))
    lengths = read_lengths(str(tmp_path / "x.npy"))
    assert lengths.tolist() == LENGTHS
    assert lengths.dtype == np.int64


@pytest.mark.parametrize("kind", [pyarrow.int64(), pyarrow.uint16()])
def test_parquet(tmp_path, kind):
    path = write_parquet(tmp_path / "x.parquet", other=["a"] * 5, length=pyarrow.array(LENGTHS, kind))
    assert read_lengths(path).tolist() == LENGTHS


def test_standard_input(monkeypatch):
    assert read_lengths(standard_input(monkeypatch, b" [5,0,\n300, 64,1]\n")).tolist() == LENGTHS


@pytest.mark.parametrize("suffix", ["", ".idx"])
def test_of_the_tokens_of_a_dataset_all_but_the_last_are_trained(tmp_path, suffix):
    assert read_lengths(write_dataset(tmp_path, [6, 1, 301, 65, 0, 2]) + suffix).tolist() == [5, 0, 300, 64, 0, 1]


def refused(source, message):
    with pytest.raises(ValueError, match=message):
        read_lengths(source)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1, column 1: not JSON: Expecting value"),
        ("[1, 2,\n 3, oops]", "line 2, column 5: not JSON: Expecting value"),
        ("[1, 2", "line 1, column 6: not JSON: Expecting ',' delimiter"),
        ("\udcff".encode("utf-8", "surrogateescape"), "not a JSON array of integers: .*utf-8"),
        ("[" * 100_000, "not a JSON array of integers"),
        ("[" + "9" * 5000 + "]", "not a JSON array of integers: Exceeds the limit"),
        ('{"length": [1]}', r"holds a JSON dict; give an array of integers, such as \[512, 2048\]"),
        ("[]", "holds no document; give at least one length"),
        ("[0, 0]", "nothing to train: the length of each of its 2 documents is 0"),
        ("[1, -2]", "index 1: -2 trained tokens; a length must be from 0 to 67108864"),
        ("[67108864, 67108865]", "index 1: 67108865 trained tokens; a length must be from 0 to 67108864"),
        ("[1, 2, " + "9" * 50 + "]", "index 2: 9{37}... trained tokens"),
        ("[3.5]", "index 0: 3.5 is not an integer; give trained tokens"),
        ("[1, 3.0]", "index 1: 3.0 is not an integer"),
        ("[1, true]", "index 1: true is not an integer"),
        ("[1, null]", "index 1: null is not an integer"),
        ("[1, NaN]", "index 1: NaN is not an integer"),
        ('[1, "2"]', 'index 1: "2" is not an integer'),
        ("[1, [2]]", r"index 1: \[2\] is not an integer"),
    ],
)
def test_broken_json(tmp_path, monkeypatch, text, message):
    data = text if isinstance(text, bytes) else text.encode()
    (tmp_path / "x.json").write_bytes(data)
    refused(str(tmp_path / "x.json"), r"x\.json.*" + message)
    refused(standard_input(monkeypatch, data), "^standard input.*" + message)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.array([1.0, 2.0]), r"holds float64 \[2\]; give one dimension of integers"),
        (np.array([True]), r"holds bool \[1\]; give one dimension of integers"),
        (np.array([[1, 2]]), r"holds int64 \[1, 2\]; give one dimension of integers"),
        (np.array(3), r"holds int64 \[\]; give one dimension of integers"),
        (np.array([1, -1]), "index 1: -1 trained tokens"),
        (np.array([1, 2**64 - 1], np.uint64), "index 1: 18446744073709551615 trained tokens"),
        (np.array([], np.int64), "holds no document"),
    ],
)
def test_broken_npy(tmp_path, array, message):
    np.save(tmp_path / "x.npy", array)
    refused(str(tmp_path / "x.npy"), r"x\.npy.*" + message)


def test_damaged_npy(tmp_path):
    path = tmp_path / "x.npy"
    np.save(path, np.arange(100))
    data = path.read_bytes()
    for size in (0, 5, 60, 128, 500):
        path.write_bytes(data[:size])
        refused(str(path), "is not an .npy file of integers")
    np.save(path, np.array([{}]), allow_pickle=True)
    refused(str(path), "Object arrays cannot be loaded")
    huge = data.replace(b"(100,), }" + b" " * 16, b"(1152921504606846976,), }")
    assert len(huge) == len(data) and huge != data
    path.write_bytes(huge)
    refused(str(path), "is not an .npy file of integers")


def test_broken_parquet(tmp_path):
    path = tmp_path / "x.parquet"
    path.write_bytes(b"PAR1 no")
    refused(str(path), "is not a Parquet file")
    refused(write_parquet(path, tokens=[1]), "has no column 'length', only tokens; rename one")
    refused(write_parquet(path, length=[1.5]), "has a column 'length' of double; give integers, such as int64")
    refused(write_parquet(path, length=[True]), "has a column 'length' of bool")
    refused(write_parquet(path, length=[1, None, 3]), "index 1: the length is null; give an integer")
    refused(write_parquet(path, length=[1, 2, -7]), "index 2: -7 trained tokens")
    refused(write_parquet(path, length=pyarrow.array([], pyarrow.int64())), "holds no document")


def test_parquet_without_pyarrow(tmp_path, monkeypatch):
    path = write_parquet(tmp_path / "x.parquet", length=[1])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ModuleNotFoundError, match="pyarrow"):
        read_lengths(path)


@pytest.mark.parametrize("name", ["x.json", "x.npy", "x.parquet"])
def test_missing_file(tmp_path, name):
    refused(str(tmp_path / name), f"{name} does not exist or is not a file; give as LENGTHS a Megatron dataset")


def test_broken_dataset(tmp_path):
    refused(str(tmp_path / "x.csv"), r"x\.csv\.idx does not exist; give as LENGTHS a Megatron dataset")
    prefix = write_dataset(tmp_path, [3, 4])
    (tmp_path / "data.bin").unlink()
    assert read_lengths(prefix).tolist() == [2, 3]
    (tmp_path / "data.idx").write_bytes(b"MMIDIDX\x00\x00")
    refused(prefix, "the file is truncated")
