"""The documents of every step of a run in a compact file that only grows, and the audit that none is lost or doubled.

One gzip member a step, which holds the array ENTRY [n] as NumPy writes it: `zcat` and `numpy.load` read it. A step that
was run again after a restart stands there twice; the later one counts. A step with which the data began anew
(`--wlb-restart-packing`) begins with a row of its own, whose micro_batch is BEGINS_ANEW.
"""

import gzip
import io
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from megatron_wlb.plan import files
from megatron_wlb.types import DOCUMENT, PackedBatch

ENTRY = np.dtype(
    [
        ("step", "<i8"),
        ("micro_batch", "<i4"),
        ("index", "<i8"),  # place in the stream
        ("dataset", "<i4"),
        ("document", "<i8"),
        ("offset", "<i8"),  # first trained token within the document
        ("length", "<i4"),
    ]
)

BEGINS_ANEW = -1

MAX_STEP_BYTES = 256 << 20
"""Of a step unpacked, 6 million documents: far above any, so that a few hostile bytes do not fill the memory."""

_MOST = 1 << 53
_BEGIN = b"\x1f\x8b\x08" + bytes(5)
"""The first bytes of a gzip member without a time."""


def append(path: str | os.PathLike[str], step: int, packing: PackedBatch, *, begins_anew: bool = False) -> None:
    """Append the micro-batches of a step, all or nothing; `begins_anew` where its data is the beginning of the stream.

    Raises OSError, as `files.append`, and ValueError for a step that is too large to be read again.
    """
    rows = np.empty(len(packing.documents), ENTRY)
    rows["step"] = step
    rows["micro_batch"] = np.repeat(np.arange(len(packing)), np.diff(packing.bounds))
    for name in ("index", "dataset", "document", "offset", "length"):
        rows[name] = packing.documents[name]
    if begins_anew:
        mark = np.zeros(1, ENTRY)
        mark["step"], mark["micro_batch"] = step, BEGINS_ANEW
        rows = np.concatenate((mark, rows))
    buffer = io.BytesIO()
    np.save(buffer, rows)
    if buffer.tell() > MAX_STEP_BYTES:
        raise ValueError(
            f"step {step} has {len(rows)} documents, {buffer.tell()} bytes where --wlb-document-log takes "
            f"{MAX_STEP_BYTES}; train without it"
        )
    files.append(path, gzip.compress(buffer.getvalue(), mtime=0), "--wlb-document-log")


def mend(path: str | os.PathLike[str]) -> int:
    """Cut off what a crash left half written at the end; returns the number of bytes. A missing file is fine.

    Reads no more than the last whole step and what follows it; `read` looks at the others. Raises ValueError for a file
    that is not a document log, or has no whole step before what a crash may leave.
    """
    if not Path(path).exists():
        return 0
    if not Path(path).is_file():
        raise ValueError(f"{path} is not a document log but a folder, pipe or device; name another file")
    with open(path, "r+b") as file:
        size = os.fstat(file.fileno()).st_size
        if not size:
            return 0
        begin = _last_begin(file, size)
        end = _end(file, begin)
        if begin and not end:  # half written, so the one before it is the last whole step
            begin = _last_begin(file, begin)
            end = _end(file, begin)
        if not begin and not end:
            raise ValueError(f"{path} is not a document log: it does not begin with a whole step; name another file")
        if not end or _last_begin(file, size) > end:
            raise ValueError(
                f"{path} is damaged at byte {end or begin}, before its last step; restore it, or name another file"
            )
        file.truncate(end)
    return size - end


def read(path: str | os.PathLike[str]) -> np.ndarray:
    """ENTRY [n] of the whole run, marks of a new beginning too, in order of steps; of a step that ran again, the last.

    Raises ValueError for a file that is damaged before its last step, or larger than the memory.
    """
    steps: dict[int, np.ndarray] = {}
    room = _memory_bytes() // 4  # what is made of the rows takes several times as much
    with open(path, "rb") as file:
        end = 0
        for rows, member_end in _members(file):
            end = member_end
            room -= rows.nbytes
            if room < 0:
                raise ValueError(
                    f"{path} unpacks to over a quarter of {_memory_bytes()} bytes of memory; audit it on a larger one"
                )
            if len(rows):
                steps[int(rows["step"][0])] = rows
        if not steps or _last_begin(file, os.fstat(file.fileno()).st_size) > end:  # more than one step is cut off
            raise ValueError(f"{path} is not a document log, or it is damaged at byte {end}; restore it")
    return np.concatenate([steps[step] for step in sorted(steps)])


def _memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _members(file: BinaryIO) -> Iterator[tuple[np.ndarray, int]]:
    """Every whole step of a log, and where it ends; up to the first that is none."""
    while True:
        unpack = zlib.decompressobj(wbits=31)
        data = bytearray()
        try:
            while not unpack.eof:
                block = unpack.unconsumed_tail or file.read(1 << 20)
                if not block:
                    return
                # Bounded, since a few bytes may stand for thousands.
                data += unpack.decompress(block, MAX_STEP_BYTES + 1 - len(data))
                if len(data) > MAX_STEP_BYTES:
                    return
        except zlib.error:
            return
        rows = _rows(data)
        if rows is None:
            return
        file.seek(-len(unpack.unused_data), os.SEEK_CUR)
        yield rows, file.tell()


def _end(file: BinaryIO, begin: int) -> int:
    """Where the whole steps from byte `begin` on end, 0 if there is none."""
    file.seek(begin)
    return max((end for _, end in _members(file)), default=0)


def _rows(data: bytearray) -> np.ndarray | None:
    """The array of a step, None for anything that `append` does not write. `numpy.load` would believe the header."""
    start = 10 + int.from_bytes(data[8:10], "little")
    count = max(0, len(data) - start) // ENTRY.itemsize
    header = f"{{'descr': {ENTRY.descr!r}, 'fortran_order': False, 'shape': ({count},), }}"
    # Versions of NumPy pad differently.
    if data[:8] != b"\x93NUMPY\x01\x00" or bytes(data[10:start]).rstrip() != header.encode():
        return None
    if len(data) != start + count * ENTRY.itemsize:
        return None
    rows = np.frombuffer(data, ENTRY, count, start) if count else np.empty(0, ENTRY)
    marks = rows["micro_batch"] == BEGINS_ANEW
    if count and ((rows["step"] != rows["step"][0]).any() or marks[1:].any() or marks.all()):
        return None
    for name in ENTRY.names or ():
        least = BEGINS_ANEW if name == "micro_batch" else 0
        if count and not least <= rows[name].min() <= rows[name].max() <= _MOST:
            return None
    return rows


def _last_begin(file: BinaryIO, stop: int) -> int:
    """Where the last step that begins before byte `stop` does, 0 if none does."""
    while stop > 0:
        start = max(0, stop - (1 << 20))
        file.seek(start)
        place = file.read(stop - start + len(_BEGIN) - 1).rfind(_BEGIN)
        if place >= 0:
            return start + place
        stop = start
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """What a document log says about a run; see `audit`."""

    restarts: int
    """How often the data began anew. All else is about the steps from the last time on."""
    first_step: int
    """The first step that is judged."""
    steps: int
    missing_steps: int
    """Steps between the first and the last that are not in the log."""
    tokens: int
    documents: int
    """Documents trained, wholly or in part."""
    doubled: int
    """Tokens that had been trained before in the same pass over the data."""
    lost: int
    """Places at which something between the first and the last piece was neither trained nor waits."""
    out_of_turn: int
    """Documents that came again before all others of their dataset had come."""

    @property
    def clean(self) -> bool:
        return not (self.missing_steps or self.doubled or self.lost or self.out_of_turn)


def audit(
    entries: np.ndarray, waiting: np.ndarray, position: int, lengths: Sequence[np.ndarray] | None = None
) -> Audit:
    """Check that what was trained and what waits make up the stream: every piece once, every document whole.

    Where the data began anew, the steps before belong to another stream, of which nobody knows what waited; so these
    are not judged.

    Args:
        entries: ENTRY [n], what `read` gave of a log that begins with the run.
        waiting: DOCUMENT [m], what waits after the last step (of the packer state).
        position: tokens that the stream had given by then (of the packer state).
        lengths: of every document, by dataset of the blend; without, the end of a document is not checked.
    """
    marks = entries["micro_batch"] == BEGINS_ANEW
    first_step = int(entries["step"][marks][-1] if marks.any() else entries["step"].min())
    entries = entries[~marks & (entries["step"] >= first_step)]
    names = ["index", "dataset", "document", "offset", "length"]
    rows = np.concatenate([entries[names].astype(DOCUMENT[names]), waiting[names].astype(DOCUMENT[names])])
    rows = rows[np.lexsort((rows["offset"], rows["index"]))]
    stops = rows["offset"] + rows["length"]
    before, after = rows[:-1], rows[1:]
    same = (before["dataset"] == after["dataset"]) & (before["document"] == after["document"])
    same &= (after["offset"] > 0) | (before["index"] == after["index"])
    step = np.where(same, after["offset"] - stops[:-1], after["offset"])  # past the token that must come next
    jump = after["index"] - before["index"]
    lost = int(((jump > 1) | (step > 0)).sum()) + int(rows["index"][0] > 0 or rows["offset"][0] > 0)
    lost += int(rows["length"].sum() != position)
    begins = np.concatenate(([True], ~same))
    if lengths is not None:
        _check_datasets(rows, lengths)
        ends = rows[np.append(~same, False)]  # the last document may not have come to its end
        for dataset, totals in enumerate(lengths):
            here = ends[ends["dataset"] == dataset]
            lost += int((here["offset"] + here["length"] < totals[here["document"]]).sum())
    steps = np.unique(entries["step"])
    return Audit(
        restarts=int(marks.sum()),
        first_step=first_step,
        steps=len(steps),
        missing_steps=int(steps[-1] - steps[0]) + 1 - len(steps),
        tokens=int(entries["length"].sum()),
        documents=int(begins.sum()),
        doubled=int(-step[step < 0].sum()),
        lost=lost,
        out_of_turn=_out_of_turn(rows[begins]),
    )


def _check_datasets(rows: np.ndarray, lengths: Sequence[np.ndarray]) -> None:
    """Raises ValueError for documents that the datasets have not."""
    sizes = np.array([len(each) for each in lengths], np.int64)
    unknown = (rows["dataset"] < 0) | (rows["dataset"] >= len(lengths)) | (rows["document"] < 0)
    unknown[~unknown] = rows["document"][~unknown] >= sizes[rows["dataset"][~unknown]]
    if unknown.any():
        row = rows[unknown.argmax()]
        raise ValueError(
            f"document {row['document']} of dataset {row['dataset']} was trained or waits, and {len(lengths)} datasets"
            f" have {sizes.tolist()} documents; give --data-path the datasets of the run"
        )


def _out_of_turn(documents: np.ndarray) -> int:
    """Documents, in the order of the stream, that begin an earlier pass over their dataset than the one before."""
    order = np.lexsort((documents["index"], documents["document"], documents["dataset"]))
    rows = documents[order]
    new = np.ones(len(rows), bool)
    new[1:] = (rows["document"][1:] != rows["document"][:-1]) | (rows["dataset"][1:] != rows["dataset"][:-1])
    place = np.arange(len(rows))
    passes = np.empty(len(rows), np.int64)
    passes[order] = place - np.maximum.accumulate(np.where(new, place, 0))  # how often the document came before
    by_dataset = np.argsort(documents["dataset"], kind="stable")
    same = np.diff(documents["dataset"][by_dataset]) == 0
    return int((same & (np.diff(passes[by_dataset]) < 0)).sum())
