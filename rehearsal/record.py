"""What the stand-in wrote down of a rank: the records of `native/record.h`."""

from collections import Counter
from enum import IntEnum, auto
from typing import Any

import numpy as np


class Kind(IntEnum):
    """Kinds of records, as `record.h` numbers them."""

    KERNEL = 0
    RECORD = auto()
    WAIT = auto()
    SYNC_STREAM = auto()
    SYNC_DEVICE = auto()
    SYNC_EVENT = auto()
    COPY_TO_HOST = auto()
    MAP = auto()
    UNMAP = auto()
    OUT_OF_MEMORY = auto()
    GROUP_BEGIN = auto()
    GROUP_END = auto()
    COMMUNICATOR = auto()
    MARK = auto()
    ALL_REDUCE = auto()
    BROADCAST = auto()
    REDUCE = auto()
    ALL_GATHER = auto()
    REDUCE_SCATTER = auto()
    ALL_TO_ALL = auto()
    SEND = auto()
    RECEIVE = auto()


SYNCS = (Kind.SYNC_STREAM, Kind.SYNC_DEVICE, Kind.SYNC_EVENT)
RECORD = np.dtype(
    [
        *(("kind", "<i4"), ("where", "<i4"), ("stream", "<u8"), ("object", "<u8"), ("amount", "<u8")),
        *(("type", "<i4"), ("peer", "<i4")),
    ]
)
BYTES = (1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1)
"""Bytes of a value of each of NCCL's types."""


def members(result: dict[str, Any]) -> dict[int, tuple[str, tuple[int, ...]]]:
    """Return the key of each communicator of a rank, and its ranks in order, by the communicator's id."""
    found = {}
    for number, key in result["communicators"].items():
        *_, group, _, name = key.split("//")  # GROUP//cuda:0//NAME; a pair of ranks is its own communicator
        ranks = result["groups"][group.rpartition("/")[2]]
        if name[0].isdigit() and ":" in name:
            ranks = [ranks[int(i)] for i in name.split(":")]
        found[int(number)] = key, tuple(ranks)
    return found


def summary(result: dict[str, Any], records: np.ndarray) -> dict[str, Any]:
    """Return what a rank does in a step, of the last step without its line of the log: JSON types."""
    marks = np.flatnonzero(records["kind"] == Kind.MARK)  # begin and end of every step
    seen = records[marks[-2] : marks[-1]] if len(marks) else records[:0]
    lines = [line for line, _ in result["lines"]]
    nccl = seen[seen["kind"] >= Kind.ALL_REDUCE]
    ranks = members(result)
    calls: Counter[str] = Counter()
    sent: Counter[str] = Counter()
    for row in nccl:
        group = f"{Kind(row['kind']).name.lower()} of {len(ranks[int(row['object'])][1])}"
        calls[group] += 1
        sent[group] += int(row["amount"]) * BYTES[row["type"]]

    def by_line(kinds: tuple[Kind, ...], of: np.ndarray = seen) -> dict[str, int]:
        of_kinds = of[np.isin(of["kind"], kinds) & (of["where"] >= 0)]
        return dict(Counter(lines[i] for i in of_kinds["where"]).most_common())

    return {
        "launches": int(seen["amount"][seen["kind"] == Kind.KERNEL].sum()),
        "syncs": by_line(SYNCS),
        "copies_to_host": by_line((Kind.COPY_TO_HOST,)),
        "communicators": int((records["kind"] == Kind.COMMUNICATOR).sum()),
        "made_in_steps": by_line((Kind.COMMUNICATOR,), records[marks[0] :] if len(marks) else seen),
        "nccl": {group: {"calls": calls[group], "bytes": sent[group]} for group in sorted(calls)},
    }
