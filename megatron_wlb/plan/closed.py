"""A closed batch: these sequences, all of them, in one step, as loops of reinforcement learning have them."""

import functools
import heapq
import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from megatron_wlb import _native
from megatron_wlb.job import Job
from megatron_wlb.packing.adaptive import AdaptivePacking
from megatron_wlb.pipeline.timeline import cost_weights, makespans
from megatron_wlb.plan import placement
from megatron_wlb.plan.packer import PackedStep
from megatron_wlb.plan.step import StepPlan, plan_packed
from megatron_wlb.types import DOCUMENT, PackedBatch, document_work

SHARES = (1, 1.5, 2, 3)
"""Counts of micro-batches that are tried, over the fewest that hold the sequences."""
GAIN = 0.01
"""The fewest are taken that are at most so much slower than the best."""
IDLE = 0.02
"""No more are tried once ranks are idle for at most so much of their time."""
SWAPS = 8
"""Most swaps of two sequences between two ranks, per rank."""


def balance(
    lengths: Sequence[int] | np.ndarray,
    job: Job,
    dp_rank: int = 0,
    *,
    num_micro_batches: int | None = None,
    equal_counts: bool = False,
) -> StepPlan:
    """Plan a step of exactly these sequences for a data-parallel rank.

    No micro-batch is longer than `job.max_tokens`, all ranks have equally many, in the order in which their pipeline
    should run them, and none is empty if there are enough sequences. The `document` of a row is the sequence's place in
    `lengths`. A pure function, and quick for the other ranks, so that a controller may ask for all of them.

    Args:
        lengths: tokens of each sequence.
        job: what is trained; its packing, `global_batch_size` and `num_micro_batches` do not count.
        dp_rank: the data-parallel rank.
        num_micro_batches: over all ranks. Default: as many as are predicted to take least time.
        equal_counts: give all ranks equally many sequences.

    Raises ValueError if there is no sequence or one longer than `job.max_tokens`, if they do not divide over the ranks
    as asked, or do not fit into `num_micro_batches`.
    """
    given = np.asarray(lengths, np.int64)
    least, most = (int(given.min()), int(given.max())) if given.size else (0, 0)
    if given.ndim != 1 or least < 1 or most > job.max_tokens:
        raise ValueError(
            f"{given.size} sequences of {least} to {most} tokens; give at least one, of 1 to {job.max_tokens} tokens "
            "each (max_tokens)"
        )
    for what, count in (("sequences", len(given) if equal_counts else 0), ("micro-batches", num_micro_batches or 0)):
        if count % job.parallel.dp:
            raise ValueError(
                f"{count} {what} do not divide over {job.parallel.dp} data-parallel ranks; give a multiple, or leave "
                f"{'equal_counts' if what == 'sequences' else 'num_micro_batches'} out"
            )
    packed, planned, ranks = _packed(given.tobytes(), job, num_micro_batches, equal_counts)
    return plan_packed(packed, planned, dp_rank, ranks)


class _Made(NamedTuple):
    time: int
    """Of the costliest rank, in work."""
    batch: PackedBatch
    job: Job
    ranks: np.ndarray
    """Micro-batches of every rank, int64 [dp, M / dp]."""


@functools.lru_cache(maxsize=2)
def _packed(given: bytes, job: Job, count: int | None, equal: bool) -> tuple[PackedStep, Job, np.ndarray]:
    """The step, the job with its number of micro-batches, and those of each rank, int64 [dp, M / dp]."""
    documents = np.zeros(len(given) // 8, DOCUMENT)
    documents["length"] = np.frombuffer(given, np.int64)
    documents["index"] = documents["document"] = np.arange(len(documents))
    dp, total = job.parallel.dp, int(documents["length"].sum())
    fewest = -(-total // (job.max_tokens * dp)) * dp
    limit = 3 * job.parallel.vpp * int(document_work(documents["length"], job.crossover_tokens).sum()) / dp
    tried: list[_Made] = []
    number = 0
    for share in SHARES if count is None else (count / fewest,):
        number = max(round(fewest * share / dp) * dp, number + dp)
        # A sequence in each fits in any case, and a pipeline's groups divide twice as many.
        last = number if count is not None else max(number, 2 * len(documents)) + dp * job.parallel.pp
        while (made := _made(documents, job, number, equal)) is None and number < last:
            number += dp
        tried += [made] if made else []
        if made is None or made.time <= (1 + IDLE) * limit or number + dp > len(documents):
            break
    if not tried:
        raise ValueError(
            f"{len(documents)} sequences of {total} tokens do not fit into {count} micro-batches of {job.max_tokens}; "
            "give more micro-batches, or leave num_micro_batches out"
        )
    least = min(made.time for made in tried)
    best = next(made for made in tried if made.time <= (1 + GAIN) * least)
    packed = PackedStep(step=0, batch=best.batch, drawn=documents, header={}, waiting={})
    return packed, best.job, best.ranks


def _made(documents: np.ndarray, job: Job, count: int, equal: bool) -> _Made | None:
    """The best that is found with `count` micro-batches; None if that many cannot be interleaved or are too few."""
    try:
        windows = max(1, int(documents["length"].sum()) // job.context_length)
        job = replace(job, num_micro_batches=count, global_batch_size=windows, packing=AdaptivePacking())
    except ValueError:
        return None
    dp, beside = job.parallel.dp, job.parallel.expert_dp_ranks
    work = document_work(documents["length"], job.crossover_tokens)
    even = makespans(job.schedule(), np.full((1, count // dp), int(work.sum()) // count))[0]
    made: list[_Made] = []
    for apart in (True,) if equal else (False, True):
        # Where tokens are tight, equal counts may be better even if nobody asks for them.
        if made and (made[0].time <= (1 + GAIN) * even or len(documents) % dp or beside > 1 or dp == 1):
            break
        parts = _equal_counts(work, dp) if apart else [np.arange(len(documents))]
        ranks = 1 if apart else dp if beside == 1 else count
        placed = [each for part in parts for each in _placed(documents["length"], work, part, job, len(parts), ranks)]
        rows = np.concatenate(placed)
        if len(rows) < len(documents):
            break
        bounds = np.cumsum([0, *map(len, placed)], dtype=np.int64)
        batch = PackedBatch(documents=documents[rows], bounds=bounds)
        sums, mine = batch.sums(work[rows]), np.arange(count).reshape(dp, -1)
        if beside > 1 and not apart:
            mine = placement.place(sums, job, batch.sums(batch.documents["length"]) * job.expert_crossover_tokens)
        paces = sums[mine][placement.rank_cost(sums[mine], job).argmax()]
        time = makespans(job.schedule(), paces[placement.order(paces, job)][None])
        made.append(_Made(int(time[0]), batch, job, mine))
    return min(made, key=lambda each: each.time, default=None)


def _placed(
    lengths: np.ndarray, work: np.ndarray, part: np.ndarray, job: Job, parts: int, ranks: int
) -> list[np.ndarray]:
    """Rows of the micro-batches of a part of the documents, as adaptive packing places those that may not wait.

    What does not fit is left out.
    """
    weights = cost_weights(job.schedule())
    rows, bounds = _native.choose_adaptive(
        lengths[part],
        work[part],
        np.zeros(len(part), np.int64),
        _native.FORCED_STEPS + 1,
        0,
        num_micro_batches=job.num_micro_batches // parts,
        ranks=ranks,
        total_weight=weights.total,
        largest_weight=weights.largest,
        unit_weight=weights.unit,
        max_tokens=job.max_tokens,
        batch_tokens=int(lengths[part].sum()),
        crossover_tokens=job.crossover_tokens,
        max_delay_steps=_native.FORCED_STEPS + 1,
    )
    return _filled([part[rows[i:j]] for i, j in itertools.pairwise(bounds)], work)


def _equal_counts(work: np.ndarray, ranks: int) -> list[np.ndarray]:
    """Equally many sequences of about equal work for each rank.

    The largest come first, to the rank of least work with room. Then the ranks of most and of least work swap two
    sequences, as long as that brings them closer.
    """
    heap = [(0, rank) for rank in range(ranks)]
    held: list[list[int]] = [[] for _ in range(ranks)]
    for row in np.argsort(-work, kind="stable").tolist():
        total, rank = heapq.heappop(heap)
        held[rank].append(row)
        if len(held[rank]) < len(work) // ranks:
            heapq.heappush(heap, (total + int(work[row]), rank))
    parts = [np.array(rows) for rows in held]
    sums = np.array([work[rows].sum() for rows in parts])
    for _ in range(SWAPS * ranks):
        most, least = sums.argmax(), sums.argmin()
        half = (sums[most] - sums[least]) // 2
        parts[least] = parts[least][np.argsort(work[parts[least]], kind="stable")]
        given, sizes = work[parts[most]], work[parts[least]]
        near = np.searchsorted(sizes, given - half).clip(max=len(sizes) - 1)
        gained = given - sizes[near]
        gained[gained > half] = 0
        if gained[i := gained.argmax()] <= 0:
            break
        j = near[i]
        parts[most][i], parts[least][j] = parts[least][j], parts[most][i]
        sums[most], sums[least] = sums[most] - gained[i], sums[least] + gained[i]
    return parts


def _filled(micro_batches: list[np.ndarray], work: np.ndarray) -> list[np.ndarray]:
    """The same without empty ones: each takes the least sequence of the one that has most."""
    for i in [i for i, rows in enumerate(micro_batches) if not len(rows)]:
        most = max(range(len(micro_batches)), key=lambda k: len(micro_batches[k]))
        if len(rows := micro_batches[most]) > 1:
            least = int(work[rows].argmin())
            micro_batches[i], micro_batches[most] = rows[least : least + 1], np.delete(rows, least)
    return micro_batches
