"""Time in which the host launches the kernels of a layer, and how long a GPU waits for them."""

import numpy as np

from megatron_wlb.job import Job
from megatron_wlb.layers import part_of
from megatron_wlb.model import EXPERTS

LAUNCHES_US = {"attn": 850.0, "mlp": 850.0, "mamba": 850.0, "moe_router": 1750.0, "moe": 1500.0}
"""Launches by the module of `--cuda-graph-modules` that replays them, of a layer and micro-batch in both directions.
moe_router stands for moe_preprocess, too, and moe for what is left of experts: dispatcher, permutation, activation.

Fitted to steps of mixtures of experts with and without graphs (`benchmarks.published`), with what experts and copies
take. The steps tell their sum, and hardly how modules share it: without a model, a release or a GPU the fit has 3700 to
4800 us in all, and 2000 to 3800 for a router (`left_out` of benchmarks/results/published.json). Assumed: an MLP and a
mixer have as many launches as attention; no published dense step is bound by them.

A rehearsal of Megatron 0.19 over TransformerEngine 2.20 counts, with products by hand, of a layer and micro-batch in
both directions: 52 launches of a dense layer in bf16 (63 with latent attention) and 94 in FP8, and 100 of one with
experts, beside their products. So a fitted constant is 33 to 41 us a launch, where a launch itself takes 4 to 8: most
of it is modules and autograd in Python, which no count derives, and rests on the fit alone.
"""
EXPERT_US = {False: 30.0, True: 430.0}
"""More for every expert of a rank. In bf16, derived: six products, 5 us each. With casts, of which every expert has its
own, fitted with `LAUNCHES_US`: 16 us for each of the 27 launches that a rehearsal counts."""
FORWARD = 1 / 3
"""Share of launches that forward has, as of products. Assumed."""


def launches(job: Job, kind: str) -> tuple[float, float]:
    """Return us in which the host launches a layer of a kind, forward and backward."""
    graphs, time = set(job.cuda_graphs), 0.0
    for part in job.model.parts_of(kind):
        left = {*part_of(job.model, part).modules} - graphs
        if graphs & {"full"} or (part == EXPERTS and "moe" in graphs):
            continue
        time += sum(LAUNCHES_US[module] for module in left)
        if part == EXPERTS:
            of_rank = (job.model.num_experts or job.model.moe_router_topk) / job.parallel.ep
            time += EXPERT_US[job.precision != "bf16"] * of_rank
    return FORWARD * time, (1 - FORWARD) * time


def waiting(launched: float, busy: np.ndarray) -> np.ndarray:
    """Return us that a GPU waits for launches that take `launched` us, in a layer that keeps it `busy`.

    More than what launches take longer: parts of a layer have many small kernels, and others few large ones. The third
    power is fitted, as `LAUNCHES_US` are; the larger of both alone is worse (p90 of left-out rows .17, not .10).
    """
    return np.cbrt(busy**3 + launched**3) - busy
