"""`scripts/demo.sh`: what it says of times, and all of it with short steps."""

import math
import subprocess
import sys

import pytest

from scripts.demo.report import ratio
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
