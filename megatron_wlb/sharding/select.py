"""Choice of a micro-batch's sharding and of the rounds of its attention, by predicted time.

The paper has two shardings, both of 2 * CP chunks of which rank r holds r and 2 * CP - 1 - r. Hybrid sharding (ours;
`csrc/hybrid.h`) has every document on as few ranks as balance needs, so fewer of its keys travel. K and V of a round
travel during the last one (`csrc/rounds.h`). In shares, own squares and the keys before them have no hidden tiles.
"""

import itertools
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

import megatron_wlb._native as _native
from megatron_wlb.cost.attention import attention_kernels, exchange_model, sharding_kernel
from megatron_wlb.documents import SEGMENT, Shard, ShardPlan
from megatron_wlb.hardware.profile import KernelModel
from megatron_wlb.job import STRATEGIES, Job
from megatron_wlb.layers.attention import ExchangeModel
from megatron_wlb.sharding.routing import moved_rows

# Beside a constant: predicted time of a layer that is lost without it, median and most of ten jobs (CP = 2 to 32, 7B to
# 405B, documents of F2, 5 seeds), if hidden tiles take no time. `test_everything_that_is_tried_pays` holds four of
# these jobs to it.
KEY_SPLITS = (  # without shares 9.0 and 15.8 %
    (0.0, 1.0),  # 0.17 and 0.43 %
    (0.0, 1 / 2, 1.0),  # 0.84 and 1.74 %
    (0.0, 1 / 4, 1 / 2, 3 / 4, 1.0),  # 0.02 and 0.26 %
    (0.0, 1 / 8, 3 / 8, 5 / 8, 7 / 8, 1.0),  # 0.00 and 0.50 %
)
"""Bounds of the shares in which the keys of other ranks are tried to arrive, of documents in shares."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundCosts:
    """The rounds that a job tries, and their costs."""

    forward: KernelModel
    backward: KernelModel
    exchange: ExchangeModel
    merge: float
    """Us to add one tile of queries of a head to the result of other rounds: read twice and written once."""
    key_bounds: tuple[tuple[float, ...], ...]


@lru_cache(maxsize=16)
def round_costs(job: Job, window: int | None = None) -> RoundCosts:
    """Return the costs of a job's layers with this window; without a unit of time, documents go together."""
    together, (forward, backward) = job.profile.counts_pairs, attention_kernels(job, window)
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
        key_bounds=() if together or job.model.widest is not None else KEY_SPLITS,
    )


def attention_times(plan: ShardPlan, job: Job, window: int | None = None) -> tuple[list[np.ndarray], list[float]]:
    """Return predicted attention times of a layer with this window, in us, forward and backward.

    First the kernels of every rank, float64 [cp] each; then the time that the exchange adds to the slowest rank, each.
    """
    calls = [call for shard in plan.shards for call in shard.calls]
    segments = np.concatenate(calls, dtype=SEGMENT).view(np.int64)  # to find out the dtype takes five times as long
    bounds = np.cumsum([0, *map(len, calls)]).tolist()
    cp, costs = len(plan.shards), round_costs(job, window)
    # In a window, all that is exchanged moves at once.
    key_bounds, moved = (plan.key_bounds, None) if window is None else ((), int(moved_rows(plan, window).max()))
    *busy, forward, backward = _native.attention_times(segments, bounds, cp, key_bounds, costs, moved)
    return busy, [end - float(each.max()) for each, end in zip(busy, (forward, backward), strict=True)]


# Of single windows: 0.34 and 1.12 %; 0.00 and 2.58 %; 0.14 and 1.96 %. Of 4 to 8 together up to 2.5, 2.3 and 6.9 %.
MOST_SHARES = (1.0, 2.0, 1 / 4, 1 / 2, 1 / 16)
"""Most work of one document on a rank, over a rank's mean work, with which hybrid is tried."""
EXPOSED_SHARE = 1 / 2  # 1/4: 0.06 and 1.47 %; 1: 0.14 and 0.71 %
"""Share of the exchange that attention does not overlap, when shardings for attention in rounds are compared."""


def shard(lengths: np.ndarray, job: Job) -> ShardPlan:
    """Return the sharding of documents of `lengths` (int64 [n]).

    The plan's lengths end with the padding to a multiple of `job.unit_tokens`, if any, as a document of its own.
    """
    tokens, kernel = int(lengths.sum()), sharding_kernel(job)
    padding = -tokens % job.unit_tokens if tokens else job.unit_tokens
    padded = np.append(lengths, [padding] if padding else []).astype(np.int64)
    if job.cp_exchange != "shared" or job.parallel.cp == 1:
        return divide(padded, job.parallel.cp, job.sharding.cp_sharding, kernel)
    kernel = replace(kernel, exchange=EXPOSED_SHARE * kernel.exchange)
    return divide(padded, job.parallel.cp, job.sharding.cp_sharding, kernel, round_costs(job))


def divide(
    lengths: np.ndarray, cp: int, strategy: str, kernel: KernelModel, costs: RoundCosts | None = None
) -> ShardPlan:
    """Return the sharding of documents of `lengths` (int64 [n]) over `cp` ranks, in their order.

    Their sum must divide by 2 * cp. Chunks of a document, per-document, differ by at most a token: a pointer that
    rotates over them says which get one more, so every rank ends with the same number of tokens. (The paper, section
    5.1, deals the remainder out as single tokens, which would be fragments.) `paper` takes the better one of that
    paper's two (section 5.3), `auto` the best of per-sequence and every hybrid; on a tie the first. With `costs`,
    attention of the chosen one runs in rounds.
    """
    name, time, rows, bounds, key_bounds = _native.choose_sharding(
        lengths, cp, STRATEGIES[strategy], MOST_SHARES, kernel, costs
    )
    segments = rows.view(SEGMENT)[:, 0]
    calls = (segments[i:j] for i, j in itertools.pairwise(bounds))
    return ShardPlan(
        lengths=lengths,
        shards=tuple(Shard(calls=each) for each in itertools.batched(calls, (len(bounds) - 1) // cp)),
        strategy=name,
        time=time,
        key_bounds=tuple(key_bounds),
    )
