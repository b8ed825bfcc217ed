"""Jobs under a real Slurm: signalled, they save, are requeued, resume and finish as if nothing had been."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.adapter.datasets import write_dataset
from tests.cli import trials
from tests.slurm.cluster import Cluster, missing

ROOT = Path(__file__).parents[2]
STEPS = 30
HANGS_SECONDS = 600
"""What takes longer hangs, on the slowest machine, too."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    if missing():
        pytest.skip(f"Slurm is not installed here: no {', '.join(missing())}")
    with Cluster(tmp_path_factory.mktemp("slurm")) as running:
        yield running


def submit(cluster, data, folder, *options, **environment):
    folder.mkdir(exist_ok=True)
    settings = {
        "MEGATRON_WLB_HOME": str(ROOT),
        "PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT),
        "DATA_PATH": data,
        "RUNS": str(folder),
        "STEPS": str(STEPS),
        **environment,
    }
    log = folder / "log"
    script = str(ROOT / "scripts/slurm/demo.sbatch")
    job = cluster.run("sbatch", "--parsable", f"--output={log}", *options, script, **settings)
    return job, log


def wait_for(cluster, job, log, condition):
    deadline = time.monotonic() + HANGS_SECONDS
    while not condition():
        text = log.read_text() if log.exists() else ""
        assert cluster.state(job) not in ("FAILED", "NODE_FAIL", "TIMEOUT", "CANCELLED"), text[-3000:]
        assert time.monotonic() < deadline, f"{cluster.state(job)}: {text[-3000:]}"
        time.sleep(0.5)


def executable(path, text):
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def losses(log):
    """Loss by step; a step that was trained twice counts as trained last."""
    return dict(re.findall(r"wlb step +(\d+) \| loss ([\d.]+)", log.read_text() if log.exists() else ""))


@pytest.mark.ci
def test_a_signalled_job_is_requeued_and_resumes(cluster, tmp_path):
    data = str(write_dataset(tmp_path / "data", seed=0, documents=400))
    whole, whole_log = submit(cluster, data, tmp_path / "whole")
    wait_for(cluster, whole, whole_log, lambda: cluster.state(whole) == "COMPLETED")
    job, log = submit(cluster, data, tmp_path / "stopped")
    wait_for(cluster, job, log, lambda: len(losses(log)) >= 3)
    cluster.run("scancel", "--batch", "--signal=USR1", job)
    wait_for(cluster, job, log, lambda: "requeued" in log.read_text())
    assert int((tmp_path / "stopped/wlb-demo/checkpoints/latest_checkpointed_iteration.txt").read_text()) < STEPS
    wait_for(cluster, job, log, lambda: cluster.state(job) == "PENDING" and cluster.idle())
    # Slurm would wait for two minutes: what runs before this second is over would be taken for the job it just killed.
    time.sleep(5)  # by the clock, in which Slurm counts seconds; the nodes are done with the killed job
    cluster.run("scontrol", "update", f"JobId={job}", "StartTime=now")
    wait_for(cluster, job, log, lambda: cluster.state(job) == "COMPLETED")
    assert len(losses(log)) == STEPS
    assert losses(log) == losses(whole_log)
    assert log.read_text().count("wlb step") == STEPS  # nothing was trained twice


TORCHRUN = """#!/usr/bin/env bash
# A stand-in for torchrun and a trainer; the second node ends later.
case $MOMENT in
    rendezvous) echo "there $SLURM_NODEID"; exec sleep 600 ;;
    imports)
        sleep 600 &
        echo "there $SLURM_NODEID"
        ;;
    training) (
        trap 'sleep "$SLURM_NODEID"; echo "saved $SLURM_NODEID"; exit 0' TERM
        echo "there $SLURM_NODEID"
        while :; do sleep 0.1; done
    ) & ;;
esac
wait "$!"
"""


@pytest.mark.ci
@pytest.mark.parametrize(
    ("moment", "receivers", "saved"),
    [("training", "--batch", 2), ("training", "--full", 2), ("imports", "--batch", 0), ("rendezvous", "--batch", 0)],
)
def test_a_signal_requeues_two_nodes_at_any_moment(cluster, tmp_path, moment, receivers, saved):
    tools = tmp_path / "bin"
    executable(tools / "torchrun", TORCHRUN)
    executable(tools / "pkill", "#!/bin/sh\nexit 127\n")  # an image may lack it
    environment = {"PYTHON": str(tools / "torchrun"), "MOMENT": moment, "PATH": f"{tools}:{os.environ['PATH']}"}
    job, log = submit(cluster, "data", tmp_path / "runs", "--nodes=2", **environment)
    wait_for(cluster, job, log, lambda: log.exists() and log.read_text().count("there") == 2)
    cluster.run("scancel", receivers, "--signal=USR1", job)
    wait_for(cluster, job, log, lambda: cluster.state(job) == "PENDING")
    cluster.run("scancel", job)
    assert log.read_text().count("saved") == saved
    status = re.search(r"stopped by a signal, with status (\d+); requeued", log.read_text())
    assert status is not None
    assert (status[1] == "0") == (saved == 2), log.read_text()


@pytest.mark.parametrize(
    ("environment", "given"),
    [
        ({}, "scripts/slurm/node.sh"),
        ({}, "\nPYTHON=/nodes/python\n"),
        ({"CONTAINER_IMAGE": "image.sqsh"}, "\nPYTHON=python3\n"),
        ({"CONTAINER_IMAGE": "image.sqsh"}, " --container-env CUDA_DEVICE_MAX_CONNECTIONS bash /opt/megatron_wlb/"),
        ({}, f" {ROOT}/pretrain_gpt.py --data-path corpus --save "),
        ({}, " --distributed-backend gloo "),
        ({"CHECKOUT": "/checkout"}, " -m megatron_wlb.run /checkout/pretrain_gpt.py --data-path corpus --save "),
        ({}, "\nCUDA_DEVICE_MAX_CONNECTIONS=1\n"),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, "\nCUDA_DEVICE_MAX_CONNECTIONS=8\n"),
        ({}, "\nPYTORCH_CUDA_ALLOC_CONF=expandable_segments:True\n"),
        ({"PYTORCH_CUDA_ALLOC_CONF": ""}, "\nPYTORCH_CUDA_ALLOC_CONF=\n"),
        ({"DATA_PATH": ""}, "DATA_PATH is not set; edit scripts/slurm/site.sh"),
        ({"CONTAINER_IMAGE": "image.sqsh", "PYXIS": ""}, "srun has no --container-image (pyxis); leave it empty"),
    ],
)
def test_what_a_task_is_given(tmp_path, environment, given):
    """Or what ends the job."""
    executable(tmp_path / "srun", '#!/bin/sh\necho "srun ${PYXIS---container-image} $*"\nenv\n')
    executable(tmp_path / "scontrol", "#!/bin/sh\necho node\n")
    executable(tmp_path / "sleep", "#!/bin/sh\n")
    settings = {"MEGATRON_WLB_HOME": str(ROOT), "DATA_PATH": "corpus", "RUNS": str(tmp_path), "PYTHON": "/nodes/python"}
    job = {"SLURM_JOB_NAME": "job", "SLURM_JOB_NODELIST": "node", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_ID": "1"}
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **settings, **job, **environment}
    command = ["bash", str(ROOT / "scripts/slurm/demo.sbatch")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert given in done.stdout + done.stderr
    assert bool(done.returncode) == (";" in given)


def trial(cluster, folder):
    """The words of a trial with two turns of a run that srun starts, and its environment."""
    environment = trials.environment(folder / "told") | {"SLURM_CONF": str(cluster.folder / "slurm.conf")}
    data = write_dataset(folder / "data", seed=0, documents=400)
    run = f"srun --ntasks 1 {sys.executable} {trials.SCRIPT}"
    words = trials.words(folder / "told", data, "--turns 1", script=run)
    return [sys.executable, "-m", "megatron_wlb", *words], environment


@pytest.mark.ci
def test_a_trial_runs_in_a_script(cluster, tmp_path):
    words, environment = trial(cluster, tmp_path)
    log = tmp_path / "log"
    options = ["--parsable", f"--output={log}", f"--chdir={ROOT}", "--wrap", shlex.join(words)]
    job = cluster.run("sbatch", *options, **environment)
    wait_for(cluster, job, log, lambda: cluster.state(job) == "COMPLETED")
    assert "measured in 1 pair of turns" in log.read_text()
    assert "Digests are equal at 12 of 12 steps" in log.read_text()


@pytest.mark.ci
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_trial_that_is_stopped_ends_the_job_of_srun(number, cluster, tmp_path):
    words, environment = trial(cluster, tmp_path)
    (tmp_path / "told" / "hangs").touch()
    trials.stopped(words, number, tmp_path / "told", cwd=ROOT, env=os.environ | environment)
    deadline = time.monotonic() + HANGS_SECONDS
    while not cluster.idle():
        assert time.monotonic() < deadline, cluster.run("squeue")
        time.sleep(0.5)
