"""Tensor-parallel communication that overlaps products, in tiles of rows (`adapter.tiles`)."""

import numpy as np

from megatron_wlb.cost.linear import products
from megatron_wlb.job import Job
from megatron_wlb.layers import part_of
from megatron_wlb.layers.part import layer_input_bytes, memory_time

USER_BUFFERS = 3
"""Buffers of hidden states for every size of tile."""


def _tiled(job: Job, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return how many tiles `tokens` rows run in, and rows that are less than a tile."""
    count, rest = np.zeros_like(tokens), tokens
    for size in job.tiles:
        count, rest = count + rest // size, rest % size
    return count, rest if job.tiles else np.zeros_like(tokens)


def has_buffers(job: Job) -> bool:
    """Whether user buffers serve tensor-parallel ranks: those that NVLink connects."""
    return job.parallel.tp <= job.profile.network.gpus_per_node


def exposed_share(job: Job, tokens: np.ndarray) -> np.ndarray:
    """Return the share of a layer's tensor-parallel communication that overlaps nothing; whole tiles of rows do."""
    return 1 - job.tp_overlap * has_buffers(job) * (1 - _tiled(job, tokens)[1] / tokens)


def overlap_adds(job: Job, kind: str, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the time that overlap of tensor-parallel communication adds to a layer, us, forward and backward.

    A further tile starts all kernels once more, with last waves half empty. Outputs and gradients of inputs are copied
    together.
    """
    if not (job.tiles and has_buffers(job)):
        return np.zeros_like(tokens), np.zeros_like(tokens)
    model, (count, rest) = job.model, _tiled(job, tokens)
    more = np.maximum(count + (rest > 0) - 1, 0)
    dense = [each for part in model.parts_of(kind) if not part_of(model, part).pooled for each in model.part(part)]
    start = products(job, dense, np.zeros(1))

    def copied(values: int) -> np.ndarray:
        return np.where(more > 0, memory_time(job, 2 * values * job.bytes_per_value, tokens), 0.0)

    # Three kernels that are no products: a norm before QKV, and one and the activation in the MLP.
    kernels, hidden = 3 * job.profile.kernel_us, 2 * model.hidden_size
    forward = more * (start.forward + kernels) + copied(dense[0].outputs + hidden)
    return forward, more * (start.backward + kernels) + copied(model.output_size + hidden)


def overlap_bytes(job: Job) -> int:
    """Return bytes of the user buffers of tensor parallelism on a GPU."""
    return USER_BUFFERS * sum(job.tiles) * job.model.hidden_size * job.bytes_per_value


def gathered_bytes(job: Job) -> float:
    """Return bytes of a row, gathered over sequence-parallel ranks for a product; 0 if user buffers hold it."""
    p = job.parallel
    return layer_input_bytes(job) * p.sequence_ranks if p.sequence_ranks > 1 and not job.tiles else 0
