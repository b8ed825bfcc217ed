"""Communicators of a step, and pipeline communication for variable lengths, with shapes from the plan.

Upstream's `variable_seq_lengths` sends the shape of every tensor first, and blocks the host. Here the communicator
counts receives, and knows the length of each. Upstream's interleaved schedule waits for every send; this communicator
keeps as many of the last outputs and gradients as there are stages instead.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import p2p_communication
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_wlb.job import Job
from megatron_wlb.pipeline.schedule import Schedule
from megatron_wlb.runtime.all_to_all import gradient_group

_GROUPS = ("tp", "intra_dp_cp", "pp", "mp", "intra_dist_opt")
"""Process groups whose collectives every step calls, by upstream's names."""


def connect(job: Job, device: torch.device, of_layers: Sequence[str]) -> None:
    """Make the communicators of a step; NCCL would make each at its first use, inside of a step.

    `of_layers`: names of groups whose collectives only some layers call.
    """
    groups = ProcessGroupCollection.use_mpu_process_groups()
    used = [getattr(groups, name) for name in (*_GROUPS, *of_layers)]
    if job.parallel.cp > 1:
        used.append(groups.cp)
        if job.cp_exchange == "shared":
            used.append(gradient_group(groups.cp))
    for group in used:  # of one rank, too: upstream calls these alike
        dist.all_reduce(torch.zeros(1, device=device), group=group)
    if job.parallel.vpp == 1 or not job.overlap_transfers:
        return  # no stages, or upstream batches their transfers, which take the group's communicator
    # Each pair of neighbours has one of its own in each direction.
    group = groups.pp
    tensors = {
        f"tensor_{way}_{other}": torch.zeros(1, device=device) for other in ("prev", "next") for way in ("send", "recv")
    }
    neighbours = {
        f"{other}_pipeline_rank": dist.get_global_rank(group, (group.rank() + step) % group.size())
        for other, step in (("prev", -1), ("next", 1))
    }
    for request in p2p_communication._p2p_ops(group=group, **tensors, **neighbours).values():
        request.wait()


class PlannedP2PCommunicator(P2PCommunicator):
    """Receives [rows[m], 1, hidden] for micro-batch m, in one forward-backward pass.

    `rows`: of each micro-batch of this data-parallel rank on one GPU, in order.
    """

    def __init__(self, pp_group: dist.ProcessGroup, config: Any, rows: Sequence[int]) -> None:
        super().__init__(pp_group=pp_group, config=config)
        schedule = Schedule(
            num_stages=pp_group.size(),
            micro_batches_per_rank=len(rows),
            num_chunks=config.virtual_pipeline_model_parallel_size or 1,
            group_size=config.microbatch_group_size_per_vp_stage,
        )
        forward, backward = schedule.receive_order(pp_group.rank())
        self._rows, self._forward, self._backward = rows, iter(forward), iter(backward)
        self._sent: deque[tuple[Any, torch.Tensor]] = deque()

    def _communicate(self, *, wait_on_reqs: bool = True, **rest: Any) -> Any:
        if wait_on_reqs:
            return super()._communicate(**rest)
        *received, requests = super()._communicate(wait_on_reqs=False, **rest)
        for name in ("send_next", "send_prev"):
            if name in requests:
                # Detached, so that it keeps its memory: upstream frees an output by giving the tensor other data, and
                # NCCL holds only the tensor until it has sent it.
                self._sent.append((requests.pop(name), rest[f"tensor_{name}"].detach()))
        self.settle(self.pp_group.size())
        return *received, requests

    def settle(self, kept: int = 0) -> None:
        """Wait for all pending sends but the last `kept`."""
        while len(self._sent) > kept:
            request, tensor = self._sent[0]
            request.wait()
            # Only this stream waits. In the combined schedule it may be the communication stream, and the memory that
            # of the computation stream, which would use it again at once.
            tensor.record_stream(torch.cuda.current_stream())
            self._sent.popleft()  # only now, since the tensor must live until it is sent

    def _communicate_shapes(
        self, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool
    ) -> tuple[list[int], list[int]]:
        return self._shape(self._forward, recv_prev), self._shape(self._backward, recv_next)

    def _shape(self, order: Any, receives: bool) -> list[int]:
        return [self._rows[next(order)], 1, self.config.hidden_size] if receives else [0, 0, 0]


def by_direction(original: Any) -> Any:
    """Wrap upstream's `_p2p_ops` to move activations and gradients concurrently.

    NCCL runs the operations of a pair of ranks in a group in the order of posting, so a receive would wait for an
    earlier send, and with `CUDA_DEVICE_MAX_CONNECTIONS=1` so would later kernels. Upstream has a second group for two
    stages only. Each rank posts in upstream's order, which cannot deadlock.
    """

    def p2p_ops(*, group: dist.ProcessGroup, **rest: Any) -> dict[str, Any]:
        if group.size() == 2 or dist.get_backend(group) == "ucc":
            given: dict[str, Any] = original(group=group, **rest)
            return given
        forward, backward = ("send_next", "recv_prev"), ("send_prev", "recv_next")
        requests = {}
        for names, pair_group in ((forward, group), (backward, dist.group.WORLD)):
            for name in names if group.rank() % 2 == 0 else reversed(names):
                if (tensor := rest[f"tensor_{name}"]) is not None:
                    move = dist.isend if name.startswith("send") else dist.irecv
                    other = rest[f"{name[5:]}_pipeline_rank"]
                    requests[name] = move(tensor, other, group=pair_group)
        return requests

    return p2p_ops
