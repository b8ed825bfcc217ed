"""What attention needs to know about a micro-batch on one context-parallel rank, made once and used by every layer.

Shapes: s local rows; P keys, the rows of the micro-batch that the local queries see; e rows that every rank sends to
all (`plan.sharding.exchange`).
"""

from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from megatron_wlb.plan.sharding import segments as seg
from megatron_wlb.plan.sharding.exchange import exchange
from megatron_wlb.plan.types import ShardPlan


class SegmentRows(NamedTuple):
    """Query rows [q_start, q_stop) of a colour are the last rows of keys [k_start, k_stop)."""

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

    @classmethod
    def of(cls, call: seg.VarlenCall, q_start: int, integers: Tensor, cu_start: int) -> Self:
        """`call` for the local rows from `q_start` on; its cu_q and cu_k follow each other in `integers`."""
        ranges = np.stack((call.cu_q[:-1], call.cu_q[1:], call.cu_k[:-1], call.cu_k[1:]), axis=1)
        return cls(
            q_start=q_start,
            q_stop=q_start + int(call.cu_q[-1]),
            segments=tuple(SegmentRows(*row) for row in ranges[np.diff(call.cu_q) > 0].tolist()),
            max_q=call.max_q,
            max_k=call.max_k,
            integers=integers,
            cu_start=cu_start,
            entries=len(call.cu_q) - 1,
        )

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
    num_sent: int
    """e; 0 where every document lives on one rank, and nothing is exchanged."""
    max_length: int
    """Longest document; positions are below it."""
    keys_are_rows: bool
    """The keys are the local rows, in their order."""
    sends_rows: bool
    """What is sent are the local rows, in their order."""
    colours: tuple[Colour, ...]
    """Colours without rows are left out."""
    sizes: tuple[int, ...]
    """Of the arrays that make up `integers`, in the order of the properties below."""
    integers: Tensor
    """int64: the arrays of the properties below, then the int32 cu_q and cu_k of every colour."""

    @classmethod
    def build(cls, plan: ShardPlan, cp_rank: int, device: torch.device | str = "cpu") -> Self:
        """The metadata of rank `cp_rank` of `plan`, on `device` (by one asynchronous copy from pinned memory).

        Host work is linear in the rows of the micro-batch. Raises ValueError for a rank that the plan does not have.
        """
        if not 0 <= cp_rank < len(plan.shards):
            raise ValueError(
                f"context-parallel rank {cp_rank} is not in a plan of {len(plan.shards)} shards; "
                "plan with the size of the context-parallel group"
            )
        shard = plan.shards[cp_rank]
        moved = exchange(plan, cp_rank)
        calls = [seg.encode(moved.key_begins, colour) for colour in shard.calls if len(colour)]
        cu = np.concatenate([array for call in calls for array in (call.cu_q, call.cu_k)])
        cu = np.pad(cu, (0, len(cu) % 2)).view(np.int64)
        positions = seg.positions(shard)
        arrays = (positions, moved.gather, moved.scatter, moved.sent_rows, moved.own_rows, moved.own_keys)
        integers = torch.from_numpy(np.concatenate((*arrays, cu)))
        rows = np.arange(len(positions))
        metadata = cls(
            cp_rank=cp_rank,
            cp_size=len(plan.shards),
            num_rows=len(positions),
            num_keys=len(moved.gather),
            num_sent=moved.num_sent,
            max_length=int(plan.lengths.max()),
            keys_are_rows=moved.num_sent == 0 and np.array_equal(moved.gather, rows),
            sends_rows=moved.num_sent == len(rows) and np.array_equal(moved.sent_rows, rows),
            colours=_colours(calls, integers, 2 * (len(integers) - len(cu))),
            sizes=tuple(len(array) for array in arrays),
            integers=integers,
        )
        if torch.device(device).type == "cuda":
            metadata = metadata.pin_memory()
        return metadata.to(device, non_blocking=True)

    @property
    def positions(self) -> Tensor:
        """In-document position of every local row, int64 [s]."""
        return self._array(0)

    @property
    def gather_index(self) -> Tensor:
        """Keys from the pool of all rows that arrived and the local ones, int64 [P]: keys = pool[gather_index]."""
        return self._array(1)

    @property
    def scatter_index(self) -> Tensor:
        """Key of every row that arrived, int64 [cp_size * e]; P where it is none of ours."""
        return self._array(2)

    @property
    def sent_rows(self) -> Tensor:
        """The local rows that are sent, int64 [at most e]."""
        return self._array(3)

    @property
    def own_rows(self) -> Tensor:
        """The local rows that are not sent, int64 [the rest of s]."""
        return self._array(4)

    @property
    def own_keys(self) -> Tensor:
        """Their keys, int64."""
        return self._array(5)

    def _array(self, i: int) -> Tensor:
        return self.integers.narrow(0, sum(self.sizes[:i]), self.sizes[i])

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        """The same metadata on `device`; asynchronous from pinned memory with `non_blocking`."""
        return self._over(self.integers.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        """The same metadata in pinned host memory."""
        return self._over(self.integers.pin_memory())

    def _over(self, integers: Tensor) -> Self:
        colours = tuple(replace(colour, integers=integers) for colour in self.colours)
        return replace(self, integers=integers, colours=colours)


def _colours(calls: list[seg.VarlenCall], integers: Tensor, cu_start: int) -> tuple[Colour, ...]:
    """Colours that follow each other in the local rows, and in `integers` from int32 `cu_start` on."""
    q_start, made = 0, []
    for call in calls:
        made.append(Colour.of(call, q_start, integers, cu_start))
        q_start, cu_start = made[-1].q_stop, cu_start + 2 * len(call.cu_q)
    return tuple(made)
