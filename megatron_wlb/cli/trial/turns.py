"""Turns: processes one after the other, and the reading of their logs."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from megatron_wlb import files
from megatron_wlb.cli import run_log
from megatron_wlb.cli.launch import text_of
from megatron_wlb.cli.trial.command import Plan
from megatron_wlb.settings import printable, short

SIDES = ("without", "with")
PATIENCE = 90.0
"""Seconds in which a launcher may end its processes; torchrun's own limit is 30."""
POLL = 0.5
"""Seconds between two looks at a log."""
MOST_OF_AN_ERROR = 300
"""Most characters of a line of a log that are told."""
_DIGEST = re.compile(r"wlb step +([0-9]+) \| digest ([0-9a-f]{16})")
_PEAK = re.compile(r"memory \(MB\) .*?max allocated: ([0-9.]+)")
_RAISED = re.compile(r"\[rank[0-9]+\]: [\w.]*(?:Error|Exception): ")
_ERROR = re.compile(r"(?:Error|Exception|error): \S")
_OF_LAUNCHER = re.compile(r"(?:srun|slurmstepd|mpirun|prterun): ")


class Turn(NamedTuple):
    """A turn that has ended."""

    number: int
    side: int
    """0 without --wlb, 1 with it."""
    log: Path
    seconds: float
    crash: str = ""
    """Why it does not count; "" if it does."""
    run: run_log.Log | None = None
    """Its steps, less those that are left out; None of a crash."""
    digests: dict[int, str] = {}  # noqa: RUF012  # is never changed
    """By step."""
    peak_gib: float | None = None
    """Most memory that any rank says it allocated; None if none says it."""


def run_all(plan: Plan, turns: int) -> list[Turn]:
    """Run `turns` of each side by turns, and make the folder of their logs. If interrupted, ends the turn."""
    from rich.console import Console

    plan.folder.mkdir(exist_ok=True)
    files.check_room(str(plan.folder), "--out")
    ran = []
    with Console(stderr=True, highlight=False).status("") as status:
        for number in range(1, 2 * turns + 1):
            side = (number - 1) % 2
            log = plan.folder / f"turn-{number}-{SIDES[side]}.log"
            title = f"turn {number} of {2 * turns}, {SIDES[side]} --wlb"
            began = time.monotonic()

            def show(step: int, title: str = title, began: float = began) -> None:
                done = f"step {step - plan.first} of {plan.steps}" if step else "starting"
                status.update(f"{title}: {done}, {time.monotonic() - began:.0f} s")

            returned = run_turn(plan.words[side], log, show)
            turn = Turn(number, side, log, time.monotonic() - began)
            ran.append(read(turn, returned, plan.skip))
            said = f"crashed: {ran[-1].crash} (all of it: {log})" if ran[-1].crash else f"{ran[-1].seconds:.0f} s"
            print(f"{title}: {said}", file=sys.stderr, flush=True)
    return ran


def run_turn(words: Sequence[str], log: Path, show: Callable[[int], None]) -> int:
    """Run a command to its end, with its output in a log; calls `show` with its last step. Returns the exit status."""
    with log.open("wb") as out, log.open("rb") as printed:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            step, rest = 0, b""
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return process.wait(POLL)
                rest += printed.read()
                step = max([step, *(int(number) for number, _ in _DIGEST.findall(rest.decode(errors="replace")))])
                rest = rest.rpartition(b"\n")[2]
                show(step)
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a launcher that is still running, which ends its ranks, and its process group."""
    for number, seconds in ((signal.SIGTERM, PATIENCE), (signal.SIGKILL, None)):
        if process.poll() is None:
            os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(seconds)


def read(turn: Turn, returned: int, skip: int) -> Turn:
    """Read the output of a turn."""
    try:
        text = text_of(str(turn.log))
    except ValueError as error:
        return turn._replace(crash=str(error))
    if returned:
        return turn._replace(crash=f"{error_of(text)} [exit status {returned}]")
    run = None
    with contextlib.suppress(ValueError):
        run = run_log.read(str(turn.log), skip)
    if run is None or len(run.steps) < 2:
        return turn._replace(crash=f"no steps; {error_of(text)}")
    digests = {int(number): digest for number, digest in _DIGEST.findall(text)}
    peak = max(map(float, _PEAK.findall(text)), default=0.0) / 1024
    return turn._replace(run=run, digests=digests, peak_gib=peak or None)


def error_of(text: str) -> str:
    """Return the line of a log that tells most of its end: the first exception of a rank, else the last error.

    The other ranks and the launcher fail after it. Errors of a launcher count less, and the last line least.
    """
    lines = [printable(line).strip() for line in text.splitlines() if line.strip()]
    raised = [line for line in lines if _RAISED.match(line)]
    errors = [line for line in lines if _ERROR.search(line)]
    of_run = [line for line in errors if not _OF_LAUNCHER.match(line)]
    said = raised[:1] or of_run[-1:] or errors[-1:] or lines[-1:] or ["it printed nothing"]
    return short(said[0], MOST_OF_AN_ERROR)
