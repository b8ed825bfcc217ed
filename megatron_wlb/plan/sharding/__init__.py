"""How a micro-batch is divided over context-parallel ranks, and which way is fastest for it."""

from megatron_wlb.plan.sharding.per_document import per_document
from megatron_wlb.plan.sharding.per_sequence import per_sequence
from megatron_wlb.plan.sharding.select import shard

__all__ = ["per_document", "per_sequence", "shard"]
