"""Steps of a run as files hold them, one JSON object a line."""

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from megatron_wlb.cli.common import short
from megatron_wlb.job import MAX_TOKENS


def parse_lines[T](file: Iterable[bytes], name: str, remedy: str, parse: Callable[[dict[str, Any]], T]) -> Iterator[T]:
    """What `parse` makes of every line of a file of JSON objects.

    Raises ValueError, naming the line, for anything else and for what `parse` refuses with a ValueError.
    """
    for number, line in enumerate(file, start=1):
        try:
            parsed = parse(_object(line))
        except ValueError as error:
            raise ValueError(f"{name}, line {number}: {error}; {remedy}") from error
        yield parsed


def _object(line: bytes) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:  # not UTF-8, thousands of digits, thousands of brackets
        raise ValueError(f"not JSON ({str(error).split(': line')[0]})") from error
    if not isinstance(entry, dict):
        raise ValueError(f"a JSON {type(entry).__name__}, where an object should be")
    return entry


def lengths_of(values: Any, i: int, longest: int, max_tokens: int = MAX_TOKENS) -> np.ndarray:
    """Lengths of the documents of micro-batch `i` from JSON, int64 [n].

    Raises ValueError for one that is not an integer from 1 to `longest`, and for more than `max_tokens` together.
    """
    if not isinstance(values, list):
        raise ValueError(f"micro-batch {i} is not a list of lengths but {short(json.dumps(values))}")
    for value in values:
        if type(value) is not int or not 1 <= value <= longest:  # bool is a subclass of int
            raise ValueError(
                f"micro-batch {i} has a document of length {short(json.dumps(value))}; it must be from 1 to {longest}"
            )
    if sum(values) > max_tokens:
        raise ValueError(f"micro-batch {i} holds {sum(values)} tokens; it must be at most {max_tokens}")
    return np.array(values, np.int64)
