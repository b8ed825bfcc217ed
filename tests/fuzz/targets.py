"""What reads files that others may have written: how to call it, what must hold of what it accepts, and whole inputs.

A reader refuses by ValueError or OSError; every other exception is a finding, `Broken` too.
"""

import argparse
import functools
import json
import struct
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_wlb.cli.compare import read_log
from megatron_wlb.cli.job import add_job_flags, run_of
from megatron_wlb.hardware import profile
from megatron_wlb.packing import POLICIES
from megatron_wlb.plan import document_log, state
from megatron_wlb.plan.dataset import read_index, read_tokens
from megatron_wlb.plan.packer import Packer, make_packer
from megatron_wlb.plan.stream import DocumentStream, Source
from megatron_wlb.types import DOCUMENT
from tests.jobs import job

BIN_BYTES = 4096
LENGTHS = (np.arange(60) * 37 % 200, np.arange(40) * 11 % 30 + 1)
"""Lengths of the documents of two datasets; a few have nothing to train, some are longer than the window."""


class Broken(Exception):
    """What was accepted is not what it ought to be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A reader."""

    read: Callable[[bytes, Path], None]
    """Reads an input, for which it may write into a folder."""
    seeds: Callable[[], list[bytes]]
    is_text: bool = True


def require(holds: Any, what: str) -> None:
    if not holds:
        raise Broken(what)


def _index(data: bytes, folder: Path) -> None:
    (folder / "data.idx").write_bytes(data)
    if not (folder / "data.bin").exists():
        (folder / "data.bin").write_bytes(bytes(BIN_BYTES))
    tokens = read_tokens(str(folder / "data"))
    index = read_index(str(folder / "data"))
    require(np.array_equal(tokens, index.tokens), "both readers see the same documents")
    require((tokens >= 0).all(), "no document has a negative length")
    for begin, count in zip(index.pointers.tolist(), tokens.tolist(), strict=True):
        require(not count or 0 <= begin <= BIN_BYTES - count * index.item_bytes, "documents lie within the .bin file")


def _index_seeds() -> list[bytes]:
    def index(lengths: list[int], boundaries: list[int], code: int = 4, item_bytes: int = 4) -> bytes:
        pointers = [item_bytes * sum(lengths[:i]) for i in range(len(lengths))]
        head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(lengths), len(boundaries))
        return head + struct.pack(
            f"<{len(lengths)}i{len(lengths)}q{len(boundaries)}q", *lengths, *pointers, *boundaries
        )

    return [
        index([3, 1, 4], [0, 1, 2, 3]),
        index([3, 1, 0, 4, 2], [0, 0, 2, 2, 4, 5, 5]),
        index([500, 12], [0, 2], code=8, item_bytes=2),
        index(list(range(40)), list(range(41)), code=1, item_bytes=1),
        index([1], [0, 1]) + b"\x00\x01",
    ]


def packer(policy: str) -> Packer:
    """Over `LENGTHS`, before its first step."""
    described = job(packing=POLICIES[policy]())
    data = [Source(lengths=lengths) for lengths in LENGTHS]
    return make_packer(DocumentStream(data, seed=3, context_length=described.context_length), described)


def _state(data: bytes, folder: Path) -> None:
    """What has not been refused is what was saved."""
    (folder / "state.json").write_bytes(data)
    try:
        loaded, _ = state.load(folder / "state.json")
    except ValueError as error:
        raise error.__cause__ or error from None  # which says what it is, without the path
    require(loaded in [json.loads(seed)["packer"] for seed in _state_seeds()], "a state was changed")
    running = packer(loaded["policy"])
    running.load_state(loaded)
    require(running.next().step == loaded["step"], "the next step is planned")


@functools.cache
def _state_seeds() -> list[bytes]:
    seeds = []
    for policy in ("wlb", "adaptive", "fixed", "original"):
        running = packer(policy)
        for step in range(9):
            if step in (0, 3, 8):
                seeds.append(json.dumps({"packer": running.state(), "job": job().to_json()}).encode())
            running.next()
    return seeds


def _documents(data: bytes, folder: Path) -> None:
    path = folder / "documents"
    path.write_bytes(data)
    rows, refusal = None, None
    try:
        rows = document_log.read(path)
        for lengths in (None, LENGTHS):
            document_log.audit(rows, np.empty(0, DOCUMENT), 0, lengths)
    except ValueError as error:
        refusal = error
    cut = document_log.mend(path)
    require(path.stat().st_size == len(data) - cut, "mending cuts off what it says")
    if cut < len(data):
        mended = document_log.read(path)
        require(rows is None or np.array_equal(mended, rows), "mending leaves whole steps alone")
    if refusal is not None:
        raise refusal


def _documents_seeds() -> list[bytes]:
    seeds = []
    with tempfile.TemporaryDirectory() as folder:
        for policy in ("wlb", "adaptive"):
            running, log = packer(policy), Path(folder, policy)
            for begins_anew in (False, False, True):
                step = running.next()
                document_log.append(log, step.step, step.batch, begins_anew=begins_anew)
                seeds.append(log.read_bytes())
    return [*seeds, seeds[-1][:-9]]


def _step_log(data: bytes, folder: Path) -> None:
    (folder / "log.jsonl").write_bytes(data)
    for step in read_log(str(folder / "log.jsonl")):
        require(step.measured_us > 0, "times are over 0")
        require(all(not len(each) or each.min() >= 1 for each in step.lengths), "lengths are over 0")


def _step_log_seeds() -> list[bytes]:
    entry = {"step": 1, "loss": 2.5, "step_ms": 31.5, "lengths": [[64, 7], [33]], "job": job().to_json()}
    return ["\n".join(json.dumps(entry | {"step": k}) for k in range(1, 4)).encode()]


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
    return parser.parse_args(["LOG"])


def _log(data: bytes, folder: Path) -> None:
    """The job of a run that has this log."""
    file = folder / "train.log"
    file.write_bytes(data)
    args = argparse.Namespace(**vars(_typed()) | {"log": str(file)})
    run = run_of(args, [])
    require(run.launched.is_log and run.arguments.world_size, "a log has its number of GPUs")
    job = run.job()
    require(job.parallel.num_gpus == run.arguments.world_size, "so has its job")


def _log_seeds() -> list[bytes]:
    arguments = {
        **{"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "world_size": 8, "swiglu": True, "fp8": None},
        **{"seq_length": 128, "global_batch_size": 16, "vocab_size": 100, "pipeline_model_parallel_size": 2},
        **{"virtual_pipeline_model_parallel_size": 2, "hidden_dropout": 0.1, "data_path": ["0.3", "a", "0.7", "b"]},
        **{"wlb": True, "wlb_packing": "wlb", "wlb_outlier_thresholds": (64, 96), "window_size": None, "split": "1,1"},
    }
    experts = arguments | {"num_experts": 4, "expert_model_parallel_size": 2, "moe_token_dispatcher_type": "alltoall"}
    latent = arguments | {"multi_latent_attention": True, "q_lora_rank": 48, "kv_lora_rank": 32, "wlb": False}
    return [_block(each) for each in (arguments, experts, latent)] + [_block(latent)[:-90] + _block(arguments)]


def _block(arguments: dict[str, Any]) -> bytes:
    """As Megatron prints arguments."""
    lines = [f"  {name} {'.' * (48 - len(name))} {value}" for name, value in arguments.items()]
    ends = f"{'-' * 24} arguments {'-' * 24}", f"{'-' * 20} end of arguments {'-' * 21}"
    padded = "> padded vocab (size: 100) with 28 dummy tokens (new size: 128)"
    return "\n".join([ends[0], *lines, ends[1], padded, ""]).encode()


TARGETS = {
    "index": Target(read=_index, seeds=_index_seeds, is_text=False),
    "state": Target(read=_state, seeds=_state_seeds),
    "documents": Target(read=_documents, seeds=_documents_seeds, is_text=False),
    "step_log": Target(read=_step_log, seeds=_step_log_seeds),
    "profile": Target(read=_profile, seeds=_profile_seeds),
    "log": Target(read=_log, seeds=_log_seeds),
}
