"""Steps of a job: closed forms, where the time goes, and the trace."""

import itertools
from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.metrics import balanced_time, limit_time
from megatron_wlb.documents import document_work
from megatron_wlb.hardware.network import H100_NETWORK, Group
from megatron_wlb.hardware.profile import load_profile
from megatron_wlb.pipeline.split import Split
from megatron_wlb.simulate.passes import LayerTimes, pass_times
from megatron_wlb.simulate.step import breakdown, imbalances, simulate_step, step_of, trace_of
from tests.simulate.shards import FREE, JOBS, SMALL, TOGETHER, job, shards_of


@pytest.mark.parametrize(("vpp", "micro_batches"), [(1, 7), (2, 8)])
def test_uniform_work_takes_the_closed_form(vpp, micro_batches):
    profile = replace(load_profile("h100-fa2"), network=FREE)
    one = job(pp=4, vpp=vpp, profile=profile)
    step = simulate_step(one, [shards_of(one, [[3000, 1000]] * micro_batches)])
    times = step.passes[0]
    assert (times.forward == times.forward[0, 0, 0]).all()
    both = times.forward[0, 0, 0] + times.backward[0, 0, 0]
    assert step.timelines[0].makespan == pytest.approx((micro_batches * vpp + 3) * both)
    lost = breakdown(step)
    assert lost.bubble == pytest.approx(3 * both)
    assert [lost.imbalance, lost.dp_wait, lost.cp_wait] == pytest.approx([0, 0, 0], abs=1e-6)
    assert balanced_time(step) == pytest.approx(step.time)
    assert limit_time(lost) == pytest.approx(step.time - 3 * both)


def test_imbalances_by_hand():
    """Two ranks of two micro-batches on two context-parallel ranks, of 4 and 7 us and of 4 and 4 us in a direction."""
    one, none = job(cp=2, dp=2, num_micro_batches=4), np.zeros(2)
    passes = pass_times(one, shards_of(one, [[64], [64]]))
    layers = (
        LayerTimes(
            linear=none + linear,
            pooled=none,
            tensor=none,
            attention=np.array(attention),
            slowest=np.array(attention).max(axis=1),
            exchange=none,
            launches=none,
        )
        for linear, attention in ((1, [[2, 4], [6, 6]]), (3, [[1, 1], [1, 1]]))
    )
    step = simulate_step(one, [shards_of(one, [[64], [64]])] * 2)
    found = imbalances(replace(step, passes=tuple(replace(passes, layers=(layer, layer)) for layer in layers)))
    expected = {"pp": (7 / 5.5 + 1) / 2, "dp": 11 / 9.5, "cp": (4 + 6 + 1 + 1) / (3 + 6 + 1 + 1)}
    assert found == pytest.approx(expected)
    mlp = replace(one, model=replace(SMALL, pattern="-", hybrid=True))
    assert imbalances(simulate_step(mlp, [shards_of(mlp, [[64], [64]])] * 2))["cp"] == 1  # of no attention


@pytest.mark.parametrize("backward", [100.0, 1e5])
def test_gradients_and_the_optimizer_by_hand(backward):
    """Six of eight layers are on the last stage, which ends 4 us before the first one's `backward`."""
    profile = replace(load_profile("h100-fa2"), dp_overlap=0.75)
    one = job(pp=2, dp=2, split=Split(decoder_first_pipeline_num_layers=2), profile=profile)
    shards = [shards_of(one, [[100]])] * 2
    passes = pass_times(one, shards[0])
    given = (
        replace(passes, backward=np.array(each)[:, None, None], transfer=0.0) for each in ([backward, 5.0], [1.0, 9.0])
    )
    step = step_of(one, shards, [*given])
    weights = np.array([2, 6]) * (4 * 4096**2 + 3 * 4096 * 11008)
    reduce, gather = (
        H100_NETWORK.collective(name, size * weights, Group(size=2, stride=1)) / 4
        for name, size in (("reduce_scatter", 4), ("all_gather", 2))
    )
    assert step.gradients == pytest.approx(max(reduce[0], reduce[1] - (backward - 4)))
    # Of its half of the weights a rank reads and writes two moments and weights in fp32, reads their gradient, and
    # writes bf16.
    assert step.optimizer == pytest.approx(weights[1] / 2 * (3 * 8 + 4 + 2) / 2700e3)
    assert step.parameters == pytest.approx(gather[1])
    end = step.passes[0].forward.sum() + 5 + backward
    assert step.time == pytest.approx(end + step.gradients + step.optimizer + step.parameters)


def test_weights_of_experts_have_copies_of_their_own():
    """Four experts on as many of 16 ranks, whose weights four have; all others are on two, and eight have them."""
    model = replace(SMALL, moe_router_topk=2, num_experts=4)
    one = job(model=model, tp=2, cp=2, dp=4, ep=4, etp=1)
    step = simulate_step(one, [shards_of(one, [[100]])] * 4)
    dense, experts = 8 * 4 * 4096**2 / 2, 8 * 3 * 4096 * 11008 * 4 / 2 / 4
    assert step.optimizer == pytest.approx((dense / 8 + experts / 4) * 30 / 2700e3)
    gathered = sum(
        float(H100_NETWORK.collective("all_gather", 2 * weights, Group(size=size, stride=stride)))
        for weights, size, stride in ((dense, 8, 2), (experts, 4, 4))
    )
    assert step.parameters == pytest.approx(gathered / 10)


def test_layers_for_mtp_are_layers():
    """Eight and two on four stages: attention of ten layers, and what is left is the vocabulary's."""
    (one,) = (each for each in JOBS if each.model.mtp_num_layers)
    step = simulate_step(one, [shards_of(one, [[3000], [5000]])])
    attention = sum(float(layer.attention.sum()) for layer in step.passes[0].layers)
    assert breakdown(step).attention == pytest.approx(10 / 4 * attention)


def test_stages_before_data_parallel_ranks_leave_fewer_of_these_in_a_node():
    """Eight ranks in one node, or four and four with a stage between any two."""
    profile = replace(load_profile("h100-fa2"), dp_overlap=0.5)
    for stages_before_dp, stride in ((False, 1), (True, 2)):
        one = job(pp=2, dp=8, stages_before_dp=stages_before_dp, profile=profile)
        step, weights = simulate_step(one, [shards_of(one, [[100]])] * 8), 4 * (4 * 4096**2 + 3 * 4096 * 11008)
        gathered = H100_NETWORK.collective("all_gather", 2 * weights, Group(size=8, stride=stride))
        assert step.parameters == pytest.approx(gathered / 2)


@given(st.sampled_from(JOBS), st.data())
@settings(max_examples=30)
def test_the_parts_of_a_step_sum_to_it(one, data):
    documents = st.lists(st.integers(1, 500).map(lambda n: 16 * n), min_size=1, max_size=6)
    micro_batches = st.lists(documents, min_size=8, max_size=8)
    layout = one.parallel
    step = simulate_step(one, [shards_of(one, data.draw(micro_batches)) for _ in range(layout.dp)])
    lost = asdict(breakdown(step))
    assert sum(lost.values()) == pytest.approx(step.time)
    assert min(value for name, value in lost.items() if name != "imbalance") >= -1e-6 * step.time


def test_each_imbalance_is_found_where_it_is():
    one = job(model=TOGETHER, cp=2, pp=2, dp=2)
    alike, longer, mixed = [[8192, 8192]] * 4, [[16384]] * 4, [[16384], [1024] * 16, [16384], [1024] * 16]

    def lost(first, second, strategy):
        return breakdown(simulate_step(one, [shards_of(one, first, strategy), shards_of(one, second, strategy)]))

    none = lost(alike, alike, "per-document")
    assert [none.cp_wait, none.ep_wait, none.imbalance, none.dp_wait] == pytest.approx([0, 0, 0, 0], abs=1e-6)
    assert lost(alike, longer, "per-document").dp_wait > 0
    assert lost(mixed, mixed, "per-document").imbalance > 0
    assert lost([[12288, 2048, 2048]] * 4, alike, "per-sequence").cp_wait > 0
    one = job(model=replace(TOGETHER, moe_router_topk=2), cp=2, pp=2, dp=2, ep=4)
    shared = lost(alike, longer, "per-document")
    assert shared.ep_wait > 0
    assert shared.dp_wait == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("experts", [{}, {"model": replace(SMALL, moe_router_topk=2), "ep": 4}])
def test_the_limit_of_balancing_is_no_slower(experts):
    one = job(cp=2, pp=4, dp=2, **experts)
    rng = np.random.default_rng(0)
    for _ in range(5):
        lengths = 4 * rng.integers(1, 8000, (2, 4, 3))
        step = simulate_step(one, [shards_of(one, each) for each in lengths])
        assert balanced_time(step) < step.time


def test_shards_of_another_layout_are_refused():
    one = job(dp=2)
    shards = shards_of(one, [[100]])
    with pytest.raises(ValueError, match=r"\[1\] micro-batches .* the job has 2 ranks"):
        simulate_step(one, [shards])
    with pytest.raises(ValueError, match=r"\[1, 2\] micro-batches"):
        simulate_step(one, [shards, shards * 2])


def test_the_trace_shows_every_pass():
    one = job(cp=2, pp=2, vpp=2, dp=2)
    longer, shorter = [[2048, 6144], [8192], [2048] * 4, [8192]], [[512]] * 4
    step = simulate_step(one, [shards_of(one, each) for each in (longer, shorter)])
    events = trace_of(step)["traceEvents"]
    names = [(e["name"], e["args"]["name"]) for e in events if e["ph"] == "M"]
    assert names.count(("thread_name", "stage 0")) == 2
    assert ("process_name", "data-parallel rank 1") in names
    for rank in range(2):
        for stage in range(2):
            row = [e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == (rank, stage)]
            passes = [e for e in row if e["cat"] in "FB"]
            assert len(passes) == 2 * 2 * 4
            assert sum(e["dur"] for e in passes) == pytest.approx(step.timelines[rank].busy[stage], abs=0.1)
            assert [e["name"] for e in row[-3:]] == ["gradients", "optimizer", "parameters"]
            row.sort(key=lambda e: e["ts"])
            assert all(b["ts"] >= a["ts"] + a["dur"] - 0.01 for a, b in itertools.pairwise(row))
            assert row[-1]["ts"] + row[-1]["dur"] == pytest.approx(step.time, abs=0.01)
    first = next(e for e in events if e["name"] == "F c0 m0")
    assert first["args"] == {
        "tokens": 8192,
        "documents": 2,
        "longest": 6144,
        "work": int(document_work(np.array([6144, 2048]), one.crossover_tokens).sum()),
        "sharding": "per-sequence",
    }
