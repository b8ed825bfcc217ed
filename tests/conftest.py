"""Tests marked `ci` run with --run-ci, `full` with --run-full, which runs both; no test has a deadline, since a busy
machine is no failure.

Hypothesis tries the same examples on every machine; `--hypothesis-profile random` tries others, and ten times as many.
"""

import os
import sys
from pathlib import Path

import pytest
from hypothesis import settings

os.environ["OMP_NUM_THREADS"] = "1"  # threads that share a core with others wait for each other, for minutes
# Each process that a test starts would compile the modules of torch and megatron again, for seconds.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Upstream builds an extension where latents are recomputed, and again if another environment built it since.
os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "torch_extensions"))
settings.register_profile("same", deadline=None, derandomize=True)
settings.register_profile("random", deadline=None, max_examples=1000)
settings.load_profile("same")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--run-ci", action="store_true", help="also run what is tested before a change is merged")
    parser.addoption("--run-full", action="store_true", help="also run all tests that take minutes")


def pytest_report_header(config: pytest.Config) -> str | None:
    folder = Path(__file__).parent / "gpu"
    if not any(folder.is_relative_to(Path(arg).resolve()) for arg in config.args):
        return None
    import torch  # takes seconds, which other tests may not need

    num_files = len(list(folder.glob("test_*.py")))
    return None if torch.cuda.is_available() else f"tests/gpu: {num_files} file(s) not collected, no GPU"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: "tests/slurm/" not in item.nodeid)  # those wait for minutes, in which others run
    if config.getoption("--run-full"):
        return
    off = ["full"] if config.getoption("--run-ci") else ["ci", "full"]
    for item in items:
        for mark in off:
            if item.get_closest_marker(mark):
                item.add_marker(pytest.mark.skip(reason=f"runs with --run-{mark}"))
