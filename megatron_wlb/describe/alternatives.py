"""Other ways to train a run on its GPUs: layouts, recomputation, and fewer layers beside the vocabulary."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from megatron_wlb.describe.megatron import Description
from megatron_wlb.job import Job
from megatron_wlb.pipeline.split import laid_out
from megatron_wlb.plan.micro_batches import Prediction, predictions, recomputed, time_per_work
from megatron_wlb.plan.samples import Samples
from megatron_wlb.simulate.memory import peak_bytes, weight_bytes

WORTH = 1.05
"""Speed-up by another layout or recomputation from which the start of a run and the top of a report say so."""
FIRST_WINDOWS = 32
"""Windows of the data whose documents determine the time of a layer relative to the vocabulary."""
MOST_SHARDS = 1 << 14
"""Windows of a step, times context-parallel ranks, up to which a layout is tried: all are sharded and simulated."""
_OF_STAGES = (
    "virtual_pipeline_model_parallel_size num_layers_per_virtual_pipeline_stage microbatch_group_size_per_vp_stage "
    "decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers pipeline_model_parallel_layout"
).split()
"""Arguments that belong to the stages of one layout."""


def sizes(job: Job) -> list[tuple[int, int, int]]:
    """Return CP, PP and virtual stages to try in place of the job's; TP stays, and DP is the rest.

    Wider context parallelism for fewer data-parallel ranks or stages gives each pipeline, or stage, more windows.
    """
    p = job.parallel
    wanted = [(p.cp, p.pp), (p.cp * p.pp, 1), (p.cp, 1)]
    wanted += [(factor * p.cp, p.pp) for factor in (2, 4) if p.dp % factor == 0]
    if p.pp % 2 == 0:
        wanted.append((2 * p.cp, p.pp // 2))
    found = [(cp, pp, virtual_stages(job.model.num_layers + p.split.edges, pp)) for cp, pp in wanted]
    found = [each for each in dict.fromkeys(found) if each[0] * job.global_batch_size <= MOST_SHARDS]
    return [each for each in found if each != (p.cp, p.pp, p.vpp)]


def virtual_stages(layers: int, pp: int) -> int:
    """Return chunks per stage for one layer each; 1 if layers do not divide."""
    return 1 if pp == 1 or layers % pp else layers // pp


def layouts(run: Description, job: Job, samples: Samples, *, first_sample: int = 0) -> Iterator[Job]:
    """Yield the job in every other layout that fits memory, its micro-batches chosen."""
    for cp, pp, vpp in sizes(job):
        layout: dict[str, Any] = {"context_parallel_size": cp, "pipeline_model_parallel_size": pp}
        layout |= dict.fromkeys(_OF_STAGES) | {"num_virtual_stages_per_pipeline_rank": vpp if vpp > 1 else None}
        other = replace(run, arguments=replace(run.arguments, **layout)).without_memory()
        with contextlib.suppress(ValueError):
            if (budget := _budget_in(run, job, other)) is not None:
                known = replace(other, budget=budget)
                yield predictions(known.job(), known.job, samples, memory_known=True, first_sample=first_sample)[0]


def _budget_in(run: Description, job: Job, other: Description) -> float | None:
    """Return bytes for activations in another layout, by the weights' bytes in both; None if unknown."""
    mine, others = run.held_bytes(job), other.held_bytes(other.job())
    return None if run.budget is None or mine is None or others is None else run.budget + mine - others


def layout_flags(job: Job) -> str:
    """Return Megatron's flags for the context-parallel ranks, stages and virtual stages of a job."""
    p = job.parallel
    flags = f"--context-parallel-size {p.cp} --pipeline-model-parallel-size {p.pp}"
    return flags + (f" --num-virtual-stages-per-pipeline-rank {p.vpp}" if p.vpp > 1 else "")


def recomputation(run: Description, job: Job, samples: Samples, *, first_sample: int = 0) -> Prediction | None:
    """Return the job with the fastest recomputation within memory, and its time over the run's `job`; None if unknown.

    Of the run's own recomputation it is `job` itself.
    """
    if run.budget is None:
        return None
    free = run.without_memory().job()
    own = Prediction(job, time_per_work(job, free, samples, first_sample), 0.0)
    found = recomputed(free, run.job, samples, run.budget, first_sample=first_sample)
    best = min((own, *found), key=lambda each: each.time)
    return best._replace(time=best.time / own.time)


def relieved(job: Job, samples: Samples) -> Job:
    """Return the job with fewer layers beside the vocabulary, by the work of the first samples."""
    model = job.model
    if job.parallel.pp == 1 or model.hybrid or (job.layers() != job.decoder_layers()).any():
        return job
    lengths = samples.documents(0, FIRST_WINDOWS)["length"]
    linear = float(lengths.sum()) * job.crossover_tokens
    squares = float(job.work(lengths).sum()) - linear
    of_output = linear * model.vocabulary_weights / (linear * model.layer_weights + squares * model.token_weights)
    given = job.decoder_layers()
    layers = given.copy()
    while layers[-1].any():
        least = int(layers[:-1].sum(axis=1).argmin())
        if layers[-1].sum() - 1 + of_output <= layers[least].sum():
            break
        layers[-1, np.flatnonzero(layers[-1])[-1]] -= 1
        layers[least, np.flatnonzero(layers[least] == layers[least].min())[-1]] += 1
    if (layers == given).all():
        return job
    return replace(job, parallel=replace(job.parallel, split=laid_out(layers)))


def gib(job: Job) -> float:
    """Memory of the fullest GPU in GiB, with the activations of `peak_bytes`."""
    return (weight_bytes(job) + max(peak_bytes(job, stage) for stage in range(job.parallel.pp))) / 2**30
