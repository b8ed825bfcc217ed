"""The stand-in's log of a rank: the records of `native/record.h`."""

from collections import Counter, defaultdict
from enum import IntEnum
from typing import Any

import numpy as np

Kind = IntEnum(
    "Kind",
    """KERNEL RECORD WAIT SYNC_STREAM SYNC_DEVICE SYNC_EVENT COPY_TO_HOST GROUP_BEGIN GROUP_END COMMUNICATOR MARK
    ALL_REDUCE BROADCAST REDUCE ALL_GATHER REDUCE_SCATTER ALL_TO_ALL SEND RECEIVE""",
    start=0,
)
"""Kinds of records, as `record.h` numbers them."""
SYNCS = (Kind.SYNC_STREAM, Kind.SYNC_DEVICE, Kind.SYNC_EVENT)
RECORD = np.dtype(
    {"names": "kind where stream object amount type peer".split(), "formats": "i4 i4 u8 u8 u8 i4 i4".split()}
)
WARM = 2
"""Steps in which the allocator finds its sizes: their retries do not count."""
BYTES = (1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1)
"""Bytes of a value of each of NCCL's types."""


def summary(result: dict[str, Any], records: np.ndarray) -> dict[str, Any]:
    """Return the description of a rank, JSON types: sizes in GiB, counts of the last step, calls by source line."""
    marks = np.flatnonzero(records["kind"] == Kind.MARK)  # begin and end of every step
    seen = records[marks[-2] : marks[-1]] if len(marks) else records[:0]
    lines, steps = [line for line, _ in result["lines"]], result["steps"]
    nccl: dict[str, Counter[str]] = defaultdict(Counter)
    for row in seen[seen["kind"] >= Kind.ALL_REDUCE]:
        group = f"{Kind(row['kind']).name.lower()} of {len(result['communicators'][str(row['object'])][1])}"
        nccl[group].update(calls=1, bytes=int(row["amount"]) * BYTES[row["type"]])

    def by_line(kinds: tuple[Kind, ...], of: np.ndarray = seen) -> dict[str, int]:
        of_kinds = of[np.isin(of["kind"], kinds) & (of["where"] >= 0)]
        return dict(Counter(lines[i] for i in of_kinds["where"]).most_common())

    def most(name: str) -> float:
        return round(max((step.get(name, 0) for step in steps), default=0) / 2**30, 2)

    syncs, copies = by_line(SYNCS), by_line((Kind.COPY_TO_HOST,))
    return {
        "rank": result["rank"],
        "predicted_gib": most("predicted") if any("predicted" in step for step in steps) else None,
        "allocated_gib": most("allocated"),
        "reserved_gib": most("reserved"),
        "retries": sum(step["retries"] for step in steps[WARM:]),
        "out_of_memory": result.get("error"),
        "syncs_per_step": sum(syncs.values()),
        "copies_per_step": sum(copies.values()),
        "launches": int(seen["amount"][seen["kind"] == Kind.KERNEL].sum()),
        "syncs": syncs,
        "copies_to_host": copies,
        "communicators": int((records["kind"] == Kind.COMMUNICATOR).sum()),
        "made_in_steps": by_line((Kind.COMMUNICATOR,), records[marks[0] :] if len(marks) else seen),
        "nccl": dict(sorted(nccl.items())),
        **{name: result[name] for name in ("steps", "weights", "passes", "left_out")},
    }
