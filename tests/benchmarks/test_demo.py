"""`scripts/demo.sh`: what it says of times, and all of it with short steps."""

import math
import subprocess
import sys

import pytest

from scripts.demo.report import judge, ratio
from tests.cli.commands import ROOT


def test_a_ratio_is_of_tokens_a_second_and_noise_that_hits_both_cancels():
    plain, ours = ([{"step_ms": t * noise, "tokens": n} for noise in (1, 3, 2)] for t, n in ((6, 4), (4, 2)))
    value, error = ratio(plain, ours)
    assert value == pytest.approx(0.75) and error == pytest.approx(0)
    ours[0]["step_ms"] = 8
    value = 36 / 12 / (28 / 6)
    assert ratio(plain, ours) == pytest.approx((value, value * math.sqrt(19 / 196 / 3)))
    assert math.isnan(ratio(plain[:1], ours[:1])[1])


@pytest.mark.parametrize(("value", "tone"), [(1.3, "gain"), (0.7, "loss"), (1.19, "close"), (0.81, "close")])
def test_a_difference_counts_from_two_standard_errors(value, tone):
    assert judge(value, 0.1)[1] == tone


@pytest.mark.full
def test_the_demo(tmp_path):
    changed = "run.STEPS, run.SAVED, run.WINDOW, run.LONGER = 5, 3, 512, 128"
    program = f"from scripts.demo import run; {changed}; run.main()"
    command = [sys.executable, "-c", program]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (
        "\n   5 " in done.stdout
        and "steps 4 to 5 have the same documents, and the same loss to the last bit" in done.stdout
    )
    assert all("<h1 class=" in (tmp_path / f"demo/{page}.html").read_text() for page in ("report", "analyze"))
