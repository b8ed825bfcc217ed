"""Integers of a micro-batch's attention on one CP rank, made once for all layers.

Shapes: s local rows, of which the documents of a round have n; P keys, the rows that local queries see of these.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from megatron_wlb.documents import Keys, RoundKeys, Shard, ShardPlan
from megatron_wlb.runtime.backends.protocol import Encoding
from megatron_wlb.sharding.routing import document_begins, exchange, positions
from megatron_wlb.sharding.routing import rows as held_rows


class Call(NamedTuple):
    """One attention call without its table."""

    rows: slice
    """Queries, among the rows of the round."""
    shape: tuple[int, ...]
    """Of the table, see `Encoded`."""
    max_q: int
    max_k: int


@dataclass(frozen=True, kw_only=True, eq=False)
class RoundLayout:
    """The exchange and the computation of a round."""

    of: RoundKeys
    rows: slice
    """Local rows of the documents, n of them."""
    own_rows: slice
    """Rows of the round that are keys."""
    keys_are_rows: bool
    """The keys are the rows, in their order, and nothing is exchanged."""
    causal: bool
    """Queries see the keys up to their own position; otherwise all keys of their entry."""
    sent: tuple[int, ...]
    """Number of rows sent to each rank; () if no rank has anything to exchange."""
    received: tuple[int, ...]
    """Number of rows from each rank; () as `sent`."""
    calls: tuple[Call, ...]
    """None of them empty."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Round(RoundLayout):
    """A layout with the integers of its `Exchange`, int64."""

    gather: Tensor
    sent_rows: Tensor
    arrived_keys: Tensor
    own_keys: Tensor
    tables: tuple[Tensor, ...]
    """The table of each call, int32."""


class PackedOrder(NamedTuple):
    """Where layers whose state runs along a document find its rows.

    An all-to-all gives such a layer all S rows of the micro-batch for some of its heads: the first rank's rows, then
    the next rank's.
    """

    from_ranks: Tensor
    """int64 [S]: row i in packed order is row `from_ranks[i]` of these."""
    to_ranks: Tensor
    """int64 [S]: the inverse."""
    cu_seqlens: Tensor
    """int64 [documents + 1]: first row of each document in packed order, and S; no document is empty."""

    def documents(self) -> Tensor:
        """Return the document of every row in packed order, int32 [1, S]."""
        rows = torch.arange(len(self.to_ranks), device=self.to_ranks.device)
        return torch.bucketize(rows, self.cu_seqlens[1:], out_int32=True, right=True)[None]


def _packed_order(plan: ShardPlan) -> list[np.ndarray]:
    """Return the arrays of `PackedOrder`."""
    to_ranks = np.concatenate([held_rows(plan.lengths, shard) for shard in plan.shards])
    from_ranks = np.empty_like(to_ranks)
    from_ranks[to_ranks] = np.arange(len(to_ranks))
    return [from_ranks, to_ranks, document_begins(plan.lengths[plan.lengths > 0])]


@dataclass(frozen=True, kw_only=True, eq=False)
class ShardMetadata:
    """Rows, positions and attention calls of one rank's shard.

    All integers lie in one buffer: one copy moves them, and pickling from a DataLoader's worker writes them once.
    """

    cp_rank: int
    num_rows: int
    """s."""
    layouts: tuple[RoundLayout, ...]
    orders: Mapping[int | None, tuple[int, ...]]
    """By the window of a layer: which of `layouts` it runs, in order."""
    sizes: tuple[int, ...]
    """Of the int64 arrays that begin `integers`: positions, then four for every `Round`, then arrays of `packed`, if
    any; then the int32 tables."""
    integers: Tensor

    @classmethod
    def build(
        cls,
        plan: ShardPlan,
        cp_rank: int,
        encode: Encoding,
        windows: Sequence[int | None] = (None,),
        in_order: bool = False,
    ) -> Self:
        """Return the metadata of rank `cp_rank` of `plan`, on the host, for `encode` and layers of these windows.

        `in_order`: with `packed`.

        O(rows of the micro-batch). Raises ValueError for a rank that the plan does not have.
        """
        if not 0 <= cp_rank < len(plan.shards):
            raise ValueError(
                f"context-parallel rank {cp_rank} is not in a plan of {len(plan.shards)} shards; "
                "plan with the size of the context-parallel group"
            )
        arrays, layouts, tables = [positions(plan.shards[cp_rank])], [], []
        num_rows = len(arrays[0])
        of_whole = Shard(calls=plan.calls(cp_rank, Keys.WHOLE)).tokens
        rows_of: dict[RoundKeys, slice] = {Keys.ALL: slice(0, num_rows), Keys.WHOLE: slice(0, of_whole)}
        rounds = {window: plan.rounds_of(window) for window in windows}
        every = list(dict.fromkeys(itertools.chain(*rounds.values())))
        for of in every:
            moved, rows, calls = exchange(plan, cp_rank, of), rows_of.get(of, slice(of_whole, num_rows)), []
            for begin, segments in moved.calls:
                table, max_q, max_k = encode(moved.key_begins, segments)
                stop = begin + int((segments["stop"] - segments["start"]).sum())
                calls.append(Call(slice(begin, stop), table.shape, max_q, max_k))
                tables.append(table.ravel())
            gather = moved.gather
            arrays += [gather, moved.sent_rows, moved.arrived_keys, moved.own_keys]
            layouts.append(
                RoundLayout(
                    of=of,
                    rows=rows,
                    own_rows=slice(moved.own_rows),
                    keys_are_rows=not moved.sent and np.array_equal(gather, np.arange(rows.stop - rows.start)),
                    causal=moved.causal,
                    sent=moved.sent,
                    received=moved.received,
                    calls=tuple(calls),
                )
            )
        if in_order:
            arrays += _packed_order(plan)
        packed = np.concatenate(tables)
        return cls(
            cp_rank=cp_rank,
            num_rows=num_rows,
            layouts=tuple(layouts),
            orders={window: tuple(map(every.index, of_layer)) for window, of_layer in rounds.items()},
            sizes=tuple(map(len, arrays)),
            integers=torch.from_numpy(np.concatenate((*arrays, np.pad(packed, (0, len(packed) % 2)).view(np.int64)))),
        )

    @cached_property
    def positions(self) -> Tensor:
        """In-document position of every local row, int64 [s]."""
        return self.integers[: self.sizes[0]]

    @cached_property
    def rounds(self) -> tuple[Round, ...]:
        """The rounds of `layouts`, with views of the buffer."""
        total = sum(self.sizes)
        _, *arrays = self.integers[:total].split(self.sizes)
        shapes = [call.shape for layout in self.layouts for call in layout.calls]
        words, sizes = self.integers[total:].view(torch.int32), list(map(math.prod, shapes))
        tables, found = iter(words[: sum(sizes)].split(sizes)), []
        for i, layout in enumerate(self.layouts):
            gather, sent_rows, arrived_keys, own_keys = arrays[4 * i : 4 * i + 4]
            found.append(
                Round(
                    **vars(layout),
                    gather=gather,
                    sent_rows=sent_rows,
                    arrived_keys=arrived_keys,
                    own_keys=own_keys,
                    tables=tuple(next(tables).view(call.shape) for call in layout.calls),
                )
            )
        return tuple(found)

    def rounds_of(self, window: int | None) -> tuple[Round, ...]:
        """Return the rounds of a layer with this window. Raises ValueError for one that was not built."""
        if window not in self.orders:
            raise ValueError(
                f"a layer's window is {window}, and the metadata are for {', '.join(map(str, self.orders))}; build "
                "them with it"
            )
        return tuple(self.rounds[i] for i in self.orders[window])

    @cached_property
    def packed(self) -> PackedOrder | None:
        """None unless `build` was asked for it."""
        beside = 1 + 4 * len(self.layouts)
        if len(self.sizes) == beside:
            return None
        return PackedOrder(*self.integers[sum(self.sizes[:beside]) : sum(self.sizes)].split(self.sizes[beside:]))

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        return replace(self, integers=self.integers.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        """For torch's DataLoader."""
        return replace(self, integers=self.integers.pin_memory())
