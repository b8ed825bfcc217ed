"""Tests marked `full` run only with --run-full; no test has a deadline, since a busy machine is no failure."""

import os

import pytest
from hypothesis import settings

os.environ["OMP_NUM_THREADS"] = "1"  # threads that share a core with others wait for each other, for minutes
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--run-full", action="store_true", help="also run the tests that take minutes")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--run-full"):
        return
    for item in items:
        if "full" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="runs with --run-full"))
