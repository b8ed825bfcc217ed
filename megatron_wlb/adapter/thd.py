"""Megatron's own core attention without context parallelism, as a fallback.

A single context-parallel rank has all documents in packed order, which is TransformerEngine's THD layout.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_wlb.runtime.metadata import ShardMetadata


def packed_seq_params(metadata: ShardMetadata) -> PackedSeqParams:
    """Return upstream's parameters for unpadded documents."""
    bounds = metadata.parts[0].tables[0][0]  # `encoding.varlen` of whole documents
    names = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
    longest = metadata.max_length
    return PackedSeqParams(
        qkv_format="thd",
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        pad_between_seqs=False,
        **dict.fromkeys(names, bounds),
    )


@dataclass(frozen=True, slots=True)
class ThdCoreAttention:
    """Builds upstream's module with hooks that take and return rows [s, 1, ...].

    With hooks, its state keeps its names in checkpoints.
    """

    upstream: Callable[..., torch.nn.Module]

    @classmethod
    def of(cls, upstream: Callable[..., torch.nn.Module]) -> Self:
        """Wrap `upstream`, unless it is already wrapped: layers share their specs."""
        return upstream if isinstance(upstream, cls) else cls(upstream)

    def __call__(self, **arguments: Any) -> torch.nn.Module:
        module = self.upstream(**arguments)
        module.register_forward_pre_hook(_to_thd, with_kwargs=True)
        module.register_forward_hook(lambda module, arguments, out: out.reshape(out.shape[0], 1, -1))
        return module


def _to_thd(module: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Reshape query, key, value [s, 1, heads, D] -> [s, heads, D]."""
    rows = (x.squeeze(1) for x in arguments[:3])
    return (*rows, *arguments[3:]), options | {"packed_seq_params": options["packed_seq_params"].thd}
