"""The packer over many steps: nothing lost between them, and a resumed run plans what the first would have planned."""

import itertools
import json

import numpy as np
import pytest

from megatron_wlb.packing.adaptive import AdaptivePacking
from megatron_wlb.packing.fixed import FixedPacking
from megatron_wlb.packing.original import OriginalPacking
from megatron_wlb.packing.wlb import WlbPacking
from megatron_wlb.plan.metrics import original_work
from megatron_wlb.plan.packer import make_packer
from megatron_wlb.plan.stream import DocumentStream, Source
from megatron_wlb.types import DOCUMENT
from tests.jobs import job
from tests.jobs import packer as make

C = 64
PACKINGS = [
    OriginalPacking(),
    FixedPacking(global_batches=3),
    WlbPacking(outlier_thresholds=(C // 4, C // 2)),
    AdaptivePacking(max_delay_steps=20),
]


@pytest.fixture(params=PACKINGS, ids=lambda packing: packing.name)
def packing(request):
    return request.param


def sources():
    rng = np.random.default_rng(5)
    return [
        Source(lengths=np.clip(rng.lognormal(2.5, 1.2, 200).astype(np.int64), 0, 300)),
        Source(lengths=np.clip(rng.lognormal(4, 1, 50).astype(np.int64), 0, 300), weight=0.5, first=7),
    ]


def packer_of(packing, *, num_epochs=None, seed=1, **changes):
    own = {name: changes.pop(name) for name in ("lengths", "first", "weight", "content") if name in changes}
    data = [Source(**own)] if own else sources()
    return make(job(packing=packing, **changes), *data, seed=seed, num_epochs=num_epochs)


def through_json(state):
    return json.loads(json.dumps(state))


def assert_same_step(one, other):
    assert (one.step, one.num_waiting, one.state) == (other.step, other.num_waiting, other.state)
    np.testing.assert_array_equal(one.batch.documents, other.batch.documents)
    np.testing.assert_array_equal(one.batch.bounds, other.batch.bounds)


def test_a_run_resumed_at_any_step_plans_the_same(packing):
    packer = packer_of(packing)
    steps = [packer.next() for _ in range(25)]
    assert any(step.num_waiting for step in steps)
    for step in range(20):
        resumed = packer_of(packing)
        for _ in range(step % 3):  # whatever it did before
            resumed.next()
        resumed.load_state(through_json(steps[step].state))
        assert resumed.state() == steps[step].state
        for expected in steps[step + 1 : step + 5]:
            assert_same_step(resumed.next(), expected)


@pytest.mark.parametrize(("before", "after"), [(32, 64), (64, 32), (32, 8)])
def test_a_run_resumed_with_another_global_batch_size_trains_as_many_tokens(before, after):
    """What has been read ahead is not taken for tokens that are owed."""
    sizes = {"packing": AdaptivePacking(), "context_length": 512, "crossover_tokens": 200, "dp": 4, "pp": 2}
    lengths = np.clip(np.random.default_rng(0).lognormal(4, 1.3, 100_000), 1, 512).astype(np.int64)
    packer = packer_of(lengths=lengths, num_micro_batches=before, **sizes)
    state = [packer.next().state for _ in range(20)][-1]
    resumed = packer_of(lengths=lengths, num_micro_batches=after, **sizes)
    resumed.load_state(through_json(state))
    steps = [resumed.next().batch.documents for _ in range(40)]
    tokens = sum(int(documents["length"].sum()) for documents in steps)
    assert tokens == pytest.approx(40 * after * 512, rel=0.002)
    late = [np.maximum(20 + k - documents["arrival"], 0).mean() for k, documents in enumerate(steps)]
    assert np.mean(late[20:]) < 1


def test_the_original_work_is_that_of_the_documents_drawn():
    """Full windows, where a step draws any; so what is compared with is not flattered by a window half full."""
    described, short, full = job(), np.zeros(3, DOCUMENT), np.zeros(9, DOCUMENT)
    short["length"], full["length"] = 20, 50
    assert original_work(short, described).tolist() == [3 * 20 * 52]
    work = [(50 * 82 + 14 * 46), (36 * 68 + 28 * 60), (22 * 54 + 42 * 74), (8 * 40 + 50 * 82 + 6 * 38)]
    assert original_work(full, described).tolist() == work
    assert original_work(full[:0], described).tolist() == [0]
    packer = packer_of(OriginalPacking())
    assert all(0 < len(original_work(packer.next().drawn, described)) <= 4 for _ in range(20))


def run_to_the_end(packer):
    steps = []
    while not packer.finished:
        steps.append(packer.next())
        assert len(steps) < 1000
    return steps


def assert_every_token_once(steps):
    """The documents of the steps tile those of one epoch."""
    documents = np.concatenate([step.batch.documents for step in steps])
    documents = np.sort(documents, order=["dataset", "document", "offset"])
    begins = documents["offset"] == 0
    ends = documents["offset"] + documents["length"]
    np.testing.assert_array_equal(documents["offset"][~begins], ends[np.flatnonzero(~begins) - 1])
    for dataset, source in enumerate(sources()):
        whole = documents[begins & (documents["dataset"] == dataset)]["document"]
        np.testing.assert_array_equal(whole, source.first + np.flatnonzero(source.lengths))
    assert documents["length"].sum() == sum(source.lengths.sum() for source in sources())


def test_a_finished_packer_stops(packing):
    packer = packer_of(packing, num_epochs=1)
    steps = run_to_the_end(packer)
    assert_every_token_once(steps)
    assert [step.step for step in steps] == list(range(len(steps)))
    assert steps[-1].num_waiting == 0
    with pytest.raises(StopIteration):
        packer.next()
    assert packer.state() == steps[-1].state
    for step in range(len(steps) - 8, len(steps)):
        resumed = packer_of(packing, num_epochs=1)
        resumed.load_state(through_json(steps[step].state))
        for expected in steps[step + 1 :]:
            assert_same_step(resumed.next(), expected)
        assert resumed.finished


@pytest.mark.parametrize("num_micro_batches", [8, 2, 3])
@pytest.mark.parametrize("num_steps", [1, 2, 3, 10])
def test_a_run_goes_on_with_other_micro_batches(packing, num_micro_batches, num_steps):
    packer = packer_of(packing, num_epochs=1)
    steps = [packer.next() for _ in range(num_steps)]
    # Other thresholds too, so that what waits changes its queue.
    changed = WlbPacking(outlier_thresholds=(20, 40, 60)) if packing.name == "wlb" else packing
    how = {"num_epochs": 1, "num_micro_batches": num_micro_batches, "max_tokens": 2 * C}
    resumed = packer_of(changed, **how)
    resumed.load_state(through_json(steps[-1].state))
    assert resumed.step == num_steps
    later = run_to_the_end(resumed)
    assert all(len(step.batch) == num_micro_batches for step in later)
    assert_every_token_once(steps + later)

    again = packer_of(changed, **how)
    again.load_state(through_json(later[2].state))
    assert_same_step(again.next(), later[3])


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_run_that_begins_anew_far_on_goes_on_from_its_first_states(steps, packing):
    packer, other = packer_of(packing), packer_of(packing)
    packer.begin_at(10**6)
    for _ in range(steps):
        packer.next()
    other.load_state(through_json(packer.state()))
    assert_same_step(packer.next(), other.next())


LENGTHS = sources()[1].lengths


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"packing": OriginalPacking()}, "saved with --wlb-packing original, this run has wlb; resume with the same"),
        ({"context_length": 32}, "saved with --seq-length 32, this run has 64"),
        ({"lengths": np.append(LENGTHS[:-1], 7)}, "with another dataset 0 of the blend .*lengths or tokens"),
        ({"content": "other tokens"}, "with another dataset 0 of the blend .*lengths or tokens"),
        ({"first": 5}, r"with --split of .*documents\] \[\[5, 50\]\], this run has \[\[0, "),
        ({"weight": 2.0}, r"with blend weights \(--data-path\) \[2.0\], this run has \[1.0\]"),
        ({"seed": 2}, "saved with seed 2, this run has 1"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_state_of_another_run_is_refused_and_changes_nothing(other, message):
    how = {"packing": WlbPacking(), "lengths": LENGTHS}
    packer, undisturbed = packer_of(**how), packer_of(**how)
    for _ in range(3):
        packer.next(), undisturbed.next()
    with pytest.raises(ValueError, match=message):
        packer.load_state(packer_of(**how | other).next().state)
    assert_same_step(packer.next(), undisturbed.next())


def test_a_stream_of_another_window_is_refused():
    with pytest.raises(ValueError, match="the stream cuts documents at 32 tokens, the job at 64"):
        make_packer(DocumentStream(sources(), seed=1, context_length=32), job())


@pytest.mark.parametrize("policy", [AdaptivePacking(), WlbPacking()], ids=["adaptive", "wlb"])
def test_whole_epochs_end_before_the_next_begins(policy):
    """Also after a resumption at every step."""
    lengths = np.random.default_rng(0).integers(1, 65, 50)
    given = job(packing=policy)

    def make():
        stream = DocumentStream([Source(lengths=lengths)], seed=1, context_length=64, whole_epochs=True)
        return make_packer(stream, given)

    packer, rows = make(), []
    while len(rows) < 4 * len(lengths):
        state = packer.state()
        step = packer.next()
        again = make()
        again.load_state(state)
        np.testing.assert_array_equal(again.next().batch.documents, step.batch.documents)
        rows += step.batch.documents["document"].tolist()
    for epoch in itertools.batched(rows[: 4 * len(lengths)], len(lengths)):
        assert sorted(epoch) == list(range(len(lengths)))
