"""Lengths that change do not make torch compile upstream's fusions over and over."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


def test_a_new_length_compiles_nothing(pytestconfig: pytest.Config) -> None:
    tests = Path(__file__).with_name("compiled.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore", str(tests)]
    done = subprocess.run(
        command + ["--run-full"] * pytestconfig.getoption("--run-full"),
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"TORCHDYNAMO_DISABLE": "0"},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= 3
