"""What reads files that others may have written: how to call it, what must hold of what it accepts, and whole inputs.

A reader refuses by ValueError or OSError; every other exception is a finding, `Broken` too.
"""

import functools
import gzip
import io
import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from megatron_wlb.cli.lengths import read_lengths
from megatron_wlb.cli.simulate import read_plan

from megatron_wlb.cli import command
from megatron_wlb.cli.compare import read_log
from megatron_wlb.cost import attention
from megatron_wlb.job import MAX_TOKENS
from megatron_wlb.packing import POLICIES
from megatron_wlb.plan import document_log, state
from megatron_wlb.plan.dataset import read_index, read_tokens
from megatron_wlb.plan.packer import Packer, make_packer
from megatron_wlb.plan.stream import DocumentStream, Source
from megatron_wlb.types import DOCUMENT
from tests.fuzz import mutate
from tests.jobs import job

BIN_BYTES = 4096
LENGTHS = (np.arange(60) * 37 % 200, np.arange(40) * 11 % 30 + 1)
"""Lengths of the documents of two datasets; a few have nothing to train, some are longer than the window."""


class Broken(Exception):
    """What was accepted is not what it ought to be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A reader."""

    name: str
    read: Callable[[bytes, Path], None]
    """Reads an input, for which it may write into a folder."""
    seeds: Callable[[], list[bytes]]
    mutate: Callable[[Random, bytes, Sequence[bytes]], bytes]


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


def _plan(data: bytes, folder: Path) -> None:
    header, steps = read_plan(io.BytesIO(data), "plan")
    for lengths in steps:
        require(len(lengths) == header["micro_batches"], "N micro-batches a step")
        for each in lengths:
            require(not len(each) or 1 <= each.min() <= each.max() <= header["context_length"], "lengths are in range")
            require(each.sum() <= header["max_tokens"], "a micro-batch holds at most S_max")


def _plan_seeds() -> list[bytes]:
    header = {
        "format": "megatron-wlb-plan",
        "version": 2,
        "policy": "wlb",
        "windows": 2,
        "micro_batches": 2,
        "context_length": 64,
        "max_tokens": 80,
        "crossover": 32,
    }
    steps = [{"step": k, "micro_batches": [[[k, 0, 64], [k + 9, 64, 7]], [[k + 1, 0, 33]]]} for k in range(3)]
    lines = [json.dumps(line) for line in (header, *steps, {"summary": {}})]
    return ["\n".join(each).encode() for each in (lines, [*lines[:2], *lines[-1:]])]


def _mutate_lines(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """A change of the JSON of a line, or of the text."""
    lines = data.split(b"\n")
    at = random.randrange(len(lines))
    try:
        if random.randrange(3) == 0:
            raise ValueError
        lines[at] = json.dumps(mutate.of_json(random, json.loads(lines[at]))).encode()
        return b"\n".join(lines)[: mutate.MOST_BYTES]
    except (ValueError, RecursionError):
        return mutate.of_text(random, data, others)


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
    for policy in ("wlb", "adaptive"):
        running, log = packer(policy), io.BytesIO()
        for _ in range(3):
            packed = running.next()
            rows = np.empty(len(packed.packing.documents), document_log.ENTRY)
            rows["step"] = packed.step
            rows["micro_batch"] = np.repeat(np.arange(len(packed.packing)), np.diff(packed.packing.bounds))
            for name in ("index", "dataset", "document", "offset", "length"):
                rows[name] = packed.packing.documents[name]
            log.write(member(rows))
        seeds += [log.getvalue(), log.getvalue()[:-9]]
    mark = rows[:1].copy()
    mark["micro_batch"] = document_log.BEGINS_ANEW
    return [*seeds, member(np.concatenate((mark, rows)))]


def member(rows: np.ndarray) -> bytes:
    """As `document_log.append` writes a step."""
    buffer = io.BytesIO()
    np.save(buffer, rows)
    return gzip.compress(buffer.getvalue(), mtime=0)


def _lengths(data: bytes, folder: Path) -> None:
    path = folder / ("lengths.npy" if data[:1] == b"\x93" else "lengths.json")
    path.write_bytes(data)
    lengths = read_lengths(str(path))
    require(lengths.dtype == np.int64 and 0 <= lengths.min() <= lengths.max() <= MAX_TOKENS, "lengths are in range")


def _lengths_seeds() -> list[bytes]:
    arrays = []
    for dtype in ("<i8", ">u2", "<i4"):
        buffer = io.BytesIO()
        np.save(buffer, np.arange(20, dtype=dtype))
        arrays.append(buffer.getvalue())
    return [b"[512, 2048, 0]", json.dumps(list(range(50))).encode(), *arrays]


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
    profile = attention.load_profile(str(folder / "profile.json"))
    require(all(np.isfinite(kernel.time(1, 3, 2)) for kernel in profile.kernels(heads=8)), "times are finite")


def _profile_seeds() -> list[bytes]:
    folder = Path(attention.__file__).parent / "profiles"
    return [path.read_bytes() for path in sorted(folder.glob("*.json"))]


def _launch(data: bytes, folder: Path) -> None:
    file = folder / "train.log"
    file.write_bytes(data)
    launched = command.of_file(str(file))
    require(bool(launched.arguments) != bool(launched.flags), "it is a log or a command")


def _launch_seeds() -> list[bytes]:
    return [
        b"cd x && WORLD_SIZE=8 torchrun --nproc-per-node 8 x.py --num-layers 4 \\\n 'c d' --bf16 2>&1 | tee x\n",
        b"srun -N 4 bash -c 'python x.py --seq-length 8' # c\nsrun -N 4 bash -c 'python x.py --seq-length 8'\n",
        b"------------------------ arguments ------------------------\n  num_layers ............................... 4\n"
        b"  world_size ..................................... 8\n"
        b"-------------------- end of arguments ---------------------\n"
        b" > padded vocab (size: 100) with 28 dummy tokens (new size: 128)\n",
    ]


TARGETS = {
    target.name: target
    for target in (
        Target(name="index", read=_index, seeds=_index_seeds, mutate=mutate.of_bytes),
        Target(name="state", read=_state, seeds=_state_seeds, mutate=_mutate_lines),
        Target(name="plan", read=_plan, seeds=_plan_seeds, mutate=_mutate_lines),
        Target(name="documents", read=_documents, seeds=_documents_seeds, mutate=mutate.of_bytes),
        Target(name="lengths", read=_lengths, seeds=_lengths_seeds, mutate=mutate.of_text),
        Target(name="step_log", read=_step_log, seeds=_step_log_seeds, mutate=_mutate_lines),
        Target(name="profile", read=_profile, seeds=_profile_seeds, mutate=_mutate_lines),
        Target(name="launch", read=_launch, seeds=_launch_seeds, mutate=mutate.of_text),
    )
}
