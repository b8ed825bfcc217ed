"""Pipeline shapes come from the plan: nothing but tensors on the wire, of the shapes that upstream would exchange."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import deallocate_output_tensor

from megatron_wlb.adapter import p2p
from tests.adapter.training import train
from tests.worlds import run_world

LAYOUTS = {
    "pp2": (2, "--pipeline-model-parallel-size 2"),
    "pp4": (4, "--pipeline-model-parallel-size 4"),
    "pp2-vpp2": (2, "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"),
}


@pytest.fixture
def exchange(monkeypatch):
    """Upstream's exchange of shapes is made, too, and must agree."""
    planned = p2p.PlannedP2PCommunicator._communicate_shapes

    def both(self, *tensors):
        shapes, sent = planned(self, *tensors), P2PCommunicator._communicate_shapes(self, *tensors)
        assert sent == shapes, "the plan is wrong"
        return shapes

    monkeypatch.setattr(p2p.PlannedP2PCommunicator, "_communicate_shapes", both)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_shape_is_sent(layout, dataset):
    size, flags = LAYOUTS[layout]
    run = train(size, dataset, *flags.split(), "--train-iters", "1")
    assert all(sends and set(sends) == {"torch.float32"} for sends in run["sends"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shapes_are_those_that_neighbours_send(layout, dataset, exchange):
    """One int64 message for every tensor; in evaluation, too."""
    size, flags = LAYOUTS[layout]
    run = train(size, dataset, *flags.split(), *"--train-iters 2 --eval-iters 1 --eval-interval 1".split())
    for sends in run["sends"]:
        assert sends.count("torch.float32") == sends.count("torch.int64") == len(sends) / 2


def test_a_wrong_plan_is_found(dataset, exchange, monkeypatch):
    def one_row_more(self, order, receives):
        return [self._rows[next(order)] + 1, 1, self.config.hidden_size] if receives else [0, 0, 0]

    monkeypatch.setattr(p2p.PlannedP2PCommunicator, "_shape", one_row_more)
    with pytest.raises(RuntimeError, match="the plan is wrong"):
        train(2, dataset, *LAYOUTS["pp2"][1].split())


def test_an_output_may_be_released_while_it_is_sent():
    """The interleaved schedule of 0.17 does so; without the communicator's alias the next stage gets other memory."""
    assert run_world(_send_and_release, 2)[1] == 1.0


def _send_and_release():
    config = SimpleNamespace(
        virtual_pipeline_model_parallel_size=None,
        microbatch_group_size_per_vp_stage=None,
        variable_seq_lengths=True,
        hidden_size=64,
        pipeline_dtype=torch.float32,
        use_ring_exchange_p2p=False,
        batch_p2p_comm=False,
        timers=None,
    )
    communicator = p2p.PlannedP2PCommunicator(dist.new_group(), config, [256])
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
