"""What fits memory: all that Megatron's own run of the same flags fits, and by default as much as there is room for."""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

from benchmarks.step_time import CASES, LAYOUTS, REMEMBERED, job_of
from megatron_wlb.describe import make
from megatron_wlb.describe.flags import PlanSettings
from megatron_wlb.describe.make import default_max_tokens
from megatron_wlb.hardware.profile import load_profile
from megatron_wlb.job import Parallel, Recompute, Sharding
from megatron_wlb.layers.latent import LatentAttention
from megatron_wlb.model import MODELS
from megatron_wlb.packing.megatron import without_wlb
from megatron_wlb.simulate.memory import largest_max_tokens, peak_bytes

WAYS = (
    Recompute(),
    Recompute(granularity="selective", modules=("mlp",)),
    Recompute(granularity="full", method="block", num_layers=1),
    Recompute(granularity="full", method="uniform", num_layers=1),
)
ONE_EACH = dict.fromkeys((*CASES, *REMEMBERED))


@pytest.mark.parametrize("recompute", WAYS, ids=lambda way: way.flags or "none")
def test_what_megatron_holds_is_held(recompute):
    """By default nothing is refused in the very memory that Megatron's own run needs.

    In every job of `step_time`, and with each way of recomputing in one of every layout.
    """
    turn, jobs = WAYS.index(recompute), {layout: [] for layout in LAYOUTS}
    for case in ONE_EACH:
        jobs[case.layout].append(case)
    for case in ONE_EACH if not turn else [of[turn % len(of)] for of in jobs.values()]:
        free = job_of(case, recompute=recompute)
        budget = peak_bytes(without_wlb(free))
        for tight in (False, True):
            held = job_of(case, recompute=recompute, budget_bytes=budget, tight=tight)
            assert held.num_micro_batches == free.num_micro_batches
            assert case.window <= held.max_tokens <= default_max_tokens(free), case.title
            # The exchange of K and V, and stages whose transfers overlap, take at most so much more.
            assert peak_bytes(held) <= max(1.03 * budget, budget + 2**29), case.title
        with pytest.raises(ValueError, match="and Megatron's own do not fit either; "):
            job_of(case, recompute=recompute, budget_bytes=budget / 2)


def test_the_longest_micro_batch_falls_to_what_fits():
    case = next(each for each in CASES if each.title == "70B PP4, 16 of 128K")
    free = job_of(case)
    short = replace(free, parallel=replace(free.parallel, group_size=free.parallel.pp))
    for share, expected in ((1.1, None), (1.4, default_max_tokens(free))):
        budget = share * peak_bytes(without_wlb(free))
        job = job_of(case, budget_bytes=budget)
        assert job.max_tokens == (expected or largest_max_tokens(short, budget))
        assert case.window <= job.max_tokens <= default_max_tokens(free)
        assert job_of(case, budget_bytes=budget, tight=True).max_tokens == case.window
        assert peak_bytes(job) <= budget
    budget, settings = 1.1 * peak_bytes(without_wlb(free)), PlanSettings(max_tokens=163840)
    with pytest.raises(ValueError, match=r"micro-batches of 163840 tokens \(S_max\) need more memory"):
        job_of(case, budget_bytes=budget, settings=settings)


def test_micro_batches_of_several_windows_are_not_held_where_single_ones_are():
    case = next(each for each in CASES if each.title == "70B PP4, 16 of 128K")
    budget = peak_bytes(without_wlb(job_of(case)))
    with pytest.raises(ValueError, match="less than the mean micro-batch of "):
        job_of(case, budget_bytes=budget, num_micro_batches=job_of(case).num_micro_batches // 2)


def test_what_fits_nowhere_says_with_what_it_would():
    """The least recomputation, or else the budget."""
    case = next(each for each in CASES if each.title == "405B PP14, VPP 9, 14 of 128K")
    free = job_of(case)
    ring = peak_bytes(without_wlb(free))

    def said(share, **changes):
        with pytest.raises(ValueError, match="do not fit either") as caught:
            job_of(case, budget_bytes=share * ring, **changes)
        return str(caught.value)

    assert said(0.7).endswith("; with --recompute-granularity selective --recompute-modules mlp they do")
    assert said(0.2).endswith(
        "; with --recompute-granularity full --recompute-method block --recompute-num-layers 1 they do"
    )
    assert job_of(case, budget_bytes=0.2 * ring, recompute=WAYS[2]).max_tokens >= case.window
    budget = float(re.search(r"takes least, it needs --wlb-memory-budget ([\d.]+)$", said(0.05))[1])
    job_of(case, budget_bytes=budget * 2**30, recompute=WAYS[2])
    with pytest.raises(ValueError, match="do not fit either"):
        job_of(case, budget_bytes=0.85 * budget * 2**30, recompute=WAYS[2])


@pytest.mark.parametrize(("time", "chosen"), [(0.995, "shared"), (0.985, "latents")])
def test_latents_travel_where_they_gain_a_percent(time, chosen, monkeypatch):
    times = {"latents": time, "shared": 1.0}
    monkeypatch.setattr(make, "shard", lambda lengths, job: SimpleNamespace(time=times[job.cp_exchange]))
    monkeypatch.setattr(LatentAttention, "expands_us", lambda self, job: 0.0)
    sizes = {"context_length": 1 << 15, "global_batch_size": 8, "parallel": Parallel(tp=8, cp=8)}
    assert make.make_job(model=MODELS["deepseek-v3"], default_profile="h100-fa2", **sizes).cp_exchange == chosen


def test_what_is_given_counts_before_settings_and_these_before_defaults():
    def made(**given):
        sizes = {"context_length": 64, "global_batch_size": 6, "sharding": Sharding(cp_sharding="per-document")}
        found = make.make_job(model=MODELS["550m"], **sizes, default_profile="a100-fa2", **given)
        assert found.sharding == sizes["sharding"] != Sharding()
        return found.num_micro_batches, found.max_tokens, found.profile.name

    settings = PlanSettings(micro_batches=2, max_tokens=256, profile="h100-fa2")
    fields = {"num_micro_batches": 3, "max_tokens": 512, "profile": load_profile("b200-cudnn-2025")}
    assert made() == (6, 80, "a100-fa2")
    assert made(settings=settings) == (2, 256, "h100-fa2")
    assert made(settings=settings, **fields) == (3, 512, "b200-cudnn-2025")
