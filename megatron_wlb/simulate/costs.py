"""The cost model: how long every pass of every micro-batch takes, and what that time is made of."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_wlb.plan.sharding.exchange import num_sent
from megatron_wlb.plan.types import ShardPlan
from megatron_wlb.plan.workload import KernelModel
from megatron_wlb.simulate.collectives import Group
from megatron_wlb.simulate.job import Job

BF16, FP32 = 2, 4
"""Bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    """Of one layer of one direction, in us, for M micro-batches of a data-parallel rank."""

    linear: np.ndarray
    """float64 [M]: matrix products and what is bound by memory."""
    tensor: np.ndarray
    """float64 [M]: tensor-parallel communication that nothing hides."""
    attention: np.ndarray
    """float64 [M, cp]: attention kernels of every context-parallel rank."""
    exchange: np.ndarray
    """float64 [M]: exchange of K, V and their gradients that nothing hides, on the slowest rank."""

    @property
    def total(self) -> np.ndarray:
        """float64 [M]; context-parallel ranks wait for each other in every layer."""
        return self.linear + self.tensor + self.attention.max(axis=1) + self.exchange


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """Times of all passes of a data-parallel rank, in us, float64 [stages, chunks, M] unless stated otherwise."""

    forward: np.ndarray
    backward: np.ndarray
    transfer: np.ndarray
    """float64 [M]."""
    layers: tuple[LayerTimes, LayerTimes]
    """Forward and backward (with recomputation)."""


def pass_times(job: Job, plans: Sequence[ShardPlan]) -> Passes:
    """What the cost model says of M micro-batches of a data-parallel rank.

    Raises ValueError for micro-batches that are not sharded over `job.cp` ranks.
    """
    model, hardware, network = job.model, job.hardware, job.hardware.network
    for plan in plans:
        if len(plan.shards) != job.cp:
            raise ValueError(
                f"a micro-batch is sharded over {len(plan.shards)} context-parallel ranks, not {job.cp}; plan it for "
                "the job"
            )
    tokens = np.array([plan.lengths.sum() for plan in plans]) / job.cp
    kernel = job.kernel(backward=False)
    counts = np.array([[_count(kernel, s.colours) for s in plan.shards] for plan in plans])  # [M, cp, 3]
    shared = tokens * job.cp if job.gather_all else np.array([num_sent(plan) * job.cp for plan in plans])

    tensor, context = Group(size=job.tp, stride=1), Group(size=job.cp, stride=job.tp)
    hidden_bytes = tokens * model.hidden_size * BF16
    gather = network.collective("all_gather", hidden_bytes, tensor)
    scatter = network.collective("reduce_scatter", hidden_bytes, tensor)
    exposed = 1 - job.tp_overlap

    def products(weights: int, tflops: float) -> np.ndarray:
        return 2 * weights / job.tp * tokens / tflops / 1e6

    def memory(bytes_per_token: float) -> np.ndarray:
        return bytes_per_token / job.tp * tokens / hardware.memory_gb_per_s / 1e3

    # Reads and writes in bf16 of two norms and two residual sums, rotary embedding, and the activation.
    values = 2 * 2 * model.hidden_size + 2 * 3 * model.hidden_size + 2 * (model.query_size + model.key_size)
    values += model.ffn_hidden_size * (3 if model.gated_linear_unit else 2)
    measured = hardware.attention.linear_tflops  # over all of the time, with that of memory
    tflops = measured or (hardware.linear_tflops, hardware.linear_tflops)
    linear = [n * products(model.layer_weights, rate) for n, rate in zip((1, 2), tflops, strict=True)]
    if measured is None:
        linear = [each + n * memory(values * BF16) for n, each in zip((1, 2), linear, strict=True)]

    # K and V of all ranks arrive; in backward again, and their gradients leave in fp32.
    kv_bytes = shared * 2 * -(-model.num_query_groups // job.tp) * model.kv_channels * BF16
    collectives = 1 if job.cp_ring else job.cp_head_groups
    arrive = collectives * network.collective("all_gather", kv_bytes / collectives, context)
    leave = collectives * network.collective("reduce_scatter", kv_bytes / collectives / BF16 * FP32, context)
    arrive, leave = (np.where(shared > 0, time, 0.0) for time in (arrive, leave))

    def layer(backward: bool) -> LayerTimes:
        launches, tiles, query_tiles = np.moveaxis(counts, 2, 0)
        attention = job.kernel(backward=backward).time(launches, tiles, query_tiles)
        # Forward: gathered before and scattered after attention and feed-forward; backward mirrors that, and gathers
        # the inputs again for the gradients of the weights.
        moved = 2 * (gather + scatter) + (2 * gather if backward else 0)
        return LayerTimes(
            linear=linear[backward],
            tensor=moved * exposed,
            attention=attention,
            exchange=_exposed(arrive + leave if backward else arrive, attention.max(axis=1), job.exchange_parts),
        )

    forward, backward = layer(False), layer(True)
    if job.recompute:
        backward = LayerTimes(
            linear=backward.linear + forward.linear,
            tensor=backward.tensor + forward.tensor,
            attention=backward.attention + forward.attention,
            exchange=backward.exchange + forward.exchange,
        )
    layers = job.layers()[:, :, None]
    times = [layers * forward.total, layers * backward.total]
    # The embedding scatters its rows; logits are written in bf16, and read and written in fp32 by the loss.
    logits = memory(model.padded_vocab_size * (BF16 + 2 * FP32))
    output = [n * (products(model.vocabulary_weights, rate) + logits) for n, rate in zip((1, 2), tflops, strict=True)]
    times[0][0, 0] += scatter * exposed
    times[1][0, 0] += gather * exposed
    times[0][-1, -1] += output[0] + gather * exposed
    times[1][-1, -1] += output[1] + (gather + scatter) * exposed
    between = Group(size=job.pp, stride=job.tp * job.cp * job.dp)
    transfer = network.point_to_point(hidden_bytes / job.tp, between)
    return Passes(forward=times[0], backward=times[1], transfer=transfer, layers=(forward, backward))


def _count(kernel: KernelModel, colours: tuple[np.ndarray, ...]) -> tuple[int, int, int]:
    """Launches, tiles and query tiles of a shard."""
    counts = [kernel.count(colour) for colour in colours if len(colour)]
    return len(counts), sum(c[0] for c in counts), sum(c[1] for c in counts)


def _exposed(communication: np.ndarray, computation: np.ndarray, parts: int) -> np.ndarray:
    """What communication adds to computation where each of `parts` travels while another computes."""
    return communication / parts + np.maximum(communication - computation, 0) * (parts - 1) / parts
