"""Communication times: the measured ones within a node, the assumptions between nodes."""

from dataclasses import replace

import numpy as np
import pytest

from megatron_wlb.hardware.network import H100_NETWORK as NETWORK
from megatron_wlb.hardware.network import Collective, Group


@pytest.mark.parametrize(
    ("collective", "ranks", "num_bytes", "measured_us"),
    [
        ("all_gather", 2, 2**27, 235.8),
        ("all_gather", 8, 2**27, 354.7),
        ("reduce_scatter", 4, 2**30, 2509.5),
        ("reduce_scatter", 8, 2**27, 381.3),
        ("all_reduce", 8, 2**33, 31396.0),
    ],
)
def test_within_a_node_near_what_was_measured(collective, ranks, num_bytes, measured_us):
    """A few rows of the table that the constants are fitted to."""
    assert NETWORK.collective(collective, num_bytes, Group(size=ranks, stride=1)) == pytest.approx(measured_us, rel=0.1)


@pytest.mark.parametrize(
    "changes", [{"ranks": ()}, {"ranks": (4, 2)}, {"latency_us": (1.0,)}, {"gb_per_s": (1.0,) * 3}]
)
def test_a_collective_is_measured_for_increasing_numbers_of_ranks(changes):
    measured = Collective(ranks=(2, 8), latency_us=(1.0, 2.0), gb_per_s=(30.0, 40.0))
    assert replace(NETWORK, reduce_scatter=measured).reduce_scatter == measured
    with pytest.raises(
        ValueError, match="reduce_scatter is of .* ranks, with . latencies and . rates; give one of each"
    ):
        replace(NETWORK, reduce_scatter=measured._replace(**changes))


def test_between_nodes_ranks_of_a_node_share_their_links():
    size = 2.0**34
    near, whole_nodes, two_per_node, one_per_node = (
        NETWORK.collective("all_gather", size, Group(size=n, stride=s)) for n, s in ((8, 1), (16, 1), (16, 4), (16, 8))
    )
    assert near < whole_nodes < two_per_node < one_per_node
    # The slower one counts: 15 of 16 parts enter every rank, and of n nodes, n - 1 parts enter each over its links.
    link = NETWORK.link_gb_per_s
    expected = [15 / 16 / NETWORK.all_gather.gb_per_s[-1], 7 / 8 / (2 * link), 15 / 16 / link]
    assert [whole_nodes, two_per_node, one_per_node] == pytest.approx([size * e / 1e3 for e in expected], rel=0.01)


def test_times_beyond_bytes_by_hand():
    """A collective's latency has a hop for every node but one, and a message to a neighbour has one."""
    latency = NETWORK.all_gather.latency_us[-1]
    for size, hops in ((8, 0), (16, 1), (32, 3)):
        assert NETWORK.collective("all_gather", 0.0, Group(size=size, stride=1)) == latency + hops * NETWORK.hop_us
    # One rank of each node: links between nodes alone.
    apart = Group(size=4, stride=8)
    assert NETWORK.collective("all_gather", 0.0, apart) == 3 * NETWORK.hop_us
    assert NETWORK.all_to_all(apart) == pytest.approx((NETWORK.hop_us, 1 / NETWORK.link_gb_per_s / 1e3))
    inside, between = NETWORK.all_gather.gb_per_s[0], NETWORK.link_gb_per_s
    # Ranks of 2 x 4 and 4 x 2 GPUs are in one node of 8; of 4 x 4, and 2 x 8, some neighbours are not.
    for size, stride, rate in ((2, 4, inside), (4, 2, inside), (4, 4, between), (2, 8, between)):
        time = NETWORK.point_to_point(np.array(1e6), Group(size=size, stride=stride))
        assert time == pytest.approx(NETWORK.hop_us + 1e3 / rate)


@pytest.mark.parametrize("parts", [(1, 1), (1, 2), (2, 4), (2, 8), (4, 8)])
def test_copies_of_a_row_for_one_node_cross_once(parts):
    """Against copies drawn one by one: to 4 of 16 ranks of parts that were drawn before, on 2 nodes of 8."""
    group, copies, rng = Group(size=16, stride=1), 4, np.random.default_rng(0)
    (drawn, of), rows = parts, 200_000
    which = rng.permuted(np.tile(np.arange(of), (rows, 1)), axis=1)[:, :drawn]
    part = np.take_along_axis(which, rng.integers(0, drawn, (rows, copies)), axis=1)
    ranks = part * (group.size // of) + rng.integers(0, group.size // of, (rows, copies))
    nodes_seen = np.mean([(ranks // 8 == node).any(axis=1) for node in range(2)]) * 2
    ranks_seen = np.mean([(ranks == rank).any(axis=1) for rank in range(group.size)]) * group.size
    apart, joined = (NETWORK.all_to_all(group, each, parts)[1] for each in (0, copies))
    # The slower of links between nodes, where half of all rows go elsewhere, and of NVLink.
    crossing, inside = 8 / 15 / NETWORK.link_gb_per_s / 1e3, 1 / NETWORK.all_gather.gb_per_s[-1] / 1e3
    assert apart == pytest.approx(max(crossing, inside))
    assert joined == pytest.approx(max(crossing * nodes_seen, inside * ranks_seen) / copies, rel=0.01)
    one_node = Group(size=8, stride=1)
    assert NETWORK.all_to_all(one_node, copies)[1] < NETWORK.all_to_all(one_node)[1]
