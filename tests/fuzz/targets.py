"""What reads files that others may have written: how to call it, what must hold of what it accepts, and whole inputs.

A reader refuses by ValueError or OSError; every other exception is a finding, `Broken` too.
"""

import gzip
import io
import json
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from megatron_wlb.adapter import checkpoint
from megatron_wlb.cli.compare import read_log
from megatron_wlb.cli.launch import words_of
from megatron_wlb.cli.lengths import read_lengths
from megatron_wlb.cli.simulate import PlanFile
from megatron_wlb.config import MAX_TOKENS
from megatron_wlb.plan import document_log, state
from megatron_wlb.plan.dataset import read_index, read_tokens
from megatron_wlb.plan.packer import Packer, make_packer
from megatron_wlb.plan.stream import DocumentStream, Source
from megatron_wlb.plan.types import DOCUMENT
from megatron_wlb.plan.workload import load_profile
from tests.cli.test_compare import LAYOUT
from tests.fuzz import mutate

BIN_BYTES = 4096
WINDOW, N = 64, 4
POLICIES = ("wlb", "adaptive", "fixed", "original")
PAIRS = (np.arange(60) * 37 % 200, np.arange(40) * 11 % 30 + 1)
"""Trained pairs of the documents of two datasets; a few have nothing to train, some are longer than the window."""


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
    """Over `PAIRS`, before its first step."""
    stream = DocumentStream([Source(pairs=pairs) for pairs in PAIRS], seed=3, context_length=WINDOW)
    return make_packer(
        stream,
        num_micro_batches=N,
        crossover_tokens=32,
        policy=policy,
        fingerprint="",
        use_native=True,
        outlier_thresholds=(32,),
    )


def _state(data: bytes, folder: Path) -> None:
    checkpoint.state_path(str(folder), 3).write_bytes(data)
    found, _ = checkpoint.load_state(str(folder), 3)
    policy = found.get("policy")
    made = packer(policy if policy in POLICIES else "wlb")
    before = made.state()
    try:
        made.load_state(found)
    except ValueError:
        require(made.state() == before, "a refused state changes nothing")
        raise
    state.waiting(found)
    first = made.step
    for step in range(first, first + 2):
        packed = made.next()
        require(packed.step == step and len(packed.packing) == N, "the next steps are planned")
        made.load_state(json.loads(json.dumps(packed.state)))


def _state_seeds() -> list[bytes]:
    seeds = []
    for policy in POLICIES:
        made = packer(policy)
        for step in range(9):
            if step in (0, 3, 8):
                seeds.append(signed(made.state() | {"layout": {"CP": 2, "packing": policy}}))
            made.next()
    return seeds


def signed(value: dict[str, Any]) -> bytes:
    """As `save_state` writes it."""
    value = json.loads(json.dumps(value))  # lists for tuples
    return json.dumps(value | {"digest": checkpoint._digest(value)}, separators=(",", ":")).encode()


def _mutate_state(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Mostly a change that its digest knows of."""
    if random.randrange(8) == 0:
        return mutate.of_text(random, data, others)
    try:
        value = json.loads(data)
        value.pop("digest", None)
        for _ in range(random.choice((1, 1, 1, 2, 4))):
            value = mutate.of_json(random, value)
        return signed(value)
    except (ValueError, AttributeError, TypeError, RecursionError):
        return mutate.of_text(random, data, others)


def _plan(data: bytes, folder: Path) -> None:
    source = PlanFile(io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"), "plan")
    window, most = source.header["context_length"], source.header["max_tokens"]
    for _, lengths in source.steps(None):
        require(len(lengths) == source.header["micro_batches"], "N micro-batches a step")
        for each in lengths:
            require(not len(each) or 1 <= each.min() <= each.max() <= window, "lengths are within the window")
            require(each.sum() <= most, "a micro-batch holds at most S_max")


def _plan_seeds() -> list[bytes]:
    header = {
        "format": "megatron-wlb-plan",
        "version": 1,
        "policy": "wlb",
        "micro_batches": 2,
        "context_length": 64,
        "max_tokens": 80,
        "crossover": 32,
    }
    steps = [{"step": k, "micro_batches": [[[k, 0, 64], [k + 9, 64, 7]], [[k + 1, 0, 33]]]} for k in range(3)]
    lines = [json.dumps(line) for line in (header, *steps, {"summary": {}})]
    return ["\n".join(lines[:2]).encode(), "\n".join(lines).encode() + b"\n"]


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
        for pairs in (None, PAIRS):
            document_log.audit(rows, np.empty(0, DOCUMENT), 0, pairs)
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
    for policy in POLICIES[:2]:
        made, log = packer(policy), io.BytesIO()
        for _ in range(3):
            packed = made.next()
            rows = np.empty(len(packed.packing.documents), document_log.ENTRY)
            rows["step"] = packed.step
            rows["micro_batch"] = np.repeat(np.arange(N), np.diff(packed.packing.bounds))
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


def _mutate_documents(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Mostly a change within a step, packed again."""
    members = [document_log._BEGIN + part for part in data.split(document_log._BEGIN)[1:]]
    if not members or random.randrange(4) == 0:
        return mutate.of_bytes(random, data, others)
    at = random.randrange(len(members))
    try:
        plain = gzip.decompress(members[at])
        if random.randrange(2):
            head, rows = plain[:-1], bytearray()
            if len(plain) > 300:  # leave the header of NumPy as it is
                head, rows = plain[:256], bytearray(plain[256:])
                for _ in range(random.choice((1, 1, 2, 8))):
                    begin = random.randrange(len(rows) - 8)
                    number = random.choice((*mutate.NUMBERS, random.randrange(100))) % (1 << 64)
                    rows[begin : begin + 8] = number.to_bytes(8, "little")
            plain = head + bytes(rows)
        else:
            plain = mutate.of_bytes(random, plain, others)
        members[at] = gzip.compress(plain, 1, mtime=0)
    except (OSError, EOFError, ValueError, zlib.error):
        members[at] = mutate.of_bytes(random, members[at], others)
    if random.randrange(10) == 0:
        members.insert(random.randrange(len(members)), random.choice(members))
    return b"".join(members)[: mutate.MOST_BYTES]


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
    entry = {"step": 1, "loss": 2.5, "step_ms": 31.5, "lengths": [[64, 7], [33]], "layout": LAYOUT}
    return ["\n".join(json.dumps(entry | {"step": k}) for k in range(1, 4)).encode()]


def _profile(data: bytes, folder: Path) -> None:
    (folder / "profile.json").write_bytes(data)
    profile = load_profile(str(folder / "profile.json"))
    require(np.isfinite(profile.kernel(heads=8).time(1, 3, 2)), "times are finite")


def _profile_seeds() -> list[bytes]:
    folder = Path(document_log.__file__).parent / "profiles"
    return [path.read_bytes() for path in sorted(folder.glob("*.json"))]


def _launch(data: bytes, folder: Path) -> None:
    require(all(isinstance(word, str) for word in words_of(data.decode())), "a launch line is words")


def _launch_seeds() -> list[bytes]:
    return [
        b"torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 4 \\\n  --data-path a b 'c d' # not read\n",
        b'ARGS=(\n  --seq-length 8192 # window\n  --split "99,1,0"\n)\nW=16; python x.py "${ARGS[@]}" --n $W & wait\n',
        b'A="x --n ${B:-3}"; A+=" --m $((C*2))"; C=4\nR=("$A" 1)\nR+=("${R[@]}"); bash -lc "$A"; eval "${R[*]}"\n',
    ]


TARGETS = {
    target.name: target
    for target in (
        Target(name="index", read=_index, seeds=_index_seeds, mutate=mutate.of_bytes),
        Target(name="state", read=_state, seeds=_state_seeds, mutate=_mutate_state),
        Target(name="plan", read=_plan, seeds=_plan_seeds, mutate=_mutate_lines),
        Target(name="documents", read=_documents, seeds=_documents_seeds, mutate=_mutate_documents),
        Target(name="lengths", read=_lengths, seeds=_lengths_seeds, mutate=mutate.of_text),
        Target(name="step_log", read=_step_log, seeds=_step_log_seeds, mutate=_mutate_lines),
        Target(name="profile", read=_profile, seeds=_profile_seeds, mutate=_mutate_lines),
        Target(name="launch", read=_launch, seeds=_launch_seeds, mutate=mutate.of_text),
    )
}
