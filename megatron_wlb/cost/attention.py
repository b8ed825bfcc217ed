"""Times of a job's attention, of its exchange of K and V, and the kernel model that its sharding uses."""

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from megatron_wlb.hardware.network import Group
from megatron_wlb.hardware.profile import KernelModel
from megatron_wlb.job import FP32, Job
from megatron_wlb.model import FULL

Directions = tuple[np.ndarray, np.ndarray]
"""Forward and backward of one layer, in us, float64 [M] each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeModel:
    """Time of an exchange in us: `latency`, plus a time per row of the busiest rank."""

    latency: float
    arrive: float
    """Per row of K and V."""
    leave: float
    """Per row of their gradients."""
    prefetch: float
    """By which backward's first K and V are prefetched, per row of a rank: products for input gradients of MLP and
    output projection."""

    def times(self, rows: np.ndarray) -> Directions:
        """Return times in which K and V arrive and gradients leave the busiest rank."""
        arrive, leave = (np.where(rows > 0, self.latency + rows * each, 0.0) for each in (self.arrive, self.leave))
        return arrive, leave


def exchange_model(job: Job) -> ExchangeModel:
    """Return the exchange of a job; no time if the profile has no unit of it."""
    if job.profile.counts_pairs:
        return ExchangeModel(latency=0.0, arrive=0.0, leave=0.0, prefetch=0.0)
    latency, byte = job.profile.network.all_to_all(Group(size=job.parallel.cp, stride=job.parallel.tp))
    if job.cp_exchange == "latents":
        return _latents_model(job, latency, byte)
    value = job.model.kv_values_per_rank(job.parallel.tp) * byte
    before = 0 if "core_attn" in job.recompute.dropped else job.model.weights_of(FULL) - job.model.qkv_weights
    prefetch = 2 * before / job.parallel.tp / rates(job)[1] / 1e6
    arrive, leave = value * job.bytes_per_value, value * job.cp_gradient_bytes
    return ExchangeModel(latency=latency, arrive=arrive, leave=leave, prefetch=prefetch)


def _latents_model(job: Job, latency: float, byte: float) -> ExchangeModel:
    """Return the exchange of latents, of which each tensor-parallel rank sends a part.

    These ranks gather parts, and rows to expand; in backward they scatter and gather gradients of latents, and sum
    those of the key part that heads share.
    """
    latent, shared = job.model.kv_lora_rank, job.model.qk_pos_emb_head_dim
    network, tensor = job.profile.network, Group(size=job.parallel.tp, stride=1)

    def time(collective: str, values: int) -> float:
        return float(np.diff(network.collective(collective, np.array([0, values * job.bytes_per_value]), tensor))[0])

    moved = (latent + shared) * job.bytes_per_value * byte / job.parallel.tp
    forward, backward = expansion(job)
    gathered = time("all_gather", latent)
    again = forward + gathered if job.expands_again else 0.0
    # Latents need one collective more in forward and three in backward: two on average.
    return ExchangeModel(
        latency=latency + 2 * float(network.collective("all_gather", 0, tensor)),
        arrive=moved + time("all_gather", latent + shared) + gathered + forward,
        leave=moved + again + backward + time("reduce_scatter", latent) + gathered + time("all_reduce", shared),
        prefetch=0.0,
    )


def rates(job: Job) -> tuple[float, float]:
    """TFLOP/s of a layer's products outside of experts, forward and backward."""
    gain, _ = job.profile.gain(job.precision, "attention")
    forward, backward = job.profile.rates
    return forward * gain, backward * gain


def expansion(job: Job) -> tuple[float, float]:
    """Return us to expand K and V of a row from latents, forward and backward."""
    flops = 2 * math.prod(job.model.projections[2]) / job.parallel.tp / 1e6
    forward, backward = rates(job)
    return flops / forward, 2 * flops / backward


def exposed_exchange(job: Job, rows: np.ndarray, attention: Directions) -> Directions:
    """Return what exchanging K/V of all `rows` adds to the slowest ranks' time.

    By a ring, or before attention as in the paper: an all-gather, in backward again, with fp32 gradients.
    """
    cp, collective = job.parallel.cp, job.profile.network.collective
    if cp == 1:
        return np.zeros_like(rows), np.zeros_like(rows)
    ranks = Group(size=cp, stride=job.parallel.tp)
    values = rows * job.model.kv_values_per_rank(job.parallel.tp)
    arrive = collective("all_gather", values * job.bytes_per_value, ranks)
    if job.cp_exchange == "ring":
        # Each of CP - 1 hops is overlapped by one of CP parts. As in TransformerEngine, backward sends K and V in all
        # parts but the last, and bf16 gradients in all but the first.
        hop, (forward, backward) = arrive / (cp - 1), (times / cp for times in attention)
        added = [np.maximum(moved * hop - backward, 0) for moved in (1, 2)]
        return (cp - 1) * np.maximum(hop - forward, 0), 2 * added[0] + (cp - 2) * added[1]
    leave = collective("reduce_scatter", values * FP32, ranks)
    return arrive, arrive + leave


def attention_kernels(job: Job, window: int | None = None) -> tuple[KernelModel, KernelModel]:
    """Attention of one layer on one rank, forward and backward, without communication.

    A ring and the paper's all-gather have no mask that is aligned to the bottom right.
    """
    heads, size = job.model.heads_per_rank(job.parallel.tp)[0], job.model.head_size
    parts = job.parallel.cp if job.cp_exchange == "ring" else 1
    forward, backward = job.profile.kernels(heads=heads, head_size=size, parts=parts, fp8=job.fp8_attention)
    changes: dict[str, Any] = {"window": window}
    if job.cp_exchange not in ("shared", "latents"):
        changes["hidden"] = 0.0
    return replace(forward, **changes), replace(backward, **changes)


@lru_cache(maxsize=16)
def sharding_kernel(job: Job) -> KernelModel:
    """Return attention of a layer, both directions, with an exposed exchange."""
    forward, backward = attention_kernels(job)
    kernel = forward + backward
    # Rounds go around hidden tiles; beside windows, latents do not divide what is whole from other documents.
    if job.cp_exchange == "shared" or job.model.windows != (None,):
        kernel = replace(kernel, hidden=0.0)
    # If all rows are exchanged whatever the sharding, the exchange does not affect the choice.
    if job.cp_exchange not in ("shared", "latents"):
        return kernel
    arrive, leave = exchange_model(job).times(np.array(job.context_length))
    times = 1 if job.cp_exchange == "latents" else 2
    return replace(kernel, exchange=float(times * arrive + leave) / job.context_length)
