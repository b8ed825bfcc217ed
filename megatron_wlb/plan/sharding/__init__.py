"""How a micro-batch is divided over context-parallel ranks, and which way is fastest for it."""

from megatron_wlb.plan.sharding.chunks import per_document, per_sequence
from megatron_wlb.plan.sharding.hybrid import hybrid
from megatron_wlb.plan.sharding.select import STRATEGIES, divide, mirrored_order, predicted_time, rank_work, shard
from megatron_wlb.plan.sharding.volume import moved_rows

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
