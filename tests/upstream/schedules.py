"""Upstream's own pipeline schedules, run without tensors, and a plain replay of what they do.

`record` calls megatron-core's real schedule functions for one stage and notes every pass, every message posted and
every wait. `replay` plays the notes of all stages against each other, as NCCL would: a message travels once both sides
have posted it.
"""

import inspect
from collections import defaultdict
from unittest import mock

import numpy as np
import torch
from megatron.core.pipeline_parallel import combined_1f1b, schedules, utils
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_wlb.pipeline.schedule import Schedule


class Group:
    def __init__(self, size: int, rank: int) -> None:
        self._size, self._rank = size, rank

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank


class Config:
    """Whatever is not set is None, and so off."""

    def __init__(self, schedule: Schedule) -> None:
        interleaved = schedule.num_chunks > 1
        self.overlap_p2p_comm, self.batch_p2p_comm = interleaved, not interleaved
        self.overlap_p2p_comm_warmup_flush = interleaved and schedule.overlap_transfers
        self.overlap_moe_expert_parallel_comm = schedule.by_turns
        self.deallocate_pipeline_outputs = True
        self.microbatch_group_size_per_vp_stage = schedule.group
        self.virtual_pipeline_model_parallel_size = schedule.num_chunks if interleaved else None
        self.hidden_size = 1

    def __getattr__(self, name: str) -> None:
        return None


class Recorder(P2PCommunicator):
    """Upstream's communicator, but for the communication itself."""

    def __init__(self, group: Group, config: Config, notes: list) -> None:
        self.pp_group, self.config, self.notes = group, config, notes
        self.virtual_pipeline_model_parallel_size = config.virtual_pipeline_model_parallel_size

    def _communicate(
        self, *, tensor_send_next, tensor_send_prev, recv_prev, recv_next, tensor_shape, wait_on_reqs=True
    ):
        messages = {
            "send_next": (0, "send", tensor_send_next) if tensor_send_next is not None else None,
            "recv_prev": (0, "receive", None) if recv_prev else None,
            "send_prev": (1, "send", tensor_send_prev) if tensor_send_prev is not None else None,
            "recv_next": (1, "receive", None) if recv_next else None,
        }
        handles = {name: Handle(self.notes, message) for name, message in messages.items() if message}
        self.notes.append(("post", tuple(handles.values())))
        if self.config.overlap_p2p_comm_warmup_flush and not wait_on_reqs:
            # As `PlannedP2PCommunicator` has it, but for its bound.
            handles = {name: handle for name, handle in handles.items() if name.startswith("recv")}
        if wait_on_reqs:
            for handle in handles.values():
                handle.wait()
        return object(), object(), None if wait_on_reqs else handles


class Handle:
    def __init__(self, notes: list, message: tuple) -> None:
        self.notes, self.message = notes, message

    def wait(self) -> None:
        self.notes.append(("wait", self))


def record(schedule: Schedule, stage: int) -> list:
    """Notes of `stage`: ("pass", (backward, chunk, micro-batch)), ("post", handles), ("wait", handle)."""
    notes: list = []
    config = Config(schedule)
    chunks = [torch.nn.Module() for _ in range(schedule.num_chunks)]
    for chunk in chunks:
        chunk.config, chunk.model_type = config, None
    groups = ProcessGroupCollection()
    groups.tp = groups.cp = Group(1, 0)

    def forward_step(*args, current_microbatch, vp_stage=0, **kwargs):
        done = (0, vp_stage, current_microbatch)
        notes.append(("pass", done))
        return done, 0

    def backward_step(input_tensor, output_tensor, output_tensor_grad, config):
        done = (1, *output_tensor[1:])
        notes.append(("pass", done))
        return done

    def combined(*args, **given):
        """Both passes of a pair, or one alone, with communication around them as plans have it."""
        call = signature.bind(*args, **given).arguments
        forward, backward = call["f_model"] is not None, call["b_model"] is not None
        done, grad, tokens = None, None, None
        for hook in (call.get("pre_forward") if forward else None, call.get("pre_backward") if backward else None):
            if hook is not None:
                hook(None)
        if forward:
            done, tokens = forward_step(
                current_microbatch=call["current_microbatch"], vp_stage=call.get("f_model_chunk_id") or 0
            )
        if backward:
            grad = backward_step(None, call["b_output_tensor"], None, config)
        for hook, result in ((call.get("post_forward"), done), (call.get("post_backward"), grad)):
            if hook is not None and result is not None:
                hook(result, None)
        return done, tokens, grad

    signature = inspect.signature(combined_1f1b.combined_forward_backward_step)
    interleaved = schedule.num_chunks > 1
    run = (
        schedules.forward_backward_pipelining_with_interleaving
        if interleaved
        else schedules.forward_backward_no_pipelining
        if schedule.by_turns
        else schedules.forward_backward_pipelining_without_interleaving
    )
    with (
        mock.patch.object(combined_1f1b, "combined_forward_backward_step", combined),
        mock.patch.object(combined_1f1b, "set_streams"),
        mock.patch.object(schedules, "forward_step", forward_step),
        mock.patch.object(schedules, "backward_step", backward_step),
        mock.patch.object(schedules, "deallocate_output_tensor"),
        mock.patch.object(schedules, "get_model_type"),
        mock.patch.object(torch, "zeros", return_value=0),  # on a GPU
        mock.patch.object(utils, "get_pg_rank", Group.rank),  # 0 in a process without process groups
        mock.patch.object(utils, "get_pg_size", Group.size),
    ):
        run(
            forward_step_func=None,
            data_iterator=[None] * len(chunks),
            model=chunks,
            num_microbatches=schedule.micro_batches_per_rank,
            seq_length=1,
            micro_batch_size=1,
            forward_only=False,
            p2p_communicator=Recorder(Group(schedule.num_stages, stage), config, notes),
            pg_collection=groups,
        )
    return notes


def replay(schedule: Schedule, work: np.ndarray, transfer: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Start and end of every pass, shaped as `work`: [directions, stages, chunks, micro-batches]."""
    stages = schedule.num_stages
    notes = [record(schedule, s) for s in range(stages)]
    start, end = np.full(work.shape, np.nan), np.full(work.shape, np.nan)
    channels: dict = defaultdict(list)  # (direction, sender or receiver stage, side) -> handles in order
    clock, at = [0.0] * stages, [0] * stages
    number, posted = {}, {}

    def arrival(stage: int, handle: Handle) -> float | None:
        direction, side, _ = handle.message
        sending = side == "send"
        peer = (stage + (1 if sending == (direction == 0) else -1)) % stages
        others = channels[direction, peer, "receive" if sending else "send"]
        if len(others) <= number[handle]:
            return None
        other = others[number[handle]]
        message = handle.message[2] if sending else other.message[2]
        return max(posted[handle], posted[other]) + transfer[message[2]]

    while any(at[s] < len(notes[s]) for s in range(stages)):
        before = list(at)
        for s in range(stages):
            while at[s] < len(notes[s]):
                what, note = notes[s][at[s]]
                if what == "pass":
                    place = (note[0], s, *note[1:])
                    start[place] = clock[s]
                    clock[s] += work[place]
                    end[place] = clock[s]
                elif what == "post":
                    for handle in note:
                        queue = channels[handle.message[0], s, handle.message[1]]
                        number[handle], posted[handle] = len(queue), clock[s]
                        queue.append(handle)
                else:
                    time = arrival(s, note)
                    if time is None:
                        break
                    clock[s] = max(clock[s], time)
                at[s] += 1
        assert at != before, "deadlock"
    return start, end
