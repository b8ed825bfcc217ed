"""Schemes run on a case: packed, placed, sharded and simulated step after step, for Table 2 and Figures 12 and 15."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations

import numpy as np

from benchmarks import metrics, results
from benchmarks.fixed import FixedPacking
from benchmarks.lengths import f2, packer
from benchmarks.metrics import balanced_time
from benchmarks.paper.cases import HOPPER, LAYER, MEAN_DELAY, SEVEN_128, SLOWER, Case
from benchmarks.results import Row
from megatron_wlb.documents import PackedBatch
from megatron_wlb.hardware.profile import load_profile
from megatron_wlb.job import Job, Packing
from megatron_wlb.packing.adaptive import AdaptivePacking
from megatron_wlb.packing.megatron import MegatronPacking
from megatron_wlb.packing.paper import PaperPacking
from megatron_wlb.plan.packer import PackedStep
from megatron_wlb.plan.step import shard_step
from megatron_wlb.sharding.select import shard
from megatron_wlb.simulate.passes import LayerTimes, pass_times
from megatron_wlb.simulate.step import SimulatedStep, simulate_step

SKIPPED = 0.1
"""Share of the steps that is left out at the beginning, where queues fill."""
BLOCKS = 16
"""Blocks of consecutive steps, whose spread gives standard errors."""
TUNING_STEPS = 150


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """How a step is packed, sharded and exchanged."""

    packing: Packing | None
    """None: Algorithm 1 with the thresholds that suit the case."""
    sharding: str
    reorder: bool = False
    """Micro-batches are placed and ordered by work."""
    our_exchange: bool = False
    """Only the needed K and V of shared documents travel, in stages, and sharding counts them."""

    def job(self, case: Case) -> Job:
        """The case's job as this scheme runs it."""
        packing = self.packing or algorithm_1(case, tuned(case))
        changed = replace(case.job.sharded(cp_sharding=self.sharding), packing=packing, reorder=self.reorder)
        return replace(changed, cp_exchange="shared") if self.our_exchange else changed


PLAIN = Scheme(packing=MegatronPacking(), sharding="per-sequence")
FIXED = {s: Scheme(packing=FixedPacking(global_batches=1), sharding=s) for s in ("per-sequence", "per-document")}
"""Fixed-4D takes the faster of the two in every case."""
WLB = Scheme(packing=None, sharding="paper")
OURS = Scheme(packing=AdaptivePacking(), sharding="auto", reorder=True, our_exchange=True)
DELAY = replace(OURS, packing=AdaptivePacking(max_delay_steps=30))
BALANCE, DELAY_BALANCE = replace(OURS, our_exchange=False), replace(DELAY, our_exchange=False)
"""Ours with the paper's exchange, for the gain of balance alone."""
MAIN = {"WLB-LLM": WLB, "ours": OURS, "ours, delay, balance alone": DELAY_BALANCE, "ours, delay": DELAY}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Work of the documents of every step, and its time in us, float64 [steps] each."""

    work: np.ndarray
    times: np.ndarray


@lru_cache(maxsize=8)
def documents(window: int, seed: int) -> np.ndarray:
    return f2(400_000, seed, window)


def algorithm_1(case: Case, shares: Sequence[float]) -> PaperPacking:
    """Algorithm 1 with thresholds in shares of the window."""
    return PaperPacking(outlier_thresholds=tuple(round(s * case.window) for s in shares))


def pack(case: Case, scheme: Scheme, steps: int, seed: int = 0) -> list[PackedStep]:
    """Steps of a scheme's packing after the first tenth."""
    packs = packer(documents(case.window, seed), scheme.job(case))
    return [packs.next() for _ in range(steps)][int(SKIPPED * steps) :]


@lru_cache(maxsize=64)
def tuned(case: Case, num_queues: int = 2) -> tuple[float, ...]:
    """Thresholds L_i of Algorithm 1 in eighths of the window: section 4.2, on a sample of its own."""

    def quality(shares: tuple[float, ...]) -> tuple[float, float]:
        packed = pack(case, replace(WLB, packing=algorithm_1(case, shares)), TUNING_STEPS, seed=1)
        balance = metrics.summarise([metrics.measure(p.batch, p.step, case.job) for p in packed], skip=0)
        return max(0.0, balance["late_steps"] - MEAN_DELAY), balance["imbalance_mean"]

    return min((tuple(e / 8 for e in eighths) for eighths in combinations(range(1, 8), num_queues)), key=quality)


def simulate(case: Case, scheme: Scheme, packing: PackedBatch) -> SimulatedStep:
    """One step, placed and sharded as training would."""
    job = scheme.job(case)
    return simulate_step(job, shard_step(job, packing.lengths, packing.ranks))


def outcomes(case: Case, schemes: dict[str, Scheme], steps: int) -> dict[str, Outcome]:
    """Outcomes of Plain-4D and each scheme on the same documents, and of two limits.

    In the limit of balance, all micro-batches and context-parallel shards of Plain-4D's steps are alike; in the limit,
    the exchange of K and V overlaps as well.
    """
    by_scheme, limits = {}, []
    packed: dict[Packing | None, list[PackedStep]] = {}
    for name, scheme in {"Plain-4D": PLAIN, **schemes}.items():
        if scheme.packing not in packed:
            packed[scheme.packing] = pack(case, scheme, steps)
        work, times = [], []
        for p in packed[scheme.packing]:
            step = simulate(case, scheme, p.batch)
            work.append(float(case.job.work(p.batch.documents["length"]).sum()))
            times.append(step.time)
            if name == "Plain-4D":
                limits.append((balanced_time(step), balanced_time(_without_exchange(step))))
        by_scheme[name] = Outcome(work=np.array(work), times=np.array(times))
    names = zip(("limit of balance", "limit"), np.array(limits).T, strict=True)
    return by_scheme | {name: Outcome(work=by_scheme["Plain-4D"].work, times=times) for name, times in names}


def _without_exchange(step: SimulatedStep) -> SimulatedStep:
    layers = step.job.layers()[:, :, None]
    passes = []
    for p in step.passes:
        forward, backward = (
            times - layers * layer.exchange for times, layer in zip((p.forward, p.backward), p.layers, strict=True)
        )
        passes.append(replace(p, forward=forward, backward=backward))
    return replace(step, passes=tuple(passes))


def speedup(one: Outcome, plain: Outcome) -> Row:
    """Throughput of `one` over the throughput of `plain`, and its standard error from blocks of steps.

    Both run the same documents, but some of them in other steps. Counted in work, a block's throughput depends less on
    its documents than in tokens; in the end both counts agree.
    """
    whole = (one.work.sum() / one.times.sum()) / (plain.work.sum() / plain.times.sum())
    blocks = min(BLOCKS, len(one.times) // 2)
    parts = [np.array_split(x, blocks) for x in (one.work, one.times, plain.work, plain.times)]
    ratios = [(a.sum() / b.sum()) / (c.sum() / d.sum()) for a, b, c, d in zip(*parts, strict=True)]
    return {"speedup": float(whole), "standard_error": float(np.std(ratios, ddof=1) / math.sqrt(blocks))}


def table_2(steps: int) -> list[Row]:
    """Imbalance of 7B-128K by simulated forward latency, as the paper measures it.

    Rows of the solver, which takes minutes, come from benchmarks/packing.py, by work. Latency has the sharding of the
    scheme that the packing belongs to: per-sequence, the paper's choice, or ours.
    """
    case = SEVEN_128
    rows = [_packing("original", case, PLAIN, steps)]
    for k in (1, 2, 4, 8):
        scheme = replace(PLAIN, packing=FixedPacking(global_batches=k))
        rows.append(_packing(f"fixed, {k} global batches", case, scheme, steps))
    for r in json.loads((results.FOLDER / "packing.json").read_text())["rows"]:
        if r["policy"].startswith("solver"):
            label = ", ".join(r["policy"].split(", ")[:2])
            rows.append({"figure": "table 2", "packing": label, "imbalance": r["imbalance_mean"], "steps": r["steps"]})
    for queues in (1, 2, 3):
        shares = tuned(case, queues)
        scheme = replace(WLB, packing=algorithm_1(case, shares))
        rows.append(_packing(f"WLB-LLM, {queues} queues", case, scheme, steps) | {"L_i": shares})
    return [*rows, _packing("ours", case, OURS, steps), _packing("ours, delay", case, DELAY, steps)]


def _packing(label: str, case: Case, scheme: Scheme, steps: int) -> Row:
    packed = pack(case, scheme, steps)
    forward = [simulate(case, scheme, p.batch).passes[0].forward.sum(axis=(0, 1)) for p in packed]
    latency = [float(each.max() * len(each) / each.sum()) for each in forward]
    return {"figure": "table 2", "packing": label, "imbalance": float(np.mean(latency)), "steps": len(packed)}


def figure_12(case: Case, steps: int) -> list[Row]:
    """Speed-ups of a case of Table 1; Fixed-4D stands for the faster of its two shardings."""
    schemes = {f"Fixed-4D, {s}": scheme for s, scheme in FIXED.items()} | MAIN
    by_scheme = outcomes(case, schemes, steps)
    ratios = {name: speedup(one, by_scheme["Plain-4D"]) for name, one in by_scheme.items()}
    fixed = {s: ratios.pop(f"Fixed-4D, {s}") for s in FIXED}
    best = max(fixed, key=lambda s: fixed[s]["speedup"])
    ratios = {"Plain-4D": ratios.pop("Plain-4D"), "Fixed-4D": fixed[best] | {"sharding": best}, **ratios}
    for name in MAIN:
        ratios[name]["share_of_balance"] = (ratios[name]["speedup"] - 1) / (ratios["limit of balance"]["speedup"] - 1)
    ratios["WLB-LLM"] |= {"L_i": tuned(case), "step_seconds": float(by_scheme["WLB-LLM"].times.mean() / 1e6)}
    newer = outcomes(case.changed(profile=load_profile(HOPPER)), {"WLB-LLM": WLB}, steps)
    ratios[f"WLB-LLM, kernels of {HOPPER}"] = speedup(newer["WLB-LLM"], newer["Plain-4D"])
    return [{"figure": "12", "case": case.name, "scheme": name, **row} for name, row in ratios.items()]


def figure_15(micro_batches: int) -> list[Row]:
    """Latency of a layer, forward and backward, over micro-batches of Plain-4D's packing.

    WLB-LLM chooses per-sequence or per-document by the kernel model that the simulation runs by, so its choice is
    optimal but for the errors of that model; benchmarks/gpu/cp_attention.py measures both on a GPU.
    """
    rows = []
    for kilo_tokens in (64, 128):
        case = LAYER.changed(context_length=kilo_tokens << 10, max_tokens=kilo_tokens * 1280)
        assumption, profile = f"per-document attention x {SLOWER:g}", case.job.profile
        assert profile.backward is not None
        slow = {"forward": profile.forward.scaled(SLOWER), "backward": profile.backward.scaled(SLOWER)}
        slower = case.changed(profile=replace(profile, **slow))
        packed = pack(case, PLAIN, -(-micro_batches // case.job.num_micro_batches))
        times: dict[str, list[float]] = {}
        for lengths in [lengths for p in packed for lengths in p.batch.lengths]:
            layers = {s: _layer(case, replace(PLAIN, sharding=s), lengths) for s in (*FIXED, "paper")}
            us = {name: _time(each) for name, each in layers.items()}
            us["WLB-LLM"] = us.pop("paper")
            us[f"per-document, {assumption}"] = _time(_layer(slower, FIXED["per-document"], lengths))
            us[f"optimal, {assumption}"] = min(us["per-sequence"], us[f"per-document, {assumption}"])
            us["ours, balance alone"] = _time(_layer(case, BALANCE, lengths))
            us["ours"] = _time(_layer(case, OURS, lengths))
            us["limit of balance"] = sum(_alike(each) for each in layers["per-sequence"])
            for name, time_us in us.items():
                times.setdefault(name, []).append(time_us)
        by_scheme = {n: Outcome(work=np.ones(len(each)), times=np.array(each)) for n, each in times.items()}
        for name, outcome in by_scheme.items():
            row = {"figure": "15", "window": case.window, "scheme": name}
            rows.append(row | speedup(outcome, by_scheme["per-sequence"]))
    return rows


def _layer(case: Case, scheme: Scheme, lengths: np.ndarray) -> tuple[LayerTimes, LayerTimes]:
    """Forward and backward of a layer over one micro-batch, sharded as a scheme does."""
    job = scheme.job(case)
    return pass_times(job, [shard(lengths, job)]).layers


def _time(layers: tuple[LayerTimes, LayerTimes]) -> float:
    return sum(float(t.total[0]) for t in layers)


def _alike(times: LayerTimes) -> float:
    """A layer whose ranks have the mean of their attention."""
    return float((times.total - times.attention.max(axis=1) + times.attention.mean(axis=1))[0])
