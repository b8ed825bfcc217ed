"""What the stand-in wrote down of a rank: the records of `native/record.h`."""

from collections import Counter, defaultdict
from enum import IntEnum
from typing import Any

import numpy as np

Kind = IntEnum(
    "Kind",
    """KERNEL RECORD WAIT SYNC_STREAM SYNC_DEVICE SYNC_EVENT COPY_TO_HOST MAP UNMAP OUT_OF_MEMORY
    GROUP_BEGIN GROUP_END COMMUNICATOR MARK
    ALL_REDUCE BROADCAST REDUCE ALL_GATHER REDUCE_SCATTER ALL_TO_ALL SEND RECEIVE""",
    start=0,
)
"""Kinds of records, as `record.h` numbers them."""
SYNCS = (Kind.SYNC_STREAM, Kind.SYNC_DEVICE, Kind.SYNC_EVENT)
RECORD = np.dtype(
    {"names": "kind where stream object amount type peer".split(), "formats": "i4 i4 u8 u8 u8 i4 i4".split()}
)
BYTES = (1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1)
"""Bytes of a value of each of NCCL's types."""


def summary(result: dict[str, Any], records: np.ndarray) -> dict[str, Any]:
    """Return what a rank does in a step, of the last step without its line of the log: JSON types."""
    marks = np.flatnonzero(records["kind"] == Kind.MARK)  # begin and end of every step
    seen = records[marks[-2] : marks[-1]] if len(marks) else records[:0]
    lines = [line for line, _ in result["lines"]]
    nccl: dict[str, Counter[str]] = defaultdict(Counter)
    for row in seen[seen["kind"] >= Kind.ALL_REDUCE]:
        group = f"{Kind(row['kind']).name.lower()} of {len(result['communicators'][str(row['object'])][1])}"
        nccl[group].update(calls=1, bytes=int(row["amount"]) * BYTES[row["type"]])

    def by_line(kinds: tuple[Kind, ...], of: np.ndarray = seen) -> dict[str, int]:
        of_kinds = of[np.isin(of["kind"], kinds) & (of["where"] >= 0)]
        return dict(Counter(lines[i] for i in of_kinds["where"]).most_common())

    return {
        "launches": int(seen["amount"][seen["kind"] == Kind.KERNEL].sum()),
        "syncs": by_line(SYNCS),
        "copies_to_host": by_line((Kind.COPY_TO_HOST,)),
        "communicators": int((records["kind"] == Kind.COMMUNICATOR).sum()),
        "made_in_steps": by_line((Kind.COMMUNICATOR,), records[marks[0] :] if len(marks) else seen),
        "nccl": dict(sorted(nccl.items())),
    }
