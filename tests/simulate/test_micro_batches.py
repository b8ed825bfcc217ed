"""How many micro-batches are chosen: by predicted time, of those that a job can have."""

from dataclasses import replace

import numpy as np
import pytest

from megatron_wlb import micro_batches
from megatron_wlb.hardware.profile import FLOPS_PROFILE
from megatron_wlb.micro_batches import predictions
from megatron_wlb.packing.adaptive import AdaptivePacking
from megatron_wlb.packing.wlb import WlbPacking
from megatron_wlb.plan.stream import DocumentStream, Source
from tests.simulate.shards import SMALL, job

WINDOW = 1 << 14
LENGTHS = np.random.default_rng(0).lognormal(7.5, 1.3, 20_000).astype(np.int64).clip(1, WINDOW)


def stream():
    return DocumentStream([Source(lengths=LENGTHS)], seed=0, context_length=WINDOW)


def chosen(*, windows=8, memory_known=True, packing=None, refuses=(), **changes):
    """The number of micro-batches, and what was tried: number -> prediction."""
    policy = packing or AdaptivePacking()

    def make(num_micro_batches=windows):
        if num_micro_batches in refuses:
            raise ValueError("too long")
        sizes = {"context_length": WINDOW, "global_batch_size": windows, "num_micro_batches": num_micro_batches}
        return job(**sizes, packing=policy, **changes)

    best, tried = predictions(make(), make, stream, memory_known=memory_known)
    return best.num_micro_batches, {each.job.num_micro_batches: each for each in tried}


@pytest.mark.parametrize(
    "profile",
    [{}, {"profile": FLOPS_PROFILE}, {"model": replace(SMALL, num_layers=7)}],
    ids=["h100-fa2", "flops", "layers that do not divide"],
)
def test_a_pipeline_gets_more_and_a_single_rank_few(profile):
    count, tried = chosen(pp=4, dp=2, **profile)
    assert set(tried) == {2, 4, 8, 12, 16, 24, 32} and count > 8
    assert tried[8].time == 1 and tried[2].time > 1 > tried[count].time
    count, tried = chosen(cp=2, **profile)
    assert set(tried) == {1, 2, 4, 8, 12, 16, 24, 32} and max(each.late_steps for each in tried.values()) < 0.1
    assert tried[count].time <= 1.01 * min(each.time for each in tried.values())


def test_only_what_a_job_can_have_is_tried():
    assert set(chosen(pp=4, vpp=2, dp=2)[1]) == {8, 12, 16, 24, 32}  # at least 4 for each of the two ranks
    assert set(chosen(pp=4, vpp=2, dp=2, group_size=4)[1]) == {8, 16, 24, 32}
    assert set(chosen(cp=2, memory_known=False)[1]) == {8, 12, 16, 24, 32}
    assert set(chosen(cp=2, refuses=(1, 16))[1]) == {2, 4, 8, 12, 24, 32}
    assert chosen(pp=4, packing=WlbPacking()) == (8, {})  # whose steps would vary in tokens by it
    assert chosen(pp=4, refuses=(1, 2, 4, 12, 16, 24, 32)) == (8, {})


def test_few_ranks_stand_for_many(monkeypatch):
    """What is predicted is that of a job with fewer ranks, which have as many micro-batches each."""
    seen = []
    measured = micro_batches._measured
    monkeypatch.setattr(micro_batches, "_measured", lambda job, data: seen.append(job) or measured(job, data))
    count, tried = chosen(windows=64, pp=2, dp=16)
    assert {(each.parallel.dp, each.global_batch_size) for each in seen} == {(2, 8)}
    assert {8 * each.num_micro_batches for each in seen} == set(tried)
    few = chosen(windows=8, pp=2, dp=2)
    assert count == 8 * few[0] and [each.time for each in tried.values()] == [each.time for each in few[1].values()]
