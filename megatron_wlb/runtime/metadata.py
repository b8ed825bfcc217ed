"""What attention needs to know about a micro-batch on one context-parallel rank, made once and used by every layer.

Shapes: s local rows, of which a set of documents has n; P keys, the rows of these documents that local queries see.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from megatron_wlb.runtime.encoding import Encoding
from megatron_wlb.sharding.routing import exchange
from megatron_wlb.sharding.segments import positions
from megatron_wlb.types import Round, ShardPlan


class Call(NamedTuple):
    """One attention call, but for its table."""

    rows: slice
    """Its queries, among the rows of its documents."""
    shape: tuple[int, ...]
    """Of the table, see `encoding.Encoded`."""
    max_q: int
    max_k: int


@dataclass(frozen=True, kw_only=True, eq=False)
class PartLayout:
    """A set of documents, or a share of its keys, that is exchanged and computed together, as one rank has it."""

    of: tuple[int, tuple[float, float] | None]
    """`document_set` and `keys` of its rounds."""
    rows: slice
    """Local rows of the documents, n of them."""
    own_rows: slice
    """Those among them that are keys."""
    keys_are_rows: bool
    """The keys are the rows, in their order, and nothing is exchanged."""
    causal: bool
    """Queries see the keys up to their own place; else all keys of their entry."""
    sent: tuple[int, ...]
    """Rows that every rank is sent; () where no rank has anything to exchange."""
    received: tuple[int, ...]
    """Rows that come from every rank, likewise."""
    calls: tuple[Call, ...]
    """Attention calls; each has some rows."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Part(PartLayout):
    """The same with its integers."""

    gather: Tensor
    """Keys from the pool of all rows that arrived and the rank's own, int64 [P]: keys = pool[gather]."""
    sent_rows: Tensor
    """The rows that are sent, rank by rank, int64."""
    arrived_keys: Tensor
    """The keys that arrive, rank by rank, int64."""
    own_keys: Tensor
    """The keys that `own_rows` are, int64."""
    tables: tuple[Tensor, ...]
    """What the backend is told of the entries of every call, int32."""


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
    max_length: int
    """Longest document; positions are below it."""
    encode: Encoding
    """The encoding of the backend that the tables are for."""
    layouts: tuple[PartLayout, ...]
    rounds: tuple[Round, ...]
    """The order in which attention runs."""
    sizes: tuple[int, ...]
    """Sizes of the int64 arrays that begin `integers`: positions, then the four of every `Part`."""
    integers: Tensor
    """int64: these arrays, then the int32 tables of the calls."""

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
        arrays, layouts, tables = [positions(plan.shards[cp_rank])], [], []
        first = {number: plan.first_row(cp_rank, number) for number in plan.call_sets}
        for number, keys in dict.fromkeys((round.document_set, round.keys) for round in plan.rounds):
            moved, calls = exchange(plan, cp_rank, number, keys), []
            for begin, segments in moved.calls:
                table, max_q, max_k = encode(moved.key_begins, segments)
                stop = begin + int((segments["stop"] - segments["start"]).sum())
                calls.append(Call(slice(begin, stop), table.shape, max_q, max_k))
                tables.append(table.ravel())
            gather = moved.gather
            arrays += [gather, moved.sent_rows, moved.arrived_keys, moved.own_keys]
            rows = slice(first[number], first.get(number + 1, len(arrays[0])))
            layouts.append(
                PartLayout(
                    of=(number, keys),
                    rows=rows,
                    own_rows=slice(*moved.own_rows),
                    keys_are_rows=not moved.sent and np.array_equal(gather, np.arange(rows.stop - rows.start)),
                    causal=moved.causal,
                    sent=moved.sent,
                    received=moved.received,
                    calls=tuple(calls),
                )
            )
        packed = np.concatenate(tables)
        return cls(
            cp_rank=cp_rank,
            cp=len(plan.shards),
            num_rows=len(arrays[0]),
            max_length=int(plan.lengths.max()),
            encode=encode,
            layouts=tuple(layouts),
            rounds=plan.rounds,
            sizes=tuple(map(len, arrays)),
            integers=torch.from_numpy(np.concatenate((*arrays, np.pad(packed, (0, len(packed) % 2)).view(np.int64)))),
        )

    @cached_property
    def positions(self) -> Tensor:
        """In-document position of every local row, int64 [s]."""
        return self.integers[: self.sizes[0]]

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """Those of `layouts`, with views of the buffer."""
        total = sum(self.sizes)
        _, *arrays = self.integers[:total].split(self.sizes)
        shapes = [call.shape for layout in self.layouts for call in layout.calls]
        words, sizes = self.integers[total:].view(torch.int32), list(map(math.prod, shapes))
        tables, found = iter(words[: sum(sizes)].split(sizes)), []
        for i, layout in enumerate(self.layouts):
            gather, sent_rows, arrived_keys, own_keys = arrays[4 * i : 4 * i + 4]
            found.append(
                Part(
                    **vars(layout),
                    gather=gather,
                    sent_rows=sent_rows,
                    arrived_keys=arrived_keys,
                    own_keys=own_keys,
                    tables=tuple(next(tables).view(call.shape) for call in layout.calls),
                )
            )
        return tuple(found)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        """The same metadata on `device`; asynchronous from pinned memory with `non_blocking`."""
        return replace(self, integers=self.integers.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        """The same metadata in pinned host memory."""
        return replace(self, integers=self.integers.pin_memory())
