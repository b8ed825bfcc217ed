"""The command line in an environment of its own, installed as a user would: without torch, without Megatron."""

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

from tests.cli.commands import ROOT
from tests.cli.test_plan import FLAGS, make_lengths


@pytest.mark.full
def test_the_analysis_extra_plans_without_torch(tmp_path):
    """Needs the package index, as pip is configured here."""

    def run(*command):
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    run(sys.executable, "-m", "venv", "venv")
    pip = ["venv/bin/python", "-m", "pip"]
    # A copy, since setuptools leaves what it builds in the tree.
    ignored = shutil.ignore_patterns(".*", "build", "demo", "*.so", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, tmp_path / "tree", ignore=ignored)
    run(*pip, "install", "--constraint", "tree/requirements/constraints.txt", "./tree[analysis]")
    installed = {package["name"] for package in json.loads(run(*pip, "list", "--format", "json"))}
    assert installed >= {"megatron-wlb", "numpy", "rich", "matplotlib", "pyarrow", "scipy"}
    assert not installed & {"torch", "megatron-core"}

    np.save(tmp_path / "lengths.npy", np.array(make_lengths(4000)))
    for policy in ("wlb", "adaptive", "fixed", "original"):
        run(
            "venv/bin/megatron-wlb",
            "plan",
            "lengths.npy",
            *FLAGS,
            "--wlb-packing",
            policy,
            "--output",
            f"{policy}.jsonl",
        )
        header, *_, last = (tmp_path / f"{policy}.jsonl").read_text().splitlines()
        assert json.loads(header)["documents"] == 4000
        assert json.loads(last)["summary"]["waiting_documents"] == 0
    run("venv/bin/megatron-wlb", "tune", "lengths.npy", *FLAGS, "--steps", "40", "--picture", "front.png")
