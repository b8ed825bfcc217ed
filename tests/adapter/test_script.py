"""A script that calls upstream itself, under `megatron_wlb.run`: --wlb takes over, and nothing changes without it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.adapter.training import MODEL, WLB, train

ROOT = Path(__file__).parents[2]
SCRIPT = str(Path(__file__).with_name("upstream_script.py"))


def launch(*command, processes=2):
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), *command]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    return subprocess.run(run, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=False)


def steps(finished):
    assert finished.returncode == 0, finished.stderr[:6000]
    return re.findall(r"wlb step.*? waiting \d+ documents", finished.stdout)  # both ranks print, into each other


def test_wlb_in_an_unmodified_script_trains_as_our_own(dataset):
    flags = [*MODEL, *WLB, "--data-path", dataset, "--context-parallel-size", "2", "--eval-interval", "100"]
    theirs = steps(launch("-m", "megatron_wlb.run", SCRIPT, *flags))
    assert len(theirs) == 2
    assert theirs == steps(launch(str(ROOT / "pretrain_gpt.py"), *flags))


def test_flags_of_the_checkpoint_are_checked_in_a_script(dataset, tmp_path):
    """All but attention dropout, which the script may build its model with."""
    common = ["--optimizer", "adam", "--data-cache-path", str(tmp_path / "cache")]
    save = ["--save", str(tmp_path), "--save-interval", "9", "--train-iters", "1", "--attention-dropout", "0.1"]
    train(1, dataset, *common, *save, wlb=False)
    first = MODEL.index("--seq-length")
    flags = [*MODEL[:first], *MODEL[first + 2 :], *common, "--data-path", dataset, "--eval-interval", "100"]
    flags += ["--load", str(tmp_path), "--use-checkpoint-args", "--override-opt-param-scheduler"]
    flags += ["--wlb", "--wlb-restart-packing"]
    finished = launch("-m", "megatron_wlb.run", SCRIPT, *flags, processes=1)
    assert len(steps(finished)) == 1
    assert re.search(r" attention_dropout \.+ 0\.0\n", finished.stdout)
    finished = launch("-m", "megatron_wlb.run", SCRIPT, *flags, "--wlb-max-tokens", "128", processes=1)
    assert re.search(
        "error: --wlb-max-tokens 128 is under --seq-length 256.*; flags of the checkpoint", finished.stderr
    )


def test_without_wlb_the_script_is_on_its_own(dataset):
    flags = [*MODEL, "--data-path", dataset, "--eval-interval", "100"]
    finished = launch("-m", "megatron_wlb.run", SCRIPT, *flags, processes=1)
    assert finished.returncode != 0
    assert "RuntimeError: the script's own" in finished.stderr


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ([], "no script given; give the path of pretrain_gpt.py in a Megatron-LM checkout"),
        (["nowhere/pretrain_gpt.py"], "nowhere/pretrain_gpt.py is not a file; give the path"),
        ([SCRIPT, "--wlb", *MODEL, "--micro-batch-size", "2"], "--micro-batch-size is 2; a micro-batch is one packed"),
    ],
)
def test_bad_input_is_one_line(command, message):
    finished = subprocess.run(
        [sys.executable, "-m", "megatron_wlb.run", *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert finished.returncode == 2
    errors = [line for line in finished.stderr.splitlines() if "error: " in line]
    assert len(errors) == 1
    assert message in errors[0]
    assert "Traceback" not in finished.stderr
