"""What reads files that others may have written: how to call it, what must hold of what it accepts, and whole inputs.

A reader refuses by ValueError or OSError; every other exception is a finding, `Broken` too.
"""

import argparse
import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.fixed import FixedPacking
from megatron_rehearsal.__main__ import task_of
from megatron_rehearsal.allowed import of_log
from megatron_wlb.cli import run_log
from megatron_wlb.cli.job import add_job_flags, run_of
from megatron_wlb.describe.flags import add_wlb_arguments
from megatron_wlb.hardware import profile
from megatron_wlb.packing import state
from megatron_wlb.packing.adaptive import AdaptivePacking
from megatron_wlb.packing.paper import PaperPacking
from megatron_wlb.plan.dataset import check_index, read_index, read_lengths, suspicious_layout
from megatron_wlb.plan.packer import Packer
from tests import jobs
from tests.jobs import job

BIN_BYTES = 4096
LENGTHS = (np.arange(60) * 37 % 200, np.arange(40) * 11 % 30 + 1)
"""Lengths of the documents of two datasets; a few are empty, some longer than the window."""
DELAYING = {
    "paper": PaperPacking(),
    "adaptive": AdaptivePacking(max_delay_steps=20),
    "fixed": FixedPacking(global_batches=3),
}


class Broken(Exception):
    """What was accepted is not what it ought to be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A reader."""

    read: Callable[[bytes, Path], None]
    """Reads an input, for which it may write into a folder."""
    seeds: Callable[[], list[bytes]] = list
    """Whole inputs beside those of the corpus, which go by the code."""
    is_text: bool = True


def require(holds: object, what: str) -> None:
    if not holds:
        raise Broken(what)


def _index(data: bytes, folder: Path) -> None:
    (folder / "data.idx").write_bytes(data)
    if not (folder / "data.bin").exists():
        (folder / "data.bin").write_bytes(bytes(BIN_BYTES))
    lengths = read_lengths(str(folder / "data"))
    index = read_index(str(folder / "data"))
    check_index(str(folder / "data"))  # refuses nothing that is sound
    suspicious_layout(str(folder / "data"))
    require(np.array_equal(lengths, index.lengths), "both readers see the same documents")
    require((lengths >= 0).all(), "no document has a negative length")
    for begin, count in zip(index.pointers.tolist(), lengths.tolist(), strict=True):
        require(not count or 0 <= begin <= BIN_BYTES - count * index.item_bytes, "documents lie within the .bin file")


def packer(policy: str) -> Packer:
    """Over `LENGTHS`, before its first step."""
    return jobs.packer(job(packing=DELAYING[policy]), *LENGTHS)


def _state(data: bytes, folder: Path) -> None:
    """What has not been refused is what was saved."""
    (folder / "state.json").write_bytes(data)
    try:
        loaded, *_ = state.load(folder / "state.json")
    except ValueError as error:
        raise error.__cause__ or error from None  # which says what it is, without the path
    require(loaded in [json.loads(seed)["packer"] for seed in _state_seeds()], "a state was changed")
    running = packer(loaded["policy"])
    running.load_state(loaded)
    require(running.next().step == loaded["step"], "the next step is planned")


@functools.cache
def _state_seeds() -> list[bytes]:
    seeds = []
    for policy in DELAYING:
        running = packer(policy)
        for step in range(9):
            if step in (0, 3, 8):
                saved = (running.state(), job().to_json(), 0, 0)
                seeds.append(json.dumps(dict(zip(state.FIELDS, saved, strict=True))).encode())
            running.next()
    return seeds


def _step_log(data: bytes, folder: Path) -> None:
    (folder / "log.jsonl").write_bytes(data)
    log = run_log.read(str(folder / "log.jsonl"), 2)
    require(log.gpus > 0 and (log.steps[:, :3] > 0).all(), "numbers, counts and times are over 0")
    require(((log.steps[:, 3] > 0) == (log.steps[:, 5] > 0)).all(), "steps have tokens unless they were skipped")
    require((np.diff(log.steps[:, 0]) > 0).all(), "steps are in order")


def _profile(data: bytes, folder: Path) -> None:
    (folder / "profile.json").write_bytes(data)
    loaded = profile.load_profile(str(folder / "profile.json"))
    require(all(np.isfinite(kernel.time(1, 3, 2)) for kernel in loaded.kernels(heads=8)), "times are finite")


def _profile_seeds() -> list[bytes]:
    folder = Path(profile.__file__).parent / "profiles"
    return [path.read_bytes() for path in sorted(folder.glob("*.json"))]


@functools.cache
def _typed() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_job_flags(parser)
    return parser.parse_args(["LOG"], argparse.Namespace(flags=[], launched=[]))


def _log(data: bytes, folder: Path) -> None:
    """The job of a run that has this log."""
    file = folder / "train.log"
    file.write_bytes(data)
    args = argparse.Namespace(**vars(_typed()) | {"log": str(file)})
    run = run_of(args)
    require(run.launched.is_log and run.arguments.world_size, "a log has its number of GPUs")
    job = run.job()
    require(job.parallel.num_gpus == run.arguments.world_size, "so has its job")


PARSED = """data_path train_data_path data_args_path per_split_data_args_path split cp_comm_type offload_modules
pipeline_model_parallel_layout recompute_modules wlb_packing wlb_cp_sharding wlb_cp_gradients
wlb_micro_batches wlb_max_tokens wlb_memory_budget wlb_strict wlb_digest wlb_sft_skip
wlb_mock_lengths""".split()
"""Arguments of a log that may be any text."""


@functools.cache
def _upstreams() -> argparse.ArgumentParser:
    from megatron.training.arguments import add_megatron_arguments

    return add_wlb_arguments(add_megatron_arguments(argparse.ArgumentParser()))


def _rehearsal(data: bytes, folder: Path) -> None:
    """What a rehearsal takes of this log: no text but what flags choose from, and what is parsed as words."""
    (folder / "train.log").write_bytes(data)
    args = argparse.Namespace(log=str(folder / "train.log"), gpu="h100", gpu_memory=None, steps=1)
    task, *_ = task_of(args, [], [])
    parser = _upstreams()
    taken, _ = of_log(task.stated, parser.parse_args([]), parser)
    chosen = {name for action in parser._actions for name in (action.choices or ())}
    for name, value in taken.items():
        words = [each for each in (value if isinstance(value, list | tuple) else [value]) if isinstance(each, str)]
        choices = profile.shipped_profiles() if name == "wlb_profile" else chosen
        require(name in PARSED or set(words) <= {*choices}, f"{name} {value!r} is taken")


TARGETS = {
    "index": Target(read=_index, is_text=False),
    "state": Target(read=_state, seeds=_state_seeds),
    "step_log": Target(read=_step_log),
    "profile": Target(read=_profile, seeds=_profile_seeds),
    "log": Target(read=_log),
    "rehearsal": Target(read=_rehearsal),
}
