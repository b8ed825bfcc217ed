"""200 plans to the bit: jobs and documents drawn by seed, and digests of what is planned for them.

A change of `golden.json` is a change of plans: a run that goes on from a state of before then runs other micro-batches.
"""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_wlb import MODELS, POLICIES, DocumentStream, PlanSettings, Source, make_job, make_packer, plan_step
from megatron_wlb.job import Parallel, Recompute, Sharding

DIGESTS = json.loads(Path(__file__).with_name("golden.json").read_text())


def drawn(rng):
    """A job, its layout, and the documents that it plans for."""

    def pick(*values):
        return values[int(rng.integers(len(values)))]

    tp, cp, pp, dp = pick(1, 2, 8), pick(1, 2, 4, 8), pick(1, 2, 4), pick(1, 2, 4)
    vpp = pick(1, 2) if pp > 1 else 1
    window = pick(2048, 8192, 32768)
    policy = pick("adaptive", "adaptive", "adaptive", "wlb", "original", "fixed")
    each = pick(pp, 2 * pp, 3 * pp + 1) if vpp == 1 else pick(pp, 2 * pp, 3 * pp)
    model = pick("550m", "llama2-7b", "llama3-8b", "deepseek-v2-lite")
    settings = PlanSettings(
        profile=pick("h100-fa2", "h100-fa2", "flops"), defer_weight_gradients=pick("auto", "auto", "off")
    )
    sharding = Sharding(
        cp_sharding=pick("auto", "auto", "hybrid", "wlb", "per-document", "per-sequence"),
        save_gathered_kv=bool(pick(0, 0, 1)),
        cp_gradients=pick("fp32", "model"),
    )
    windows = count = dp * each
    halves = policy not in ("original", "fixed") and not pick(0, 1)
    if halves and vpp == 1 and windows % 2 == 0 and windows // 2 % dp == 0:
        count = windows // 2
    exchange = pick("shared", "shared", "shared", "all", "ring")
    if model.startswith("deepseek"):
        exchange = pick("shared", "latents")
    reorder = bool(pick(1, 1, 1, 0))
    recompute = pick(None, "full", "selective")
    kind = pick("lognormal", "pareto", "mixed")
    seed = int(rng.integers(1 << 30))
    pick(None, 6.0, 40.0)  # not used: later draws are what they are after it
    job = make_job(
        model=replace(MODELS[model], num_layers=MODELS[model].num_layers // 8 * 8),
        context_length=window,
        global_batch_size=windows,
        num_micro_batches=count,
        parallel=Parallel(tp=tp, cp=cp, pp=pp, vpp=vpp, dp=dp),
        packing=POLICIES[policy](),
        settings=settings,
        sharding=sharding,
        reorder=reorder,
        cp_exchange=exchange,
        recompute=Recompute(granularity=recompute, modules=("core_attn",) if recompute == "selective" else ()),
        device_bytes=80 * 2**30,
    )
    return job, documents(np.random.default_rng(seed), kind, window, 12 * windows * window), seed


def documents(rng, kind, window, total):
    """Lengths of about so many tokens."""
    if kind == "pareto":
        lengths = (64 * (1 + rng.pareto(0.9, total // 200))).astype(np.int64)
    else:
        lengths = rng.lognormal(np.log(window / 16), 1.3, total // 64).astype(np.int64)
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
        rounds = [tuple(each) for each in shards.rounds]
        said.update(micro_batch.documents.tobytes() + shards.lengths.tobytes())
        said.update(repr((shards.strategy, shards.call_sets, rounds, float(shards.time))).encode())
        for shard in shards.shards:
            for call in shard.calls:
                said.update(call.tobytes())
    if plan.weight_gradients_before is not None:
        said.update(plan.weight_gradients_before.tobytes())
    return said.hexdigest()


@pytest.fixture(scope="module")
def cases():
    rng = np.random.default_rng(36)
    return [drawn(rng) for _ in DIGESTS]


@pytest.mark.parametrize("number", range(len(DIGESTS)))
def test_plans_are_those_on_record(cases, number):
    job, lengths, seed = cases[number]
    stream = DocumentStream([Source(lengths=lengths)], seed=seed, context_length=job.context_length)
    packer = make_packer(stream, job)
    plans = [plan_step(packer, job, dp_rank=step % job.parallel.dp) for step in range(len(DIGESTS[number]))]
    assert [digest(plan) for plan in plans] == DIGESTS[number]
