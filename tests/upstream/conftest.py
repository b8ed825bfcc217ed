"""Upstream's own runs, beside those of `--wlb`: the warm parent and the data of the adapter's tests."""

from tests.adapter.conftest import dataset, profile, upstream

__all__ = ["dataset", "profile", "upstream"]
