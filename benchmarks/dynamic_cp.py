"""A training step under Megatron's dynamic context parallelism: every document on as few ranks as have room for it.

Written from Megatron's own scheduling (`--hybrid-context-parallel`, on its dev branch `--dynamic-context-parallel`),
and favourable to it: ranks wait for each other at the end of a step only, not whenever groups of ranks change.
"""

import math
from dataclasses import fields, replace
from itertools import pairwise

import numpy as np

from megatron_wlb.cost.work import document_work
from megatron_wlb.job import Job
from megatron_wlb.sharding import per_document
from megatron_wlb.simulate.passes import H100, Hardware, LayerTimes, Passes, pass_times
from megatron_wlb.simulate.step import SimulatedStep, step_of
from megatron_wlb.types import ShardPlan

_PASSES = ("forward", "backward", "layer weights", "output weights", "rows")
_LAYER = tuple(field.name for field in fields(LayerTimes))


def ranks_of(lengths: np.ndarray, ranks: int, rank_tokens: float, crossover_tokens: int = 0) -> np.ndarray:
    """The first rank of every document, and how many they are, int64 [n, 2].

    Longest first, on the fewest ranks, 1, 2, 4, ... or all, that have room for it alone: of the aligned groups of so
    many, on the one whose slowest rank has least work. Nothing makes the numbers of tokens equal.

    Args:
        lengths: int64 [n], of a whole step.
        ranks: context-parallel times data-parallel ranks.
        rank_tokens: room of a rank (`--max-seqlen-per-dp-cp-rank`).
        crossover_tokens: for `document_work`; by default work is quadratic, as in Megatron.
    """
    work, of_documents = np.zeros(ranks), document_work(lengths, crossover_tokens)
    found = np.empty((len(lengths), 2), np.int64)
    for document in np.argsort(-lengths, kind="stable").tolist():
        size = 1
        while size < ranks and lengths[document] > size * rank_tokens:
            size = min(2 * size, ranks)
        groups = work[: ranks // size * size].reshape(-1, size)
        first = size * int(groups.max(axis=1).argmin())
        work[first : first + size] += of_documents[document] / size
        found[document] = first, size
    return found


def simulate_dynamic(
    job: Job, lengths: np.ndarray, rank_tokens: int, *, packs: bool, hardware: Hardware = H100
) -> SimulatedStep:
    """A step of these documents, without a pipeline.

    Ranks count as data-parallel ones with a single micro-batch, the sum of their passes, whose order takes no time.

    Args:
        job: of which context- and data-parallel ranks are one group, and experts are not divided.
        lengths: int64 [n], of a whole step.
        rank_tokens: room of a rank.
        packs: whether documents of the same ranks run at once, as many as these have room for, or each by itself.
        hardware: what it runs on.
    """
    assert job.parallel.pp == 1
    ranks = job.parallel.cp * job.parallel.dp
    place = ranks_of(lengths, ranks, rank_tokens)
    shards: list[list[ShardPlan]] = [[] for _ in range(ranks)]
    sums = np.zeros((ranks, len(_PASSES) + 2 * len(_LAYER)))
    for first, size in np.unique(place, axis=0).tolist():
        documents = np.sort(lengths[(place == (first, size)).all(axis=1)])[::-1]
        plans = [per_document(each, size) for each in _at_once(documents, size * rank_tokens if packs else 0)]
        sums[first : first + size] += _summed(pass_times(_on(job, size, 1), hardware, plans))
        for rank in range(first, first + size):
            shards[rank] += plans
    return step_of(_on(job, 1, ranks), shards, [_passes_of(each) for each in sums], hardware)


def _at_once(lengths: np.ndarray, most_tokens: int) -> list[np.ndarray]:
    """Documents that run at once, in their order: of at most so many tokens, or one."""
    cuts, tokens = [0], 0
    for i, length in enumerate(lengths.tolist()):
        if tokens and tokens + length > most_tokens:
            cuts.append(i)
            tokens = 0
        tokens += length
    return [lengths[i:j] for i, j in pairwise([*cuts, len(lengths)])]


def _on(job: Job, cp: int, dp: int) -> Job:
    """The job on other ranks, in a ring, with a micro-batch each."""
    parallel = replace(job.parallel, cp=cp, dp=dp, ep=1, etp=None)
    unit = cp * math.lcm(2, parallel.sequence_ranks * job.row_multiple)
    window = -(-job.context_length // unit) * unit
    return replace(
        job,
        parallel=parallel,
        context_length=window,
        max_tokens=window,
        num_micro_batches=dp,
        global_batch_size=dp,
        cp_exchange="ring",
        cp_sharding="per-document",
    )


def _summed(passes: Passes) -> np.ndarray:
    """Times of all micro-batches together: of `_PASSES`, and of `_LAYER` forward and backward. Ranks are alike."""
    times = [passes.forward, passes.backward, *passes.weights, passes.rows]
    for layer in passes.layers:
        values = (getattr(layer, name) for name in _LAYER)
        times += [value.max(axis=1) if value.ndim > 1 else value for value in values]
    return np.array([each.sum() for each in times])


def _passes_of(sums: np.ndarray) -> Passes:
    """A single micro-batch with the times of `_summed`."""
    forward, backward, *others = sums[: len(_PASSES), None]
    both = sums[len(_PASSES) :, None].reshape(2, len(_LAYER), 1)
    layer, output, rows = others

    def layer_times(sums: np.ndarray) -> LayerTimes:
        named = dict(zip(_LAYER, sums, strict=True))
        return LayerTimes(**named | {"attention": named["attention"][None]})

    return Passes(
        forward=forward[None, None],
        backward=backward[None, None],
        transfer=np.zeros(1),
        layers=(layer_times(both[0]), layer_times(both[1])),
        weights=(layer, output),
        rows=rows,
        expert_wait=np.zeros((2, 1, 1, 1)),
    )
