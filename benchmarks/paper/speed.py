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
from benchmarks.paper.setups import BIG, SEVEN_128, SLOWER, Case, left_out, public_sample, slower_attention
from megatron_wlb.plan import sharding
from megatron_wlb.simulate import simulate_step

Row = dict[str, Any]
MAIN = {"WLB-LLM": WLB, "ours, balance alone": BALANCE, "ours": OURS}
STEPS_OF_FIGURE_13 = {
    "+ CP per-document": replace(PLAIN, sharding="per-document"),
    "+ CP adaptive": replace(PLAIN, sharding="paper"),
    "+ PP packing": replace(WLB, sharding="per-sequence"),
    "WLB-LLM": WLB,
    "ours: + CP adaptive": replace(PLAIN, sharding="adaptive"),
    "ours: + PP packing": replace(BALANCE, sharding="per-sequence", ordered=False),
    "ours: + PP packing, ordered": replace(BALANCE, sharding="per-sequence"),
    "ours, balance alone": BALANCE,
    "ours": OURS,
}


def speeds(case: Case, schemes: dict[str, Scheme], steps: int) -> tuple[dict[str, Row], dict[str, Outcome]]:
    """Speed-ups over Plain-4D of schemes and limits, with standard errors; and the outcomes."""
    found, limits = outcomes(case, schemes, steps)
    shown = {**found, "limit of balance": limits.balance, "limit": limits.everything}
    ratios = {name: speedup(one, found["Plain-4D"]) for name, one in shown.items()}
    return {name: {"speedup": ratio, "standard_error": error} for name, (ratio, error) in ratios.items()}, found


def with_fixed(found: dict[str, Row]) -> dict[str, Row]:
    """Fixed-4D in place of its two shardings."""
    both = {s: found.pop(f"Fixed-4D, {s}") for s in FIXED}
    best = max(both, key=lambda s: both[s]["speedup"])
    return {"Plain-4D": found.pop("Plain-4D"), "Fixed-4D": both[best] | {"sharding": best}, **found}


def figure_12(cases: Iterable[Case], steps: int) -> list[Row]:
    rows = []
    schemes = {f"Fixed-4D, {s}": scheme for s, scheme in FIXED.items()} | MAIN
    for case in cases:
        found, results = speeds(case, schemes, steps)
        seconds = float(results["WLB-LLM"].times.mean() / 1e6)
        for name, row in with_fixed(found).items():
            rows.append({"figure": "12", "case": case.name, "scheme": name, **row, **_shares(name, found)})
            if name == "WLB-LLM":
                lengths = {"crossover_tokens": case.crossover_tokens, "L_i": tuned(case), "step_seconds": seconds}
                rows[-1] |= lengths
    return rows


def _shares(name: str, found: dict[str, Row]) -> Row:
    one = found.get(name)
    if name not in MAIN or one is None:
        return {}
    limits = {"limit of balance": "share_of_balance", "limit": "share_of_limit"}
    return {key: gain_share(one["speedup"], found[limit]["speedup"]) for limit, key in limits.items()}


def averages(rows: list[Row]) -> dict[str, dict[str, float]]:
    """Of Figure 12 by scheme: over all cases, and over those of a window."""
    found: dict[str, dict[str, list[float]]] = {}
    for r in rows:
        for group in ("all", r["case"].split("-")[1]):
            found.setdefault(r["scheme"], {}).setdefault(group, []).append(r["speedup"])
    return {name: {group: float(np.mean(v)) for group, v in groups.items()} for name, groups in found.items()}


def figure_13(steps: int) -> list[Row]:
    found, results = speeds(SEVEN_128, STEPS_OF_FIGURE_13, steps)
    rows = [{"figure": "13", "case": SEVEN_128.name, "scheme": name, **row} for name, row in found.items()]
    per_document = {"slow": STEPS_OF_FIGURE_13["+ CP per-document"]}
    for factor in SLOWER:
        slow = outcomes(slower_attention(SEVEN_128, factor), per_document, steps)[0]["slow"]
        slow = replace(slow, work=results["Plain-4D"].work)  # of the same steps; a slower kernel counts it otherwise
        ratio, error = speedup(slow, results["Plain-4D"])
        name = f"+ CP per-document, its attention x {factor:g}"
        row = {"figure": "13", "case": SEVEN_128.name, "scheme": name, "speedup": ratio, "standard_error": error}
        rows.append(row)
    return rows


def figure_14(cases: Iterable[Case], steps: int) -> list[Row]:
    rows = []
    for case in cases:
        found, _ = speeds(case, MAIN, steps)
        rows += [{"figure": "14", "window": case.window, "scheme": name, **row} for name, row in found.items()]
    return rows


def variations(base: Case) -> dict[str, Case]:
    """One assumption changed at a time, all else alike: the documents, and thresholds but where they are changed."""
    job, hardware = base.job, base.job.hardware
    network, model = hardware.network, job.model

    def hard(**changes: Any) -> Case:
        return replace(base, job=replace(job, hardware=replace(hardware, **changes)))

    def runs(**changes: Any) -> Case:
        return replace(base, job=replace(job, **changes))

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
        "tp_overlap 0.5": runs(tp_overlap=0.5),
        "tp_overlap 1": runs(tp_overlap=1.0),
        "dp_overlap 0": runs(dp_overlap=0.0),
        "edge_layers 1, two layers fewer": runs(edge_layers=1, model=replace(model, num_layers=model.num_layers - 2)),
        "VPP 1": runs(vpp=1),
        "VPP 4 (550M: 3)": runs(vpp=3 if model.num_layers == 24 else 4),
        "K and V of shared documents only": runs(gather_all=False),
        "550M of 16 layers, width 1536": runs(model=other_shape),
        "documents whole": replace(base, cut=False),
        "documents over a window left out": replace(base, lengths=left_out),
        "documents of DistCA's sample": replace(base, lengths=public_sample),
        "S_max 1.1": replace(base, s_max=1.1),
        "S_max 2": replace(base, s_max=2.0),
        "one queue, L_1 = 1/2": replace(base, thresholds=(0.5,)),
        "L_i = 1/2, 3/4": replace(base, thresholds=(0.5, 0.75)),
    }


def sensitivity(cases: Iterable[Case], steps: int, names: Iterable[str] | None = None) -> list[Row]:
    """Averages of Figure 12 under each variation, and 7B-128K; differences are to the same steps as calibrated."""
    varied = [variations(replace(case, thresholds=tuned(case))) for case in cases]
    rows: list[Row] = []
    for name in names or varied[0]:
        per_case = []
        for cases_of in varied:
            found, results = speeds(cases_of[name], {"WLB-LLM": WLB, "ours, balance alone": BALANCE}, steps)
            seconds = float(results["WLB-LLM"].times.mean() / 1e6)
            rates = {scheme: row["speedup"] for scheme, row in found.items()}
            per_case.append({"case": cases_of[name].name, "step_seconds": seconds, **rates})
        flat = [{"case": r["case"], "scheme": "WLB-LLM", "speedup": r["WLB-LLM"]} for r in per_case]
        seven = next((r for r in per_case if r["case"] == SEVEN_128.name), per_case[0])
        row = {
            "figure": "sensitivity",
            "variation": name,
            **{f"WLB-LLM {k}": v for k, v in averages(flat)["WLB-LLM"].items()},
        }
        row |= {f"{seven['case']} {k}": v for k, v in seven.items() if k not in ("case", "Plain-4D")}
        row["by_case"] = {r["case"]: r["WLB-LLM"] for r in per_case}
        rows.append(row)
    return rows


def llama3_tflops() -> dict[str, float]:
    """A check of the calibration by a published training: Llama 3 405B at 8K tokens, model TFLOP/s per GPU.

    The Llama 3 Herd of Models, table 4: 430 on 8,192 GPUs and 400 on 16,384 (TP 8, PP 16, 16 M tokens a step). Micro-
    batches of one window of one document; one layer per chunk, as its section 3.3.2 balances the ends.
    """
    found = {}
    for dp, micro_batches in ((64, 32), (128, 16)):
        job = replace(BIG.job, cp=1, dp=dp, vpp=8)
        plan = sharding.shard(np.array([8192]), 1, "per-sequence", job.kernel(backward=False), use_native=True)
        step = simulate_step(job, [[plan] * micro_batches] * dp)
        model, tokens = job.model, 8192 * micro_batches * dp
        weights = model.num_layers * model.layer_weights + model.vocabulary_weights
        flops = 6 * tokens * (weights + model.num_layers * model.query_size * 8192)
        found[f"{job.num_gpus} GPUs"] = flops / step.time / 1e6 / job.num_gpus
    return found
