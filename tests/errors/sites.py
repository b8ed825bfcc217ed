"""Where the project's sources make errors, and what is fixed of their messages."""

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
MAKERS = {
    "ValueError": 0,
    "RuntimeError": 0,
    "ArgumentTypeError": 0,
    "OSError": -1,
    "damaged": 0,  # plan/state.py
    "_wrong": 0,  # cli/simulate.py
    "error": 0,  # of a parser
    "exit": -1,
    "_refuse": -1,  # plan/state.py, cli/main.py
    "print": 0,  # of a text with "error: "
}
"""Calls that make an error, and which argument is its message."""
SILENT = {"StopIteration", "SystemExit", "_out_of_range"}
"""What is raised besides: the end of an iteration, the end of a process that has said why, and a maker's result."""


@dataclass(frozen=True, kw_only=True)
class Site:
    place: str
    """FILE:LINE"""
    texts: tuple[str, ...]
    """What is fixed of the message, in order, with something else between each two; "" where it begins or ends so."""

    @property
    def longest(self) -> str:
        return max(self.texts, key=len)

    @functools.cached_property
    def pattern(self) -> re.Pattern[str]:
        """Of a message, or a part of one, from here; groups are what is not fixed."""
        return re.compile("(.*)".join(map(re.escape, self.texts)), re.DOTALL)


def python_sites() -> Iterator[Site]:
    for path in sorted((ROOT / "megatron_wlb").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            place = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                assert _name(node.exc) in MAKERS.keys() | SILENT, f"{place}: an error of an unknown kind"
            messages = [node.args[MAKERS[_name(node)]]] if isinstance(node, ast.Call) and _makes(node) else []
            if isinstance(node, ast.FunctionDef) and node.name == "_refusals":
                (rows,) = [
                    n.value for n in ast.walk(node) if isinstance(n, ast.Return) and isinstance(n.value, ast.List)
                ]
                messages = [row.elts[1] for row in rows.elts]
            for message in messages:
                texts = _texts(message)
                if any(texts):
                    yield Site(place=f"{path.relative_to(ROOT)}:{message.lineno}", texts=texts)


def native_sites() -> Iterator[Site]:
    for path in sorted((ROOT / "csrc").glob("*.*")):
        source = re.sub(r"//.*", "", path.read_text())
        for thrown in re.finditer(r"\bthrow\b(.*?\));(?=\s)", source, re.DOTALL):
            place = f"{path.relative_to(ROOT)}:{source[: thrown.start()].count(chr(10)) + 1}"
            pieces = re.sub(r'"\s+"', "", thrown[1])
            pieces = pieces[pieces.index("(") + 1 : pieces.rindex(")")]
            texts = re.findall(r'"((?:[^"\\]|\\.)*)"', pieces)
            assert texts, f"{place}: an error without a text"
            before, after = not pieces.startswith('"'), not pieces.endswith('"')
            yield Site(place=place, texts=(*[""] * before, *texts, *[""] * after))


def _name(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _makes(call: ast.Call) -> bool:
    if _name(call) not in MAKERS or not call.args:
        return False
    return _name(call) != "print" or any("error: " in text for text in _texts(call.args[0]))


def _texts(message: ast.expr) -> tuple[str, ...]:
    """Of a constant or an f-string; ("",) of anything else, which is a message from elsewhere."""
    if isinstance(message, ast.Constant) and isinstance(message.value, str):
        return (message.value,)
    texts = [""]
    for part in message.values if isinstance(message, ast.JoinedStr) else ():
        if isinstance(part, ast.Constant):
            texts[-1] += part.value
        else:
            texts.append("")
    return tuple(text.removesuffix("\n") for text in texts)
