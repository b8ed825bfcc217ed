"""The pipeline under variable micro-batch lengths: upstream's schedules, shapes from the plan.

Upstream's `variable_seq_lengths` sends the shape of every tensor ahead of it and waits for the answer on the host. All
ranks know the plan, so this communicator sends nothing: it counts receives and answers with the length of the
micro-batch that the schedule moves at that point.
"""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from megatron_wlb.pipeline.schedule import Schedule


class PlannedP2PCommunicator(P2PCommunicator):
    """Receives tensors of [rows[m], 1, hidden] for micro-batch m; one instance for one forward-backward.

    Args:
        pp_group: process group of the pipeline.
        config: upstream's model config, `variable_seq_lengths` on.
        rows: of each micro-batch of this data-parallel rank in order, what a rank holds of its sequence.
    """

    def __init__(self, pp_group: torch.distributed.ProcessGroup, config: Any, rows: Sequence[int]) -> None:
        super().__init__(pp_group=pp_group, config=config)
        schedule = Schedule(
            num_stages=pp_group.size(),
            num_micro_batches=len(rows),
            num_chunks=config.virtual_pipeline_model_parallel_size or 1,
            group_size=config.microbatch_group_size_per_vp_stage,
        )
        forward, backward = schedule.receive_order(pp_group.rank())
        self._rows = rows
        self._forward, self._backward = iter(forward), iter(backward)

    def _communicate(self, *, tensor_send_next: torch.Tensor | None, **rest: Any) -> Any:
        # Up to 0.17, the interleaved schedule frees an output that is still being sent: it swaps the memory under the
        # tensor. What is sent is an alias with a hold on that memory, which the pending send keeps.
        if tensor_send_next is not None:
            tensor_send_next = tensor_send_next.detach()
        return super()._communicate(tensor_send_next=tensor_send_next, **rest)

    def _communicate_shapes(
        self, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool
    ) -> tuple[list[int], list[int]]:
        return self._shape(self._forward, recv_prev), self._shape(self._backward, recv_next)

    def _shape(self, order: Any, receives: bool) -> list[int]:
        return [self._rows[next(order)], 1, self.config.hidden_size] if receives else [0, 0, 0]
