"""Pipeline shapes come from the plan: nothing but tensors on the wire, and a debug flag that holds both together."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.schedules import deallocate_output_tensor

from megatron_wlb.adapter import p2p
from tests.adapter.training import train
from tests.worlds import run_world

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


def test_an_output_may_be_released_while_it_is_sent():
    """The interleaved schedule of 0.17 does so; without the communicator's alias the next stage gets other memory."""
    assert run_world(_send_and_release, 2)[1] == 1.0


def _send_and_release():
    config = SimpleNamespace(
        virtual_pipeline_model_parallel_size=None,
        variable_seq_lengths=True,
        hidden_size=64,
        pipeline_dtype=torch.float32,
        use_ring_exchange_p2p=False,
        batch_p2p_comm=False,
        timers=None,
    )
    communicator = p2p.PlannedP2PCommunicator(dist.new_group(), config, [256], 1, False)
    store, first = dist.distributed_c10d._get_default_store(), dist.get_rank() == 0
    output = torch.ones(256, 1, 64) if first else None
    if not first:
        store.wait(["released"])  # gloo reads what is sent when it is asked for
    received, handles = communicator.send_forward_recv_forward(
        output, recv_prev=not first, tensor_shape=(256, 1, 64), overlap_p2p_comm=True
    )
    if first:
        deallocate_output_tensor(output, True)
        others = [torch.zeros(256, 1, 64) for _ in range(8)]  # in the memory that was released, if it was
        store.set("released", "")
    for handle in handles.values():
        handle.wait()
    return float(others[0].sum()) if first else float(received.mean())
