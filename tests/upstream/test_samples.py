"""Windows and blends are cut and drawn as by upstream's helpers, and samples taken as by its samplers."""

from argparse import Namespace
from itertools import islice

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.datasets import helpers_cpp as helpers
from megatron.training.datasets.data_samplers import MegatronFullValidationSampler, MegatronPretrainingRandomSampler

from megatron_wlb.adapter.sources.order import order_of
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


@given(st.integers(1, 40), st.integers(1, 3), st.integers(1, 3), st.booleans(), st.sampled_from(["train", "valid"]))
def test_samples_are_permuted_as_by_upstreams_sampler(more, size, ranks, sharding, split):
    """In two epochs, in micro-batches of training or of evaluation."""
    total, count = size * ranks + more, (size * ranks + more) // (size * ranks)
    args = Namespace(data_parallel_size=ranks, full_validation=False, data_sharding=sharding)
    args.wlb_dataloader_type, sizes = "cyclic", (size, size + 1) if split == "train" else (size + 1, size)
    args.wlb_windows_per_micro_batch, args.wlb_eval_windows_per_micro_batch = sizes
    order, steps = order_of(args, split, total)
    assert steps is None
    ours = order(np.arange(2 * count * ranks * size)).reshape(2, count, ranks, size)
    for rank in range(ranks):
        for epoch in range(2):
            begun = epoch * count * ranks * size
            theirs = MegatronPretrainingRandomSampler(None, total, begun, size, rank, ranks, sharding)
            assert ours[epoch, :, rank].tolist() == [*islice(theirs, count)]


@given(st.integers(1, 40), st.integers(1, 5))
def test_a_pass_over_a_validation_set_is_that_of_upstreams_sampler(total, ranks):
    """Of the ranks with most samples; others begin again."""
    ranks = min(ranks, total)
    order, steps = order_of(Namespace(data_parallel_size=ranks, full_validation=True), "valid", total)
    ours = order(np.arange(steps * ranks)).reshape(steps, ranks)
    for rank in range(ranks):
        theirs = [sample for batch in MegatronFullValidationSampler(total, rank, ranks) for sample in batch]
        assert ours[:, rank].tolist() == (theirs * 2)[:steps]
    assert steps == len(MegatronFullValidationSampler(total, 0, ranks))
    in_order = Namespace(data_parallel_size=ranks, full_validation=True, wlb_dataloader_type="single")
    assert order_of(in_order, "train", total) == order_of(in_order, "test", total) == (None, None)
