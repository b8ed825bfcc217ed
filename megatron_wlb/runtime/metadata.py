"""What attention needs to know about a micro-batch on one context-parallel rank, made once and used by every layer.

Shapes: s local rows; P keys, the rows of the micro-batch that the local queries see; e rows that every rank sends to
all (`plan.sharding.exchange`).
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from megatron_wlb.plan.sharding.exchange import exchange
from megatron_wlb.plan.sharding.segments import positions
from megatron_wlb.plan.types import ShardPlan
from megatron_wlb.runtime.encoding import Encoding


class Call(NamedTuple):
    """One attention call: its local rows, and where its table is."""

    rows: slice
    """The local rows that are its queries."""
    begin: int
    """Where its table begins in the metadata's buffer, counted in int32."""
    shape: tuple[int, ...]
    """Shape of the table, see `encoding.Encoded`."""
    max_q: int
    max_k: int


@dataclass(frozen=True, kw_only=True, eq=False)
class ShardMetadata:
    """Rows, positions and attention calls of one rank's shard.

    All integers lie in one buffer, so that one copy moves them, and pickling (a DataLoader worker may build this)
    writes them once. The views of it that layers use are made once. `pin_memory` is what a DataLoader with pinned
    memory calls.
    """

    cp_rank: int
    cp: int
    """Context-parallel ranks."""
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
    encode: Encoding
    """The encoding of the backend that the tables are for."""
    calls: tuple[Call, ...]
    """Attention calls, one after the other in the local rows; each has some."""
    sizes: tuple[int, ...]
    """Sizes of the arrays that make up `integers`, in the order of the properties below."""
    integers: Tensor
    """int64: the arrays of the properties below, then the int32 tables of the calls."""

    @classmethod
    def build(cls, plan: ShardPlan, cp_rank: int, encode: Encoding) -> Self:
        """The metadata of rank `cp_rank` of `plan`, on the host, for the backend whose `encode` is given.

        Linear in the rows of the micro-batch. Raises ValueError for a rank that the plan does not have.
        """
        if not 0 <= cp_rank < len(plan.shards):
            raise ValueError(
                f"context-parallel rank {cp_rank} is not in a plan of {len(plan.shards)} shards; "
                "plan with the size of the context-parallel group"
            )
        shard, moved = plan.shards[cp_rank], exchange(plan, cp_rank)
        arrays = (positions(shard), moved.gather, moved.scatter, moved.sent_rows, moved.own_rows, moved.own_keys)
        row, begin, calls, tables = 0, 2 * sum(map(len, arrays)), [], []
        for segments in filter(len, shard.calls):
            table, max_q, max_k = encode(moved.key_begins, segments)
            stop = row + int((segments["stop"] - segments["start"]).sum())
            calls.append(Call(slice(row, stop), begin, table.shape, max_q, max_k))
            tables.append(table.ravel())
            row, begin = stop, begin + table.size
        packed = np.pad(np.concatenate(tables), (0, begin % 2)).view(np.int64)
        rows = np.arange(row)
        return cls(
            cp_rank=cp_rank,
            cp=len(plan.shards),
            num_rows=row,
            num_keys=len(moved.gather),
            num_sent=moved.num_sent,
            max_length=int(plan.lengths.max()),
            keys_are_rows=moved.num_sent == 0 and np.array_equal(moved.gather, rows),
            sends_rows=moved.num_sent == row and np.array_equal(moved.sent_rows, rows),
            encode=encode,
            calls=tuple(calls),
            sizes=tuple(map(len, arrays)),
            integers=torch.from_numpy(np.concatenate((*arrays, packed))),
        )

    @cached_property
    def positions(self) -> Tensor:
        """In-document position of every local row, int64 [s]."""
        return self._array(0)

    @cached_property
    def gather_index(self) -> Tensor:
        """Keys from the pool of all rows that arrived and `own_rows`, int64 [P]: keys = pool[gather_index]."""
        return self._array(1)

    @cached_property
    def scatter_index(self) -> Tensor:
        """Key of every row that arrived, int64 [cp * e]; P where it is none of ours."""
        return self._array(2)

    @cached_property
    def sent_rows(self) -> Tensor:
        """The local rows that are sent, int64 [at most e]."""
        return self._array(3)

    @cached_property
    def own_rows(self) -> Tensor:
        """The local rows that are not sent, int64 [the rest of s]."""
        return self._array(4)

    @cached_property
    def own_keys(self) -> Tensor:
        """Their keys, int64."""
        return self._array(5)

    @cached_property
    def tables(self) -> tuple[Tensor, ...]:
        """The table of every call, int32: what its backend is told of its entries."""
        integers = self.integers.view(torch.int32)
        return tuple(integers[c.begin : c.begin + math.prod(c.shape)].view(c.shape) for c in self.calls)

    def _array(self, i: int) -> Tensor:
        return self.integers.narrow(0, sum(self.sizes[:i]), self.sizes[i])

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        """The same metadata on `device`; asynchronous from pinned memory with `non_blocking`."""
        return replace(self, integers=self.integers.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        """The same metadata in pinned host memory."""
        return replace(self, integers=self.integers.pin_memory())
