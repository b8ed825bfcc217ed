"""What can fail around a run: full disks, folders that refuse, a dead planner, disks that are slow or stuck.

Each is an error that says what and where, never a wait without end; and what was written before stays whole.
"""

import contextlib
import ctypes
import json
import os
import resource
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from megatron_wlb.adapter import checkpoint, data, log
from megatron_wlb.adapter.checkpoint import load_state, save_state
from megatron_wlb.adapter.job import WlbJob
from megatron_wlb.plan import document_log, step
from megatron_wlb.plan.dataset import read_index, read_tokens
from megatron_wlb.plan.step import Layout, Planner
from megatron_wlb.plan.types import DOCUMENT
from tests.adapter.training import train
from tests.plan.test_document_log import packer

LARGE = {"step": 2, "waiting": {"pool": [[k, 0, k, 0, 64, 2] for k in range(10_000)]}}
SAVE = "--optimizer adam --lr 1e-3 --save-interval 1".split()


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 64 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = [shutil.which("mount") or pytest.skip("no mount"), *"-t tmpfs -o size=64k tmpfs".split(), folder]
    mounted = subprocess.run(command, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"may not mount a small disk: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


@contextlib.contextmanager
def files_up_to(size):
    """No file may become larger; a write beyond is cut, and the next one fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextlib.contextmanager
def not_root():
    """As a user whom permissions stop."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


def contents(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def test_a_full_disk_leaves_the_states_before(small_disk):
    save_state(str(small_disk), 1, {"step": 1}, {})
    before = contents(small_disk)
    for iteration in (1, 2):
        with pytest.raises(OSError, match=rf"cannot save .*iter_000000{iteration}.wlb.json: No space left on device; "):
            save_state(str(small_disk), iteration, LARGE, {})
        assert contents(small_disk) == before
    save_state(str(small_disk), 2, {"step": 2}, {})
    assert load_state(str(small_disk), 2) == ({"step": 2}, {})


def test_a_folder_that_refuses_is_named():
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "ckpt"
        save_state(str(folder), 1, {"step": 1}, {})
        before = contents(folder)
        for path in (folder, Path(name)):
            path.chmod(0o555)
        with not_root():
            for refusing in (folder, folder / "new"):
                with pytest.raises(PermissionError, match=rf"cannot save .*{refusing}/iter_.*: Permission denied; "):
                    save_state(str(refusing), 1, LARGE, {})
        assert contents(folder) == before
        for path in (Path(name), folder):
            path.chmod(0o755)


def append_to_log(path, number, _):
    log.append(str(path), {"step": number, "lengths": list(range(99))})


def append_to_document_log(path, number, packing):
    document_log.append(path, number, packing)


def steps_of(path):
    if path.read_bytes()[:2] == b"\x1f\x8b":
        return np.unique(document_log.read(path)["step"]).tolist()
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


@pytest.mark.parametrize("room", [0, 1, 100])
@pytest.mark.parametrize("append", [append_to_log, append_to_document_log])
def test_a_full_disk_leaves_whole_steps_in_a_log(append, room, tmp_path):
    path, made = tmp_path / "log", packer("wlb", [np.arange(1, 90)])
    packings = [made.next().packing for _ in range(3)]
    append(path, 0, packings[0])
    size = path.stat().st_size
    with files_up_to(size + room), pytest.raises(OSError, match=f"cannot append .* {path}: File too large; free space"):
        append(path, 1, packings[1])
    assert path.stat().st_size == size
    append(path, 2, packings[2])
    assert steps_of(path) == [0, 2]


def test_a_pipe_is_written_while_it_is_read_and_refused_while_not(tmp_path):
    path, entry = tmp_path / "pipe", {"lengths": list(range(100_000))}
    os.mkfifo(path)
    with pytest.raises(OSError, match=f"cannot append .* to --wlb-log {path}: No such device or address; "):
        log.append(str(path), entry)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(reader, True)
    writer = threading.Thread(target=log.append, args=(str(path), entry))
    writer.start()
    received = b""
    while not received.endswith(b"\n"):
        received += os.read(reader, 1 << 14)
    writer.join()
    os.close(reader)
    assert json.loads(received) == entry


@pytest.mark.parametrize("kind", ["pipe", "folder", "device"])
def test_only_a_file_is_mended_as_a_document_log(kind, tmp_path):
    path = Path("/dev/full") if kind == "device" else tmp_path / kind
    if kind != "device":
        (os.mkfifo if kind == "pipe" else os.mkdir)(path)
    with pytest.raises(ValueError, match=f"{path} is not a document log but a folder, pipe or device; name"):
        document_log.mend(path)


@pytest.mark.parametrize("suffix", [".idx", ".bin"])
def test_a_pipe_in_place_of_a_dataset_is_refused(suffix, dataset, tmp_path):
    for name in (".idx", ".bin"):
        shutil.copy(dataset + name, tmp_path / f"pipe{name}")
    prefix, pipe = str(tmp_path / "pipe"), tmp_path / f"pipe{suffix}"
    pipe.unlink()
    os.mkfifo(pipe)
    with pytest.raises(RuntimeError, match=f"dataset file {pipe} is a folder, pipe or device; give --data-path"):
        train(1, prefix, timeout=60)
    for read in (read_index, read_tokens) if suffix == ".idx" else (read_index,):
        with pytest.raises(ValueError, match="is a folder, pipe or device"):
            read(prefix)


def test_a_log_on_a_full_disk_ends_the_run(dataset):
    message = "cannot append .* to --wlb-log /dev/full: No space left on device; free space there, or name a file"
    with pytest.raises(RuntimeError, match=message):
        train(1, dataset, "--wlb-log", "/dev/full")


@pytest.mark.parametrize("what", ["state", "documents"])
def test_a_run_goes_on_from_what_was_whole_when_the_disk_was_full(what, dataset, tmp_path, monkeypatch):
    checkpoints, documents = tmp_path / "ckpt", tmp_path / "documents"
    flags = [*SAVE, "--save", str(checkpoints), "--load", str(checkpoints), "--wlb-document-log", str(documents)]

    def full(original, number):
        def limited(target, iteration, *rest, **options):
            size = documents.stat().st_size if what == "documents" and number == iteration else 0
            with files_up_to(size + 100) if iteration == number else contextlib.nullcontext():
                original(target, iteration, *rest, **options)

        return limited

    with monkeypatch.context() as patch:
        if what == "state":
            patch.setattr(checkpoint, "save_state", full(save_state, 2))
            message = "cannot save the packer state .*iter_0000002.wlb.json: File too large; earlier checkpoints are as"
        else:
            patch.setattr(document_log, "append", full(document_log.append, 1))
            message = "cannot append .* to --wlb-document-log .*documents: File too large; free space there"
        with pytest.raises(RuntimeError, match=message):
            train(1, dataset, *flags)
    assert [path.name for path in checkpoints.glob("*.wlb.json*")] == ["iter_0000001.wlb.json"]
    assert (checkpoints / "latest_checkpointed_iteration.txt").read_text() == "1"
    assert steps_of(documents) == ([0, 1] if what == "state" else [0])

    train(1, dataset, *flags)
    state, _ = load_state(str(checkpoints), 2)
    waiting = np.array([tuple(row) for rows in state["waiting"].values() for row in rows], DOCUMENT)
    found = document_log.audit(document_log.read(documents), waiting, state["stream"]["position"])
    assert found.clean and found.steps == 2


@pytest.mark.parametrize("error", [MemoryError("no room to plan in"), SystemExit("ended")], ids=repr)
@pytest.mark.parametrize(("size", "rank"), [(1, 0), (2, 1)])
def test_what_ends_the_planner_reaches_the_training_loop(size, rank, error, dataset, tmp_path, monkeypatch):
    """At the step that has no plan, after those that have one."""
    plan_step, path = step.plan_step, tmp_path / "log.jsonl"

    def failing(made, layout):
        if made.step == 2 and dist.get_rank() == rank:
            raise error
        return plan_step(made, layout)

    monkeypatch.setattr(step, "plan_step", failing)
    with pytest.raises(RuntimeError, match=rf"(?s){type(error).__name__}: {error}.*planning failed before step 2"):
        train(size, dataset, "--train-iters", "4", log=path, timeout=60)
    assert steps_of(path) == [1, 2]


def test_a_signal_to_the_process_group_ends_the_run_with_a_checkpoint(dataset, tmp_path, monkeypatch):
    """As launchers and clusters send it; the processes that read ahead get it, too."""
    forward, sent = WlbJob.forward_step, []

    def signalled(self, *args, **kwargs):
        if self._last_step == 1 and not sent:
            sent.append(os.killpg(os.getpgrp(), signal.SIGTERM))
            time.sleep(0.5)  # until who dies of it has
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(WlbJob, "forward_step", signalled)
    flags = "--num-workers 1 --exit-signal-handler --train-iters 4 --save-interval 9 --ckpt-format torch".split()
    with pytest.raises(RuntimeError, match="SystemExit"):  # upstream's way to stop
        train(1, dataset, *flags, "--save", str(tmp_path))
    assert load_state(str(tmp_path), 2)[0]["step"] == 2
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "2"


def planner():
    return Planner(
        packer("wlb", [np.arange(1, 90)]), Layout(dp_size=1, dp_rank=0, crossover_tokens=9), first_step=0, ahead=1
    )


def test_a_planner_that_was_killed_while_it_waited_is_missed():
    made = planner()
    made.get(0)
    while 1 not in made._plans:  # what it may plan ahead
        time.sleep(0.01)
    time.sleep(0.1)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(made._thread.ident), ctypes.py_object(KeyboardInterrupt))
    assert made.get(1).step == 1
    with pytest.raises(RuntimeError, match="planning failed before step 5") as failed:
        made.get(5)
    assert isinstance(failed.value.__cause__, KeyboardInterrupt)


def test_a_planner_without_a_thread_is_missed(monkeypatch):
    """As in a process forked from the one that plans."""
    monkeypatch.setattr(Planner, "_run", lambda self: None)
    with pytest.raises(RuntimeError, match="planning failed before step 3") as failed:
        planner().get(3)
    assert "thread has ended at step 0, or this process was forked" in str(failed.value.__cause__)


def test_a_slow_disk_and_a_slow_planner_take_longer_and_change_nothing(dataset, tmp_path, monkeypatch):
    flags = "--pipeline-model-parallel-size 2 --num-workers 2 --train-iters 3 --wlb-plan-ahead 1".split()
    plain = train(2, dataset, *flags, log=tmp_path / "plain.jsonl")
    plan_step, tokens = step.plan_step, data.DocumentDataset._tokens

    def slow_plan(made, layout):
        time.sleep(0.2)
        return plan_step(made, layout)

    def slow_tokens(self, document, start, count):
        time.sleep(0.003)
        return tokens(self, document, start, count)

    monkeypatch.setattr(step, "plan_step", slow_plan)
    monkeypatch.setattr(data.DocumentDataset, "_tokens", slow_tokens)
    slow = train(2, dataset, *flags, log=tmp_path / "slow.jsonl")
    assert [(e["step"], e["digest"], e["loss"]) for e in slow["log"]] == [
        (e["step"], e["digest"], e["loss"]) for e in plain["log"]
    ]
    assert all(e["plan_wait_ms"] > 0 for e in slow["log"])
