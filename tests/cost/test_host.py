"""Launches by the host: what graphs take away, and what a GPU waits."""

from dataclasses import replace

import numpy as np
import pytest

from megatron_wlb.cost.host import launches, waiting
from megatron_wlb.hardware.profile import load_profile
from megatron_wlb.layers import KINDS
from megatron_wlb.layers.experts import EXPERT_US
from megatron_wlb.model import FULL, MODELS
from megatron_wlb.simulate.passes import crossover, pass_times
from megatron_wlb.simulate.step import breakdown, simulate_step
from tests.jobs import job
from tests.simulate.shards import shards_of

LAUNCHES_US = {module: us for kind in KINDS for module, us in kind.modules.items()}
QWEN, DENSE = MODELS["qwen3-30b-a3b"], MODELS["llama3-8b"]


def experts_job(**changes):
    sizes = {"model": replace(QWEN, num_layers=4), "ep": 8, "dp": 8, "num_micro_batches": 8, "context_length": 4096}
    return job(**sizes | {"profile": load_profile("h100-cudnn")} | changes)


@pytest.mark.parametrize(
    ("graphs", "left"),
    [
        ((), {"attn", "moe_router", "moe"}),
        (("moe_preprocess", "moe_router"), {"attn", "moe"}),
        (("attn", "moe_preprocess", "moe_router"), {"moe"}),
        (("attn", "moe"), set()),
        (("full",), set()),
        (("mlp", "mamba"), {"attn", "moe_router", "moe"}),
    ],
)
def test_graphs_take_launches_of_their_modules_away(graphs, left):
    """Of 128 experts, a rank has 16, whose launches are those of moe."""
    given = experts_job(cuda_graphs=graphs)
    for each, casts in ((given, False), (replace(given, precision="tensorwise"), True)):
        expected = sum(LAUNCHES_US[name] for name in left) + ("moe" in left) * 16 * EXPERT_US[casts]
        assert sum(launches(each, FULL)) == pytest.approx(expected)
    forward, backward = launches(given, FULL)
    assert backward == pytest.approx(2 * forward)


def test_a_dense_layer_has_no_experts():
    given = experts_job(model=DENSE, ep=1)
    assert sum(launches(given, FULL)) == pytest.approx(LAUNCHES_US["attn"] + LAUNCHES_US["mlp"])


def test_a_pass_takes_at_least_as_long_as_its_launches_and_as_its_kernels():
    busy = np.array([0.0, 1.0, 1e3, 1e6])
    total = busy + waiting(1e3, busy)
    assert (total >= np.maximum(busy, 1e3)).all() and (total <= busy + 1e3).all()
    np.testing.assert_allclose(total[[0, 3]], (1e3, 1e6))
    np.testing.assert_allclose(waiting(0.0, busy), 0, atol=1e-9)


def test_short_micro_batches_are_bound_by_the_host_and_long_ones_are_not():
    given = experts_job()
    free = replace(given, cuda_graphs=("full",))
    for tokens, most in ((64, 20.0), (4096, 1.5)):
        bound, alone = (pass_times(each, shards_of(each, [[tokens]])) for each in (given, free))
        assert bound.forward.sum() < most * alone.forward.sum()
        assert bound.forward.sum() >= 4 * launches(given, FULL)[0]
        assert (bound.layers[0].launches > 0).all() and not alone.layers[0].launches.any()
    assert crossover(given) == crossover(free)


def test_waiting_for_launches_is_a_part_of_a_step():
    given = experts_job(num_micro_batches=16)
    step, free = (
        simulate_step(each, [shards_of(each, [[4096], [4096]])] * 8)
        for each in (given, replace(given, cuda_graphs=("full",)))
    )
    lost = breakdown(step)
    assert lost.launches > 0 == breakdown(free).launches and lost.cp_wait == pytest.approx(0, abs=1e-6)
    assert lost.launches == pytest.approx(step.time - free.time)
