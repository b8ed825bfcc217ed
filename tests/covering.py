"""Covering sets: cases in which every two values of two parameters meet, instead of all combinations."""

from collections.abc import Iterable, Mapping
from typing import Any

import pytest
from allpairspy import AllPairs


def covering(indirect: tuple[str, ...] = (), **values: Mapping[str, Any] | Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrizes a test by a covering set; the keys of a mapping name its values in the ids of cases."""
    named = {name: of if isinstance(of, Mapping) else {_id(name, x): x for x in of} for name, of in values.items()}
    cases = [
        pytest.param(*(of[key] for of, key in zip(named.values(), keys, strict=True)), id="-".join(keys))
        for keys in AllPairs([list(of) for of in named.values()])
    ]
    return pytest.mark.parametrize(tuple(named), cases, indirect=list(indirect))


def _id(name: str, value: Any) -> str:
    return f"{name}={value}" if value is None or isinstance(value, int) else str(value).removeprefix("torch.")
