"""Adaptive packing: nothing lost, S_max and the bound on delay never exceeded, both cores equal to the bit."""

import math
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_wlb.cost.work import document_work
from megatron_wlb.packing.adaptive import AdaptivePacking
from megatron_wlb.packing.adaptive_core import most_tokens
from megatron_wlb.plan import metrics, native
from megatron_wlb.plan.packer import make_packer
from megatron_wlb.plan.placement import rank_cost
from megatron_wlb.plan.stream import DocumentStream, Source
from tests.jobs import job

WINDOW = 512
LEAST_DELAY = 20
LAYOUTS = {"one rank": (1, 1, 1), "ranks": (None, 1, 1), "stages": (1, 4, 1), "virtual": (1, 4, 2), "both": (3, 2, 1)}
"""DP (as far as it divides M; None: M), PP, VPP."""


def stream_of(lengths, epochs=1):
    source = Source(lengths=np.asarray(lengths, np.int64))
    return DocumentStream([source], seed=0, context_length=WINDOW, shuffle=False, num_epochs=epochs)


def packer_of(lengths, *, n=4, windows=None, s_max=1.25, delay=LEAST_DELAY, epochs=1, layout=(None, 1, 1)):
    windows = windows or n
    described = job(
        packing=AdaptivePacking(max_delay_steps=delay),
        num_micro_batches=n,
        global_batch_size=windows,
        context_length=WINDOW,
        max_tokens=int(WINDOW * s_max) * max(1, -(-windows // n)),
        crossover_tokens=200,
        dp=math.gcd(layout[0] or n, n),
        pp=layout[1],
        vpp=layout[2] if n % layout[1] == 0 else 1,
    )
    return make_packer(stream_of(lengths, epochs), described)


def long_tail(count, seed=0):
    rng = np.random.default_rng(seed)
    body, tail = rng.lognormal(3, 0.8, count), 100 * (1 + rng.pareto(0.9, count))
    return np.clip(np.where(rng.random(count) < 0.03, tail, body), 1, WINDOW).astype(np.int64)


NASTY = {
    "ones": [1] * 3000,
    "windows": [WINDOW] * 40,
    "just over half of S_max": [330] * 60,
    "one giant": [WINDOW, *[5] * 900],
    "giants last": [*[5] * 900, *[WINDOW] * 7],
    "longer than the window": [3 * WINDOW + 7, 2, 2 * WINDOW, 900, 1],
    "one document": [7],
    "long tail": long_tail(1500),
    "alternating": [WINDOW, 1] * 40,
    "sixths": [WINDOW // 6] * 300,
}


@pytest.mark.parametrize("lengths", NASTY.values(), ids=NASTY)
@pytest.mark.parametrize("n", [1, 4, 33])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_nasty_data_is_packed_once_within_bounds_and_alike_by_both_cores(lengths, n, layout):
    check(lengths, n, 1.25, LEAST_DELAY, layout)


@given(
    lengths=st.lists(st.one_of(st.integers(1, 40), st.integers(1, WINDOW), st.just(WINDOW)), min_size=1, max_size=250),
    n=st.sampled_from([1, 2, 3, 4, 7, 16]),
    s_max=st.sampled_from([1.0, 1.1, 1.25, 2.0]),
    delay=st.integers(LEAST_DELAY, 30),
    layout=st.sampled_from(list(LAYOUTS.values())),
    windows=st.sampled_from([1, 4, 6, 16]),
)
def test_any_data_is_packed_once_within_bounds_and_alike_by_both_cores(lengths, n, s_max, delay, layout, windows):
    check(lengths, n, s_max, delay, layout, windows)


def check(lengths, n, s_max, delay, layout, windows=None):
    how = {"n": n, "s_max": s_max, "delay": delay, "layout": layout, "windows": windows}
    fast, reference = (packer_of(lengths, **how) for _ in range(2))
    seen = []
    while not fast.finished:
        step = fast.next()
        with patch.object(native, "core", None):
            expected = reference.next().packing
        np.testing.assert_array_equal(step.packing.documents, expected.documents)
        np.testing.assert_array_equal(step.packing.bounds, expected.bounds)
        assert len(step.packing) == n
        assert step.packing.documents["length"].sum() <= max(WINDOW, most_tokens((windows or n) * WINDOW, n))
        longest = int(WINDOW * s_max) * max(1, -(-(windows or n) // n))
        assert step.packing.sums(step.packing.documents["length"]).max() <= longest
        assert (step.step - step.packing.documents["arrival"]).max() <= delay
        for i in range(n):
            assert (np.diff(step.packing.micro_batch(i)["index"]) > 0).all()
        seen.append(step.packing.documents)
    documents = np.sort(np.concatenate(seen), order="index")
    pieces = stream_of(lengths).take(1 << 60)
    for name in ("index", "document", "offset", "length"):
        np.testing.assert_array_equal(documents[name], pieces[name])


@pytest.mark.parametrize("seed", range(12))
def test_the_tightest_bound_on_delay_holds_over_long_streams(seed):
    """Short streams do not show it: later documents must not overtake forced ones for ever."""
    rng = np.random.default_rng(seed)
    n, s_max = int(rng.integers(1, 5)), float(rng.choice([1.0, 1.1, 1.25]))
    kinds = rng.choice(WINDOW, int(rng.integers(2, 6))) + 1
    packer = packer_of(rng.choice(kinds, 3000), n=n, s_max=s_max, layout=list(LAYOUTS.values())[seed % len(LAYOUTS)])
    while not packer.finished:
        step = packer.next()
        assert (step.step - step.packing.documents["arrival"]).max() <= LEAST_DELAY


def corpora():
    """Lengths with few short documents among them, to each of which the balance must find partners; and web-like."""
    rng = np.random.default_rng(0)
    some, short = rng.random(8000) < 0.9, rng.integers(1, WINDOW // 8, 8000)
    return {
        "all half a window": np.full(2000, WINDOW // 2),
        "all a quarter": np.full(4000, WINDOW // 4),
        "nine in ten a quarter": np.where(some, WINDOW // 4, short),
        "all two fifths": np.full(3000, int(0.4 * WINDOW)),
        "from an eighth to a half": rng.integers(WINDOW // 8, WINDOW // 2, 6000),
        "log-normal": np.clip(rng.lognormal(3.7, 1.3, 60_000), 1, WINDOW).astype(np.int64),
    }


@pytest.mark.parametrize("lengths", corpora().values(), ids=corpora())
def test_training_keeps_up_with_the_data_and_not_ahead_of_it(lengths):
    """Over endless epochs: as many tokens a step as there should be, and nothing waits longer than it may."""
    n = 16
    packer = packer_of(lengths, n=n, epochs=None)
    drawn = np.empty(0, np.int64)  # step in which the stream gave each document
    tokens = 0
    for k in range(300):
        step = packer.next()
        drawn = np.append(drawn, np.full(len(step.drawn), k))
        documents = step.packing.documents
        assert (k - drawn[documents["index"]]).max() <= LEAST_DELAY
        tokens += documents["length"].sum()
        assert step.state["stream"]["position"] - (k + 1) * n * WINDOW <= 5 * n * WINDOW
    assert abs(tokens / (300 * n * WINDOW) - 1) < 0.05


def test_it_balances_better_than_original_order_with_steady_tokens():
    packer = packer_of(long_tail(60_000), epochs=None, delay=25)
    steps = [packer.next() for _ in range(200)][20:]
    work = [s.packing.sums(document_work(s.packing.documents["length"], 200)) for s in steps]
    described = job(context_length=WINDOW, crossover_tokens=200)
    original = [metrics.original_work(s.drawn, described) for s in steps]
    assert np.mean([metrics.imbalance(w) for w in work]) < 1.02 < np.mean([metrics.imbalance(w) for w in original])
    tokens = [s.packing.documents["length"].sum() for s in steps]
    assert np.std(tokens) / np.mean(tokens) < 0.03


@pytest.mark.parametrize(
    ("layout", "n"), [((1, 1, 1), 8), ((1, 1, 1), 1), ((2, 1, 1), 8), ((2, 1, 1), 2)], ids=lambda value: str(value)
)
def test_documents_run_as_they_come_where_nothing_waits_for_another(layout, n):
    packer = packer_of(long_tail(60_000), n=n, windows=8, epochs=None, layout=layout)
    late = []
    for _ in range(50):
        step = packer.next()
        work = step.packing.sums(document_work(step.packing.documents["length"], 200))
        ranks = work.reshape(layout[0], -1).sum(axis=1)
        assert ranks.max() <= 1.01 * ranks.mean()
        late += [metrics.delays(step.packing, step.step)]
    tokens = sum(sum(each.values()) for each in late)
    assert sum(max(0, steps) * count for each in late for steps, count in each.items()) <= 0.05 * tokens


def test_a_pipeline_takes_less_time_with_more_micro_batches():
    """By `placement.rank_cost`, for the same tokens; and less than in the order of the stream."""
    costs = {}
    for n in (4, 8, 16):
        packer = packer_of(long_tail(60_000), n=n, windows=4, s_max=1.25, epochs=None, layout=(1, 4, 1))
        described, cost, total = job(num_micro_batches=n, pp=4), 0, 0
        for _ in range(100):
            packing = packer.next().packing
            work = packing.sums(document_work(packing.documents["length"], 200))
            cost, total = cost + rank_cost(work, described), total + work.sum()
        costs[n] = cost / total
    assert costs[16] < 0.97 * costs[8] < 0.97 * 0.97 * costs[4]
