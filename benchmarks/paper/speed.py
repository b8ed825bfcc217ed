"""Figures 12, 13 and 14, and what the averages of Figure 12 hang on."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.paper.run import (
    BALANCE,
    FIXED,
    OURS,
    PLAIN,
    WLB,
    Outcome,
    Scheme,
    gain_share,
    outcomes,
    speedup,
    tuned,
)
from benchmarks.paper.setups import BIG, EDGES, SEVEN_128, SLOWER, Case, left_out, public_sample, slower_attention
from benchmarks.results import Row
from megatron_wlb.model import ModelShape
from megatron_wlb.sharding import shard
from megatron_wlb.simulate import simulate_step

MAIN = {"WLB-LLM": WLB, "ours, balance alone": BALANCE, "ours": OURS}
STEPS_OF_FIGURE_13 = {
    "+ CP per-document": replace(PLAIN, sharding="per-document"),
    "+ CP adaptive": replace(PLAIN, sharding="wlb"),
    "+ PP packing": replace(WLB, sharding="per-sequence"),
    "WLB-LLM": WLB,
    "ours: + CP adaptive": replace(PLAIN, sharding="auto"),
    "ours: + PP packing": replace(BALANCE, sharding="per-sequence", reorder=False),
    "ours: + PP packing, ordered": replace(BALANCE, sharding="per-sequence"),
    "ours, balance alone": BALANCE,
    "ours": OURS,
}


def speeds(case: Case, schemes: dict[str, Scheme], steps: int) -> tuple[dict[str, Row], dict[str, Outcome]]:
    """Speed-ups over Plain-4D of schemes and limits, with standard errors; and the outcomes."""
    by_scheme, limits = outcomes(case, schemes, steps)
    shown = {**by_scheme, "limit of balance": limits.balance, "limit": limits.everything}
    ratios = {name: speedup(one, by_scheme["Plain-4D"]) for name, one in shown.items()}
    return {name: {"speedup": ratio, "standard_error": error} for name, (ratio, error) in ratios.items()}, by_scheme


def seconds(outcome: Outcome) -> float:
    return float(outcome.times.mean() / 1e6)


def figure_12(case: Case, steps: int) -> list[Row]:
    """Speed-ups of a case of Table 1; Fixed-4D stands for the faster of its two shardings."""
    ratios, by_scheme = speeds(case, {f"Fixed-4D, {s}": scheme for s, scheme in FIXED.items()} | MAIN, steps)
    fixed = {s: ratios.pop(f"Fixed-4D, {s}") for s in FIXED}
    best = max(fixed, key=lambda s: fixed[s]["speedup"])
    ratios = {"Plain-4D": ratios.pop("Plain-4D"), "Fixed-4D": fixed[best] | {"sharding": best}, **ratios}
    for name in MAIN:
        for limit, key in (("limit of balance", "share_of_balance"), ("limit", "share_of_limit")):
            ratios[name][key] = gain_share(ratios[name]["speedup"], ratios[limit]["speedup"])
    plan = {"crossover_tokens": case.job.crossover_tokens, "L_i": tuned(case)}
    ratios["WLB-LLM"] |= plan | {"step_seconds": seconds(by_scheme["WLB-LLM"])}
    return [{"figure": "12", "case": case.name, "scheme": name, **row} for name, row in ratios.items()]


def figure_13(steps: int) -> list[Row]:
    ratios, by_scheme = speeds(SEVEN_128, STEPS_OF_FIGURE_13, steps)
    for factor in SLOWER:
        slow = outcomes(slower_attention(SEVEN_128, factor), {"slow": FIXED["per-document"]}, steps)[0]["slow"]
        slow = replace(slow, work=by_scheme["Plain-4D"].work)  # of the same steps; a slower kernel counts it otherwise
        ratio, error = speedup(slow, by_scheme["Plain-4D"])
        ratios[f"+ CP per-document, its attention x {factor:g}"] = {"speedup": ratio, "standard_error": error}
    return [{"figure": "13", "case": SEVEN_128.name, "scheme": name, **row} for name, row in ratios.items()]


def figure_14(case: Case, steps: int) -> list[Row]:
    ratios, _ = speeds(case, MAIN, steps)
    return [{"figure": "14", "window": case.window, "scheme": name, **row} for name, row in ratios.items()]


def variations(base: Case) -> dict[str, Case]:
    """One assumption changed at a time, all else alike: the documents, and thresholds but where they are changed."""
    job, hardware, window = base.job, base.hardware, base.window
    network, model = hardware.network, job.model

    def hard(**changes: Any) -> Case:
        return base.changed(replace(hardware, **changes))

    def parallel(model: ModelShape = model, **changes: Any) -> Case:
        return base.changed(model=model, parallel=replace(job.parallel, **changes))

    small = {"num_layers": 16, "hidden_size": 1536, "ffn_hidden_size": 4096}
    small |= {"num_attention_heads": 12, "num_query_groups": 12}
    other_shape = replace(model, **small) if model.num_layers == 24 else model
    return {
        "as calibrated": base,
        "linear_tflops 400": hard(linear_tflops=400.0),
        "linear_tflops 800": hard(linear_tflops=800.0),
        "attention_backward 2": hard(attention_backward=2.0),
        "attention_backward 3": hard(attention_backward=3.0),
        "link 22.5 GB/s": hard(network=replace(network, link_gb_per_s=22.5)),
        "link 90 GB/s": hard(network=replace(network, link_gb_per_s=90.0)),
        "tp_overlap 0.5": hard(tp_overlap=0.5),
        "tp_overlap 1": hard(tp_overlap=1.0),
        "dp_overlap 0": hard(dp_overlap=0.0),
        "edges as layers, two layers fewer": parallel(replace(model, num_layers=model.num_layers - 2), split=EDGES),
        "VPP 1": parallel(vpp=1),
        "VPP 4 (550M: 3)": parallel(vpp=3 if model.num_layers == 24 else 4),
        "K and V of shared documents only": base.changed(cp_exchange="shared"),
        "550M of 16 layers, width 1536": base.changed(model=other_shape),
        "documents whole": replace(base, cut=False),
        "documents over a window left out": replace(base, lengths=left_out),
        "documents of DistCA's sample": replace(base, lengths=public_sample),
        "S_max 1.1": base.changed(max_tokens=round(1.1 * window / 1024) * 1024),
        "S_max 2": base.changed(max_tokens=2 * window),
        "one queue, L_1 = 1/2": replace(base, thresholds=(0.5,)),
        "L_i = 1/2, 3/4": replace(base, thresholds=(0.5, 0.75)),
    }


def sensitivity(case: Case, steps: int, names: Iterable[str]) -> list[Row]:
    """Speed-ups of a case under variations; differences are to the same steps as calibrated."""
    cases = variations(replace(case, thresholds=tuned(case)))
    rows = []
    for name in names:
        ratios, by_scheme = speeds(cases[name], {"WLB-LLM": WLB, "ours, balance alone": BALANCE}, steps)
        row = {
            "figure": "sensitivity",
            "variation": name,
            "case": case.name,
            "step_seconds": seconds(by_scheme["WLB-LLM"]),
        }
        rows.append(row | {scheme: ratio["speedup"] for scheme, ratio in ratios.items()})
    return rows


def llama3_tflops() -> dict[str, float]:
    """A check of the calibration by a published training: Llama 3 405B at 8K tokens, model TFLOP/s per GPU.

    The Llama 3 Herd of Models, table 4: 430 on 8,192 GPUs and 400 on 16,384 (TP 8, PP 16, 16 M tokens a step). Micro-
    batches of one window of one document; one layer per chunk, as its section 3.3.2 balances the ends.
    """
    tflops = {}
    for dp, micro_batches in ((64, 32), (128, 16)):
        parallel = replace(BIG.job.parallel, cp=1, dp=dp, vpp=8)
        counts = dict.fromkeys(("num_micro_batches", "global_batch_size"), micro_batches * dp)
        job = replace(BIG.job, parallel=parallel, context_length=8192, max_tokens=8192, **counts)
        _, plan = shard(np.array([8192]), job)
        step = simulate_step(job, [[plan] * micro_batches] * dp, BIG.hardware)
        model, tokens = job.model, 8192 * micro_batches * dp
        weights = model.num_layers * model.layer_weights + model.vocabulary_weights
        flops = 6 * tokens * (weights + model.num_layers * model.query_size * 8192)
        tflops[f"{parallel.num_gpus} GPUs"] = flops / step.time / 1e6 / parallel.num_gpus
    return tflops
