"""Micro-batches over data-parallel ranks, their order on a rank, and the order in which a pipeline stage receives them.

On every stage a micro-batch of work w is taken to need w forward and 2w backward, and nothing between stages.
"""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_wlb.plan import native

EXHAUSTIVE = 6
"""Up to so many micro-batches, `order` tries all orders."""
ROUNDS, LANES = 4, 64
"""Of local search in `order` beyond that, and orders per round."""

_Pass = tuple[bool, int, int, int]
"""Forward or backward, micro-batch, chunk, stage."""


def place(
    work: np.ndarray,
    dp_size: int,
    *,
    balance: bool,
    num_stages: int = 1,
    num_chunks: int = 1,
    use_native: bool = False,
) -> np.ndarray:
    """Which micro-batches each data-parallel rank runs, ascending: int64 [dp_size, N / dp_size].

    With `balance`, total and largest work of the ranks come out alike: the greatest `rank_cost` is made small, from a
    start that deals micro-batches out in descending work, back and forth over the ranks, by swapping a micro-batch of
    the costliest rank for one of the cheapest other rank with which both cost less than that by 1/8192. Otherwise
    round-robin, as Megatron's own sampler does.

    Args:
        work: of all N micro-batches, int64 [N], not negative; (V * N + P - 1) * the largest must fit 64 bits.
        dp_size: data-parallel ranks, a divisor of N.
        balance: whether to look at work at all.
        num_stages: of the pipeline, P.
        num_chunks: model chunks (virtual stages) per stage, V.
        use_native: run the C++ core; the Python reference gives the same.

    Raises:
        ValueError: work out of its range, with `balance`.
    """
    if not balance:
        return np.arange(len(work)).reshape(-1, dp_size).T
    if use_native:
        return native.place(work, dp_size, num_stages, num_chunks)
    _check(work, num_chunks * len(work) + num_stages - 1)
    rounds = np.argsort(-work, kind="stable").reshape(-1, dp_size)
    rounds[1::2] = rounds[1::2, ::-1]
    rows = np.ascontiguousarray(rounds.T)
    while _swap(rows, work[rows], num_stages, num_chunks):
        pass
    return np.sort(rows, axis=1)


def rank_cost(work: np.ndarray, num_stages: int, num_chunks: int) -> np.ndarray:
    """About the time of 1F1B on micro-batches of `work` (int64 [..., M]) on one rank, int64 [...].

    Every stage computes all of them, and waits in warm-up and cool-down for the others: (P - 1) / V of the largest.
    """
    cost: np.ndarray = num_chunks * work.sum(axis=-1) + (num_stages - 1) * work.max(axis=-1)
    return cost


def _swap(rows: np.ndarray, work: np.ndarray, num_stages: int, num_chunks: int) -> bool:
    """Swap in `rows` (int64 [dp_size, M]) what makes the costliest rank cheaper, and say whether there was anything."""
    cost = rank_cost(work, num_stages, num_chunks)
    worst = int(cost.argmax())
    limit = cost[worst] - (cost[worst] >> 13)
    totals = work.sum(axis=1)
    ordered = np.sort(work, axis=1)
    second = ordered[:, -2:-1] if work.shape[1] > 1 else np.zeros_like(work)
    # The largest of a rank without each of its micro-batches.
    others = np.where(np.arange(work.shape[1]) == work.argmax(axis=1)[:, None], second, ordered[:, -1:])
    mine, my_others = work[worst][:, None], others[worst][:, None]
    for rank in np.argsort(cost, kind="stable").tolist():
        if cost[rank] >= limit:
            return False
        moved = work[rank] - mine
        mine_then = num_chunks * (totals[worst] + moved) + (num_stages - 1) * np.maximum(my_others, work[rank])
        other_then = num_chunks * (totals[rank] - moved) + (num_stages - 1) * np.maximum(others[rank], mine)
        then = np.maximum(mine_then, other_then)
        best = int(then.argmin())
        if then.flat[best] < limit:
            i, j = divmod(best, work.shape[1])
            rows[worst, i], rows[rank, j] = rows[rank, j], rows[worst, i]
            return True
    return False


def order(work: np.ndarray, num_stages: int, num_chunks: int, *, use_native: bool = False) -> np.ndarray:
    """The order of a rank's micro-batches with the shortest `makespan` that was found: int64 [M], a permutation.

    A function of the arguments alone, in integers, so that all stages of a pipeline find the same. All orders are tried
    for up to `EXHAUSTIVE` micro-batches, and the first in lexicographic order wins. For more, the best of some shapes
    with the small ones at the ends (`_shapes`), improved by `ROUNDS` rounds of `LANES` swaps and moves each. Never
    worse than the given order, which one stage keeps: there all take equally long.

    Args:
        work: of the rank's micro-batches, int64 [M], not negative; 3 * P * V * M * the largest must fit 64 bits.
        num_stages: of the pipeline, P.
        num_chunks: model chunks (virtual stages) per stage, V.
        use_native: run the C++ core; the Python reference gives the same.

    Raises:
        ValueError: work out of its range.
    """
    if use_native:
        return native.order(work, num_stages, num_chunks)
    _check(work, 3 * num_stages * num_chunks * len(work))
    if num_stages == 1:
        return np.arange(len(work))
    if len(work) <= EXHAUSTIVE:
        orders = _permutations(len(work))
        return orders[makespan(work[orders], num_stages, num_chunks).argmin()].copy()
    orders = _shapes(work)
    times = makespan(work[orders], num_stages, num_chunks)
    best, time = orders[times.argmin()], times.min()
    for moves in _moves(len(work)):
        orders = best[moves]
        times = makespan(work[orders], num_stages, num_chunks)
        if times.min() < time:
            best, time = orders[times.argmin()], times.min()
    return best


def _check(work: np.ndarray, times: int) -> None:
    """Refuse work below 0 or so large that `times` that does not fit 64 bits."""
    least, most, limit = int(work.min()), int(work.max()), (2**63 - 1) // times
    if least < 0 or most > limit:
        raise ValueError(
            f"a micro-batch has work {least if least < 0 else most}; it must be 0 to {limit} for predicted times to "
            "fit 64 bits; lower S_max or the crossover"
        )


def _shapes(work: np.ndarray) -> np.ndarray:
    """Orders to start from, int64 [count, M]: the given one, and up from small to large and down again.

    They differ in how many go up or down, and whether these are the smallest or taken evenly from all. Counted without
    floating point, which need not round alike on all machines of a pipeline.
    """
    count = len(work)
    up = np.argsort(work, kind="stable")
    rank = np.arange(count)
    shapes = [rank]
    few = 0
    while few <= count:
        smallest, even = rank < few, np.zeros(count, bool)
        even[rank[:few] * count // max(few, 1)] = True
        shapes += [np.concatenate((up[~down], up[down][::-1])) for down in (smallest, ~smallest, even, ~even)]
        few += max(1, few // 4)
    return np.array(shapes)


@functools.lru_cache(maxsize=16)
def _permutations(count: int) -> np.ndarray:
    """All orders of `count` micro-batches in lexicographic order, int64 [count!, count]."""
    return np.array(list(itertools.permutations(range(count))), np.int64).reshape(-1, count)


@functools.lru_cache(maxsize=16)
def _moves(count: int) -> tuple[np.ndarray, ...]:
    """`ROUNDS` sets of up to `LANES` changes of an order, int64 [lanes, count]: two swap places, or one moves."""
    pairs = itertools.permutations(range(count), 2)
    changes = [(i, j, swap) for i, j in pairs for swap in ((False, True) if i < j else (False,))]

    def changed(i: int, j: int, swap: bool) -> list[int]:
        given = list(range(count))
        if swap:
            given[i], given[j] = j, i
        else:
            given.insert(j, given.pop(i))
        return given

    # Spread over all of them, and on from there in the next round.
    stride = -(-len(changes) // LANES)
    starts = [k * stride // ROUNDS % stride for k in range(ROUNDS)]
    return tuple(np.array([changed(*change) for change in changes[start::stride]]) for start in starts)


def makespan(work: np.ndarray, num_stages: int, num_chunks: int) -> np.ndarray:
    """When the last stage to end is done, for every row of micro-batches in order: int64 [K, M] -> int64 [K].

    1F1B as upstream runs it, interleaved where there are chunks, in units of the forward of one chunk of one unit of
    work.
    """
    count = work.shape[1]
    schedule = _schedule(count, num_stages, num_chunks)
    durations = schedule.parts * np.ascontiguousarray(work.T)[schedule.micro_batches]
    ends = np.zeros((len(durations) + 1, len(work)), np.int64)
    for start, stop, after in schedule.waves:
        waiting = ends[after]
        np.maximum(waiting[0], waiting[1], out=ends[start + 1 : stop + 1])
        ends[start + 1 : stop + 1] += durations[start:stop]
    return ends.max(axis=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Schedule:
    """Passes of all stages as waves: none waits for another of its wave, and all for earlier waves only."""

    micro_batches: np.ndarray
    """Of each pass in order of the waves, int64 [n]."""
    parts: np.ndarray
    """Time per unit of work, int64 [n, 1]: 1 forward, 2 backward."""
    waves: tuple[tuple[int, int, np.ndarray], ...]
    """First pass, the one after the last, and int64 [2, size]: the passes that each waits for, from 1; 0 for none."""


@functools.lru_cache(maxsize=64)
def _schedule(num_micro_batches: int, num_stages: int, num_chunks: int) -> _Schedule:
    """1F1B of upstream's `schedules.py`, its groups of micro-batches as near to `num_stages` as it takes them."""
    # A last group that is smaller than the pipeline is refused there, since stages would wait for each other for ever.
    groups = range(num_stages, num_micro_batches)
    group = next((g for g in groups if not 0 < num_micro_batches % g < num_stages), num_micro_batches)
    table = [
        (m, chunk)
        for first in range(0, num_micro_batches, group)
        for chunk in range(num_chunks)
        for m in range(first, min(first + group, num_micro_batches))
    ]
    last_stage, last_chunk = num_stages - 1, num_chunks - 1
    queues: list[list[_Pass]] = []
    for stage in range(num_stages):
        forward = [(True, m, chunk, stage) for m, chunk in table]
        backward = [(False, m, last_chunk - chunk, stage) for m, chunk in table]
        ahead = last_stage - stage if num_chunks == 1 else 2 * (last_stage - stage) + last_chunk * group
        steady = itertools.chain.from_iterable(zip(forward[ahead:], backward, strict=False))
        queues.append([*forward[:ahead], *steady, *backward[max(0, len(table) - ahead) :]])

    def needs(one: _Pass) -> _Pass | None:
        """What arrives from another stage; a stage's own forward comes before its backward anyway."""
        forward, m, chunk, stage = one
        if forward:
            return (True, m, chunk, stage - 1) if stage else (True, m, chunk - 1, last_stage) if chunk else None
        if stage < last_stage:
            return False, m, chunk, stage + 1
        return (False, m, chunk + 1, 0) if chunk < last_chunk else None

    number: dict[_Pass | None, int] = {None: 0}
    previous: list[_Pass | None] = [None] * num_stages
    done = [0] * num_stages
    passes: list[_Pass] = []
    waves = []
    while len(passes) < 2 * len(table) * num_stages:
        stages = [s for s in range(num_stages) if done[s] < len(queues[s]) and needs(queues[s][done[s]]) in number]
        wave = [queues[s][done[s]] for s in stages]
        assert wave, "the stages of a schedule wait for each other"
        after = np.array([[number[previous[s]] for s in stages], [number[needs(one)] for one in wave]])
        waves.append((len(passes), len(passes) + len(wave), after))
        for s, one in zip(stages, wave, strict=True):
            passes.append(one)
            number[one], previous[s], done[s] = len(passes), one, done[s] + 1
    return _Schedule(
        micro_batches=np.array([m for _, m, _, _ in passes]),
        parts=np.array([[1 if forward else 2] for forward, _, _, _ in passes]),
        waves=tuple(waves),
    )


def receive_order(
    table: Sequence[tuple[int, int]] | None, num_micro_batches: int, num_chunks: int, stage: int, num_stages: int
) -> tuple[list[int], list[int]]:
    """Micro-batch of the k-th tensor that a stage receives from its previous (forward) and next (backward) stage.

    Args:
        table: upstream's interleaved schedule table of (micro-batch, model chunk), None for plain 1F1B.
        num_micro_batches: per data-parallel rank.
        num_chunks: model chunks (virtual stages) per stage.
        stage: of this rank, in [0, num_stages).
        num_stages: of the pipeline.
    """
    if table is None:
        everything = list(range(num_micro_batches))
        return (everything if stage > 0 else []), (everything if stage < num_stages - 1 else [])
    last = num_chunks - 1
    # The first stage receives a chunk's input from the last stage's previous chunk; what the last stage computes in
    # the last chunk goes to the loss. Backward is the same with stages and chunks counted from the other end.
    forward = [m for m, chunk in table if not (stage == 0 and chunk == last)]
    backward = [m for m, chunk in table if not (stage == num_stages - 1 and chunk == last)]
    return forward, backward
