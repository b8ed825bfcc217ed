"""Pipeline shapes come from the plan: nothing but tensors on the wire, and a debug flag that holds both together."""

import pytest

from megatron_wlb.adapter import p2p
from tests.adapter.training import train

LAYOUTS = {
    "pp2": (2, "--pipeline-model-parallel-size 2"),
    "pp4": (4, "--pipeline-model-parallel-size 4"),
    "pp2-vpp2": (2, "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_shape_is_sent(layout, dataset):
    """With the debug flag, upstream's exchange is made too: one int64 message for every tensor."""
    size, flags = LAYOUTS[layout]
    planned = train(size, dataset, *flags.split(), "--train-iters", "1")
    checked = train(size, dataset, *flags.split(), "--train-iters", "1", "--wlb-check-shapes")
    for plain, both in zip(planned["sends"], checked["sends"], strict=True):
        assert plain
        assert set(plain) == {"torch.float32"}
        assert both.count("torch.float32") == both.count("torch.int64") == len(plain)


def test_the_debug_flag_finds_a_wrong_plan(dataset, monkeypatch):
    def one_row_more(self, order, receives):
        return [self._rows[next(order)] + 1, 1, self.config.hidden_size] if receives else [0, 0, 0]

    monkeypatch.setattr(p2p.PlannedP2PCommunicator, "_shape", one_row_more)
    with pytest.raises(RuntimeError, match=r"the plan says shapes .*, its neighbours sent"):
        train(2, dataset, *LAYOUTS["pp2"][1].split(), "--wlb-check-shapes")
