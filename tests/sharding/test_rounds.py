"""Rounds of attention: what is chosen is what is predicted, and nothing that was tried is faster."""

import functools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.lengths import f2
from megatron_wlb.cost.attention import attention_kernels
from megatron_wlb.documents import Keys, Near, Share
from megatron_wlb.hardware.profile import load_profile
from megatron_wlb.model import MODELS
from megatron_wlb.sharding import select
from megatron_wlb.sharding.routing import Ownership, moved_rows
from megatron_wlb.sharding.select import attention_times, round_costs, shard
from tests.jobs import MODEL, job
from tests.reference.chunks import per_document, per_sequence
from tests.reference.rounds import in_rounds, regrouped, round_times

H100 = load_profile("h100-fa2")
WINDOWED = replace(MODEL, window=1 << 20, pattern="W")


def job_of(cp, **changes):
    return job(**{"cp": cp, "context_length": 3 << 16, "profile": H100} | changes)


def predicted(plan, given_job):
    """Forward and backward with the exchange, us."""
    busy, added = attention_times(plan, given_job)
    return sum(float(each.max()) + more for each, more in zip(busy, added, strict=True))


@st.composite
def micro_batches(draw):
    cp = draw(st.sampled_from([2, 3, 4, 8]))
    lengths = draw(st.lists(st.one_of(st.integers(1, 500), st.integers(1, 60_000)), min_size=1, max_size=12))
    lengths[-1] += -sum(lengths) % (2 * cp)
    return np.array(lengths, np.int64), cp


@given(st.sampled_from([per_sequence, per_document]), micro_batches(), st.booleans())
def test_what_is_chosen_is_what_is_predicted(sharding, case, windowed):
    lengths, cp = case
    given_job = job_of(cp, model=WINDOWED if windowed else MODEL)
    plan = sharding(lengths, cp)
    chosen = in_rounds(plan, round_costs(given_job))
    assert chosen.time == pytest.approx(predicted(chosen, given_job))
    assert chosen.time <= predicted(regrouped(plan), given_job) * (1 + 1e-9)
    assert not (windowed and chosen.key_bounds)
    assert not chosen.key_bounds or (chosen.key_bounds[0], chosen.key_bounds[-1]) == (0, 1)


@given(micro_batches(), st.sampled_from([0, 1, 127, 1023, 30_000, 1 << 20]))
def test_in_a_window_all_that_is_exchanged_moves_at_once(case, window):
    """As by the counts of `KernelModel`, whose hidden tiles are not measured there, and rows of `moved_rows`."""
    lengths, cp = case
    given_job = job_of(cp, profile=load_profile("h100-cudnn"))
    plan, costs = shard(lengths, given_job), round_costs(given_job, window)
    counts = [[costs.forward.count_shard(part) for part in (s.calls[:1], s.calls[1:])] for s in plan.shards]
    whole, shared = np.moveaxis(np.array(counts), 0, -1)
    own, during = ([k.time(*part) for k in (costs.forward, costs.backward)] for part in (whole, shared))
    moved = costs.exchange.times(np.array([float(moved_rows(plan, window).max())]))
    prefetch = costs.exchange.prefetch * (int(plan.lengths.sum()) // cp)
    ends = round_times(own, [each[None] for each in during], moved, prefetch=prefetch)
    busy, added = attention_times(plan, given_job, window)
    for one, other, more, end, kernels in zip(own, during, added, ends, busy, strict=True):
        np.testing.assert_array_equal(kernels, one + other)
        assert more == float(end) - float(kernels.max())


def test_without_a_unit_of_time_shared_documents_go_together():
    plan = in_rounds(per_sequence(np.array([8, 100, 20], np.int64), 2), round_costs(job(cp=2)))
    assert plan.rounds == (Keys.WHOLE, Keys.SHARED)


def test_in_a_window_documents_in_shares_go_together():
    plan = in_rounds(per_sequence(np.array([8, 100, 20], np.int64), 2), round_costs(job(cp=2)))
    in_shares = replace(plan, key_bounds=(0.0, 0.5, 1.0))
    shares = (Share(0.0, 0.5), Share(0.5, 1.0))
    assert in_shares.rounds_of(None) == in_shares.rounds == (Keys.WHOLE, Keys.OWN, *shares)
    assert in_shares.rounds_of(4) == plan.rounds_of(4) == (Keys.WHOLE, Near(4))


def test_a_job_shards_for_the_least_time_of_both():
    """Documents on ranks of different nodes: all that are shared come in shares."""
    given_job = job_of(8, tp=8, model=MODELS["llama2-70b"])
    lengths = np.array([100_000, 8_000, 8_000, 7_000, 4_072, 4_000], np.int64)
    plan = shard(lengths, given_job)
    assert plan.key_bounds and Ownership(plan).is_shared.sum() > 1
    assert plan.time == pytest.approx(predicted(plan, given_job))


def test_hidden_tiles_are_paid_for_where_documents_go_together_and_so_they_go_in_parts():
    """Own squares, and keys before them, have none."""
    paying, lengths = load_profile("h100-cudnn"), np.array([100_000] * 2 + [10_000] * 20, np.int64)
    free = replace(paying, backward=replace(paying.backward, hidden=0.0))
    sizes = {"tp": 8, "model": MODELS["codellama-34b"], "context_length": 1 << 19}
    without, given_job = (job_of(8, profile=profile, **sizes) for profile in (free, paying))
    together, apart = shard(lengths, without), shard(lengths, given_job)
    assert not together.key_bounds and apart.key_bounds
    (_, before), _ = attention_times(together, without)
    (_, after), _ = attention_times(together, given_job)
    kernel = attention_kernels(given_job)[1]
    hidden = np.array([kernel.count_shard(each.calls[1:])[-1] for each in together.shards])
    np.testing.assert_allclose(after - before, kernel.heads * kernel.hidden * hidden)
    assert hidden.min() > 0 and predicted(apart, given_job) < predicted(together, given_job)
    for direction, same in zip(attention_times(apart, given_job)[0], attention_times(apart, without)[0], strict=True):
        np.testing.assert_array_equal(direction, same)


TRIED = {
    "KEY_SPLITS": [select.KEY_SPLITS[:i] + select.KEY_SPLITS[i + 1 :] for i in range(len(select.KEY_SPLITS))],
    "MOST_SHARES": [select.MOST_SHARES[:i] + select.MOST_SHARES[i + 1 :] for i in range(len(select.MOST_SHARES))],
    "EXPOSED_SHARE": [1 / 4, 1],
}
JOBS = (
    ("llama2-7b", 2, 1 << 17, 1),
    ("llama2-7b", 8, 1 << 17, 1),
    ("llama2-7b", 4, 1 << 17, 1),
    ("codellama-34b", 32, 1 << 19, 1),
    ("llama3-8b", 16, 1 << 17, 4),
    ("llama3-8b", 16, 1 << 17, 8),
    ("llama3-8b", 8, 1 << 19, 4),
)
"""Model, CP, context window, and windows of a micro-batch."""


def time_of(model, cp, window, together):
    """Attention of 32 windows of F2."""
    given_job = job_of(cp, tp=8, model=MODELS[model], context_length=window, profile=load_profile("h100-cudnn"))
    ends = np.union1d(np.cumsum(f2(4000, 0, window)), np.arange(1, 33) * window)
    lengths = np.diff(ends[ends <= 32 * window], prepend=0)
    windows = np.split(lengths, np.searchsorted(ends, np.arange(together, 32, together) * window, side="right"))
    round_costs.cache_clear()
    return sum(shard(each, given_job).time for each in windows)


usual = functools.cache(time_of)


def test_what_is_added_up_has_the_size_of_a_value():
    """A latent head of DeepSeek-V3 has 192 values of a key, and 128 of a value."""
    given = job(model=MODELS["deepseek-v3"], cp=2, profile=load_profile("h100-fa2"))
    costs = round_costs(given)
    rate = given.profile.memory_gb_per_s * 1e3
    assert costs.merge == pytest.approx(3 * 2 * 128 * costs.forward.tile_rows / rate)


@pytest.mark.parametrize(("name", "other"), [(name, other) for name, others in TRIED.items() for other in others])
def test_everything_that_is_tried_pays(name, other, monkeypatch):
    """Otherwise attention of one of these jobs is slower by 0.5 % at least."""
    before = [usual(*each) for each in JOBS]
    monkeypatch.setattr(select, name, other)
    pays = any(time_of(*each) > 1.005 * time for each, time in zip(JOBS, before, strict=True))
    round_costs.cache_clear()
    assert pays
