"""Attention times of a job, and the kernel model that its sharding uses."""

from dataclasses import replace
from functools import lru_cache

import numpy as np

from megatron_wlb.cost.exchange import exchange_model, exchange_parts
from megatron_wlb.hardware.profile import KernelModel
from megatron_wlb.job import Job


def attention_kernels(job: Job) -> tuple[KernelModel, KernelModel]:
    """Attention of one layer on one rank, forward and backward, without communication."""
    heads, size = job.model.heads_per_rank(job.parallel.tp)[0], job.model.head_size
    return job.profile.kernels(heads=heads, head_size=size, parts=exchange_parts(job))


@lru_cache(maxsize=16)
def sharding_kernel(job: Job) -> KernelModel:
    """Return attention of a layer, both directions, with an exposed exchange."""
    forward, backward = attention_kernels(job)
    # If all rows are exchanged whatever the sharding, the exchange does not affect the choice.
    if job.cp_exchange not in ("shared", "latents"):
        return forward + backward
    arrive, leave = exchange_model(job).times(np.array(job.context_length))
    times = 1 if job.sharding.save_gathered_kv or job.cp_exchange == "latents" else 2
    return replace(forward + backward, exchange=float(times * arrive + leave) / job.context_length)


def ring_counts(lengths: np.ndarray, cp: int, tile_rows: int) -> np.ndarray:
    """Return launches, N_t and N_q of every rank in TransformerEngine's ring of packed documents, int64 [cp, 3].

    A rank has two chunks of every document, and has their keys first. In every later step it gets those of another
    rank: both of its chunks see the first, or the second sees both. Each has tiles of its own, however short it is.
    """
    one, two = (-(-each // tile_rows) for each in (-(-lengths // (2 * cp)), -(-lengths // cp)))
    rank = np.arange(cp)
    tiles = np.full(cp, (two * (two + 1) // 2 + (cp - 1) * one * two).sum())
    return np.stack((np.full(cp, cp), tiles, (1 + rank) * two.sum() + (cp - 1 - rank) * one.sum()), axis=1)
