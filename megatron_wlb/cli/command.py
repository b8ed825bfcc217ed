"""What a run was launched with: the words of its command, or the arguments that Megatron printed into its log."""

import os
import re
import select
import shlex
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import PurePath
from types import MappingProxyType
from typing import NamedTuple

from megatron_wlb.cli.common import short

MOST_BYTES = 1 << 28
"""Of a file that is read; a log may be longer than what is of interest in it."""
SILENT_SECONDS = 0.5
"""How long a pipe whose other end is open may say nothing."""
LONGEST_NAME = 200
"""Of a file, as errors have it."""
BLOCK = "sed -n '/- arguments -/,/- end of arguments -/p'"
"""Prints the blocks of a log."""
_BEGIN, _END = re.compile(r"-{9,} arguments -{9,}"), "- end of arguments -"
_ARGUMENT = re.compile(r"  (\w+) (?:\.+|(?<=\w{48} )) (.*)")
_PADDED = re.compile(r"> padded vocab \(size: \d+\) with \d+ dummy tokens \(new size: (\d+)\)")
_STARTS = re.compile(
    r"(?:(?:.*/)?bin/|\./)?(?:\w*torchrun|ft_launcher|srun|mpirun|mpiexec|deepspeed|accelerate|env|python[\d.]*)"
)
"""Programs that start training, or another of them; of another folder it may as well be data."""
_ASSIGNED = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
_REDIRECTED = re.compile(r"\s(?:\d?>{1,2}|&>|\|).*$|\s&\s*$")
_KEYWORDS = frozenset("case do done elif else esac eval exit fi for function if then until while".split())
_NO_LAUNCH = "neither a log with the arguments that Megatron prints, nor a command that starts pretrain_gpt.py"


class Launched(NamedTuple):
    """What was found."""

    flags: list[str]
    """Of the script, as on its command line; [] for a log."""
    launcher: Sequence[str] = ()
    """The words before the script."""
    script: str | None = None
    arguments: Mapping[str, str] = MappingProxyType({})
    """Of a log: every argument by its name, as Megatron prints it."""


def of_words(words: Sequence[str]) -> tuple[list[str], Launched]:
    """Words before a command, and the command: from the first that starts a program, or is one, on.

    Raises ValueError for a command within a command that only a shell could read.
    """
    begin = next((i for i, word in enumerate(words) if _is_start(word)), len(words))
    return list(words[:begin]), _command(list(words[begin:]))


def of_file(name: str) -> Launched:
    """What a log or a command in a file says; - is standard input.

    Raises ValueError, with the remedy, for what is neither, and for scripts.
    """
    text = _text(name)
    end = text.rfind(_END)
    if end >= 0 or _BEGIN.search(text):
        return _of_log(text, end, name)
    return _of_command(text, name)


def _of_log(text: str, end: int, name: str) -> Launched:
    """The last block that is whole; of a later one that is cut off, the run has not begun."""
    begins = [match.end() for match in _BEGIN.finditer(text, 0, end)] if end >= 0 else []
    if not begins:
        raise ValueError(f"{name} holds a part of what Megatron prints of its arguments; give the whole log")
    found = {m[1]: m[2].strip() for line in text[begins[-1] : end].splitlines() if (m := _ARGUMENT.search(line))}
    if "num_layers" not in found or "world_size" not in found:
        raise ValueError(f"{name}: its arguments lack num_layers or world_size; give the log as Megatron wrote it")
    if padded := _PADDED.search(text, end):
        found["padded_vocab_size"] = padded[1]
    return Launched([], arguments=found)


def _of_command(text: str, name: str) -> Launched:
    lines = [line.strip() for line in re.sub(r"\\\r?\n", " ", text).splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    try:
        commands = [_whole(words) for words in _commands(lines)]
    except ValueError as error:
        raise _script(name, str(error)) from None
    training = [each for each in commands if any(map(_is_flag_of_training, each.flags))]
    if not training:
        raise _asked(f"{name} is {_NO_LAUNCH}", name)
    if any(each != training[0] for each in training):
        raise _script(name, f"it has {len(training)} commands of training; leave one")
    return training[0]


def _whole(words: Sequence[str]) -> Launched:
    """A command, or flags alone."""
    before, launched = of_words(words)
    return launched if launched.script else launched._replace(flags=[*before, *launched.flags])


def _commands(lines: Sequence[str]) -> Iterator[list[str]]:
    """The words of every command. Raises ValueError for what only a shell can read."""
    for line in lines:
        if variable := re.search(r"(?<!\\)(?:\$\w+|\$[({]\S*|\$.|`)", line):
            raise ValueError(f"it has {short(variable[0])}")
        lexer = shlex.shlex(_REDIRECTED.sub("", line), posix=True, punctuation_chars=";&|()")
        lexer.whitespace_split, lexer.commenters = True, ""
        words: list[str] = []
        for word in lexer:
            if word in _KEYWORDS and not words:
                raise ValueError(f"it has {word!r}")
            if set(word) <= set(";&|()"):
                yield words
                words = []
            elif word.startswith("#"):
                break
            else:
                words.append(word)
        yield words


def _command(words: list[str]) -> Launched:
    """A command that begins with what starts it; a command in `bash -c` is taken out of its quotes."""
    for i, (option, inner) in enumerate(pairwise(words)):
        if re.fullmatch(r"-\w*c", option) and re.fullmatch(r"(?:.*/)?(?:ba|z|da)?sh", _shell(words[:i])):
            if variable := re.search(r"\$\w+|\$[({]\S*|`", inner):
                raise ValueError(f"it has {short(variable[0])} within quotes")
            return _command([*words[:i], *shlex.split(_REDIRECTED.sub("", inner))])
    script = next((i for i, word in enumerate(words) if word.endswith(".py")), None)
    if script is None:
        return Launched(words)
    return Launched(words[script + 1 :], words[:script], words[script])


def _shell(words: Sequence[str]) -> str:
    """The program whose options come last."""
    return next((word for word in reversed(words) if not word.startswith("-")), "")


def _is_start(word: str) -> bool:
    return bool(_STARTS.fullmatch(word) or _ASSIGNED.fullmatch(word) or word.endswith(".py"))


def _is_flag_of_training(word: str) -> bool:
    return word.split("=")[0] in ("--num-layers", "--seq-length", "--model")


def _script(name: str, why: str) -> ValueError:
    return _asked(f"{name} is a script, and only bash knows what it runs: {why}", name)


def _asked(what: str, name: str) -> ValueError:
    """An error, and in two lines of their own how to get a command out of a script."""
    error = ValueError(
        f"{what}; give the log of a run (--launch train.log), or its command. To print that, not run it:"
    )
    script = PurePath(name).name if name != "-" else "train.sh"
    error.add_note(
        '(for p in torchrun srun python python3; do eval "$p() { printf \'%q \' $p \\"\\$@\\" >>command.txt; echo '
        f'>>command.txt; }}"; export -f $p; done; bash {shlex.quote(short(script))})'
    )
    error.add_note("megatron-wlb analyze --launch command.txt")
    return error


def _text(name: str) -> str:
    """The text of a file, however odd. Raises ValueError with the remedy, soon, for what holds none."""
    remedy, called = "give the log of a run, or a file with its command", f"--launch {short(name, LONGEST_NAME)}"
    if name == "-":
        data = _read(sys.stdin.fileno(), "standard input") if _has_number(sys.stdin) else sys.stdin.read().encode()
    else:
        try:
            number = os.open(name, os.O_RDONLY | os.O_NONBLOCK)
        except OSError as error:
            raise ValueError(f"{called}: {error.strerror}; {remedy}") from None
        try:
            mode = os.fstat(number)
            if stat.S_ISDIR(mode.st_mode):
                raise ValueError(f"{called} is a folder; {remedy}")
            if not stat.S_ISREG(mode.st_mode) and not stat.S_ISFIFO(mode.st_mode):
                raise ValueError(f"{called} is a device; {remedy}")
            if mode.st_size > MOST_BYTES:
                raise ValueError(
                    f"{called} has {mode.st_size >> 20:,} MiB, over {MOST_BYTES >> 20}; give what is of "
                    f"interest: {BLOCK} {shlex.quote(name)} >block.log"
                )
            data = _read(number, short(name, LONGEST_NAME))
        except OSError as error:
            raise ValueError(f"{called}: {error.strerror}; {remedy}") from None
        finally:
            os.close(number)
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise ValueError(f"{called} is UTF-16; give it as iconv -f UTF-16 -t UTF-8 writes it")
    if b"\0" in data:
        raise ValueError(f"{called} is binary; {remedy}")
    if not data.strip():
        raise ValueError(f"{called} holds nothing; {remedy}")
    return data.decode("utf-8-sig", errors="replace")


def _has_number(file: object) -> bool:
    try:
        file.fileno()  # type: ignore[attr-defined]
    except (OSError, AttributeError):
        return False
    return True


def _read(number: int, name: str) -> bytes:
    """All bytes of a file or pipe. Raises ValueError for very many, and where a pipe's other end says nothing."""
    parts: list[bytes] = []
    size = 0
    patient = stat.S_ISCHR(os.fstat(number).st_mode)  # somebody types
    while True:
        try:
            part = os.read(number, 1 << 20)
        except BlockingIOError:  # a pipe that is open, and empty
            if not any(select.select([number], [], [], None if patient else SILENT_SECONDS)):
                raise ValueError(f"--launch {name}: nothing came for {SILENT_SECONDS:g} seconds; give a file") from None
            continue
        if not part:
            return b"".join(parts)
        parts.append(part)
        size += len(part)
        if b"\0" in parts[0]:
            return parts[0]
        if size > MOST_BYTES:
            raise ValueError(f"--launch {name} has over {MOST_BYTES >> 20} MiB; give what is of interest: {BLOCK}")
