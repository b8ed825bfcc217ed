"""How others shard documents over context-parallel ranks and exchange K and V, from their published descriptions.

The plans are for comparison and cannot run: ranks may hold different numbers of tokens, and a call may have a document
several times. Times are of a layer, forward and backward, float64 [2, ...] us, and favour the others: merging by
log-sum-exps is free, so are tiles that are half empty because keys come in parts, and rings do not wait for each other.
"""

import heapq
import itertools
from dataclasses import replace

import numpy as np

from benchmarks.attention import fitted
from megatron_wlb.cost.attention import attention_kernels, exchange_model, exposed_exchange, ring_counts, ring_sums
from megatron_wlb.documents import SEGMENT, Shard, ShardPlan, document_work
from megatron_wlb.hardware.profile import KernelModel
from megatron_wlb.job import Job
from megatron_wlb.sharding.routing import document_begins, moved_rows
from tests.reference.rounds import Ownership, round_times

MAGI_STAGES = (1, 2, 4, 8)
"""Stages in which MagiAttention's ranks get keys of other ranks: one by default, up to eight in its dynamic mode."""
MAGI_SENDS = 48 / 132
"""Share of an H100 that its exchange takes from the kernels beside it (num_sms of its benchmarks' configuration)."""
Calls = tuple[list[tuple[int, int, int]], ...]
"""The segments of a rank's two calls: heads and whole documents, and tails."""


def magi(lengths: np.ndarray, cp: int) -> ShardPlan:
    """MagiAttention's dispatch: eight equal chunks of the packed sequence a rank, the largest attended area first.

    A chunk goes to the rank of least area that has fewer than eight. Adjacent chunks are joined; a rank has one call.
    """
    begins, tokens = document_begins(lengths), int(lengths.sum())
    size = -(-tokens // (8 * cp))
    cuts = np.unique(np.concatenate((begins, np.arange(0, tokens, size))))
    pieces = np.empty(len(cuts) - 1, SEGMENT)
    pieces["document"] = np.searchsorted(begins, cuts[:-1], side="right") - 1
    pieces["start"], pieces["stop"] = (edge - begins[pieces["document"]] for edge in (cuts[:-1], cuts[1:]))
    chunk = cuts[:-1] // size
    area = np.zeros(chunk[-1] + 1, np.int64)
    np.add.at(area, chunk, (pieces["stop"] - pieces["start"]) * (pieces["stop"] + pieces["start"] + 1) // 2)
    owner, held = np.empty(len(area), np.int64), np.zeros(cp, np.int64)
    ranks = [(0, rank) for rank in range(cp)]
    for c in np.argsort(-area, kind="stable").tolist():
        load, rank = heapq.heappop(ranks)
        owner[c] = rank
        held[rank] += 1
        if held[rank] < 8:
            heapq.heappush(ranks, (load + int(area[c]), rank))

    def call(rank: int) -> np.ndarray:
        mine = pieces[owner[chunk] == rank]
        joins = (mine["document"][1:] == mine["document"][:-1]) & (mine["start"][1:] == mine["stop"][:-1])
        joined = mine[np.append(True, ~joins)[: len(mine)]]
        joined["stop"] = mine["stop"][np.append(~joins, True)[: len(mine)]]
        return joined

    shards = tuple(Shard(calls=(call(r),)) for r in range(cp))
    return ShardPlan(lengths=lengths, shards=shards, strategy="magi")


def dynamic(lengths: np.ndarray, cp: int, room: int | None = None, crossover_tokens: int = 0) -> ShardPlan:
    """Megatron's dynamic context parallelism (`--hybrid-context-parallel`, or `--dynamic-context-parallel`).

    The longest documents come first. Each takes the fewest ranks, 1, 2, 4, ... or all, that have room for it alone, and
    of the aligned groups of that size the one whose slowest rank has least work, with equal heads and tails on each.
    Tokens of ranks differ.

    Args:
        lengths: int64 [n], of a micro-batch or of a whole step.
        cp: context-parallel ranks.
        room: tokens that all ranks together hold at a time (`--max-seqlen-per-dp-cp-rank`); default: all.
        crossover_tokens: for `document_work`; by default work is quadratic, as in Megatron.
    """
    rank_tokens = (room or int(lengths.sum())) / cp
    work, of_documents = np.zeros(cp), document_work(lengths, crossover_tokens)
    calls = _no_calls(cp)
    for document in np.argsort(-lengths, kind="stable").tolist():
        length, k = int(lengths[document]), 1
        while k < cp and length > k * rank_tokens:
            k = min(2 * k, cp)
        first = k * int(work[: cp // k * k].reshape(-1, k).max(axis=1).argmin())
        work[first : first + k] += of_documents[document] / k
        if k == 1:
            calls[first][0].append((document, 0, length))
        else:
            _divide(document, length, calls[first : first + k])
    return _plan_of(calls, lengths, "dynamic")


def flash(lengths: np.ndarray, job: Job) -> ShardPlan:
    """FlashCP (Wang and others, 2026, arXiv 2606.08476): documents are whole on a rank, or divided over all.

    From its abstract, which leaves the heuristic open. Assumed: the 0, 1, 2, 4, ... longest documents or all are
    divided, with equal heads and tails on each rank. The others go, longest first, to the rank of least work. The plan
    is taken whose slowest rank is predicted to be fastest. Tokens of ranks differ.
    """
    cp, order = job.parallel.cp, np.argsort(-lengths, kind="stable").tolist()
    work = document_work(lengths, job.crossover_tokens)

    def plan_of(divided: int) -> ShardPlan:
        calls = _no_calls(cp)
        for document in order[:divided]:
            _divide(document, int(lengths[document]), calls)
        ranks = [(0.0, rank) for rank in range(cp)]
        for document in order[divided:]:
            load, rank = heapq.heappop(ranks)
            calls[rank][0].append((document, 0, int(lengths[document])))
            heapq.heappush(ranks, (load + float(work[document]), rank))
        return _plan_of(calls, lengths, "flash")

    def cost(plan: ShardPlan) -> float:
        attention, added = flash_times(plan, job)
        linear = job.crossover_tokens * attention.sum() / (lengths.astype(float) ** 2).sum()
        tokens = np.array([shard.tokens for shard in plan.shards])
        return float((attention.sum(axis=0) + linear * tokens).max() + added.sum())

    counts = [0, *(1 << i for i in range((len(lengths) - 1).bit_length())), len(lengths)]
    return min(map(plan_of, counts), key=cost)


def _no_calls(cp: int) -> list[Calls]:
    return [([], []) for _ in range(cp)]


def _divide(document: int, length: int, ranks: list[Calls]) -> None:
    """Give ranks a document with equal heads and tails on each."""
    count = len(ranks)
    for chunk, (start, stop) in enumerate(itertools.pairwise(np.arange(2 * count + 1) * length // (2 * count))):
        if stop > start:
            ranks[min(chunk, 2 * count - 1 - chunk)][chunk >= count].append((document, start, stop))


def _plan_of(calls: list[Calls], lengths: np.ndarray, strategy: str) -> ShardPlan:
    shards = (Shard(calls=tuple(np.sort(np.array(each, SEGMENT)) for each in pair)) for pair in calls)
    return ShardPlan(lengths=lengths, shards=tuple(shards), strategy=strategy)


def flash_times(plan: ShardPlan, job: Job) -> tuple[np.ndarray, np.ndarray]:
    """Kernels of attention, [2, cp], and the time that FlashCP's exchange adds to the slowest rank, [2, 1].

    Only K and V that a rank needs travel, all at once, beside the attention of documents that are whole on a rank.
    """
    held, kernels = Ownership(plan), attention_kernels(replace(job, cp_exchange="all"))
    tiles = held.by_rank(np.stack(kernels[0].tiles(held.segments), axis=1))
    parts = [tiles[is_in].sum(axis=0) for is_in in (~held.is_shared, held.is_shared)]
    whole, shared = (
        np.array([kernel.time(calls * (part[0] > 0), *part) for kernel in kernels])
        for calls, part in zip((1, 2), parts, strict=True)
    )
    arrive, leave = map(float, exchange_model(job).times(np.array(float(held.rows().sum(axis=0).max()))))
    forward, backward = ((np.maximum(whole[i], arrive) + shared[i]).max() for i in range(2))
    needed = arrive + shared[1]  # in backward, whole documents may also come last, while gradients leave
    took = [forward, min(backward + leave, max(needed.max() + leave, (needed + whole[1]).max()))]
    busy = whole + shared
    return busy, (took - busy.max(axis=1))[:, None]


def ring_times(plan: ShardPlan, job: Job) -> tuple[np.ndarray, np.ndarray]:
    """Kernels of attention in rings, and the time that hops add, [2, cp] each; every part of K and V is a launch.

    Documents of the same ranks share a ring, which reaches from the first rank that holds one to the last.
    """
    held, kernels, ring = Ownership(plan), attention_kernels(job), replace(job, cp_exchange="ring")
    lives, (attention, added) = held.holds, np.zeros((2, 2, held.cp))
    rings = np.stack((lives.argmax(axis=1), held.cp - lives[:, ::-1].argmax(axis=1)), axis=1)
    for first, stop in np.unique(rings, axis=0).tolist():
        lengths, size = plan.lengths[(rings == (first, stop)).all(axis=1)], stop - first
        alone, rows = replace(ring, parallel=replace(job.parallel, cp=size)), np.array([float(lengths.sum())])
        sums, counts = ring_sums(alone, rows, np.array([True])), ring_counts(lengths, size, kernels[0].tile_rows)
        forward, backward = (kernel.time(size, *counts) + more[0] for kernel, more in zip(kernels, sums, strict=True))
        slowest = forward.max(keepdims=True), backward.max(keepdims=True)
        hops = exposed_exchange(alone, rows, slowest)
        attention[:, first:stop] += forward, backward
        added[:, first:stop] += hops
    return attention, added


def magi_kernels(job: Job) -> tuple[KernelModel, KernelModel]:
    """MagiAttention's own kernels on an H100, forward and backward; those of the job's profile if that is no H100's."""
    if not job.profile.name.startswith("h100"):
        return attention_kernels(job)
    forward, backward = (fitted("h100-ffa", direction) for direction in ("forward", "backward"))
    return attention_kernels(replace(job, profile=replace(job.profile, forward=forward, backward=backward)))


def magi_times(plan: ShardPlan, job: Job) -> tuple[np.ndarray, np.ndarray]:
    """Kernels of attention, [2, cp], and the time that MagiAttention's exchange adds to the slowest rank, [2, 1].

    Ranks begin with the keys that they hold. Other keys that they need come by all-to-alls in equal stages, in the
    number of `MAGI_STAGES` that takes least time. Gradients leave in the dtype of K and V, its default. Kernels beside
    an exchange within a node have the rest of the device (`MAGI_SENDS`). Between nodes a row is sent to every rank that
    needs it: if once to a node, this would be 1.4 to 1.8 times as fast as MagiAttention measured on 32 and 64 GPUs.
    """
    held, kernels = Ownership(plan), magi_kernels(job)
    in_node = held.cp * job.parallel.tp <= job.profile.network.gpus_per_node
    tiles = held.by_rank(np.stack(kernels[0].tiles(held.segments), axis=1)).sum(axis=0)
    share, busiest = own_share(held), float(moved_rows(plan).max())

    def times(kernel: KernelModel, of_work: np.ndarray) -> np.ndarray:
        return kernel.time(of_work > 0, *(of_work * tiles))

    def overlapped(stages: int) -> tuple[np.ndarray, np.ndarray]:
        own = [times(kernel, share) for kernel in kernels]
        others = [np.tile(times(kernel, (1 - share) / stages), (stages, 1)) for kernel in kernels]
        moved, _ = exchange_model(job).times(np.full(stages, busiest / stages))
        took = round_times(own, others, (moved, moved))
        busy = np.array([first + later.sum(axis=0) for first, later in zip(own, others, strict=True)])
        added = took - busy.max(axis=1)
        beside = np.maximum(0, moved.sum() * np.array([1, 2]) - added)
        return busy, (added + in_node * MAGI_SENDS * np.minimum(beside, busy.max(axis=1)))[:, None]

    return min(map(overlapped, MAGI_STAGES), key=lambda timed: (timed[0].max(axis=1) + timed[1][:, 0]).sum())


def own_share(held: Ownership) -> np.ndarray:
    """Share of every rank's attention that needs no other rank's keys, float64 [cp]; ranks have one call each."""
    segments, rows = held.segments, held.segments["stop"] - held.segments["start"]
    # Rows of the same document on the same rank before each segment; a call has them in order.
    before = document_begins(rows)[:-1]
    is_first = np.diff(held.ranks * len(held.lengths) + segments["document"], prepend=-1) != 0
    before -= np.maximum.accumulate(np.where(is_first, before, 0))
    pairs = np.stack((rows * (rows + 1) // 2 + rows * before, rows * (segments["start"] + segments["stop"] + 1) // 2))
    own, every = held.by_rank(pairs.T).sum(axis=0)
    return own / np.maximum(every, 1)
