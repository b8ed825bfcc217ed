"""How a micro-batch is divided over context-parallel ranks, and which way is fastest for it."""

from megatron_wlb.job import STRATEGIES
from megatron_wlb.sharding.chunks import per_document, per_sequence
from megatron_wlb.sharding.hybrid import hybrid
from megatron_wlb.sharding.select import divide, mirrored_order, predicted_time, rank_work, shard
from megatron_wlb.sharding.volume import moved_rows

__all__ = [
    "STRATEGIES",
    "divide",
    "hybrid",
    "mirrored_order",
    "moved_rows",
    "per_document",
    "per_sequence",
    "predicted_time",
    "rank_work",
    "shard",
]
