"""Shared by commands: argument types, output files, a progress bar, tables."""

import argparse
import base64
import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from megatron_wlb import files

OUTPUTS: set[str] = set()
"""Real paths of the files that are being written."""


def integer(least: int, most: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isascii() or not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} must be an integer from {least} to {most}")
        return int(text)

    return parse


@contextmanager
def writer(output: str | None, flag: str = "--output") -> Iterator[Any]:
    """Open a text file that appears when complete; - is standard output, None none."""
    if output is None:
        yield None
        return
    if output == "-":
        yield sys.stdout
        sys.stdout.flush()
        return
    path = Path(output)
    if path.exists() and not path.is_file():
        with path.open("w") as file:  # a pipe or /dev/null, which must not be replaced
            yield file
        return
    if not path.parent.is_dir():
        raise ValueError(f"{flag} {output}: the folder {path.parent} does not exist; create it or name another")
    if (real := os.path.realpath(path)) in files.INPUTS | OUTPUTS:
        what = "another output" if real in OUTPUTS else "an input"
        raise ValueError(f"{flag} {output} is {what} of this command, too; name another file")
    OUTPUTS.add(real)
    try:
        with files.written(path) as file:
            yield file
    finally:
        OUTPUTS.remove(real)


def write_json(file: Any, entry: dict[str, Any]) -> None:
    if file is not None:
        file.write(json.dumps(entry, indent=1) + "\n")


Advance = Callable[[int], None]


class Begin(Protocol):
    """Begins a stage of some work; `total` is None if its end is not known. Returns the function that advances it."""

    def __call__(self, text: str, total: int | None = None) -> Advance: ...


@contextmanager
def stages(output: str | None) -> Iterator[Begin]:
    """Yield a function that begins a stage, with a bar that rich shows on a free terminal."""
    from rich.console import Console
    from rich.progress import Progress

    shown = sys.stderr.isatty() and not (output == "-" and sys.stdout.isatty())
    with Progress(console=Console(stderr=True), transient=True, disable=not shown) as bar:
        task = bar.add_task("", total=None)

        def begin(text: str, total: int | None = None) -> Advance:
            bar.reset(task, description=text, total=total)
            return lambda amount: bar.advance(task, amount)

        yield begin


@contextmanager
def progress(total: int, output: str | None, text: str) -> Iterator[Advance]:
    """Yield a function that advances a bar."""
    with stages(output) as begin:
        yield begin(text, total)


Rows = list[tuple[str, ...]]
"""Of a table, the first with its titles."""


def console(*outputs: str | None, width: int) -> Any:
    """Return a rich console, of `width` columns if no terminal tells its own.

    Call it before the work, since rich is an extra. Raises ValueError if two outputs are standard output.
    """
    from rich.console import Console

    if outputs.count("-") > 1:
        raise ValueError("two outputs would be mixed on standard output; name a file for one")
    columns = None if sys.stdout.isatty() else width
    return Console(stderr="-" in outputs, highlight=False, markup=False, width=columns)


def show(console: Any, words: Sequence[str], tables: Sequence[Rows]) -> None:
    """Print sentences, of which the first is the verdict, and tables behind that."""
    console.print(words[0], style="bold", soft_wrap=True)
    for rows in tables:
        console.print(table(rows[0], rows[1:]))
    for sentence in words[1:]:
        console.print(f"- {sentence}", soft_wrap=True)


def table(titles: Sequence[str], rows: Sequence[Sequence[str]], bold: Collection[str] = ()) -> Any:
    """Return a table of numbers, and of words in the column without a title; `bold` are first words of rows."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for title in titles:
        table.add_column(Text(title), justify="right" if title else "left", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row), style="bold" if row[0] in bold else "")
    return table


def render(template: Path | str, **values: Any) -> str:
    """Render a template of `templates/`, or a file that extends one; HTML is escaped."""
    import jinja2

    def harmless(value: Any) -> Any:
        """Return text without control characters, as names of files may have."""
        is_text = isinstance(value, str) and not hasattr(value, "__html__")
        return re.sub(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", " ", value) if is_text else value

    file, folder = Path(template), Path(__file__).parent / "templates"
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([file.parent, folder]),
        autoescape=jinja2.select_autoescape(),
        trim_blocks=True,
        finalize=harmless,
    )
    environment.filters["sha256"] = lambda text: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return environment.get_template(file.name).render(**values)
