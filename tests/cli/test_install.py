"""A wheel in an environment of its own, installed as a user would: without a compiler, torch or Megatron."""

import json
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

from megatron_wlb import __version__
from megatron_wlb.cli.main import main
from tests.adapter.datasets import write_index
from tests.cli.analyses import JOB, RUN
from tests.cli.commands import ROOT


def test_the_image_has_the_versions_of_the_tests():
    pinned, tested = (
        dict(re.findall(r"^([\w.-]+)==([\w.]+)", (ROOT / "requirements" / name).read_text(), re.MULTILINE))
        for name in ("analysis.txt", "constraints.txt")
    )
    assert len(pinned.items() & tested.items()) >= 6
    assert not [name for name in pinned.keys() & tested.keys() if pinned[name] != tested[name]]


def test_help_fits_a_screen_and_the_version_says_what_trains(capsys):
    def said(*words):
        with pytest.raises(SystemExit) as ended:
            main([*words])
        assert not ended.value.code
        return capsys.readouterr().out

    short = said("analyze", "-h")
    assert len(short.splitlines()) <= 40 and short.count("    megatron-wlb analyze") == 3 and "--html" in short
    versions = rf"megatron-wlb {re.escape(__version__)}( \([0-9a-f]{{7,}}\))?, megatron-core [\d.]+, torch [\d.]+\S*, "
    assert re.match(versions, said("--version"))


def test_an_older_python_is_refused_before_dependencies_are_sought():
    """pip asks setup.py for its requirements first, which looks like that."""
    program = (
        "import runpy, sys; sys.version_info = (3, 11, 7); sys.argv[1:] = ['egg_info']; runpy.run_path('setup.py')"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(
        r"megatron_wlb needs Python 3\.12 or newer, and this is \S+; install with a newer one\n", done.stderr
    )


@pytest.mark.full
def test_a_wheel_predicts_without_a_compiler_and_torch(tmp_path):
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
    run(*pip, "install", "--require-hashes", "--requirement", "tree/requirements/analysis.txt")  # as the image does
    run(*pip, "wheel", "--no-deps", "--wheel-dir", "wheels", "./tree")
    environment |= {"CC": "false", "CXX": "false"}
    run(*pip, "install", "--no-deps", *(str(wheel) for wheel in (tmp_path / "wheels").iterdir()))
    installed = {package["name"].lower() for package in json.loads(run(*pip, "list", "--format", "json"))}
    assert installed >= {"megatron-wlb", "numpy", "msgspec", "rich", "jinja2", "matplotlib", "scipy"}
    assert not installed & {"torch", "megatron-core"}

    run("venv/bin/megatron-rehearse", "--help")
    hooks = "import sys; print(any(hasattr(finder, 'installs_wlb') for finder in sys.meta_path))"
    assert [run("venv/bin/python", "-c", hooks, *flags).strip() for flags in ((), ("--wlb",))] == ["False", "True"]
    write_index(tmp_path / "data.idx", np.random.default_rng(3).integers(2, 4096, 4000))
    outputs = "--steps 2 --html report.html --json report.json --trace step.json".split()
    for words in (JOB.split(), [*RUN.split(), *JOB.split(), "--global-batch-size", "16"]):
        report = run("venv/bin/megatron-wlb", "analyze", *outputs, *words, "--data-path", "data")
        assert json.loads((tmp_path / "report.json").read_text())["headline"] in " ".join(report.split())
        assert "<h1 class=" in (tmp_path / "report.html").read_text()
        assert json.loads((tmp_path / "step.json").read_text())["traceEvents"]
