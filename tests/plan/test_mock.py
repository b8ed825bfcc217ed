"""Mock documents: the same for whoever reads which part of them; lengths as the flag says."""

import numpy as np
import pytest

from megatron_wlb.plan.mock import F2, PROFILES, MockDocuments, mock_lengths


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


def test_tokens_are_of_splitmix64_by_seed_document_and_place():
    """In Python's integers, as Steele, Lea and Flood have it; tokens from EOD on are one higher."""

    def token(seed, document, place):
        golden, mask = 0x9E3779B97F4A7C15, (1 << 64) - 1
        x = (seed * golden + document * 0xD1B54A32D192ED03 + place) * golden & mask
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
        drawn = (x ^ x >> 31) % 49
        return drawn + (drawn >= 7)

    for seed, document in ((3, 0), (4, 5)):
        expected = [token(seed, document, place) for place in range(2, 14)]
        assert mock(seed).get(document, 2, 12).tolist() == expected


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


UP_TO = {
    "agents": {32 << 10: 0.3, 38_000: 0.5, 48 << 10: 0.76, 64 << 10: 0.925, 71_000: 0.95, 96 << 10: 0.993},
    "books": {37_528: 0.25, 77_580: 0.5, 129_413: 0.75},
}
"""Shares of documents up to so many tokens."""
MEANS = {"books": 100_973, "code": 1536, "conversations": 2.0 * (69.5 + 214.5)}


@pytest.mark.parametrize("name", sorted(PROFILES.keys() - {"F2"}))
def test_a_profile_has_the_figures_of_its_source(name):
    drawn = mock_lengths(name).draw(1_000_000, 0)
    for length, share in UP_TO.get(name, {}).items():
        assert np.mean(drawn <= length) == pytest.approx(share, abs=0.008), length
    if name in MEANS:
        assert drawn.mean() == pytest.approx(MEANS[name], rel=0.01)
    if name == "agents":
        assert drawn.max() == 184_000
        assert np.mean(drawn > 1 << 17) == pytest.approx(0.001, rel=0.2)
        assert np.mean(drawn <= 16 << 10) == pytest.approx(112 / 155_144, rel=0.2)
    if name == "code":
        assert np.sort(drawn)[-20_000:].sum() / drawn.sum() == pytest.approx(0.2, rel=0.02)
    if name == "conversations":
        assert 0.99 < np.mean(drawn < 4096) < 0.995


def test_the_ends_of_what_a_distribution_may_be():
    least, most = mock_lengths("-20,0,0,1,0.001"), mock_lengths(f"20,20,1,{1 << 30},100")
    assert (least.minimum, most.minimum) == (1, 1 << 30)


WRONG = """F3 1,2,3 nan,0.8,0.5,100,1 20.1,0.8,0.5,100,1 -20.1,0.8,0.5,100,1 7,-0.1,0.5,100,1 7,20.1,0.5,100,1
7,0.8,-0.1,100,1 7,0.8,1.1,100,1 7,0.8,0.5,0.9,1 7,0.8,0.5,1.1e9,1 7,0.8,0.5,100,0 7,0.8,0.5,100,100.1"""


@pytest.mark.parametrize("text", ["", *WRONG.split()])
def test_what_is_no_distribution_is_refused(text):
    with pytest.raises(
        ValueError, match="must be F2, agents, books, code, conversations, or MU,SIGMA,SHARE,MINIMUM,ALPHA: mean and"
    ):
        mock_lengths(text)
