"""What is measured: micro-batches, and the ways to shard them."""

from functools import cache

import numpy as np
from megatron_wlb.plan.workload import FLOPS_PROFILE, KernelModel

from benchmarks.lengths import CROSSOVER, WINDOW, f2, packed, padded
from megatron_wlb.plan import native
from megatron_wlb.plan.sharding import mirrored_order, shard
from megatron_wlb.plan.sharding.select import STRATEGIES, candidates
from megatron_wlb.plan.step import Layout, shard_micro_batch
from megatron_wlb.plan.types import DOCUMENT, ShardPlan

STATIC = ("per-sequence", "per-document")
CHOSEN = ("paper", "hybrid")
PACKINGS = ("adaptive", "wlb", "original")


@cache
def micro_batches(window: int, packing: str, count: int) -> tuple[np.ndarray, ...]:
    """Document lengths of F2 micro-batches, int64 [documents] each; under half of F2's own window, scaled with it."""
    lengths = f2(20_000, 0)
    if window < WINDOW // 2:
        lengths = np.maximum(1, lengths * window // WINDOW)
    return tuple(packed(lengths, window, packing, count))


def whole(lengths: np.ndarray) -> ShardPlan:
    """On one rank in one piece."""
    return shard(lengths, 1, "adaptive", FLOPS_PROFILE.kernel(heads=1), use_native=False)


def ours(lengths: np.ndarray, cp_size: int, kernel: KernelModel) -> ShardPlan:
    """What training chooses with --wlb-cp-sharding adaptive."""
    documents = np.zeros(len(lengths), DOCUMENT)
    documents["length"] = lengths
    layout = Layout(
        dp_size=1, dp_rank=0, cp_size=cp_size, unit_tokens=2 * cp_size, kernel=kernel, crossover_tokens=CROSSOVER
    )
    return shard_micro_batch(0, documents, layout).shards


class Choices:
    """What every strategy makes of a micro-batch, equal plans once."""

    def __init__(self, lengths: np.ndarray, cp_size: int) -> None:
        self._lengths, self._cp_size = lengths, cp_size
        self.by_strategy: dict[str, bytes] = {}
        self.plans: dict[bytes, ShardPlan] = {}
        """By a key that is equal where plans are."""

    def choose(self, strategies: tuple[str, ...], kernel: KernelModel, suffix: str = "") -> None:
        """Plan by strategies of `plan.sharding`, and ours under the name of "adaptive"."""
        tokens = padded(self._lengths, 2 * self._cp_size)
        for strategy in strategies:
            plan = shard(tokens, self._cp_size, strategy, kernel, use_native=native.AVAILABLE)
            self.by_strategy[strategy + suffix] = self._add(plan)
        self.by_strategy[f"adaptive{suffix}"] = self._add(ours(self._lengths, self._cp_size, kernel))

    def add_candidates(self, kernel: KernelModel) -> None:
        """Everything that ours chooses from."""
        tokens = padded(self._lengths, 2 * self._cp_size)
        for plan in candidates(tokens, self._cp_size, STRATEGIES["adaptive"], kernel):
            self._add(plan)
        self._add(_mirrored(self._lengths, self._cp_size, kernel))

    def _add(self, plan: ShardPlan) -> bytes:
        arrays = (plan.lengths, *(colour for shard in plan.shards for colour in shard.colours))
        key = b"|".join(array.tobytes() for array in arrays)
        self.plans.setdefault(key, plan)
        return key


def _mirrored(lengths: np.ndarray, cp_size: int, kernel: KernelModel) -> ShardPlan:
    """Per-sequence sharding of the documents in another order."""
    tokens = padded(lengths[mirrored_order(lengths)], 2 * cp_size)
    return shard(tokens, cp_size, "per-sequence", kernel, use_native=native.AVAILABLE)
