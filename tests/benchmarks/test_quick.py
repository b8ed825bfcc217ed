"""Benchmarks of predictions, which nothing else runs, run through."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("name", ["cp_balance", "placement", "step_time"])
def test_it_runs(name):
    command = [sys.executable, "-m", f"benchmarks.{name}", "--quick"]
    run = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "holds " in run.stdout
