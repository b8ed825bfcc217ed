"""`scripts/demo.sh`: what it says of times, and all of it with short steps."""

import math
import subprocess
import sys

import pytest

from scripts.demo import run
from scripts.demo.report import judge, nothing, ratio
from tests.cli.commands import ROOT


def test_a_ratio_is_of_tokens_a_second():
    steps = [(6, 4, 1, 9), (18, 4, 1, 9), (12, 4, 1, 9)], [(4, 2, 9, 8), (12, 2, 9, 9), (8, 2, 9, 10)]
    plain, ours = ([{"step_ms": t, "tokens": n, "work": [a, b - a]} for t, n, a, b in way] for way in steps)
    value, error = ratio(plain, ours)
    assert value == pytest.approx(0.75)
    assert error == pytest.approx(0.75 / 9 / math.sqrt(3))  # work alone parts them: by -1/9, 0 and 1/9
    ours = [step | {"work": [9]} for step in ours]
    assert ratio(plain, ours) == pytest.approx((0.75, 0))
    assert math.isnan(ratio(plain[:1], ours[:1])[1])


@pytest.mark.parametrize(
    ("value", "error", "words", "tone"),
    [
        (1.25, 0.02, "1.25 ± 0.02 times as many tokens per second with --wlb as with Megatron's windows", "gain"),
        (0.75, 0.02, "0.75 ± 0.02 times", "loss"),
        (1.03, 0.05, "Within noise: 1.03 ± 0.05 times", "close"),
        (1.03, 0.17, "This machine is too busy to measure: 1.03 ± 0.17 is noise", "noise"),
        (2.04, 0.98, "This machine is too busy to measure", "noise"),
        (2.04, math.nan, "This machine is too busy to measure", "noise"),
    ],
)
def test_noise_is_no_result(value, error, words, tone):
    said, found = judge(value, error)
    assert said.startswith(words) and found == tone
    assert ("too busy to measure it" in nothing(1, value, error)) == (tone == "noise")


def test_the_demo_looks_at_the_load_first(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda process: range(4))
    free = round(sum(run.SECONDS) / 60)
    for load, times in ((0.4, 1), (2.0, 1), (14.0, 4)):
        monkeypatch.setattr("os.getloadavg", lambda load=load: (load, 0, 0))
        found, said = run.expected()
        assert found == times and ("better wait" in said) == (times > run.BUSY)
        assert said.startswith(f"The demo takes about {free} minutes on two free cores")
    assert f"here up to {round(sum(run.SECONDS) / 60 * 4)}: 14 processes run on 4 cores" in said


@pytest.mark.full
def test_the_demo(tmp_path):
    changed = "run.STEPS, run.SAVED, run.WINDOW, run.ALIKE_STEPS = 5, 3, 512, 4"
    program = f"from scripts.demo import run; {changed}; run.main()"
    command = [sys.executable, "-c", program]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "\n   5 " in done.stdout
    assert "steps 4 to 5 have the same documents, and the same loss to the last bit" in done.stdout
    assert all("<h1 class=" in (tmp_path / f"demo/{page}.html").read_text() for page in ("report", "analyze"))
