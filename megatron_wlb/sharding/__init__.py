"""Division of a micro-batch over context-parallel ranks."""

from megatron_wlb.job import STRATEGIES
from megatron_wlb.sharding.select import divide, per_document, per_sequence, rank_work, shard
from megatron_wlb.sharding.volume import moved_rows

__all__ = ["STRATEGIES", "divide", "moved_rows", "per_document", "per_sequence", "rank_work", "shard"]
