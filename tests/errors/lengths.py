"""Errors of document lengths that commands read."""

import numpy as np

from megatron_wlb.cli.lengths import read_lengths
from tests.cli.test_lengths import write_parquet
from tests.errors.case import At, Case


def lengths(name, content):
    """Of a file of bytes, an array, or columns."""

    def call(at: At):
        path = at.folder / name
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif isinstance(content, dict):
            write_parquet(path, **content)
        elif content is not None:
            np.save(path, content)
        read_lengths(str(path))

    return call


CASES: list[Case] = [
    (
        "<…x.json> does not exist or is not a file; give as LENGTHS a Megatron dataset (prefix or .idx), an .npy …",
        lengths("x.json", None),
    ),
    (
        "<…x.idx> does not exist; give as LENGTHS a Megatron dataset (prefix or .idx), an .npy …",
        lengths("x", None),
    ),
    (
        "…x.json, line <1>, column <6>: not JSON: Expecting ',' delimiter; give an array of integers",
        lengths("x.json", b"[1, 2"),
    ),
    (
        "<…x.json> is not a JSON array of integers: …; give one, such as [512, 2048]",
        lengths("x.json", b"[" * 100_000),
    ),
    ("…x.json holds a JSON <dict>; give an array of integers, such as [512, 2048]", lengths("x.json", b"{}")),
    ("…x.json, index 0: <3.5> is not an integer; give trained tokens", lengths("x.json", b"[3.5]")),
    (
        "…x.json, index 1: <-2> trained tokens; a length must be from <0 to 67108864>",
        lengths("x.json", b"[1, -2]"),
    ),
    ("<…x.json> holds no document; give at least <one> length", lengths("x.json", b"[]")),
    (
        "…x.json has nothing to train: the length of each of its <2> documents is <0>; give longer ones",
        lengths("x.json", b"[0, 0]"),
    ),
    ("<…x.npy> is not an .npy file of integers: …; write it by numpy.save", lengths("x.npy", b"")),
    (
        "…x.npy holds <float64 [1]>; give one dimension of integers, as int64 [documents]",
        lengths("x.npy", np.array([1.0])),
    ),
    ("…x.parquet has no column 'length', only <tokens>; rename one", lengths("x.parquet", {"tokens": [1]})),
    (
        "…x.parquet has a column 'length' of <double>; give integers, such as int64",
        lengths("x.parquet", {"length": [1.5]}),
    ),
    ("<…x.parquet> is not a Parquet file: …; give one with a column 'length'", lengths("x.parquet", b"PAR1 no")),
    (
        "…x.parquet, index <1>: the length is null; give an integer",
        lengths("x.parquet", {"length": [1, None]}),
    ),
]
