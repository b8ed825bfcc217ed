"""The warm parent of the adapter tests: it has imported torch and megatron; every test forks a fresh world from it."""

import pytest
import torch

from megatron_wlb.adapter import cpu
from tests.adapter.datasets import write_dataset

if not torch.cuda.is_available():
    cpu.install()
    cpu.install_megatron()

# What a run imports, imported before any fork; the tokenizers alone can take seconds.

from megatron_wlb.adapter import gpt  # noqa: F401


@pytest.fixture(scope="session")
def dataset(tmp_path_factory):
    """Prefix of a dataset of 300 documents whose lengths have a long tail (2 to 700 tokens, window 256)."""
    return write_dataset(tmp_path_factory.mktemp("data") / "corpus", seed=0, documents=300)
