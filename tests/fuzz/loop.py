"""Runs a target on whole inputs and on mutations of them, in a process of its own that may do little else.

Its memory is bounded, writing outside of its folder and starting anything is an error, and so is taking long. What ends
the process itself is laid to the input that ran.
"""

import multiprocessing
import os
import pickle
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from tests.fuzz.targets import Target

MEMORY_BYTES = 1 << 30
"""What a target may take beyond what it begins with."""
SECONDS_AN_INPUT = 30.0
MOST_FINDINGS, MOST_BYTES = 10, 1 << 16

NUMBERS = [
    *(0, 1, 2, 3, 7, 63, 64, 65, 255, 256, 1 << 20, (1 << 26) + 1),
    *(sign * (1 << bits) + off for bits in (15, 16, 31, 32, 53, 62, 63, 64) for off in (-1, 0, 1) for sign in (1, -1)),
]
PARTS = re.compile(rb'"[^"]*"|-?\d+(?:\.\d+)?|\w+|[\[\]{},:]')
"""Of JSON, and of the arguments in a log."""
VALUES = [str(number).encode() for number in NUMBERS] + (
    b"0.5 -1.5 1e400 NaN null true [] {} [[7]] text 1000000000000000000000000000000".split() + [b"", b'""', b"9" * 5000]
)
_VALUES = re.compile(r"""'[^']*'|"[^"]*"|\[.*\]|\{.*\}|[^A-Za-z ]""", re.DOTALL)
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CHANGES = ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.chmod", "os.truncate")
_FORBIDDEN = tuple("subprocess. os.system os.exec os.posix_spawn os.fork socket. pickle.find_class ctypes.".split())


@dataclass(slots=True)
class Outcome:
    """What came of a run."""

    executions: int = 0
    accepted: int = 0
    kinds: set[str] = field(default_factory=set)
    """Refusals, by their words, and "accepted"."""
    findings: list[tuple[bytes, str]] = field(default_factory=list)
    """Inputs, and what they did."""


class Outside(BaseException):
    """Something outside of the folder was about to be changed or run."""


class Slow(BaseException):
    """An input took longer than `SECONDS_AN_INPUT`."""


def mutated(random: Random, inputs: Sequence[bytes], is_text: bool) -> bytes:
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


def fuzz(target: Target, corpus: Sequence[bytes], *, seed: int, executions: int, seconds: float) -> Outcome:
    """Run the seeds of the target, the corpus, then mutations: up to `executions` or `seconds`, or `MOST_FINDINGS`."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as name:
        folder = Path(name)
        arguments = (target, [*target.seeds(), *corpus], seed, executions, seconds, folder)
        process = multiprocessing.get_context("fork").Process(target=_child, args=arguments)
        process.start()
        try:
            process.join(seconds + 4 * SECONDS_AN_INPUT)
        finally:
            process.kill()
            process.join()
        if (folder / "outcome").exists():
            return pickle.loads((folder / "outcome").read_bytes())
        what = f"the process hung, or ended with {process.exitcode}"
        return Outcome(findings=[((folder / "current").read_bytes(), what)])


def _child(target: Target, inputs: list[bytes], seed: int, executions: int, seconds: float, folder: Path) -> None:
    outcome, random, deadline = Outcome(), Random(seed), time.monotonic() + seconds
    _run(target, inputs[0], folder, [])  # imports what is imported late, before anything is confined
    strays = _confine(folder)
    while outcome.executions < executions and len(outcome.findings) < MOST_FINDINGS:
        is_given = outcome.executions < len(inputs)
        if not is_given and time.monotonic() >= deadline:
            break
        data = inputs[outcome.executions] if is_given else mutated(random, inputs, target.is_text)
        (folder / "current").write_bytes(data)
        kind, finding = _run(target, data, folder, strays)
        if finding:
            outcome.findings.append((data, finding))
        else:
            outcome.kinds.add(kind)
        outcome.accepted += kind == "accepted"
        outcome.executions += 1
    (folder / "outcome").write_bytes(pickle.dumps(outcome))
    os._exit(0)


def _run(target: Target, data: bytes, folder: Path, strays: list[str]) -> tuple[str, str]:
    """What kind of input this is by what becomes of it, and what is wrong with that, if anything."""
    kind, finding = "accepted", ""
    signal.setitimer(signal.ITIMER_REAL, SECONDS_AN_INPUT)
    try:
        target.read(data, folder)
    except (ValueError, OSError) as error:
        said = str(error).replace(str(folder), "")  # its name is another one in every run
        kind = _VALUES.sub("", f"{type(error).__name__}: {said}")[:80]
    except BaseException:
        kind, finding = "", traceback.format_exc()[-3000:]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    if strays:
        kind, finding = "", f"outside of its folder: {strays[0]}"
        strays.clear()
    return kind, finding


def _confine(folder: Path) -> list[str]:
    """Bound memory and time; returns the list to which what happens outside of `folder` goes."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))
    signal.signal(signal.SIGALRM, _slow)
    strays: list[str] = []

    def within(path: Any) -> bool:
        if not isinstance(path, (str, bytes, os.PathLike)):
            return True  # a descriptor
        return Path(os.path.abspath(os.fsdecode(path))).is_relative_to(folder)

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            stray = (arguments[2] or 0) & _WRITES and not within(arguments[0])
        elif event in _CHANGES:
            stray = not all(map(within, arguments[:2]))
        else:
            stray = event.startswith(_FORBIDDEN)
        if stray:
            strays.append(f"{event} {arguments}"[:300])
            raise Outside(strays[-1])

    sys.addaudithook(watch)
    return strays


def _slow(*_: Any) -> None:
    raise Slow(f"over {SECONDS_AN_INPUT} s")
