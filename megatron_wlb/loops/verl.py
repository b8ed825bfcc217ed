"""verl 0.9.1: its partitions of sequences, for ranks and for micro-batches."""

import contextlib
import importlib
import inspect
from contextvars import ContextVar
from functools import partial
from typing import Any

import numpy as np

from megatron_wlb.job import Job
from megatron_wlb.loops.patch import divided, replaced
from megatron_wlb.plan.closed import equal_shares

MODULE = "verl.utils.seqlen_balancing"
LINEAR = 24_576
"""verl weighs a sequence of d tokens as LINEAR * d + d * d."""
_LIMIT: ContextVar[int | None] = ContextVar("limit", default=None)
"""Most tokens of a micro-batch, while a rank's sequences are divided."""


def balanced(job: Job) -> contextlib.ExitStack:
    """Balance verl's batches by the job's work, in the processes of its trainer and of its workers.

    Data-parallel ranks get equally many sequences, of equal work. A rank's become as many micro-batches as its pipeline
    is predicted to need least time for, in the order of the plan. verl takes the same number on all ranks, and more of
    them while one is too long. Forced groups of sequences stay verl's. The job's data-parallel ranks do not count.
    Raises RuntimeError if verl's functions are others.
    """
    if importlib.import_module(MODULE).calculate_workload(1000) != LINEAR * 1000 + 1000**2:
        raise RuntimeError(f"{MODULE}.calculate_workload has another formula; take verl 0.9.1, or a newer megatron_wlb")
    with contextlib.ExitStack() as stack:
        for name, parameters, make in (
            ("get_seqlen_balanced_partitions", "seqlen_list k_partitions equal_size", _partitions),
            (
                "rearrange_micro_batches",
                "batch max_token_len dp_group num_batches_divided_by same_micro_num_in_dp min_num_micro_batch "
                "use_dynamic_bsz_balance force_group_size",
                _micro_batches,
            ),
        ):
            stack.enter_context(replaced(MODULE, name, parameters, partial(make, job)))
        return stack.pop_all()


def _lengths(weights: Any) -> np.ndarray:
    """Return the tokens of sequences that verl weighs so, int64 [n]; of a group those that weigh as much."""
    return np.rint((np.sqrt(LINEAR**2 + 4 * np.asarray(weights, np.float64)) - LINEAR) / 2).astype(np.int64)


def _partitions(job: Job, original: Any) -> Any:
    def get_seqlen_balanced_partitions(seqlen_list: Any, k_partitions: int, equal_size: bool) -> list[list[int]]:
        limit = _LIMIT.get()
        if equal_size and len(seqlen_list) % k_partitions == 0:
            return [sorted(rows.tolist()) for rows in equal_shares(job.work(_lengths(seqlen_list)), k_partitions)]
        if limit is not None:
            # Where they do not fit, verl's own partition makes it take more.
            with contextlib.suppress(ValueError):
                return _of_a_rank(_lengths(seqlen_list), job, limit, num_micro_batches=k_partitions)
        found: list[list[int]] = original(seqlen_list, k_partitions, equal_size)
        return found

    return get_seqlen_balanced_partitions


def _micro_batches(job: Job, original: Any) -> Any:
    def rearrange_micro_batches(*args: Any, **kwargs: Any) -> Any:
        call = inspect.signature(original).bind(*args, **kwargs)
        call.apply_defaults()
        given = call.arguments
        if given["force_group_size"] > 1:
            return original(*call.args, **call.kwargs)
        ids, limit = given["batch"]["input_ids"], given["max_token_len"]
        lengths = ids.offsets().diff() if ids.is_nested else given["batch"]["attention_mask"].sum(dim=1)
        wanted = len(_of_a_rank(lengths.cpu().numpy(), job, limit))
        group = given["num_batches_divided_by"] or 1
        # verl rounds it up to whole groups, and needs a sequence for each.
        wanted = min(wanted, len(lengths) // group * group)
        given["min_num_micro_batch"] = max(wanted, given["min_num_micro_batch"] or 0)
        given["use_dynamic_bsz_balance"] = False  # it would order them anew
        token = _LIMIT.set(limit)
        try:
            return original(*call.args, **call.kwargs)
        finally:
            _LIMIT.reset(token)

    return rearrange_micro_batches


def _of_a_rank(lengths: np.ndarray, job: Job, limit: int, **given: Any) -> list[list[int]]:
    return divided(lengths, job, limit, dp=1, ep=1, etp=None, **given)[0]
