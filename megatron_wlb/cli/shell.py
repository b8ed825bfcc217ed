"""Shell text as words of commands: variables that it assigns are put in as bash would, and nothing of it is run."""

import operator
import re
from collections.abc import Iterator, Mapping

from megatron_wlb.cli.common import short

MOST_CHARACTERS = 1 << 20
"""Most characters of a text once its variables are put in."""
OPERATOR = re.compile(r"[();|&]+|\d*[<>].*|&>.*|--")
"""Words that end a command, or what is its own."""
_MOST_SHELLS = 4
"""Most shells that `sh -c` starts within each other."""
_SHELL = re.compile(r"(?:.*/)?(?:ba|da|k|z)?sh")
_TOKEN = re.compile(
    r"""(?P<comment>(?<![^\s;&|()])\#[^\n]*)
    |(?P<blank>[^\S\n]+|\(\([^()\n]*\)\))
    |\\\r?\n
    |(?P<operator>\n|[();|&]+)
    |'(?P<single>[^']*)'
    |"(?P<double>(?:\$\{[^{}]*\}|\\.|[^"\\])*+)"
    |\\(?P<escaped>.)
    |(?P<expansion>\$\(\((?:[^()]|\([^()]*\))*+\)\)|\$\w+|\$\{\w+(?:\[[@*]\])?(?::?[-=?+](?:\$\{[^{}]*\}|[^{}])*+)?\})
    |(?P<plain>\$\{[^{}]*\}|`[^`]*`|[^\s;&|()'"`$\\]++|.)""",
    re.VERBOSE | re.DOTALL,
)
_EXPANSION = re.compile(
    r"""\\(?P<escaped>[$`"\\\n])
    |\$\(\((?P<arithmetic>(?:[^()]|\([^()]*\))*+)\)\)
    |\$(?P<named>\w+)
    |\$\{(?P<braced>\w+)(?:\[[@*]\])?(?:(?P<colon>:?)(?:(?P<how>[-=+])(?P<default>(?:\$\{[^{}]*\}|[^{}])*+)|\?[^{}]*))?\}
    """,
    re.VERBOSE,
)
"""What a shell replaces between double quotes, and all but the backslash outside of quotes, too."""
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*\+?=")
_RUN = re.compile(r"\$\(.*\)|`.*`|.*\$", re.DOTALL)
"""Values that only running something would tell; of $(...) without quotes only $ is seen."""
_OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv, "%": operator.mod}


def read(text: str, values: Mapping[str, str]) -> list[str]:
    """Words and operators of a script, ";" for ends of lines, variables put in that it assigns or that have `values`.

    Assignments count in their order. No branch is followed: of several assignments the last counts, and words of all
    branches are there. Where a variable has no value yet, as in a function, that of the end of the text counts; what
    has none at all stays as it is. Arrays are read where they are filled, too. Entries such as "--split 99,1,0" are
    split, quotes in what is split are left out, and `sh -c` and `eval` are followed. Raises ValueError for an open
    quote, and for more than MOST_CHARACTERS.
    """
    text = text.replace("\0", " ")
    later: Mapping[str, str] = {}
    for _ in range(3):  # variables of variables that are assigned later
        reader = _Reader(values, later)
        words, later = reader.words(text), reader.values
    return words


class _Reader:
    """Reads text from its beginning to its end. In values, NUL stands between the entries of an array."""

    def __init__(self, values: Mapping[str, str], later: Mapping[str, str]) -> None:
        self.values = dict(values)
        """Values of variables as far as the text has been read."""
        self.later = later
        """Values of variables that are assigned further down."""
        self.size = 0
        """Characters that were read and put in."""

    def words(self, text: str, shells: int = 0) -> list[str]:
        """Words of a text that `shells` shells within each other read."""
        self._count(text)
        words: list[str] = []
        array, begin, depth = "", 0, 0
        before, shell = "", False
        for word, target in self._pieces(text):
            if target is None:
                if word.endswith("="):
                    array, begin, depth = word, len(words) + 2, 0
                if word != "\n":
                    words.append(word)
                elif not array and words and words[-1] != ";":
                    words.append(";")
                depth += word.count("(") - word.count(")")
                if array and word != array and depth <= 0:
                    self._assign(array, "\0" + "\0".join(w for w in words[begin:] if not OPERATOR.fullmatch(w)))
                    array = ""
                shell = False
            elif target:
                self._assign(target, word.removeprefix(target))
                words.append(word)
            elif shells < _MOST_SHELLS and (before == "eval" or (shell and re.fullmatch(r"-\w*c", before))):
                words += self.words(word.replace("\0", " "), shells + 1)
            else:
                words += _fields(word)
                shell = shell or _SHELL.fullmatch(word) is not None
            before = word
        return words

    def _pieces(self, text: str) -> Iterator[tuple[str, str | None]]:
        """Words, with NUL where they are split, and what they assign (NAME=, NAME+= or ""); operators, and None.

        NAME= before the entries of an array comes as an operator. The caller assigns before it takes the next.
        """
        parts: list[str] = []
        target = ""
        for token in _TOKEN.finditer(text):
            kind = token.lastgroup
            if kind is None:
                continue  # a line that goes on
            piece = token[kind]
            if kind in ("blank", "comment", "operator"):
                if parts:
                    word = "".join(parts)
                    yield word, None if word == target and piece.startswith("(") else target
                    parts, target = [], ""
                if kind == "operator":
                    yield piece, None
                continue
            if kind == "plain":
                if piece in ("'", '"'):
                    quote = short(text[token.start() :].partition("\n")[0])
                    raise ValueError(
                        f"the launch line is not one of a shell: no closing quotation for {quote}; check its quotes"
                    )
                if not parts and (match := _ASSIGNMENT.match(piece)):
                    target = match[0]
            elif kind in ("double", "expansion"):
                piece = self._expanded(piece, _name(target))
                if target:
                    piece = piece.lstrip("\0").replace("\0", " ")  # all of an array is one value
                elif kind == "expansion":
                    piece = re.sub(r"\s+", "\0", piece)
                    if not piece:
                        continue  # it may be all of a word, which is none then
            parts.append(piece)
        if parts:
            yield "".join(parts), target

    def _assign(self, target: str, value: str) -> None:
        name = _name(target)
        if target.endswith("+="):
            unknown = "" if value.startswith("\0") else f"${name}"  # the environment has no arrays
            value = self._count(self.values.get(name, unknown)) + value
        if _RUN.fullmatch(value):
            self.values.pop(name, None)
        else:
            self.values[name] = value

    def _expanded(self, text: str, own: str) -> str:
        """Text with values for $NAME, ${NAME:-DEFAULT} and $((...)) in it; it is assigned to `own`."""
        return _EXPANSION.sub(lambda match: self._value(match, own), text)

    def _value(self, match: re.Match[str], own: str) -> str:
        if match["escaped"]:
            return match["escaped"].strip("\n")
        if match["arithmetic"]:
            named = re.sub(r"(?<![\w${])[A-Za-z_]", r"$\g<0>", match["arithmetic"])
            return _calculated(self._expanded(named, own)) or match[0]
        name, default = match["named"] or match["braced"], match["default"]
        early = name == own or (own and default is not None)  # what a default is for, is not assigned yet
        value = self.values.get(name, None if early else self.later.get(name))
        missing = value is None or bool(match["colon"] and not value)
        if match["how"] == "+" and missing:
            return ""
        if default is not None and missing != (match["how"] == "+"):
            unquoted = default[1:-1] if default[:1] in ("'", '"') and default[-1:] == default[:1] else default
            value = self._expanded(unquoted, own)
            if match["how"] == "=":
                self.values[name] = value
        return match[0] if value is None else self._count(value)

    def _count(self, text: str) -> str:
        self.size += len(text)
        if self.size > MOST_CHARACTERS:
            raise ValueError(
                f"the launch line has at least {self.size} characters with its variables put in, and may have "
                f"{MOST_CHARACTERS}; give the part that starts the training"
            )
        return text


def _name(target: str) -> str:
    return target.rstrip("+=")


def _fields(word: str) -> list[str]:
    """The parts of a word, split at NUL, and at blanks in an entry of an array such as "--split '99,1,0'"."""
    if word.startswith("--"):
        word = re.sub(r"\s+", "\0", word)
    return [field.strip("\"'") for field in word.split("\0") if field] if "\0" in word else [word]


def _calculated(text: str) -> str | None:
    """The result of + - * / % and parentheses with decimal integers, none below zero on the way; else None."""
    tokens = re.findall(r"0|[1-9][0-9]*|\S", text)[::-1]
    if not text.isascii() or len(tokens) > 64 or any(len(token) > 18 for token in tokens):
        return None
    try:
        result = _operation(tokens, "+-", "*/%")
    except (ValueError, ZeroDivisionError, IndexError):
        return None
    return None if tokens else str(result)


def _operation(tokens: list[str], *levels: str) -> int:
    """Evaluate the operation that ends `tokens` and remove it; `levels` of operators, those that bind least first."""
    if not levels:
        token = tokens.pop()
        if token != "(":
            return int(token)
        result = _operation(tokens, "+-", "*/%")
        if tokens.pop() != ")":
            raise ValueError
        return result
    result = _operation(tokens, *levels[1:])
    while tokens and tokens[-1] in levels[0]:
        result = _OPERATIONS[tokens.pop()](result, _operation(tokens, *levels[1:]))
        if result < 0:
            raise ValueError
    return result
