"""Mock documents: the same for whoever reads which part of them; lengths as the flag says."""

import numpy as np
import pytest

from megatron_wlb.plan.mock import F2, MockDocuments, mock_lengths


def mock(seed=3, distribution=F2, vocabulary=50):
    return MockDocuments(distribution=distribution, seed=seed, vocabulary=vocabulary, eod=7)


def test_tokens_are_those_of_their_place():
    documents = mock()
    number, other = np.argsort(-documents.sequence_lengths, kind="stable")[:2].tolist()
    whole = documents.get(number)
    assert len(whole) == documents.sequence_lengths[number]
    assert np.array_equal(whole[123:2345], documents.get(number, 123, 2222))
    assert np.array_equal(whole[500:], documents.get(number, 500))
    whole = whole[:5000]
    counts = np.bincount(whole, minlength=50)
    assert len(counts) == 50 and counts[7] == 0 and np.delete(counts, 7).min() > 60  # of 102 on average
    others = [mock(seed=4).get(number, 0, 5000), documents.get(other, 0, 5000)]
    assert all(0.01 < np.mean(whole == other) < 0.03 for other in (*others, np.roll(whole, 1)))


def test_a_document_ends_with_its_only_eod():
    documents = mock(vocabulary=8)
    for number in range(20):
        assert np.flatnonzero(documents.get(number) == 7).tolist() == [documents.sequence_lengths[number] - 1]


def test_lengths_have_the_body_and_the_tail_of_the_flag():
    given = mock_lengths("2,0.5,0.25,1000,1")
    first, second = (mock(seed, given).sequence_lengths for seed in (0, 1))
    tail = first[first >= 1000]
    assert len(tail) / len(first) == pytest.approx(0.25, rel=0.02)
    assert np.mean(tail >= 2000) == pytest.approx(0.5, rel=0.02)
    assert first.min() == 16 and first.max() == 131_072
    assert (first != second).any()


def test_the_ends_of_what_a_distribution_may_be():
    least, most = mock_lengths("-20,0,0,1,0.001"), mock_lengths(f"20,20,1,{1 << 30},100")
    assert (least.minimum, most.minimum) == (1, 1 << 30)


WRONG = """F3 1,2,3 nan,0.8,0.5,100,1 20.1,0.8,0.5,100,1 -20.1,0.8,0.5,100,1 7,-0.1,0.5,100,1 7,20.1,0.5,100,1
7,0.8,-0.1,100,1 7,0.8,1.1,100,1 7,0.8,0.5,0.9,1 7,0.8,0.5,1.1e9,1 7,0.8,0.5,100,0 7,0.8,0.5,100,100.1"""


@pytest.mark.parametrize("text", ["", *WRONG.split()])
def test_what_is_no_distribution_is_refused(text):
    with pytest.raises(ValueError, match="must be F2, or MU,SIGMA,SHARE,MINIMUM,ALPHA: mean and"):
        mock_lengths(text)
