"""Time of all of a layer but attention: matrix products by shape, other operations by bytes and number."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from megatron_wlb.job import FP32, Job
from megatron_wlb.layers import parts_of
from megatron_wlb.layers.part import memory_time
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


def output_matrix(job: Job) -> Matrix:
    return Matrix("output", job.model.padded_vocab_size, job.model.hidden_size, "outputs")


def modules_again(job: Job, kind: str, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the time in which backward runs dropped modules of a layer again, but for core attention and the exchanges
    of tensor-parallel ranks, and its part that ranks pool."""
    linear, pooled = np.zeros_like(tokens), np.zeros_like(tokens)
    for part in parts_of(job.model, kind):
        found = part.again(job, {*job.dropped})
        of_products = products(job, found.matrices, tokens).forward * found.share
        if found.travels:
            pooled = of_products + part.travel(job, tokens)
        else:
            linear = linear + of_products
        if not job.profile.linear_tflops:  # measured rates are of all of a layer
            memory = memory_time(job, found.values * job.bytes_per_value, tokens)
            linear = linear + memory + found.kernels * job.profile.kernel_us
    return linear + pooled, pooled


def memory_bound(job: Job, kind: str, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the time of a layer's kernels that are neither products nor attention, forward and backward."""
    kernels, values = np.zeros(2), 0
    if job.profile.linear_tflops:
        return np.zeros_like(tokens), np.zeros_like(tokens)
    for part in parts_of(job.model, kind):
        # Reads and writes of a norm and a residual sum.
        values += 5 * job.model.hidden_size
        values += part.values(job)
        kernels += part.kernels
    time, (forward, backward) = memory_time(job, values * job.bytes_per_value, tokens), kernels * job.profile.kernel_us
    return time + forward, 2 * time + backward


def loss(job: Job, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the time of upstream's unfused loss, forward and backward.

    Forward makes logits fp32, and reads them five times and writes them three times more; backward scales the gradient
    and makes it bf16.
    """
    size, values = job.model.padded_vocab_size, job.bytes_per_value
    return memory_time(job, size * (values + 9 * FP32), tokens), memory_time(job, size * (3 * FP32 + values), tokens)
