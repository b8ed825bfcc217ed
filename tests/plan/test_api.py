"""What a training loop of one's own imports: the names of `megatron_wlb.plan`, their defaults and their errors."""

import gc
import json
import subprocess
import sys
import weakref

import numpy as np
import pytest

import megatron_wlb.plan
from megatron_wlb.plan import DocumentStream, Layout, Packer, Planner, Source, make_packer, native, plan_step
from megatron_wlb.plan.packing import POLICIES, make_policy
from megatron_wlb.plan.step import shard_step

C = 100
PAIRS = np.clip(np.random.default_rng(0).lognormal(3, 1, 400).astype(np.int64), 1, 350)


def stream(pairs=PAIRS, num_epochs=None, **source):
    return DocumentStream([Source(pairs=pairs, **source)], seed=3, context_length=C, num_epochs=num_epochs)


def pack(documents=None, **settings):
    return make_packer(documents or stream(), **{"num_micro_batches": 4, "crossover_tokens": 30} | settings)


def same(one, other):
    return all(
        np.array_equal(getattr(a, name), getattr(b, name))
        for a, b in ((one.packing, other.packing), (one.original, other.original))
        for name in ("documents", "bounds")
    )


def test_every_public_name_is_there():
    assert sorted(megatron_wlb.plan.__all__) == megatron_wlb.plan.__all__
    assert all(hasattr(megatron_wlb.plan, name) for name in megatron_wlb.plan.__all__)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_packer_made_with_defaults_is_the_one_built_by_hand(policy):
    sizes = {"num_micro_batches": 4, "context_length": C}
    settings = {"max_tokens": 125, "crossover_tokens": 30, "outlier_thresholds": (50, 75)}
    by_hand = make_policy(policy, **sizes, **settings, use_native=False)
    packer = Packer(stream(), by_hand, **sizes, fingerprint="f", policy_name=policy)
    made = pack(policy=policy, fingerprint="f")
    for _ in range(12):
        wanted, got = packer.next(), made.next()
        assert same(got, wanted)
        assert got.state == wanted.state


def test_settings_reach_the_policy():
    longest = {}
    for max_tokens in (100, None, 200):
        packer = pack(policy="wlb", max_tokens=max_tokens)
        packings = [packer.next().packing for _ in range(30)]
        longest[max_tokens] = max(packing.sums(packing.documents["length"]).max() for packing in packings)
    assert longest[100] == 100 and 100 < longest[None] <= 125 < longest[200] <= 200
    late = pack(policy="wlb", outlier_thresholds=(90,))
    assert late.next().num_waiting < pack(policy="wlb").next().num_waiting
    with pytest.raises(ValueError, match="max_delay_steps is 0"):
        pack(max_delay_steps=0)


@pytest.mark.parametrize(
    "other", [{"pairs": np.append(PAIRS[:-1], 7)}, {"first": 7}, {"weight": 2.0}], ids=lambda o: next(iter(o))
)
def test_a_state_of_other_documents_is_refused(other):
    sizes = {"num_micro_batches": 4, "crossover_tokens": 30}
    state = make_packer(stream(), **sizes).next().state
    make_packer(stream(), **sizes).load_state(state)
    with pytest.raises(ValueError, match="saved with fingerprint .* resume with the same setting"):
        make_packer(stream(**other), **sizes).load_state(state)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_micro_batches": 0}, "num_micro_batches is 0; it must be at least 1"),
        ({"crossover_tokens": -5}, "crossover_tokens is -5; it must be at least 1"),
        ({"max_tokens": 99}, "max_tokens 99 is under the context length 100: .* give at least 100"),
        ({"crossover_tokens": 1 << 60}, f"4 micro-batches of 125 tokens at a crossover of {1 << 60} overflows 64 bits"),
        ({"policy": "best"}, "unknown packing policy 'best'; choose one of original, fixed"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        pack(**settings)


def test_without_a_native_core_python_packs_and_asking_for_it_is_an_error(monkeypatch):
    wanted = pack().next()
    monkeypatch.setattr(native, "AVAILABLE", False)
    monkeypatch.setattr(native, "AdaptiveCore", None)
    monkeypatch.setattr(native, "OriginalCore", None)
    assert same(pack().next(), wanted)
    with pytest.raises(ValueError, match="the native core was not built; reinstall with a C\\+\\+ compiler"):
        pack(use_native=True)


def test_data_parallel_ranks_share_the_micro_batches_of_a_step():
    plans = [plan_step(pack(), Layout(dp_size=2, dp_rank=rank, crossover_tokens=30)) for rank in range(2)]
    assert plans[0].digest == plans[1].digest
    indices = [index for plan in plans for m in plan.micro_batches for index in m.documents["index"].tolist()]
    assert sorted(indices) == sorted(plans[0].packing.documents["index"].tolist())
    assert all(len(m.shards.shards) == 1 and m.padded_tokens == m.tokens for m in plans[0].micro_batches)


def test_layouts_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="dp_rank is 2; .* 2 data-parallel ranks it must be 0 to"):
        Layout(dp_size=2, dp_rank=2, crossover_tokens=30)
    with pytest.raises(ValueError, match="unit_tokens is 2; 2 context-parallel ranks .* give a multiple of 4"):
        Layout(dp_size=1, dp_rank=0, cp_size=2, unit_tokens=2, crossover_tokens=30)
    with pytest.raises(ValueError, match="4 micro-batches .* by 3 data-parallel ranks; choose a multiple of 3"):
        plan_step(pack(), Layout(dp_size=3, dp_rank=0, crossover_tokens=30))


def planner(num_epochs=None):
    packer = pack(stream(num_epochs=num_epochs))
    return Planner(packer, Layout(dp_size=1, dp_rank=0, crossover_tokens=30), first_step=0, ahead=2)


@pytest.mark.parametrize("free_order", [True, False])
def test_documents_change_places_only_where_they_may(free_order):
    """The longest in the middle gives the ranks of mirrored chunks like work."""
    lengths = np.array([900, 50, 50, 100, 100, 400])
    layout = Layout(
        dp_size=1, dp_rank=0, cp_size=2, unit_tokens=4, cp_sharding="per-sequence", crossover_tokens=30,
        free_order=free_order,
    )  # fmt: skip
    [[shards]] = shard_step([lengths], layout)
    assert (shards.lengths.tolist() == lengths.tolist()) == (not free_order)
    assert sorted(shards.lengths) == sorted(lengths)


def test_a_planner_says_that_the_data_is_at_its_end():
    packer, count = pack(stream(num_epochs=1)), 0
    while not packer.finished:
        count += packer.next().step >= 0
    made = planner(num_epochs=1)
    assert made.get(count - 1).step == count - 1
    message = f"^the data ends before step {count}: after {count} steps every .* train fewer steps, or more epochs$"
    with pytest.raises(RuntimeError, match=message) as error:
        made.get(count)
    assert isinstance(error.value.__cause__, StopIteration)


@pytest.mark.parametrize("ending", ["", "raise RuntimeError('out of memory')"])
def test_a_process_may_end_while_its_planner_is_in_cpp(ending):
    """A thread that came back from C++ into an interpreter at its end would abort the process."""
    code = f"""
import numpy as np
from megatron_wlb.plan import DocumentStream, Layout, Planner, Source, make_packer
lengths = np.random.default_rng(0).lognormal(6.7, 1.4, 300_000).astype(np.int64).clip(1, 8192)
stream = DocumentStream([Source(pairs=lengths)], seed=1, context_length=8192)
packer = make_packer(stream, num_micro_batches=512, crossover_tokens=20_000)
Planner(packer, Layout(dp_size=1, dp_rank=0, crossover_tokens=20_000), first_step=0, ahead=1 << 20).get(0)
{ending}
"""
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == bool(ending), done.stderr
        assert done.stderr.count("Error") == bool(ending)


def test_sizes_may_be_numpys():
    """As they come from an array of settings; a state of them is JSON."""
    seed, count = np.array([3, 4])
    documents = DocumentStream([Source(pairs=PAIRS)], seed=seed, context_length=C)
    packer = pack(documents, num_micro_batches=count)
    assert same(packer.next(), pack().next())
    json.dumps(packer.state())


def test_a_closed_planner_leaves_nothing_behind():
    """Its thread would hold the packer and the plans for as long as the process lives."""
    made = planner()
    made.get(0)
    thread, packer = made._thread, weakref.ref(made._packer)
    made.close()
    made.close()
    assert not thread.is_alive()
    assert made.get(0).step == 0
    with pytest.raises(RuntimeError, match="planning failed before step 90") as error:
        made.get(90)
    assert "the planner's thread has ended" in str(error.value.__cause__)
    del made, error
    gc.collect()
    assert packer() is None
    planner().close()  # which never began
