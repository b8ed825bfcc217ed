"""How many micro-batches are chosen: by predicted time, of those that a job can have."""

from dataclasses import replace

import numpy as np
import pytest

from megatron_wlb.describe import alternatives
from megatron_wlb.describe.alternatives import recomputed
from megatron_wlb.describe.flags import PlanSettings
from megatron_wlb.hardware.profile import FLOPS_PROFILE
from megatron_wlb.packing.adaptive import AdaptivePacking
from megatron_wlb.packing.megatron import MegatronPacking
from megatron_wlb.packing.paper import PaperPacking
from megatron_wlb.plan import micro_batches
from megatron_wlb.plan.alone import best_size
from megatron_wlb.plan.micro_batches import WARM_UP, predictions, time_per_work
from megatron_wlb.simulate.memory import peak_bytes
from megatron_wlb.simulate.recompute import ways
from tests.jobs import samples
from tests.simulate.shards import SMALL, job

WINDOW = 1 << 14
LENGTHS = np.random.default_rng(0).lognormal(7.5, 1.3, 20_000).astype(np.int64).clip(1, WINDOW)
DATA = samples(LENGTHS, context_length=WINDOW)
DELAY = AdaptivePacking(max_delay_steps=20)


def chosen(*, windows=8, memory_known=True, packing=None, refuses=(), data=DATA, first_sample=0, **changes):
    """The number of micro-batches, and what was tried: number -> prediction."""
    policy = packing or AdaptivePacking()

    def make(num_micro_batches=windows, tight=False):
        if num_micro_batches in refuses:
            raise ValueError("too long")
        sizes = {"context_length": WINDOW, "global_batch_size": windows, "num_micro_batches": num_micro_batches}
        return job(**sizes, packing=policy, tight=tight, **changes)

    best, tried = predictions(make(), make, data, memory_known=memory_known, first_sample=first_sample)
    return best.num_micro_batches, {each.job.num_micro_batches: each for each in tried}


@pytest.mark.parametrize(
    "profile",
    [{}, {"profile": FLOPS_PROFILE}, {"model": replace(SMALL, num_layers=7)}, {"packing": DELAY}],
    ids=["h100-fa2", "flops", "layers that do not divide", "with delay"],
)
def test_a_pipeline_gets_more_and_a_single_rank_few(profile):
    count, tried = chosen(windows=16, pp=4, dp=2, **profile)
    assert set(tried) == {2, 4, 8, 12, 16, 24, 32, 48, 64} and count > 16
    assert tried[16].time == 1 and tried[2].time > 1 > tried[count].time
    assert (tried[count].late_steps > 0) == ("packing" in profile)
    count, tried = chosen(cp=2, **profile)
    assert set(tried) == {1, 2, 4, 6, 8, 12, 16, 24, 32} and max(each.late_steps for each in tried.values()) < 0.1
    assert tried[count].time <= 1.01 * min(each.time for each in tried.values())


def test_only_what_a_job_can_have_is_tried():
    assert set(chosen(pp=4, vpp=2, dp=2)[1]) == {8, 12, 16, 24, 32}  # at least 4 for each of the two ranks
    assert set(chosen(pp=4, vpp=2, dp=2, group_size=4)[1]) == {8, 16, 24, 32}
    assert set(chosen(cp=2, memory_known=False)[1]) == {8, 12, 16, 24, 32}
    assert set(chosen(cp=2, memory_known=False, refuses=(12, 16, 24, 32))[1]) == {8}  # with the least S_max, too
    assert set(chosen(cp=2, refuses=(1, 16))[1]) == {2, 4, 6, 8, 12, 24, 32}
    assert chosen(pp=4, packing=PaperPacking()) == (8, {})  # whose steps would vary in tokens by it
    assert set(chosen(pp=4, refuses=(1, 2, 4, 6, 12, 16, 24, 32))[1]) == {8}


@pytest.mark.parametrize("packing", [AdaptivePacking(), DELAY], ids=["same step", "with delay"])
def test_a_run_of_few_steps_or_none(packing):
    """Those that a longer run would not count are all there is."""
    data = samples(LENGTHS[:600], context_length=WINDOW)
    assert 8 * 4 < len(data) < 8 * WARM_UP
    tried = chosen(cp=2, packing=packing, data=data, first_sample=len(data) - 12)[1]
    assert len(tried) > 2 and all(each.time > 0 for each in tried.values())
    assert chosen(cp=2, packing=packing, data=data, first_sample=len(data)) == (8, {})


def test_of_equal_times_the_least_delay_is_chosen(monkeypatch):
    """A time within 1 % of the best is equal, and so are delays to a hundredth of a step: then the time decides."""
    found = {8: (1.0, 0.5), 12: (1.009, 0.104), 16: (1.005, 0.101), 24: (1.008, 0.2), 32: (1.02, 0.0)}
    monkeypatch.setattr(micro_batches, "_measured", lambda job, *data: found.get(job.num_micro_batches, (2.0, 0.0)))
    assert chosen(pp=4, packing=DELAY)[0] == 16
    found[32] = 1.01, 0.0
    assert chosen(pp=4, packing=DELAY)[0] == 32


def test_few_ranks_stand_for_many(monkeypatch):
    """What is predicted is that of a job with fewer ranks, which have as many micro-batches each."""
    seen = []
    measured = micro_batches._measured
    monkeypatch.setattr(micro_batches, "_measured", lambda job, *data: seen.append(job) or measured(job, *data))
    count, tried = chosen(windows=64, pp=2, dp=16)
    assert {(each.parallel.dp, each.global_batch_size) for each in seen} == {(8, 32)}
    assert {2 * each.num_micro_batches for each in seen} == set(tried)
    few = chosen(windows=32, pp=2, dp=8)
    assert count == 2 * few[0] and [each.time for each in tried.values()] == [each.time for each in few[1].values()]


def test_the_least_longest_micro_batch_is_tried_beside_the_default():
    """It packs otherwise, and takes less memory; of every number the faster one is told."""

    def best(**sizes):
        jobs = []

        def make(num_micro_batches=16, tight=False):
            jobs.append(job(context_length=WINDOW, global_batch_size=16, num_micro_batches=num_micro_batches,
                            packing=AdaptivePacking(), tight=tight, pp=4, dp=2, **sizes))  # fmt: skip
            return jobs[-1]

        found, tried = predictions(make(), make, DATA, memory_known=True)
        return found, {each.job.num_micro_batches: each for each in tried}, jobs

    found, tried, jobs = best()
    assert {each.max_tokens for each in jobs if each.num_micro_batches == 16} == {WINDOW, 5 * WINDOW // 4}
    assert {each.max_tokens for each in jobs if each.num_micro_batches == 8} == {2 * WINDOW, 5 * WINDOW // 2}
    both = [each for each in jobs if each.num_micro_batches == 16]
    times = {each.max_tokens: time_per_work(each, each, DATA, 0) for each in both}
    assert tried[16].job.max_tokens == min(times, key=lambda tokens: times[tokens]) and len(times) == 2
    assert time_per_work(found, found, DATA, 0) <= min(times.values()) * 1.01
    # A given one is not changed.
    given = best(settings=PlanSettings(max_tokens=2 * WINDOW))[1]
    assert {each.job.max_tokens for each in given.values()} == {2 * WINDOW}


def test_recomputation_that_is_fastest_within_memory(monkeypatch):
    """Little memory: all of a virtual stage; more: MLPs; enough: nothing, and no other way is tried then."""
    sizes = {"context_length": WINDOW, "global_batch_size": 16, "packing": AdaptivePacking(), "pp": 4, "vpp": 2}
    free = job(**sizes)
    needs = {way: peak_bytes(replace(free, recompute=way)) for way in ways(free)}
    nothing, mlp, whole = ways(free)
    assert (nothing.flags, mlp.modules, whole.method) == ("", ("mlp",), "block")
    assert needs[nothing] > needs[mlp] > needs[whole]

    def tried(budget):
        def make(**given):
            return job(**sizes | {"budget_bytes": budget} | given)

        return [each.recompute for each, _ in recomputed(free, make, DATA, budget)]

    assert tried(2 * needs[nothing]) == [nothing]
    assert tried(needs[whole]) == [whole]
    assert tried(needs[mlp])[0] in (nothing, mlp) and whole not in tried(needs[mlp])
    assert tried(needs[whole] / 100) == []
    # The fastest comes first, whatever is tried before.
    monkeypatch.setattr(alternatives, "worth_trying", lambda *given: [whole, nothing])
    other = replace(free, recompute=whole, crossover_tokens=2 * free.crossover_tokens)
    found = recomputed(free, lambda recompute, **given: other if recompute == whole else free, DATA, 2 * needs[nothing])
    assert [each for each, _ in found] == [free, other]
    assert [time for _, time in found] == [time_per_work(each, free, DATA, 0) for each, _ in found]


def test_times_per_work_are_of_all_ranks():
    """Twice the ranks with as many windows each take half as long for the same work."""
    few, many = (
        job(context_length=WINDOW, global_batch_size=4 * dp, num_micro_batches=4 * dp, packing=AdaptivePacking(), dp=dp)
        for dp in (8, 32)
    )
    assert time_per_work(few, few, DATA, 0) == pytest.approx(4 * time_per_work(many, few, DATA, 0))


def test_work_is_counted_by_the_unit():
    """It is linear in the crossover length."""
    given = job(context_length=WINDOW, global_batch_size=8, num_micro_batches=8, packing=AdaptivePacking())
    units = [replace(given, crossover_tokens=1000 * n) for n in (1, 2, 5)]
    one, two, five = (1 / time_per_work(given, unit, DATA, 0) for unit in units)
    assert five - two == pytest.approx(3 * (two - one)) and two > one


@pytest.mark.parametrize(
    ("times", "budget", "best"),
    [
        ({1: 0.995, 4: 0.98, 8: 0.975}, 1e18, (4, 1 / 0.98)),  # by more than a percent each
        ({1: 0.9, 4: 0.8, 8: 0.7}, 0.0, (1, 1 / 0.9)),
        ({1: 1.1, 4: 1.0, 8: 0.5}, 1e18, (2, 1.0)),  # the next one tells of those behind it
    ],
)
def test_megatrons_micro_batch_size_is_another_only_if_clearly_faster(times, budget, best):
    alone = job(num_micro_batches=8, packing=MegatronPacking(), context_length=WINDOW)
    assert best_size(alone, 2, budget, (times | {2: 1.0}).get) == pytest.approx(best)
