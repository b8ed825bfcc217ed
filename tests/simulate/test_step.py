"""Steps of a job: hand-made costs, closed forms, and where the time goes."""

import itertools
import json
from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_wlb.plan.sharding import rank_work, shard
from megatron_wlb.plan.workload import FLOPS_PROFILE, KernelTimes
from megatron_wlb.simulate import MODELS, Hardware, Job, balanced_time, breakdown, simulate_step, write_trace
from megatron_wlb.simulate.collectives import MOVED, Group, Network
from megatron_wlb.simulate.costs import pass_times

FREE = Network(
    name="free",
    node={c: {2: (0.0, np.inf), 8: (0.0, np.inf)} for c in MOVED},
    link_gb_per_s=np.inf,
    hop_us=0.0,
)
"""Communication takes no time."""
SMALL = replace(MODELS["llama2-7b"], num_layers=8, padded_vocab_size=0)


def plan_of(job, lengths, strategy="per-sequence"):
    """One data-parallel rank's micro-batches of documents of these lengths."""
    kernel = job.kernel(backward=False)
    return [shard(np.array(each), job.cp, strategy, kernel, use_native=False) for each in lengths]


def test_costs_by_hand():
    """One layer, one GPU, 8192 tokens: products, memory traffic and attention of both directions."""
    job = Job(model=replace(SMALL, num_layers=1))
    (plan,) = plan_of(job, [[5000, 3192]])
    times = pass_times(job, [plan])
    tokens, hidden, ffn = 8192, 4096, 11008
    products = 2 * tokens * (4 * hidden * hidden + 3 * hidden * ffn) / 600e6
    memory = 2 * tokens * (10 * hidden + 4 * hidden + 3 * ffn) / 2700e3
    kernel = job.kernel(backward=False)
    attention = kernel.launch + 32 * (kernel.tile * (40 * 41 / 2 + 25 * 26 / 2) + kernel.query_tile * (40 + 25))
    assert times.forward == pytest.approx(products + memory + attention)
    assert times.backward == pytest.approx(2 * (products + memory) + 2.5 * attention)
    assert times.layers[0].exchange == times.layers[0].tensor == 0


def test_attention_is_that_of_the_slowest_context_parallel_rank():
    job = Job(model=SMALL, cp=4)
    plans = plan_of(job, [[4096, 1024, 1024, 2048], [8192]])
    forward, backward = pass_times(job, plans).layers
    expected = np.array([rank_work(plan, job.kernel(backward=False)) for plan in plans])
    np.testing.assert_allclose(forward.attention, expected)
    np.testing.assert_allclose(backward.attention, 2.5 * expected)
    np.testing.assert_allclose(forward.total, forward.linear + forward.tensor + expected.max(axis=1) + forward.exchange)
    assert (forward.exchange > 0).all()


def test_a_measured_backward_is_used():
    profile = replace(Hardware().attention, backward=KernelTimes(launch=1.0, tile=2.0, query_tile=3.0))
    job = Job(model=SMALL, hardware=Hardware(attention=profile))
    kernel = job.kernel(backward=True)
    assert (kernel.launch, kernel.tile, kernel.query_tile) == (1.0, 2.0, 3.0)


def test_head_groups_and_rings_hide_the_exchange_and_recomputation_repeats_the_forward():
    """Every head group has collectives of its own, and so their latency."""
    one = Job(model=SMALL, tp=2, cp=8)
    plans = plan_of(one, [[65536, 65536]])
    exposed = pass_times(one, plans).layers[1].exchange
    collective, group = one.hardware.network.collective, Group(size=8, stride=2)
    latency = collective("all_gather", 0, group) + collective("reduce_scatter", 0, group)
    groups, ring = (
        pass_times(replace(one, **parts), plans).layers[1] for parts in ({"cp_head_groups": 4}, {"cp_ring": True})
    )
    assert groups.exchange == pytest.approx((exposed + 3 * latency) / 4)
    assert groups.attention.max() < ring.attention.max()  # 4 launches and 8
    assert ring.exchange == 0  # every hop is shorter than a part of the attention
    plain, again = pass_times(one, plans), pass_times(replace(one, recompute=True), plans)
    assert again.layers[1].total == pytest.approx(plain.layers[0].total + plain.layers[1].total)


@pytest.mark.parametrize(("vpp", "micro_batches"), [(1, 7), (2, 8)])
def test_uniform_work_takes_the_closed_form(vpp, micro_batches):
    job = Job(model=SMALL, pp=4, vpp=vpp, hardware=Hardware(network=FREE))
    step = simulate_step(job, [plan_of(job, [[3000, 1000]] * micro_batches)])
    times = step.passes[0]
    assert (times.forward == times.forward[0, 0, 0]).all()
    both = times.forward[0, 0, 0] + times.backward[0, 0, 0]
    assert step.timelines[0].makespan == pytest.approx((micro_batches * vpp + 3) * both)
    lost = breakdown(step)
    assert lost.bubble == pytest.approx(3 * both)
    assert [lost.imbalance, lost.dp_wait, lost.cp_wait] == pytest.approx([0, 0, 0], abs=1e-6)
    assert balanced_time(step) == pytest.approx(step.time)


JOBS = [
    Job(model=SMALL, tp=2, cp=2, pp=2, dp=2),
    Job(model=SMALL, tp=8, cp=2, pp=4, vpp=2, cp_head_groups=2),
    Job(model=replace(MODELS["llama3-405b"], num_layers=6), pp=4, dp=3, edge_layers=1, recompute=True),
]


@given(st.sampled_from(JOBS), st.data())
@settings(deadline=None, max_examples=30)
def test_the_parts_of_a_step_sum_to_it(job, data):
    documents = st.lists(st.integers(1, 500).map(lambda n: 16 * n), min_size=1, max_size=6)
    micro_batches = st.lists(documents, min_size=8, max_size=8)
    step = simulate_step(job, [plan_of(job, data.draw(micro_batches)) for _ in range(job.dp)])
    lost = asdict(breakdown(step))
    assert sum(lost.values()) == pytest.approx(step.time)
    assert min(value for name, value in lost.items() if name != "imbalance") >= -1e-6 * step.time
    assert step.attention.shape == (job.dp, job.pp, job.cp)
    assert step.attention.mean() == pytest.approx(lost["attention"])
    assert step.computation.mean() == pytest.approx(lost["attention"] + lost["linear"])


def test_each_imbalance_is_found_where_it_is():
    job = Job(model=SMALL, cp=2, pp=2, dp=2)
    alike, longer, mixed = [[8192, 8192]] * 4, [[16384]] * 4, [[16384], [1024] * 16, [16384], [1024] * 16]

    def lost(first, second, strategy):
        return breakdown(simulate_step(job, [plan_of(job, first, strategy), plan_of(job, second, strategy)]))

    none = lost(alike, alike, "per-document")
    assert [none.cp_wait, none.imbalance, none.dp_wait] == pytest.approx([0, 0, 0], abs=1e-6)
    assert lost(alike, longer, "per-document").dp_wait > 0
    assert lost(mixed, mixed, "per-document").imbalance > 0
    assert lost([[12288, 2048, 2048]] * 4, alike, "per-sequence").cp_wait > 0


def test_the_limit_of_balancing_is_no_slower():
    job = Job(model=SMALL, cp=2, pp=4, dp=2)
    rng = np.random.default_rng(0)
    for _ in range(5):
        lengths = 4 * rng.integers(1, 8000, (2, 4, 3))
        step = simulate_step(job, [plan_of(job, each) for each in lengths])
        assert balanced_time(step) < step.time


def test_layers_of_the_edges():
    layers = Job(model=MODELS["llama3-405b"], pp=16, vpp=4, edge_layers=1).layers()
    assert layers.shape == (16, 4)
    assert layers.sum() == 126
    assert layers[0, 0] == layers[-1, -1] == 1
    assert np.count_nonzero(layers == 2) == 62


def test_wrong_jobs_and_plans():
    with pytest.raises(ValueError, match="126 layers do not divide over 16 stages of 1 chunks"):
        Job(model=MODELS["llama3-405b"], pp=16)
    with pytest.raises(ValueError, match="32 attention heads do not divide over 5 ranks"):
        Job(model=MODELS["llama2-7b"], tp=5)
    with pytest.raises(ValueError, match="needs one in us"):
        Hardware(attention=FLOPS_PROFILE)
    job = Job(model=SMALL, dp=2)
    one = plan_of(job, [[100]])
    with pytest.raises(ValueError, match=r"\[1\] micro-batches .* the job has 2 ranks"):
        simulate_step(job, [one])
    with pytest.raises(ValueError, match=r"\[1, 2\] micro-batches"):
        simulate_step(job, [one, one * 2])
    with pytest.raises(ValueError, match="sharded over 1 context-parallel ranks, not 2"):
        simulate_step(replace(job, cp=2), [one, one])


def test_models_have_the_parameters_of_their_name():
    billions = {name: (m.num_layers * m.layer_weights + 2 * m.vocabulary_weights) / 1e9 for name, m in MODELS.items()}
    expected = {"550m": 0.55, "llama2-7b": 6.74, "30b": 30, "llama2-70b": 68.98, "llama3-405b": 405.8}
    assert billions == pytest.approx(expected, rel=0.02)
    assert MODELS["llama2-7b"].crossover_tokens == pytest.approx(50_000, rel=0.02)


def test_the_trace_shows_every_pass(tmp_path):
    job = Job(model=SMALL, cp=2, pp=2, vpp=2, dp=2)
    step = simulate_step(job, [plan_of(job, [[4096, 4096], [8192], [2048] * 4, [8192]])] * 2)
    write_trace(tmp_path / "trace.json", step)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = [(e["name"], e["args"]["name"]) for e in events if e["ph"] == "M"]
    assert names.count(("thread_name", "stage 0")) == 2
    assert ("process_name", "data-parallel rank 1") in names
    for rank in range(2):
        for stage in range(2):
            row = [e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == (rank, stage)]
            assert len(row) == 2 * 2 * 4 + 3
            assert [e["name"] for e in row[-3:]] == ["gradients", "optimizer", "parameters"]
            assert all(b["ts"] >= a["ts"] + a["dur"] - 0.01 for a, b in itertools.pairwise(row))
            assert row[-1]["ts"] + row[-1]["dur"] == pytest.approx(step.time, abs=0.01)
    first = next(e for e in events if e["name"] == "F c0 m0")
    crossover = SMALL.crossover_tokens
    assert first["args"] == {
        "tokens": 8192,
        "documents": 2,
        "longest": 4096,
        "work": 8192 * (4096 + crossover),
        "sharding": "per-sequence",
    }


def test_the_papers_8k_gpu_job():
    """Figures 1 and 4: 405B, TP 8, CP 16, PP 16, DP 4 on 8192 GPUs, 16 micro-batches of 128K tokens each."""
    job = Job(model=MODELS["llama3-405b"], tp=8, cp=16, pp=16, vpp=4, dp=4, edge_layers=1)
    assert job.num_gpus == 8192
    step = simulate_step(job, [plan_of(job, [[131072 // 2**d] * 2**d for d in range(4)] * 4)] * 4)
    assert step.computation.shape == (4, 16, 16)
    # All stages between the first and the last hold as many layers, and so the same attention.
    assert np.ptp(step.attention[:, 1:-1], axis=1) == pytest.approx(0)


@pytest.mark.parametrize("cp", [2, 8])
def test_a_ring_waits_for_hops_that_are_longer_than_its_parts(cp):
    """Nearly no attention: CP - 1 hops of K and V forward; backward as many, and of their gradients."""
    job = Job(model=SMALL, tp=8, cp=cp, gather_all=True, cp_ring=True)
    plans = plan_of(job, [[128] * 1024])
    hops = job.hardware.network.collective("all_gather", 131072 * 2 * 4 * 128 * 2, Group(size=cp, stride=8))
    forward, backward = pass_times(job, plans).layers
    parts = [layer.attention.max() / cp for layer in (forward, backward)]
    hop = hops / (cp - 1)
    assert parts[1] < hop
    assert forward.exchange == pytest.approx(hops - (cp - 1) * parts[0])
    assert backward.exchange == pytest.approx(2 * hops - cp * parts[1])


def test_all_rows_are_gathered_if_asked():
    """Documents that are whole on a rank need no exchange, and are exchanged nevertheless."""
    job = Job(model=SMALL, cp=2, gather_all=True)
    shared, whole = plan_of(job, [[8192], [2048, 4096, 2048]])
    every = pass_times(job, [shared, whole]).layers[1].exchange
    chosen = pass_times(replace(job, gather_all=False), [shared, whole]).layers[1].exchange
    assert every[0] == every[1] == chosen[0]
    assert chosen[1] == 0 < every[1]
    assert pass_times(replace(job, cp=1), plan_of(replace(job, cp=1), [[8192]])).layers[0].exchange == 0
