"""Adaptive packing with a delay: nothing lost, S_max and the bound kept, equal to its reference to the bit."""

import math
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.lengths import f2, packings
from megatron_wlb import _native
from megatron_wlb.documents import DOCUMENT, document_work
from megatron_wlb.job import MAX_TOKENS
from megatron_wlb.packing.adaptive import AdaptivePacking
from megatron_wlb.packing.delay import Limits
from megatron_wlb.packing.place import Sizes
from megatron_wlb.plan.metrics import imbalance
from tests.covering import covering
from tests.jobs import MODEL, job, packer, samples
from tests.packing.steps import steps_of
from tests.reference import delay, place

WINDOW = 512
LEAST_DELAY = 20
LAYOUTS = {"one rank": (1, 1, 1), "ranks": (None, 1, 1), "stages": (1, 4, 1), "virtual": (1, 4, 2), "both": (3, 2, 1)}
"""DP (as far as it divides M; None: M), PP, VPP."""


def described(*, n, s_max=1.25, delay=LEAST_DELAY, layout=(None, 1, 1), windows=None):
    windows = windows or n
    return job(
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


def test_windows_are_as_even_as_no_windows():
    """By their work; planned by that of no windows, micro-batches are less even, with a delay by 0.03 and more.

    Five of six layers have one, as in Gemma 3 27B, whose crossover by FLOPs this is.
    """

    def uneven(delay, planned, true):
        jobs = [
            job(
                model=replace(MODEL, num_layers=62, window=1023, pattern=pattern),
                packing=AdaptivePacking(max_delay_steps=delay),
                num_micro_batches=16,
                context_length=1 << 17,
                crossover_tokens=103_509,
                pp=4,
                dp=4,
            )
            for pattern in (planned, true)
        ]
        batches = packings(f2(40_000, 0), jobs[0], 80, skip=12)
        return np.mean([imbalance(batch.sums(jobs[1].work(batch.documents["length"]))) for batch in batches])

    windows, none = "WWWWW*", "*"
    assert uneven(0, windows, windows) <= min(uneven(0, none, none) + 0.005, uneven(0, none, windows) - 0.005)
    assert uneven(32, windows, windows) <= min(1.03, uneven(32, none, windows) - 0.03)


def long_tail(count):
    rng = np.random.default_rng(0)
    body, tail = rng.lognormal(3, 0.8, count), 100 * (1 + rng.pareto(0.9, count))
    return np.clip(np.where(rng.random(count) < 0.03, tail, body), 1, WINDOW).astype(np.int64)


def both(*arguments, released=_native.release_documents):
    """The documents of a step, in C++ and by the reference alike."""
    fast = released(*arguments)
    for ours, theirs in zip(fast, delay.release(*arguments), strict=True):
        assert ours.dtype == theirs.dtype == np.int64
        np.testing.assert_array_equal(ours, theirs)
    return fast


NASTY = {
    "ones": [1] * 3000,
    "windows": [WINDOW] * 40,
    "just over half of S_max": [330] * 60,
    "one giant": [WINDOW, *[5] * 900],
    "giants last": [*[5] * 900, *[WINDOW] * 7],
    "longer than the window": [3 * WINDOW + 7, 2, 2 * WINDOW, 900, 1],
    "one document": [WINDOW + 1],
    "long tail": long_tail(1500),
    "alternating": [WINDOW, 1] * 40,
    "sixths": [WINDOW // 6] * 300,
}


@covering(lengths=NASTY, n=[1, 4, 33], layout=LAYOUTS)
def test_nasty_data_is_packed_once_within_bounds_and_as_by_the_reference(lengths, n, layout):
    check(lengths, n, 1.25, LEAST_DELAY, layout)


@given(
    lengths=st.lists(st.one_of(st.integers(1, 40), st.integers(1, WINDOW), st.just(WINDOW)), max_size=250),
    n=st.sampled_from([1, 2, 3, 4, 7, 16]),
    s_max=st.sampled_from([1.0, 1.1, 1.25, 2.0]),
    delay=st.integers(LEAST_DELAY, 30),
    layout=st.sampled_from(list(LAYOUTS.values())),
    windows=st.sampled_from([1, 4, 6, 16]),
)
def test_any_data_is_packed_once_within_bounds_and_as_by_the_reference(lengths, n, s_max, delay, layout, windows):
    check([*lengths, WINDOW + 1], n, s_max, delay, layout, windows)


@patch.object(_native, "release_documents", both)
def check(lengths, n, s_max, delay, layout, windows=None):
    given = described(n=n, s_max=s_max, delay=delay, layout=layout, windows=windows)
    seen = [np.empty(0, DOCUMENT)]
    for step in steps_of(packer(given, lengths, seed=None)):
        assert len(step.batch) == n
        assert step.batch.documents["length"].sum() <= max(WINDOW, given.packing.most_step_tokens(given))
        assert step.batch.sums(step.batch.documents["length"]).max() <= given.max_tokens
        assert (step.step - step.batch.documents["arrival"]).max() <= delay
        for i in range(n):
            assert (np.diff(step.batch.micro_batch(i)["index"]) > 0).all()
        seen.append(step.batch.documents)
    documents, data = np.sort(np.concatenate(seen), order="index"), samples(lengths, context_length=WINDOW, seed=None)
    documents["arrival"] = 0
    np.testing.assert_array_equal(documents, data.documents(0, len(data)))


@st.composite
def pools(draw):
    """S_max, lengths and crossover: few lengths and few values, so that ties and exact fits are common."""
    max_tokens = draw(st.sampled_from([1, 2, 7, 10, 64, 1000, MAX_TOKENS]))
    lengths = st.one_of(
        st.integers(1, max_tokens),
        st.sampled_from(sorted({1, max_tokens, max(1, max_tokens // 2), max(1, max_tokens - 1)})),
    )
    return max_tokens, draw(st.lists(lengths, max_size=40)), draw(st.sampled_from([1, 7, 50_000, 1 << 35]))


@settings(max_examples=300)
@given(
    pools(),
    st.integers(1, 9),
    st.integers(0, 40),
    st.sampled_from([0, -(2**63), 2**63 - 1, 13, -13]),
    st.tuples(st.integers(1, 3), st.integers(1, 24), st.sampled_from([0, 1, 6, 40]), st.integers(1, 24)),
)
def test_any_step_is_as_by_the_reference(case, n, step, credit, layout):
    max_tokens, lengths, crossover = case
    lengths = np.array(lengths, np.int64)
    ranks, total, largest, unit = layout
    work = document_work(lengths, crossover)
    if work.astype(object).sum() > (1 << 62) // (total + largest):
        return
    sizes = Sizes(n * ranks, ranks, total, largest, max_tokens)
    both(
        lengths,
        work,
        np.sort(np.arange(len(lengths)) * 7 % 20),
        step,
        credit,
        sizes,
        Limits(unit, max(1, max_tokens * 4 // 5 * n), crossover, max_delay_steps=20),
    )
    for ours, theirs in zip(
        _native.place_documents(lengths, work, sizes), place.place(lengths, work, sizes), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("seed", range(12))
def test_the_tightest_bound_on_delay_holds_over_long_streams(seed):
    """Short streams do not show it: later documents must not overtake forced ones for ever."""
    rng = np.random.default_rng(seed)
    n, s_max = int(rng.integers(1, 5)), float(rng.choice([1.0, 1.1, 1.25]))
    kinds = rng.choice(WINDOW, int(rng.integers(2, 6))) + 1
    given = described(n=n, s_max=s_max, layout=list(LAYOUTS.values())[seed % len(LAYOUTS)])
    for step in steps_of(packer(given, rng.choice(kinds, 3000), seed=None)):
        assert (step.step - step.batch.documents["arrival"]).max() <= LEAST_DELAY


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
    """Over many epochs: as many tokens a step as there should be, and nothing waits longer than it may."""
    n, tokens = 16, 0
    running = packer(described(n=n), lengths, seed=None, num_samples=310 * n)
    for k in range(300):
        step = running.next()
        documents = step.batch.documents
        assert (k - documents["arrival"]).max() <= LEAST_DELAY
        assert (documents["arrival"] == documents["index"] // (n * WINDOW)).all(), "is when its samples are due"
        tokens += documents["length"].sum()
        assert step.position["drawn_samples"] <= (k + 6) * n
    assert abs(tokens / (300 * n * WINDOW) - 1) < 0.05


ARGUMENTS = {
    "length": np.array([70, 3]),
    "work": np.array([4900, 9]),
    "arrival": np.zeros(2, np.int64),
    "step": 3,
    "credit": 0,
}
SIZES = Sizes(num_micro_batches=2, ranks=1, total_weight=1, largest_weight=0, max_tokens=100)
LIMITS = Limits(unit_weight=1, batch_tokens=160, crossover_tokens=50, max_delay_steps=20)


LARGEST = {"max_tokens": MAX_TOKENS, "length": np.full(2, MAX_TOKENS), "work": np.array([2**62, 1])}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"length": np.array([1.0, 2.0])}, "length must be a 1-d array of int64, not 1-d of float64"),
        ({"length": np.array([[1, 2]])}, "length must be a 1-d array of int64, not 2-d of int64"),
        ({"work": np.array([1, 2], ">i8")}, "work must be a 1-d array of int64, not 1-d of >i8"),
        ({"work": np.array([1, 2, 3])}, "work has 3 elements, length has 2; give as many"),
        ({"length": np.array([1, 0])}, "a document's length is 0; it must be 1 to 100"),
        ({"work": np.array([1, -5])}, f"a document's work is -5; it must be 0 to {3 * 2**36}"),
        ({"arrival": np.array([0, -1])}, f"arrival is -1; it must be 0 to {2**62}"),
        ({"num_micro_batches": 0}, f"num_micro_batches is 0; it must be 1 to {2**20}"),
        ({"max_tokens": MAX_TOKENS + 1}, f"max_tokens is {MAX_TOKENS + 1}; it must be 1 to {MAX_TOKENS}"),
        ({"ranks": 3}, "ranks is 3; it must be 1 to 2"),
        ({"crossover_tokens": -1}, f"crossover_tokens is -1; it must be 1 to {2**62}"),
        ({"max_delay_steps": -(2**63)}, f"max_delay_steps is -{2**63}; it must be 1 to {2**62}"),
        (LARGEST, "the work of a document after those before it is 1; it must be 0 to 0"),
        *(({name: other}, None) for name, other in (("step", 2**64), ("length", [70, 3]), ("max_tokens", 10.5))),
    ],
)
def test_bad_values_are_refused(changes, message):
    """Without a message, by their type."""
    given = ARGUMENTS | {name: changes[name] for name in ARGUMENTS if name in changes}
    sizes, limits = (
        of._replace(**{name: changes[name] for name in of._fields if name in changes}) for of in (SIZES, LIMITS)
    )
    refused = pytest.raises(
        (TypeError, RuntimeError) if message is None else ValueError, match=message and f"^{message}$"
    )
    with refused:
        _native.release_documents(**given, sizes=sizes, limits=limits)
    if not {"arrival", "step", "credit", *LIMITS._fields} & {*changes}:
        with refused:
            _native.place_documents(given["length"], given["work"], sizes)


def test_a_large_step_is_as_by_the_reference():
    lengths = np.clip(np.random.default_rng(1).lognormal(7.5, 1.5, 6_000), 1, 131_072).astype(np.int64)
    sizes = Sizes(num_micro_batches=64, ranks=8, total_weight=11, largest_weight=55, max_tokens=163_840)
    limits = Limits(unit_weight=16, batch_tokens=64 * 131_072, crossover_tokens=50_000, max_delay_steps=20)
    rows, bounds = both(lengths, document_work(lengths, 50_000), np.arange(6_000) // 2000, 2, 0, sizes, limits)
    assert 100 < len(rows) == bounds[-1]
