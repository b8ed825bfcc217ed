"""Packing policies: which documents run in this step, and in which micro-batch."""

from megatron_wlb.plan.packing.original import OriginalPolicy
from megatron_wlb.plan.packing.wlb import WlbPolicy

POLICIES = ("original", "wlb")

__all__ = ["POLICIES", "OriginalPolicy", "WlbPolicy"]
