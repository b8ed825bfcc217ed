"""The packer over many steps: nothing lost between them, and a resumed run plans what the first would have planned."""

import json

import numpy as np
import pytest

from megatron_wlb.plan.packer import Packer
from megatron_wlb.plan.packing import FixedPolicy, OriginalPolicy, WlbPolicy
from megatron_wlb.plan.stream import DocumentStream, Source
from megatron_wlb.plan.types import DOCUMENT

CONTEXT_LENGTH = 64


def sources():
    rng = np.random.default_rng(5)
    return [
        Source(pairs=np.clip(rng.lognormal(2.5, 1.2, 200).astype(np.int64), 0, 300)),
        Source(pairs=np.clip(rng.lognormal(4, 1, 50).astype(np.int64), 0, 300), weight=0.5, first=7),
    ]


def make_packer(
    policy_name,
    *,
    stream=None,
    num_micro_batches=4,
    context_length=CONTEXT_LENGTH,
    max_tokens=CONTEXT_LENGTH * 5 // 4,
    outlier_thresholds=(CONTEXT_LENGTH // 4, CONTEXT_LENGTH // 2),
    fingerprint="data",
):
    policy = (
        OriginalPolicy(num_micro_batches=num_micro_batches, context_length=context_length)
        if policy_name == "original"
        else FixedPolicy(
            num_micro_batches=num_micro_batches,
            context_length=context_length,
            num_global_batches=3,
            crossover_tokens=30,
        )
        if policy_name == "fixed"
        else WlbPolicy(
            num_micro_batches=num_micro_batches,
            max_tokens=max_tokens,
            outlier_thresholds=outlier_thresholds,
            crossover_tokens=30,
            use_native=policy_name == "native",
        )
    )
    return Packer(
        stream or DocumentStream(sources(), seed=1, context_length=context_length),
        policy,
        num_micro_batches=num_micro_batches,
        context_length=context_length,
        fingerprint=fingerprint,
        policy_name="wlb" if policy_name in ("python", "native") else policy_name,
    )


@pytest.fixture(params=["original", "fixed", "python", "native"])
def policy_name(request):
    return request.param


def assert_same_step(one, other):
    assert (one.step, one.num_waiting, one.state) == (other.step, other.num_waiting, other.state)
    for a, b in ((one.packing, other.packing), (one.original, other.original)):
        np.testing.assert_array_equal(a.documents, b.documents)
        np.testing.assert_array_equal(a.bounds, b.bounds)


def test_a_run_resumed_at_any_step_plans_the_same(policy_name):
    packer = make_packer(policy_name)
    steps = [packer.next() for _ in range(25)]
    assert any(step.num_waiting for step in steps)
    for step in range(20):
        resumed = make_packer(policy_name)
        for _ in range(step % 3):  # whatever it did before
            resumed.next()
        resumed.load_state(json.loads(json.dumps(steps[step].state)))
        assert json.dumps(resumed.state()) == json.dumps(steps[step].state)
        for expected in steps[step + 1 : step + 5]:
            assert_same_step(resumed.next(), expected)


def test_native_and_python_plan_the_same():
    python, native = make_packer("python"), make_packer("native")
    for _ in range(50):
        assert_same_step(python.next(), native.next())


def test_nothing_is_lost_or_doubled_in_50_steps(policy_name):
    packer = make_packer(policy_name)
    steps = [packer.next() for _ in range(50)]
    state = steps[-1].state
    waiting = [np.array([tuple(row) for row in rows], DOCUMENT) for rows in state["waiting"].values()]
    documents = np.concatenate([*(step.packing.documents for step in steps), *waiting])
    documents = np.sort(documents, order=["index", "offset"])

    drawn = DocumentStream(sources(), seed=1, context_length=CONTEXT_LENGTH).take(state["stream"]["position"])
    if policy_name in ("original", "fixed"):
        # Pieces may have been cut further: what lies between two cuts is the stream's piece.
        first = np.flatnonzero(np.diff(documents["index"], prepend=-1))
        lengths = np.add.reduceat(documents["length"], first)
        follows = np.setdiff1d(np.arange(len(documents)), first)
        ends = documents["offset"] + documents["length"]
        np.testing.assert_array_equal(documents["offset"][follows], ends[follows - 1])
        documents = documents[first]
        documents["length"] = lengths
    drawn["arrival"] = documents["arrival"]
    np.testing.assert_array_equal(documents, drawn)

    for t, step in enumerate(steps):
        assert step.step == t
        assert len(step.packing.documents)
        assert (step.packing.documents["arrival"] <= t + (2 if policy_name == "fixed" else 0)).all()
        assert step.state["stream"]["position"] >= (t + 1) * 4 * CONTEXT_LENGTH


def test_a_step_compares_with_the_original_order(policy_name):
    original = make_packer("original")
    packer = make_packer(policy_name)
    for _ in range(12):
        step, expected = packer.next(), original.next()
        np.testing.assert_array_equal(step.original.documents, expected.packing.documents)
        assert step.original.sums(step.original.documents["length"]).tolist() == [CONTEXT_LENGTH] * 4


@pytest.mark.parametrize("policy_name", ["python", "native"])
def test_a_step_whose_documents_all_wait_draws_again(policy_name):
    def packer():
        # 3 levels: of 10, 9 and 6 pairs none has a second document within the first two windows of 10.
        stream = DocumentStream([Source(pairs=np.array([10, 9, 6]))], seed=0, context_length=10, shuffle=False)
        policy = WlbPolicy(
            num_micro_batches=2,
            max_tokens=20,
            outlier_thresholds=[5, 8, 10],
            crossover_tokens=5,
            use_native=policy_name == "native",
        )
        return Packer(stream, policy, num_micro_batches=2, context_length=10, fingerprint="", policy_name="wlb")

    first = packer().next()
    assert first.step == 0
    assert sorted(first.packing.documents["index"]) == [0, 1, 3, 4]
    assert set(first.packing.documents["arrival"]) == {0}
    assert first.num_waiting == 1
    assert first.state["stream"]["position"] >= 40

    both, resumed = packer(), packer()
    both.next()
    resumed.load_state(json.loads(json.dumps(first.state)))
    for _ in range(10):
        assert_same_step(both.next(), resumed.next())


def finite():
    return DocumentStream(sources(), seed=1, context_length=CONTEXT_LENGTH, num_epochs=1)


def run_to_the_end(packer):
    steps = []
    while not packer.finished:
        steps.append(packer.next())
        assert len(steps) < 1000
    return steps


def assert_every_pair_once(steps):
    """The documents of the steps tile the documents of `finite()`."""
    documents = np.concatenate([step.packing.documents for step in steps])
    documents = np.sort(documents, order=["dataset", "document", "offset"])
    begins = documents["offset"] == 0
    ends = documents["offset"] + documents["length"]
    np.testing.assert_array_equal(documents["offset"][~begins], ends[np.flatnonzero(~begins) - 1])
    for dataset, source in enumerate(sources()):
        whole = documents[begins & (documents["dataset"] == dataset)]["document"]
        np.testing.assert_array_equal(whole, source.first + np.flatnonzero(source.pairs))
    assert documents["length"].sum() == sum(source.pairs.sum() for source in sources())


def test_a_finished_packer_stops(policy_name):
    packer = make_packer(policy_name, stream=finite())
    steps = run_to_the_end(packer)
    assert_every_pair_once(steps)
    assert [step.step for step in steps] == list(range(len(steps)))
    assert steps[-1].num_waiting == 0
    with pytest.raises(StopIteration, match="^every document has been packed$"):
        packer.next()
    assert packer.state() == steps[-1].state


def test_a_run_resumed_near_the_end_plans_the_same(policy_name):
    steps = run_to_the_end(make_packer(policy_name, stream=finite()))
    for step in range(len(steps) - 8, len(steps)):
        resumed = make_packer(policy_name, stream=finite())
        resumed.load_state(json.loads(json.dumps(steps[step].state)))
        for expected in steps[step + 1 :]:
            assert_same_step(resumed.next(), expected)
        assert resumed.finished


@pytest.mark.parametrize("num_micro_batches", [8, 2, 3])
@pytest.mark.parametrize("num_steps", [1, 2, 3, 10])
def test_a_run_goes_on_with_other_micro_batches(policy_name, num_micro_batches, num_steps):
    packer = make_packer(policy_name, stream=finite())
    steps = [packer.next() for _ in range(num_steps)]
    # Other thresholds too, so that what waits changes its queue.
    resumed = make_packer(
        policy_name,
        stream=finite(),
        num_micro_batches=num_micro_batches,
        max_tokens=CONTEXT_LENGTH * 2,
        outlier_thresholds=[20, 40, 60],
    )
    resumed.load_state(json.loads(json.dumps(steps[-1].state)))
    assert resumed.step == num_steps
    later = run_to_the_end(resumed)
    assert all(len(step.packing) == num_micro_batches for step in later)
    assert_every_pair_once(steps + later)

    again = make_packer(
        policy_name,
        stream=finite(),
        num_micro_batches=num_micro_batches,
        max_tokens=CONTEXT_LENGTH * 2,
        outlier_thresholds=[20, 40, 60],
    )
    again.load_state(json.loads(json.dumps(later[2].state)))
    assert_same_step(again.next(), later[3])


def test_a_waiting_document_beyond_s_max_is_refused_and_changes_nothing():
    steps = run_to_the_end(make_packer("native", stream=finite()))
    state = next(
        step.state for step in steps if any(row[4] == CONTEXT_LENGTH for row in step.state["waiting"]["queue1"])
    )
    packer = make_packer("native", stream=finite(), max_tokens=CONTEXT_LENGTH - 1, outlier_thresholds=[CONTEXT_LENGTH])
    before = json.dumps(packer.state())
    with pytest.raises(ValueError, match="^a document of 64 tokens exceeds max_tokens 63; raise it$"):
        packer.load_state(state)
    assert json.dumps(packer.state()) == before


DAMAGE = [
    *((name, None) for name in ("step", "base", "num_micro_batches", "waiting", "original", "stream")),
    ("step", "3"),
    ("step", 1.5),
    ("base", [1]),
    ("base", [1, "2"]),
    ("waiting", []),
    ("waiting", {}),
    ("waiting", {"carry": [[1, 2]], "remained": [[1, 2]]}),
    ("waiting", {"carry": [[0, 0, 0, 0, 1.5, 0]], "remained": [[0, 0, 0, 0, 1.5, 0]]}),
    ("original", {"carry": 3}),
    ("original", {"other": []}),
    ("stream", {}),
    ("stream", {"seed": 1, "shuffle": True, "drawn": [1, 1], "given": [1, 1], "tokens": [1, 1]}),
]


@pytest.mark.parametrize(("name", "value"), DAMAGE)
def test_a_damaged_state_is_refused_and_changes_nothing(policy_name, name, value):
    packer = make_packer(policy_name)
    later = make_packer(policy_name)
    for _ in range(4):
        packer.next()
    state = [later.next() for _ in range(8)][-1].state
    before = packer.state()
    with pytest.raises(ValueError, match="damaged"):
        packer.load_state(state | {name: value})
    with pytest.raises(ValueError, match="damaged"):
        packer.load_state({key: kept for key, kept in state.items() if key != name})
    assert packer.state() == before
    packer.load_state(state)
    assert_same_step(packer.next(), later.next())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (None, "^not a packer state: its format is not 'megatron-wlb-packer-state'$"),
        ({"format": "other"}, "^not a packer state: its format is not 'megatron-wlb-packer-state'$"),
        ({"version": 2}, "^packer state of version 2; this release reads version 1$"),
        ({"fingerprint": "x"}, "saved with fingerprint 'x', this run has 'data'; resume with the same setting$"),
        ({"context_length": 32}, "saved with context_length 32, this run has 64; resume with the same setting$"),
        (
            {"policy": "other"},
            "saved with policy 'other', this run has '(wlb|original|fixed)'; resume with the same setting$",
        ),
    ],
)
def test_a_state_of_another_run_is_refused_and_changes_nothing(policy_name, change, message):
    packer, undisturbed = make_packer(policy_name), make_packer(policy_name)
    for _ in range(3):
        packer.next(), undisturbed.next()
    later = make_packer(policy_name)
    state = [later.next() for _ in range(8)][-1].state
    with pytest.raises(ValueError, match=message):
        packer.load_state(change and state | change)
    assert_same_step(packer.next(), undisturbed.next())


def test_a_state_of_another_seed_is_refused_and_changes_nothing(policy_name):
    packer = make_packer(policy_name)
    other = make_packer(policy_name, stream=DocumentStream(sources(), seed=2, context_length=CONTEXT_LENGTH))
    other.next()
    with pytest.raises(ValueError, match="saved with seed 2, this run has 1"):
        packer.load_state(other.state())
    assert_same_step(packer.next(), make_packer(policy_name).next())


def test_a_state_stays_small_and_is_its_own():
    """References to waiting documents, never tokens; later steps leave it alone."""
    packer = make_packer("native")
    state = packer.next().state
    kept = json.dumps(state)
    for _ in range(20):
        step = packer.next()
        assert len(json.dumps(step.state)) < 600 + 60 * (step.num_waiting + 1)
    assert json.dumps(state) == kept
