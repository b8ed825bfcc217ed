"""Windows and blends are cut and drawn as by upstream's helpers."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.datasets import helpers_cpp as helpers

from megatron_wlb.plan.samples import blended, windows


def test_windows_are_cut_as_by_upstreams_helpers():
    lengths = np.random.default_rng(0).lognormal(3, 1, 300).astype(np.int32)
    made = windows(lengths, 64, num_samples=200)
    epochs = len(made.document_index) // len(lengths)
    theirs = helpers.build_sample_idx_int32(lengths, made.document_index, 64, epochs, int(lengths.sum()), True, 1)
    np.testing.assert_array_equal(made.sample_index, theirs)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=5), st.integers(1, 300))
def test_blends_are_drawn_as_by_upstreams_helpers(weights, count):
    which, of_part = np.empty(count, np.int16), np.empty(count, np.int64)
    helpers.build_blending_indices(which, of_part, np.array(weights) / sum(weights), len(weights), count, False)
    for ours, theirs in zip(blended(weights, weights, count), (which, of_part), strict=True):
        np.testing.assert_array_equal(ours, theirs)
