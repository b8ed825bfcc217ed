"""How a micro-batch is divided over context-parallel ranks, and which way is fastest for it."""

from megatron_wlb.plan.sharding.hybrid import hybrid
from megatron_wlb.plan.sharding.per_document import per_document
from megatron_wlb.plan.sharding.per_sequence import per_sequence
from megatron_wlb.plan.sharding.select import STRATEGIES, mirrored_order, predicted_time, rank_work, shard

__all__ = [
    "STRATEGIES",
    "hybrid",
    "mirrored_order",
    "per_document",
    "per_sequence",
    "predicted_time",
    "rank_work",
    "shard",
]
