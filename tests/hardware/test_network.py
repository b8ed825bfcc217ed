"""Communication times: the measured ones within a node, the assumptions between nodes."""

import pytest

from megatron_wlb.hardware.network import H100_NETWORK as NETWORK
from megatron_wlb.hardware.network import Group


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
