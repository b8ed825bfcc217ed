"""Whether a rehearsed job fits, and what is said of it."""

import numpy as np
import pytest

from megatron_rehearsal.record import RECORD, WARM, Kind, summary
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


def test_retries_count_once_the_allocator_is_warm():
    steps = [{"retries": number, "allocated": number << 30} for number in (50, 40, 2, 1)]
    result = {"rank": 0, "steps": steps, "lines": [], "communicators": {}, "weights": 0, "passes": [], "left_out": []}
    found = summary(result, np.empty(0, RECORD))
    assert WARM == 2 and (found["retries"], found["allocated_gib"], found["predicted_gib"]) == (3, 50, None)


def test_a_rank_is_told_by_its_last_step():
    """Between the last two marks of its host; communicators of all, and lines of those that steps made."""
    row = [
        (Kind.COMMUNICATOR, 0, 0, 5, 0, 2, 0),
        (Kind.MARK, 0, 0, 0, 0, 0, 0),
        (Kind.SYNC_DEVICE, 1, 0, 0, 0, 0, 0),
        (Kind.COMMUNICATOR, 1, 0, 6, 0, 3, 0),
        (Kind.MARK, 0, 0, 0, 0, 0, 0),
        (Kind.KERNEL, 0, 0, 0, 70, 0, 0),
        (Kind.MARK, 0, 0, 0, 0, 0, 0),
        *[(kind, 1, 0, 0, 0, 0, 0) for kind in (Kind.SYNC_EVENT, Kind.SYNC_STREAM)],
        *[(Kind.SYNC_DEVICE, place, 0, 0, 0, 0, 0) for place in (0, -1, 1)],
        *[(Kind.COPY_TO_HOST, 0, 0, 0, 4, 0, 0)] * 2,
        *[(Kind.KERNEL, -1, 0, 0, amount, 0, 0) for amount in (2, 3)],
        *[(kind, 0, 0, 6, 100, 7, 0) for kind in (Kind.SEND, Kind.ALL_GATHER, Kind.SEND)],
        (Kind.ALL_GATHER, 0, 0, 5, 10, 9, 0),
        (Kind.MARK, 0, 0, 0, 0, 0, 0),
        (Kind.KERNEL, 0, 0, 0, 700, 0, 0),
    ]
    steps = [
        {"retries": 0, "allocated": a << 30, "reserved": r << 30, "predicted": p << 30}
        for a, r, p in ((3, 9, 1), (5, 8, 2))
    ]
    result = {"rank": 4, "steps": steps, "lines": [["a.py:1", ""], ["b.py:2", ""]], "error": "OutOfMemoryError"}
    result |= {
        "communicators": {"5": ["x", [2, 4]], "6": ["y", [7, 8, 9]]},
        "weights": 1,
        "passes": [[0]],
        "left_out": ["z"],
    }
    assert summary(result, np.array(row, RECORD)) == {
        **{"rank": 4, "predicted_gib": 2.0, "allocated_gib": 5.0, "reserved_gib": 9.0, "retries": 0},
        **{"out_of_memory": "OutOfMemoryError", "syncs_per_step": 4, "copies_per_step": 2, "launches": 5},
        **{"syncs": {"b.py:2": 3, "a.py:1": 1}, "copies_to_host": {"a.py:1": 2}},
        **{"communicators": 2, "made_in_steps": {"b.py:2": 1}},
        "nccl": {
            "all_gather of 2": {"calls": 1, "bytes": 20},
            "all_gather of 3": {"calls": 1, "bytes": 400},
            "send of 3": {"calls": 2, "bytes": 800},
        },
        **{"steps": steps, "weights": 1, "passes": [[0]], "left_out": ["z"]},
    }
