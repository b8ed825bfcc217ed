"""Megatron alone with micro-batches of several windows (`--micro-batch-size`), and its best size."""

from collections.abc import Callable
from dataclasses import replace

from megatron_wlb.job import Job
from megatron_wlb.plan.micro_batches import ALIKE
from megatron_wlb.simulate.memory import peak_bytes


def activation_bytes(job: Job, size: int) -> float:
    """Return the peak of the fullest stage; a job of micro-batches of variable length has size 1."""
    longest = size * job.context_length if job.packing.fixed_length else job.max_tokens
    if size > 1:
        parallel, count = replace(job.parallel, group_size=None), job.num_micro_batches // size
        job = replace(job, max_tokens=max(job.max_tokens, longest), parallel=parallel)
        job = replace(job, num_micro_batches=count, global_batch_size=count, context_length=longest)
    return peak_bytes(job, max_tokens=longest)


def other_sizes(job: Job, own: int, budget_bytes: float) -> tuple[list[int], list[int]]:
    """Return smaller sizes than `own`, then larger ones whose activations fit. The nearest come first."""
    windows, stages = job.global_batch_size // job.parallel.dp, job.parallel.pp
    sizes = [1 << i for i in range(windows.bit_length()) if windows % (1 << i) == 0]
    if job.parallel.vpp > 1:  # upstream interleaves groups of as many as stages
        sizes = [size for size in sizes if windows // size % stages == 0]
    larger = [size for size in sizes if size > own and activation_bytes(job, size) <= budget_bytes]
    return [size for size in sizes[::-1] if size < own], larger


def best_size(job: Job, own: int, budget_bytes: float, time: Callable[[int], float]) -> tuple[int, float]:
    """Return the best size, and its speed-up over `own`; `time` is of the same tokens by a size.

    A size is left once the next smaller or larger one is not clearly faster.
    """
    others = other_sizes(job, own, budget_bytes)
    if not any(others):
        return own, 1.0
    best, least = own, (of_own := time(own))
    for sizes in others:
        for size in sizes:
            if (found := time(size)) * (1 + ALIKE) > least:
                break
            best, least = size, found
    return best, of_own / least
