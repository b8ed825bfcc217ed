"""Times of a job's attention, of its exchange of K and V, and the kernel model that its sharding uses."""

from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from megatron_wlb.hardware.network import Group
from megatron_wlb.hardware.profile import KernelModel
from megatron_wlb.job import FP32, Job
from megatron_wlb.layers import attention_of
from megatron_wlb.layers.attention import Directions, ExchangeModel


def exchange_model(job: Job) -> ExchangeModel:
    """Return the exchange of a job; no time if the profile has no unit of it."""
    if job.profile.counts_pairs:
        return ExchangeModel(latency=0.0, arrive=0.0, leave=0.0, prefetch=0.0)
    return attention_of(job.model).exchange(job)


def exposed_exchange(job: Job, rows: np.ndarray, attention: Directions) -> Directions:
    """Return the time that exchanging K/V of all `rows` adds on the slowest ranks.

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
        # of them but the last, and bf16 gradients in all but the first.
        hop, (forward, backward) = arrive / (cp - 1), (times / cp for times in attention)
        added = [np.maximum(moved * hop - backward, 0) for moved in (1, 2)]
        return (cp - 1) * np.maximum(hop - forward, 0), 2 * added[0] + (cp - 2) * added[1]
    leave = collective("reduce_scatter", values * FP32, ranks)
    return arrive, arrive + leave


UNMASKED_QUERIES = 0.5
"""Time of a query tile where no key is masked, over that by the causal mask, with which profiles are measured: NVIDIA's
bars without a mask have .52, .57 and .25 in backward at 2K, 4K and 8K (NVIDIA/cudnn-frontend,
benchmark/sdpa_benchmark_training/results/h200_919_only_cudnn/llama3.1_20260227_034703.csv, by h200-cudnn-9.19), and .29
to .42 in forward, whose query tiles take little."""
UNEQUAL_BACKWARD = 1.21
"""Time of backward of heads of 192 and 128 values over that in proportion to the mean: median of 20 bars of NVIDIA's
(the same repository, results/dsv3, GB200 and GB300, 1.12 to 1.32); 1.18 to 1.28 on H200, in deterministic mode alone.
By FLOPs it would be 1.04. Forward is in proportion: .99 in the median."""


def ring_counts(lengths: np.ndarray, cp: int, tile_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Return tiles and query tiles of every rank, float64 [cp] each, of documents that are on all ranks of a ring.

    As in TransformerEngine, a rank has two of 2 CP chunks of each. It attends from both to its own by the causal mask,
    then without a mask from both to the first chunk of a rank before it, and from its second to both of a rank after.
    Every such round is a call, and takes its own query tiles. Without a mask, one counts `UNMASKED_QUERIES`.
    """
    before = np.arange(cp)
    chunk = -(-lengths // (2 * cp))
    one, both = (-(-rows // tile_rows) for rows in (chunk, 2 * chunk))
    tiles = np.full(cp, float((both * (both + 1) // 2 + (cp - 1) * one * both).sum()))
    return tiles, both.sum() + UNMASKED_QUERIES * (before * both.sum() + before[::-1] * one.sum())


def ring_sums(job: Job, rows: np.ndarray, packed: np.ndarray) -> Directions:
    """Return the time in which each rank of a ring adds its rounds up, us, float64 [M, cp], forward and backward.

    As in TransformerEngine (context_parallel.py, context_parallel.cu), beside calls: forward joins K and V, and makes
    outputs of rounds one, by a factor from both log-sum-exps; backward copies K and V, and adds dQ, dK and dV. A sum
    reads two tensors and writes one. `packed`: micro-batches of several documents, bool [M]. Their output begins as
    zeros, and halves of tensors are copied; else they are views.
    """
    model, tp, cp = job.model, job.parallel.tp, job.parallel.cp
    if cp == 1:
        return np.zeros((len(rows), 1)), np.zeros((len(rows), 1))
    byte = FP32 if job.fp8_attention else job.bytes_per_value
    q, out, kv = model.query_size / tp, model.output_size / tp, model.kv_values_per_rank(tp)
    before, halves = np.arange(cp), packed[:, None]
    after = before[::-1]
    whole, half = before + after / 2, after + before / 2  # calls by queries, and by keys, but for the causal one
    # Log-sum-exps of a call are read to sum them, and with their sum for its outputs.
    sums = 5 * FP32 * model.num_attention_heads / tp * whole
    forward = byte * (2 * kv + 2 * out + 3 * out * whole + halves * (2 * out + q * after + kv * before)) + sums
    added = 2 * kv + (q + kv) * 2 + 3 * (q * whole + kv * half)
    backward = byte * (added + halves * ((q + 2 * out) * after + kv * before))
    time = rows[:, None] / cp / job.profile.memory_gb_per_s / 1e3
    return forward * time, backward * time


def attention_kernels(job: Job, window: int | None = None) -> tuple[KernelModel, KernelModel]:
    """Attention of one layer on one rank, forward and backward, without communication.

    A ring and the paper's all-gather have no mask that is aligned to the bottom right.
    """
    heads, size = job.model.heads_per_rank(job.parallel.tp)[0], job.model.head_size
    kv_chunks = job.parallel.cp if job.cp_exchange == "ring" else 1
    forward, backward = job.profile.kernels(heads=heads, head_size=size, kv_chunks=kv_chunks, fp8=job.fp8_attention)
    changes: dict[str, Any] = {"window": window}
    if not job.exchanges_needed:
        changes["hidden"] = 0.0
    if job.model.query_size > job.model.output_size:
        slower = {name: UNEQUAL_BACKWARD * getattr(backward, name) for name in ("tile", "query_tile", "hidden")}
        backward = replace(backward, **slower)
    return replace(forward, **changes), replace(backward, **changes)


@lru_cache(maxsize=16)
def sharding_kernel(job: Job) -> KernelModel:
    """Return attention of a layer, both directions, with an exposed exchange."""
    forward, backward = attention_kernels(job)
    kernel = forward + backward
    # Rounds go around hidden tiles; beside windows, an exchange before attention divides no documents from others.
    if job.cp_exchange == "shared" or job.model.windows != (None,):
        kernel = replace(kernel, hidden=0.0)
    # If all rows are exchanged whatever the sharding, the exchange does not affect the choice.
    if not job.exchanges_needed:
        return kernel
    arrive, leave = exchange_model(job).times(np.array(job.context_length))
    times = 1 if job.keeps_exchanged else 2
    return replace(kernel, exchange=float(times * arrive + leave) / job.context_length)
