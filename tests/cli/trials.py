"""Trials of the run in `stand_in/`: how they are started, and stopped."""

import json
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.cli.analyses import JOB
from tests.cli.stand_in import pretrain_gpt as stand_in
from tests.jobs import job

SCRIPT = str(Path(stand_in.__file__))
STEPS, SKIP = 12, 4
NUM_GPUS = f"--num-gpus {stand_in.GPUS}"
HANGS_SECONDS = 600


def environment(folder):
    """What the run reads; makes the folder where it is told what to do."""
    folder.mkdir()
    of_job = job(dp=2, pp=2).to_json()
    of_job["profile"] |= {"name": "h100-cudnn", "device": "NVIDIA H100"}
    settings = {"TRIAL": str(folder), "JOB": json.dumps(of_job), "DEVICE": "NVIDIA H100 80GB HBM3"}
    return settings | {"MICRO_BATCHES": str(stand_in.WINDOWS)}


def words(folder, data, own="", flags="", script=f"{sys.executable} {SCRIPT}"):
    """The words of `megatron-wlb trial` with `own` ones, of a command with `flags`; `data` may be ""."""
    data = f"--data-path {data}" if data else ""
    out = folder.parent / "out"
    ours = f"trial --steps {STEPS} --out {out} {own} {NUM_GPUS} --"
    return shlex.split(f"{ours} {script} {JOB} {data} --bf16 {flags}")


def started(folder):
    """The words of every process."""
    path = folder / "argv"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def stopped(command, number, folder, **options):
    """Start a trial, signal it once its run hangs, and wait until it and the run's processes are gone."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what runs in background
    trial = subprocess.Popen(command, **options)
    signal.signal(signal.SIGINT, before)
    deadline = time.monotonic() + HANGS_SECONDS
    while not (processes := folder / "processes").exists() or len(processes.read_text().split()) < 2:
        assert trial.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    trial.send_signal(number)
    assert trial.wait(HANGS_SECONDS) == 128 + number
    while any(map(alive, map(int, processes.read_text().split()))):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def alive(process):
    """Whether it runs; a zombie, which nobody has waited for, does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
