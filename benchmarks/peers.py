"""What others do with the same documents, from their published descriptions: loops of RL, and packed rows."""

import heapq
import itertools
from collections.abc import Iterable, Sequence

import numpy as np

from megatron_wlb.job import Job


def karmarkar_karp(weights: Sequence[int], k: int, *, equal: bool = False) -> list[list[int]]:
    """Rows in `k` sets of about equal weight by largest differencing; `equal`: each of as many rows, as verl has it."""
    if equal:
        ascending = np.argsort(np.array(weights, np.int64), kind="stable").reshape(-1, k)[:, ::-1]
        begins = [[(weights[i], [i]) for i in rows] for rows in ascending.tolist()]
    else:
        begins = [[(w, [i]), *((0, []) for _ in range(k - 1))] for i, w in enumerate(weights)]
    count = itertools.count()  # breaks ties
    heap = [(sets[-1][0] - sets[0][0], next(count), sets) for sets in begins]
    heapq.heapify(heap)
    while len(heap) > 1:
        (_, _, one), (_, _, other) = heapq.heappop(heap), heapq.heappop(heap)
        sets = [(a[0] + b[0], a[1] + b[1]) for a, b in zip(one, reversed(other), strict=True)]
        sets.sort(key=lambda s: -s[0])
        heapq.heappush(heap, (sets[-1][0] - sets[0][0], next(count), sets))
    return [rows for _, rows in heap[0][2]] if heap else [[] for _ in range(k)]


Ranks = list[list[list[int]]]
"""Rows of every micro-batch of every data-parallel rank, in the order in which they run."""


def verl(weights: Sequence[int], lengths: Sequence[int], job: Job) -> Ranks:
    """verl 1dda039b: equally many sequences a rank by `weights`, then as many micro-batches as the fullest rank's
    tokens need, by `weights` again, the small ones at both ends. Nothing bounds their tokens."""
    held = karmarkar_karp(weights, job.parallel.dp, equal=True)
    tokens = max(sum(lengths[i] for i in rows) for rows in held)
    count = -(-tokens // job.max_tokens)
    ranks = []
    for rows in held:
        sets = [[rows[i] for i in each] for each in karmarkar_karp([weights[i] for i in rows], count)]
        sets.sort(key=lambda each: sum(weights[i] for i in each), reverse=True)
        ranks.append(sets[::2][::-1] + sets[1::2])
    return ranks


def first_fit(rows: Iterable[int], lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Rows in sets of at most `max_tokens`, each in the first that has room."""
    sets: list[list[int]] = []
    left: list[int] = []
    for i in rows:
        k = next((k for k, room in enumerate(left) if lengths[i] <= room), len(sets))
        if k == len(sets):
            sets.append([])
            left.append(max_tokens)
        sets[k].append(i)
        left[k] -= lengths[i]
    return sets


def slime(weights: Sequence[int], lengths: Sequence[int], job: Job) -> Ranks:
    """slime 624b824a: first fit in order, the longest split until ranks have equally many, and these over ranks by
    `weights`."""
    sets = first_fit(range(len(lengths)), lengths, job.max_tokens)
    while len(sets) % job.parallel.dp:
        most = max((each for each in sets if len(each) > 1), key=lambda each: sum(lengths[k] for k in each))
        sets.remove(most)
        halves = karmarkar_karp([lengths[k] for k in most], 2)
        sets += [[most[k] for k in half] for half in halves]
    sums = [sum(weights[i] for i in each) for each in sets]
    return [[sets[k] for k in sorted(rank)] for rank in karmarkar_karp(sums, job.parallel.dp, equal=True)]


def nemo_rl(lengths: Sequence[int], job: Job) -> Ranks:
    """NeMo-RL 7ea279ab: first fit by descending length, one more of a sequence each until ranks have equally many, and
    these round-robin."""
    sets = first_fit(sorted(range(len(lengths)), key=lambda i: -lengths[i]), lengths, job.max_tokens)
    by_size = sorted(sets, key=len, reverse=True)
    for most in by_size[: -len(sets) % job.parallel.dp]:
        sets.append([most.pop()])
    return [sets[rank :: job.parallel.dp] for rank in range(job.parallel.dp)]


def bridge(lengths: Sequence[int], seed: int, job: Job, rows: int) -> list[Ranks]:
    """Megatron-Bridge 067f987d: rows by first fit in random order, and so many a step, whose ranks take turns."""
    shuffled = np.random.default_rng(seed).permutation(len(lengths)).tolist()
    packed, dp = first_fit(shuffled, lengths, job.max_tokens), job.parallel.dp
    order = np.random.default_rng(seed + 1).permutation(len(packed)).tolist()  # of training, by its sampler
    steps = (order[i : i + rows] for i in range(0, len(order) - rows + 1, rows))
    return [[[packed[i] for i in step[rank::dp]] for rank in range(dp)] for step in steps]
