"""Choice of a micro-batch's sharding and of the rounds of its attention, by predicted time.

The paper has two shardings, both of 2 * CP chunks of which rank r holds r and 2 * CP - 1 - r. Hybrid sharding (ours;
`csrc/hybrid.h`) has every document on as few ranks as balance needs, so fewer of its keys travel. K and V of a round
travel during the last one (`csrc/rounds.h`).
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from megatron_wlb import _native
from megatron_wlb.cost.attention import ExchangeModel, attention_kernels, exchange_model, sharding_kernel
from megatron_wlb.hardware.profile import KernelModel
from megatron_wlb.job import STRATEGIES, Job
from megatron_wlb.types import SEGMENT, Round, Shard, ShardPlan

EDGES = (0, 1, 2)
"""How many of the shared documents are tried as a set of their own, before and after the others."""
SHARES = (
    (0.0, 1.0),
    (0.0, 1 / 4, 1.0),
    (0.0, 1 / 16, 1 / 4, 1.0),
    (0.0, 1 / 8, 7 / 8, 1.0),
    (0.0, 1 / 2, 1.0),
    (0.0, 1 / 4, 1 / 2, 3 / 4, 1.0),
    (0.0, 1 / 8, 3 / 8, 5 / 8, 7 / 8, 1.0),
)
"""Bounds of the parts in which the keys of other ranks are tried to arrive, of documents in parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundCosts:
    """Which rounds a job tries, and what they cost."""

    forward: KernelModel
    backward: KernelModel
    exchange: ExchangeModel
    merge: float
    """Us to add one tile of queries of a head to what other parts have: read twice and written once."""
    kept: bool
    """K and V that forward has got need not travel again."""
    num_heads: int
    """Key heads of a rank."""
    edges: tuple[int, ...]
    shares: tuple[tuple[float, ...], ...]


@lru_cache(maxsize=16)
def round_costs(job: Job) -> RoundCosts:
    """Return the costs of a job; without a unit of time, documents go together."""
    together, (forward, backward) = job.profile.counts_pairs, attention_kernels(job)
    return RoundCosts(
        forward=forward,
        backward=backward,
        exchange=exchange_model(job),
        merge=3
        * job.bytes_per_value
        * job.model.value_channels
        * forward.tile_rows
        / job.profile.memory_gb_per_s
        / 1e3,
        kept=job.sharding.save_gathered_kv,
        num_heads=1 if together else job.model.heads_per_rank(job.parallel.tp)[1],
        edges=(0,) if together else EDGES,
        shares=() if together or job.windowed else SHARES,
    )


def attention_times(plan: ShardPlan, job: Job) -> tuple[list[np.ndarray], list[float]]:
    """Return predicted attention times of a layer, in us, forward and backward.

    First the kernels of every rank, float64 [cp] each; then the time that the exchange adds to the slowest rank, each.
    """
    calls = [call for shard in plan.shards for call in shard.calls]
    segments = np.concatenate(calls, dtype=SEGMENT).view(np.int64)  # to find out the dtype takes five times as long
    bounds = np.cumsum([0, *map(len, calls)]).tolist()
    *busy, forward, backward = _native.attention_times(segments, bounds, plan.call_sets, plan.rounds, round_costs(job))
    return busy, [end - float(each.max()) for each, end in zip(busy, (forward, backward), strict=True)]


MOST_SHARES = (1 / 2, 1.0, 2.0, 4.0, 1 / 4, 1 / 8, 1 / 16, 1 / 32)
"""Hybrid is tried with so many times a rank's mean work as the most that a rank has of one document. Those that often
win come first, since they spare the others most of their time."""
EXPOSED_SHARES = (1 / 16, 1 / 4)
"""Shares of the exchange that attention may not overlap: sharding is tried with each, and rounds tell the best."""


def shard(lengths: np.ndarray, job: Job) -> tuple[np.ndarray, ShardPlan]:
    """Return the order of documents of `lengths` (int64 [n]), and their sharding.

    The plan's lengths end with the padding to a multiple of `job.unit_tokens`, if any, as a document of its own. If the
    job reorders, documents change places if per-sequence sharding is fastest then.
    """
    tokens, strategy, kernel = int(lengths.sum()), job.sharding.cp_sharding, sharding_kernel(job)
    padding = -tokens % job.unit_tokens if tokens else job.unit_tokens
    padded = np.append(lengths, [padding] if padding else []).astype(np.int64)
    in_rounds = job.cp_exchange == "shared" and job.parallel.cp > 1
    prices = list(dict.fromkeys(share * kernel.exchange for share in (EXPOSED_SHARES if in_rounds else (1,))))
    mirrors = job.parallel.cp > 1 and job.reorders and "per-sequence" in STRATEGIES[strategy]
    order, plan = _choose(
        padded,
        job.parallel.cp,
        strategy,
        kernel,
        prices,
        num_mirrored=len(lengths) if mirrors else 0,
        costs=round_costs(job) if in_rounds else None,
    )
    return order[: len(lengths)], plan


def divide(lengths: np.ndarray, cp: int, strategy: str, kernel: KernelModel) -> ShardPlan:
    """Return the sharding of documents of `lengths` (int64 [n]) over `cp` ranks, in their order.

    Their sum must divide by 2 * cp. Chunks of a document, per-document, differ by at most a token: a pointer that
    rotates over them says which get one more, so every rank ends with the same number of tokens. (The paper, section
    5.1, deals the remainder out as single tokens, which would be fragments.) `wlb` takes the better one of the paper's
    two (section 5.3), `auto` the best of per-sequence and every hybrid; on a tie the first.
    """
    return _choose(lengths, cp, strategy, kernel, [kernel.exchange])[1]


def _choose(
    lengths: np.ndarray,
    cp: int,
    strategy: str,
    kernel: KernelModel,
    prices: Sequence[float],
    num_mirrored: int = 0,
    costs: RoundCosts | None = None,
) -> tuple[np.ndarray, ShardPlan]:
    """Return the order of documents, int64 [n], and the plan.

    `prices` of a moved row replace `kernel.exchange`; with `costs` of rounds several, and the best is taken. The first
    `num_mirrored` documents change places if that is fastest.
    """
    order, name, time, rows, bounds, call_sets, rounds = _native.choose_sharding(
        lengths, cp, STRATEGIES[strategy], MOST_SHARES, kernel, prices, num_mirrored, costs
    )
    segments = rows.view(SEGMENT)[:, 0]
    calls = (segments[i:j] for i, j in itertools.pairwise(bounds))
    plan = ShardPlan(
        lengths=lengths[order],
        shards=tuple(Shard(calls=each) for each in itertools.batched(calls, len(call_sets))),
        strategy=name,
        time=time,
        call_sets=tuple(call_sets),
        rounds=tuple(Round(*each) for each in rounds),
    )
    return order, plan
