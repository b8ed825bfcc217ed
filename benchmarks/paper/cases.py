"""The simulated jobs: Table 1 of the paper under one calibration for all figures."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megatron_wlb.describe.make import make_job
from megatron_wlb.hardware.profile import load_profile
from megatron_wlb.job import Job, Parallel, Sharding
from megatron_wlb.model import MODELS
from megatron_wlb.packing.original import OriginalPacking
from megatron_wlb.sharding.select import shard
from megatron_wlb.simulate.passes import pass_times

VPP = 2
S_MAX = 1.25
MEAN_DELAY = 0.5
SLOWER = 1.2
"""Factor on the attention of per-document sharding that would explain the paper's figures."""
HOPPER = "h100-cudnn"
"""Kernels that use Hopper's loads, as the paper's do (section 5.2) and FlashAttention-2 does not."""
PROFILE = load_profile("h100-fa2")
CALIBRATION = (
    # name, value, source
    (
        "linear_tflops",
        PROFILE.assumed_tflops,
        "products of 16,384 rows on an H100, by PyTorch; checked by Llama 3 405B in published.json",
    ),
    ("wave_outputs", PROFILE.wave_outputs, "of an H100; half of a product's last wave is idle"),
    ("kernel_us", PROFILE.kernel_us, "assumed, between two kernels"),
    ("memory_gb_per_s", PROFILE.memory_gb_per_s, "assumed, 80 % of the data sheet"),
    ("link_gb_per_s", PROFILE.network.link_gb_per_s, "assumed: 400 Gbit/s a GPU, of which 90 % arrive"),
    ("hop_us", PROFILE.network.hop_us, "assumed"),
    ("attention", PROFILE.name, "megatron_wlb/hardware/profiles: fitted to FlashAttention-2 on an H100, as published"),
    ("network", PROFILE.network.name, "megatron_wlb/hardware/networks: fitted to NCCL on 2 to 8 H100, by DistCA"),
    ("tp_overlap", 0.0, "assumed; the paper overlaps some, and does not say how much"),
    ("dp_overlap", PROFILE.dp_overlap, "assumed"),
    ("VPP", VPP, "assumed, the least that is interleaved as the paper's is; see step_seconds for a check"),
    ("S_max", S_MAX, "assumed, in windows, for WLB-LLM and ours; the paper has it from memory and gives no value"),
    ("L_i", "tuned", f"two, as section 4.2 has it: best balance at a mean delay of {MEAN_DELAY:g} steps, other sample"),
    ("crossover", "derived", "W_l / W_a of these constants for every job; WLB-LLM and ours plan by the same"),
    (
        "documents",
        "F2",
        "megatron_wlb/plan/mock.py, its parameters fitted to Table 2; longer than the window: cut to it",
    ),
    ("samples", "windows", "as Megatron cuts them, in the order of documents; all schemes get the same pieces"),
    ("models", "550m, 30b", "shapes that the paper does not give are assumed in megatron_wlb/model.py"),
    ("exchange", "staged", "ours: the K and V that are needed, in stages; others gather all of them, nothing overlaps"),
)
"""No constant is fitted to a figure, except those of F2, which are fitted to Table 2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A training job of the paper."""

    name: str
    job: Job
    """As Plain-4D runs it."""

    @property
    def window(self) -> int:
        return self.job.context_length

    def changed(self, **job: Any) -> "Case":
        """The case with other fields of the job, which change the crossover."""
        changed = replace(self.job, **job)
        return replace(self, job=replace(changed, crossover_tokens=crossover(changed)))


def crossover(job: Job) -> int:
    """Length at which attention of a layer, forward and backward, takes as long as everything else in it."""
    plan = shard(np.array([job.context_length]), job.sharded(cp_sharding="per-document"))
    times = pass_times(job, [plan]).layers
    linear = sum(float((t.linear + t.tensor + t.exchange)[0]) for t in times)
    return round(job.context_length * linear / sum(float(t.attention.mean()) for t in times))


def _case(name: str, model: str, kilo_tokens: int, layout: tuple[int, int, int, int]) -> Case:
    tp, cp, pp, dp = layout
    job = make_job(
        model=MODELS[model],
        parallel=Parallel(tp=tp, cp=cp, pp=pp, dp=dp, vpp=VPP, group_size=pp),
        context_length=kilo_tokens << 10,
        global_batch_size=pp * dp,  # the paper's global batch
        max_tokens=round(S_MAX * (kilo_tokens << 10)),
        packing=OriginalPacking(),
        sharding=Sharding(cp_sharding="per-sequence"),
        profile=PROFILE,
        reorder=False,
        cp_exchange="all",
        overlap_transfers=False,
    )
    return Case(name=f"{name}-{kilo_tokens}K", job=job).changed()


TABLE_1 = (
    _case("550M", "550m", 64, (2, 2, 4, 2)),
    _case("550M", "550m", 128, (2, 4, 4, 1)),
    _case("7B", "llama2-7b", 64, (4, 2, 4, 1)),
    _case("7B", "llama2-7b", 128, (8, 2, 4, 1)),
    _case("30B", "30b", 64, (8, 2, 4, 1)),
    _case("30B", "30b", 128, (8, 4, 4, 1)),
    _case("70B", "llama2-70b", 64, (16, 4, 4, 1)),
    _case("70B", "llama2-70b", 128, (16, 4, 4, 1)),
)
SEVEN_128 = TABLE_1[3]
LAYER = SEVEN_128.changed(parallel=replace(SEVEN_128.job.parallel, cp=4))
"""Figure 15: CP = 4; TP as in 7B-128K, which the paper does not say."""
