"""The packer over many steps: nothing lost between them, and a resumed run plans what the first would have planned."""

import itertools
import json

import numpy as np
import pytest

from benchmarks.fixed import FixedPacking
from megatron_wlb.documents import DOCUMENT, PackedBatch, Policy
from megatron_wlb.job import Packing
from megatron_wlb.packing.adaptive import AdaptivePacking
from megatron_wlb.packing.megatron import MegatronPacking
from megatron_wlb.packing.paper import PaperPacking
from megatron_wlb.plan.metrics import lateness, original_work
from megatron_wlb.plan.packer import Packer
from megatron_wlb.plan.samples import Rows, Samples
from tests import jobs
from tests.jobs import job, samples
from tests.packing.steps import steps_of, tokens

C = 64
SAME_STEP = {"original": MegatronPacking(), "adaptive": AdaptivePacking(), "fixed": FixedPacking()}
WITH_DELAY = {
    "fixed of three": FixedPacking(global_batches=3),
    "wlb": PaperPacking(outlier_thresholds=(C // 4, C // 2)),
    "adaptive with delay": AdaptivePacking(max_delay_steps=20),
}


@pytest.fixture(params=WITH_DELAY.values(), ids=WITH_DELAY)
def with_delay(request):
    return request.param


def lengths():
    rng = np.random.default_rng(5)
    given = (rng.lognormal(*how).astype(np.int64) for how in ((2.5, 1.2, 200), (4, 1, 50)))
    return [np.clip(each, 0, 300) for each in given]


DATA = samples(*lengths())


def packer_of(packing, **changes):
    return Packer(DATA, job(packing=packing, **changes))


def through_json(state):
    return json.loads(json.dumps(state))


def assert_same_step(one, other):
    for name in ("step", "first", "num_waiting", "state"):
        assert getattr(one, name) == getattr(other, name)
    np.testing.assert_array_equal(one.batch.documents, other.batch.documents)
    np.testing.assert_array_equal(one.batch.bounds, other.batch.bounds)


def assert_every_token_once(steps):
    documents = np.concatenate([step.batch.documents for step in steps])
    np.testing.assert_array_equal(tokens(documents), tokens(DATA.documents(0, len(DATA))))


@pytest.mark.parametrize("same_step", SAME_STEP.values(), ids=SAME_STEP)
def test_a_step_trains_its_own_samples_wherever_a_run_begins(same_step):
    """Nothing waits: the number of samples trained is all that a run needs to go on, with any number of them a step."""
    data = samples(*lengths())
    for first, batch in ((0, 4), (17, 4), (8, 2), (len(data) - 3, 4)):
        described = job(packing=same_step, num_micro_batches=batch)
        packer = Packer(data, described, first_sample=first, step=7)
        for k, step in enumerate(steps_of(packer)):
            begin = first + k * batch
            own = data.documents(begin, min(begin + batch, len(data)))
            own["arrival"] = 7 + k
            assert (step.step, step.first, step.num_waiting) == (7 + k, begin, 0)
            np.testing.assert_array_equal(step.drawn, own)
            np.testing.assert_array_equal(tokens(step.batch.documents), tokens(own))
            assert (step.batch.documents["arrival"] == 7 + k).all()
        assert begin + batch >= len(data)


def test_a_step_of_rows_without_a_token_is_refused():
    """A resumed run would begin elsewhere; the last one of the data is none, which is told before it is reached."""
    begins, given = np.arange(9), np.array([5, 9, 0, 0, 7, 7, 0, 0])
    rows = Rows(rows=begins[:-1], begins=begins, lengths=given, context_length=C, num_samples=8)
    packer = Packer(Samples(datasets=[rows], context_length=C), job(num_micro_batches=2))
    assert packer.next().batch.documents["document"].tolist() == [0, 1]
    for asked in (packer.check, packer.next):
        with pytest.raises(ValueError, match="no document begins, or is trained, in the 2 samples from 2 on; "):
            asked()
    left = Packer(Samples(datasets=[rows], context_length=C), job(num_micro_batches=2), first_sample=4)
    with pytest.raises(ValueError, match="in the 2 samples from 6 on; "):
        left.check()
    assert [step.batch.documents["document"].tolist() for step in steps_of(left)] == [[4, 5]]


def test_a_run_resumed_at_any_step_plans_the_same(with_delay):
    """Up to the end of its data, where nothing waits."""
    packer = packer_of(with_delay)
    steps = list(steps_of(packer))
    assert_every_token_once(steps)
    assert [step.step for step in steps] == list(range(len(steps)))
    with pytest.raises(StopIteration):
        packer.next()
    assert packer.state() == steps[-1].state and steps[-1].num_waiting == 0
    assert any(step.num_waiting for step in steps)
    if with_delay.name != "fixed":  # which cuts what it drew
        left = np.cumsum([len(step.drawn) - len(step.batch.documents) for step in steps])
        assert [step.num_waiting for step in steps] == left.tolist()
    for step in (*range(20), *range(len(steps) - 8, len(steps))):
        resumed = packer_of(with_delay)
        for _ in range(step % 3):  # whatever it did before
            resumed.next()
        resumed.load_state(through_json(steps[step].state))
        assert resumed.state() == steps[step].state
        for expected in steps[step + 1 : step + 5]:
            assert_same_step(resumed.next(), expected)
    with pytest.raises(StopIteration):
        resumed.next()


class Slow(Packing, Policy):
    """Draws one sample in each of the first three steps, and then all of a step's own."""

    name = "slow"
    same_steps = False

    def policy(self, job):
        return self

    def pack(self, step, draw):
        rows = draw.own(C - 1 if step < 3 else None)
        return PackedBatch(documents=rows, bounds=np.array([0, len(rows)]))


class Reluctant(Slow):
    """Takes one sample at a time, and none of the first that it sees in a step."""

    name = "reluctant"

    def pack(self, step, draw):
        taken = len(draw.rows) > 0
        rows = draw.own(C)
        return PackedBatch(documents=rows[: taken * len(rows)], bounds=np.array([0, taken * len(rows)]))


def test_samples_that_fell_behind_arrive_in_the_step_that_draws_them():
    """A step whose documents would all wait draws those of the next one as well."""
    for step in itertools.islice(steps_of(packer_of(Reluctant())), 4):
        assert len(np.unique(step.drawn["index"] // C)) == 2
        assert step.drawn["arrival"].min() >= step.step


def test_samples_that_waited_are_not_owed():
    steps = list(itertools.islice(steps_of(packer_of(Slow())), 6))
    assert [np.unique(step.drawn["index"] // C).tolist() for step in steps] == [
        [0], [1], [2], [3, 4, 5, 6], [7, 8, 9, 10], [11, 12, 13, 14],
    ]  # fmt: skip
    assert [step.first for step in steps] == [0, 1, 2, 3, 7, 11]


@pytest.mark.parametrize(("before", "after"), [(32, 64), (64, 32), (32, 8)])
def test_a_run_goes_on_with_another_global_batch_size(before, after):
    """What has been read ahead is not taken for tokens that are owed."""
    sizes = {"packing": AdaptivePacking(max_delay_steps=20), "context_length": 512, "crossover_tokens": 200}
    drawn = np.clip(np.random.default_rng(0).lognormal(4, 1.3, 100_000), 1, 512).astype(np.int64)
    packer = jobs.packer(job(num_micro_batches=before, dp=4, pp=2, **sizes), drawn)
    for _ in range(20):
        packer.next()
    resumed = packer.with_job(job(num_micro_batches=after, dp=4, pp=2, **sizes))
    steps = [resumed.next() for _ in range(40)]
    assert [step.first for step in steps] == [20 * before + k * after for k in range(40)]
    trained = [step.batch.documents for step in steps]
    assert sum(int(rows["length"].sum()) for rows in trained) == pytest.approx(40 * after * 512, rel=0.002)
    late = [np.maximum(20 + k - rows["arrival"], 0).mean() for k, rows in enumerate(trained)]
    assert np.mean(late[20:]) < 1


def test_the_original_work_is_that_of_the_samples_drawn():
    described, rows = job(), np.zeros(4, DOCUMENT)
    rows["index"], rows["length"] = [64, 84, 128, 320], [20, 44, 64, 7]
    assert original_work(rows, described).tolist() == [20 * 52 + 44 * 76, 64 * 96, 7 * 39]
    assert original_work(rows[:0], described).tolist() == []


def test_lateness_by_hand():
    rows = np.zeros(4, DOCUMENT)
    rows["arrival"], rows["length"] = [2, 5, 4, 3], [10, 20, 7, 1]
    of = [PackedBatch(documents=some, bounds=np.array([0, len(some)])) for some in (rows, rows[1:2], rows[:0])]
    assert [lateness(each, 4) for each in of] == [(21, 2), (0, -1), (0, 0)]


@pytest.mark.parametrize("num_micro_batches", [8, 2, 3])
@pytest.mark.parametrize("num_steps", [1, 2, 3, 10])
def test_a_run_goes_on_with_other_micro_batches(with_delay, num_micro_batches, num_steps):
    packer = packer_of(with_delay)
    steps = [packer.next() for _ in range(num_steps)]
    # Other thresholds too, so that what waits changes its queue.
    changed = PaperPacking(outlier_thresholds=(20, 40, 60)) if with_delay.name == "paper" else with_delay
    resumed = packer_of(changed, num_micro_batches=num_micro_batches, max_tokens=2 * C)
    resumed.load_state(through_json(steps[-1].state))
    assert resumed.step == num_steps
    later = list(steps_of(resumed))
    assert all(len(step.batch) == num_micro_batches for step in later)
    assert_every_token_once(steps + later)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"packing": FixedPacking()}, "saved with --wlb-packing fixed, this run has paper; resume with the same"),
        ({"context_length": 32}, "saved with --seq-length 32, this run has 64; resume with the same"),
    ],
    ids=["packing", "window"],
)
def test_a_state_of_another_run_is_refused_and_changes_nothing(other, message):
    packer, undisturbed = packer_of(PaperPacking()), packer_of(PaperPacking())
    for _ in range(3):
        packer.next(), undisturbed.next()
    with pytest.raises(ValueError, match=message):
        packer.load_state(jobs.packer(job(**{"packing": PaperPacking()} | other), *lengths()).next().state)
    assert_same_step(packer.next(), undisturbed.next())


def test_samples_of_another_window_are_refused():
    with pytest.raises(ValueError, match="the samples have windows of 64 tokens, the job of 32; give both the same"):
        packer_of(PaperPacking(), context_length=32)
    with pytest.raises(ValueError, match="first_sample is -1; it must be int >= 0"):
        Packer(jobs.samples([9] * 99), job(), first_sample=-1)
