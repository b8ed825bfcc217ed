"""`megatron-wlb trial` trains: two ranks of torchrun, from a checkpoint. `tests/cli/test_trial.py` has the rest."""

import json
import os
import subprocess
import sys

import pytest

from tests.adapter.test_script import CPU, ROOT, RUN, SCRIPT
from tests.adapter.training import ADAM, MODEL, train

LAUNCH = "-m torch.distributed.run --standalone --nproc-per-node 2".split()
FIRST, STEPS = 2, 5
HANGS_SECONDS = 3600
"""Of two or four starts of torchrun, on the slowest machine, too."""


@pytest.mark.parametrize("turns", [1, pytest.param(2, marks=pytest.mark.ci)])
def test_a_trial_trains_the_same_and_leaves_the_run_alone(turns, dataset, tmp_path):
    saved = tmp_path / "saved"
    run = [*ADAM, "--train-iters", "30", "--save", str(saved), "--save-interval", "1"]
    train(2, dataset, *run, "--exit-interval", str(FIRST), wlb=False, exits=True)
    before = {path: path.stat().st_mtime_ns for path in saved.rglob("*")}
    assert before
    outputs = f"--out {tmp_path}/out --json {tmp_path}/json --html {tmp_path}/html"
    words = f"trial --steps {STEPS} --turns {turns} {outputs} --".split()
    launch = [sys.executable, *LAUNCH, *RUN, SCRIPT, *MODEL, *CPU, "--data-path", dataset, *run, "--load", str(saved)]
    finished = subprocess.run(
        [sys.executable, "-m", "megatron_wlb", *words, *launch, "--tensorboard-dir", str(tmp_path / "board")],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"},
        capture_output=True,
        text=True,
        timeout=HANGS_SECONDS,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-6000:]
    found = json.loads((tmp_path / "json").read_text())
    assert [(turn["wlb"], turn["crashed"]) for turn in found["turns"]] == [(False, False), (True, False)] * turns
    assert found["first"] == FIRST and all(turn["steps"][-1][0] == FIRST + STEPS for turn in found["turns"])
    assert found["digests"] == {"steps": STEPS, "equal": STEPS, "first_other": None}
    assert found["loss_difference"] < 1e-6
    if turns > 1:
        assert found["loss_difference_without"] == 0
    # Of both ranks' prints.
    assert (tmp_path / "out" / "turn-2-with.log").read_text().count("> wlb is on: every step trains the same") == 1
    assert found["ratio"] > 0 and found["error"] > 0
    assert set(found["versions"]) >= {"megatron-wlb", "megatron-core", "torch"} and "CPU" in found["device"]
    assert [turn["peak_gib"] for turn in found["turns"]] == [None] * 2 * turns  # a CPU has no allocator that counts
    assert {path: path.stat().st_mtime_ns for path in saved.rglob("*")} == before
    assert not (tmp_path / "board").exists()
