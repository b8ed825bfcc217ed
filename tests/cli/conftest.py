"""Data that `megatron-wlb analyze` reads in its tests."""

import pytest

from tests.adapter.datasets import write_index
from tests.cli.analyses import drawn


@pytest.fixture(scope="module")
def lengths():
    """Tokens of documents, for about 290 steps."""
    return drawn()


@pytest.fixture(scope="module")
def data(tmp_path_factory, lengths):
    """Prefix of a dataset whose `.bin` file is elsewhere."""
    prefix = tmp_path_factory.mktemp("data") / "corpus"
    write_index(prefix.with_suffix(".idx"), lengths)
    return str(prefix)


@pytest.fixture(scope="module")
def long(tmp_path_factory, lengths):
    """Flags of a dataset with documents that are eight times as long."""
    prefix = tmp_path_factory.mktemp("long") / "long"
    write_index(prefix.with_suffix(".idx"), 8 * lengths)
    return f"--split 1 --data-path {prefix}"
