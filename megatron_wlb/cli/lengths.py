"""Document lengths from files and standard input, checked to the last one."""

import json
import sys
from pathlib import Path

import numpy as np

from megatron_wlb.cli.common import short
from megatron_wlb.job import MAX_TOKENS
from megatron_wlb.plan.dataset import read_tokens, trained_tokens

FORMATS = (
    "a Megatron dataset (prefix or .idx), an .npy file, a .json file (array of integers), a .parquet file (column "
    "'length'), or - for a JSON array on standard input"
)


def read_lengths(source: str) -> np.ndarray:
    """Trained tokens of every document of `source` (one of `FORMATS`), in file order: int64 [documents], >= 0.

    A document of T tokens in a Megatron dataset trains T - 1 of them, none if T is 0; all other formats hold trained
    tokens already. Raises ValueError, naming line or index, for anything but integers from 0 to MAX_TOKENS, for no
    document, and for documents that all have nothing to train; ModuleNotFoundError for .parquet without pyarrow.
    """
    name = "standard input" if source == "-" else source
    suffix = Path(source).suffix
    if source == "-":
        lengths = _json(sys.stdin.buffer.read(), name)
    elif suffix in _READERS:
        if not Path(source).is_file():
            raise ValueError(f"{source} does not exist or is not a file; give as LENGTHS {FORMATS}")
        lengths = _READERS[suffix](Path(source))
    else:
        lengths = _dataset(source)
    return _checked(lengths, name)


def _json(text: bytes, name: str) -> np.ndarray:
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{name}, line {error.lineno}, column {error.colno}: not JSON: {error.msg}; give an array of integers"
        ) from error
    except (ValueError, RecursionError) as error:  # not UTF-8, thousands of digits, thousands of brackets
        raise ValueError(f"{name} is not a JSON array of integers: {error}; give one, such as [512, 2048]") from error
    if not isinstance(values, list):
        raise ValueError(f"{name} holds a JSON {type(values).__name__}; give an array of integers, such as [512, 2048]")
    for i, value in enumerate(values):
        if type(value) is not int:  # bool is a subclass of int
            raise ValueError(f"{name}, index {i}: {short(json.dumps(value))} is not an integer; give trained tokens")
        if not 0 <= value <= MAX_TOKENS:
            raise _out_of_range(name, i, value)
    return np.array(values, np.int64)


def _npy(path: Path) -> np.ndarray:
    try:
        with path.open("rb") as file:
            values = np.lib.format.read_array(file, allow_pickle=False)
    except Exception as error:  # of a damaged header NumPy raises what Python's tokenizer does, MemoryError for a shape
        raise ValueError(f"{path} is not an .npy file of integers: {error}; write it by numpy.save") from error
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise ValueError(
            f"{path} holds {values.dtype} {list(values.shape)}; give one dimension of integers, as int64 [documents]"
        )
    return values


def _parquet(path: Path) -> np.ndarray:
    import pyarrow  # an extra; `main` says which
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            schema = file.schema_arrow
            if "length" not in schema.names:
                raise ValueError(f"{path} has no column 'length', only {', '.join(schema.names) or 'none'}; rename one")
            kind = schema.field("length").type
            if not pyarrow.types.is_integer(kind):
                raise ValueError(f"{path} has a column 'length' of {kind}; give integers, such as int64")
            column = file.read(columns=["length"]).column("length")
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path} is not a Parquet file: {error}; give one with a column 'length'") from error
    if column.null_count:
        index = int(np.flatnonzero(column.is_null().to_numpy())[0])
        raise ValueError(f"{path}, index {index}: the length is null; give an integer")
    return column.to_numpy()


def _dataset(source: str) -> np.ndarray:
    file = Path(source.removesuffix(".idx") + ".idx")
    if not file.is_file():
        missing = f"{source} is of another format" if Path(source).is_file() else f"{file} does not exist"
        raise ValueError(f"{missing}; give as LENGTHS {FORMATS}")
    return trained_tokens(read_tokens(source))


_READERS = {".json": lambda path: _json(path.read_bytes(), str(path)), ".npy": _npy, ".parquet": _parquet}


def _checked(lengths: np.ndarray, name: str) -> np.ndarray:
    wrong = np.flatnonzero((lengths < 0) | (lengths > MAX_TOKENS))
    if len(wrong):
        raise _out_of_range(name, int(wrong[0]), int(lengths[wrong[0]]))
    if not len(lengths):
        raise ValueError(f"{name} holds no document; give at least one length")
    if not lengths.any():
        raise ValueError(
            f"{name} has nothing to train: the length of each of its {len(lengths)} documents is 0; give longer ones"
        )
    return lengths.astype(np.int64)


def _out_of_range(name: str, index: int, value: int) -> ValueError:
    return ValueError(
        f"{name}, index {index}: {short(str(value))} trained tokens; a length must be from 0 to {MAX_TOKENS}"
    )
