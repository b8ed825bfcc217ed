"""Runs schemes on a case: packs, places, shards and simulates step after step."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations

import numpy as np

from benchmarks.lengths import stream
from benchmarks.packing import Timed
from benchmarks.paper.setups import MEAN_DELAY, Case
from megatron_wlb.cli.job import layout_of
from megatron_wlb.plan import metrics
from megatron_wlb.plan.packer import PackedStep, Packer
from megatron_wlb.plan.packing import make_policy
from megatron_wlb.plan.step import Layout, shard_micro_batch, shard_step
from megatron_wlb.plan.types import Packing, ShardPlan
from megatron_wlb.plan.workload import document_work
from megatron_wlb.simulate import SimulatedStep, balanced_time, simulate_step

SKIPPED = 0.1
"""Of the steps, at the beginning, where queues fill."""
BLOCKS = 16
"""Of consecutive steps, whose spread gives standard errors."""
TUNING_STEPS = 150


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """What decides how a step runs."""

    packing: str
    """A policy; fixed is over one global batch, as Fixed-4D's."""
    sharding: str
    ordered: bool = False
    """Micro-batches are placed and ordered by work."""
    our_exchange: bool = False
    """K and V of shared documents only, in head groups; the sharding is chosen with that in mind."""


PLAIN = Scheme(packing="original", sharding="per-sequence")
FIXED = {s: Scheme(packing="fixed", sharding=s) for s in ("per-sequence", "per-document")}
"""Fixed-4D takes the faster of the two in every case."""
WLB = Scheme(packing="wlb", sharding="paper")
OURS = Scheme(packing="adaptive", sharding="adaptive", ordered=True, our_exchange=True)
BALANCE = replace(OURS, our_exchange=False)
"""Ours with the paper's exchange: what balance alone gains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a scheme took for each step it ran; times in us."""

    work: np.ndarray
    """Of the documents of a step, d * Lc + d * d each."""
    times: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Outcomes of Plain-4D's steps if all micro-batches and all context-parallel shards were alike."""

    balance: Outcome
    everything: Outcome
    """And the exchange of K and V were hidden."""


def pack(case: Case, policy: str, steps: int, *, seed: int = 0, **settings: object) -> tuple[list[PackedStep], list]:
    """Steps of a packing policy after the first tenth, and ms that each took to pack (of the native core)."""
    n, window = case.num_micro_batches, case.window
    common = {
        "num_micro_batches": n,
        "context_length": window,
        "max_tokens": round(case.s_max * window),
        "crossover_tokens": case.crossover_tokens,
        "use_native": True,
    }
    if policy == "wlb" and "outlier_thresholds" not in settings:
        shares = case.thresholds or tuned(case)
        settings["outlier_thresholds"] = [round(s * window) for s in shares]
    timed = Timed(make_policy(policy, **common, **settings))  # type: ignore[arg-type]
    source = stream(case.stream(seed), window)
    packer = Packer(
        source, timed, num_micro_batches=n, context_length=window, fingerprint="", policy_name="", use_native=True
    )
    packed, ms = [], []
    for _ in range(steps):
        packed.append(packer.next())
        ms.append(timed.milliseconds)
    skipped = int(SKIPPED * steps)
    return packed[skipped:], ms[skipped:]


def summary(case: Case, packed: Sequence[PackedStep], ms: Sequence[float]) -> metrics.Summary:
    """Balance by work, delay, tokens and packing time."""
    measured = [
        metrics.measure(
            p.packing, p.step, crossover_tokens=case.crossover_tokens, context_length=case.window, plan_ms=t
        )
        for p, t in zip(packed, ms, strict=True)
    ]
    return metrics.summarise(measured, num_waiting=packed[-1].num_waiting, skip=0)


@lru_cache(maxsize=64)
def tuned(case: Case, num_queues: int = 2) -> tuple[float, ...]:
    """Thresholds L_i of Algorithm 1 in eighths of the window: section 4.2, on a sample of its own."""
    best = (math.inf, math.inf, (0.5,))
    for eighths in combinations(range(1, 8), num_queues):
        shares = tuple(e / 8 for e in eighths)
        limits = [round(s * case.window) for s in shares]
        found = summary(case, *pack(case, "wlb", TUNING_STEPS, seed=1, outlier_thresholds=limits))
        best = min(best, (max(0.0, found.late_steps - MEAN_DELAY), found.imbalance_mean, shares))
    return best[2]


def layout(case: Case, scheme: Scheme) -> Layout:
    """How training would place and shard; the paper's schemes leave documents in the order of packing."""
    job = case.our_job if scheme.our_exchange else case.job
    made = layout_of(
        job,
        crossover_tokens=case.crossover_tokens,
        cp_sharding=scheme.sharding,
        balance=scheme.ordered,
        unit_tokens=job.cp * math.lcm(2, job.tp),
        free_order=scheme.sharding == "adaptive",
    )
    return made if scheme.our_exchange else replace(made, kernel=case.kernel)


def simulate(case: Case, scheme: Scheme, packing: Packing) -> SimulatedStep:
    """One step."""
    lengths = [packing.micro_batch(i)["length"] for i in range(len(packing))]
    return simulate_step(case.our_job if scheme.our_exchange else case.job, shard_step(lengths, layout(case, scheme)))


def shard(case: Case, scheme: Scheme, documents: np.ndarray) -> ShardPlan:
    """A micro-batch (DOCUMENT rows) on its context-parallel ranks."""
    return shard_micro_batch(0, documents, layout(case, scheme)).shards


def outcomes(case: Case, schemes: dict[str, Scheme], steps: int) -> tuple[dict[str, Outcome], Limits]:
    """What Plain-4D and each scheme make of the same documents, and what is the most that can be made of them."""
    found, limits = {}, []
    packed: dict[str, list[PackedStep]] = {}
    for name, scheme in {"Plain-4D": PLAIN, **schemes}.items():
        if scheme.packing not in packed:
            packed[scheme.packing], _ = pack(case, scheme.packing, steps)
        work, times = [], []
        for p in packed[scheme.packing]:
            step = simulate(case, scheme, p.packing)
            work.append(float(document_work(p.packing.documents["length"], case.crossover_tokens).sum()))
            times.append(step.time)
            if name == "Plain-4D":
                limits.append((balanced_time(step), balanced_time(_without_exchange(step))))
        found[name] = Outcome(work=np.array(work), times=np.array(times))
    plain = found["Plain-4D"].work
    balance, everything = (Outcome(work=plain, times=times) for times in np.array(limits).T)
    return found, Limits(balance=balance, everything=everything)


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
    """Share of the attainable gain: of two speed-ups over Plain-4D."""
    return (one - 1) / (limit - 1)
