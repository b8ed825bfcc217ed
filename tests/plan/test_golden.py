"""800 plans to the bit: 200 jobs and their documents drawn by seed, and digests of four steps of each.

A change of `golden.json` is a change of plans. `python -m tests.plan.test_golden` writes it anew.
"""

import functools
import hashlib
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.fixed import FixedPacking
from megatron_wlb import MODELS, Packer, PlanSettings, Samples, make_job, plan_step, windows
from megatron_wlb.job import Parallel, Recompute, Sharding
from megatron_wlb.packing.adaptive import AdaptivePacking
from megatron_wlb.packing.megatron import MegatronPacking
from megatron_wlb.packing.paper import PaperPacking

FILE = Path(__file__).with_name("golden.json")
JOBS, STEPS = 200, 4


def drawn(rng):
    """A job and the samples that it plans for."""

    def pick(*values):
        return values[int(rng.integers(len(values)))]

    tp, cp, pp, dp = pick(1, 2, 8), pick(1, 2, 4, 8), pick(1, 2, 4), pick(1, 2, 4)
    vpp = pick(1, 2) if pp > 1 else 1
    window = pick(2048, 8192, 32768)
    others = AdaptivePacking(max_delay_steps=20), PaperPacking(), MegatronPacking(), FixedPacking(global_batches=2)
    packing = pick(*[AdaptivePacking()] * 6, *others)
    pick(0, 0, 0, 1)  # once a flag, as below
    each = pick(pp, 2 * pp, 3 * pp + 1) if vpp == 1 else pick(pp, 2 * pp, 3 * pp)
    model = pick("550m", "llama2-7b", "llama3-8b", "deepseek-v2-lite")
    settings = PlanSettings(profile=pick("h100-fa2", "h100-fa2", "flops"))
    strategy = pick("auto", "auto", "hybrid", "paper", "per-document", "per-sequence")
    pick(0, 0, 1)  # once a flag: so the other draws, and the plans of jobs without it, are as they were
    sharding = Sharding(cp_sharding=strategy, cp_gradients=pick("fp32", "model"))
    size = count = dp * each  # windows of a step, and micro-batches
    share = pick(0.5, 1, 1, 2)
    if not packing.fixed_length and (share > 1 or (vpp == 1 and each % 2 == 0)):
        count = int(share * size)
    exchange = pick("shared", "shared", "shared", "all", "ring")
    if model.startswith("deepseek"):
        exchange = pick("shared", "latents")
    reorder = bool(pick(1, 1, 1, 0))
    recompute = pick(None, "full", "selective")
    kind = pick("lognormal", "pareto", "mixed")
    seed = int(rng.integers(1 << 30))
    job = make_job(
        model=replace(MODELS[model], num_layers=MODELS[model].num_layers // 8 * 8),
        context_length=window,
        global_batch_size=size,
        num_micro_batches=count,
        parallel=Parallel(tp=tp, cp=cp, pp=pp, vpp=vpp, dp=dp),
        packing=packing,
        settings=settings,
        sharding=sharding,
        reorder=reorder,
        cp_exchange=exchange,
        recompute=Recompute(granularity=recompute, modules=("core_attn",) if recompute == "selective" else ()),
    )
    lengths = documents(np.random.default_rng(seed), kind, window, 12 * size * window)
    return job, Samples(datasets=[windows(lengths, window, seed=seed)], context_length=window)


def documents(rng, kind, window, total):
    """Lengths of so many tokens, or a few times as many."""
    if kind == "pareto":
        lengths = (64 * (1 + rng.pareto(0.9, total // 200))).astype(np.int64)
    else:
        lengths = rng.lognormal(np.log(window / 16), 1.3, 8 * total // window).astype(np.int64)
        if kind == "mixed":
            lengths[::17] = window * rng.integers(1, 4, len(lengths[::17])) // 2
    return np.minimum(lengths, 4 * window) + 1


def digest(plan):
    """Of everything that a step's plan says to a rank."""
    said = hashlib.blake2b(digest_size=8)
    for array in (plan.batch.documents, plan.batch.bounds, plan.work):
        said.update(array.tobytes())
    for micro_batch in plan.micro_batches:
        shards = micro_batch.shards
        said.update(micro_batch.documents.tobytes() + shards.lengths.tobytes())
        said.update(repr((shards.strategy, shards.key_bounds, float(shards.time))).encode())
        for shard in shards.shards:
            for call in shard.calls:
                said.update(call.tobytes())
    return said.hexdigest()


@functools.cache
def cases():
    rng = np.random.default_rng(36)
    return [drawn(rng) for _ in range(JOBS)]


def digests(number):
    job, samples = cases()[number]
    packer = Packer(samples, job)
    return [digest(plan_step(packer, job, dp_rank=step % job.parallel.dp)) for step in range(STEPS)]


@pytest.mark.parametrize("number", range(JOBS))
def test_plans_are_those_on_record(number):
    assert digests(number) == json.loads(FILE.read_text())[number]


if __name__ == "__main__":
    FILE.write_text("[\n" + ",\n".join(json.dumps(digests(number)) for number in range(JOBS)) + "\n]\n")
