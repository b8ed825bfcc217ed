"""The warm parent of the adapter tests: it has imported torch and megatron; every test forks a fresh world from it."""

import argparse
import fcntl
import functools
import hashlib
import json
import os

import pytest
import torch

from megatron_wlb.adapter import cpu
from megatron_wlb.runtime.backends import choose_backend
from tests.adapter.datasets import write_dataset
from tests.adapter.training import BY_DOCUMENT, train

if not torch.cuda.is_available():
    cpu.install()
    cpu.install_megatron()

# What a run imports, imported before any fork; the tokenizers alone can take seconds.
import megatron.core.tokenizers.text  # noqa: F401
from megatron.training import argument_utils
from megatron.training.arguments import add_megatron_arguments

from megatron_wlb.adapter import training  # noqa: F401


def _read_docstrings_once():
    """Upstream builds its flags from the source text of its dataclasses, a second of work for every process."""
    factory = argument_utils.ArgumentGroupFactory
    original = factory._get_field_docstrings
    factory._get_field_docstrings = staticmethod(functools.cache(lambda cls: original(factory, cls)))
    add_megatron_arguments(argparse.ArgumentParser())


_read_docstrings_once()
choose_backend("cpu", (8, 8))  # tries it, once


@pytest.fixture(scope="session")
def dataset(tmp_path_factory):
    """Prefix of a dataset of 300 documents whose lengths have a long tail (2 to 700 tokens, window 256)."""
    return write_dataset(tmp_path_factory.mktemp("data") / "corpus", seed=0, documents=300)


@pytest.fixture(scope="session")
def upstream(dataset, tmp_path_factory):
    """Megatron's own run of flags over `dataset`: one of each for all tests of a session, whichever worker has them."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder

    def run(flags="", without="", size=1, wlb=False):
        key = hashlib.blake2b(repr((flags.split(), without, size, wlb)).encode(), digest_size=8).hexdigest()
        path = folder / f"upstream-{key}"
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                torch.save(train(size, dataset, *flags.split(), without=without, wlb=wlb), path)
            return torch.load(path, weights_only=False)

    return run


@pytest.fixture
def profile(tmp_path):
    """Flags that shard by document, for a kernel with these times in us."""

    def flags(launch, tile, hidden=0):
        kernel = {"launch": launch, "tile": tile, "query_tile": 0, "hidden": hidden}
        path = tmp_path / "profile.json"
        path.write_text(json.dumps({"name": "made up", "tile_rows": 1, "forward": kernel}))
        return f"{BY_DOCUMENT} --wlb-profile {path}"

    return flags
