"""How a table of errors is written: what must be said, and a call that makes the project say it."""

import contextlib
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from megatron_wlb.cli.main import main


class At(NamedTuple):
    """What a call may use."""

    folder: Path
    patch: pytest.MonkeyPatch


Case = tuple[str, Callable[[At], Any]]
"""A whole message and what raises it. In the message, the first <...> is the value that was given, others are limits,
and … stands for what differs from run to run."""


def plain(message: str) -> str:
    """Without marks."""
    return re.sub(r"<(.+?)>", r"\1", message)


def value_of(message: str) -> slice:
    """Where in `plain(message)` the value is."""
    begin, end = message.index("<"), message.index(">")
    return slice(begin, end - 1)


def said(call: Callable[[At], Any], at: At) -> str:
    """What `call` raises or, since commands catch their errors, the last line that it prints on standard error."""
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed):
        try:
            call(at)
        except SystemExit:
            pass
        except Exception as error:
            return str(error)
    return printed.getvalue().strip().split("\n")[-1]


def command(words: str, files: dict[str, Any] | None = None) -> Callable[[At], int]:
    """Runs `megatron-wlb` on files of these names, texts or JSON; {} in `words` is their folder."""

    def call(at: At) -> int:
        for name, content in (files or {}).items():
            (at.folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
        return main(words.replace("{}", str(at.folder)).split())

    return call


def cause(call: Callable[[], Any]) -> None:
    """Raises the cause of what `call` raises."""
    try:
        call()
    except Exception as error:
        raise error.__cause__ or error from None
