"""The pipeline under variable micro-batch lengths: upstream's schedules, shapes from the plan.

Upstream's `variable_seq_lengths` sends the shape of every tensor ahead of it and waits for the answer on the host. All
ranks know the plan, so this communicator sends nothing: it counts receives and answers with the length of the
micro-batch that the schedule moves at that point.
"""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from megatron_wlb.plan.pipeline import receive_order


class PlannedP2PCommunicator(P2PCommunicator):
    """Receives tensors of [tokens[m] / divisor, 1, hidden] for micro-batch m; one instance for one forward-backward.

    Args:
        pp_group: process group of the pipeline.
        config: upstream's model config, `variable_seq_lengths` on.
        tokens: padded length of each micro-batch of this data-parallel rank, in order.
        divisor: ranks that share a sequence: CP * (TP if sequence parallel else 1).
        check_shapes: also make upstream's exchange and raise RuntimeError where it differs from the plan.
    """

    def __init__(
        self,
        pp_group: torch.distributed.ProcessGroup,
        config: Any,
        tokens: Sequence[int],
        divisor: int,
        check_shapes: bool,
    ) -> None:
        super().__init__(pp_group=pp_group, config=config)
        chunks = config.virtual_pipeline_model_parallel_size
        table = None
        if chunks is not None:
            table = schedules.get_schedule_table(len(tokens), chunks, config.microbatch_group_size_per_vp_stage)
        forward, backward = receive_order(table, len(tokens), chunks or 1, pp_group.rank(), pp_group.size())
        self._rows = [length // divisor for length in tokens]
        self._forward, self._backward = iter(forward), iter(backward)
        self._check_shapes = check_shapes

    def _communicate(self, *, tensor_send_next: torch.Tensor | None, **rest: Any) -> Any:
        # Up to 0.17, the interleaved schedule frees an output that is still being sent: it swaps the memory under the
        # tensor. What is sent is an alias with a hold on that memory, which the pending send keeps.
        if tensor_send_next is not None:
            tensor_send_next = tensor_send_next.detach()
        return super()._communicate(tensor_send_next=tensor_send_next, **rest)

    def _communicate_shapes(
        self, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool
    ) -> tuple[list[int], list[int]]:
        planned = (self._shape(self._forward, recv_prev), self._shape(self._backward, recv_next))
        if self._check_shapes:
            sent = super()._communicate_shapes(tensor_send_next, tensor_send_prev, recv_prev, recv_next)
            if sent != planned:
                raise RuntimeError(
                    f"pipeline rank {self.pp_group.rank()}: the plan says shapes {planned}, its neighbours sent {sent};"
                    " report it, with the flags"
                )
        return planned

    def _shape(self, order: Any, receives: bool) -> list[int]:
        return [self._rows[next(order)], 1, self.config.hidden_size] if receives else [0, 0, 0]
