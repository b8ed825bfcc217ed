"""A closed batch: these sequences, all of them, in one step, as loops of reinforcement learning have them."""

import functools
import heapq
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, NamedTuple

import numpy as np
from msgspec import Meta

from megatron_wlb.documents import DOCUMENT, PackedBatch
from megatron_wlb.job import Job
from megatron_wlb.packing.paper import PaperPacking
from megatron_wlb.packing.place import placed
from megatron_wlb.pipeline.timeline import makespans
from megatron_wlb.plan import placement
from megatron_wlb.plan.packer import PackedStep
from megatron_wlb.plan.step import StepPlan, divided, plan_packed
from megatron_wlb.settings import SizeOrNone, in_range

TIMES_THE_FEWEST = (1, 1.5, 2, 3)
"""Counts of micro-batches that are tried, over the fewest that hold the sequences."""
GAIN = 0.01
"""The fewest are taken that are at most so much slower than the best."""
IDLE = 0.02
"""No more are tried once ranks are idle for at most so much of their time."""
STRIDE = 1 / 256
"""Where sequences do not fit, counts of micro-batches grow by so much, or one a rank: one by one takes time n^2."""
EVEN = 0.001
"""Ranks that are so much slower than even ones are filled in another way, too."""
SWAPS = 8
"""Most swaps of two sequences between two ranks, per rank."""


@in_range
def balance(
    lengths: Sequence[int] | np.ndarray,
    job: Job,
    dp_rank: SizeOrNone = 0,
    *,
    num_micro_batches: Annotated[int, Meta(ge=1, le=1 << 17)] | None = None,
    equal_counts: bool = False,
) -> StepPlan:
    """Plan a step of exactly these sequences for a data-parallel rank.

    No micro-batch is longer than `job.max_tokens`, all ranks have equally many, in the order in which their pipeline
    should run them, and none is empty if there are enough sequences. The `document` of a row is the sequence's place in
    `lengths`. A pure function, and quick for the other ranks, so that a controller may ask for all of them.

    Args:
        lengths: tokens of each sequence.
        job: the job to plan for; its packing, `global_batch_size` and `num_micro_batches` do not count.
        dp_rank: the data-parallel rank.
        num_micro_batches: over all ranks. Default: as many as are predicted to take least time.
        equal_counts: give all ranks equally many sequences.

    Raises ValueError if there is no sequence or one longer than `job.max_tokens`, if they do not divide over the ranks
    as asked, or do not fit into `num_micro_batches`.
    """
    packed, job = _step(lengths, job, num_micro_batches, equal_counts)
    return plan_packed(packed, job, dp_rank)


@in_range
def divide(
    lengths: Sequence[int] | np.ndarray,
    job: Job,
    *,
    num_micro_batches: Annotated[int, Meta(ge=1, le=1 << 17)] | None = None,
    equal_counts: bool = False,
) -> list[list[list[int]]]:
    """Return the places in `lengths` that every micro-batch of every data-parallel rank holds.

    `balance` makes the same micro-batches, and shards them, too.
    """
    packed, job = _step(lengths, job, num_micro_batches, equal_counts)
    batch, step = packed.batch, divided(packed.batch, job)
    return [[batch.micro_batch(i)["document"].tolist() for i in step.in_order(rank)] for rank in range(job.parallel.dp)]


def _step(
    lengths: Sequence[int] | np.ndarray, job: Job, num_micro_batches: int | None, equal_counts: bool
) -> tuple[PackedStep, Job]:
    """Return the packed step, and the job that packs it. Raises ValueError, see `balance`."""
    given = np.asarray(lengths)
    if isinstance(lengths, np.ma.MaskedArray):
        raise ValueError("lengths are a masked array, whose hidden entries would be trained; give lengths.compressed()")
    if given.ndim != 1 or not given.size or given.dtype.kind not in "iu":
        raise ValueError(f"lengths have shape {given.shape} of {given.dtype}; give at least one whole number")
    least, most = int(given.min()), int(given.max())
    if least < 1 or most > job.max_tokens:
        raise ValueError(
            f"{given.size} sequences of {least} to {most} tokens; give them 1 to {job.max_tokens} tokens (max_tokens)"
        )
    given = given.astype(np.int64)
    for what, count in (("sequences", len(given) if equal_counts else 0), ("micro-batches", num_micro_batches or 0)):
        if count % job.parallel.dp:
            raise ValueError(
                f"{count} {what} do not divide over {job.parallel.dp} data-parallel ranks; give a multiple, or leave "
                f"{'equal_counts' if what == 'sequences' else 'num_micro_batches'} out"
            )
    job = replace(job, packing=PaperPacking())  # whose steps hold as many tokens as fit
    return _packed(given.tobytes(), job, num_micro_batches, equal_counts), job


class Candidate(NamedTuple):
    time: int
    """Of the costliest rank, in work."""
    batch: PackedBatch


@functools.lru_cache(maxsize=2)
def _packed(given: bytes, job: Job, count: int | None, equal: bool) -> PackedStep:
    documents = np.zeros(len(given) // 8, DOCUMENT)
    documents["length"] = lengths = np.frombuffer(given, np.int64)
    documents["document"] = np.arange(len(documents))
    documents["index"] = np.cumsum(lengths) - lengths
    dp, total = job.parallel.dp, int(lengths.sum())
    fewest = -(-total // (job.max_tokens * dp)) * dp
    limit = 3 * job.parallel.vpp * int(job.work(lengths).sum()) / dp
    # A sequence in each fits in any case, and a pipeline's groups divide twice as many.
    last = count or max(fewest, 2 * len(documents)) + dp * job.parallel.pp
    # Two sequences of over half a micro-batch never share one.
    apart = 0 if count else -(-int((2 * lengths > job.max_tokens).sum()) // dp) * dp
    tried: list[Candidate] = []
    number = 0
    whole = len(documents) // dp * dp
    for share in TIMES_THE_FEWEST if count is None else (count / fewest,):
        before = number
        number = max(round(fewest * share / dp) * dp, number + dp, apart)
        if tried and number > len(documents):  # some would be empty
            if whole <= before:
                break
            number = whole
        while (candidate := _best_with(documents, job, number, equal)) is None and number < last:
            before = number
            number += max(1, round(STRIDE * number / dp)) * dp
            number = whole if before < whole < number else number  # the most of which none is empty
        tried += [candidate] if candidate else []
        if candidate is None or candidate.time <= (1 + IDLE) * limit:
            break
    if not tried:
        raise ValueError(
            f"{len(documents)} sequences of {total} tokens do not fit into {count} micro-batches of {job.max_tokens}; "
            "give more micro-batches, or leave num_micro_batches out"
        )
    full = [each for each in tried if len(each.batch) <= len(documents)] or tried
    least = min(each.time for each in full)
    batch = next(each.batch for each in full if each.time <= (1 + GAIN) * least)
    for array in (batch.documents, batch.bounds, batch.ranks, documents):  # which the cache keeps
        if array is not None:
            array.flags.writeable = False
    return PackedStep(step=0, batch=batch, drawn=documents, first=0, position={}, waiting={})


def _best_with(documents: np.ndarray, job: Job, count: int, equal: bool) -> Candidate | None:
    """Return the best candidate with `count` micro-batches; None if they cannot be interleaved, or are too few."""
    try:
        job = job.of_step(count, int(documents["length"].sum()))
    except ValueError:
        return None
    dp, beside = job.parallel.dp, job.parallel.pooling_ranks
    work = job.work(documents["length"])
    even = makespans(job.schedule(), np.full((1, count // dp), int(work.sum()) // count))[0]
    candidates: list[Candidate] = []
    for apart in (True,) if equal else (False, True):
        # Where a micro-batch holds few sequences, ranks that are filled first are more equal.
        if candidates and (candidates[0].time <= (1 + EVEN) * even or beside > 1 or dp == 1):
            break
        batch = _by_ranks(documents, work, job, equal) if apart else placed(documents, job, count)
        if batch is None:
            break
        step = divided(batch, job)
        sums = step.work[step.rows]
        costliest = sums[placement.rank_cost(sums, job).argmax()]
        time = makespans(job.schedule(), costliest[placement.order(costliest, job)][None])
        candidates.append(Candidate(int(time[0]), replace(batch, ranks=step.rows)))
    return min(candidates, key=lambda each: each.time, default=None)


def _by_ranks(documents: np.ndarray, work: np.ndarray, job: Job, equal: bool) -> PackedBatch | None:
    """Deal sequences to ranks, `equal`: as many to each, and then to micro-batches; None if they do not fit."""
    dp, count = job.parallel.dp, job.num_micro_batches
    # Sequences without work let ranks have more or fewer others.
    nothing = np.zeros(0 if equal else len(work) + -2 * len(work) % dp, np.int64)
    shares = [rows[rows < len(work)] for rows in equal_shares(np.append(work, nothing), dp)]
    if min(map(len, shares)) < count // dp <= len(work) // dp:  # some would be empty
        return None
    parts = [placed(documents[rows], job, count // dp, ranks=1) for rows in shares]
    found = [part for part in parts if part is not None]
    if len(found) < dp:
        return None
    counts = np.concatenate([np.diff(part.bounds) for part in found])
    return PackedBatch(
        documents=np.concatenate([part.documents for part in found]),
        bounds=np.cumsum([0, *counts], dtype=np.int64),
        ranks=np.arange(count).reshape(dp, -1),
    )


def equal_shares(work: np.ndarray, ranks: int) -> list[np.ndarray]:
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
