"""The cost model: how long every pass of every micro-batch takes, and what that time is made of."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from megatron_wlb.plan.sharding.exchange import num_sent
from megatron_wlb.plan.types import ShardPlan
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
    for plan in plans:
        if len(plan.shards) != job.cp:
            raise ValueError(
                f"a micro-batch is sharded over {len(plan.shards)} context-parallel ranks, not {job.cp}; plan it for "
                "the job"
            )
    model, network = job.model, job.hardware.network
    tokens = np.array([plan.lengths.sum() for plan in plans]) / job.cp
    tensor = Group(size=job.tp, stride=1)
    hidden_bytes = tokens * model.hidden_size * BF16
    gather, scatter = (network.collective(name, hidden_bytes, tensor) for name in ("all_gather", "reduce_scatter"))
    # Forward: gathered before and scattered after attention and feed-forward; backward mirrors that, and gathers the
    # inputs again for the gradients of the weights.
    moved = 2 * (gather + scatter), 4 * gather + 2 * scatter
    exposed = 1 - job.tp_overlap
    kernel = job.kernel(backward=False)
    counts = np.array([[kernel.count_shard(s.colours) for s in plan.shards] for plan in plans])  # [M, cp, 3]
    shared = tokens * job.cp if job.gather_all else np.array([num_sent(plan) * job.cp for plan in plans])
    launches, tiles, query_tiles = np.moveaxis(counts, 2, 0)
    launches = np.where(shared[:, None] > 0, launches, launches / job.exchange_parts)  # all at once
    attention = [job.kernel(backward=backward).time(launches, tiles, query_tiles) for backward in (False, True)]
    linear, exchange = _linear(job, tokens), _exchange(job, shared, [times.max(axis=1) for times in attention])
    forward, backward = (
        LayerTimes(linear=linear[i], tensor=moved[i] * exposed, attention=attention[i], exchange=exchange[i])
        for i in range(2)
    )
    if job.recompute:
        backward = LayerTimes(**{f.name: getattr(backward, f.name) + getattr(forward, f.name) for f in fields(forward)})
    layers = job.layers()[:, :, None]
    times = [layers * forward.total, layers * backward.total]
    # The embedding scatters its rows; the output layer gathers them.
    output = _output(job, tokens)
    times[0][0, 0] += scatter * exposed
    times[1][0, 0] += gather * exposed
    times[0][-1, -1] += output[0] + gather * exposed
    times[1][-1, -1] += output[1] + (gather + scatter) * exposed
    between = Group(size=job.pp, stride=job.tp * job.cp * job.dp)
    transfer = network.point_to_point(hidden_bytes / job.tp, between)
    return Passes(forward=times[0], backward=times[1], transfer=transfer, layers=(forward, backward))


Directions = tuple[np.ndarray, np.ndarray]
"""Forward and backward, in us, float64 [M] each."""


def _linear(job: Job, tokens: np.ndarray) -> Directions:
    """Matrix products of a layer and, unless rates were measured with it, what is bound by memory."""
    model = job.model
    forward, backward = _products(job, model.layer_weights, tokens)
    if job.hardware.attention.linear_tflops:
        return forward, backward
    # Reads and writes in bf16 of two norms and two residual sums, rotary embedding, and the activation.
    values = 2 * 2 * model.hidden_size + 2 * 3 * model.hidden_size + 2 * (model.query_size + model.key_size)
    values += model.ffn_hidden_size * (3 if model.gated_linear_unit else 2)
    memory = _memory(job, values * BF16, tokens)
    return forward + memory, backward + 2 * memory


def _output(job: Job, tokens: np.ndarray) -> Directions:
    """The output layer and the loss: logits are written in bf16, and read and written in fp32."""
    forward, backward = _products(job, job.model.vocabulary_weights, tokens)
    logits = _memory(job, job.model.padded_vocab_size * (BF16 + 2 * FP32), tokens)
    return forward + logits, backward + 2 * logits


def _products(job: Job, weights: int, tokens: np.ndarray) -> Directions:
    assumed = job.hardware.linear_tflops
    forward, backward = job.hardware.attention.linear_tflops or (assumed, assumed)
    flops = 2 * weights / job.tp * tokens
    return flops / forward / 1e6, 2 * flops / backward / 1e6


def _memory(job: Job, bytes_per_token: float, tokens: np.ndarray) -> np.ndarray:
    return bytes_per_token / job.tp * tokens / job.hardware.memory_gb_per_s / 1e3


def _exchange(job: Job, shared: np.ndarray, attention: Sequence[np.ndarray]) -> Directions:
    """What the exchange of K and V of `shared` rows (float64 [M]) adds to `attention`, that of the slowest ranks.

    K and V of all ranks arrive; in backward again, and their gradients leave in fp32. Of head groups one computes while
    the next travels, so one is waited for.
    """
    if job.cp == 1:
        return np.zeros_like(shared), np.zeros_like(shared)
    model, groups, collective = job.model, job.cp_head_groups, job.hardware.network.collective
    kv_bytes = shared * 2 * -(-model.num_query_groups // job.tp) * model.kv_channels * BF16
    group = Group(size=job.cp, stride=job.tp)
    if job.cp_ring:
        hop = collective("all_gather", kv_bytes, group) / (job.cp - 1)
        return _of_ring(hop, job.cp, *(times / job.cp for times in attention))
    arrive = groups * collective("all_gather", kv_bytes / groups, group)
    leave = groups * collective("reduce_scatter", kv_bytes / groups / BF16 * FP32, group)
    forward, backward = (
        np.where(shared > 0, time / groups + np.maximum(time - times, 0) * (groups - 1) / groups, 0.0)
        for time, times in zip((arrive, arrive + leave), attention, strict=True)
    )
    return forward, backward


def _of_ring(hop: np.ndarray, cp: int, forward: np.ndarray, backward: np.ndarray) -> Directions:
    """What CP - 1 hops add to the CP parts of attention, `forward` and `backward` long, of which one follows each hop.

    As TransformerEngine has it: in backward K and V leave in all parts but the last, gradients, in bf16, in all but the
    first.
    """
    added = [np.maximum(moved * hop - backward, 0) for moved in (1, 2)]
    return (cp - 1) * np.maximum(hop - forward, 0), 2 * added[0] + (cp - 2) * added[1]
