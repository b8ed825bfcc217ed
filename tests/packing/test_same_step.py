"""All documents of a step in that step, however many micro-batches it has."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from benchmarks.lengths import f2
from megatron_wlb import MODELS, Samples, _native, windows
from megatron_wlb.documents import PackedBatch
from megatron_wlb.hardware.profile import load_profile
from megatron_wlb.packing import place
from megatron_wlb.packing.adaptive import arranged
from megatron_wlb.packing.place import placed, sizes
from megatron_wlb.pipeline.timeline import cost_weights
from megatron_wlb.plan.packer import PackedStep
from megatron_wlb.plan.step import plan_packed, shard_step
from megatron_wlb.simulate.step import simulate_step
from tests.jobs import MODEL, job, packer, samples
from tests.packing.steps import documents, tokens

LAYOUTS = st.sampled_from(
    [
        {},
        {"dp": 3},
        {"pp": 2},
        {"pp": 2, "dp": 2},
        {"pp": 4, "vpp": 2},
        {"pp": 2, "vpp": 3, "dp": 2, "group_size": 2},
        {"dp": 4, "ep": 2, "model": replace(MODEL, moe_router_topk=2)},
    ]
)
LENGTHS = st.lists(st.integers(1, 4) | st.integers(1, 64) | st.just(64), min_size=1, max_size=40)


def job_on(layout, rounds, *, windows=None, **changes):
    """A job of `rounds` micro-batches for every rank of every stage."""
    count = rounds * layout.get("dp", 1) * layout.get("pp", 1)
    return job(num_micro_batches=count, global_batch_size=windows or count, **layout, **changes)


@given(LENGTHS, LAYOUTS, st.integers(1, 4), st.sampled_from([64, 72, 128]))
@example([64] + [1] * 6, {"dp": 2}, 2, 64)
def test_all_documents_are_placed(lengths, layout, rounds, max_tokens):
    given, rows = job_on(layout, rounds, max_tokens=max_tokens), documents(lengths)
    batch = arranged(rows, given)
    counts, wanted, ranks = np.diff(batch.bounds), given.num_micro_batches, given.parallel.dp
    assert sorted(batch.documents["index"]) == list(range(len(lengths)))
    assert batch.sums(batch.documents["length"]).max() <= max_tokens
    assert counts.min() > 0 or len(lengths) < len(batch) <= max(wanted, len(lengths) + ranks * given.parallel.pp)
    if len(batch) > wanted:
        assert placed(rows, given, wanted) is None
    assert len(batch) >= wanted or len(lengths) < wanted
    # The pipeline of each rank runs it, all documents in all.
    packed = PackedStep(step=0, batch=batch, drawn=rows, first=0, position={}, waiting={})
    plans = [plan_packed(packed, given, rank) for rank in range(ranks)]
    assert {len(plan.micro_batches) for plan in plans} == {len(batch) // ranks}
    ran = [document for plan in plans for m in plan.micro_batches for document in m.documents["index"]]
    assert sorted(ran) == list(range(len(lengths)))


@pytest.mark.parametrize(
    ("count", "max_tokens", "layout", "whole"),
    [
        *((4, 64, {}, True), (2, 128, {}, True), (1, 256, {}, True), (3, 128, {}, False)),
        *((4, 128, {"pp": 2}, False), (4, 128, {"dp": 2}, False)),
    ],
)
def test_where_nobody_waits_micro_batches_are_megatrons_samples(count, max_tokens, layout, whole):
    """Equally many in each, in order. Work decides where ranks or stages wait for it."""
    rows = documents([40, 24, 1, 63, 64, 20, 44])
    rows["index"] = [0, 40, 64, 65, 128, 192, 212]
    given = job(num_micro_batches=count, global_batch_size=4, max_tokens=max_tokens, **layout)
    batch = arranged(rows, given)
    kept = [set((batch.micro_batch(i)["index"] // 64).tolist()) for i in range(len(batch))]
    each = 4 // count
    assert (kept == [set(range(each * i, each * (i + 1))) for i in range(count)]) == whole
    assert batch.ranks.shape == (given.parallel.dp, count // given.parallel.dp)


def test_empty_micro_batches_take_the_shortest_documents_of_the_fullest():
    """Of those with as many, the first, and never the only document."""
    lengths, bounds = np.array([9, 1, 5, 7, 2]), np.array([0, 3, 3, 5, 5])
    rows, filled = place._filled(np.arange(5), bounds, lengths)
    parts = [part.tolist() for part in np.split(rows, filled[1:-1])]
    assert [lengths[part].tolist() for part in parts] == [[9], [1], [7, 2], [5]]
    rows, filled = place._filled(np.arange(5), np.array([0, 2, 2, 5, 5]), lengths)
    assert [lengths[part].tolist() for part in np.split(rows, filled[1:-1])] == [[9], [2], [5, 7], [1]]
    rows, filled = place._filled(np.arange(2), np.array([0, 2, 2, 2]), lengths)
    assert rows.tolist() == [0, 1] and filled.tolist() == [0, 1, 2, 2]


@given(
    st.lists(st.integers(0, 200), min_size=3, max_size=60),
    LAYOUTS,
    st.integers(1, 4),
    st.sampled_from([1, 3, 8]),
)
def test_a_step_has_the_pieces_of_its_own_samples(lengths, layout, rounds, windows):
    lengths = [*lengths, 65]
    given = job_on(layout, rounds, windows=windows)
    data, running = samples(lengths), packer(given, lengths)
    for first in range(0, len(data), windows):
        step = running.next()
        own = data.documents(first, min(first + windows, len(data)))
        np.testing.assert_array_equal(tokens(step.batch.documents), tokens(own))
        assert len(step.batch.documents) == len(own), "nothing is cut"
        assert step.batch.sums(step.batch.documents["length"]).max() <= given.max_tokens
    with pytest.raises(StopIteration):
        running.next()


def test_ranks_and_micro_batches_are_balanced_by_hand():
    """Work is about length times 10,000: 18 tokens for either rank, and no micro-batch larger than must be."""
    given, rows = job(num_micro_batches=4, dp=2, pp=2, crossover_tokens=10_000), documents([10, 6, 5, 5, 4, 3, 3])
    batch = arranged(rows, given)
    assert batch.sums(batch.documents["length"])[batch.ranks].tolist() == [[10, 8], [9, 9]]
    # Ranks that divide experts wait for each other in every micro-batch, so all are alike, and nothing is dealt yet.
    given, rows = replace(given, parallel=replace(given.parallel, ep=2)), documents([10, 6, 6, 6, 4, 4, 4])
    batch = arranged(rows, given)
    assert batch.ranks is None and batch.sums(batch.documents["length"]).tolist() == [10] * 4


def test_the_largest_micro_batch_weighs_what_it_costs():
    """With its weight where all rounds wait for it, as with a delay, steps of this job take 2 % more time."""
    layout = {"num_micro_batches": 16, "context_length": 1 << 17, "tp": 8, "pp": 2, "vpp": 4, "dp": 2}
    given = job(model=MODELS["llama2-7b"], profile=load_profile("h100-cudnn"), **layout)
    drawn = Samples(datasets=[windows(f2(4000, 1), 1 << 17)], context_length=1 << 17)
    weights, times = cost_weights(given.schedule()), np.zeros(2)
    for step in range(6):
        documents = drawn.documents(16 * step, 16 * step + 16)
        lengths, batch = documents["length"], placed(documents, given, 16)
        rows, bounds = _native.place_documents(lengths, given.work(lengths), sizes(given, 16, 2, weights))
        other = PackedBatch(documents=documents[rows], bounds=bounds, ranks=batch.ranks)
        times += [simulate_step(given, shard_step(given, of.lengths, of.ranks)).time for of in (batch, other)]
    assert times[1] > 1.02 * times[0]
