"""Mock documents: the same for whoever reads which part of them; lengths as the flag says."""

import numpy as np
import pytest

from megatron_wlb.plan.mock import F2, MockIndex, mock_lengths


def test_tokens_are_those_of_their_place():
    index = MockIndex(distribution=F2, seed=3, vocabulary=50)
    whole = index.read(7, 0, 5000)
    assert np.array_equal(whole[123:2345], index.read(7, 123, 2222))
    counts = np.bincount(whole, minlength=50)
    assert len(counts) == 50 and counts.min() > 60  # of 100 on average
    others = [MockIndex(distribution=F2, seed=4, vocabulary=50).read(7, 0, 5000), index.read(8, 0, 5000)]
    assert all(0.01 < np.mean(whole == other) < 0.03 for other in (*others, np.roll(whole, 1)))


def test_lengths_have_the_body_and_the_tail_of_the_flag():
    given = mock_lengths("2,0.5,0.25,1000,1")
    first, second = (MockIndex(distribution=given, seed=seed, vocabulary=2) for seed in (0, 1))
    tail = first.lengths[first.lengths >= 1000]
    assert len(tail) / len(first.lengths) == pytest.approx(0.25, rel=0.02)
    assert np.mean(tail >= 2000) == pytest.approx(0.5, rel=0.02)
    assert first.lengths.min() == 16 and first.lengths.max() == 131_072
    assert (first.lengths != second.lengths).any()


@pytest.mark.parametrize("text", ["F3", "1,2,3", "7,0.8,1.5,100,1", "7,0.8,0.5,100,0", "nan,0.8,0.5,100,1", ""])
def test_what_is_no_distribution_is_refused(text):
    with pytest.raises(ValueError, match="must be F2, or MU,SIGMA,SHARE,MINIMUM,ALPHA: mean and"):
        mock_lengths(text)
