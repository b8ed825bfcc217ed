"""Figures 1 and 4 (imbalance over GPUs), Table 2 (packing), and Figure 15 (sharding of one layer)."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks import results
from benchmarks.paper.run import OURS, PLAIN, WLB, Outcome, Scheme, pack, shard, simulate, speedup, summary, tuned
from benchmarks.paper.setups import BIG, LAYER, SEVEN_128, SLOWER, Case, slower_attention
from megatron_wlb.plan.packer import PackedStep
from megatron_wlb.plan.types import ShardPlan
from megatron_wlb.simulate import Job
from megatron_wlb.simulate.costs import LayerTimes, pass_times

Row = dict[str, Any]


def figures_1_and_4(steps: int) -> tuple[list[Row], dict[str, np.ndarray]]:
    """The 405B job on 8,192 GPUs: how much longer than others the busiest computes in a step, by level and in all.

    Also the first step's times per layer and GPU, float64 [dp, pp, cp], by scheme. Stages at the ends have a layer
    less, so what is compared is the time per layer.
    """
    case = replace(BIG, thresholds=tuned(SEVEN_128))
    rows, first = [], {}
    for name, scheme in {"Plain-4D": PLAIN, "WLB-LLM": WLB, "ours": OURS}.items():
        found = []
        for p in pack(case, scheme.packing, steps)[0]:
            step = simulate(case, scheme, p.packing)
            layers = step.job.layers().sum(axis=1)[:, None]
            computation, attention = step.computation / layers, step.attention / layers
            first.setdefault(name, computation)
            found.append({**_spread("computation", computation), **_spread("attention", attention)})
        means = {key: float(np.mean([f[key] for f in found])) for key in found[0]}
        worst = [f["attention, slowest / mean"] for f in found]
        error = float(np.std(worst, ddof=1) / np.sqrt(len(worst)))
        rows.append({"figure": "1, 4", "case": case.name, "scheme": name, **means, "standard_error": error})
    return rows, first


def _spread(name: str, times: np.ndarray) -> Row:
    """Times of GPUs [dp, pp, cp]."""
    by_rank = times.mean(axis=2)
    return {
        f"{name}, slowest / mean": times.max() / times.mean(),
        f"{name}, slowest / fastest": times.max() / times.min(),
        f"{name}, DP level": by_rank.max() / by_rank.mean(),
        f"{name}, CP level": float((times.max(axis=2) / by_rank).mean()),
    }


def table_2(steps: int) -> list[Row]:
    """Imbalance of 7B-128K by forward latency (simulated), as the paper measures it, and by work; packing measured.

    The solver takes minutes and is not run again: its rows are those of benchmarks/packing.py, by work and with whole
    documents.
    Latency has the sharding of the scheme that the packing belongs to: per-sequence, the paper's choice, or ours.
    """
    case, kept = SEVEN_128, replace(SEVEN_128, cut=False)
    rows = [_packing("original", case, PLAIN, *pack(case, "original", steps))]
    for k in (1, 2, 4, 8):
        label = f"fixed, {k} global batches"
        rows.append(_packing(label, case, PLAIN, *pack(case, "fixed", steps, num_global_batches=k)))
    for r in json.loads((results.FOLDER / "packing.json").read_text())["rows"]:
        if r["policy"].startswith("solver"):
            label = ", ".join(r["policy"].split(", ")[:2])
            measures = {"imbalance": r["imbalance_mean"], "longest_ms": r["plan_ms_max"], "steps": r["steps"]}
            rows.append({"figure": "table 2", "packing": label, **measures, "from": "packing.json"})
    for queues in (1, 2, 3):
        shares = tuned(case, queues)
        limits = [round(s * case.window) for s in shares]
        packed = pack(case, "wlb", steps, outlier_thresholds=limits)
        rows.append(_packing(f"WLB-LLM, {queues} queues", case, WLB, *packed) | {"L_i": shares})
    for mode in ("constant-tokens", "low-displacement"):
        rows.append(_packing(f"ours, {mode}", case, OURS, *pack(case, "adaptive", steps, mode=mode)))
    rows.append(_packing("WLB-LLM, 2 queues, documents whole", kept, WLB, *pack(kept, "wlb", steps)))
    rows.append(_packing("ours, constant-tokens, documents whole", kept, OURS, *pack(kept, "adaptive", steps)))
    return rows


def _packing(label: str, case: Case, scheme: Scheme, packed: Sequence[PackedStep], ms: Sequence[float]) -> Row:
    found = summary(case, packed, ms)
    latency = []
    for p in packed:
        forward = simulate(case, scheme, p.packing).passes[0].forward.sum(axis=(0, 1))
        latency.append(float(forward.max() * len(forward) / forward.sum()))
    return {
        "figure": "table 2",
        "packing": label,
        "imbalance": float(np.mean(latency)),
        "standard_error": float(np.std(latency, ddof=1) / np.sqrt(len(latency))),
        "imbalance_by_work": found.imbalance_mean,
        "late_steps": found.late_steps,
        "max_delay_steps": found.max_delay_steps,
        "token_cv": found.token_cv,
        "measured_ms": float(np.mean(ms)),
        "steps": len(packed),
    }


def figure_15(micro_batches: int) -> list[Row]:
    """Latency of a layer, forward and backward, over micro-batches of Plain-4D's packing.

    Per-sequence or per-document is chosen by the kernel model that the simulation runs by, so the choice is optimal but
    for what the kernel model leaves out; how well it chooses on a GPU, benchmarks/gpu/cp_attention.py measures.
    """
    rows = []
    for kilo_tokens in (64, 128):
        case = replace(LAYER, window=kilo_tokens << 10)
        slower = {factor: slower_attention(case, factor) for factor in SLOWER}
        packed, _ = pack(case, "original", -(-micro_batches // case.num_micro_batches))
        documents = [p.packing.micro_batch(i) for p in packed for i in range(len(p.packing))]
        times: dict[str, list[float]] = {}
        for one in documents:
            plans = {s: shard(case, replace(PLAIN, sharding=s), one) for s in ("per-sequence", "per-document", "paper")}
            taken = {name: _layer(case.job, plan) for name, plan in plans.items()}
            took = {name: sum(float(t.total[0]) for t in layers) for name, layers in taken.items()}
            took["WLB-LLM"] = took.pop("paper")
            took["optimal of the two"] = min(took["per-sequence"], took["per-document"])
            balance = replace(OURS, our_exchange=False)
            for factor in SLOWER:
                slow = sum(float(t.total[0]) for t in _layer(slower[factor].job, plans["per-document"]))
                were = f"per-document attention x {factor:g}"
                took |= {f"per-document, {were}": slow, f"optimal, {were}": min(took["per-sequence"], slow)}
            took["ours, balance alone"] = sum(float(t.total[0]) for t in _layer(case.job, shard(case, balance, one)))
            took["ours"] = sum(float(t.total[0]) for t in _layer(case.our_job, shard(case, OURS, one)))
            took["limit of balance"] = sum(_alike(t) for t in taken["per-sequence"])
            for name, us in took.items():
                times.setdefault(name, []).append(us)
        work = np.ones(len(documents))
        found = {name: Outcome(work=work, times=np.array(us)) for name, us in times.items()}
        for name, one in found.items():
            ratio, error = speedup(one, found["per-sequence"])
            row = {"figure": "15", "window": case.window, "scheme": name, "speedup": ratio, "standard_error": error}
            rows.append(row | {"layer_ms": float(one.times.mean() / 1e3)})
    return rows


def _layer(job: Job, plan: ShardPlan) -> tuple[LayerTimes, LayerTimes]:
    return pass_times(job, [plan]).layers


def _alike(times: LayerTimes) -> float:
    """A layer whose ranks have the mean of their attention."""
    return float((times.total - times.attention.max(axis=1) + times.attention.mean(axis=1))[0])
