"""Other ways to train a run, by hand."""

from types import SimpleNamespace

import pytest

from megatron_wlb.describe import alternatives


@pytest.mark.parametrize(
    ("budget", "mine", "others", "expected"),
    [(10.0, 5.0, 7.0, 8.0), (10.0, 7.0, 5.0, 12.0), (None, 5.0, 7.0, None), (10.0, None, 7.0, None)],
)
def test_activations_have_less_memory_where_weights_take_more(budget, mine, others, expected):
    run = SimpleNamespace(budget=budget, held_bytes={"job": mine}.get)
    other = SimpleNamespace(job=lambda: "other", held_bytes={"other": others}.get)
    assert alternatives._budget_in(run, "job", other) == expected
