"""Both schedulers of Megatron's example, by hand; upstream's code gives the same for these samples."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.dynamic_cp import PROFILES, default_dynamic_cp, dp_balanced, predicted


def test_packs_are_filled_in_order_and_split_from_the_end():
    lengths = [5, 3, 4, 4, 2]
    assert dp_balanced(lengths, dp=1, room=8) == [[0, 1], [2, 3], [4]]
    assert dp_balanced(lengths, dp=2, room=8) == [[0, 1], [2], [4], [3]]
    assert dp_balanced(lengths, dp=5, room=8) == [[0], [2], [4], [3], [1]]


@pytest.mark.parametrize(
    ("lengths", "made"),
    [
        # The longest needs two ranks; the last one finds no room and has the next micro-batch for itself.
        ([8, 4, 3, 1, 1], [[(2, [0]), (1, [1]), (1, [2, 3])], [(4, [4])]]),
        # Ranks that are left over double the smallest groups, the first one first.
        ([4, 3], [[(2, [0]), (2, [1])]]),
        ([3, 4, 4], [[(2, [1]), (1, [2]), (1, [0])]]),
        # A sample that fits one rank takes two where the busiest rank has less work then.
        ([5, 4, 4], [[(2, [0]), (2, [1, 2])]]),
        ([16, 1], [[(4, [0])], [(4, [1])]]),
    ],
)
def test_groups_are_as_upstream_makes_them(lengths, made):
    assert default_dynamic_cp(lengths, ranks=4, room=4) == made


@given(st.lists(st.integers(1, 4 * 64), min_size=8, max_size=40), st.sampled_from([4, 8]))
def test_every_sample_has_room_once(lengths, ranks):
    lengths = lengths[: len(lengths) // 2 * 2]  # as many as two data-parallel ranks share
    packs = dp_balanced(lengths, ranks // 4, room=4 * 64)
    assert sorted(i for pack in packs for i in pack) == list(range(len(lengths))) and not len(packs) % (ranks // 4)
    assert max(sum(lengths[i] for i in pack) for pack in packs) <= 4 * 64
    made = default_dynamic_cp(lengths, ranks, room=64)
    assert sorted(i for groups in made for _, samples in groups for i in samples) == list(range(len(lengths)))
    for groups in made:
        assert sum(size for size, _ in groups) == ranks
        assert all(sum(lengths[i] for i in samples) <= size * 64 for size, samples in groups)


def test_samples_that_need_all_ranks_take_the_same_time_by_both():
    fixed, dynamic = predicted(np.full(8, 8191), 4, PROFILES[0])
    assert fixed == pytest.approx(dynamic, rel=1e-9)
    fixed, dynamic = predicted(np.full(8, 1023), 4, PROFILES[0])
    assert dynamic < fixed  # no ring
