"""Settings, each defined once, with default and checks; flags follow."""

import argparse
import functools
import inspect
import re
from collections.abc import Callable
from dataclasses import field, fields, is_dataclass
from shlex import quote
from types import UnionType
from typing import Annotated, Any, Self, Union, get_args, get_origin

import msgspec
import numpy as np
from msgspec import Meta

Count = Annotated[int, Meta(ge=1, le=1 << 20)]
Size = Annotated[int, Meta(ge=1, le=1 << 40)]
SizeOrNone = Annotated[int, Meta(ge=0, le=1 << 40)]
Share = Annotated[float, Meta(ge=0, le=1)]
Rate = Annotated[float, Meta(ge=1e-6, le=1e9)]
Time = Annotated[float, Meta(ge=0, le=1e9)]
Name = Annotated[
    str, Meta(max_length=200, pattern=r"\A[^\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f]*\Z")
]
"""Numbers in their ranges, and text without control characters, which would write to the terminal and forge lines."""


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
        for f in fields(self):  # type: ignore[arg-type]
            within(flag(f.name), getattr(self, f.name), f.type)
        self.check()

    def check(self) -> None:
        """Check rules that ranges and choices cannot express; raises ValueError."""

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


def checked(described: Any) -> None:
    """Do `plain`, and check types and the ranges that stand beside them (`msgspec.Meta`). Raises ValueError."""
    plain(described)
    for f in fields(described):
        within(f.name, getattr(described, f.name), f.type)


def within(name: str, value: Any, kind: Any) -> Any:
    """Return a value, NumPy's number as Python's. Raises ValueError, naming it, if not of a type and in its range."""
    value = value.item() if isinstance(value, np.generic) else value
    own = [each for each in _kinds(kind) if isinstance(each, type) and each not in (int, float, bool, str)]
    if isinstance(value, tuple(own)):
        return value
    try:
        if len(own) == len(_kinds(kind)):
            raise TypeError
        msgspec.convert(value, kind, from_attributes=isinstance(value, tuple))
    except msgspec.ValidationError as error:
        raise ValueError(message_of(error, value, name)) from None
    except TypeError:
        raise ValueError(f"{name} is {short(repr(value))}; it must be {getattr(kind, '__name__', kind)}") from None
    return value


def message_of(error: msgspec.ValidationError, value: Any, name: str = "") -> str:
    """Return which part of a value is out of its range, and the range; the text of an error of another kind."""
    text, _, path = str(error).removesuffix("`").partition(" - at `$")
    if not text.startswith("Expected "):
        return str(error)
    for key, place in re.findall(r"\.(\w+)|\[(\d+)\]", path):
        value = getattr(value, key) if hasattr(value, key) else value[key or int(place)]
    wanted = text.removeprefix("Expected ").replace("`", "").replace("null", "None")
    if "matching regex" in wanted:
        choices = re.search(r"\((.*)\)", wanted)
        wanted = f"one of {choices[1].replace('|', ', ')}" if choices else "text without control characters"
    return f"{f'{name}{path}'.lstrip('.')} is {short(repr(value))}; it must be {wanted}"


def _kinds(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def short(value: Any, most: int = 40) -> str:
    """Return the text of a value, cut to so many characters, for messages."""
    text = str(value)
    return text if len(text) <= most else f"{text[: most - 3]}..."


def printable(text: str) -> str:
    """Replace control characters, as names of files may have, which could write to the terminal."""
    return "".join(c if c.isprintable() else " " for c in text)


def in_range[F: Callable[..., Any]](function: F) -> F:
    """Check the arguments of a function as `checked` does fields, but for arrays, sequences and objects."""
    signature = inspect.signature(function)

    def is_checked(kind: Any) -> bool:
        known = (int, float, bool, str, type(None))
        return all(each in known or hasattr(each, "__metadata__") or is_dataclass(each) for each in _kinds(kind))

    names = {name for name, each in signature.parameters.items() if is_checked(each.annotation)}

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        for name in bound.arguments.keys() & names:
            bound.arguments[name] = within(name, bound.arguments[name], signature.parameters[name].annotation)
        return function(*bound.args, **bound.kwargs)

    return call  # type: ignore[return-value]


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
