"""Kept and mutated inputs break no reader: each refuses them by ValueError or OSError, or reads what holds together.

A reader runs in a process of its own with bounded memory, which may write in one folder and start nothing; what ends
the process is laid to the input that ran. `tests/plan/test_sanitizers.py` has the native cores.
"""

import contextlib
import importlib
import multiprocessing
import os
import pickle
import re
import resource
import signal
import socket
import sys
from pathlib import Path
from random import Random

import pytest

from tests.fuzz.targets import TARGETS, Target, require

CORPUS = Path(__file__).with_name("corpus")
EXECUTIONS = 1500
MEMORY_BYTES = 1 << 30
"""What a reader may take beyond what it begins with."""
HANGS_SECONDS = 600
"""What takes longer hangs, on the slowest machine, too."""
MOST_BYTES = 1 << 16
NUMBERS = [
    *(0, 1, 2, 3, 7, 63, 64, 65, 255, 256, 1 << 20, (1 << 26) + 1),
    *(sign * (1 << bits) + off for bits in (15, 16, 31, 32, 53, 62, 63, 64) for off in (-1, 0, 1) for sign in (1, -1)),
]
VALUES = [str(number).encode() for number in NUMBERS] + (
    b"0.5 -1.5 1e400 NaN null true [] {} [[7]] text 1000000000000000000000000000000".split() + [b"", b'""', b"9" * 5000]
)
PARTS = re.compile(rb'"[^"]*"|-?\d+(?:\.\d+)?|\w+|[\[\]{},:]')
"""Of JSON, and of the arguments in a log."""
FORBIDDEN = tuple(
    "subprocess. os.system os.exec os.posix_spawn os.fork socket. pickle.find_class ctypes. os.remove os.rename "
    "os.mkdir os.rmdir os.link os.symlink os.chmod".split()
)
"""Audit events that no reader may raise."""


def mutated(random: Random, inputs: list[bytes], is_text: bool) -> bytes:
    """An input of which up to eight parts are another value, other bytes, or a part of another input."""
    data = random.choice(inputs)
    for _ in range(1 << random.randrange(4)):
        parts = [*PARTS.finditer(data)] if is_text and random.randrange(2) else []
        if parts:
            begin, end = random.choice(parts).span()
            new = random.choice((random.choice(VALUES), random.choice(parts)[0]))
        else:
            begin, size = random.randrange(len(data) + 1), random.choice((1, 2, 4, 8))
            end = begin + random.choice((0, size, size, size, 16, random.randrange(MOST_BYTES)))
            number = (random.choice(NUMBERS) % (1 << 8 * size)).to_bytes(size, "little")
            flipped = bytes(byte ^ 1 << random.randrange(8) for byte in data[begin : begin + 1])
            new = random.choice((number, number, flipped, random.randbytes(size), random.choice(inputs)[begin:]))
        data = data[:begin] + new + data[end:]
    return data[:MOST_BYTES]


def fuzz(target: Target, inputs: list[bytes], mutations: int, folder: Path) -> set[str]:
    """Read inputs and mutations of them; return "accepted" and the words of refusals. Fails with what broke."""
    process = multiprocessing.get_context("fork").Process(target=_child, args=(target, inputs, mutations, folder))
    process.start()
    process.join(HANGS_SECONDS)
    process.kill()
    process.join()
    current = (folder / "current").read_bytes()
    assert process.exitcode == 0 and (folder / "kinds").exists(), f"{current!r} ended it with {process.exitcode}"
    return set((folder / "kinds").read_text().splitlines())


def _child(target: Target, inputs: list[bytes], mutations: int, folder: Path) -> None:
    with contextlib.suppress(ValueError, OSError):
        target.read(inputs[0], folder)  # imports what is imported late, before anything is confined
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))
    known = {name.partition(".")[0] for name in (*sys.stdlib_module_names, *sys.modules)}
    strays, writes = [], os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

    def watch(event: str, arguments: tuple) -> None:
        opened = event == "open" and (arguments[2] or 0) & writes and isinstance(arguments[0], str | os.PathLike)
        if event.startswith(FORBIDDEN) or (opened and not Path(os.path.abspath(arguments[0])).is_relative_to(folder)):
            strays.append(f"{event} {arguments}"[:300])

    sys.addaudithook(watch)
    random, kinds = Random(1), set()
    for i in range(len(inputs) + mutations):
        data = inputs[i] if i < len(inputs) else mutated(random, inputs, target.is_text)
        (folder / "current").write_bytes(data)
        try:
            target.read(data, folder)
            kinds.add("accepted")
        except (ValueError, OSError) as error:
            words = f"{type(error).__name__} {error}".replace(str(folder), "")
            kinds.add(re.sub(r"'[^']*'|[^A-Za-z ]", "", words)[:80])
        strays += [f"import {name}" for name in sys.modules if name.partition(".")[0] not in known]
        if strays:
            raise PermissionError(strays[0])
    (folder / "kinds").write_text("\n".join(kinds))


@pytest.mark.parametrize("name", TARGETS)
def test_a_reader_refuses_or_reads_whatever_it_gets(name, tmp_path):
    corpus = [path.read_bytes() for path in sorted((CORPUS / name).glob("*"))]
    assert corpus, "the corpus is kept"
    kinds = fuzz(TARGETS[name], [*TARGETS[name].seeds(), *corpus], EXECUTIONS, tmp_path)
    assert "accepted" in kinds and len(kinds) >= 3


def import_from(folder):
    (folder / "of_nobody.py").write_text("")
    sys.path.insert(0, str(folder))
    importlib.import_module("of_nobody")


WRONG = {
    "ended it with -9": lambda folder: os.kill(os.getpid(), signal.SIGKILL),
    "memory": lambda folder: bytearray(2 * MEMORY_BYTES),
    "a file elsewhere": lambda folder: (folder.parent / "elsewhere").write_text("x"),
    "a module": import_from,
    "a name of a host": lambda folder: socket.getaddrinfo("localhost", 80),
    "a class of a pickle": lambda folder: pickle.loads(pickle.dumps(Path("x"))),
    "an invariant": lambda folder: require(False, "an invariant"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_found(what, tmp_path):
    """The first input, which warms up, is read unconfined."""
    folder = tmp_path / "own"
    folder.mkdir()
    target = Target(read=lambda data, folder: data == b"first" or WRONG[what](folder))
    with pytest.raises(AssertionError, match="b'second' ended it with " + ("-9" if "-9" in what else "1")):
        fuzz(target, [b"first", b"second"], 0, folder)
