"""How long the exchange of K and V between context-parallel ranks takes, and how much of it attention overlaps."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_wlb.hardware.network import Group
from megatron_wlb.job import FP32, Job

Directions = tuple[np.ndarray, np.ndarray]
"""Forward and backward of one layer, in us, float64 [M] each."""


def exchange_parts(job: Job) -> int:
    """Parts of K and V of which one is computed with while the next travels, each with launches of its own."""
    return job.parallel.cp if job.cp_exchange == "ring" else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeModel:
    """Time in us of an exchange: `latency`, and more for every row of K and V through the busiest rank; 0 for none.

    Where latents travel, a row of K and V is one of latents and the time to expand it.
    """

    latency: float
    arrive: float
    """For a row of K and V."""
    leave: float
    """For a row of their gradients."""
    ahead: float
    """By which a row that a rank holds brings the first K and V of backward forward: they leave as the layer's backward
    begins, and products for the inputs of its MLP and output projection run before attention. Those for weights, which
    may be put off, don't count."""

    def times(self, rows: np.ndarray) -> Directions:
        """In which K and V arrive and their gradients leave, if the busiest rank has `rows` rows."""
        arrive, leave = (np.where(rows > 0, self.latency + rows * each, 0.0) for each in (self.arrive, self.leave))
        return arrive, leave


def exchange_model(job: Job) -> ExchangeModel:
    """The exchange of a job; it takes no time where the profile has no unit of time."""
    if job.profile.counts_pairs:
        return ExchangeModel(latency=0.0, arrive=0.0, leave=0.0, ahead=0.0)
    latency, byte = job.profile.network.all_to_all(Group(size=job.parallel.cp, stride=job.parallel.tp))
    if job.cp_exchange == "latents":
        return _latents_model(job, latency, byte)
    value = job.model.kv_values_per_rank(job.parallel.tp) * byte
    model, recomputed = job.model, job.recompute.granularity == "selective" and "core_attn" in job.recompute.modules
    before = 0 if recomputed else model.layer_weights - model.qkv_weights
    flops = 2 * before / job.parallel.tp
    return ExchangeModel(
        latency=latency,
        arrive=value * job.bytes_per_value,
        leave=value * job.cp_gradient_bytes,
        ahead=flops / job.profile.rates[1] / 1e6,
    )


def _latents_model(job: Job, latency: float, byte: float) -> ExchangeModel:
    """Each tensor-parallel rank brings its part of a row. They put the parts together, gather rows to expand them, and
    in backward scatter and gather gradients of latents, and add up those of what heads share."""
    latent, shared = job.model.kv_lora_rank, job.model.qk_pos_emb_head_dim
    network, tensor = job.profile.network, Group(size=job.parallel.tp, stride=1)

    def time(collective: str, values: int) -> float:
        return float(np.diff(network.collective(collective, np.array([0, values * job.bytes_per_value]), tensor))[0])

    moved = (latent + shared) * job.bytes_per_value * byte / job.parallel.tp
    forward, backward = expansion(job)
    gathered = time("all_gather", latent)
    again = forward + gathered if job.expands_again else 0.0
    # Of collectives that only this needs, forward has one and backward three.
    return ExchangeModel(
        latency=latency + 2 * float(network.collective("all_gather", 0, tensor)),
        arrive=moved + time("all_gather", latent + shared) + gathered + forward,
        leave=moved + again + backward + time("reduce_scatter", latent) + gathered + time("all_reduce", shared),
        ahead=0.0,
    )


def expansion(job: Job) -> tuple[float, float]:
    """Forward and backward time in us of K and V of one row from its latents, on a rank."""
    flops = 2 * job.model.expanded_weights / job.parallel.tp / 1e6
    forward, backward = job.profile.rates
    return flops / forward, 2 * flops / backward


def round_times(
    own: Sequence[np.ndarray], times: Sequence[np.ndarray], moved: Directions, *, kept: bool, ahead: float = 0.0
) -> Directions:
    """How long attention takes in rounds, forward and backward, float64 [...] us each.

    What is whole on a rank runs first in forward and last in backward. K and V of a round begin to arrive when every
    rank begins the round before, and gradients leave when all have ended theirs. A rank waits for those of a round
    after the next one, and in the end for all. Rounds at the end that take no time and move nothing are none.

    Args:
        own: forward and backward time of what is whole on a rank, float64 [..., cp] each.
        times: those of every round with an exchange, float64 [..., rounds, cp] each.
        moved: times in which K and V arrive and gradients leave, float64 [..., rounds] each.
        kept: K and V that forward has got need not travel again.
        ahead: the first ones of backward are on their way for so many us before.
    """
    arrive, leave = (np.moveaxis(each, -1, 0) for each in moved)
    forward, backward = (np.moveaxis(each, -2, 0) for each in times)
    here = arrive[0]
    free = np.broadcast_to(own[0], forward[0].shape)
    for i, took in enumerate(forward):
        begin = np.maximum(free, here[..., None])
        if i + 1 < len(forward):
            here = np.maximum(here, begin.max(axis=-1)) + arrive[i + 1]
        free = begin + took
    done = free.max(axis=-1)

    again = np.zeros_like(arrive) if kept else arrive
    here = channel = np.maximum(again[0] - ahead, 0)
    free, last = np.zeros_like(free), np.zeros_like(here)
    for i, took in enumerate(backward):
        begin = np.maximum(free, here[..., None])
        if i + 1 < len(backward):
            began = np.maximum(channel, begin.max(axis=-1)) + again[i + 1]
            here, channel = (np.where(again[i + 1] > 0, began, before) for before in (here, channel))
        free = np.maximum(begin + took, np.where(leave[i] > 0, last, 0)[..., None])
        last = channel = np.maximum(channel, free.max(axis=-1)) + leave[i]
    return done, np.maximum((free + own[1]).max(axis=-1), channel)


def exposed_exchange(job: Job, rows: np.ndarray, attention: Directions) -> Directions:
    """Time that exchanging K and V of all `rows` (float64 [M]) adds to the slowest ranks' `attention`.

    In a ring, or all at once before attention: as the paper has it, K and V arrive by an all-gather, in backward again
    unless they were kept, and their gradients leave in fp32.
    """
    cp, collective = job.parallel.cp, job.profile.network.collective
    if cp == 1:
        return np.zeros_like(rows), np.zeros_like(rows)
    ranks = Group(size=cp, stride=job.parallel.tp)
    values = rows * job.model.kv_values_per_rank(job.parallel.tp)
    arrive = collective("all_gather", values * job.bytes_per_value, ranks)
    if job.cp_exchange == "ring":
        return _exposed_hops(arrive / (cp - 1), cp, *(times / cp for times in attention))
    leave = collective("reduce_scatter", values * FP32, ranks)
    return arrive, leave if job.sharding.save_gathered_kv else arrive + leave


def _exposed_hops(hop: np.ndarray, cp: int, forward: np.ndarray, backward: np.ndarray) -> Directions:
    """What CP - 1 hops add to the CP parts of attention, `forward` and `backward` long, of which one follows each hop.

    As TransformerEngine has it: in backward K and V leave in all parts but the last, gradients, in bf16, in all but the
    first.
    """
    added = [np.maximum(moved * hop - backward, 0) for moved in (1, 2)]
    return (cp - 1) * np.maximum(hop - forward, 0), 2 * added[0] + (cp - 2) * added[1]
