"""A small model on one layout, and micro-batches of it."""

from dataclasses import replace

import numpy as np

from megatron_wlb.cost.attention import sharding_kernel
from megatron_wlb.hardware.network import Collective, Network
from megatron_wlb.hardware.profile import load_profile
from megatron_wlb.job import Recompute
from megatron_wlb.model import MODELS
from megatron_wlb.sharding.select import divide, round_costs
from tests import jobs

SMALL = replace(MODELS["llama2-7b"], num_layers=8, padded_vocab_size=0)
AT_ONCE = Collective(ranks=(2,), latency_us=(0.0,), gb_per_s=(1e9,))
FREE = Network(
    name="free", all_gather=AT_ONCE, reduce_scatter=AT_ONCE, all_reduce=AT_ONCE, link_gb_per_s=1e9, hop_us=0.0
)
"""Communication takes no time."""
TOGETHER = replace(SMALL, window=1 << 20, pattern="W")
"""Windows that hold all of a document; what is exchanged moves at once."""


def job(**changes):
    """A job of `SMALL`, with the shipped profile and a window of 128K tokens, which no launches bound."""
    sizes = {"model": SMALL, "context_length": 1 << 17, "num_micro_batches": 48, "cuda_graphs": ("full",)}
    return jobs.job(**sizes | {"profile": load_profile("h100-fa2")} | changes)


def shards_of(given, lengths, strategy="per-sequence"):
    """One data-parallel rank's micro-batches of documents of these lengths."""
    costs = round_costs(given) if given.cp_exchange == "shared" else None
    return [divide(np.array(each), given.parallel.cp, strategy, sharding_kernel(given), costs) for each in lengths]


JOBS = [
    job(tp=2, cp=2, pp=2, dp=2),
    job(tp=8, cp=2, pp=4, vpp=2),
    job(
        model=replace(MODELS["llama3-405b"], num_layers=6),
        pp=4,
        dp=3,
        split=jobs.EDGES,
        recompute=Recompute(granularity="full"),
    ),
    job(model=replace(MODELS["llama2-7b"], num_layers=8, mtp_num_layers=2), pp=4),
    job(model=replace(MODELS["llama2-7b"], num_layers=8, moe_router_topk=2), cp=2, pp=2, dp=4, ep=4),
]
