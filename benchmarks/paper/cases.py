"""The simulated jobs: Table 1 of the paper, with the same constants for all figures.

Rates, kernels and network are those of h100-fa2, and stated there. Assumed, as the paper gives none: `VPP`, the least
that is interleaved, `S_MAX` in windows, no overlap of tensor-parallel communication, and the shapes of 550M and 30B.
L_i have the best balance at a mean delay of `MEAN_DELAY` steps (section 4.2), on another sample. The crossover is W_l /
W_a of these constants. Documents of F2 are cut as Megatron cuts them, and all schemes get the same pieces. Ours
exchanges the K and V that are needed, in stages; others gather all, and nothing overlaps. Nothing is fitted to a
figure, but F2 to Table 2.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megatron_wlb.describe.make import make_job
from megatron_wlb.hardware.profile import load_profile
from megatron_wlb.job import Job, Parallel, Sharding
from megatron_wlb.model import MODELS
from megatron_wlb.packing.megatron import MegatronPacking
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
        packing=MegatronPacking(),
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
