"""The numbers of `megatron-wlb analyze`, by hand from the times of a few steps, and what is drawn of them."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from matplotlib.figure import Figure

from megatron_wlb.cli.analyze import page, report
from megatron_wlb.cli.analyze.entries import _scheme
from megatron_wlb.cli.analyze.report import (
    Faster,
    Measured,
    Others,
    Ratio,
    Reading,
    Sample,
    Steps,
    readings,
    speedup,
    steps_of,
)
from megatron_wlb.cli.analyze.setup import Scheme, Schemes
from megatron_wlb.cli.analyze.table import _across, _errors_of, _least_and_most
from megatron_wlb.describe.alternatives import Alternative
from megatron_wlb.describe.price import SIMULATED, Price
from megatron_wlb.documents import PackedBatch
from megatron_wlb.hardware.profile import load_profile
from megatron_wlb.packing.adaptive import AdaptivePacking
from megatron_wlb.packing.megatron import MegatronPacking, without_wlb
from megatron_wlb.packing.paper import PaperPacking
from megatron_wlb.pipeline.schedule import Schedule
from megatron_wlb.pipeline.timeline import run
from tests.cli.analyses import JOB, setup
from tests.cli.analyses import report as report_of
from tests.jobs import job
from tests.packing.steps import documents

H100 = load_profile("h100-cudnn")


def measured(packing=None, us=(2000.0, 4000.0, 9000.0), **changes):
    """Three steps of 10, 30 and 20 tokens."""
    tokens = np.array([10, 30, 20])
    scheme = Scheme(job(packing=packing or AdaptivePacking(), profile=H100), None)
    sizes = {"counted": 60.0, "late_steps": 0.5, "max_delay_steps": 3, "token_cv": 0.25}
    imbalance = {"work_imbalance": np.array([1.0, 1.5, 2.0])}
    given = {
        "scheme": scheme,
        "samples": [],
        "us": np.array(us),
        "tokens": tokens,
        "work": np.array([30.0, 50.0, 40.0]),
    }
    return Measured(**given | sizes | imbalance | changes)


def test_times_of_a_scheme_by_hand():
    found = measured()
    assert (found.us_per_token, found.step_ms, found.typical()) == (250, 5, 0)
    # Deviations from 125 us a unit of work are -1750, -2250 and 4000.
    assert found.relative_error == pytest.approx(math.hypot(1750, 2250, 4000) / 120 / 125)
    vars(found)["parts_ms"] = {"linear": 2.0, "bubble": 3.0}
    assert found.us_of("linear", "bubble") == 250 and found.us_of("linear") == 100
    # Of steps of 3 tokens and 12 work by Megatron: 15,000 us for 120 work, that is 3,750 us for 30 of its tokens.
    apart = measured(MegatronPacking(), tokens=np.array([3, 27]), work=np.array([12.0, 18.0]))
    assert found.at_work_of(apart) is found
    assert measured(PaperPacking()).at_work_of(apart).us_per_token == pytest.approx(15_000 / (120 * 30 / 30))
    halved = replace(apart, work=np.array([6.0, 9.0]))
    assert measured(PaperPacking()).at_work_of(halved).us_per_token == pytest.approx(15_000 / (120 * 30 / 15))


@pytest.mark.parametrize("crosses", [False, True])
def test_steps_are_packed_and_every_other_is_simulated(crosses):
    """Of 60 and 4 tokens, of 40 and 30, of 9, and of 20, which waited for 2, 1, 0 and 5 steps."""
    lengths, late = [[60, 4], [40, 30], [9], [20]], [2, 1, 0, 5]
    batches = [
        PackedBatch(documents=documents(each, arrival=10 - waited), bounds=np.array([0, 1, len(each)]))
        for each, waited in zip(lengths, late, strict=True)
    ]
    times, described = iter((50.0, 7.0)), job()
    scheme = SimpleNamespace(
        job=described,
        crosses=crosses,
        steps=lambda count: (SimpleNamespace(step=10, batch=batch) for batch in batches[:count]),
        simulate=lambda batch: SimpleNamespace(time=next(times)),
    )
    advanced = []
    found, work = report.measure(scheme, Steps(4, 2), advanced.append), described.work(np.array([60, 4, 9]))
    assert (found.us.tolist(), found.tokens.tolist(), found.counted, advanced) == ([50, 7], [64, 9], 73, [1] * 4)
    assert found.work.tolist() == ([64, 9] if crosses else [work[0] + work[1], work[2]])
    assert (found.late_steps, found.max_delay_steps) == ((2 * 64 + 70 + 5 * 20) / 163, 5)
    assert found.token_cv == pytest.approx(np.std([64, 70, 9, 20]) / (163 / 4))
    assert found.work_imbalance[[0, 2]] == pytest.approx([2 * work[0] / (work[0] + work[1]), 2])


def test_a_speed_up_is_of_the_steps_that_both_have_or_of_times_per_work():
    base, ours = measured(MegatronPacking(), (4000.0, 4000.0, 10_000.0)), measured(us=(2000.0, 5000.0))
    ours = replace(ours, tokens=ours.tokens[:2])
    off = 1000 * 8 / 7
    assert speedup(ours, base) == pytest.approx((8 / 7, math.hypot(4000 - 2 * off, 4000 - 5 * off) / 7000))
    assert speedup(base, base) == (1, 0)
    late = measured(PaperPacking())
    error = 18_000 / 15_000 * math.hypot(base.relative_error, late.relative_error)
    assert speedup(late, base) == pytest.approx((18_000 / 15_000, error))
    assert speedup(late, late) == (1, 0)


def test_a_scheme_in_json():
    found = measured()
    vars(found).update(parts_ms={"linear": 5.0}, imbalance={"pp": 1.0, "dp": 2.0, "cp": 3.0})
    job = found.scheme.job
    expected = {"packing": "adaptive", "num_micro_batches": 4, "micro_batch_size": 1, "cp_sharding": None}
    expected |= {"step_ms": 5, "us_per_token": 250, "us_per_token_error": found.relative_error, "late_steps": 0.5}
    expected |= {"max_delay_steps": 3, "token_cv": 0.25, "longest_micro_batch_tokens": job.max_tokens}
    expected |= {"activation_gib": found.scheme.activation_bytes() / 2**30, "speedup": 1.2, "speedup_error": 0.1}
    expected |= {"imbalance": {"pp": 1, "dp": 2, "cp": 3, "work_mean": 1.5, "work_p95": pytest.approx(1.95)}}
    assert _scheme(found, Ratio(1.2, 0.1)) == expected | {"parts_ms": {"linear": 5}}
    two = found.scheme._replace(job=replace(job, parallel=replace(job.parallel, cp=2)), micro_batch_size=2)
    found = replace(found, scheme=two)
    vars(found).update(parts_ms={}, imbalance={})
    both = _scheme(found, Ratio(1.2, 0.1))
    assert (both["cp_sharding"], both["num_micro_batches"], both["micro_batch_size"]) == ("auto", 2, 2)


@pytest.mark.parametrize(
    ("sizes", "steps"),
    [
        ({}, (200, 200)),
        ({"num_micro_batches": 300, "pp": 2}, (50, 50)),  # 1,200 passes, and 66 steps of micro-batches
        ({"num_micro_batches": 512, "pp": 4, "vpp": 8, "cp": 2}, (40, 4)),
        ({"num_micro_batches": 250, "cp": 4}, (78, 26)),  # of 80, whole times 26
    ],
)
def test_steps_are_so_many_as_passes_and_micro_batches_allow(sizes, steps):
    assert steps_of(job(**sizes)) == steps


@pytest.mark.parametrize(
    ("gain", "error", "least", "told"),
    [(1.05, 0.02, 0.01, True), (1.05, 0.026, 0.01, False), (1.05, 0.0, 0.06, False), (0.9, 0.0, 0.01, False)],
)
def test_a_way_is_told_if_it_gains_over_its_least_and_two_errors(gain, error, least, told, monkeypatch):
    others = Others(SimpleNamespace(with_wlb=lambda job: job), Schemes(None, None, "ours"), Ratio(1.5, 0.1), 1)
    monkeypatch.setattr(Others, "_measure", lambda self, scheme: SimpleNamespace(late_steps=0.5))
    monkeypatch.setattr(report, "speedup", lambda one, base: Ratio(gain, error) if base == "ours" else None)
    way = Alternative("delay", "--flag", None, least)
    expected = Faster(way, gain, gain * 1.5, 0.5, math.hypot(error * 1.5, gain * 0.1))
    assert others._faster(way) == (expected if told else None)


def test_other_ways_are_measured_on_the_first_of_the_steps(monkeypatch):
    """On no more than were simulated of the run, than their size allows, and than 24; every third is simulated."""
    monkeypatch.setattr(report, "measure", lambda scheme, steps: SimpleNamespace(at_work_of=lambda thd: (steps, thd)))
    large = job(num_micro_batches=512, pp=4, vpp=8, cp=2)
    for described, simulated, expected in ((job(), 50, 24), (job(), 10, 10), (large, 50, 4)):
        others = Others(None, Schemes(None, "thd", measured(us=[1.0] * simulated)), None, 3)
        assert others._measure(Scheme(described, None)) == (Steps(3 * expected, expected), "thd")


@pytest.mark.parametrize(("source", "balance"), [(SIMULATED, 1.3), ("published", 1.5)])
def test_balance_is_over_megatron_without_the_features_that_have_a_price(source, balance, monkeypatch):
    given, price = job(), Price("CUDA graphs", 1.2, source)
    run = SimpleNamespace(job=given, run=SimpleNamespace(arguments=None))
    others = Others(run, Schemes(None, measured(MegatronPacking()), "ours"), Ratio(1.5, 0.1), 1)
    monkeypatch.setattr(report, "prices", lambda job, a, time: [price])
    monkeypatch.setattr(Others, "_measure", lambda self, scheme: scheme.job)
    bare = without_wlb(given)
    monkeypatch.setattr(report, "speedup", lambda one, base: Ratio(1.3 if (one, base) == ("ours", bare) else 9, 0))
    assert others.prices() == (balance, [price])


def test_the_fastest_layouts_come_first(monkeypatch):
    """Three of them, each with Megatron there."""
    kinds = [("layouts", 1.1), ("delay", 1.01), ("layouts", 1.4), ("layouts", 1.2), ("layouts", 1.3)]
    ways = [Faster(Alternative(kind, "", gain), gain, gain, 0, 0) for kind, gain in kinds]
    others = Others(SimpleNamespace(others=lambda: [*ways, None]), None, None, 1)
    monkeypatch.setattr(Others, "_faster", lambda self, way: way)
    monkeypatch.setattr(Others, "_of_megatron", lambda self, job: -job)
    found = others.faster()
    assert [(each.gain, each.megatron) for each in found] == [(1.4, -1.4), (1.3, -1.3), (1.2, -1.2), (1.01, None)]


def test_readings_are_changes_of_the_whole_number(monkeypatch):
    """By steps that are fewer, whose own speed-ups are 2 over one way and 4 over the other, of 1.5 and 3 in all."""
    every = Schemes(*(measured(us=[us] * 3) for us in (1500.0, 3000.0, 1000.0)))

    def compared(schemes, steps):
        assert steps == Steps(2, 2)
        profile = schemes.ours.job.profile
        slow = profile.network.link_gb_per_s / H100.network.link_gb_per_s
        factor = profile.forward.tile / H100.forward.tile if profile.name == H100.name else 5
        return Schemes(*(measured(us=[slow * factor * us] * 3) for us in (2000.0, 4000.0)), measured(us=[1000.0] * 3))

    monkeypatch.setattr(report, "compared", compared)
    found = {each.what: (each.plain, each.thd) for each in readings(every, 0.1, 2)}
    factors = {f"attention takes {factor:.2f} times as long": factor for factor in (math.exp(-0.1), math.exp(0.1))}
    others = {"h100-cudnn-2025", "h100-fa2", "h100-fa3"}
    factors |= {"half the bandwidth between nodes": 0.5} | {f"kernels of {name}": 5 for name in others}
    assert found == {what: pytest.approx((1.5 * factor, 3 * factor)) for what, factor in factors.items()}
    assert not any(each.what.startswith("attention") for each in readings(every, None, 2))
    mine = replace(H100, name="mine")
    other = [replace(each, scheme=each.scheme._replace(job=replace(each.scheme.job, profile=mine))) for each in every]
    assert [each.what for each in readings(Schemes(*other), None, 2)] == ["half the bandwidth between nodes"]


def test_what_assumptions_and_attention_across_documents_change_is_said(data):
    given = report_of(setup(JOB, "--wlb-micro-batches 4 --data-path", data), 1.2)
    base = [SimpleNamespace(us_per_token=us) for us in (1.5, 1.2, 1.0)]
    told = [Reading("kernels of x", 1.1, 0.9), Reading("half", 1.9, 1.3)]
    thd, ours = measured(samples=["a", "b"]), measured(us=(9000.0, 4000.0, 2000.0), samples=["c", "d"])
    assert (thd.typical(), ours.typical()) == (0, 1)
    assert given._replace(schemes=Schemes(ours, thd, ours)).example(ours) == "c"  # the same step of all
    given = given._replace(schemes=Schemes(*base), readings=told)
    assert _least_and_most(given) == (0.9, 1.3) and _least_and_most(given, "kernels") == (0.9, 1.2)
    (over,) = _across(given)
    assert "Over the run as it is, whose attention crosses documents: 1.50 times." in over and "brings 1.25." in over
    for us, better in ((0.97, True), (0.99, False)):
        slower = given._replace(schemes=Schemes(SimpleNamespace(us_per_token=us), *base[1:]))
        assert any("better off without --wlb" in each for each in _across(slower)) == better
    error = {"forward": {"held_out_median": 0.01, "held_out_p90": 0.2, "by": {"error_median": 0.3, "error_p90": 0.4}}}
    assert [*_errors_of(error)] == ["forward: median 1.0%, p90 20.0%", "forward, by: median 30.0%, p90 40.0%"]


def test_bars_show_the_largest_and_for_how_much_longer_others_wait():
    axes = Figure().subplots()
    values = np.array([*[1.0] * 18, 5.0, 1.0])
    page._bars(axes, values, 2.0, "title")
    *bars, excess = axes.patches
    assert [bar.get_height() for bar in bars] == [1.0] * 15 + [2.0] and axes.get_title("left") == "title (16 of 20)"
    assert (excess.get_y(), excess.get_height(), excess.get_x() + excess.get_width() / 2) == (2, 3, 18)


@pytest.mark.parametrize(("last", "spans"), [(100.0, [(0, 2), (2, 3)]), (4.0, [(0, 2), (2, 2)]), (2.0, [(0, 2)])])
def test_passes_are_drawn_as_long_as_they_take_up_to_the_end_of_the_picture(last, spans):
    axes = Figure().subplots()
    timeline = run(Schedule(num_stages=1, micro_batches_per_rank=1), np.full((1, 1, 1), 2e6), np.full((1, 1, 1), 3e6))
    page._timeline(axes, timeline, last * 1e6)
    drawn = [box for paths in axes.collections for box in (path.get_extents() for path in paths.get_paths())]
    assert [(box.x0, box.width) for box in drawn] == spans and axes.patches[0].get_width() == last


def bars(draw, **sizes):
    """Heights of the bars of a picture of Megatron above --wlb, whose steps are named t and o."""
    figure, of_job = Figure(), SimpleNamespace(job=job(**sizes))
    draw(SimpleNamespace(setup=of_job, schemes="pto", example=lambda name: Sample(name, [], 0)), figure)
    return [[bar.get_height() for bar in axes.patches] for axes in figure.axes]


def test_micro_batches_are_drawn_of_the_rank_that_has_the_slowest(monkeypatch):
    """In seconds of all eight layers, up to the mean and beyond; without stages, each rank's sum."""
    times = {"t": np.array([[1.0, 2.0], [1.5, 5.5]]), "o": np.array([[3.0, 4.0], [3.0, 3.5]])}
    monkeypatch.setattr(page, "micro_batch_times", lambda step: times[step] * 1e6 / 8)
    assert bars(page.micro_batches, dp=2, pp=2) == [[1.5, 2.5, 3.0], [3.0, 3.375, 0.625]]
    assert bars(page.micro_batches, dp=2) == [[3.0, 5.0, 2.0], [6.75, 6.5, 0.25]]


def test_ranks_are_drawn_where_they_differ_most(monkeypatch):
    monkeypatch.setattr(page, "attention_of_ranks", lambda step: np.array([[10.0, 11.0], [1.0, 3.0]]))
    assert bars(page.ranks, cp=2) == [[0.5, 1.0, 0.5]] * 2


def test_timelines_are_of_the_slowest_rank_and_end_together_where_they_are_long():
    """Of 17 micro-batches those of the first 16 of the shorter one, forward passes of 1 s and 2 s and as long back."""
    schedule, figure = Schedule(num_stages=1, micro_batches_per_rank=17), Figure()
    passes = {second: np.full((1, 1, 17), second * 1e6) for second in (0.5, 1.0, 2.0)}
    steps = {
        name: SimpleNamespace(timelines=[run(schedule, passes[s], passes[s]) for s in (0.5, slow)])
        for name, slow in (("t", 2.0), ("o", 1.0))
    }
    given = SimpleNamespace(
        setup=SimpleNamespace(job=job()), schemes="pto", example=lambda n: Sample(steps.get(n), [], 0)
    )
    page.timelines(given, figure)
    assert [axes.patches[0].get_width() for axes in figure.axes] == [32.0, 32.0]
