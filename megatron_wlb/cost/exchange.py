"""What the exchange of K and V between context-parallel ranks adds to attention."""

from typing import TYPE_CHECKING

import numpy as np

from megatron_wlb.cost.network import Group, Network

if TYPE_CHECKING:
    from megatron_wlb.job import Job

FP32 = 4
"""Bytes of a value, such as a gradient."""
Directions = tuple[np.ndarray, np.ndarray]
"""Forward and backward of one layer, in us, float64 [M] each."""


def exchange_parts(job: "Job") -> int:
    """Parts of K and V of which one is computed with while the next travels."""
    return job.parallel.cp if job.cp_exchange == "ring" else job.head_groups


def exposed_exchange(job: "Job", rows: np.ndarray, attention: Directions, network: Network) -> Directions:
    """What the exchange of K and V of `rows` rows (float64 [M]) adds to `attention`, that of the slowest ranks.

    K and V of all ranks arrive; in backward again, unless they were kept, and their gradients leave in fp32. Of head
    groups one computes while the next travels, so one is waited for.
    """
    cp, groups, collective = job.parallel.cp, job.head_groups, network.collective
    if cp == 1:
        return np.zeros_like(rows), np.zeros_like(rows)
    ranks = Group(size=cp, stride=job.parallel.tp)
    values = rows * 2 * job.model.heads_per_rank(job.parallel.tp)[1] * job.model.kv_channels
    if job.cp_exchange == "ring":
        hop = collective("all_gather", values * job.bytes_per_value, ranks) / (cp - 1)
        return _exposed_hops(hop, cp, *(times / cp for times in attention))
    arrive = groups * collective("all_gather", values / groups * job.bytes_per_value, ranks)
    leave = groups * collective("reduce_scatter", values / groups * FP32, ranks)
    times = arrive, leave if job.save_gathered_kv else arrive + leave
    forward, backward = (
        np.where(rows > 0, time / groups + np.maximum(time - hidden, 0) * (groups - 1) / groups, 0.0)
        for time, hidden in zip(times, attention, strict=True)
    )
    return forward, backward


def _exposed_hops(hop: np.ndarray, cp: int, forward: np.ndarray, backward: np.ndarray) -> Directions:
    """What CP - 1 hops add to the CP parts of attention, `forward` and `backward` long, of which one follows each hop.

    As TransformerEngine has it: in backward K and V leave in all parts but the last, gradients, in bf16, in all but the
    first.
    """
    added = [np.maximum(moved * hop - backward, 0) for moved in (1, 2)]
    return (cp - 1) * np.maximum(hop - forward, 0), 2 * added[0] + (cp - 2) * added[1]
