"""Plans of a run by hand: the job of a step, the targets that each rank counts, and the files of what waits."""

from argparse import Namespace

import numpy as np
import pytest

import megatron_wlb
from megatron_wlb.adapter import plans
from megatron_wlb.adapter.data import SampleReader
from megatron_wlb.adapter.plans import Plans, state_path
from megatron_wlb.documents import DOCUMENT, PackedBatch
from megatron_wlb.packing.adaptive import AdaptivePacking
from megatron_wlb.plan.samples import Rows, Samples
from megatron_wlb.plan.step import digest_of, packing_gain, plan_step
from tests.adapter.test_data import DEPTHS, C, Places
from tests.jobs import job, packer, samples


def reader(**changes):
    given = {"split": "train", "datasets": [Places()], "context_length": C, "samples_per_micro_batch": 1}
    return SampleReader(**given | {"vocabulary": 99, "depths": DEPTHS} | changes)


def plans_of(given, data, first_sample=0, **changes):
    args = {"iteration": 0, "wlb_digest": False, "wlb_per_token_loss": False, "wlb_sft_skip": None}
    args |= {"distributed_timeout_minutes": 7, "load": None} | changes
    split = Namespace(samples=data, datasets=[Places()], first_sample=first_sample, identity=1)
    return Plans(Namespace(**args), given, {"train": split}, {"train": reader()})


def test_a_step_has_the_job_that_begins_at_it_or_before():
    jobs = [(3, "a"), (5, "b"), (9, "c")]
    found = [Plans.job(Namespace(_jobs={"train": jobs}), "train", step) for step in (0, 3, 4, 5, 8, 9, 99)]
    assert found == ["a", "a", "a", "b", "b", "c", "c"]


@pytest.mark.parametrize(
    ("split", "changes", "per_token", "weighs"),
    [
        ("train", {}, False, False),
        ("train", {"masks": True}, False, True),
        ("train", {"masks": True}, True, False),
        ("train", {"depths": 1}, True, True),
        ("train", {"digest": True}, True, True),
        ("valid", {"masks": True, "depths": 1, "digest": True}, False, False),
        ("valid", {"mean_of_means": True}, True, True),
    ],
)
def test_targets_are_counted_where_they_weigh_differently(split, changes, per_token, weighs):
    changes = {"masks": False, "depths": 0, "digest": False, "mean_of_means": False} | changes
    sets = [Namespace(masks=False), Namespace(masks=changes["masks"])]
    of = Namespace(_readers={split: Namespace(datasets=sets, **changes)})
    of._args, of._reads = Namespace(wlb_per_token_loss=per_token), lambda name: Plans._reads(of, name)
    assert of._reads(split) == changes["masks"] and Plans._weighs(of, split) == weighs


def test_ranks_share_the_counting_where_they_read_tokens(monkeypatch):
    """Of every sample of the step, an empty one, too; of every micro-batch where documents run in other steps."""
    rows = np.zeros(4, DOCUMENT)
    rows["length"], rows["index"] = (3, 13, 16, 4), 5 * C + np.array((0, 3, 2 * C, 3 * C + 12))
    packed = Namespace(drawn=rows, first=5, batch=PackedBatch(documents=rows[::-1], bounds=np.array([0, 1, 4])))
    lengths = [slot["length"].tolist() for slot in plans._slots(packed, reader())]
    assert lengths == [[3, 13], [], [16], [4]]
    others = reader(samples_per_micro_batch=None)
    assert [slot["length"].tolist() for slot in plans._slots(packed, others)] == [[4], [16, 13, 3]]

    def counts(rank, **changes):
        monkeypatch.setattr(plans.torch.distributed, "get_rank", lambda: rank)
        monkeypatch.setattr(plans.torch.distributed, "get_world_size", lambda: 3)
        given = {"_readers": {"train": reader()}, "_reads": lambda split: True, "_weighs": lambda split: True}
        return Plans._count(Namespace(**given | changes), "train")(packed)

    of_ranks = [counts(rank) for rank in range(3)]
    assert sum(of_ranks).tolist() == [[16, 14, 12], [0, 0, 0], [16, 15, 14], [4, 3, 2]]
    assert [each.any(axis=1).tolist() for each in of_ranks] == [[1, 0, 0, 1], [0, 0, 0, 0], [0, 0, 1, 0]]
    assert (counts(1, _reads=lambda split: False) == sum(of_ranks)).all()
    assert counts(0, _weighs=lambda split: False) is None


@pytest.fixture
def rank_1(monkeypatch):
    for owner, name in ((plans.mpu, "get_data_parallel_rank"), (plans.torch.distributed, "get_rank")):
        monkeypatch.setattr(owner, name, lambda: 1)
    monkeypatch.setattr(plans.torch.distributed, "get_world_size", lambda: 2)


def test_a_planner_is_made_once_for_its_rank_and_heard_before_collectives_time_out(rank_1, monkeypatch):
    monkeypatch.setattr(plans, "Planner", lambda *given, **how: (*given, how))
    of = plans_of(given := job(dp=2), data := samples([9] * 300), first_sample=8)
    of._jobs["train"].append((5, larger := job(dp=2, num_micro_batches=8)))
    made, of_job, rank, how = of.planner("train", 3)
    assert of.planner("train", 3)[0] is made and (of_job, rank, made.step) == (given, 1, 3)
    assert how.pop("count") and how == {"first_step": 3, "patience_seconds": 210, "later": [(5, larger)]}
    assert made.next().drawn["index"].tolist() == data.documents(8, 12)["index"].tolist()


def test_rows_that_are_left_out_leave_no_step_without_a_document(rank_1):
    """Found at the start; not where the batch grows, which nobody knows ahead."""
    lengths = np.array([5] * 4 + [0] * 4 + [5] * 4)
    of_file = {"rows": np.arange(12), "begins": np.arange(13), "lengths": lengths}
    data = Samples(datasets=[Rows(**of_file, context_length=64, num_samples=12)], context_length=64)
    plans_of(two := job(dp=2), data).planner("train", 0)
    skips = {"wlb_sft_skip": ("long",)}
    with pytest.raises(ValueError, match="no document begins, or is trained, in the 4 samples from 4 on"):
        plans_of(two, data, **skips).planner("train", 0)
    grows = plans_of(two, data, **skips)
    grows._jobs["train"].append((1, job(dp=2, num_micro_batches=8)))
    grows.planner("train", 0)


def test_the_gain_is_over_the_windows_of_the_steps_own_samples():
    """Fewer in the last step; endless where samples have an order."""
    given, lengths = job(dp=2, pp=2, packing=AdaptivePacking()), [30, 5, 61, 9, 64] * 9
    packs, data, gains = packer(given, lengths), samples(lengths), []
    for _ in range(-(-len(data) // 4)):
        plan, of = plan_step(packs, given), Namespace(job=lambda *_: given)
        first, of._splits = plan.packed.first, {"train": Namespace(samples=data)}
        gains.append(Plans.gain(of, plan))
        assert gains[-1] == packing_gain(plan.batch, data.documents(first, min(first + 4, len(data))), given)
    assert len(data) % 4 and len({*gains}) > 2
    endless = Samples(datasets=data.datasets, context_length=64, order=lambda places: places[::-1] % len(data))
    of._splits["train"].samples = endless
    assert Plans.gain(of, plan) == packing_gain(plan.batch, endless.documents(first, first + 4), given) != gains[-1]


@pytest.mark.parametrize(
    ("kind", "waits", "folder"),
    [(None, False, "load"), (None, True, "load"), ("global", True, "load"), ("global", False, "save")],
)
def test_what_waits_at_a_non_persistent_checkpoint_lies_with_the_others(kind, waits, folder, tmp_path):
    args = Namespace(load=str(tmp_path / "load"), save=str(tmp_path / "save"), non_persistent_ckpt_type=kind)
    (tmp_path / "load").mkdir()
    if waits:
        state_path(args.load, 7).touch()
    assert Plans._folder(Namespace(_args=args), 7) == str(tmp_path / folder)
    args.load = None
    assert Plans._folder(Namespace(_args=args), 7) == (args.save if kind else None)


@pytest.mark.parametrize(("loads", "waits", "told"), [(False, True, False), (True, False, False), (True, True, True)])
def test_documents_that_wait_are_left_only_if_told(loads, waits, told, tmp_path):
    if waits:
        state_path(str(tmp_path), 7).touch()
    of = Namespace(_args=Namespace(wlb_no_load=told), _folder=lambda step: str(tmp_path) if loads else None)
    Plans._leave(of, 7)
    of._args.wlb_no_load = False
    if loads and waits:
        with pytest.raises(ValueError, match="documents wait at the checkpoint 7 of .*; give the delay"):
            Plans._leave(of, 7)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({}, [2, 3, 9]),
        ({"non_persistent_global_ckpt_dir": "apart"}, [2, 4, 9]),
        ({"non_persistent_ckpt_type": "local"}, [1, 2, 3, 4, 9]),
    ],
)
def test_what_waited_goes_with_its_checkpoint(given, kept, tmp_path):
    """Persistent or not; the one that is being saved has no folder yet."""
    for name in ("iter_0000002", "non_persistent/iter_0000003", "apart/iter_0000004"):
        (tmp_path / name).mkdir(parents=True)
    for step in (1, 2, 3, 4, 9):
        state_path(str(tmp_path), step).touch()
    given = {name: str(tmp_path / value) if "dir" in name else value for name, value in given.items()}
    Plans._forget(Namespace(_args=Namespace(save=str(tmp_path), **given)), 9)
    assert [step for step in range(10) if state_path(str(tmp_path), step).exists()] == kept


def test_a_checkpoint_has_what_waited_after_its_step(monkeypatch):
    """That of the start, if no step ran since; nothing where nothing may wait."""
    saved, forgotten = [], []
    monkeypatch.setattr(plans.state, "save", lambda *given: saved.append(given))
    of = Namespace(first_step=3, _first_state="first", _documents=8, _forget=forgotten.append)
    of._args = Namespace(save="folder", consumed_train_samples=40)
    of.trained = lambda iteration: Namespace(packed=Namespace(state=f"after {iteration}"))
    waits, asked = job(packing=AdaptivePacking(max_delay_steps=20)), []
    of.job = lambda split, step: asked.append((split, step)) or waits
    for iteration, state in ((3, "first"), (4, "after 4")):
        Plans.save(of, iteration)
        assert saved.pop() == (state_path("folder", iteration), state, waits, 40, 8)
    assert (forgotten, asked) == ([3, 4], [("train", 2), ("train", 3)])
    waits = job(packing=AdaptivePacking())
    Plans.save(of, 5)
    assert not saved and forgotten == [3, 4]


def test_ranks_compare_version_sources_and_extension(monkeypatch, tmp_path):
    (tmp_path / "room").mkdir()
    names = ["a.py", "room/b.py", "core.so"]
    monkeypatch.setattr(megatron_wlb, "__file__", str(tmp_path / "__init__.py"))
    monkeypatch.setattr(plans._native, "__file__", str(tmp_path / "core.so"))

    def code(changed=""):
        for name in names:
            (tmp_path / name).write_text(f"{name}{changed == name}")
        return plans._code()

    before = code()
    for name, what in (("a.py", "Python code"), ("room/b.py", "Python code"), ("core.so", "C++ core")):
        assert {each for each, _ in code(name).items() ^ before.items()} == {what}
    monkeypatch.setattr(megatron_wlb, "__version__", "9")
    assert {each for each, _ in code().items() ^ before.items()} == {"version"} and code()["version"] == digest_of("9")
