"""Other ways to train a run on its GPUs: layouts, recomputation, a delay, and single flags."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from shlex import quote
from typing import Any, Literal, NamedTuple

import numpy as np

from megatron_wlb.describe import tiles
from megatron_wlb.describe.megatron import Description
from megatron_wlb.job import Job, Packing
from megatron_wlb.packing import DEFAULT_POLICY, policy_of
from megatron_wlb.packing.adaptive import AdaptivePacking
from megatron_wlb.pipeline.split import laid_out
from megatron_wlb.plan.micro_batches import ALIKE, Prediction, predictions, time_per_work
from megatron_wlb.plan.samples import Samples
from megatron_wlb.settings import flag_with_value
from megatron_wlb.simulate.memory import largest_max_tokens, peak_bytes, weight_bytes
from megatron_wlb.simulate.recompute import ways, worth_trying

WORTH = 1.05
"""Speed-up by one of `TOLD` from which the start of a run and the top of a report say so."""
CLOSE = 0.02
"""Gain or loss of a delay, or of a flag of Megatron's, up to which it is not mentioned."""
DELAY = 30
"""The bound on the delay, in steps, that is tried."""
FIRST_WINDOWS = 32
"""Windows of the data whose documents determine the time of a layer relative to the vocabulary."""
MOST_SHARDS = 1 << 14
"""Windows of a step, times context-parallel ranks, up to which a layout is tried: all are sharded and simulated."""
_OF_STAGES = (
    "virtual_pipeline_model_parallel_size num_layers_per_virtual_pipeline_stage microbatch_group_size_per_vp_stage "
    "decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers pipeline_model_parallel_layout"
).split()
"""Arguments that belong to the stages of one layout."""


Kind = Literal["layouts", "recompute", "delay", "other_flags"]
"""Alternatives of a kind have an entry in the JSON of `analyze`."""


class Alternative(NamedTuple):
    """Another way to train."""

    kind: Kind
    flags: str
    """To be added to the command; "" to recompute nothing."""
    job: Job
    least: float = ALIKE
    """Gain up to which it is not mentioned."""

    @property
    def words(self) -> str:
        return f"with {self.flags}" if self.flags else "without recomputation"


def others(run: Description, job: Job, samples: Samples, *, may_wait: bool = True) -> Iterator[Alternative]:
    """Yield all ways to try beside a run's `job`; `may_wait`: documents may, since they fill samples."""
    if chooses(run, job.packing):
        for told in TOLD.values():
            yield from told(run, job, samples)
    if may_wait and job.packing == AdaptivePacking():
        with contextlib.suppress(ValueError):  # memory may not hold it
            late, _ = best(run, AdaptivePacking(max_delay_steps=DELAY), samples)
            yield Alternative("delay", flag_with_value("packing", late.packing), late, CLOSE)
    for flag, other in _with_a_flag(run, job, samples):
        yield Alternative("other_flags", flag, other)


def chooses(run: Description, packing: Packing) -> bool:
    """Whether the number of micro-batches is to be chosen."""
    return run.settings.micro_batches == "auto" and packing.steady_tokens


def best(
    run: Description, packing: Packing, samples: Samples, *, first_sample: int = 0
) -> tuple[Job, list[Prediction]]:
    """Return the job of a packing policy with the micro-batches of `auto`, and the predictions compared, if any."""
    make, known = partial(run.job, packing=packing), run.budget is not None
    if not chooses(run, packing):
        return make(), []
    return predictions(make(), make, samples, memory_known=known, first_sample=first_sample)


def _with_a_flag(run: Description, job: Job, samples: Samples) -> Iterator[tuple[str, Job]]:
    """Yield jobs with one more flag, and the flag: policy, gradients of K and V, tensor parallelism, last layers."""
    if job.packing.most_step_tokens(job) is None:  # steps vary in tokens
        with contextlib.suppress(ValueError):  # memory may not hold it
            yield flag_with_value("packing", DEFAULT_POLICY), run.job(packing=policy_of(DEFAULT_POLICY))
    if job.parallel.cp > 1 and job.cp_gradient_bytes > job.bytes_per_value:
        yield flag_with_value("cp_gradients", "model"), job.sharded(cp_gradients="model")
    if (overlapping := tiles.switched_on(run.arguments, job)) is not None:
        yield "--tp-comm-overlap", overlapping
    fewer = relieved(job, samples)
    layout = fewer.parallel.split.pipeline_model_parallel_layout
    fits = run.budget is None or largest_max_tokens(fewer, run.budget) >= job.max_tokens
    if layout is not None and fewer != job and fits:
        yield f"--pipeline-model-parallel-layout {quote(layout)}", fewer


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


def layouts(run: Description, job: Job, samples: Samples, *, first_sample: int = 0) -> Iterator[Alternative]:
    """Yield every other layout in which the run fits memory, its micro-batches chosen."""
    for cp, pp, vpp in sizes(job):
        layout: dict[str, Any] = {"context_parallel_size": cp, "pipeline_model_parallel_size": pp}
        layout |= dict.fromkeys(_OF_STAGES) | {"num_virtual_stages_per_pipeline_rank": vpp if vpp > 1 else None}
        other = replace(run, arguments=replace(run.arguments, **layout)).without_memory()
        with contextlib.suppress(ValueError):
            if (budget := _budget_in(run, job, other)) is not None:
                found, _ = best(replace(other, budget=budget), run.packing, samples, first_sample=first_sample)
                yield Alternative("layouts", layout_flags(found), found)


def _budget_in(run: Description, job: Job, other: Description) -> float | None:
    """Return bytes for activations in another layout, by the weights' bytes in both; None if unknown."""
    mine, others = run.held_bytes(job), other.held_bytes(other.job())
    return None if run.budget is None or mine is None or others is None else run.budget + mine - others


def layout_flags(job: Job) -> str:
    """Return Megatron's flags for the context-parallel ranks, stages and virtual stages of a job."""
    p = job.parallel
    flags = f"--context-parallel-size {p.cp} --pipeline-model-parallel-size {p.pp}"
    return flags + (f" --num-virtual-stages-per-pipeline-rank {p.vpp}" if p.vpp > 1 else "")


def recomputation(run: Description, job: Job, samples: Samples, *, first_sample: int = 0) -> Iterator[Alternative]:
    """Yield the fastest recomputation within memory, if it is faster than the run's `job` and not its own."""
    if run.budget is None:
        return
    free = run.without_memory().job()
    own = time_per_work(job, free, samples, first_sample)
    for found, time in recomputed(free, run.job, samples, run.budget, first_sample=first_sample)[:1]:
        if time < own and found.recompute != job.recompute:
            yield Alternative("recompute", found.recompute.flags, found)


def recomputed(
    free: Job, make: Callable[..., Job], samples: Samples, budget_bytes: float, *, first_sample: int = 0
) -> list[tuple[Job, float]]:
    """Return the best job of every recomputation that is worth trying within memory, and its time, the fastest first.

    `free` is the job without a limit of memory, `make` as for `predictions`, with a `recompute`. Times are as
    `time_per_work` returns them.
    """
    found = []
    for way in worth_trying(free, budget_bytes):
        with contextlib.suppress(ValueError):  # not with this number of micro-batches
            of_way = partial(make, recompute=way)
            job, _ = predictions(of_way(), of_way, samples, memory_known=True, first_sample=first_sample)
            found.append((job, time_per_work(job, free, samples, first_sample)))
    return sorted(found, key=lambda each: each[1])


TOLD: dict[Kind, Callable[..., Iterator[Alternative]]] = {"recompute": recomputation, "layouts": layouts}
"""Ways that the start of a run and the top of a report tell, of runs whose micro-batches are chosen."""


def fitting[R: Description](run: R, free: Job) -> tuple[str, R] | None:
    """Return the flags of the fastest recomputation with which a run fits memory, and the run with it.

    `free` is its job without a limit of memory.
    """
    for way in ways(free):
        with contextlib.suppress(ValueError):
            (found := replace(run, recompute=way)).job()
            return way.flags, found
    return None


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
    return (weight_bytes(job) + peak_bytes(job)) / 2**30
