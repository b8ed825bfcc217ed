"""Time of all of a layer but attention: matrix products by shape, other operations by bytes and number."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from megatron_wlb.hardware.network import Group
from megatron_wlb.job import FP32, Job
from megatron_wlb.layers import part_of
from megatron_wlb.model import Matrix


class Products(NamedTuple):
    """Times of matrix products in us, float64 [M] each."""

    forward: np.ndarray
    inputs: np.ndarray
    """For the gradients of inputs."""
    weights: np.ndarray
    """For the gradients of weights."""

    @property
    def backward(self) -> np.ndarray:
        return self.inputs + self.weights


def products(job: Job, matrices: Iterable[Matrix], tokens: np.ndarray) -> Products:
    """Return the summed times of `matrices` times `tokens` rows, measured or by shape."""
    times = np.zeros((3, len(tokens)))
    profile = job.profile
    for matrix in matrices:
        if not matrix.weights:
            continue
        ranks, (gain, quantized) = job.parallel.dividing(matrix), profile.gain(job.precision, matrix.part)
        rows, outputs, inputs = matrix.shape(tokens * ranks / job.parallel.tp, ranks)
        shapes = (rows, outputs, inputs), (rows, inputs, outputs), (outputs, inputs, rows)
        taken = np.array([profile.product(m, n, k, gain, quantized) for m, n, k in shapes])
        if profile.linear_tflops:
            # Measured in bf16; other precisions are in proportion.
            forward, backward = (2e-6 * matrix.weights / job.parallel.tp / rate for rate in profile.linear_tflops)
            share = taken / [profile.product(m, n, k) for m, n, k in shapes] if gain != 1 else 1.0
            taken = np.outer((forward, backward, backward), tokens) * share
        times += taken
    return Products(*times)


def tiled(job: Job, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return how many tiles `tokens` rows run in, and rows that are less than a tile."""
    count, rest = np.zeros_like(tokens), tokens
    for size in job.tiles:
        count, rest = count + rest // size, rest % size
    return count, rest if job.tiles else np.zeros_like(tokens)


def tiling(job: Job, kind: str, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return what running a layer of a kind in tiles adds, us, forward and backward.

    A further tile starts all kernels once more, with last waves half empty. Outputs and gradients of inputs are copied
    together.
    """
    model, (count, rest) = job.model, tiled(job, tokens)
    more = np.maximum(count + (rest > 0) - 1, 0)
    dense = [matrix for matrix in model.matrices_of(kind) if matrix.part != "experts"]
    start = products(job, dense, np.zeros(1))

    def copied(values: int) -> np.ndarray:
        return np.where(more > 0, _memory(job, 2 * values * job.bytes_per_value, tokens), 0.0)

    # Three kernels that are no products: a norm before QKV, and one and the activation in the MLP.
    kernels, hidden = 3 * job.profile.kernel_us, 2 * model.hidden_size
    forward = more * (start.forward + kernels) + copied(dense[0].outputs + hidden)
    return forward, more * (start.backward + kernels) + copied(model.output_size + hidden)


def output_matrix(job: Job) -> Matrix:
    return Matrix("output", job.model.padded_vocab_size, job.model.hidden_size, "outputs")


def joining_matrix(job: Job) -> Matrix:
    return Matrix("joining", job.model.hidden_size, 2 * job.model.hidden_size, "outputs")


def recomputed(job: Job, kind: str, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the time in which backward runs recomputed modules of a layer again, but for core attention and what
    tensor-parallel ranks exchange, and the experts' part of it."""
    model, dropped = job.model, set(job.recompute.dropped)
    linear, experts = np.zeros_like(tokens), np.zeros_like(tokens)
    for part in model.parts_of(kind):
        again = part_of(model, part).again(job, dropped)
        of_products = products(job, again.matrices, tokens).forward * again.share
        if again.dispatched:
            experts = of_products + token_exchange(job, tokens)
        else:
            linear = linear + of_products
        if not job.profile.linear_tflops:  # measured rates are of all of a layer
            memory = _memory(job, again.values * job.bytes_per_value, tokens)
            linear = linear + memory + again.kernels * job.profile.kernel_us
    return linear + experts, experts


def memory_bound(job: Job, kind: str, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the time of what is neither a product nor attention in a layer, forward and backward."""
    model, kernels, values = job.model, np.zeros(2), 0
    if job.profile.linear_tflops:
        return np.zeros_like(tokens), np.zeros_like(tokens)
    for part in model.parts_of(kind):
        # Reads and writes of a norm and a residual sum.
        values += 5 * model.hidden_size
        found = part_of(model, part)
        values += found.values(job)
        kernels += found.kernels
    time, (forward, backward) = _memory(job, values * job.bytes_per_value, tokens), kernels * job.profile.kernel_us
    return time + forward, 2 * time + backward


def loss(job: Job, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the time of upstream's unfused loss, forward and backward.

    Forward makes logits fp32, and reads them five times and writes them three times more; backward scales the gradient
    and makes it bf16.
    """
    size, values = job.model.padded_vocab_size, job.bytes_per_value
    return _memory(job, size * (values + 9 * FP32), tokens), _memory(job, size * (3 * FP32 + values), tokens)


OVERLAP_HIDES = 0.73
"""Share of the experts' exchange that `--overlap-moe-expert-parallel-comm` hides: fitted to published steps, as
`cost.host.LAUNCHES_US` are, so it stands for launches that overlap as well, and for passes that run alone."""
COPY_PASSES = {False: 16.0, True: 6.0}
"""Reads and writes of all copies of rows, between matrices as well, besides one of each in the dispatcher; with
`--use-transformer-engine-op-fuser`, the second. Fitted, as `OVERLAP_HIDES` is: permutation, padding, casts for both
directions, and products slower than those of equal rows."""


def exposed_dispatch(job: Job, tokens: np.ndarray, beside: float) -> np.ndarray:
    """Return the time in which the rows of a layer go to their experts and back and nothing hides it, us.

    `beside`: what another micro-batch computes in the same layer in the other direction, us. It hides nothing unless
    passes run by turns (`Job.overlaps_experts`).
    """
    moved = token_exchange(job, tokens)
    return moved - job.overlaps_experts * OVERLAP_HIDES * np.minimum(moved, beside)


def copies(job: Job, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the time in which copies of rows, one for each of their experts, are read and written, us; forward and
    backward, which has twice as many passes over them."""
    model, topk = job.model, job.model.moe_router_topk
    if not topk:
        return np.zeros_like(tokens), np.zeros_like(tokens)
    values = topk * model.hidden_size + model.ffn_hidden_size - model.shared_ffn_hidden_size
    moved = 2 * (1 + topk) * model.hidden_size
    forward, backward = (moved + COPY_PASSES[job.fused_experts] * share * values for share in (1 / 3, 2 / 3))
    return _memory(job, forward * job.bytes_per_value, tokens), _memory(job, backward * job.bytes_per_value, tokens)


def token_exchange(job: Job, tokens: np.ndarray) -> np.ndarray:
    """Return the time in which the rows of a layer travel to their experts and back, us.

    By `--moe-token-dispatcher-type`, a row is sent once for every expert that it goes to (alltoall), once to a node
    and in it once to a rank (flex: DeepEP and HybridEP), or to all ranks (allgather).
    """
    parallel, network, topk = job.parallel, job.profile.network, job.model.moe_router_topk
    row_bytes = tokens / parallel.tp * job.model.hidden_size * job.bytes_per_value
    rows = row_bytes * topk
    time = np.zeros_like(tokens)
    if not topk or job.profile.counts_pairs:
        return time
    ranks = Group(size=parallel.ep, stride=parallel.expert_tp)
    if job.moe_dispatcher == "allgather":
        ranks, gathered = Group(size=parallel.expert_ranks, stride=1), row_bytes * parallel.expert_ranks
        return time + sum(network.collective(name, gathered, ranks) for name in ("all_gather", "reduce_scatter"))
    if parallel.ep > 1:
        joined = topk if job.moe_dispatcher == "flex" else 0
        latency, byte = network.all_to_all(
            ranks, joined, (job.model.moe_router_group_topk, job.model.moe_router_num_groups)
        )
        time = time + 2 * (latency + rows * byte * (parallel.ep - 1) / parallel.ep)
    inside = Group(size=parallel.expert_tp, stride=1)
    for name in ("all_gather", "reduce_scatter"):
        time = time + network.collective(name, rows * parallel.expert_tp, inside)
    return time


def _memory(job: Job, bytes_per_token: float, tokens: np.ndarray) -> np.ndarray:
    return bytes_per_token / job.parallel.tp * tokens / job.profile.memory_gb_per_s / 1e3
