"""The demo's job under a real Slurm: signalled, it saves, is requeued, resumes and finishes as if nothing had been."""

import re
import sys
import time
from pathlib import Path

import pytest

from tests.adapter.datasets import write_dataset
from tests.slurm.cluster import Cluster, missing

ROOT = Path(__file__).parents[2]
STEPS = 30

pytestmark = pytest.mark.skipif(bool(missing()), reason=f"Slurm is not installed here: no {', '.join(missing())}")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with Cluster(tmp_path_factory.mktemp("slurm")) as running:
        yield running


def submit(cluster, data, folder, script="demo.sbatch", **environment):
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
    job = cluster.run(
        "sbatch", "--parsable", f"--output={log}", str(ROOT / "scripts/slurm" / script), **settings
    )  # fmt: skip
    return job, log


def wait_for(cluster, job, log, condition, seconds=300):
    deadline = time.monotonic() + seconds
    while not condition():
        text = log.read_text() if log.exists() else ""
        assert cluster.state(job) not in ("FAILED", "NODE_FAIL", "TIMEOUT", "CANCELLED"), text[-3000:]
        assert time.monotonic() < deadline, f"{cluster.state(job)}: {text[-3000:]}"
        time.sleep(0.5)


def losses(log):
    """Loss by step; a step that was trained twice counts as trained last."""
    return dict(re.findall(r"wlb step +(\d+) \| loss ([\d.]+)", log.read_text() if log.exists() else ""))


def test_a_signalled_job_is_requeued_and_resumes(cluster, tmp_path):
    data = str(write_dataset(tmp_path / "data", seed=0, documents=400))
    whole, whole_log = submit(cluster, data, tmp_path / "whole")
    wait_for(cluster, whole, whole_log, lambda: cluster.state(whole) == "COMPLETED")
    job, log = submit(cluster, data, tmp_path / "stopped")
    wait_for(cluster, job, log, lambda: len(losses(log)) >= 3)
    cluster.run("scancel", "--signal=USR1", job)
    wait_for(cluster, job, log, lambda: "requeued" in log.read_text())
    assert int((tmp_path / "stopped/wlb-demo/checkpoints/latest_checkpointed_iteration.txt").read_text()) < STEPS
    wait_for(cluster, job, log, lambda: cluster.state(job) == "PENDING", 60)
    # Slurm would wait for two minutes: what runs before this second is over would be taken for the job it just killed.
    time.sleep(5)
    cluster.run("scontrol", "update", f"JobId={job}", "StartTime=now")
    wait_for(cluster, job, log, lambda: cluster.state(job) == "COMPLETED")
    assert len(losses(log)) == STEPS
    assert losses(log) == losses(whole_log)
    assert log.read_text().count("wlb step") == STEPS  # nothing was trained twice


@pytest.mark.parametrize(
    ("environment", "script", "message"),
    [
        ({"DATA_PATH": ""}, "demo.sbatch", "DATA_PATH is not set; edit scripts/slurm/site.sh"),
        ({"CONTAINER_IMAGE": "image.sqsh"}, "demo.sbatch", "srun has no --container-image (pyxis); leave it empty"),
    ],
)
def test_wrong_settings_end_the_job_with_one_line(cluster, tmp_path, environment, script, message):
    job, log = submit(cluster, "nowhere", tmp_path / "runs", script, **environment)
    deadline = time.monotonic() + 60
    while cluster.state(job) != "FAILED":
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert message in log.read_text()
