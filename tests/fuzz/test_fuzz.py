"""A few seconds of fuzzing: kept and mutated inputs break nothing, and what would break something is seen.

`python -m benchmarks.fuzz` runs for longer; `tests/plan/test_sanitizers.py` has the native cores.
"""

import json
import os
import pickle
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import fuzz as benchmark
from tests.fuzz import loop
from tests.fuzz.loop import fuzz
from tests.fuzz.targets import TARGETS, Broken

HANGS_SECONDS = 600.0
"""What takes longer hangs, on the slowest machine, too; numbers of executions end the runs."""


@pytest.mark.parametrize("name", TARGETS)
def test_a_reader_refuses_or_reads_whatever_it_gets(name):
    corpus = benchmark.corpus_of(name)
    assert corpus, "the corpus is kept"
    outcome = fuzz(TARGETS[name], corpus, seed=1, executions=len(corpus) + 1500, seconds=HANGS_SECONDS)
    assert not outcome.findings, f"{outcome.findings[0][0]!r}: {outcome.findings[0][1]}"
    assert outcome.executions > len(corpus)
    assert 0 < outcome.accepted < outcome.executions
    assert outcome.kinds >= 3


def crash(data, folder):
    os.kill(os.getpid(), signal.SIGKILL)


def fill(data, folder):
    return bytearray(2 * loop.MEMORY_BYTES)


def stray(data, folder):
    try:
        Path("/dev/shm/elsewhere").write_text("x")
    except loop.Outside:
        raise ValueError("refused") from None


def hang(data, folder):
    time.sleep(60)


def unpickle(data, folder):
    pickle.loads(pickle.dumps(Path("x")))


def broken(data, folder):
    raise Broken("an invariant")


@pytest.mark.parametrize(
    ("read", "what"),
    [
        (crash, "ended with -9"),
        (fill, "MemoryError"),
        (stray, "outside of its folder: open"),
        (hang, "Slow: over"),
        (unpickle, "outside of its folder: pickle.find_class"),
        (broken, "Broken: an invariant"),
        (lambda data, folder: {}["key"], "KeyError"),
    ],
    ids=["crash", "fill", "stray", "hang", "unpickle", "broken", "another exception"],
)
def test_what_is_wrong_is_found(read, what, monkeypatch):
    """The first input, which warms up, is read unconfined."""
    if read is hang:
        monkeypatch.setattr(loop, "SECONDS_AN_INPUT", 2.0)  # of which the first input takes nothing

    def late(data, folder):
        if data != b"first":
            read(data, folder)

    target = replace(TARGETS["index"], read=late, seeds=lambda: [b"first", b"second"])
    outcome = fuzz(target, [], seed=1, executions=2, seconds=HANGS_SECONDS)
    assert [data for data, _ in outcome.findings] == [b"second"]
    assert what in outcome.findings[0][1]
    assert not Path("/dev/shm/elsewhere").exists()


def test_the_same_seed_makes_the_same_inputs():
    runs = [fuzz(TARGETS["step_log"], [], seed=5, executions=300, seconds=HANGS_SECONDS) for _ in range(2)]
    assert runs[0].new == runs[1].new != []
    assert runs[0].executions == runs[1].executions == 300


def test_the_driver_writes_what_it_found(tmp_path):
    benchmark.main(["--targets", "log", "--minutes", "0.005", "--output", str(tmp_path), "--check"])
    outcome = json.loads((tmp_path / "fuzz.json").read_text())
    assert outcome["rows"][0]["target"] == "log" and outcome["rows"][0]["executions"] > 0
    assert all(goal["holds"] for goal in outcome["goals"])
