"""Runs schemes on a case: packs, places, shards and simulates step after step."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations

import numpy as np

from benchmarks.lengths import stream
from benchmarks.paper.setups import MEAN_DELAY, Case
from megatron_wlb.cost.work import document_work
from megatron_wlb.job import Job
from megatron_wlb.job import PackedBatch as Policy
from megatron_wlb.packing.adaptive import AdaptivePacking
from megatron_wlb.packing.fixed import FixedPacking
from megatron_wlb.packing.original import OriginalPacking
from megatron_wlb.packing.wlb import WlbPacking
from megatron_wlb.plan import metrics
from megatron_wlb.plan.packer import PackedStep, make_packer
from megatron_wlb.plan.step import shard_step
from megatron_wlb.simulate import SimulatedStep, balanced_time, simulate_step
from megatron_wlb.types import PackedBatch

SKIPPED = 0.1
"""Share of the steps that is left out at the beginning, where queues fill."""
BLOCKS = 16
"""Blocks of consecutive steps, whose spread gives standard errors."""
TUNING_STEPS = 150


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """What decides how a step runs."""

    packing: Policy | None
    """None: Algorithm 1 with the thresholds of the case."""
    sharding: str
    reorder: bool = False
    """Micro-batches are placed and ordered by work."""
    our_exchange: bool = False
    """The K and V that are needed of shared documents, in stages; the sharding is chosen with that in mind."""

    def job(self, case: Case) -> Job:
        """The case's job as this scheme runs it."""
        exchange = {"cp_exchange": "shared"} if self.our_exchange else {}
        packing = algorithm_1(case, case.thresholds or tuned(case)) if self.packing is None else self.packing
        return replace(case.job, packing=packing, cp_sharding=self.sharding, reorder=self.reorder, **exchange)


PLAIN = Scheme(packing=OriginalPacking(), sharding="per-sequence")
FIXED = {s: Scheme(packing=FixedPacking(global_batches=1), sharding=s) for s in ("per-sequence", "per-document")}
"""Fixed-4D takes the faster of the two in every case."""
WLB = Scheme(packing=None, sharding="wlb")
OURS = Scheme(packing=AdaptivePacking(), sharding="auto", reorder=True, our_exchange=True)
BALANCE = replace(OURS, our_exchange=False)
"""Ours with the paper's exchange: what balance alone gains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a scheme took for each step it ran."""

    work: np.ndarray
    """Work of the documents of every step, float64 [steps]."""
    times: np.ndarray
    """In us, float64 [steps]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Outcomes of Plain-4D's steps if all micro-batches and all context-parallel shards were alike."""

    balance: Outcome
    everything: Outcome
    """And the exchange of K and V were hidden."""


def algorithm_1(case: Case, shares: Sequence[float]) -> WlbPacking:
    """Algorithm 1 with thresholds in shares of the window."""
    return WlbPacking(outlier_thresholds=tuple(round(s * case.window) for s in shares))


def pack(case: Case, scheme: Scheme, steps: int, seed: int = 0) -> tuple[list[PackedStep], list[float]]:
    """Steps of a scheme's packing after the first tenth, and the ms that each took."""
    packer = make_packer(stream(case.stream(seed), case.window), scheme.job(case), fingerprint="")
    packed, ms = [], []
    for _ in range(steps):
        begin = time.perf_counter()
        packed.append(packer.next())
        ms.append((time.perf_counter() - begin) * 1e3)
    skipped = int(SKIPPED * steps)
    return packed[skipped:], ms[skipped:]


def summary(case: Case, packed: Sequence[PackedStep]) -> metrics.Summary:
    """Balance by work, delay and tokens."""
    measured = [metrics.measure(p.packing, p.step, case.job) for p in packed]
    return metrics.summarise(measured, num_waiting=packed[-1].num_waiting, skip=0)


@lru_cache(maxsize=64)
def tuned(case: Case, num_queues: int = 2) -> tuple[float, ...]:
    """Thresholds L_i of Algorithm 1 in eighths of the window: section 4.2, on a sample of its own."""

    def quality(shares: tuple[float, ...]) -> tuple[float, float]:
        packed, _ = pack(case, replace(WLB, packing=algorithm_1(case, shares)), TUNING_STEPS, seed=1)
        balance = summary(case, packed)
        return max(0.0, balance.late_steps - MEAN_DELAY), balance.imbalance_mean

    return min((tuple(e / 8 for e in eighths) for eighths in combinations(range(1, 8), num_queues)), key=quality)


def simulate(case: Case, scheme: Scheme, packing: PackedBatch) -> SimulatedStep:
    """One step, placed and sharded as training would."""
    job = scheme.job(case)
    lengths = packing.lengths
    return simulate_step(job, shard_step(job, lengths), case.hardware)


def outcomes(case: Case, schemes: dict[str, Scheme], steps: int) -> tuple[dict[str, Outcome], Limits]:
    """What Plain-4D and each scheme make of the same documents, and what is the most that can be made of them."""
    by_scheme, limits = {}, []
    packed: dict[Policy | None, list[PackedStep]] = {}
    for name, scheme in {"Plain-4D": PLAIN, **schemes}.items():
        if scheme.packing not in packed:
            packed[scheme.packing], _ = pack(case, scheme, steps)
        work, times = [], []
        for p in packed[scheme.packing]:
            step = simulate(case, scheme, p.packing)
            work.append(float(document_work(p.packing.documents["length"], case.job.crossover_tokens).sum()))
            times.append(step.time)
            if name == "Plain-4D":
                limits.append((balanced_time(step), balanced_time(_without_exchange(step))))
        by_scheme[name] = Outcome(work=np.array(work), times=np.array(times))
    plain = by_scheme["Plain-4D"].work
    balance, everything = (Outcome(work=plain, times=times) for times in np.array(limits).T)
    return by_scheme, Limits(balance=balance, everything=everything)


def _without_exchange(step: SimulatedStep) -> SimulatedStep:
    layers = step.job.layers()[:, :, None]
    passes = tuple(
        replace(
            p,
            forward=p.forward - layers * p.layers[0].exchange,
            backward=p.backward - layers * p.layers[1].exchange,
        )
        for p in step.passes
    )
    return replace(step, passes=passes)


def speedup(one: Outcome, plain: Outcome) -> tuple[float, float]:
    """Throughput of `one` over that of `plain`, and its standard error from blocks of steps.

    Both run the same documents, but some of them in other steps. Counted in work, a block's throughput hangs less on
    which ones it got than in tokens; in the end both counts say the same.
    """
    whole = (one.work.sum() / one.times.sum()) / (plain.work.sum() / plain.times.sum())
    blocks = min(BLOCKS, len(one.times) // 2)
    parts = [np.array_split(x, blocks) for x in (one.work, one.times, plain.work, plain.times)]
    ratios = [(a.sum() / b.sum()) / (c.sum() / d.sum()) for a, b, c, d in zip(*parts, strict=True)]
    return float(whole), float(np.std(ratios, ddof=1) / math.sqrt(blocks))


def gain_share(one: float, limit: float) -> float:
    """Share of the attainable gain, of two speed-ups over Plain-4D."""
    return (one - 1) / (limit - 1)
