"""NCCL calls of ranks that match, and planted faults in them."""

import numpy as np
import pytest

from megatron_rehearsal import match as matching
from megatron_rehearsal.match import MAKING, Call
from megatron_rehearsal.record import RECORD, Kind
from megatron_rehearsal.run import chosen
from megatron_wlb.job import Parallel

PAIR, OTHER = ("0//cuda//0", (0, 1)), ("1//cuda//0", (0, 1))


def match(programs, one_queue):
    return matching.match(dict(enumerate(programs)), one_queue)


def call(rank, kind, group=PAIR, count=8, peer=-1, line="a.py:1"):
    return Call(rank, kind, group, (count, 7, 0), peer, (line, "step 1, backward 2"))


def run(stream, *calls):
    return Kind.ALL_REDUCE, stream, 0, list(calls)


def both(kind, **options):
    return [[run(1, call(rank, kind, **options))] for rank in (0, 1)]


def making(rank, group):
    return [run(MAKING, call(rank, Kind.COMMUNICATOR, group)), (Kind.SYNC_STREAM, MAKING, 0, [])]


def joined(*parts):
    return [[item for part in parts for item in part[rank]] for rank in (0, 1)]


def exchange(first, second, streams=(1, 1)):
    """Each rank sends to the other and receives, in this order."""
    kinds = ((first, second), (second, first))
    ranks = []
    for rank, order in enumerate(kinds):
        moves = {
            "send": run(streams[0], call(rank, Kind.SEND, OTHER if rank else PAIR, peer=1 - rank)),
            "receive": run(streams[1], call(rank, Kind.RECEIVE, PAIR if rank else OTHER, peer=1 - rank)),
        }
        ranks.append([moves[name] for name in order])
    return ranks


@pytest.mark.parametrize("one_queue", [True, False])
def test_calls_in_the_same_order_match(one_queue):
    made = [making(rank, PAIR) + making(rank, OTHER) for rank in (0, 1)]
    ended = [[(Kind.SYNC_DEVICE, 0, 0, [])]] * 2
    programs = joined(made, both(Kind.ALL_GATHER), both(Kind.REDUCE_SCATTER), exchange("send", "receive"), ended)
    assert match(programs, one_queue) == []


@pytest.mark.parametrize("one_queue", [True, False])
def test_a_swap_on_one_rank_is_found_with_its_line(one_queue):
    programs = joined(both(Kind.ALL_GATHER), both(Kind.REDUCE_SCATTER, line="b.py:2"))
    programs[1].reverse()
    (said,) = match(programs, one_queue)
    assert "rank 0 all_gather of 8 values at a.py:1 (step 1, backward 2)" in said
    assert "rank 1 reduce_scatter of 8 values at b.py:2" in said


def test_other_counts_are_found():
    send, receive = run(1, call(0, Kind.SEND, peer=1)), run(1, call(1, Kind.RECEIVE, count=9, peer=0))
    assert "of 9 values" in match([[send], [receive]], True)[0]


@pytest.mark.parametrize("one_queue", [True, False])
def test_communicators_made_in_another_order_wait_for_ever(one_queue):
    programs = [making(0, PAIR) + making(0, OTHER), making(1, OTHER) + making(1, PAIR)]
    assert ["communicator" in said and "waits for ever" in said for said in match(programs, one_queue)] == [True] * 2
    # A host makes one while a kernel waits for calls of others.
    behind = [run(1, call(0, Kind.ALL_GATHER)), (Kind.KERNEL, 1, 0, []), *making(0, OTHER)]
    assert match([behind, [*making(1, OTHER), run(1, call(1, Kind.ALL_GATHER))]], one_queue) == []


def test_groups_in_another_order_wait_for_ever():
    def gather(rank, group, stream):
        return [run(stream, call(rank, Kind.ALL_GATHER, group)), (Kind.KERNEL, stream, 0, [])]

    streams = [gather(0, PAIR, 1) + gather(0, OTHER, 2), gather(1, OTHER, 2) + gather(1, PAIR, 1)]
    assert match(streams, False) == []
    assert len(match(streams, True)) == 2 and "waits for ever" in match(streams, True)[0]
    one_stream = [gather(0, PAIR, 1) + gather(0, OTHER, 1), gather(1, OTHER, 1) + gather(1, PAIR, 1)]
    assert len(match(one_stream, False)) == 2


def test_sends_that_both_come_first_wait_for_ever():
    programs = exchange("send", "receive")
    programs[1].reverse()
    assert len(match(programs, False)) == 2
    grouped = [[run(1, *(c for item in part for c in item[3]))] for part in programs]
    assert match(grouped, True) == []
    streams = exchange("send", "receive", streams=(1, 2))
    streams[1].reverse()
    assert match(streams, False) == []


def test_an_event_orders_streams():
    """Rank 1 gathers only after what waits for rank 0's second gather: a circle over a stream's event."""
    gather = [run(1, call(0, Kind.ALL_GATHER)), run(2, call(0, Kind.ALL_GATHER, OTHER))]
    behind = [run(2, call(1, Kind.ALL_GATHER, OTHER)), (Kind.RECORD, 2, 5, []), (Kind.WAIT, 1, 5, [])]
    behind.append(run(1, call(1, Kind.ALL_GATHER)))
    assert match([gather, behind], False) == []
    waits = [gather[0], (Kind.RECORD, 1, 5, []), (Kind.SYNC_EVENT, 0, 5, []), gather[1]]
    assert len(match([waits, behind], False)) == 2


def test_a_host_that_waits_for_its_device_calls_nothing_more():
    """Until all of its streams have ended; one of them has at once."""
    ended = [run(3, call(rank, Kind.ALL_GATHER, ("2//cuda//0", (0, 1)))) for rank in (0, 1)]
    gathers = [run(1, call(0, Kind.ALL_GATHER)), run(2, call(0, Kind.ALL_GATHER, OTHER))]
    other = [ended[1], run(1, call(1, Kind.ALL_GATHER, OTHER)), run(1, call(1, Kind.ALL_GATHER))]
    assert match([[ended[0], *gathers], other], False) == []
    waits = [ended[0], gathers[0], (Kind.SYNC_DEVICE, 0, 0, []), gathers[1]]
    assert len(match([waits, other], False)) == 2


def test_ranks_that_did_not_run_call_what_others_call():
    four = ("2//cuda//0", (0, 1, 2, 3))
    moves = [run(1, call(rank, Kind.SEND, four, peer=rank + 2)) for rank in (0, 1)]
    programs = [[*part, move] for part, move in zip(both(Kind.ALL_GATHER, group=four), moves, strict=True)]
    assert match(programs, True) == []
    assert len(match([programs[0], programs[1][1:]], True)) == 1


def test_large_jobs_run_two_tensor_parallel_ranks_of_every_kind():
    job = Parallel(tp=8, cp=4, pp=2, dp=3)
    assert chosen(job, every=True) == [
        (s * 3 + d) * 32 + c * 8 + t for s in (0, 1) for d in (0, 2) for c in range(4) for t in (0, 1)
    ]
    assert chosen(Parallel(tp=8, cp=4, pp=2), every=True) == [*range(64)]
    assert chosen(job, every=False) == [(s * 3 + d) * 32 + c * 8 for s in (0, 1) for d in (0, 2) for c in (0, 3)]


def test_stages_may_be_numbered_before_data_parallel_ranks():
    job = Parallel(tp=2, pp=2, dp=3, stages_before_dp=True)
    assert chosen(job, every=False) == [0, 2, 8, 10] and chosen(job, every=True) == [*range(12)]
    assert [job.rank(stage, 1, 0, 1) for stage in (0, 1)] == [5, 7] and job.stage_stride == 2
    assert chosen(Parallel(tp=2, pp=2, dp=3), every=False) == [0, 4, 6, 10]


LINES = [["a.py:1", "step 0"], ["b.py:2", "step 0, forward 0"]]
RECORDS = [
    # kind, where, stream, object, amount, type, peer
    (Kind.COMMUNICATOR, 0, 0, 5, 0, 2, 0),
    (Kind.COPY_TO_HOST, 0, 3, 0, 4, 0, 0),
    (Kind.KERNEL, -1, 3, 0, 2, 0, 0),
    (Kind.GROUP_BEGIN, 0, 0, 0, 0, 0, 0),
    (Kind.GROUP_BEGIN, 0, 0, 0, 0, 0, 0),
    (Kind.SEND, 1, 3, 6, 8, 7, 1),
    (Kind.GROUP_END, 0, 0, 0, 0, 0, 0),
    (Kind.RECEIVE, 0, 4, 5, 9, 9, 0),
    (Kind.GROUP_END, 0, 0, 0, 0, 0, 0),
    (Kind.REDUCE, 1, 3, 5, 8, 7, 1),
    (Kind.RECORD, 0, 3, 11, 0, 0, 0),
    (Kind.MARK, 0, 0, 0, 0, 0, 0),
    (Kind.WAIT, 0, 4, 11, 0, 0, 0),
    (Kind.SYNC_STREAM, 1, 4, 0, 0, 0, 0),
]


def test_a_program_has_what_a_host_does_in_its_order():
    """Calls of a group are one item, with values that ranks must agree on: of a transfer no peer, else the root."""
    result = {"rank": 2, "lines": LINES, "communicators": {"5": ["x", [2, 4]], "6": ["y", [7, 9]]}}
    x, y, (a, b) = ("x", (2, 4)), ("y", (7, 9)), map(tuple, LINES)
    moves = [Call(2, Kind.SEND, y, (8, 7, 0), 9, b), Call(2, Kind.RECEIVE, x, (9, 9, 0), 2, a)]
    assert matching.program(result, np.array(RECORDS, RECORD)) == [
        (Kind.COMMUNICATOR, MAKING, 0, [Call(2, Kind.COMMUNICATOR, x, (0, 2, 0), -1, a)]),
        (Kind.SYNC_STREAM, MAKING, 0, []),
        (Kind.KERNEL, 3, 0, []),
        (Kind.ALL_REDUCE, 4, 0, moves),
        (Kind.ALL_REDUCE, 3, 0, [Call(2, Kind.REDUCE, x, (8, 7, 1), -1, b)]),
        (Kind.RECORD, 3, 11, []),
        (Kind.WAIT, 4, 11, []),
        (Kind.SYNC_STREAM, 4, 0, []),
    ]


def test_who_waits_is_told_with_all_that_wait_behind():
    gathers = [run(1, call(0, Kind.ALL_GATHER, count=16)), (Kind.SYNC_STREAM, 1, 0, []), (Kind.KERNEL, 1, 0, [])]
    idle = [(Kind.KERNEL, 1, 0, [])]
    behind = [run(1, call(1, Kind.ALL_GATHER, OTHER)), (Kind.SYNC_STREAM, 1, 0, [])]
    assert match([gathers, idle], True) == [
        "rank 0 all_gather of 16 values at a.py:1 (step 1, backward 2) waits for ever"
    ]
    waits = [(Kind.RECORD, 1, 5, []), (Kind.SYNC_EVENT, 0, 5, []), (Kind.KERNEL, 1, 0, [])]
    two_streams = [run(1, call(0, Kind.ALL_GATHER)), run(2, call(0, Kind.ALL_GATHER)), *waits]
    assert [said.split(" at ")[0] for said in match([two_streams, behind], True)] == [
        "rank 0 all_gather of 8 values",
        "rank 1 all_gather of 8 values",
    ]
    third = ("2//cuda//0", (0, 1, 2))
    three = [[run(1, call(rank, Kind.ALL_GATHER, third)), (Kind.SYNC_STREAM, 1, 0, [])] for rank in (0, 1)]
    other = [run(1, call(2, Kind.ALL_GATHER, ("3//cuda//0", (1, 2)))), run(1, call(2, Kind.ALL_GATHER, third))]
    assert [said.split(" at ")[0] for said in match([*three, other], True)][2:] == ["rank 2 all_gather of 8 values"]


def test_of_three_ranks_the_odd_one_is_named():
    three = ("2//cuda//0", (0, 1, 2))
    for odd in range(3):
        counts = [9 if rank == odd else 8 for rank in range(3)]
        (said,) = match([[run(1, call(r, Kind.ALL_GATHER, three, count=n))] for r, n in enumerate(counts)], True)
        assert said.startswith(f"rank {odd} all_gather of 9 values at a.py:1")
        assert f" meets rank {0 if odd else 1} all_gather of 8 " in said
    kinds = (Kind.ALL_GATHER, Kind.ALL_GATHER, Kind.ALL_REDUCE)
    (said,) = match([[run(1, call(r, kind, three))] for r, kind in enumerate(kinds)], True)
    assert said.startswith("rank 2 all_reduce of 8 values")
