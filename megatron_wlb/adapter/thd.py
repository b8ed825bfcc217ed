"""Megatron's own core attention under `--wlb`, for comparison: TransformerEngine's, with its context parallelism.

TransformerEngine (THD layout) gives rank r chunks r and 2 * CP - 1 - r of every document, of length / (2 * CP) rows
each. Where lengths divide, a per-document shard has the same rows; it has all first chunks, then all second ones, where
TransformerEngine wants packed order.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_wlb.adapter import compat
from megatron_wlb.sharding import segments
from megatron_wlb.types import ShardPlan


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ThdShard:
    """One rank's shard as TransformerEngine takes it; s local rows."""

    order: torch.Tensor
    """Local rows in packed order, int64 [s]."""
    back: torch.Tensor
    """The inverse of `order`, int64 [s]."""
    cu_seqlens: torch.Tensor
    """Bounds of the documents of the whole micro-batch, int32 [documents + 1]."""
    max_length: int

    @classmethod
    def build(cls, plan: ShardPlan, cp_rank: int) -> Self:
        """The shard of rank `cp_rank` of a per-document plan, on the host.

        Raises ValueError for a document that TransformerEngine cannot cut.
        """
        chunks = 2 * len(plan.shards)
        uneven = plan.lengths[plan.lengths % chunks > 0]
        if len(plan.shards) > 1 and len(uneven):
            raise ValueError(
                f"--wlb-attention-backend megatron: a document of {uneven[0]} tokens does not divide into 2 * CP = "
                f"{chunks} equal chunks; choose another backend, or data whose documents divide (tokens less one)"
            )
        order = np.argsort(segments.rows(plan.lengths, plan.shards[cp_rank]))
        return cls(
            order=torch.from_numpy(order),
            back=torch.from_numpy(np.argsort(order)),
            cu_seqlens=torch.from_numpy(segments.document_begins(plan.lengths).astype(np.int32)),
            max_length=int(plan.lengths.max()),
        )

    def to(self, device: torch.device, non_blocking: bool = False) -> Self:
        """The same on `device`."""
        return self._each(lambda x: x.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        """The same in pinned host memory."""
        return self._each(torch.Tensor.pin_memory)

    def packed_seq_params(self) -> "ThdPackedSeqParams":
        """What upstream's module is given, the same in all layers."""
        return ThdPackedSeqParams(shard=self, **compat.thd_arguments(self.cu_seqlens, self.max_length))

    def _each(self, move: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        order, back, cu_seqlens = (move(x) for x in (self.order, self.back, self.cu_seqlens))
        return type(self)(order=order, back=back, cu_seqlens=cu_seqlens, max_length=self.max_length)


@dataclass
class ThdPackedSeqParams(PackedSeqParams):
    """Upstream's parameters, and the order of the rows that they are for."""

    shard: ThdShard | None = None


@dataclass(frozen=True, slots=True)
class ThdCoreAttention:
    """Builds upstream's module such that it takes and gives local rows in our order.

    By hooks, so that its state keeps its names in checkpoints.
    """

    upstream: Callable[..., torch.nn.Module]

    @classmethod
    def of(cls, upstream: Callable[..., torch.nn.Module]) -> Self:
        """`upstream` itself if it is one: layers share their specs."""
        return upstream if isinstance(upstream, cls) else cls(upstream)

    def __call__(self, **arguments: Any) -> torch.nn.Module:
        module = self.upstream(**arguments)
        module.register_forward_pre_hook(_to_thd, with_kwargs=True)
        module.register_forward_hook(_from_thd, with_kwargs=True)
        return module


def _to_thd(module: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """query, key, value [s, 1, heads, D] -> [s, heads, D] in packed order."""
    packed = options["packed_seq_params"].thd
    rows = (x.squeeze(1).index_select(0, packed.shard.order) for x in arguments[:3])
    return (*rows, *arguments[3:]), options | {"packed_seq_params": packed}


def _from_thd(module: Any, arguments: tuple[Any, ...], options: dict[str, Any], out: torch.Tensor) -> torch.Tensor:
    """[s, ...] in packed order -> [s, 1, heads * D]."""
    return out.reshape(out.shape[0], 1, -1).index_select(0, options["packed_seq_params"].shard.back)
