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
from tests.fuzz.targets import TARGETS, require

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
    assert len(outcome.kinds) >= 3


def stray():
    try:
        Path("/dev/shm/elsewhere").write_text("x")
    except loop.Outside:
        raise ValueError("refused") from None


WRONG = {
    "ended with -9": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "MemoryError": lambda: bytearray(2 * loop.MEMORY_BYTES),
    "outside of its folder: open": stray,
    "Slow: over": lambda: time.sleep(60),
    "outside of its folder: pickle.find_class": lambda: pickle.loads(pickle.dumps(Path("x"))),
    "Broken: an invariant": lambda: require(False, "an invariant"),
    "KeyError": lambda: {}["key"],
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_found(what, monkeypatch):
    """The first input, which warms up, is read unconfined."""
    if what == "Slow: over":
        monkeypatch.setattr(loop, "SECONDS_AN_INPUT", 2.0)
    target = replace(
        TARGETS["index"],
        read=lambda data, folder: data == b"first" or WRONG[what](),
        seeds=lambda: [b"first", b"second"],
    )
    outcome = fuzz(target, [], seed=1, executions=2, seconds=HANGS_SECONDS)
    assert [data for data, _ in outcome.findings] == [b"second"]
    assert what in outcome.findings[0][1]
    assert not Path("/dev/shm/elsewhere").exists()


def test_the_driver_writes_what_it_found(tmp_path):
    benchmark.main(["--targets", "log", "--minutes", "0.005", "--output", str(tmp_path), "--check"])
    outcome = json.loads((tmp_path / "fuzz.json").read_text())
    assert outcome["rows"][0]["target"] == "log" and outcome["rows"][0]["executions"] > 0
    assert all(goal["holds"] for goal in outcome["goals"])
