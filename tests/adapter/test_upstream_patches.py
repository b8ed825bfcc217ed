"""The changes of patches/upstream, in a checkout that has them: scripts/test_upstream.sh applies them to a copy."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from megatron.core import ModelParallelConfig
from megatron.core.datasets import data_schedule
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.training import training
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.adapter.training import MOE, MTP, train
from tests.worlds import run_world

pytestmark = pytest.mark.skipif(
    not hasattr(training, "set_num_microbatches_in_iteration"),
    reason="needs patches/upstream: scripts/test_upstream.sh",
)


def test_a_scheduler_of_another_package_runs(monkeypatch):
    class Mine:
        def __init__(self, max_tokens, cp, dp, multiple):
            assert (max_tokens, cp, dp, multiple) == (8, 1, 1, None)

        def run(self, data_iterator, num_microbatches, *rest):
            return iter([*data_iterator] * 2), num_microbatches + 1, 16.0, 128.0

    def config(scheduler):
        return ModelParallelConfig(sequence_packing_scheduler=scheduler, max_seqlen_per_dp_cp_rank=8)

    with pytest.raises(ValueError, match="Unsupported scheduler: mine. Available schedulers: .'dp_balanced'"):
        config("mine")
    config("dp_balanced")
    monkeypatch.setitem(data_schedule.scheduler_map, "mine", Mine)
    group = SimpleNamespace(size=lambda: 1)
    groups = SimpleNamespace(dp_cp=group, dp=group, tp=group, pp=group)
    batches, *counts = data_schedule.wrap_data_iterator(iter([1]), config("mine"), 4, groups)
    assert [*batches] == [1, 1] and counts == [5, 16.0, 128.0]


def _exchanged():
    config = ModelParallelConfig(pipeline_dtype=torch.float32, variable_seq_lengths=True, batch_p2p_comm=False)
    communicator = P2PCommunicator(dist.group.WORLD, config, lambda *receives: ([3, 1, 4], [5, 1, 4]))
    communicator._communicate_shapes = None  # nobody calls it
    first = dist.get_rank() == 0
    sent = torch.ones(3 if first else 5, 1, 4)
    *received, _ = communicator._communicate(
        tensor_send_next=sent if first else None,
        tensor_send_prev=None if first else sent,
        recv_prev=not first,
        recv_next=first,
        tensor_shape=[1, 1, 4],
    )
    return [None if each is None else (*each.shape, each.sum().item()) for each in received]


def test_shapes_of_a_scheduler_need_no_message():
    assert run_world(_exchanged, 2) == [[None, (5, 1, 4, 20.0)], [(3, 1, 4, 12.0), None]]


def test_losses_are_means_over_the_micro_batches_that_ran(dataset, tmp_path, monkeypatch):
    names = ("load_balancing_loss", "mtp_1 loss")
    flags = f"{MOE} --moe-aux-loss-coeff 0.1 {MTP} --num-layers 2 --train-iters 1".split()

    def logged(name):
        board = str(tmp_path / name)
        train(1, dataset, *flags, "--tensorboard-dir", board, wlb=False)
        events = EventAccumulator(board).Reload()
        return [e.value for name in names for e in events.Scalars(name)]

    as_before, given = logged("before"), training.set_num_microbatches_in_iteration
    monkeypatch.setattr(training, "set_num_microbatches_in_iteration", lambda count: given(4 * count))
    assert logged("more") == pytest.approx([each / 4 for each in as_before])
