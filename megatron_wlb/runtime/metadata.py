"""What attention needs to know about a micro-batch on one context-parallel rank, made once and used by every layer.

Shapes: s local rows, P rows of the micro-batch in packed order (documents one after the other), cp_size * s = P.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from megatron_wlb.plan.sharding import segments as seg
from megatron_wlb.plan.types import ShardPlan


class SegmentRows(NamedTuple):
    """Query rows [q_start, q_stop) of a colour are the last rows of keys [k_start, k_stop) of the micro-batch."""

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int

    @property
    def k_split(self) -> int:
        """First key that is also a query: all queries see the keys before it, causally those from it on."""
        return self.k_stop - (self.q_stop - self.q_start)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Colour:
    """One varlen call: local rows [q_start, q_stop), see `plan.sharding.segments.VarlenCall`."""

    q_start: int
    q_stop: int
    segments: tuple[SegmentRows, ...]
    """The same as cu_q and cu_k without the gap entries, for backends that work on the host; never empty."""
    max_q: int
    max_k: int
    integers: Tensor
    """The buffer of the metadata, which holds cu_q and cu_k."""
    cu_start: int
    """Where cu_q begins in the buffer, counted in int32."""
    entries: int

    @property
    def cu_q(self) -> Tensor:
        """int32 [entries + 1]."""
        return self.integers.view(torch.int32).narrow(0, self.cu_start, self.entries + 1)

    @property
    def cu_k(self) -> Tensor:
        """int32 [entries + 1]."""
        return self.integers.view(torch.int32).narrow(0, self.cu_start + self.entries + 1, self.entries + 1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardMetadata:
    """Rows, positions and varlen calls of one rank's shard.

    All integers lie in one buffer, so that one copy moves them, and pickling (a DataLoader worker may build this)
    writes them once. `pin_memory` is what a DataLoader with pinned memory calls.
    """

    cp_rank: int
    cp_size: int
    num_rows: int
    """s."""
    num_keys: int
    """P."""
    max_length: int
    """Longest document; positions are below it."""
    colours: tuple[Colour, ...]
    """Colours without rows are left out."""
    integers: Tensor
    """int64: positions, gather_index, scatter_index, then the int32 cu_q and cu_k of every colour."""

    @classmethod
    def build(cls, plan: ShardPlan, cp_rank: int, device: torch.device | str = "cpu") -> Self:
        """The metadata of rank `cp_rank` of `plan`, on `device` (by one asynchronous copy from pinned memory).

        Host work is linear in P. Raises ValueError for a rank that the plan does not have.
        """
        if not 0 <= cp_rank < len(plan.shards):
            raise ValueError(
                f"context-parallel rank {cp_rank} is not in a plan of {len(plan.shards)} shards; "
                "plan with the size of the context-parallel group"
            )
        shard = plan.shards[cp_rank]
        colours = [colour for colour in shard.colours if (colour["stop"] > colour["start"]).any()]
        calls = [seg.encode(plan.lengths, colour) for colour in colours]
        positions, gather_index = seg.positions(shard), seg.gather_index(plan)
        scatter_index = np.empty_like(gather_index)
        scatter_index[gather_index] = np.arange(len(gather_index))
        cu = np.concatenate([array for call in calls for array in (call.cu_q, call.cu_k)])
        cu = np.pad(cu, (0, len(cu) % 2)).view(np.int64)
        integers = torch.from_numpy(np.concatenate((positions, gather_index, scatter_index, cu)))
        metadata = cls(
            cp_rank=cp_rank,
            cp_size=len(plan.shards),
            num_rows=len(positions),
            num_keys=len(gather_index),
            max_length=int(plan.lengths.max()),
            colours=_colours(plan.lengths, colours, calls, integers, 2 * (len(integers) - len(cu))),
            integers=integers,
        )
        if torch.device(device).type == "cuda":
            metadata = metadata.pin_memory()
        return metadata.to(device, non_blocking=True)

    @property
    def positions(self) -> Tensor:
        """In-document position of every local row, int64 [s]."""
        return self.integers[: self.num_rows]

    @property
    def gather_index(self) -> Tensor:
        """Packed order from the rank-major all-gather, int64 [P]: packed = gathered[gather_index]."""
        return self.integers.narrow(0, self.num_rows, self.num_keys)

    @property
    def scatter_index(self) -> Tensor:
        """The inverse, int64 [P]: gathered = packed[scatter_index]."""
        return self.integers.narrow(0, self.num_rows + self.num_keys, self.num_keys)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        """The same metadata on `device`; asynchronous from pinned memory with `non_blocking`."""
        return self._over(self.integers.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        """The same metadata in pinned host memory."""
        return self._over(self.integers.pin_memory())

    def _over(self, integers: Tensor) -> Self:
        colours = tuple(replace(colour, integers=integers) for colour in self.colours)
        return replace(self, integers=integers, colours=colours)


def _colours(
    lengths: np.ndarray, colours: list[np.ndarray], calls: list[seg.VarlenCall], integers: Tensor, cu_start: int
) -> tuple[Colour, ...]:
    """One Colour per SEGMENT array, whose cu_q and cu_k follow each other in `integers` from int32 `cu_start` on."""
    begins = seg.document_begins(lengths)
    q_start, made = 0, []
    for colour, call in zip(colours, calls, strict=True):
        rows = _segment_rows(begins, colour)
        made.append(
            Colour(
                q_start=q_start,
                q_stop=q_start + rows[-1].q_stop,
                segments=rows,
                max_q=call.max_q,
                max_k=call.max_k,
                integers=integers,
                cu_start=cu_start,
                entries=len(call.cu_q) - 1,
            )
        )
        q_start, cu_start = made[-1].q_stop, cu_start + 2 * len(call.cu_q)
    return tuple(made)


def _segment_rows(begins: np.ndarray, colour: np.ndarray) -> tuple[SegmentRows, ...]:
    """Host-side ranges of the segments of one colour (SEGMENT [n]) that have rows."""
    colour = colour[colour["stop"] > colour["start"]]
    q_stops = np.cumsum(colour["stop"] - colour["start"])
    q_starts = q_stops - (colour["stop"] - colour["start"])
    k_starts = begins[colour["document"]]
    columns = (q_starts, q_stops, k_starts, k_starts + colour["stop"])
    return tuple(SegmentRows(*row) for row in zip(*(column.tolist() for column in columns), strict=True))
