"""Adaptive packing: both cores equal to the bit, nothing lost, S_max and the bound on delay never exceeded."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_wlb.config import PACKING_MODES as MODES
from megatron_wlb.config import SHORTEST_DELAY_BOUND
from megatron_wlb.plan import metrics
from megatron_wlb.plan.packer import Packer
from megatron_wlb.plan.packing import make_policy
from megatron_wlb.plan.stream import DocumentStream, Source
from megatron_wlb.plan.workload import document_work

WINDOW = 512


def make_packer(lengths, *, use_native, n=4, mode="constant-tokens", s_max=1.25, delay=12, epochs=1, crossover=200):
    policy = make_policy(
        "adaptive",
        num_micro_batches=n,
        context_length=WINDOW,
        max_tokens=int(WINDOW * s_max),
        crossover_tokens=crossover,
        mode=mode,
        max_delay_steps=delay,
        use_native=use_native,
    )
    source = Source(pairs=np.asarray(lengths, np.int64))
    stream = DocumentStream([source], seed=0, context_length=WINDOW, shuffle=False, num_epochs=epochs)
    return Packer(
        stream, policy, num_micro_batches=n, context_length=WINDOW, fingerprint="data", policy_name="adaptive"
    )


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
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("n", [1, 4, 33])
def test_nasty_data_is_packed_once_within_bounds_and_alike_by_both_cores(lengths, mode, n):
    check(lengths, mode, n, 1.25, 12)


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.one_of(st.integers(1, 40), st.integers(1, WINDOW), st.just(WINDOW)), min_size=1, max_size=250),
    mode=st.sampled_from(MODES),
    n=st.sampled_from([1, 2, 3, 4, 7, 16]),
    s_max=st.sampled_from([1.0, 1.1, 1.25, 2.0]),
    delay=st.integers(SHORTEST_DELAY_BOUND, 20),
)
def test_any_data_is_packed_once_within_bounds_and_alike_by_both_cores(lengths, mode, n, s_max, delay):
    check(lengths, mode, n, s_max, delay)


def check(lengths, mode, n, s_max, delay):
    native, python = (
        make_packer(lengths, use_native=u, mode=mode, n=n, s_max=s_max, delay=delay) for u in (True, False)
    )
    seen = []
    while not native.finished:
        step, reference = native.next(), python.next()
        np.testing.assert_array_equal(step.packing.documents, reference.packing.documents)
        np.testing.assert_array_equal(step.packing.bounds, reference.packing.bounds)
        assert len(step.packing) == n
        assert step.packing.sums(step.packing.documents["length"]).max() <= int(WINDOW * s_max)
        assert (step.step - step.packing.documents["arrival"]).max() <= delay
        for i in range(n):
            assert (np.diff(step.packing.micro_batch(i)["index"]) > 0).all()
        seen.append(step.packing.documents)
    assert python.finished
    with pytest.raises(StopIteration):
        native.next()
    documents = np.sort(np.concatenate(seen), order="index")
    np.testing.assert_array_equal(documents["index"], np.arange(len(documents)))
    pieces = DocumentStream(
        [Source(pairs=np.asarray(lengths, np.int64))], seed=0, context_length=WINDOW, shuffle=False, num_epochs=1
    ).take(1 << 60)
    for name in ("document", "offset", "length"):
        np.testing.assert_array_equal(documents[name], pieces[name])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(12))
def test_the_tightest_bound_on_delay_holds_over_long_streams(seed, mode):
    """Short streams do not show it: later documents must not overtake forced ones for ever."""
    rng = np.random.default_rng(seed)
    n, s_max = int(rng.integers(1, 5)), float(rng.choice([1.0, 1.1, 1.25]))
    kinds = rng.choice(WINDOW, int(rng.integers(2, 6))) + 1
    lengths = rng.choice(kinds, 3000)
    packer = make_packer(lengths, use_native=True, n=n, s_max=s_max, mode=mode, delay=SHORTEST_DELAY_BOUND)
    while not packer.finished:
        step = packer.next()
        assert (step.step - step.packing.documents["arrival"]).max() <= SHORTEST_DELAY_BOUND


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
@pytest.mark.parametrize("mode", MODES)
def test_training_keeps_up_with_the_data_and_not_ahead_of_it(lengths, mode):
    """Over endless epochs: as many tokens a step as there should be, and nothing waits longer than it may."""
    n, delay = 16, SHORTEST_DELAY_BOUND
    packer = make_packer(lengths, use_native=True, n=n, mode=mode, delay=delay, epochs=None)
    drawn = np.empty(0, np.int64)  # step in which the stream gave each document
    tokens = 0
    for k in range(300):
        step = packer.next()
        stream = step.state["stream"]
        drawn = np.append(drawn, np.full(stream["index"] - len(drawn), k))
        documents = step.packing.documents
        assert (k - drawn[documents["index"]]).max() <= delay
        tokens += documents["length"].sum()
        assert stream["position"] - (k + 1) * n * WINDOW <= 3 * n * WINDOW
    assert abs(tokens / (300 * n * WINDOW) - 1) < 0.05


@pytest.mark.parametrize("use_native", [True, False], ids=["native", "python"])
@pytest.mark.parametrize("mode", MODES)
def test_a_run_resumed_at_any_step_plans_the_same(use_native, mode):
    lengths = long_tail(1200)
    packer = make_packer(lengths, use_native=use_native, mode=mode, epochs=None)
    steps = [packer.next() for _ in range(25)]
    for t in (0, 7, 15):
        resumed = make_packer(lengths, use_native=use_native, mode=mode, epochs=None)
        resumed.load_state(json.loads(json.dumps(steps[t].state)))
        for expected in steps[t + 1 : t + 9]:
            step = resumed.next()
            np.testing.assert_array_equal(step.packing.documents, expected.packing.documents)
            np.testing.assert_array_equal(step.packing.bounds, expected.packing.bounds)
            assert step.state == expected.state


@pytest.mark.parametrize("n", [2, 8])
def test_another_number_of_micro_batches_loses_nothing(n):
    lengths = long_tail(1500)
    packer = make_packer(lengths, use_native=True)
    before = [packer.next() for _ in range(5)]
    resumed = make_packer(lengths, use_native=True, n=n)
    resumed.load_state(before[-1].state)
    after = []
    while not resumed.finished:
        after.append(resumed.next())
    documents = np.concatenate([s.packing.documents for s in before + after])
    np.testing.assert_array_equal(np.sort(documents["index"]), np.arange(len(lengths)))
    assert all(len(s.packing) == n for s in after)


def test_it_balances_better_than_original_order_with_steady_tokens():
    packer = make_packer(long_tail(60_000), use_native=True, epochs=None, delay=25)
    steps = [packer.next() for _ in range(200)][20:]
    work = [s.packing.sums(document_work(s.packing.documents["length"], 200)) for s in steps]
    original = [s.original.sums(document_work(s.original.documents["length"], 200)) for s in steps]
    assert np.mean([metrics.imbalance(w) for w in work]) < 1.02 < np.mean([metrics.imbalance(w) for w in original])
    tokens = [s.packing.documents["length"].sum() for s in steps]
    assert np.std(tokens) / np.mean(tokens) < 0.03


@pytest.mark.parametrize("use_native", [True, False], ids=["native", "python"])
def test_refusals(use_native):
    with pytest.raises(ValueError, match="unknown mode 'fast' of adaptive packing; choose one of constant-tokens"):
        make_packer([5], use_native=use_native, mode="fast")
    with pytest.raises(ValueError, match="max_delay_steps is 11; adaptive packing can guarantee 12 or more"):
        make_packer([5], use_native=use_native, delay=11)
    packer = make_packer([5], use_native=use_native)
    column = np.array([WINDOW * 2], np.int64)
    with pytest.raises(ValueError, match=f"a document of {WINDOW * 2} tokens exceeds max_tokens {WINDOW * 5 // 4}"):
        packer._policy._core.add(np.zeros(1, np.int64), column, column, np.zeros(1, np.int64))
