"""Predicted times of every pass of every micro-batch, and their components."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from megatron_wlb.cost.attention import (
    attention_kernels,
    exchange_model,
    exposed_exchange,
    ring_counts,
    ring_sums,
)
from megatron_wlb.cost.host import launches, waiting
from megatron_wlb.cost.linear import (
    loss,
    memory_bound,
    modules_again,
    output_matrix,
    products,
)
from megatron_wlb.cost.tiles import exposed_share, overlap_adds
from megatron_wlb.documents import ShardPlan
from megatron_wlb.hardware.network import Group
from megatron_wlb.job import Job
from megatron_wlb.layers import DEPTH, attention_of, part_of
from megatron_wlb.layers.attention import Directions
from megatron_wlb.model import MLP
from megatron_wlb.sharding.routing import moved_rows
from megatron_wlb.sharding.select import attention_times, shard


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    """Times of one direction of one layer, in us, for M micro-batches of a rank; on average over the model's layers."""

    linear: np.ndarray
    """float64 [M]: matrix products and memory-bound operations."""
    pooled: np.ndarray
    """float64 [M]: products of parts that ranks pool (`Part.pooled`), with the travel of rows, part of `linear`."""
    tensor: np.ndarray
    """float64 [M]: exposed tensor-parallel communication."""
    attention: np.ndarray
    """float64 [M, cp]: attention kernels of every context-parallel rank."""
    slowest: np.ndarray
    """float64 [M]: kernels of the slowest rank, for which the others wait in every layer."""
    exchange: np.ndarray
    """float64 [M]: exposed exchange of K, V and their gradients, on the slowest rank."""
    launches: np.ndarray
    """float64 [M]: waiting for the host, which launches kernels."""

    @property
    def total(self) -> np.ndarray:
        """Time of the layer: float64 [M]."""
        return self.linear + self.tensor + self.slowest + self.exchange + self.launches


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """Times of a rank's passes in us, float64 [stages, chunks, M] unless stated."""

    forward: np.ndarray
    backward: np.ndarray
    transfer: np.ndarray
    """float64 [M]."""
    layers: tuple[LayerTimes, LayerTimes]
    """Forward and backward (with recomputation)."""
    rows: np.ndarray
    """float64 [M]: tokens of a micro-batch on a context-parallel rank."""
    pool_wait: np.ndarray
    """Time within `forward` and `backward` that waits for other data-parallel ranks: float64 [2, stages, chunks, M]."""


def untimed(job: Job) -> str:
    """Why a job cannot be timed, with the remedy; "" if it can."""
    heads, tp = job.model.num_attention_heads, job.parallel.tp
    if job.profile.counts_pairs:
        return (
            f"profile {job.profile.name} counts attended pairs; a simulation needs one in us, give the GPU's, or "
            "one that `megatron-wlb profile` wrote"
        )
    if heads % tp:
        return f"{heads} attention heads do not divide over {tp} ranks; change one of them"
    if (groups := job.model.num_query_groups) % tp and tp % groups:
        return f"{groups} key heads do not divide over {tp} ranks, nor ranks over them; change one of them"
    try:
        job.layers()
    except ValueError as error:
        return str(error)
    return ""


def pass_times(job: Job, shards: Sequence[ShardPlan]) -> Passes:
    """Return predicted pass times of a rank's M micro-batches, with SP.

    Raises ValueError if the job cannot be timed, or the micro-batches are not sharded for it.
    """
    if why := untimed(job):
        raise ValueError(why)
    model, (tp, cp) = job.model, (job.parallel.tp, job.parallel.cp)
    if others := {len(plan.shards) for plan in shards} - {cp}:
        raise ValueError(
            f"a micro-batch is sharded over {others.pop()} context-parallel ranks, not {cp}; plan it for the job"
        )
    tokens = np.array([plan.lengths.sum() for plan in shards]) / cp
    row_bytes = tokens * model.hidden_size * job.bytes_per_value
    network = job.profile.network
    gather, scatter = (
        network.collective(name, row_bytes, Group(size=tp, stride=1)) for name in ("all_gather", "reduce_scatter")
    )
    by_kind = [_layer_times(job, kind, shards, tokens, gather, scatter) for kind in model.kinds]
    layers = job.layers_by_kind()[..., None]
    forward, backward = (
        np.sum([n * times[i].total for n, times in zip(layers, by_kind, strict=True)], axis=0) for i in range(2)
    )
    whole = layers * _share_again(job)[..., None]
    backward = backward + np.sum([n * times[0].total for n, times in zip(whole, by_kind, strict=True)], axis=0)
    of_kinds, of_whole = (n.sum(axis=(1, 2, 3)) / layers.sum() for n in (layers, whole))
    first, last = (_sum(of_kinds, each) for each in zip(*by_kind, strict=True))
    last = _sum((1, *of_whole), (last, *(times[0] for times in by_kind)))
    # The embedding scatters its rows; the output layer gathers them, and runs once more for every depth.
    output, losses = products(job, [output_matrix(job)], tokens), loss(job, tokens)
    depths, joining, joined = model.depths, products(job, [model.joining], tokens), DEPTH.gathered_us(gather, scatter)
    beside_output = np.minimum(gather, output.inputs) + np.minimum(scatter, output.weights)
    forward[0, 0] += scatter
    forward[-1, -1] += (1 + depths) * (output.forward + losses[0] + gather)
    forward[-1, -1] += depths * (joining.forward + joined[0])
    backward[0, 0] += gather
    backward[-1, -1] += depths * (joining.backward + joined[1])
    backward[-1, -1] += (1 + depths) * (output.backward + losses[1] + (gather + scatter - beside_output))
    return Passes(
        forward=forward,
        backward=backward,
        transfer=network.point_to_point(row_bytes / tp, Group(size=job.parallel.pp, stride=job.parallel.stage_stride)),
        layers=(first, last),
        rows=tokens,
        pool_wait=np.zeros((2, *forward.shape)),
    )


def _share_again(job: Job) -> np.ndarray:
    """Return the share of layers that run again as a whole, float64 [pp, vpp]; layers of depths do with any others."""
    layers, decoder = job.layers(), job.decoder_layers()
    again, _ = job.layers_again(decoder)
    return (again + (layers - decoder) * job.runs_layers_again) / np.maximum(1, layers)


def _layer_times(
    job: Job, kind: str, shards: Sequence[ShardPlan], tokens: np.ndarray, gather: np.ndarray, scatter: np.ndarray
) -> tuple[LayerTimes, LayerTimes]:
    """Return times of a kind of layer; `gather` and `scatter`: of its `tokens` rows over tensor-parallel ranks,
    float64 [M] each."""
    model = job.model
    exposed = exposed_share(job, tokens)
    matrices = model.matrices_of(kind)
    # Forward gathers before and scatters after attention and MLP; rows that travel do no more, and those of shared
    # experts, which a job does not know, are left out. Backward mirrors this, and gathers inputs again for weight
    # gradients. Upstream and TransformerEngine overlap that gather with the product for the input gradient,
    # and the scatter with the product for the weight gradient.
    columns = [m for m in matrices if m.divided == "outputs"]
    hiding = [products(job, [m for m in columns if m.part == part], tokens) for part in ("attention", "mixer", "mlp")]
    overlapped = sum(np.minimum(gather, each.inputs) + np.minimum(scatter, each.weights) for each in hiding)
    parts = {letter: part_of(model, letter) for letter in model.parts_of(kind)}
    count = sum(part.gathered for part in parts.values())
    moved = count * (gather + scatter), 2 * count * gather + count * scatter - overlapped
    every, bound = products(job, matrices, tokens), memory_bound(job, kind, tokens)
    pooled = products(job, [m for letter, part in parts.items() if part.pooled for m in model.part(letter)], tokens)
    added = overlap_adds(job, kind, tokens)
    if kind in model.window_by_kind:
        attention, exchange = _attention(job, shards, model.window_by_kind[kind])
        again = attention_of(model).expands_us(job) * tokens
    else:
        none, moving = np.zeros((len(tokens), job.parallel.cp)), parts[kind[0]].moving(job, tokens)
        attention, exchange, again = (none, none), (moving, moving), np.zeros_like(tokens)
    linear = every.forward + bound[0] + added[0], every.backward + bound[1] + again + added[1]
    # The partner of a pass may be any other micro-batch of the rank.
    beside = [float(np.mean(linear[i] + attention[i].max(axis=1))) for i in (1, 0)]
    dispatched = np.sum([part.dispatched(job, tokens, beside) for part in parts.values()], axis=0)
    forward, backward = (
        LayerTimes(
            linear=linear[i] + dispatched[i],
            pooled=(pooled.forward, pooled.backward)[i] + dispatched[i],
            tensor=moved[i] * exposed,
            attention=attention[i],
            slowest=attention[i].max(axis=1),
            exchange=exchange[i],
            launches=np.zeros_like(tokens),
        )
        for i in range(2)
    )
    if not job.dropped:
        return _launched(job, kind, forward, backward)
    of_modules, of_pooled = modules_again(job, kind, tokens)
    of_mlp = "mlp" in job.dropped and MLP in model.parts_of(kind)
    of_attention = "core_attn" in job.dropped
    run_again = LayerTimes(
        linear=of_modules,
        pooled=of_pooled,
        tensor=(gather + scatter) * exposed * of_mlp,
        attention=forward.attention * of_attention,
        slowest=forward.slowest * of_attention,
        exchange=forward.exchange * (of_attention and not job.keeps_exchanged),
        launches=np.zeros_like(tokens),
    )
    return _launched(job, kind, forward, _sum((1, 1), (backward, run_again)))


def _launched(job: Job, kind: str, *times: LayerTimes) -> tuple[LayerTimes, LayerTimes]:
    """Return `times`, forward and backward, with the GPU's waits for launches."""
    forward, backward = (
        replace(each, launches=waiting(launched, each.total))
        for each, launched in zip(times, launches(job, kind), strict=True)
    )
    return forward, backward


def _sum(factors: Sequence[float] | np.ndarray, times: Sequence[LayerTimes]) -> LayerTimes:
    """Return the sum of times, each so many times."""
    each = list(zip(factors, times, strict=True))
    return LayerTimes(
        **{f.name: np.sum([n * getattr(of, f.name) for n, of in each], axis=0) for f in fields(LayerTimes)}
    )


def crossover(job: Job) -> int:
    """Return Lc in tokens: a document of d takes time as d * (d + Lc), in layers without a window.

    Solved from the pass times of a document of half a window, of two such, and of one twice as long, so that costs per
    micro-batch cancel. One rank stands for all context-parallel ranks. By FLOPs if the job cannot be timed.
    """
    rows = job.profile.tile_rows
    half = max(1, job.context_length // 2 // rows) * rows
    alone = replace(
        job.on_one_stage(),
        cuda_graphs=("full",),  # the host takes as long for all lengths
        model=job.model.without_windows(),
    )
    if untimed(alone) or not job.model.attention_layers:
        return job.model.crossover_tokens
    plans = [shard(np.array(lengths), alone) for lengths in ([half], [half, half], [2 * half])]
    passes = pass_times(alone, plans)
    one, two, twice = (passes.forward + passes.backward)[0, 0]
    squared = (twice - two) / 2  # time of half * half pairs, where two - one is the time of half * (half + Lc)
    return max(1, round(half * ((two - one) / squared - 1)))


def synchronised(job: Job, passes: Sequence[Passes]) -> tuple[Passes, ...]:
    """Return `passes` of all ranks, with those that pool parts of a layer in lockstep (`Part.pooled`).

    In every layer, the slowest of these ranks determines when the pooled work begins, which they share equally.
    """
    layers, beside = job.layers()[:, :, None], job.parallel.pooling_ranks
    together: list[Passes] = []
    for group in (passes[i : i + beside] for i in range(0, len(passes), beside)):
        own = np.array([(p.forward, p.backward) for p in group])
        pooled = np.array([[layers * layer.pooled for layer in p.layers] for p in group])
        alone = own - pooled + pooled.mean(axis=0)
        times = alone.max(axis=0)
        transfer = np.max([p.transfer for p in group], axis=0)
        together += [
            replace(p, forward=times[0], backward=times[1], transfer=transfer, pool_wait=times - mine)
            for p, mine in zip(group, alone, strict=True)
        ]
    return tuple(together)


def _attention(job: Job, shards: Sequence[ShardPlan], window: int | None) -> tuple[Directions, Directions]:
    """Return attention [M, cp] in a window and its exposed exchange [M], by direction."""
    kernels = attention_kernels(job, window)
    if job.cp_exchange == "shared":
        timed = [attention_times(plan, job, window) for plan in shards]
        busy, added = np.array([each for each, _ in timed]), np.array([each for _, each in timed])
        return (busy[:, 0], busy[:, 1]), (added[:, 0], added[:, 1])
    rows = np.array([float(p.lengths.sum()) for p in shards])
    if job.keeps_exchanged:
        rows = np.array([float(moved_rows(p).max()) for p in shards])
    counts = np.array([[kernels[0].count_shard(s.calls) for s in plan.shards] for plan in shards])  # [M, cp, 4]
    calls, *tiles = np.moveaxis(counts, 2, 0)
    sums: Directions = np.zeros_like(calls), np.zeros_like(calls)
    if job.cp_exchange == "ring":
        calls, packed = np.full_like(calls, job.parallel.cp), np.array([len(plan.lengths) > 1 for plan in shards])
        sums = ring_sums(job, rows, packed)
        # Upstream's ring has no windows, and intra-document attention only per document.
        if window is None and all(plan.strategy == "per-document" or len(plan.lengths) == 1 for plan in shards):
            each = (ring_counts(plan.lengths, job.parallel.cp, kernels[0].tile_rows) for plan in shards)
            tiles = [np.array(found) for found in zip(*each, strict=True)]
    forward, backward = (kernel.time(calls, *tiles) + more for kernel, more in zip(kernels, sums, strict=True))
    if job.keeps_exchanged:
        return (forward, backward), exchange_model(job).times(rows)
    return (forward, backward), exposed_exchange(job, rows, (forward.max(axis=1), backward.max(axis=1)))
