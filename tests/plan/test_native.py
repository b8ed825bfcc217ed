"""The C++ packing cores: each against its Python reference, to the bit, and what no caller should pass."""

import ast
import importlib.util
import re
import sys
import warnings
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import megatron_wlb
from megatron_wlb import _native
from megatron_wlb.job import MAX_TOKENS
from megatron_wlb.packing.adaptive_core import Sizes, choose
from megatron_wlb.packing.wlb import place
from megatron_wlb.pipeline.timeline import CostWeights
from megatron_wlb.plan import native


def columns(lengths, crossover=7):
    """Length and work of documents."""
    lengths = np.array(lengths, np.int64)
    return lengths, lengths * (lengths + crossover)


def both(call, *arguments, **keywords):
    """The result of both cores, equal to the bit."""
    fast = call(*arguments, **keywords)
    with patch.object(native, "core", None):
        reference = call(*arguments, **keywords)
    for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (fast, reference)), strict=True):
        assert a.dtype == b.dtype == np.int64
        assert a.tolist() == b.tolist()
    return fast


@st.composite
def documents(draw):
    """S_max, lengths and crossover: few lengths and few values, so that ties and exact fits are common."""
    max_tokens = draw(st.sampled_from([1, 2, 7, 10, 64, 1000, MAX_TOKENS]))
    lengths = st.one_of(
        st.integers(1, max_tokens),
        st.sampled_from(sorted({1, max_tokens, max(1, max_tokens // 2), max(1, max_tokens - 1)})),
    )
    return max_tokens, draw(st.lists(lengths, max_size=40)), draw(st.sampled_from([1, 7, 50_000, 1 << 35]))


@settings(max_examples=500)
@given(
    documents(),
    st.integers(1, 9),
    st.integers(0, 40),
    st.sampled_from([0, -(2**63), 2**63 - 1, 13, -13]),
    st.tuples(st.integers(1, 3), st.integers(1, 24), st.sampled_from([0, 1, 6, 40]), st.integers(1, 24)),
)
def test_cores_are_equal(case, n, step, credit, layout):
    max_tokens, lengths, crossover = case
    lengths, work = columns(lengths, crossover)
    both(place, lengths, work, n, max_tokens)
    arrivals = np.sort(np.arange(len(lengths)) * 7 % 20)
    ranks, *weights = layout
    if work.astype(object).sum() > (1 << 62) // sum(weights[:2]):
        return
    batch = max(1, max_tokens * 4 // 5 * n)
    sizes = Sizes(n * ranks, ranks, CostWeights(*weights), max_tokens, batch, crossover, 20)
    both(choose, lengths, work, arrivals, step=step, credit=credit, sizes=sizes)


def test_cores_are_equal_at_scale():
    lengths = np.clip(np.random.default_rng(1).lognormal(7.5, 1.5, 9_000), 1, 131_072).astype(np.int64)
    lengths, work = columns(lengths, 50_000)
    placed = both(place, lengths, work, 256, 163_840)
    assert (placed == 256).any()
    sizes = Sizes(64, 8, CostWeights(11, 55, 16), 163_840, 64 * 131_072, 50_000, 20)
    rows, bounds = both(choose, lengths, work, np.arange(9_000) // 3000, step=2, credit=0, sizes=sizes)
    assert 100 < len(rows) == bounds[-1]


def test_strided_arrays_are_read_as_they_are(core):
    rows = np.zeros(4, np.dtype([("length", "<i8"), ("work", "<i8")]))
    rows["length"], rows["work"] = columns([4, 3, 2, 1])
    assert place(rows["length"], rows["work"], 2, 5).tolist() == [0, 1, 1, 0]


def test_the_largest_sums_stay_exact(core):
    """Work as large as the native core allows, to the last bit of its 64."""
    work = np.array([2**60, 2**60 - 1, 2**60 - 2, 2**60])
    assert place(np.full(4, MAX_TOKENS // 2), work, 2, MAX_TOKENS).tolist() == [0, 1, 1, 0]


ARGUMENTS = {
    "length": np.array([70, 3]),
    "work": np.array([4900, 9]),
    "arrival": np.zeros(2, np.int64),
    "step": 3,
    "credit": 0,
    "num_micro_batches": 2,
    "ranks": 1,
    "total_weight": 1,
    "largest_weight": 0,
    "unit_weight": 1,
    "max_tokens": 100,
    "batch_tokens": 160,
    "crossover_tokens": 50,
    "max_delay_steps": 20,
}
PLACE = ("length", "work", "num_micro_batches", "max_tokens")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("length", np.array([1.0, 2.0]), "length must be a 1-d array of int64, not 1-d of float64"),
        ("length", np.array([[1, 2]]), "length must be a 1-d array of int64, not 2-d of int64"),
        ("work", np.array([1, 2], ">i8"), "work must be a 1-d array of int64, not 1-d of >i8"),
        ("work", np.array([1, 2, 3]), "work has 3 elements, length has 2; give as many"),
        ("arrival", np.array([0]), "arrival has 1 elements, length has 2; give as many"),
        ("length", np.array([1, 0]), "a document's length is 0; it must be 1 to 100"),
        ("length", np.array([1, 2**63 - 1]), f"a document's length is {2**63 - 1}; it must be 1 to 100"),
        ("work", np.array([1, -5]), f"a document's work is -5; it must be 0 to {3 * 2**36}"),
        ("work", np.array([0, 2**62]), f"a document's work is {2**62}; it must be 0 to {3 * 2**36}"),
        ("arrival", np.array([0, -1]), f"arrival is -1; it must be 0 to {2**62}"),
        ("step", -1, f"step is -1; it must be 0 to {2**62}"),
        ("num_micro_batches", 0, f"num_micro_batches is 0; it must be 1 to {2**20}"),
        ("num_micro_batches", 2**62, f"num_micro_batches is {2**62}; it must be 1 to {2**20}"),
        ("max_tokens", MAX_TOKENS + 1, f"max_tokens is {MAX_TOKENS + 1}; it must be 1 to {MAX_TOKENS}"),
        ("ranks", 3, "ranks is 3; it must be 1 to 2"),
        ("ranks", 0, "ranks is 0; it must be 1 to 2"),
        ("total_weight", 0, f"total_weight is 0; it must be 1 to {2**20}"),
        ("largest_weight", -1, f"largest_weight is -1; it must be 0 to {2**20}"),
        ("unit_weight", 2**62, f"unit_weight is {2**62}; it must be 1 to {2**20}"),
        ("batch_tokens", 0, f"batch_tokens is 0; it must be 1 to {2**46}"),
        ("crossover_tokens", -1, f"crossover_tokens is -1; it must be 1 to {2**62}"),
        ("max_delay_steps", -(2**63), f"max_delay_steps is -{2**63}; it must be 1 to {2**62}"),
    ],
)
def test_native_refuses(name, value, message):
    changed = ARGUMENTS | {name: value}
    with pytest.raises(ValueError, match=f"^{message}$"):
        _native.choose_adaptive(**changed)
    if name in PLACE:
        with pytest.raises(ValueError, match=f"^{message}$"):
            _native.place_wlb(**{key: changed[key] for key in PLACE})


@pytest.mark.parametrize("changes", [{"step": 2**64}, {"length": [70, 3]}, {"max_tokens": 10.5}])
def test_native_refuses_other_types(changes):
    with pytest.raises(TypeError):
        _native.choose_adaptive(**ARGUMENTS | changes)


def test_adaptive_refuses_work_whose_sum_may_not_fit():
    sizes = {"max_tokens": MAX_TOKENS}
    with pytest.raises(ValueError, match="the work of a document after those before it is 1; it must be 0 to 0"):
        _native.choose_adaptive(**ARGUMENTS | sizes | {"length": np.full(2, MAX_TOKENS), "work": np.array([2**62, 1])})


def test_stub_names_everything():
    text = Path(megatron_wlb.__file__).with_name("_native.pyi").read_text()
    functions = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
    assert set(functions) == {n for n in dir(_native) if not n.startswith("_")}
    for name, function in functions.items():
        signature = re.search(rf"{name}\((?!\*)(.*)\) ->", getattr(_native, name).__doc__)[1]
        assert re.findall(r"(\w+): ", signature) == [a.arg for a in function.args.args]


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (None, "was not built; reinstall with a C\\+\\+ compiler"),
        (
            ModuleType("stale"),
            r"was built but cannot be loaded \(cannot import name .*\); build it again, on this machine",
        ),
    ],
    ids=["none", "stale"],
)
def test_why_there_is_no_native_core(module, why, monkeypatch):
    """A build of another version, or for another machine, is no reason to install a compiler."""
    monkeypatch.setitem(sys.modules, "megatron_wlb._native", module)
    monkeypatch.delattr(megatron_wlb, "_native", raising=False)
    spec = importlib.util.spec_from_file_location("another_native", native.__file__)
    another = importlib.util.module_from_spec(spec)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        spec.loader.exec_module(another)
    assert another.core is None
    assert re.fullmatch(why, another.WHY_NOT)
    # Without a compiler it is Python's turn; a build that does not load was meant to.
    assert [str(w.message).endswith(another.WHY_NOT) for w in said] == [True] * (module is not None)
