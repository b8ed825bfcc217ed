"""Which layers of a model are of a kind, as Megatron's flags tell: every Nth, or a list."""

import ast
import contextlib

from megatron_wlb.settings import short

MOST_LAYERS = 1 << 12
"""Of a list, as long as `--num-layers` may be."""


def repeated(kinds: list[str]) -> list[str]:
    """Return the shortest list of which the kinds of all layers are repetitions."""
    count = len(kinds)
    periods = range(1, count // 2 + 1)
    return kinds[: next((n for n in periods if (kinds[:n] * -(-count // n))[:count] == kinds), count)]


def chosen(flag: str, given: tuple[int, ...] | str, count: int) -> list[int]:
    """Return 1 or 0 for every layer, by N or a list: every Nth has 0. Raises ValueError for anything else."""
    text = given if isinstance(given, str) else str(list(given))
    if text.isdecimal() and int(text):
        return [int((i + 1) % int(text) != 0) for i in range(count)]
    found: list[int] = []
    with contextlib.suppress(SyntaxError, TypeError, ValueError, RecursionError, MemoryError):
        found = _list_of(ast.parse(text, mode="eval").body)
    if len(found) < count:
        raise ValueError(
            f"{flag} is {short(text) or 'missing'}; give N, or a list of 1 and 0 for each of {count} layers, such as "
            "([1]*5+[0])*4"
        )
    return found[:count]


def _list_of(node: ast.expr) -> list[int]:
    """Return the list of an expression such as [1] * 5 + [0], as Megatron evaluates it, up to `MOST_LAYERS`."""
    match node:
        case ast.List(elts=items) if all(isinstance(each, ast.Constant) and each.value in (0, 1) for each in items):
            return [int(isinstance(each, ast.Constant) and bool(each.value)) for each in items]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return (_list_of(left) + _list_of(right))[:MOST_LAYERS]
        case ast.BinOp(left=left, op=ast.Mult(), right=ast.Constant(value=int(times))):
            return (_list_of(left) * min(times, MOST_LAYERS))[:MOST_LAYERS]
    raise TypeError(ast.dump(node))
