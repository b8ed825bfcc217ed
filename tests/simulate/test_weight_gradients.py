"""Weight gradients of a job: which can be deferred, where they run, and what that gains."""

from dataclasses import replace

import numpy as np
import pytest

from megatron_wlb.hardware.profile import FLOPS_PROFILE
from megatron_wlb.model import MODELS
from megatron_wlb.simulate.step import simulate_step
from megatron_wlb.simulate.weight_gradients import _weight_gradients, part_counts, undeferrable, weight_gradients_before
from tests.simulate.shards import JOBS, SMALL, job, shards_of

DOCUMENTS = [[3000, 1000], [8000], [500] * 9, [4000, 4000]]


@pytest.mark.parametrize("one", JOBS)
def test_weight_gradients_put_off_are_the_same_work_in_less_time(one):
    shards = [shards_of(one, [[3000, 1000], [8000], [500] * 9, [4000, 4000]])] * one.parallel.dp
    steps = [simulate_step(replace(one, defer_weight_gradients=on), shards) for on in (False, True)]
    for before, after in zip(*(step.timelines for step in steps), strict=True):
        np.testing.assert_allclose(after.busy, before.busy)
        assert (after.filled.sum() > 0) and (before.filled.sum() == 0)
    assert steps[1].time < steps[0].time


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"pp": 4}, ""),
        ({"pp": 1}, "a single pipeline stage is never idle"),
        ({"pp": 4, "model": replace(SMALL, mtp_num_layers=1)}, "multi-token prediction"),
        ({"pp": 4, "model": replace(SMALL, num_layers=7)}, "7 layers do not divide over 4 stages"),
    ],
)
def test_what_cannot_be_put_off(changes, why):
    given = job(**changes)
    assert why in undeferrable(given) and given.defer_weight_gradients == (not undeferrable(given))


def test_a_layer_is_a_part_and_the_output_layer_the_first_of_its_pass():
    given = job(pp=2, vpp=2)
    assert part_counts(given).tolist() == [[2, 2], [2, 3]]
    weights = _weight_gradients(given, np.array([10.0, 20.0]), np.array([1.0, 2.0]), np.array([5.0, 7.0]))
    assert weights.times[-1, -1].tolist() == [[5, 7], [1, 2], [1, 2]]
    assert weights.times[0, 0].tolist() == [[1, 2], [1, 2], [0, 0]]
    assert (weights.held[..., 1] == 2 * weights.held[..., 0]).all()


@pytest.mark.parametrize("profile", [{}, {"profile": FLOPS_PROFILE}], ids=["timed", "by work"])
def test_products_run_between_passes_and_no_more_of_them_than_there_are(profile):
    given = job(model=replace(MODELS["llama2-7b"], num_layers=8), pp=4, **profile)
    before = weight_gradients_before(given, shards_of(given, DOCUMENTS))
    assert before.shape == (2, 4, 1, 4)
    for stage in range(4):
        ops = given.schedule(4).ops(stage)
        ran = before[ops["backward"].astype(int), stage, ops["chunk"], ops["micro_batch"]]
        there = part_counts(given)[stage].sum() * np.append(0, ops["backward"][:-1].cumsum())
        assert (np.diff(ran) >= 0).all() and (ran <= there).all()
    assert before[:, 0].any()
