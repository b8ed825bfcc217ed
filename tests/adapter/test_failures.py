"""What can fail around a run: full disks, folders that refuse, a dead planner, disks that are slow or stuck.

Each is an error that says what and where, never a wait without end; and what was written before stays whole.
"""

import contextlib
import multiprocessing
import os
import resource
import signal
import subprocess
import sys

import pytest
import torch.distributed as dist

from megatron_wlb.adapter import data
from megatron_wlb.adapter.plans import state_path
from megatron_wlb.adapter.training import Training
from megatron_wlb.packing import state
from megatron_wlb.plan import step
from tests.adapter.training import ADAM, entries, train
from tests.limits import files_up_to


def test_a_log_that_would_replace_the_data_is_found_before_the_first_step(dataset):
    with pytest.raises(RuntimeError, match=r"--wlb-log .*corpus.bin is a file that the run reads; name anoth"):
        train(2, dataset, flags_of_rank={1: ["--wlb-log", f"{dataset}.bin"]})  # the last rank writes it


def test_more_datasets_than_files_may_be_open_are_told_with_the_limit(dataset, tmp_path, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (200, 200))  # which the run makes its own
    with pytest.raises(RuntimeError, match="more files open than the 200 that this process may; raise its hard limit"):
        train(1, " ".join([dataset] * 200), "--data-cache-path", str(tmp_path))


def test_a_run_goes_on_from_what_was_whole_when_the_disk_was_full(dataset, tmp_path, monkeypatch):
    """With delay, what waits is written before a checkpoint counts."""
    checkpoints = tmp_path / "ckpt"
    flags = [*ADAM, "--save", str(checkpoints), "--load", str(checkpoints), "--save-interval", "1"]
    flags += ["--wlb-packing", "adaptive:20"]
    save = state.save

    def limited(path, *rest):
        with files_up_to(100) if path.name == "iter_0000002.wlb.json" else contextlib.nullcontext():
            save(path, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(state, "save", limited)
        message = "cannot save the packer state .*iter_0000002.wlb.json: File too large; earlier checkpoints are as"
        with pytest.raises(RuntimeError, match=message):
            train(1, dataset, *flags)
    assert [path.name for path in checkpoints.glob("*.wlb.json*")] == ["iter_0000001.wlb.json"]
    assert (checkpoints / "latest_checkpointed_iteration.txt").read_text() == "1"
    train(1, dataset, *flags)
    assert state.load(state_path(str(checkpoints), 2))[0]["step"] == 2


@pytest.mark.parametrize(("size", "error"), [(1, MemoryError("no room to plan in")), (2, SystemExit("ended"))])
def test_what_ends_the_planner_reaches_the_training_loop(size, error, dataset, tmp_path, monkeypatch):
    """At the step that has no plan, after those that have one; of one rank, too."""
    plan_packed, path = step.plan_packed, tmp_path / "log.jsonl"

    def failing(packed, *rest):
        if packed.step == 2 and dist.get_rank() == size - 1:
            raise error
        return plan_packed(packed, *rest)

    monkeypatch.setattr(step, "plan_packed", failing)
    with pytest.raises(RuntimeError, match=rf"(?s){type(error).__name__}: {error}.*planning failed before step 2"):
        train(size, dataset, "--train-iters", "4", log=path)
    assert [entry["step"] for entry in entries(path)] == [1, 2]


def test_a_signal_to_the_process_group_ends_the_run_with_a_checkpoint(dataset, tmp_path, monkeypatch):
    """As launchers and clusters send it; the process that reads ahead gets it, too, and reads the rest of the step."""
    forward, rows, load = Training.forward_step, data.SampleReader.rows, Training.load
    sent, reads = tmp_path / "sent", tmp_path / "reads"

    def signalled(self, *args, **kwargs):
        if self._plans.last_step == 1 and not sent.exists():
            os.killpg(os.getpgrp(), signal.SIGTERM)
            sent.write_text(str(os.getpid()))
        return forward(self, *args, **kwargs)

    def noted(self, *args):
        if sent.exists():
            with reads.open("a") as file:
                file.write(f"{os.getpid()}\n")
        return rows(self, *args)

    def spawning(self, *args):
        multiprocessing.set_start_method("spawn", force=True)  # what reads is forked even so: it has what is here
        load(self, *args)

    monkeypatch.setattr(Training, "load", spawning)
    monkeypatch.setattr(Training, "forward_step", signalled)
    monkeypatch.setattr(data.SampleReader, "rows", noted)
    flags = "--num-workers 1 --exit-signal-handler --train-iters 4 --save-interval 9 --ckpt-format torch".split()
    with pytest.raises(RuntimeError, match="SystemExit"):  # upstream's way to stop
        train(1, dataset, *flags, "--save", str(tmp_path))
    (reader,) = set(reads.read_text().split())
    assert reader != sent.read_text()
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "2"


ENDS = """
import multiprocessing, os, signal, types
import torch.utils.data
from megatron_wlb.adapter.data import loader

class Same(torch.utils.data.Dataset):
    def __getitem__(self, plan):
        return plan

multiprocessing.set_start_method("forkserver")  # as Python 3.14 does; workers are forked even so
planner = types.SimpleNamespace(get=lambda step: types.SimpleNamespace(micro_batches=[step]))
batches = loader(Same(), planner, 0, 2, signal.SIGTERM)  # a global is still there when the process ends
read = [next(batches), next(batches)]  # both workers are there
for worker in multiprocessing.active_children():
    os.kill(worker.pid, signal.SIGTERM)
print(read + [next(batches) for _ in range(8)])
"""


def test_data_workers_outlive_the_exit_signal_and_end_with_the_run():
    done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=600, check=False)
    assert (done.stdout, done.returncode) == (f"{list(range(10))}\n", 0), done.stderr
