"""What is measured: sizes, micro-batches, and the ways to shard them."""

from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from benchmarks.lengths import CROSSOVER, WINDOW, f2, packed, padded
from megatron_wlb.cost.attention import sharding_kernel
from megatron_wlb.describe.make import make_job
from megatron_wlb.hardware.profile import FLOPS_PROFILE, Profile
from megatron_wlb.job import STRATEGIES, Job, Parallel
from megatron_wlb.model import ModelShape
from megatron_wlb.packing import DEFAULT_POLICY, POLICIES
from megatron_wlb.sharding import divide, mirrored_order, shard
from megatron_wlb.sharding.select import candidates
from megatron_wlb.types import ShardPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Sizes."""

    models: dict[str, tuple[int, int]]
    """Query and key heads of a tensor-parallel rank."""
    head_size: int
    windows: tuple[int, ...]
    """Ascending; context windows in tokens."""
    cps: tuple[int, ...]
    """Context-parallel ranks."""
    micro_batches: int
    kernel_tokens: tuple[int, ...]
    """Section a packs so many into equal documents: many, and fewer, for the launch time of the profile."""
    short_queries: tuple[int, int]
    """Section a: keys that short queries see, and entries of a call times query heads."""
    case_seconds: float
    """Section b: time after which a case of CP=4, the paper's, begins no micro-batch; a third of that for others."""


FULL = Scale(
    models={"7B TP8": (4, 4), "70B TP8": (8, 1), "7B": (32, 32), "70B": (64, 8)},
    head_size=128,
    windows=(65_536, 131_072),
    cps=(2, 4, 8),
    micro_batches=30,
    kernel_tokens=(131_072, 8_192),
    short_queries=(8_192, 512),
    case_seconds=30,
)
QUICK = Scale(
    models={"MHA": (2, 2), "GQA": (4, 2)},
    head_size=64,
    windows=(256, 512),
    cps=(2, 4),
    micro_batches=2,
    kernel_tokens=(512, 64),
    short_queries=(512, 8),
    case_seconds=60,
)


def attention_job(
    window: int, heads: tuple[int, int], cp: int = 1, *, packing: str = DEFAULT_POLICY, profile: Profile = FLOPS_PROFILE
) -> Job:
    """A job of which only attention counts, for (Hq, Hkv) heads of a rank. Without communication: none is measured.

    A micro-batch for every one of four data-parallel ranks, so that packing makes them alike.
    """
    model = ModelShape(
        num_layers=1,
        hidden_size=1,
        ffn_hidden_size=1,
        num_attention_heads=heads[0],
        num_query_groups=heads[1],
        padded_vocab_size=0,
    )
    return make_job(
        model=model,
        context_length=window,
        global_batch_size=4,
        parallel=Parallel(cp=cp, dp=4),
        packing=POLICIES[packing](),
        crossover_tokens=CROSSOVER,
        cp_exchange="all",
        profile=profile,
    )


@cache
def micro_batches(window: int, packing: str, count: int) -> tuple[np.ndarray, ...]:
    """Document lengths of F2 micro-batches, int64 [documents] each; under half of F2's own window, scaled with it."""
    lengths = f2(20_000, 0)
    if window < WINDOW // 2:
        lengths = np.maximum(1, lengths * window // WINDOW)
    return tuple(packed(lengths, attention_job(window, (1, 1), packing=packing), count))


def whole(lengths: np.ndarray) -> ShardPlan:
    """On one rank in one piece."""
    return divide(lengths, 1, "auto", FLOPS_PROFILE.kernels()[0])


class Choices:
    """What every strategy makes of a micro-batch, equal plans once."""

    def __init__(self, lengths: np.ndarray) -> None:
        self._lengths = lengths
        self.by_strategy: dict[str, bytes] = {}
        self.plans: dict[bytes, ShardPlan] = {}
        """By a key that is equal where plans are."""

    def choose(self, job: Job, strategies: tuple[str, ...], suffix: str = "") -> None:
        """Plan as training does by values of `--wlb-cp-sharding`; documents change places for `auto` alone."""
        for strategy in strategies:
            _, plan = shard(self._lengths, replace(job, cp_sharding=strategy, reorder=strategy == "auto"))
            self.by_strategy[strategy + suffix] = self._add(plan)

    def add_candidates(self, job: Job) -> None:
        """Everything that `auto` chooses from."""
        kernel, cp = sharding_kernel(job), job.parallel.cp
        for plan in candidates(padded(self._lengths, job.unit_tokens), cp, STRATEGIES["auto"], kernel):
            self._add(plan)
        mirrored = self._lengths[mirrored_order(self._lengths)]
        self._add(divide(padded(mirrored, job.unit_tokens), cp, "per-sequence", kernel))

    def _add(self, plan: ShardPlan) -> bytes:
        """Its key, which is equal where lengths and calls are."""
        arrays = (plan.lengths, *(call for shard in plan.shards for call in shard.calls))
        key = b"|".join(array.tobytes() for array in arrays)
        self.plans.setdefault(key, plan)
        return key
