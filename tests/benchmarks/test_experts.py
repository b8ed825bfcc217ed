"""Constants of experts, fitted without a group."""

import numpy as np
import pytest

from benchmarks import experts
from megatron_wlb.layers import experts as layer
from megatron_wlb.layers.mamba import Mamba


def test_constants_are_others_for_a_while():
    with experts.constants(2 * experts.SHIPPED):
        assert 2 * experts.SHIPPED[4] == layer.OVERLAP_HIDES and Mamba.modules["mamba"] == 2 * experts.SHIPPED[0]
        assert dict(zip((False, True), 2 * experts.SHIPPED[5:], strict=True)) == layer.COPY_PASSES
    assert experts.SHIPPED[4] == layer.OVERLAP_HIDES and Mamba.modules["mamba"] == experts.SHIPPED[0]


def test_a_fit_finds_the_constants_that_rows_are_made_of_whatever_one_of_them_says():
    rng = np.random.default_rng(0)
    slopes, change = rng.normal(size=(60, len(experts.FITTED))), np.array([0.3, -0.2, 0.5, 0.1, -0.1, 1.0, 1.4])
    errors = -slopes @ change
    found = experts.fitted(errors, slopes, np.ones(60))
    np.testing.assert_allclose(found, experts.SHIPPED * (1 + change), rtol=1e-6)
    errors[7] += 50
    np.testing.assert_allclose(experts.fitted(errors, slopes, np.ones(60)), found, rtol=0.02)


def test_a_group_is_predicted_by_constants_of_the_others():
    """Errors of a model are its own, so its left-out errors are larger than those of a fit to all."""
    names = ("Qwen3 30B", "Grok-1") * 4
    rows = [
        {"model": {"name": name}, "source": "here", "hardware": "H100", "sequence": i} for i, name in enumerate(names)
    ]

    def predict(some):
        launches = np.log(layer.Experts.modules["moe"] / experts.SHIPPED[2])
        return np.array([0.1 * (row["model"]["name"] == "Grok-1") - launches for row in some])

    shipped, model, release, *_ = experts.left_out(rows, predict)
    assert shipped["p90_error"] == pytest.approx(0.1) and model["groups"] == 2 and release["groups"] == 1
    assert model["median_error"] == pytest.approx(0.1, abs=0.01)
    least, most = model["constants"]["of experts, us"]
    assert least == pytest.approx(experts.SHIPPED[2], rel=1e-3) and most == pytest.approx(
        1.1 * experts.SHIPPED[2], rel=0.01
    )


def test_the_range_of_a_model_is_that_of_others():
    rows = [{"model": {"name": name}} for name in ("Qwen3 30B", "Qwen3 30B", "Grok-1", "Grok-1")]
    assert experts.within(rows, np.array([1.0, 2.0, 1.5, 1.6])) == 0.5
