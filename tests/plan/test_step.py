"""The plan of a step, and the planner that makes plans ahead of training; the names of the library."""

import gc
import re
import subprocess
import sys
import threading
import weakref
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest

from megatron_wlb import Planner, plan_step
from megatron_wlb.documents import PackedBatch, document_work
from megatron_wlb.packing import POLICIES
from megatron_wlb.packing.adaptive import AdaptivePacking, arranged
from megatron_wlb.plan import placement
from megatron_wlb.plan.metrics import original_work
from megatron_wlb.plan.packer import PackedStep
from megatron_wlb.plan.step import PLAN_AHEAD, digest_of, packing_gain, plan_packed, shard_step, step_cost
from megatron_wlb.sharding import select
from tests.jobs import MODEL, job, packer, samples
from tests.packing.steps import documents

LENGTHS = np.clip(np.random.default_rng(0).lognormal(3, 1, 400).astype(np.int64), 1, 350)


def packer_of(described):
    return packer(described, LENGTHS, seed=3)


@pytest.mark.parametrize("experts", [{}, {"ep": 4, "model": replace(MODEL, moe_router_topk=2)}])
@pytest.mark.parametrize(
    "packing",
    [*(policy() for policy in POLICIES.values()), AdaptivePacking(max_delay_steps=20)],
    ids=[*POLICIES, "adaptive with delay"],
)
def test_a_plan_is_packed_placed_and_sharded(packing, experts):
    described = job(packing=packing, num_micro_batches=8, dp=2, cp=2, pp=2, **experts)
    packers = [packer_of(described) for _ in range(3)]
    for _ in range(6):
        packed = packers[2].next()
        batch, lengths = packed.batch, packed.batch.documents["length"]
        plans = [plan_step(packers[rank], described, rank) for rank in range(2)]
        assert (batch.ranks is None) == (packing != AdaptivePacking() or bool(experts))
        assert {p.digest for p in plans} == {plans[0].digest}
        for plan in plans:
            np.testing.assert_array_equal(plan.batch.documents, batch.documents)
            np.testing.assert_array_equal(plan.work, batch.sums(document_work(lengths, 32)))
            np.testing.assert_array_equal(plan.original_work, original_work(packed.drawn, described))
            assert (plan.step, plan.tokens, plan.packed.state) == (packed.step, lengths.sum(), packed.state)
            assert all(m.padded_tokens % described.unit_tokens == 0 for m in plan.micro_batches)
        of_ranks = [[m.documents for m in plan.micro_batches] for plan in plans]
        assert sorted(i for m in chain(*of_ranks) for i in m["index"]) == sorted(batch.documents["index"])
        work = np.array([[document_work(m["length"], 32).sum() for m in rank] for rank in of_ranks])
        tokens = np.array([[m["length"].sum() for m in rank] for rank in of_ranks])
        critical = placement.critical_work(
            work, tokens * described.pooled_crossover_tokens, described.parallel.pooling_ranks
        )
        assert all(placement.order(each, described).tolist() == [0, 1, 2, 3] for each in critical), (
            "the best comes first"
        )
        assert step_cost(batch, described) == placement.rank_cost(critical, described).max()
        for plan, row in zip(plans, shard_step(described, packed.batch.lengths, packed.batch.ranks), strict=True):
            assert [m.shards.lengths.tolist() for m in plan.micro_batches] == [s.lengths.tolist() for s in row]


def test_a_step_may_have_another_number_of_micro_batches():
    """More where documents do not fit, fewer for fewer documents if every rank has one; what depends on it follows."""
    described = job(num_micro_batches=4, max_tokens=64, pp=2, dp=2)
    for given, count in (([50] * 6, 6), ([64, 64], 2), ([64], 4)):
        rows = documents(given)
        batch = arranged(rows, described)
        packed = PackedStep(step=0, batch=batch, drawn=rows, first=0, position={}, waiting={})
        plans = [plan_packed(packed, described, rank) for rank in range(2)]
        assert [len(plan.micro_batches) for plan in plans] == [len(packed.batch) // 2] * 2 == [count // 2] * 2
        assert sum(m.tokens for plan in plans for m in plan.micro_batches) == packed.batch.documents["length"].sum()
        assert step_cost(packed.batch, described) > 0


def test_the_gain_of_packing_by_hand():
    """Windows of two documents and of 64 by turns: in Megatron's order, one rank has all of the long ones."""
    long, short = [32] * 2, [1] * 64
    work = [64 * (32 + 32), 64 * (1 + 32)]
    own = samples([*long, *short, *long, *short, 1], seed=None).documents(0, 4)
    for layout, theirs, ours in (
        ({"dp": 2}, 2 * work[0], sum(work)),
        ({"pp": 2}, 2 * sum(work) + work[0], 2 * sum(work) + sum(work) / 2),
        ({}, 1, 1),
        ({"cp": 2}, 1, 1),
    ):
        described = job(**layout, packing=AdaptivePacking(), max_tokens=128)
        gain = packing_gain(arranged(own, described), own, described)
        assert gain == pytest.approx(theirs / ours, rel=2e-2), layout
    assert packing_gain(arranged(own, described), own[:0], described) is None
    deep = job(pp=4, vpp=2, packing=AdaptivePacking(), num_micro_batches=8, global_batch_size=2, max_tokens=128)
    assert packing_gain(arranged(own[:66], deep), own[:66], deep) is None  # of 2 windows in 4 stages


@pytest.mark.parametrize("layout", [{"dp": 4}, {"pp": 2, "dp": 2}, {"pp": 2, "vpp": 2}, {"ep": 2, "dp": 2}], ids=str)
def test_packing_gains_nothing_over_itself_and_where_documents_are_alike(layout):
    model = replace(MODEL, moe_router_topk=2) if "ep" in layout else MODEL
    same = job(**layout, model=model, packing=POLICIES["megatron"](), num_micro_batches=8, overlap_transfers=False)
    ours, given = replace(same, packing=AdaptivePacking()), packer_of(same)
    for _ in range(6):
        packed = given.next()
        assert packing_gain(packed.batch, packed.drawn, same) == 1
        assert packing_gain(arranged(packed.drawn, replace(ours, max_tokens=256)), packed.drawn, ours) > 0.99
    alike = samples([16] * 33, seed=None).documents(0, 8)
    assert packing_gain(arranged(alike, ours), alike, ours) == 1


def test_windows_that_run_at_once_are_sharded_each_by_itself():
    described = job(cp=2, num_micro_batches=4, packing=POLICIES["megatron"]())
    lengths = [np.array(each) for each in ([40, 24], [64], [8, 8, 48], [60, 4])]
    ((first, second, *_),), ((pair, other),) = (shard_step(described, lengths, size=size) for size in (1, 2))
    assert (pair.lengths.tolist(), other.lengths.tolist()) == ([40, 24, 64], [8, 8, 48, 60, 4])
    for joined, *alone in zip(pair.shards, first.shards, second.shards, strict=True):
        for call, one, behind in zip(joined.calls, *(shard.calls for shard in alone), strict=True):
            assert call.tolist() == [*one.tolist(), *((2 + d, start, stop) for d, start, stop in behind.tolist())]
    with pytest.raises(ValueError, match="--micro-batch-size 3 does not divide the 4 windows of a data-parallel rank"):
        shard_step(described, lengths, size=3)


def test_a_plan_and_its_shards_print():
    described = job(dp=2, cp=2, cp_sharding="per-document")
    plan = plan_step(packer(described, [64, 40, 24, 30, 34, 10, 54, 1], seed=None), described)
    assert str(plan).splitlines() == [
        "step 0: 256 tokens in micro-batches of work 6144 3588 5064 4740",  # 64 * (64 + 32), 24 * 56 + 34 * 66, ...
        "64 tokens, per-document",
        "24 34 tokens, per-document",
    ]
    assert str(plan.micro_batches[1].shards).splitlines() == [
        " | 0[0:6] 1[0:9] | 0[18:24] 1[26:34] 2[1:2]",  # the third document is padding, to a multiple of 4
        " | 0[6:12] 1[9:18] | 0[12:18] 1[18:26] 2[0:1]",
    ]


def planner():
    return Planner(packer_of(job()), job(), 0, first_step=0)


def test_a_planner_plans_ahead_and_keeps_steps_until_they_are_released():
    running, other = planner(), packer_of(job())
    expected = [plan_step(other, job()).digest for _ in range(9)]
    assert [running.get(step).digest for step in (0, 1, 2, 1, 0)] == [expected[step] for step in (0, 1, 2, 1, 0)]
    running.get(8)
    waited = running.wait_seconds
    running.get(0)
    assert running.wait_seconds > waited > 0 and running._wanted == 8
    running.close()
    assert running._next <= 8 + PLAN_AHEAD + 1
    running.release(5)
    assert running.get(5).digest == expected[5]
    with pytest.raises(KeyError):
        running.get(4)


def fails(running, step, cause):
    with pytest.raises(RuntimeError, match=f"planning failed before step {step}") as error:
        running.get(step)
    assert re.search(cause, str(error.value.__cause__), re.DOTALL)


def test_a_planner_at_another_step_or_whose_thread_has_ended_says_so(monkeypatch):
    """A reader in a process that was forked since would wait for ever."""
    other = packer_of(job())
    other.next()
    running = Planner(other, job(), 0, first_step=0)
    fails(running, 0, "the packer is at step 1, training at step 0; load the state of that step")
    monkeypatch.setattr(Planner, "_run", lambda self: None)
    monkeypatch.setattr("megatron_wlb.plan.step._LOOK_SECONDS", 0.01)
    fails(planner(), 0, "has ended at step 0, or this process was forked since")


def test_a_planner_says_that_the_data_is_at_its_end():
    count = -(-(LENGTHS.sum() - 1) // 64 // 4)
    running = planner()
    assert running.get(count - 1).step == count - 1
    message = f"^the data ends before step {count}: after {count} steps every .* train fewer steps, or more epochs$"
    with pytest.raises(RuntimeError, match=message) as error:
        running.get(count)
    assert isinstance(error.value.__cause__, StopIteration)


@pytest.mark.parametrize("ending", ["", "raise RuntimeError('out of memory')"])
def test_a_process_may_end_while_its_planner_is_in_cpp(ending):
    """A thread that came back from C++ into an interpreter at its end would abort the process."""
    code = f"""
import numpy as np
from megatron_wlb import Planner
from megatron_wlb.packing.adaptive import AdaptivePacking
from tests.jobs import job, packer
lengths = np.random.default_rng(0).lognormal(6.7, 1.4, 300_000).astype(np.int64).clip(1, 8192)
sizes = dict(num_micro_batches=512, dp=512, context_length=8192, crossover_tokens=20_000)
described = job(packing=AdaptivePacking(max_delay_steps=20), **sizes)
Planner(packer(described, lengths), described, 0, first_step=0).get(0)
{ending}
"""
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == bool(ending), done.stderr
        assert done.stderr.count("Error: ") == bool(ending)


def test_a_closed_planner_leaves_nothing_behind():
    """Its thread would hold the packer and the plans for as long as the process lives."""
    running = planner()
    running.get(0)
    thread, held = running._thread, weakref.ref(running._packer)
    running.close()
    running.close()
    assert not thread.is_alive()
    assert running.get(0).step == 0
    fails(running, 90, "the planner's thread has ended")
    del running
    gc.collect()
    assert held() is None
    planner().close()  # which never began


def test_a_planner_counts_and_changes_the_job():
    jobs = [job(num_micro_batches=count) for count in (2, 4, 8)]
    running = Planner(
        packer_of(jobs[0]),
        jobs[0],
        0,
        first_step=0,
        count=lambda packed: packed.batch.documents["length"],
        later=[(3, jobs[1]), (4, jobs[2])],
    )
    plans = [running.get(step) for step in range(7)]
    running.close()
    assert [plan.packed.first for plan in plans] == [0, 2, 4, 6, 10, 18, 26]
    assert [len(plan.batch) for plan in plans] == [2, 2, 2, 4, 8, 8, 8]
    assert [plan.counted.sum() for plan in plans] == [plan.tokens for plan in plans]


def test_a_planner_that_is_stuck_ends_the_run_with_its_stack(monkeypatch):
    stuck, go_on = threading.Event(), threading.Event()

    def never_ready(packed, *given):
        if packed.step == 1:
            stuck.set()
            go_on.wait()
        return plan_packed(packed, *given)

    monkeypatch.setattr("megatron_wlb.plan.step.plan_packed", never_ready)
    monkeypatch.setattr("megatron_wlb.plan.step._LOOK_SECONDS", 0.01)
    running = Planner(packer_of(job()), job(), 0, first_step=0)
    running.get(0)
    stuck.wait()
    running._patience_seconds = 0.01
    fails(running, 1, "step 1 was not planned in 0 s; .*stuck here:.*in never_ready")
    running.close()  # without waiting for it
    go_on.set()


def test_what_ranks_must_agree_on_is_in_the_digest_of_all():
    """The step, the job, which documents it has, in which micro-batches and on which ranks; of no rank alone."""
    described, rows = job(num_micro_batches=4, dp=2), documents([60, 40, 30, 9])
    batch = PackedBatch(documents=rows, bounds=np.arange(5), ranks=np.array([[0, 1], [2, 3]]))
    packed = PackedStep(step=0, batch=batch, drawn=rows, first=0, position={}, waiting={})
    other = rows.copy()
    other["offset"][0] = 7

    def plan(packed=packed, job=described, rank=0, **changes):
        return plan_packed(replace(packed, batch=replace(batch, **changes)), job, rank)

    before = plan()
    assert plan(rank=1).digest == before.digest and 1 << 48 < before.digest < 1 << 63
    for changed, name in (
        (plan(replace(packed, step=1)), "flags"),
        (plan(job=described.sharded(cp_gradients="model")), "flags"),
        (plan(documents=other), "documents"),
        (plan(bounds=np.array([0, 0, 2, 3, 4])), "documents"),
        (plan(ranks=np.array([[0, 3], [1, 2]])), "placement"),
    ):
        assert [part for part, digest in changed.digests.items() if digest != before.digests[part]] == [name]
        assert changed.digest != before.digest
    assert len({digest_of(np.array(each)) for each in ([1, 2], [[1, 2]], [1.0, 2.0], [2, 1])}) == 4


def test_what_ranks_do_otherwise_is_in_their_digest(monkeypatch):
    """Order and shards of micro-batches, which other data-parallel ranks do not know."""
    described, shard = job(cp=2, num_micro_batches=4), select.shard
    before = plan_step(packer_of(described), described)
    for module, name, other in (
        (placement, "order", lambda work, job: np.arange(len(work))[::-1]),
        (select, "shard", lambda lengths, job: shard(lengths, job.sharded(cp_sharding="per-document"))),
        (select, "shard", lambda lengths, job: replace(shard(lengths, job), key_bounds=(0.0, 1.0))),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, other)
            after = plan_step(packer_of(described), described)
        assert after.digests == before.digests and after.own_digest != before.own_digest
