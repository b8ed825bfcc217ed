"""Other layouts of the same GPUs, and fewer layers beside the vocabulary."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from megatron_wlb.cli.job import Run
from megatron_wlb.job import Job
from megatron_wlb.pipeline.split import laid_out
from megatron_wlb.plan.micro_batches import predictions
from megatron_wlb.plan.samples import Samples
from megatron_wlb.simulate.memory import peak_bytes, weight_bytes

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
    """Return CP, PP and virtual stages to try in place of the job's; TP stays, and DP is what is left.

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


def jobs(run: Run, job: Job, samples: Samples) -> Iterator[Job]:
    """Yield the job in every other layout that fits memory, its micro-batches chosen.

    None with experts: a job knows only those that a token goes to.
    """
    for cp, pp, vpp in sizes(job) if not job.model.moe_router_topk else ():
        layout: dict[str, Any] = {"context_parallel_size": cp, "pipeline_model_parallel_size": pp}
        layout |= dict.fromkeys(_OF_STAGES) | {"num_virtual_stages_per_pipeline_rank": vpp if vpp > 1 else None}
        settings = replace(run.settings, max_tokens=None, memory_budget=None)
        other = replace(run, arguments=replace(run.arguments, **layout), settings=settings, budget=None)
        with contextlib.suppress(ValueError):
            if (budget := run.budget_bytes(other.job())) is not None:
                known = replace(other, budget=budget)
                yield predictions(known.job(), known.job, samples, memory_known=True)[0]


def relieved(job: Job, samples: Samples) -> Job:
    """Return the job with fewer layers beside the vocabulary, by the work of the first samples."""
    model = job.model
    if job.parallel.pp == 1 or model.mtp_num_layers or model.hybrid:
        return job
    lengths = samples.pieces(0, FIRST_WINDOWS)["length"]
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
