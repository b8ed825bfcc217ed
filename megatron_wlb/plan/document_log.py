"""Log of the documents of every step, and its audit.

The file only grows. It has records of `ENTRY`: a mark that begins a step and counts its documents, then the documents.
A step that ran again after a restart appears twice; the later one counts.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_wlb import files
from megatron_wlb.types import DOCUMENT, PackedBatch

ENTRY = np.dtype(
    [
        ("step", "<i8"),
        ("micro_batch", "<i4"),  # or the kind of mark
        ("index", "<i8"),  # place in the stream; in a mark, the number of documents
        ("dataset", "<i4"),
        ("document", "<i8"),
        ("offset", "<i8"),  # first trained token within the document
        ("length", "<i4"),
    ]
)
BEGINS, BEGINS_ANEW = -1, -2
"""Marks that begin a step, and a step at which the data began anew (`--wlb-restart-packing`)."""
_MOST = 1 << 53
_CHUNK = 1 << 14
"""Records that are read together, from the end."""


def append(path: str | os.PathLike[str], step: int, packed: PackedBatch, *, begins_anew: bool = False) -> None:
    """Append the micro-batches of a step, all or nothing. Raises OSError.

    `begins_anew`: the step's data begin the stream again.
    """
    rows = np.zeros(1 + len(packed.documents), ENTRY)
    rows["step"] = step
    rows["micro_batch"][0] = BEGINS_ANEW if begins_anew else BEGINS
    rows["micro_batch"][1:] = np.repeat(np.arange(len(packed)), np.diff(packed.bounds))
    rows["index"][0] = len(packed.documents)
    for name in ("index", "dataset", "document", "offset", "length"):
        rows[name][1:] = packed.documents[name]
    files.append(path, rows.tobytes(), "--wlb-document-log")


def mend(path: str | os.PathLike[str]) -> int:
    """Cut off an incomplete step at the end; return the bytes cut, 0 without a file.

    Reads only the last step. Raises ValueError for a file that is no document log, or whose last step is damaged.
    """
    if not Path(path).exists():
        return 0
    if not Path(path).is_file():
        raise ValueError(f"{path} is not a document log but a folder, pipe or device; name another file")
    size = Path(path).stat().st_size
    if not size:
        return 0
    not_a_log = f"{path} is not a document log: it does not begin with a whole step; name another file"
    if size < ENTRY.itemsize:
        raise ValueError(not_a_log)
    rows = np.memmap(path, ENTRY, "r", shape=(size // ENTRY.itemsize,))
    stop = len(rows)
    while stop and not (rows["micro_batch"][max(0, stop - _CHUNK) : stop] < 0).any():
        stop = max(0, stop - _CHUNK)
    begin = max(0, stop - _CHUNK)
    (marks,) = np.nonzero(rows["micro_batch"][begin:stop] < 0)
    if not len(marks) or not _is_whole(rows[:1]):
        raise ValueError(not_a_log)
    last = begin + int(marks[-1])
    end = last + 1 + int(rows["index"][last])
    if end < len(rows) or not _is_whole(rows[last:]):
        raise ValueError(f"{path} is damaged in its last step; restore it, or name another file")
    kept = ENTRY.itemsize * (end if end == len(rows) else last)
    del rows
    if not kept:
        raise ValueError(not_a_log)
    os.truncate(path, kept)
    return size - kept


def read(path: str | os.PathLike[str]) -> np.ndarray:
    """Return the run in order of steps, ENTRY [n], with the marks of new beginnings.

    Of a step that ran again, returns the last run. Skips an incomplete step at the end. Raises ValueError for a file
    that is not a document log, is damaged, or is too large for the memory.
    """
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with files.opened(path, "give the file that --wlb-document-log named") as file:
        if (size := os.fstat(file.fileno()).st_size) > memory // 4:  # the arrays made of the rows take several times it
            raise ValueError(
                f"{path} has {size} bytes, over a quarter of {memory} of memory; audit it on a larger machine"
            )
        rows = np.fromfile(file, ENTRY, size // ENTRY.itemsize)
    damaged = f"{path} is not a document log, or it is damaged; restore it"
    if not len(rows) or rows["micro_batch"][0] >= 0 or not _is_whole(rows):
        raise ValueError(damaged)
    (begins,) = np.nonzero(rows["micro_batch"] < 0)
    ends = begins + 1 + rows["index"][begins]
    whole = ends <= len(rows)
    if not whole[0] or (begins[1:] != ends[:-1]).any():
        raise ValueError(damaged)
    steps = {int(rows["step"][i]): (i, j) for i, j in zip(begins[whole].tolist(), ends[whole].tolist(), strict=True)}
    kept = [slice(i + (rows["micro_batch"][i] == BEGINS), j) for _, (i, j) in sorted(steps.items())]
    return np.concatenate([rows[each] for each in kept])


def _is_whole(rows: np.ndarray) -> bool:
    """Whether `append` could have written these records."""
    marks = rows["micro_batch"] < 0
    in_range = all(
        0 <= rows[name].min() <= rows[name].max() <= _MOST for name in (ENTRY.names or ()) if name != "micro_batch"
    )
    same = (np.diff(rows["step"]) == 0) | marks[1:]
    return bool(marks[0] and in_range and (rows["micro_batch"] >= BEGINS_ANEW).all() and same.all())


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """The result of `audit`."""

    restarts: int
    """How often the data began anew. All other fields cover the steps since the last time."""
    first_step: int
    steps: int
    missing_steps: int
    """Steps between the first and the last that are missing in the log."""
    tokens: int
    documents: int
    """Documents trained, wholly or in part."""
    doubled: int
    """Tokens trained before in the same pass over the data."""
    lost: int
    """Gaps between the first and the last piece, neither trained nor waiting."""
    out_of_turn: int
    """Documents that came again before every document of their dataset had come."""
    late: int
    """Of whole epochs: documents that were trained, or wait, when the next epoch had begun. Else 0."""

    @property
    def clean(self) -> bool:
        return not (self.missing_steps or self.doubled or self.lost or self.out_of_turn or self.late)


def audit(
    entries: np.ndarray,
    waiting: np.ndarray,
    position: int,
    lengths: Sequence[np.ndarray] | None = None,
    *,
    whole_epochs: bool = False,
) -> Audit:
    """Check that trained and waiting documents make up the stream, each piece once.

    Steps before the data began anew belong to another stream, and are not audited. `entries`, ENTRY [n], are those of
    `read` of a whole log; `waiting`, DOCUMENT [m], and `position`, tokens taken from the stream, are the packer
    state's; `lengths` of all documents by dataset check the ends of documents;
    `whole_epochs`: no epoch may begin before all documents of the last one are trained.
    """
    marks = entries["micro_batch"] == BEGINS_ANEW
    first_step = int(entries["step"][marks][-1] if marks.any() else entries["step"].min())
    entries = entries[~marks & (entries["step"] >= first_step)]
    names = ["index", "dataset", "document", "offset", "length"]
    rows = np.concatenate([entries[names].astype(DOCUMENT[names]), waiting[names].astype(DOCUMENT[names])])
    order = np.lexsort((rows["offset"], rows["index"]))
    rows, trained_in = rows[order], np.append(entries["step"], np.full(len(waiting), _MOST))[order]
    stops = rows["offset"] + rows["length"]
    before, after = rows[:-1], rows[1:]
    same = (before["dataset"] == after["dataset"]) & (before["document"] == after["document"])
    same &= (after["offset"] > 0) | (before["index"] == after["index"])
    step = np.where(same, after["offset"] - stops[:-1], after["offset"])  # tokens past the one that must come next
    jump = after["index"] - before["index"]
    lost = int(((jump > 1) | (step > 0)).sum()) + int(rows["index"][0] > 0 or rows["offset"][0] > 0)
    lost += int(rows["length"].sum() != position)
    begins = np.concatenate(([True], ~same))
    if lengths is not None:
        _check_datasets(rows, lengths)
        ends = rows[np.append(~same, False)]  # the last document may be incomplete
        for dataset, totals in enumerate(lengths):
            here = ends[ends["dataset"] == dataset]
            lost += int((here["offset"] + here["length"] < totals[here["document"]]).sum())
    steps, passes = np.unique(entries["step"]), _passes(rows[begins])
    return Audit(
        restarts=int(marks.sum()),
        first_step=first_step,
        steps=len(steps),
        missing_steps=int(steps[-1] - steps[0]) + 1 - len(steps),
        tokens=int(entries["length"].sum()),
        documents=int(begins.sum()),
        doubled=int(-step[step < 0].sum()),
        lost=lost,
        out_of_turn=_out_of_turn(rows[begins], passes),
        late=_late(trained_in[begins], passes) if whole_epochs else 0,
    )


def _check_datasets(rows: np.ndarray, lengths: Sequence[np.ndarray]) -> None:
    """Raise ValueError for documents that the datasets do not have."""
    sizes = np.array([len(each) for each in lengths], np.int64)
    unknown = (rows["dataset"] < 0) | (rows["dataset"] >= len(lengths)) | (rows["document"] < 0)
    unknown[~unknown] = rows["document"][~unknown] >= sizes[rows["dataset"][~unknown]]
    if unknown.any():
        row = rows[unknown.argmax()]
        raise ValueError(
            f"document {row['document']} of dataset {row['dataset']} was trained or waits, and {len(lengths)} datasets"
            f" have {sizes.tolist()} documents; give --data-path the datasets of the run"
        )


def _passes(documents: np.ndarray) -> np.ndarray:
    """Return how often each document came before, int64 [n]."""
    order = np.lexsort((documents["index"], documents["document"], documents["dataset"]))
    rows = documents[order]
    new = np.ones(len(rows), bool)
    new[1:] = (rows["document"][1:] != rows["document"][:-1]) | (rows["dataset"][1:] != rows["dataset"][:-1])
    place = np.arange(len(rows))
    passes = np.empty(len(rows), np.int64)
    passes[order] = place - np.maximum.accumulate(np.where(new, place, 0))
    return passes


def _late(steps: np.ndarray, passes: np.ndarray) -> int:
    """Count documents of a pass that are trained no earlier than one of a later pass."""
    begins = np.full(passes.max() + 2, _MOST + 1)
    np.minimum.at(begins, passes, steps)
    return int((steps >= np.minimum.accumulate(begins[::-1])[::-1][passes + 1]).sum())


def _out_of_turn(documents: np.ndarray, passes: np.ndarray) -> int:
    """Count documents that begin an earlier pass over their dataset than the last one."""
    by_dataset = np.argsort(documents["dataset"], kind="stable")
    same = np.diff(documents["dataset"][by_dataset]) == 0
    return int((same & (np.diff(passes[by_dataset]) < 0)).sum())
