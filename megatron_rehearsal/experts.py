"""Tokens of experts in a rehearsal: dealt evenly, since routers compute nothing."""

from collections import Counter
from typing import Any

import numpy as np
import torch

from megatron_wlb.plan.step import StepPlan, plan_packed


class Experts:
    """Knows the rows of every rank's micro-batches, and writes the counts of an even router."""

    def __init__(self) -> None:
        self._calls: Counter[tuple[bool, Any]] = Counter()
        self._tokens: dict[int, list[int]] = {}
        self._plan: StepPlan | None = None
        self._job: Any = None
        self.backward = False
        """Whether layers run again, for activations that were not kept."""

    def begin(self, plan: StepPlan, job: Any) -> None:
        """Begin a step."""
        self._plan, self._job = plan, job
        self._calls.clear()
        self._tokens.clear()

    def preprocess(self, original: Any, dispatcher: Any, routing_map: torch.Tensor) -> torch.Tensor:
        """Count tokens by expert as upstream does, then write an even router's counts instead."""
        own: torch.Tensor = original(dispatcher, routing_map)
        if dispatcher.drop_and_pad:
            return own
        # A layer's passes run in the order of micro-batches, forward and again in backward.
        at = (self.backward, dispatcher)
        number, self._calls[at] = self._calls[at], self._calls[at] + 1
        rank = torch.distributed.get_rank()
        peers = torch.distributed.get_process_group_ranks(dispatcher.tp_ep_group)
        rows_of = [len(routing_map)] * len(peers)  # without a plan all micro-batches are alike
        if self._plan is not None:
            place = self._job.parallel.place
            mine, *theirs = (self._of(place(r).dp)[number] for r in (rank, *peers))
            rows_of = [len(routing_map) * each // mine for each in theirs]
        count, local = dispatcher.num_experts, dispatcher.local_expert_indices
        pairs = np.array(rows_of) * dispatcher.config.moe_router_topk
        dealt = pairs[:, None] // count + (np.arange(count) < pairs[:, None] % count)
        by_rank = dealt.reshape(dispatcher.ep_size, dispatcher.tp_size, count)
        to_us = by_rank[:, :, local].transpose(1, 0, 2)
        sent = dealt[peers.index(rank)]
        values = {"input_splits": sent.reshape(dispatcher.ep_size, -1).sum(1), "num_out_tokens": sent.sum()}
        values |= {"output_splits": to_us.sum(2)[dispatcher.tp_rank], "output_splits_tp": to_us.sum((1, 2))}
        values["num_global_tokens_per_local_expert"] = to_us
        tensors = [(own, to_us.sum((0, 1))), *((getattr(dispatcher, name, None), values[name]) for name in values)]
        for tensor, value in tensors:
            if isinstance(tensor, torch.Tensor):  # by a copy that does not block, which would count as a sync
                tensor.copy_(torch.from_numpy(np.asarray(value)).reshape(tensor.shape), non_blocking=True)
        return own

    def _of(self, dp_rank: int) -> list[int]:
        """Return the tokens of a data-parallel rank's micro-batches."""
        if dp_rank not in self._tokens:
            assert self._plan is not None
            planned = plan_packed(self._plan.packed, self._job, dp_rank)
            self._tokens[dp_rank] = [m.padded_tokens for m in planned.micro_batches]
        return self._tokens[dp_rank]
