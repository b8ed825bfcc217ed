"""Settings, each defined once, with default and checks; flags follow."""

import argparse
import re
from collections.abc import Callable
from dataclasses import field, fields
from shlex import quote
from typing import Any, Self

import numpy as np


def setting(
    default: Any,
    help: str,
    *,
    parse: Callable[[str], Any] = str,
    choices: tuple[str, ...] = (),
    least: float | None = None,
    most: float | None = None,
    word: str | None = None,
) -> Any:
    """Return a field of a `Settings` dataclass, with the `help` of its flag.

    A default of None follows from something else, which `help` names; False makes a switch. Values are of `choices`, or
    from `least` to `most`, or `word`. `parse` converts the text of a flag.
    """
    return field(default=default, metadata={k: v for k, v in locals().items() if k != "default"})


class Settings:
    """Base of dataclasses with `setting` fields. Raises ValueError out of range."""

    __slots__ = ()

    def __post_init__(self) -> None:
        plain(self)
        for f in fields(self):  # type: ignore[arg-type]
            value = getattr(self, f.name)
            if value == "":  # of a variable that is not set
                raise ValueError(f"{flag(f.name)} is empty; give a value, or leave the flag out")
            choices, least, most = (f.metadata.get(key) for key in ("choices", "least", "most"))
            if choices and value not in choices:
                raise ValueError(f"{flag(f.name)} is {value!r}; choose one of {', '.join(choices)}")
            if least is None or most is None or value is None or value == f.metadata["word"]:
                continue
            if not isinstance(value, int | float) or not least <= value <= most:
                raise ValueError(f"{flag(f.name)} is {value!r}; it must be from {least} to {most}")
        self.check()

    def check(self) -> None:
        """Check what ranges and choices cannot express; raises ValueError."""

    @classmethod
    def add_flags(cls, group: Any) -> None:
        """Add a flag for every setting."""
        for f in fields(cls):  # type: ignore[arg-type]
            text = f.metadata["help"].replace("%", "%%")
            if f.default is False:
                group.add_argument(flag(f.name), action="store_true", help=text)
                continue
            text += "" if f.default is None else f" Default: {f.default}."
            choices = f"{{{','.join(f.metadata['choices'])}}}" if f.metadata["choices"] else None
            options = {"type": f.metadata["parse"], "default": f.default, "metavar": choices, "help": text}
            group.add_argument(flag(f.name), **options)

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> Self:
        """Build the settings from parsed flags. Raises ValueError out of range."""
        return cls(**{f.name: getattr(args, f"wlb_{f.name}") for f in fields(cls)})  # type: ignore[arg-type]


def plain(described: Any) -> None:
    """Make Python's numbers of NumPy's in a frozen dataclass: JSON takes no others, and ranks compare their `repr`."""
    for f in fields(described):
        if isinstance(value := getattr(described, f.name), np.generic):
            object.__setattr__(described, f.name, value.item())


def flag(name: str) -> str:
    """Return the flag of a setting."""
    return f"--wlb-{name.replace('_', '-')}"


def flag_with_value(name: str, value: Any) -> str:
    """Format a setting as on a command line."""
    if value is True:
        return flag(name)
    return f"{flag(name)} {quote(','.join(map(str, value)) if isinstance(value, tuple) else str(value))}"


def integers(text: str, most: int | None = None) -> tuple[int, ...]:
    """Parse comma-separated integers, at most `most` of them. Raises ValueError."""
    parts = text.split(",")
    if not all(re.fullmatch(r"-?\d{1,18}", part) for part in parts) or (most is not None and len(parts) > most):
        raise ValueError(f"{text!r} must be {'an integer' if most == 1 else 'integers, such as 32768,65536'}")
    return tuple(map(int, parts))


def integer_or_auto(text: str) -> int | str:
    """Parse an integer or the word auto."""
    try:
        return text if text == "auto" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be an integer, or auto") from None
