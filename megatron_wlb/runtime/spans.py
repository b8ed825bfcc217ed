"""Spans of attention and of its exchange, for who names or times them."""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Literal

Name = Literal["attention", "attention backward", "exchange"]
Span = Callable[[Name], AbstractContextManager[None]]


def _unwatched(name: Name) -> AbstractContextManager[None]:
    return contextlib.nullcontext()


_watching: list[Span] = [_unwatched]


def span(name: Name) -> AbstractContextManager[None]:
    """Enter while attention of a part runs, or a rank waits for the exchange."""
    return _watching[-1](name)


@contextlib.contextmanager
def watched(by: Span) -> Iterator[None]:
    """Inside, every span is entered `by` this."""
    _watching.append(by)
    try:
        yield
    finally:
        _watching.pop()
