"""Runs a target on its corpus and on mutations, in a process of its own that may do little else.

Its memory is bounded, writing outside of its folder and starting anything is an error, and so is taking long. What ends
the process itself is laid to the input that ran.
"""

import contextlib
import mmap
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
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any

from tests.fuzz.mutate import MOST_BYTES
from tests.fuzz.targets import Target

MEMORY_BYTES = 1 << 30
"""What a target may take beyond what it begins with."""
SECONDS_AN_INPUT = 30.0
MOST_FINDINGS, MOST_NEW = 10, 40

_VALUES = re.compile(r"""'[^']*'|"[^"]*"|\[.*\]|\{.*\}|[^A-Za-z ]""", re.DOTALL)
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CHANGES = ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.chmod", "os.truncate")
_FORBIDDEN = (
    "subprocess.",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "socket.",
    "pickle.find_class",
    "ctypes.",
)


@dataclass(slots=True)
class Outcome:
    """What came of a run."""

    executions: int = 0
    accepted: int = 0
    seconds: float = 0.0
    kinds: int = 0
    """Kinds of refusals, by their words, and of what was accepted."""
    new: list[bytes] = field(default_factory=list)
    """Mutations of which each was the first of its kind."""
    findings: list[tuple[bytes, str]] = field(default_factory=list)
    """Inputs, and what they did."""


class Outside(BaseException):
    """Something outside of the folder was about to be changed or run."""


class Slow(BaseException):
    """An input took longer than `SECONDS_AN_INPUT`."""


def fuzz(target: Target, corpus: Sequence[bytes], *, seed: int, executions: int, seconds: float) -> Outcome:
    """Run the seeds of the target, the corpus, then mutations: up to `executions` or `seconds`, or `MOST_FINDINGS`."""
    current = mmap.mmap(-1, 16 + MOST_BYTES)  # shared: number of executions, size and bytes of the input that runs
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    shared_memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=shared_memory) as folder:
        arguments = (target, list(corpus), seed, executions, seconds, Path(folder), current, writer)
        process = context.Process(target=_child, args=arguments)
        begin = time.monotonic()
        process.start()
        writer.close()
        outcome: Outcome | None = None
        try:
            if reader.poll(seconds + 4 * SECONDS_AN_INPUT):
                with contextlib.suppress(EOFError):
                    outcome = pickle.loads(reader.recv_bytes())
                process.join(1)
        finally:
            process.kill()
            process.join()
    if outcome is None:
        executions, size = (int.from_bytes(current[at : at + 8], "little") for at in (0, 8))
        ended = (current[16 : 16 + size], f"the process hung, or ended with {process.exitcode}")
        outcome = Outcome(executions=executions, findings=[ended])
    outcome.seconds = time.monotonic() - begin
    return outcome


def _child(
    target: Target,
    corpus: list[bytes],
    seed: int,
    executions: int,
    seconds: float,
    folder: Path,
    current: mmap.mmap,
    writer: Connection,
) -> None:
    random, outcome, kinds = Random(seed), Outcome(), set()
    pool = [*target.seeds(), *corpus]
    given = len(pool)
    with contextlib.suppress(ValueError, OSError):
        target.read(pool[0], folder)  # imports what is imported late, before anything is confined
    strays = _confine(folder)
    deadline = time.monotonic() + seconds
    while len(outcome.findings) < MOST_FINDINGS:
        if outcome.executions < given:
            data = pool[outcome.executions]
        elif outcome.executions >= executions or time.monotonic() >= deadline:
            break
        else:
            data = target.mutate(random, random.choice(pool), pool)[:MOST_BYTES]
        current[:16] = outcome.executions.to_bytes(8, "little") + len(data).to_bytes(8, "little")
        current[16 : 16 + len(data)] = data
        kind, finding = _run(target, data, folder)
        if strays:
            finding = f"outside of its folder: {strays[0]}"
            strays.clear()
        if finding:
            outcome.findings.append((data, finding))
        elif kind not in kinds:
            kinds.add(kind)
            if outcome.executions >= given and len(outcome.new) < MOST_NEW:
                outcome.new.append(data)
                pool.append(data)
        outcome.accepted += kind == "accepted"
        outcome.executions += 1
    outcome.kinds = len(kinds)
    writer.send_bytes(pickle.dumps(outcome))
    os._exit(0)


def _run(target: Target, data: bytes, folder: Path) -> tuple[str, str]:
    """What kind of input this is by what becomes of it, and what is wrong with that, if anything."""
    signal.setitimer(signal.ITIMER_REAL, SECONDS_AN_INPUT)
    try:
        target.read(data, folder)
        return "accepted", ""
    except (ValueError, OSError) as error:
        said = str(error).replace(str(folder), "")  # its name is another one in every run
        return _VALUES.sub("", f"{type(error).__name__}: {said}")[:80], ""
    except BaseException:
        return "", traceback.format_exc()[-3000:]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _confine(folder: Path) -> list[str]:
    """Bound the memory and the time of an input; returns the list to which what happens outside of `folder` goes."""
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
