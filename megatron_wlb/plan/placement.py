"""Micro-batches of data-parallel ranks and their order there, the same on every rank."""

import functools
import itertools

import numpy as np

import megatron_wlb._native as _native
from megatron_wlb.job import Job
from megatron_wlb.pipeline.timeline import cost_weights, makespans

EXHAUSTIVE = 6
"""Up to so many micro-batches, `order` tries all orders."""
ROUNDS, TRIES = 4, 64
"""Rounds of local search in `order` beyond that, and orders that each tries."""
MOST_MOVED = 128
"""With more micro-batches there is no local search: it gains less than 0.01 % there, and takes long to prepare."""


def place(work: np.ndarray, job: Job, pooled: np.ndarray | None = None, tokens: np.ndarray | None = None) -> np.ndarray:
    """Return the micro-batches of each data-parallel rank, int64 [dp, M / dp].

    From a start that deals micro-batches in descending work, back and forth over the ranks, one of the costliest rank
    (`rank_cost`) is swapped for one of the cheapest other rank with which both cost less by 1/8192. Round-robin, as in
    Megatron's own sampler, if the job keeps its order. Ranks that pool work (`Parallel.pooling_ranks`) run
    micro-batches concurrently that are neighbours in work that is not pooled; such bundles are then dealt. If a rank
    has more tokens than memory allows (`Job.most_rank_tokens`), micro-batches are dealt in descending tokens.

    `work`, `pooled` (its part that ranks pool) and `tokens` are int64 [M]; None: no part, few enough.
    """
    dp, beside = job.parallel.dp, job.parallel.pooling_ranks
    if not job.reorders:
        return np.arange(len(work)).reshape(-1, dp).T
    weights = cost_weights(job.schedule())
    if beside == 1:
        rows = _native.place(work, dp, weights.total, weights.largest)
    else:
        pooled = np.zeros_like(work) if pooled is None else pooled
        bundles = np.argsort(pooled - work, kind="stable").reshape(-1, beside)
        together = critical_work(work[bundles.T], pooled[bundles.T], beside)[0]
        groups = _native.place(together, dp // beside, weights.total, weights.largest)
        rows = bundles[groups].swapaxes(1, 2).reshape(dp, -1)
    if tokens is not None and tokens[rows].sum(axis=1).max() > job.most_rank_tokens(job.max_tokens):
        rounds = np.argsort(-tokens, kind="stable").reshape(-1, dp)
        rounds[1::2] = rounds[1::2, ::-1]  # back and forth
        return np.sort(rounds.T, axis=1)
    return rows


def critical_work(work: np.ndarray, pooled: np.ndarray, beside: int) -> np.ndarray:
    """Return the work that sets the time of micro-batches, int64 [ranks, M].

    In every layer, `beside` neighbouring ranks that pool work wait for the one with the most other work, and do equal
    shares of the pooled work. `work` and `pooled`, its part, are int64 [ranks, M].
    """
    groups = len(work) // beside, beside, work.shape[1]
    shared = pooled.reshape(groups).sum(axis=1) // beside
    return np.repeat((work - pooled).reshape(groups).max(axis=1) + shared, beside, axis=0)


def rank_cost(work: np.ndarray, job: Job) -> np.ndarray:
    """Return the approximate time of 1F1B on `work` (int64 [..., M]), int64 [...]."""
    weights = cost_weights(job.schedule())
    cost: np.ndarray = weights.total * work.sum(axis=-1) + weights.largest * work.max(axis=-1)
    return cost


def order(work: np.ndarray, job: Job) -> np.ndarray:
    """Return a rank's order of micro-batches for about the shortest 1F1B, int64 [M].

    Integers, so all stages of a pipeline agree. Up to `EXHAUSTIVE` micro-batches, the first best of all orders. For
    more, the best of some shapes with the small ones at the ends (`_shapes`), improved by `ROUNDS` rounds of `TRIES`
    swaps and moves. Never worse than the given order, which a job of one stage keeps. Raises ValueError for more model
    chunks than upstream runs with so few micro-batches.
    """
    count = len(work)
    if job.parallel.pp == 1 or not job.reorders:
        return np.arange(count)
    schedule = job.schedule(count)

    def best_of(orders: np.ndarray) -> tuple[int, np.ndarray]:
        times = makespans(schedule, work[orders])
        return times.min(), orders[times.argmin()]

    if count <= EXHAUSTIVE:
        return best_of(_permutations(count))[1].copy()
    time, best = best_of(np.concatenate((np.arange(count)[None], np.argsort(work, kind="stable")[_shapes(count)])))
    for moves in _moves(count) if count <= MOST_MOVED else ():
        least, moved = best_of(best[moves])
        if least < time:
            time, best = least, moved
    return best


@functools.lru_cache(maxsize=16)
def _permutations(count: int) -> np.ndarray:
    return np.array(list(itertools.permutations(range(count))), np.int64)


@functools.lru_cache(maxsize=16)
def _shapes(count: int) -> np.ndarray:
    """Return orders by rank in work that go up and down again, int64 [shapes, count].

    They differ in how many go up or down, and whether these are the smallest or taken evenly from all.
    """
    rank = np.arange(count)
    shapes, few = [], 0
    while few <= count:
        smallest, even = rank < few, np.zeros(count, bool)
        even[rank[:few] * count // max(few, 1)] = True
        shapes += [np.concatenate((rank[~down], rank[down][::-1])) for down in (smallest, ~smallest, even, ~even)]
        few += max(1, few // 4)
    return np.stack(list({each.tobytes(): each for each in shapes}.values()))


@functools.lru_cache(maxsize=16)
def _moves(count: int) -> tuple[np.ndarray, ...]:
    """Return `ROUNDS` sets of up to `TRIES` swaps or moves, int64 [changes, count]."""
    pairs = itertools.permutations(range(count), 2)
    changes = [(i, j, swap) for i, j in pairs for swap in ((False, True) if i < j else (False,))]

    def changed(i: int, j: int, swap: bool) -> list[int]:
        order = list(range(count))
        if swap:
            order[i], order[j] = j, i
        else:
            order.insert(j, order.pop(i))
        return order

    # Spread over all of them, and on from there in the next round.
    stride = -(-len(changes) // TRIES)
    starts = [k * stride // ROUNDS % stride for k in range(ROUNDS)]
    return tuple(np.array([changed(*change) for change in changes[start::stride]]) for start in starts)
