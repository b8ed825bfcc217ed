"""Whether a rehearsed job fits, and what is said of it."""

import pytest

from megatron_rehearsal.run import verdict
from megatron_rehearsal.task import GPUS, Task

RANK = {"out_of_memory": None, "retries": 0, "reserved_gib": 40.0, "allocated_gib": 30.0, "predicted_gib": 30.0}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, "fits"),
        ({"out_of_memory": "OutOfMemoryError"}, "does not fit rank 3 runs out of memory; give a smaller --wlb-max-tok"),
        ({"retries": 1}, "thrashes rank 3 reserves 40.0 of 80.0 GiB and frees cached memory 1 times; give a smaller"),
        ({"reserved_gib": 76.1}, "thrashes rank 3 reserves 76.1 of 80.0 GiB and frees cached memory 0 times"),
        ({"reserved_gib": 75.9}, "fits"),
        # A twentieth, or a quarter of a GiB where that is more.
        ({"predicted_gib": 31.4}, "fits"),
        ({"predicted_gib": 28.4}, "fits rank 3 allocates 30.00 GiB where 28.40 were predicted: --wlb-max-tokens auto"),
        ({"allocated_gib": 1.0, "predicted_gib": 1.24}, "fits"),
        ({"allocated_gib": 1.0, "predicted_gib": 1.26}, "fits rank 3 allocates 1.00 GiB where 1.26 were predicted"),
    ],
)
def test_the_worst_rank_decides(change, said):
    sizes = {"world_size": 8, "steps": 6, "vocab_size": 9, "mock_data": True}
    task = Task(gpu=GPUS["h100"], script=[], flags=[], wlb=True, **sizes)
    ranks = [RANK | {"rank": 2}, RANK | {"rank": 3} | change, RANK | {"rank": 4}]
    found = " ".join(verdict(ranks, task, [], modelled=True)).strip()
    assert found.startswith(said) and (said != "fits" or found == said)
    if "predicted" in said:
        assert verdict(ranks, task, [], modelled=False) == ("fits", "")
    assert verdict(ranks, task, ["a swap"], modelled=True) == ("hangs", "a swap; report it with the flags")
