"""The C++ packing cores: each against its Python reference, to the bit, and what no caller should pass."""

import ast
import dataclasses
import importlib.util
import inspect
import json
import re
import sys
import warnings
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import megatron_wlb
from megatron_wlb import _native
from megatron_wlb.config import MAX_TOKENS
from megatron_wlb.plan import native
from megatron_wlb.plan.packer import Packer
from megatron_wlb.plan.packing import adaptive
from megatron_wlb.plan.packing.adaptive_core import PythonAdaptiveCore
from megatron_wlb.plan.packing.fixed import FixedPolicy, PythonFixedCore
from megatron_wlb.plan.packing.original import OriginalPolicy, PythonOriginalCore
from megatron_wlb.plan.packing.wlb import PythonWlbCore
from megatron_wlb.plan.stream import DocumentStream, Source

METHODS = {
    "AdaptiveCore": ("__init__", "add", "step"),
    "FixedCore": ("__init__", "place"),
    "OriginalCore": ("__init__", "cut"),
    "WlbCore": ("__init__", "step", "waiting", "load"),
}
REFERENCES = {
    "AdaptiveCore": PythonAdaptiveCore,
    "FixedCore": PythonFixedCore,
    "OriginalCore": PythonOriginalCore,
    "WlbCore": PythonWlbCore,
}


@pytest.fixture
def core(use_native):
    return native.WlbCore if use_native else PythonWlbCore


def columns(lengths, *, first=0, crossover=7):
    """index, length and work of documents that follow one another."""
    length = np.array(lengths, np.int64)
    return np.arange(first, first + len(length)), length, length * (length + crossover)


def assert_same(one, other):
    """Plans or waiting documents of two cores: equal values, all int64."""
    one, other = ([*x[0], x[1]] if isinstance(x[0], list) else x for x in (one, other))
    for a, b in zip(one, other, strict=True):
        assert a.dtype == b.dtype == np.int64
        assert a.tolist() == b.tolist()


def run_both(num_micro_batches, max_tokens, thresholds, steps, crossover):
    """Steps of lengths through both cores, which are equal after each."""
    cores = [c(num_micro_batches, max_tokens, list(thresholds)) for c in (PythonWlbCore, native.WlbCore)]
    first = 0
    for lengths in steps:
        arguments = columns(lengths, first=first, crossover=crossover)
        first += len(lengths)
        # What is late is in the middle of what has arrived.
        assert_same(*(c.step(*arguments, late_before=first // 2) for c in cores))
        assert_same(*(c.waiting() for c in cores))
    return cores


@st.composite
def sequences(draw):
    """Few lengths and few values, so that ties, exact fits and full queues are common."""
    max_tokens = draw(st.sampled_from([1, 2, 7, 10, 64, 1000, MAX_TOKENS]))
    lengths = st.one_of(
        st.integers(1, max_tokens),
        st.sampled_from(sorted({1, max_tokens, max(1, max_tokens // 2), max(1, max_tokens - 1)})),
    )
    return {
        "num_micro_batches": draw(st.integers(1, 9)),
        "max_tokens": max_tokens,
        "thresholds": draw(st.lists(st.integers(1, max_tokens), max_size=3, unique=True).map(sorted)),
        "steps": draw(st.lists(st.lists(lengths, max_size=20), min_size=1, max_size=6)),
        "crossover": draw(st.sampled_from([1, 7, 50_000, 1 << 35])),
    }


@settings(max_examples=1000, deadline=None)
@given(sequences())
def test_equals_python(sequence):
    run_both(**sequence)


def test_equals_python_on_many_random_sequences():
    rng = np.random.default_rng(0)
    for _ in range(2000):
        max_tokens = int(rng.integers(8, 5000))
        spread = rng.choice([0.3, 1.0, 2.5])
        steps = [
            np.clip(rng.lognormal(np.log(max_tokens) - 2, spread, rng.integers(1, 60)), 1, max_tokens).astype(np.int64)
            for _ in range(4)
        ]
        thresholds = sorted({max(2, max_tokens // d) for d in rng.integers(1, 9, rng.integers(0, 4))})
        run_both(
            int(rng.integers(1, 40)), max_tokens, thresholds, steps, crossover=int(rng.integers(1, 2 * max_tokens))
        )


def test_equals_python_at_scale():
    lengths = np.clip(np.random.default_rng(1).lognormal(7.5, 1.5, 20_000), 1, 131_072).astype(np.int64)
    run_both(256, 163_840, [32_768, 65_536], [lengths[:9_000], lengths[9_000:]], crossover=50_000)


@pytest.mark.parametrize("thresholds", [[30, 60], [10], [], [5, 20, 40, 60]])
def test_load_goes_on_the_same_under_new_thresholds(thresholds):
    rng = np.random.default_rng(2)
    lengths = rng.integers(1, 65, 200)
    cores = run_both(6, 64, [30, 60], [lengths], crossover=7)
    queues, remained = cores[0].waiting()
    waiting = np.concatenate([*queues, remained])
    assert all(len(q) for q in queues)
    assert len(remained)
    _, length, work = columns(lengths)
    loaded = [c(6, 64, thresholds) for c in (PythonWlbCore, native.WlbCore)]
    for c in loaded:
        c.step(*columns([64, 40, 64, 2]))  # load replaces what waits already
        c.load(waiting, length[waiting], work[waiting], np.isin(waiting, remained))
    assert_same(*(c.waiting() for c in loaded))
    if thresholds == [30, 60]:
        assert_same(cores[0].waiting(), loaded[1].waiting())
    for first in (200, 300, 400):
        arguments = columns(rng.integers(1, 65, 100), first=first)
        assert_same(*(c.step(*arguments) for c in loaded))
        assert_same(*(c.waiting() for c in loaded))


def test_a_queue_that_new_thresholds_overfill_pops_n_at_a_time(core):
    packer = core(3, 100, [10])
    index, length, work = columns([20] * 7)
    packer.load(index, length, work, np.zeros(7, bool))
    order, _ = packer.step(*columns([20], first=7))
    assert sorted(order) == [0, 1, 2]
    assert packer.waiting()[0][0].tolist() == [3, 4, 5, 6, 7]


def test_nothing_arrives(core):
    order, bounds = core(3, 10, [5]).step(*columns([]))
    assert order.tolist() == []
    assert bounds.tolist() == [0, 0, 0, 0]


def test_strided_arrays_are_read_as_they_are(core):
    documents = np.zeros(4, np.dtype([("index", "<i8"), ("length", "<i8"), ("work", "<i8")]))
    documents["index"], documents["length"], documents["work"] = columns([3, 1, 4, 2])
    order, _ = core(1, 10, []).step(documents["index"], documents["length"], documents["work"])
    assert order.tolist() == [2, 0, 3, 1]


def test_too_long_a_document_changes_nothing(core):
    packer = core(2, 10, [5])
    packer.step(*columns([7, 3]))
    message = "^a document of 12 tokens exceeds max_tokens 10; raise it$"
    with pytest.raises(ValueError, match=message):
        packer.step(*columns([3, 11, 12], first=2))
    with pytest.raises(ValueError, match=message):
        packer.load(*columns([12]), np.array([True]))
    queues, remained = packer.waiting()
    assert [q.tolist() for q in queues] == [[0]]
    assert remained.tolist() == []


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("index", np.array([1.0, 2.0]), "index must be a 1-d array of int64, not 1-d of float64"),
        ("length", np.array([1, 2], np.int32), "length must be a 1-d array of int64, not 1-d of int32"),
        ("work", np.array([1, 2], np.uint64), "work must be a 1-d array of int64, not 1-d of uint64"),
        ("length", np.array([1, 2], ">i8"), "length must be a 1-d array of int64, not 1-d of >i8"),
        ("length", np.array([[1, 2]]), "length must be a 1-d array of int64, not 2-d of int64"),
        ("index", np.array(3), "index must be a 1-d array of int64, not 0-d of int64"),
        ("work", np.array([1, 2, 3]), "work has 3 elements, index has 2; give as many"),
        ("index", np.array([1]), "length has 2 elements, index has 1; give as many"),
        ("remained", np.array([0, 1]), "remained must be a 1-d array of bool, not 1-d of int64"),
        ("remained", np.array([True]), "remained has 1 elements, index has 2; give as many"),
        ("length", np.array([1, -1]), "a document of -1 tokens; lengths must be at least 1"),
        ("length", np.array([0, 1]), "a document of 0 tokens; lengths must be at least 1"),
        ("length", np.array([1, 2**63 - 1]), f"a document of {2**63 - 1} tokens exceeds max_tokens 100; raise it"),
        ("work", np.array([1, -5]), f"work -5 of a document of 2 tokens; it must be 0 to {2**37}"),
        ("work", np.array([1, 2**63 - 1]), f"work {2**63 - 1} of a document of 2 tokens; it must be 0 to {2**37}"),
    ],
)
def test_native_refuses(name, value, message):
    arguments = dict(zip(("index", "length", "work"), columns([1, 2]), strict=True))
    packer = native.WlbCore(2, 100, [])
    packer.step(*columns([100, 100, 3]))
    if name != "remained":
        with pytest.raises(ValueError, match=f"^{message}$"):
            packer.step(**(arguments | {name: value}))
    with pytest.raises(ValueError, match=f"^{message}$"):
        packer.load(**({"remained": np.array([True, False])} | arguments | {name: value}))
    assert packer.waiting()[1].tolist() == [2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 10, []), f"num_micro_batches is 0; it must be 1 to {2**20}"),
        ((-1, 10, []), f"num_micro_batches is -1; it must be 1 to {2**20}"),
        ((2**20 + 1, 10, []), f"num_micro_batches is {2**20 + 1}; it must be 1 to {2**20}"),
        ((1, 0, []), f"max_tokens is 0; it must be 1 to {MAX_TOKENS}"),
        ((1, MAX_TOKENS + 1, []), f"max_tokens is {MAX_TOKENS + 1}; it must be 1 to {MAX_TOKENS}"),
    ],
)
def test_native_refuses_to_be_made(arguments, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        native.WlbCore(*arguments)


@pytest.mark.parametrize("arguments", [(2**70, 10, []), (1, 10.5, []), (1, 10, ["5"]), (1, 10, None)])
def test_native_refuses_other_types(arguments):
    with pytest.raises(TypeError):
        native.WlbCore(*arguments)


def test_native_takes_arrays_only():
    with pytest.raises(TypeError):
        native.WlbCore(1, 10, []).step([0], [1], [1])


def cut_both(num_micro_batches, context_length, lengths):
    arguments, length = (num_micro_batches, context_length), np.array(lengths, np.int64)
    assert_same(*(c(*arguments).cut(length) for c in (PythonOriginalCore, native.OriginalCore)))


def place_both(num_windows, context_length, lengths, crossover):
    """As many of the documents as the windows hold, the last of them cut to what is left."""
    length = np.array(lengths, np.int64)
    room = num_windows * context_length - (np.cumsum(length) - length)
    arguments, length = (context_length, crossover), np.minimum(length, room)[room > 0]
    assert_same(*(c(*arguments).place(length, num_windows) for c in (PythonFixedCore, native.FixedCore)))


NASTY = {
    "nothing": [],
    "one token": [1],
    "one giant": [1000],
    "giants": [1000, 999, 1000, 64, 65],
    "all equal": [3] * 50,
    "all of a window": [10] * 40,
    "a window and a token": [11] * 40,
    "longer and longer": [*range(1, 40)],
    "shorter and shorter": [*range(40, 0, -1)],
    "one giant among dwarfs": [1] * 30 + [200] + [1] * 30,
}


@pytest.mark.parametrize("lengths", NASTY.values(), ids=NASTY)
@pytest.mark.parametrize("n", [1, 2, 7, 16, 17, 100])  # the last is more than there are documents
@pytest.mark.parametrize("context_length", [1, 10, 64, MAX_TOKENS])
def test_original_and_fixed_equal_python_on_nasty_documents(lengths, n, context_length):
    cut_both(n, context_length, lengths)
    for crossover in (0, 7, 1 << 35):
        place_both(n, context_length, lengths, crossover)


@settings(max_examples=300, deadline=None)
@given(sequences())
def test_original_and_fixed_equal_python(sequence):
    n, context_length = sequence["num_micro_batches"], sequence["max_tokens"]
    for lengths in sequence["steps"]:
        cut_both(n, context_length, lengths)
        place_both(n, context_length, lengths, sequence["crossover"])


def test_original_and_fixed_equal_python_on_many_random_documents():
    rng = np.random.default_rng(3)
    for _ in range(2000):
        context_length, n = int(rng.integers(1, 2000)), int(rng.integers(1, 60))
        sizes = rng.lognormal(np.log(context_length) - rng.choice([0, 2]), rng.choice([0.3, 1.0, 2.5]), 3 * n)
        lengths = np.clip(sizes, 1, 3 * context_length).astype(np.int64)
        cut_both(n, context_length, lengths)
        place_both(n, context_length, lengths, int(rng.integers(0, 2 * context_length)))


def test_original_and_fixed_equal_python_at_scale():
    lengths = np.clip(np.random.default_rng(4).lognormal(7.5, 1.5, 20_000), 1, 131_072).astype(np.int64)
    cut_both(512, 131_072, lengths)
    place_both(512, 131_072, lengths, crossover=50_000)


def packers(name, *, pairs, n, context_length, num_global_batches):
    """A packer by the Python core and one by the native core, of the same data."""
    for use_native in (False, True):
        sizes = {"num_micro_batches": n, "context_length": context_length}
        if name == "original":
            policy = OriginalPolicy(**sizes, use_native=use_native)
        else:
            how = {"num_global_batches": num_global_batches, "crossover_tokens": 20, "use_native": use_native}
            policy = FixedPolicy(**sizes, **how)
        stream = DocumentStream([Source(pairs=pairs)], seed=1, context_length=context_length, num_epochs=1)
        yield Packer(stream, policy, **sizes, fingerprint="", policy_name=name)


@pytest.mark.parametrize("name", ["original", "fixed"])
def test_policies_plan_the_same_across_cores_and_states(name):
    """Every step to the end of the data; now and then each core goes on from the state of the other."""
    rng = np.random.default_rng(5)
    for _ in range(30):
        data = {
            "pairs": np.append(rng.integers(0, 60, rng.integers(1, 80)), 1),
            "n": int(rng.integers(1, 6)),
            "context_length": int(rng.integers(2, 40)),
            "num_global_batches": int(rng.integers(1, 4)),
        }
        python, fast = packers(name, **data)
        while not python.finished:
            one, other = python.next(), fast.next()
            np.testing.assert_array_equal(one.packing.documents, other.packing.documents)
            np.testing.assert_array_equal(one.packing.bounds, other.packing.bounds)
            assert one.state == other.state
            if rng.random() < 0.3:
                python, fast = packers(name, **data)
                python.load_state(json.loads(json.dumps(other.state)))
                fast.load_state(json.loads(json.dumps(one.state)))
        assert fast.finished


@pytest.mark.parametrize(
    ("length", "message"),
    [
        (np.array([1.0, 2.0]), "length must be a 1-d array of int64, not 1-d of float64"),
        (np.array([[1, 2]]), "length must be a 1-d array of int64, not 2-d of int64"),
        (np.array([1, 0]), "a document of 0 tokens; lengths must be at least 1"),
        (np.array([1, -(2**63)]), f"a document of -{2**63} tokens; lengths must be at least 1"),
        (np.array([1, 2**63 - 1]), f"a document of {2**63 - 1} tokens exceeds max_tokens {MAX_TOKENS}; raise it"),
    ],
)
def test_native_original_and_fixed_refuse(length, message):
    for call in (native.OriginalCore(2, 10).cut, lambda length: native.FixedCore(10, 7).place(length, 2)):
        with pytest.raises(ValueError, match=f"^{message}$"):
            call(length)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: native.OriginalCore(0, 10), f"num_micro_batches is 0; it must be 1 to {2**20}"),
        (lambda: native.OriginalCore(1, 0), f"context_length is 0; it must be 1 to {MAX_TOKENS}"),
        (
            lambda: native.FixedCore(MAX_TOKENS + 1, 7),
            f"context_length is {MAX_TOKENS + 1}; it must be 1 to {MAX_TOKENS}",
        ),
        (lambda: native.FixedCore(10, -1), f"crossover_tokens is -1; it must be 0 to {2**36 - MAX_TOKENS}"),
        (lambda: native.FixedCore(10, 7).place(np.array([5]), 0), f"num_windows is 0; it must be 1 to {2**20}"),
        (
            lambda: native.FixedCore(10, 7).place(np.array([11, 10]), 2),
            "the documents have more than the 20 tokens of 2 windows; give more windows",
        ),
    ],
)
def test_native_original_and_fixed_refuse_sizes(make, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        make()


def adaptive_settings(**changes):
    base = adaptive.settings(
        num_micro_batches=2, max_tokens=100, context_length=80, mode="constant-tokens", max_delay_steps=12
    )
    return dataclasses.replace(base, **changes)


def waiting(core):
    """Indices of what waits in adaptive packing, by running it all: late documents are forced."""
    found = []
    while len(order := core.step(100, 0)[0]):
        found += order.tolist()
    return sorted(found)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("index", np.array([1.0, 2.0]), "index must be a 1-d array of int64, not 1-d of float64"),
        ("length", np.array([1, 2], np.int32), "length must be a 1-d array of int64, not 1-d of int32"),
        ("work", np.array([1, 2], np.uint64), "work must be a 1-d array of int64, not 1-d of uint64"),
        ("arrival", np.array([1, 2], ">i8"), "arrival must be a 1-d array of int64, not 1-d of >i8"),
        ("arrival", np.array([[0, 0]]), "arrival must be a 1-d array of int64, not 2-d of int64"),
        ("index", np.array(3), "index must be a 1-d array of int64, not 0-d of int64"),
        ("arrival", np.array([0]), "arrival has 1 elements, index has 2; give as many"),
        ("work", np.array([1, 2, 3]), "work has 3 elements, index has 2; give as many"),
        ("length", np.array([1, -1]), "a document of -1 tokens; lengths must be at least 1"),
        ("length", np.array([0, 1]), "a document of 0 tokens; lengths must be at least 1"),
        ("length", np.array([1, 101]), "a document of 101 tokens exceeds max_tokens 100; raise it"),
        ("length", np.array([1, 2**63 - 1]), f"a document of {2**63 - 1} tokens exceeds max_tokens 100; raise it"),
        ("work", np.array([1, -5]), f"work -5 of a document of 2 tokens; it must be 0 to {2**37}"),
        ("work", np.array([1, 2**63 - 1]), f"work {2**63 - 1} of a document of 2 tokens; it must be 0 to {2**37}"),
        ("arrival", np.array([0, -1]), f"arrival is -1; it must be 0 to {2**62}"),
        ("arrival", np.array([0, 2**63 - 1]), f"arrival is {2**63 - 1}; it must be 0 to {2**62}"),
        ("index", np.array([1, 2]), "document 1 comes after document 1; indices must ascend"),
        ("index", np.array([3, 3]), "document 3 comes after document 3; indices must ascend"),
    ],
)
def test_native_adaptive_refuses(name, value, message):
    arguments = dict(zip(("index", "length", "work"), columns([1, 2], first=2), strict=True))
    arguments["arrival"] = np.zeros(2, np.int64)
    core = native.AdaptiveCore(adaptive_settings())
    core.add(*columns([70, 3]), np.zeros(2, np.int64))
    with pytest.raises(ValueError, match=f"^{message}$"):
        core.add(**(arguments | {name: value}))
    assert waiting(core) == [0, 1]


def test_native_adaptive_refuses_steps_beyond_its_range():
    core = native.AdaptiveCore(adaptive_settings())
    core.add(*columns([70, 3]), np.zeros(2, np.int64))
    for step in (-1, 2**62 + 1):
        with pytest.raises(ValueError, match=f"^step is {step}; it must be 0 to {2**62}$"):
            core.step(step, 0)
    with pytest.raises(TypeError):
        core.step(2**64, 0)
    with pytest.raises(TypeError):
        core.add([2], [1], [1], [0])
    assert waiting(core) == [0, 1]


def test_native_adaptive_refuses_work_whose_sum_may_not_fit():
    core = native.AdaptiveCore(adaptive_settings(max_tokens=MAX_TOKENS, context_length=MAX_TOKENS))
    index, length, arrival = np.arange(3), np.full(3, MAX_TOKENS), np.zeros(3, np.int64)
    core.add(index[:1], length[:1], np.array([2**62 - 1]), arrival[:1])
    with pytest.raises(
        ValueError, match=f"^the work of waiting documents exceeds {2**62} in all; lower the crossover$"
    ):
        core.add(index[1:], length[1:], np.array([1, 1]), arrival[1:])
    core.add(index[1:], length[1:], np.array([1, 0]), arrival[1:])
    assert waiting(core) == [0, 1, 2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_micro_batches": 0}, f"num_micro_batches is 0; it must be 1 to {2**20}"),
        ({"num_micro_batches": 2**62}, f"num_micro_batches is {2**62}; it must be 1 to {2**20}"),
        ({"max_tokens": -1}, f"max_tokens is -1; it must be 1 to {MAX_TOKENS}"),
        ({"context_length": 0}, "context_length is 0; it must be 1 to 100"),
        ({"context_length": 101}, "context_length is 101; it must be 1 to 100"),
        ({"max_delay_steps": -(2**63)}, f"max_delay_steps is -{2**63}; it must be 1 to {2**62}"),
        ({"token_repay": 1.0}, "token_repay is 1.000000; it must be 0 to 0.990000"),
        ({"token_band": 2.0}, "token_band is 2.000000; it must be 0 to 1.250000"),
        ({"tolerance": float("nan")}, "tolerance is nan; it must be 0 to 1000000.000000"),
        ({"ratio_limit": float("inf")}, "ratio_limit is inf; it must be 0 to 1000000.000000"),
        ({"token_price": -0.5}, "token_price is -0.500000; it must be 0 to 1000000.000000"),
    ],
)
def test_native_adaptive_refuses_to_be_made(changes, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        native.AdaptiveCore(adaptive_settings(**changes))


def test_the_largest_sums_stay_exact(core):
    """Work as large as the native core allows, to the last bit of its 64."""
    index, length, _ = columns([MAX_TOKENS // 2] * 4)
    work = np.array([2**61, 2**61 - 1, 2**61 - 2, 2**61])
    order, bounds = core(2, MAX_TOKENS, []).step(index, length, work)
    assert order.tolist() == [0, 3, 1, 2]
    assert bounds.tolist() == [0, 2, 4]


def definition(text):
    """Argument names and return annotation of a function written as source text."""
    text = text.replace("numpy.typing.", "").replace("numpy.", "np.")
    (parsed,) = ast.parse(text).body
    return [a.arg for a in parsed.args.args], ast.unparse(parsed.returns)


def stub(kind):
    """What `_native.pyi` defines of a kind of syntax, by name."""
    text = Path(megatron_wlb.__file__).with_name("_native.pyi").read_text()
    return {node.name: node for node in ast.parse(text).body if isinstance(node, kind)}


def test_stub_names_everything():
    functions = stub(ast.FunctionDef)
    assert set(stub(ast.ClassDef)) == set(METHODS)
    assert {*METHODS, *functions} == {n for n in dir(_native) if not n.startswith("_")}
    for name, function in functions.items():
        signature = getattr(_native, name).__doc__.strip()
        assert definition(f"def {signature}: ...")[0] == definition(ast.unparse(function))[0]


@pytest.mark.parametrize(
    ("name", "method"), [(name, method) for name, methods in METHODS.items() for method in methods]
)
def test_stub_tells_the_truth(name, method):
    stubs, core = {f.name: f for f in stub(ast.ClassDef)[name].body}, getattr(_native, name)
    assert set(stubs) == set(METHODS[name])
    assert {n for n in dir(core) if not n.startswith("_")} == set(METHODS[name]) - {"__init__"}
    signature = getattr(core, method).__doc__.strip()
    stated = definition(ast.unparse(stubs[method]))
    assert definition(f"def {signature}: ...") == stated
    assert list(inspect.signature(getattr(REFERENCES[name], method)).parameters) == stated[0]


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (None, "was not built; reinstall with a C\\+\\+ compiler"),
        (
            ModuleType("stale"),
            r"was built but cannot be loaded \(cannot import name .*\); build it again, on this machine",
        ),
    ],
    ids=["none", "stale"],
)
def test_why_there_is_no_native_core(found, why, monkeypatch):
    """A build of another version, or for another machine, is no reason to install a compiler."""
    monkeypatch.setitem(sys.modules, "megatron_wlb._native", found)
    spec = importlib.util.spec_from_file_location("another_native", native.__file__)
    another = importlib.util.module_from_spec(spec)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        spec.loader.exec_module(another)
    assert not another.AVAILABLE
    assert re.fullmatch(why, another.WHY_NOT)
    # Without a compiler it is Python's turn; a build that does not load was meant to.
    assert [str(w.message).endswith(another.WHY_NOT) for w in said] == [True] * (found is not None)
