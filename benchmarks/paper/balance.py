"""Figures 1 and 4 (imbalance over GPUs), Table 2 (packing), and Figure 15 (sharding of one layer)."""

import json
from dataclasses import replace

import numpy as np

from benchmarks import results
from benchmarks.paper.run import (
    BALANCE,
    FIXED,
    OURS,
    PLAIN,
    WLB,
    Outcome,
    Scheme,
    algorithm_1,
    pack,
    simulate,
    speedup,
    summary,
    tuned,
)
from benchmarks.paper.setups import BIG, LAYER, SEVEN_128, SLOWER, Case, slower_attention
from benchmarks.results import Row
from megatron_wlb.packing.fixed import FixedPacking
from megatron_wlb.sharding import shard
from megatron_wlb.simulate.passes import LayerTimes, pass_times


def figures_1_and_4(steps: int) -> tuple[list[Row], dict[str, np.ndarray]]:
    """The 405B job on 8,192 GPUs: how much longer than others the busiest computes in a step, by level and in all.

    Also the first step's times per layer and GPU, float64 [dp, pp, cp], by scheme. Stages at the ends have a layer
    less, so what is compared is the time per layer.
    """
    case = replace(BIG, thresholds=tuned(SEVEN_128))
    rows, first = [], {}
    for name, scheme in {"Plain-4D": PLAIN, "WLB-LLM": WLB, "ours": OURS}.items():
        spreads = []
        for p in pack(case, scheme, steps)[0]:
            step = simulate(case, scheme, p.packing)
            layers = step.job.layers().sum(axis=1)[:, None]
            computation, attention = step.computation / layers, step.attention / layers
            first.setdefault(name, computation)
            spreads.append({**_spread("computation", computation), **_spread("attention", attention)})
        means = {key: float(np.mean([s[key] for s in spreads])) for key in spreads[0]}
        worst = [s["attention, slowest / mean"] for s in spreads]
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
    case, whole = SEVEN_128, replace(SEVEN_128, cut=False)
    rows = [_packing("original", case, PLAIN, steps)]
    for k in (1, 2, 4, 8):
        scheme = replace(PLAIN, packing=FixedPacking(global_batches=k))
        rows.append(_packing(f"fixed, {k} global batches", case, scheme, steps))
    for r in json.loads((results.FOLDER / "packing.json").read_text())["rows"]:
        if r["policy"].startswith("solver"):
            label = ", ".join(r["policy"].split(", ")[:2])
            measures = {"imbalance": r["imbalance_mean"], "longest_ms": r["plan_ms_max"], "steps": r["steps"]}
            rows.append({"figure": "table 2", "packing": label, **measures, "from": "packing.json"})
    for queues in (1, 2, 3):
        shares = tuned(case, queues)
        scheme = replace(WLB, packing=algorithm_1(case, shares))
        rows.append(_packing(f"WLB-LLM, {queues} queues", case, scheme, steps) | {"L_i": shares})
    rows.append(_packing("ours", case, OURS, steps))
    rows.append(_packing("WLB-LLM, 2 queues, documents whole", whole, WLB, steps))
    rows.append(_packing("ours, documents whole", whole, OURS, steps))
    return rows


def _packing(label: str, case: Case, scheme: Scheme, steps: int) -> Row:
    packed, ms = pack(case, scheme, steps)
    balance = summary(case, packed)
    latency = []
    for p in packed:
        forward = simulate(case, scheme, p.packing).passes[0].forward.sum(axis=(0, 1))
        latency.append(float(forward.max() * len(forward) / forward.sum()))
    return {
        "figure": "table 2",
        "packing": label,
        "imbalance": float(np.mean(latency)),
        "standard_error": float(np.std(latency, ddof=1) / np.sqrt(len(latency))),
        "imbalance_by_work": balance.imbalance_mean,
        "late_steps": balance.late_steps,
        "max_delay_steps": balance.max_delay_steps,
        "token_cv": balance.token_cv,
        "measured_ms": float(np.median(ms)),
        "steps": len(packed),
    }


def figure_15(micro_batches: int) -> list[Row]:
    """Latency of a layer, forward and backward, over micro-batches of Plain-4D's packing.

    Per-sequence or per-document is chosen by the kernel model that the simulation runs by, so the choice is optimal but
    for what the kernel model leaves out; how well it chooses on a GPU, benchmarks/gpu/cp_attention.py measures.
    """
    rows = []
    for kilo_tokens in (64, 128):
        case = LAYER.changed(context_length=kilo_tokens << 10, max_tokens=kilo_tokens * 1280)
        slower = {factor: slower_attention(case, factor) for factor in SLOWER}
        packed, _ = pack(case, PLAIN, -(-micro_batches // case.job.num_micro_batches))
        micro_batch_lengths = [lengths for p in packed for lengths in p.packing.lengths]
        times: dict[str, list[float]] = {}
        for lengths in micro_batch_lengths:
            layers = {s: _layer(case, replace(PLAIN, sharding=s), lengths) for s in (*FIXED, "wlb")}
            us = {name: _time(each) for name, each in layers.items()}
            us["WLB-LLM"] = us.pop("wlb")
            us["optimal of the two"] = min(us["per-sequence"], us["per-document"])
            for factor in SLOWER:
                slow = _time(_layer(slower[factor], FIXED["per-document"], lengths))
                assumption = f"per-document attention x {factor:g}"
                us[f"per-document, {assumption}"] = slow
                us[f"optimal, {assumption}"] = min(us["per-sequence"], slow)
            us["ours, balance alone"] = _time(_layer(case, BALANCE, lengths))
            us["ours"] = _time(_layer(case, OURS, lengths))
            us["limit of balance"] = sum(_alike(each) for each in layers["per-sequence"])
            for name, time in us.items():
                times.setdefault(name, []).append(time)
        work = np.ones(len(micro_batch_lengths))
        by_scheme = {name: Outcome(work=work, times=np.array(each)) for name, each in times.items()}
        for name, outcome in by_scheme.items():
            ratio, error = speedup(outcome, by_scheme["per-sequence"])
            row = {"figure": "15", "window": case.window, "scheme": name, "speedup": ratio, "standard_error": error}
            rows.append(row | {"layer_ms": float(outcome.times.mean() / 1e3)})
    return rows


def _layer(case: Case, scheme: Scheme, lengths: np.ndarray) -> tuple[LayerTimes, LayerTimes]:
    """Forward and backward of a layer over one micro-batch, sharded as a scheme does."""
    job = scheme.job(case)
    return pass_times(job, case.hardware, [shard(lengths, job)[1]]).layers


def _time(layers: tuple[LayerTimes, LayerTimes]) -> float:
    return sum(float(t.total[0]) for t in layers)


def _alike(times: LayerTimes) -> float:
    """A layer whose ranks have the mean of their attention."""
    return float((times.total - times.attention.max(axis=1) + times.attention.mean(axis=1))[0])
