"""What is compared with ours holds every row once, and has what its description promises."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import cp_peers

lengths = st.lists(st.integers(1, 500), min_size=1, max_size=30).map(lambda x: np.array(x, np.int64))


@pytest.mark.parametrize("peer", [cp_peers.magi, cp_peers.dynamic])
@given(lengths, st.sampled_from([1, 2, 8]))
def test_every_row_is_held_once(peer, lengths, cp):
    plan = peer(lengths, cp)
    held = [row for each in plan.shards for call in each.calls for row in call.tolist()]
    rows = sorted((document, i) for document, start, stop in held for i in range(start, stop))
    assert rows == [(document, i) for document, length in enumerate(lengths) for i in range(length)]


@given(lengths, st.sampled_from([2, 8]))
def test_magi_ranks_have_eight_chunks_at_most(lengths, cp):
    size = -(-int(lengths.sum()) // (8 * cp))
    assert max(each.tokens for each in cp_peers.magi(lengths, cp).shards) <= 8 * size


def test_dynamic_takes_the_fewest_ranks_that_have_room():
    plan = cp_peers.dynamic(np.array([100, 30, 10, 10, 10], np.int64), 4)
    lives = [sum(d in np.concatenate(each.calls)["document"] for each in plan.shards) for d in range(5)]
    assert lives == [4, 1, 1, 1, 1]
