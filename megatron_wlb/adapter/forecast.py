"""The predicted gain of a run, and faster uses of the same GPUs, printed at its start."""

import functools
from collections.abc import Iterator

from megatron_wlb.adapter.sources.source import SplitData
from megatron_wlb.describe import alternatives, price
from megatron_wlb.describe.arguments import MegatronArguments
from megatron_wlb.describe.megatron import Description
from megatron_wlb.job import Job
from megatron_wlb.packing.megatron import without_wlb
from megatron_wlb.plan.alone import best_size
from megatron_wlb.plan.micro_batches import steps_left, time_per_work


def tell(job: Job, run: Description, before: MegatronArguments, data: SplitData) -> None:
    """Print the gain of --wlb in a run's first steps, net of the features that it switches off in `before`.

    Then the recomputation and the layout with which the same GPUs are faster.
    """
    try:
        for line in _lines(job, run, before, data):
            print(f"> wlb: {line}", flush=True)
    except ValueError as error:
        print(f"> wlb: its gain is not predicted: {error}", flush=True)


def _lines(job: Job, run: Description, before: MegatronArguments, data: SplitData) -> Iterator[str]:
    if steps_left(job, data.samples, data.first_sample) <= 0:
        return
    time = functools.partial(time_per_work, unit=job, samples=data.samples, first_sample=data.first_sample)
    megatron = price.alone(job, before)
    size, _ = best_size(megatron, 1, run.budget or 0.0, lambda size: time(megatron, size=size))
    ours, alone = time(job), functools.partial(time, size=size)
    found, gain = price.prices(job, before, alone), alone(megatron) / ours
    words = f"predicted {gain:.2f} times as fast as Megatron with intra-document attention, --micro-batch-size {size}."
    if found:
        words += f" {price.sentence(alone(without_wlb(job)) / ours, gain, found)}"
    yield words + " Do not use --wlb here." * (gain < 1)
    if run.settings.micro_batches == "auto":
        yield from _faster(job, run, data)


def _faster(job: Job, run: Description, data: SplitData) -> Iterator[str]:
    first = data.first_sample
    own = time_per_work(job, job, data.samples, first)
    for told in alternatives.TOLD.values():
        ways = told(run, job, data.samples, first_sample=first)
        times = {time_per_work(each.job, job, data.samples, first): each for each in ways}
        if times and (best := min(times)) * alternatives.WORTH <= own:
            how = times[best].words
            yield f"{how} on the same GPUs this run is predicted to be {own / best:.2f} times as fast"
