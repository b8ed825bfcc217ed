"""Whole runs beside parity and resume: ranks that disagree, workers, memory, and upstream's other
ways to run: ends by samples or time, replays of a step, asynchronous saving."""

import multiprocessing
import re
import time
from argparse import Namespace
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.training import training

from megatron_wlb.adapter import plans
from megatron_wlb.adapter.data import BatchDataset, SampleReader
from megatron_wlb.adapter.plans import state_path
from megatron_wlb.adapter.sources import datasets
from megatron_wlb.adapter.training import Training
from megatron_wlb.plan import step
from tests.adapter.training import ADAM, CP2, PP2, entries, full, train
from tests.jobs import job
from tests.worlds import run_world


def losses(path):
    """(step, loss, digest of the plan) of every line of a step log."""
    return [(e["step"], e["loss"], e["plan"]) for e in entries(path)]


@pytest.fixture(scope="module")
def whole(dataset, tmp_path_factory):
    """`losses` of four steps on one process."""
    log = tmp_path_factory.mktemp("whole") / "log.jsonl"
    train(1, dataset, *ADAM, "--train-iters", "4", log=log)
    return losses(log)


def test_ranks_with_other_data_stop_in_the_first_step(dataset, monkeypatch):
    """By the names and sizes of files."""
    split_data = datasets.split_data

    def other(built, args, split, first_sample):
        found = split_data(built, args, split, first_sample)
        differs = dist.get_rank() == 1 and split == "valid"
        return replace(found, identity=found.identity ^ 1) if differs else found

    monkeypatch.setattr(datasets, "split_data", other)
    message = r"train step 0 differently: rank 1 differs from rank 0 in valid data; check that all"
    with pytest.raises(RuntimeError, match=message):
        train(2, dataset, *CP2.split(), *"--eval-iters 1 --eval-interval 1".split())


def test_ranks_that_plan_a_later_step_differently_stop_before_it(dataset, tmp_path, monkeypatch):
    """Ranks are asked while the step before runs."""
    plan_packed = step.plan_packed

    def differing(*given):
        plan = plan_packed(*given)
        return replace(plan, own_digest=plan.own_digest ^ 1) if plan.step == dist.get_rank() == 1 else plan

    monkeypatch.setattr(step, "plan_packed", differing)
    log = tmp_path / "log.jsonl"
    with pytest.raises(RuntimeError, match="train step 1 differently: rank 1 differs from rank 0 in order or shards"):
        train(2, dataset, *CP2.split(), log=log)
    assert [entry["step"] for entry in entries(log)] == [1]  # as upstream counts: step 0 here


def test_ranks_are_told_in_what_they_planned_differently():
    """On all ranks; what only ranks of one data-parallel rank share may differ between others."""
    assert run_world(_compared, 4) == 4 * [
        [
            None,
            "rank 3 differs from rank 0 in C++ core",
            "rank 1 differs from rank 0 in documents, placement",
            "rank 3 differs from rank 2 in order or shards of micro-batches",
        ]
    ]


def _compared():
    """What `RankCheck` said on this rank of DP=2 x CP=2, of plans that agree and of some that do not."""
    parallel_state.initialize_model_parallel(context_parallel_size=2)
    rank, said = dist.get_rank(), []
    cases = [{}, {3: {"C++ core": 1}}, {1: {"documents": 0, "placement": 5}, 2: {"placement": 6}}, {3: {"own": 9}}]
    for case in cases:
        parts = {"C++ core": 0, "documents": (1 << 63) - 1, "placement": 3, "own": rank // 2} | case.get(rank, {})
        own = parts.pop("own")
        try:
            plans.RankCheck("valid", 7, parts, own, None, torch.device("cpu")).check()
            said.append(None)
        except RuntimeError as error:
            said.append(re.search("valid step 7 differently: (.*); check", str(error))[1])
    return said


def test_ranks_agree_on_what_their_plans_do_not_tell(monkeypatch):
    """Files, trained targets and their weights: each changes the digest of its own name."""
    monkeypatch.setattr(plans, "_code", dict)

    def same(identity=1, masks=True, samples=2, digest=False, per_token=False):
        args = Namespace(iteration=0, wlb_digest=digest, wlb_per_token_loss=per_token)
        tokens = Namespace(datasets=[Namespace(masks=masks)])
        reader = Namespace(samples_per_micro_batch=samples, depths=0, digest=digest, **vars(tokens))
        return plans.Plans(args, job(), {"train": Namespace(identity=identity)}, {"train": reader})._same

    for change, name in (
        ({"identity": 2}, "train data"),
        ({"masks": False}, "train loss mask"),
        ({"per_token": True}, "train loss mask"),
        ({"samples": None}, "train micro-batch size"),
        ({"digest": True}, "--wlb-digest"),
    ):
        assert {each for each, _ in same(**change).items() ^ same().items()} == {name}


def test_data_workers_a_slow_disk_and_a_slow_planner_change_nothing(dataset, tmp_path, monkeypatch):
    """On stages between the first and the last, too, and batches are made once for both of their model chunks."""
    size, layout = 3, "--pipeline-model-parallel-size 3 --num-virtual-stages-per-pipeline-rank 2"
    flags = f"{layout} --num-layers 6 --global-batch-size 9 --num-workers".split()
    train(size, dataset, *flags, "0", log=tmp_path / "plain.jsonl")
    made = multiprocessing.get_context("fork").Value("i", 0)
    get, rows, plan_packed = BatchDataset.__getitem__, SampleReader.rows, step.plan_packed

    def in_a_worker(self, plan):
        assert torch.utils.data.get_worker_info() is not None
        with made.get_lock():
            made.value += 1
        return get(self, plan)

    def slow(call, seconds):
        return lambda *given: time.sleep(seconds) or call(*given)

    monkeypatch.setattr(BatchDataset, "__getitem__", in_a_worker)
    monkeypatch.setattr(SampleReader, "rows", slow(rows, 0.003))
    monkeypatch.setattr(step, "PLAN_AHEAD", 1)
    monkeypatch.setattr(step, "plan_packed", slow(plan_packed, 0.2))
    workers = train(size, dataset, *flags, "2", log=tmp_path / "workers.jsonl")
    assert losses(tmp_path / "workers.jsonl") == losses(tmp_path / "plain.jsonl")
    assert all(e["plan_wait_ms"] > 0 for e in workers["log"])
    ahead = 2 * 2  # torch's DataLoader reads two batches ahead in each worker
    assert 2 * 9 * size <= made.value <= (2 * 9 + ahead) * size


def test_the_number_of_micro_batches_is_chosen(dataset, tmp_path):
    """By all ranks alike; a resumed run chooses the same, and goes on as if it had not been cut."""
    common = [*ADAM, *PP2.split(), "--wlb-packing", "adaptive", "--num-layers", "2"]
    uncut, log, checkpoint = tmp_path / "uncut", tmp_path / "log", str(tmp_path / "ckpt")
    train(2, dataset, *common, log=uncut)
    saving = ["--save", checkpoint, "--load", checkpoint, "--save-interval", "1"]
    for steps in ("1", "2"):
        train(2, dataset, *common, *saving, "--train-iters", steps, "--override-opt-param-scheduler", log=log)
    assert len({e["num_micro_batches"] for e in entries(uncut)}) == 1
    assert losses(log) == losses(uncut)
    assert entries(log)[0]["job"]["num_micro_batches"] > entries(log)[0]["job"]["global_batch_size"] == 8


def test_steps_are_replayed(dataset, tmp_path, monkeypatch):
    """A transient error is injected into every step after the first, each of which runs again, and nothing else."""
    plain, replayed = tmp_path / "plain.jsonl", tmp_path / "replayed.jsonl"
    common = [*ADAM, *PP2.split(), *"--wlb-micro-batches 16 --train-iters 3 --num-layers 2".split()]
    train(2, dataset, *common, log=plain)
    forward = Training.forward_step

    def counted(self, *args, **kwargs):
        with (tmp_path / f"forward{dist.get_rank()}").open("a") as file:
            file.write(".")
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(Training, "forward_step", counted)
    inject = "--rerun-mode validate_results --error-injection-rate 1 --error-injection-type transient_error".split()
    inject += ["--no-check-for-nan-in-loss-and-grad", "--check-for-spiky-loss"]  # the second does not end a run
    train(2, dataset, *common, *inject, log=replayed)
    assert losses(replayed) == losses(plain)
    assert [(tmp_path / f"forward{rank}").stat().st_size for rank in range(2)] == [16 * (1 + 2 + 2)] * 2


def test_a_step_that_fails_validation_is_saved_as_still_to_come(dataset, whole, tmp_path):
    """A persistent error is injected into a step after the first: it is replayed, saved for another GPU, replayed from
    there, and trained when the run goes on without validation."""
    log, checkpoint = tmp_path / "log.jsonl", str(tmp_path / "ckpt")
    saving = f"--save {checkpoint} --save-interval 9"
    common = [*ADAM, "--train-iters", "4", *saving.split()]
    inject = "--rerun-mode validate_results --error-injection-rate 1 --error-injection-type persistent_error".split()
    with pytest.raises(RuntimeError, match="SystemExit: 16"):
        train(1, dataset, *common, *inject, log=log)
    assert losses(log) == whole[:1]
    with pytest.raises(RuntimeError, match="SystemExit: 16"):  # it ran once more, on the same machine
        train(1, dataset, *common, "--load", checkpoint, "--rerun-mode", "validate_results", log=log)
    train(1, dataset, *common, "--load", checkpoint, "--rerun-mode", "disabled", log=log)
    assert losses(log) == whole


@pytest.mark.parametrize("worker", [full([]), ["--use-persistent-ckpt-worker"]])
def test_asynchronous_saving(worker, dataset, tmp_path, monkeypatch):
    """What waits is there before the checkpoint counts as saved."""
    log, checkpoint = tmp_path / "log.jsonl", tmp_path / "ckpt"
    common = [*ADAM, "--train-iters", "4", "--wlb-packing", "adaptive:20"]
    train(1, dataset, *common, log=(uncut := tmp_path / "uncut.jsonl"))
    common += ["--save", str(checkpoint), "--save-interval", "1"]
    common += ["--async-save", "--async-strategy", "mcore", *worker]
    order = tmp_path / "order"
    finalize = training.maybe_finalize_async_save

    def watched_finalize(*args, **kwargs):
        result = finalize(*args, **kwargs)
        tracker = checkpoint / "latest_checkpointed_iteration.txt"
        if tracker.is_file():
            iteration = int(tracker.read_text())
            with order.open("a") as file:
                file.write(f"{iteration} {state_path(str(checkpoint), iteration).is_file()}\n")
        return result

    monkeypatch.setattr(training, "maybe_finalize_async_save", watched_finalize)
    with pytest.raises(RuntimeError, match="SystemExit"):
        train(1, dataset, *common, "--exit-interval", "2", log=log)
    seen = set(order.read_text().splitlines())
    assert "2 True" in seen and not any("False" in line for line in seen)
    assert (checkpoint / "latest_checkpointed_iteration.txt").read_text() == "2"
    train(1, dataset, *common, "--load", str(checkpoint), log=log)
    assert losses(log) == losses(uncut)


def test_a_rank_that_hangs_ends_in_the_timeout(dataset, monkeypatch):
    """A minute of --distributed-timeout-minutes takes four seconds here."""
    forward = Training.forward_step

    def hang(self, *args, **kwargs):
        if dist.get_rank() == 1 and self._plans.last_step == 1:
            dist.distributed_c10d.time.sleep(3600)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(Training, "forward_step", hang)
    monkeypatch.setattr(parallel_state, "timedelta", lambda minutes: timedelta(seconds=4 * minutes))
    with pytest.raises(RuntimeError, match="[Tt]imed out"):
        train(2, dataset, *PP2.split(), "--distributed-timeout-minutes", "1")
