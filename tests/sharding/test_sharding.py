"""Sharding over context-parallel ranks: exact partitions, equal shares, and the choice of the reference to the bit."""

from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_wlb import _native
from megatron_wlb.cost.attention import sharding_kernel
from megatron_wlb.documents import Keys, Near, Shard, Share
from megatron_wlb.hardware.profile import FLOPS_PROFILE, KernelModel, KernelTimes, load_profile
from megatron_wlb.job import STRATEGIES
from megatron_wlb.sharding.routing import document_begins, exchange, moved_rows, positions, rows
from megatron_wlb.sharding.select import divide, round_costs, shard
from tests.jobs import MODEL, job
from tests.reference.chunks import per_document, per_sequence
from tests.reference.hybrid import hybrid
from tests.reference.rounds import regrouped
from tests.reference.sharding import choose_sharding

FLOPS = sharding_kernel(job())
H100 = sharding_kernel(job(cp=8, profile=load_profile("h100-fa2")))
COARSE = KernelModel(tile_rows=8, launch=3.0, tile=1.0, query_tile=0.5, kv_chunks=2, exchange=0.25)
KERNELS = [FLOPS, H100, COARSE, replace(COARSE, hidden=0.75)]
PROFILES = [
    load_profile("h100-fa2"),
    load_profile("h100-cudnn"),
    replace(load_profile("h100-fa2"), name="fast", forward=KernelTimes(launch=1.0, tile=0.002, query_tile=0.01)),
    FLOPS_PROFILE,
]
COSTS = round_costs(job(cp=2))


def by_reference(call, *arguments):
    with patch.object(_native, "choose_sharding", choose_sharding):
        return call(*arguments)


SHARDINGS = {
    "per-sequence": per_sequence,
    "per-document": per_document,
    "hybrid, whole but for what does not fit": lambda lengths, cp: hybrid(lengths, cp, np.inf, COARSE),
    "hybrid, shared": lambda lengths, cp: hybrid(lengths, cp, 1 / 4, COARSE),
    "hybrid, spread over all": lambda lengths, cp: hybrid(lengths, cp, 0, COARSE),
}


@st.composite
def micro_batches(draw, max_length=10**6):
    """(lengths, cp), the last document padding the sum to a multiple of 2 * cp."""
    cp = draw(st.integers(1, 16))
    length = st.one_of(st.integers(1, 40), st.integers(1, max_length))
    lengths = draw(st.lists(length, min_size=1, max_size=24))
    padding = -sum(lengths) % (2 * cp)
    return np.array(lengths + [padding] * (padding > 0), np.int64), cp


plans = st.builds(lambda how, case: how(*case), st.sampled_from(list(SHARDINGS.values())), micro_batches(max_length=60))
twice_as_many = settings(max_examples=2 * settings().max_examples)


def segments_of(shard):
    return [tuple(map(int, row)) for call in shard.calls for row in call]


@pytest.mark.parametrize("sharding", SHARDINGS.values(), ids=SHARDINGS)
@given(micro_batches())
@example((np.array([32], np.int64), 16))
@example((np.array([1] * 32, np.int64), 16))
@example((np.array([10**6] * 24, np.int64), 1))
@example((np.array([10**6, *[1] * 23, 9], np.int64), 16))
@example((np.array([7, 25], np.int64), 16))
@example((np.array([8] * 24, np.int64), 3))
def test_shards_partition_the_micro_batch_into_equal_shares(sharding, case):
    lengths, cp = case
    plan = sharding(lengths, cp)
    assert [held.tokens for held in plan.shards] == [lengths.sum() // cp] * cp
    left = dict.fromkeys(range(len(lengths)), 0)
    for document, start, stop in sorted(s for held in plan.shards for s in segments_of(held)):
        assert left[document] == start < stop
        left[document] = stop
    assert list(left.values()) == lengths.tolist()
    for held in plan.shards:
        assert len(held.calls) <= 2
        # Each document at most once, in order.
        assert all((np.diff(call["document"]) > 0).all() for call in held.calls)


@twice_as_many
@given(plans)
def test_rows_and_positions(plan):
    begins = document_begins(plan.lengths)
    for held in plan.shards:
        expected = [(d, i) for d, start, stop in segments_of(held) for i in range(start, stop)]
        assert rows(plan.lengths, held).tolist() == [begins[d] + i for d, i in expected]
        assert positions(held).tolist() == [i for _, i in expected]


def sent_by(local, moved):
    """Of every rank's rows, those that it sends, by the rank that gets them."""
    return [
        np.split(r[m.sent_rows], np.cumsum(m.sent)[:-1]) if m.sent else [r[:0]] * len(moved)
        for r, m in zip(local, moved, strict=True)
    ]


@twice_as_many
@given(plans, st.integers(0, 12))
@example(per_sequence(np.array([4] * 8, np.int64), 2), 1)
def test_the_exchange_brings_every_key_and_takes_every_gradient_home(plan, window):
    plan, lengths, cp = regrouped(plan), plan.lengths, len(plan.shards)
    begins = document_begins(lengths)
    for number in {*plan.rounds, *plan.rounds_of(window)}:
        moved = [exchange(plan, rank, number) for rank in range(cp)]
        held = [np.concatenate(plan.calls(rank, number)) for rank in range(cp)]
        local = [rows(lengths, Shard(calls=(each,))) for each in held]
        assert {bool(m.sent) for m in moved} == {number is not Keys.WHOLE}
        assert any(map(len, held)), "a round of no document"
        sent = sent_by(local, moved)
        for rank, (r, m, segments) in enumerate(zip(local, moved, held, strict=True)):
            near = window if number == Near(window) else 1 << 30
            expected = sorted({begins[d] + i for d, i in keys_of(segments.tolist(), near)})
            arrived = [of[rank] for of in sent]
            assert not m.sent or tuple(map(len, arrived)) == m.received
            assert m.causal
            queries = [np.arange(row, row + (call["stop"] - call["start"]).sum()) for row, call in m.calls]
            assert np.concatenate([np.empty(0, int), *queries]).tolist() == list(range(len(r)))
            keys = np.concatenate((*arrived, r))[m.gather]
            assert keys.tolist() == expected
            # What arrives goes back along the same way.
            assert keys[m.arrived_keys].tolist() == np.concatenate(arrived).tolist()
            assert keys[m.own_keys].tolist() == r.tolist()
            # In a call, queries are the last keys that they see.
            for row, call in m.calls:
                for run, start, stop in call.tolist():
                    seen = keys[m.key_begins[run] :][start:stop]
                    assert seen.tolist() == r[row : row + stop - start].tolist()
                    row += stop - start


def keys_of(segments, window):
    """The keys that queries of segments see, as (document, position)."""
    return {(d, i) for d, start, stop in segments for i in range(max(0, start - window), stop)}


@twice_as_many
@given(plans)
def test_parts_bring_every_key_of_other_ranks_once(plan):
    """What a rank sends in a part is what the other expects, and all parts together are what moves at once."""
    plan, cp = regrouped(plan, (0.0, 0.1, 0.5, 1.0)), len(plan.shards)
    received = np.zeros(cp, np.int64)
    for number in plan.rounds:
        moved = [exchange(plan, rank, number) for rank in range(cp)] if isinstance(number, Share) else []
        for rank, m in enumerate(moved):
            assert list(m.received) == [other.sent[rank] for other in moved]
            assert sum(m.sent) == len(m.sent_rows) and sum(m.received) == len(m.arrived_keys)
            received[rank] += sum(m.received)
    assert received.tolist() == moved_rows(plan)[:, 0].tolist()


@twice_as_many
@given(plans)
def test_queries_see_every_key_before_their_segment_in_one_part(plan):
    """The keys of their own segment they see in a round before."""
    plan, cp = regrouped(plan, (0.0, 0.1, 0.5, 1.0)), len(plan.shards)
    parts = [of for of in plan.rounds if isinstance(of, Share)]
    begins = document_begins(plan.lengths)
    held = [np.concatenate(plan.calls(rank, Keys.OWN)) for rank in range(cp)] if parts else []
    local = [rows(plan.lengths, Shard(calls=(segments,))) for segments in held]
    seen = [[[] for _ in segments] for segments in held]
    for of in parts:
        moved = [exchange(plan, rank, of) for rank in range(cp)]
        sent = sent_by(local, moved)
        for rank, m in enumerate(moved):
            assert not m.causal
            keys = np.concatenate((*(each[rank] for each in sent), local[rank][: m.own_rows]))[m.gather]
            first_rows = document_begins(held[rank]["stop"] - held[rank]["start"])[:-1].tolist()
            for row, call in m.calls:
                for document, start, stop in call.tolist():
                    first = m.key_begins[document]
                    seen[rank][first_rows.index(row)] += keys[first : first + stop].tolist()
                    row += stop - start
    for segments, found in zip(held, seen, strict=True):
        for (document, start, _), keys in zip(segments.tolist(), found, strict=True):
            assert sorted(keys) == list(range(begins[document], begins[document] + start))


@twice_as_many
@given(plans, st.none() | st.integers(0, 12))
@example(per_sequence(np.array([4] * 8, np.int64), 2), None)
def test_moved_rows_are_the_keys_that_others_hold(plan, window):
    cp = len(plan.shards)
    held, seen = ([set() for _ in range(cp)] for _ in range(2))
    for rank, each in enumerate(plan.shards):
        for document, start, stop in segments_of(each):
            held[rank] |= {(document, i) for i in range(start, stop)}
        seen[rank] = keys_of(segments_of(each), 1 << 30 if window is None else window)
    expected = [
        (len(seen[r] - held[r]), sum(len(held[r] & seen[other]) for other in range(cp) if other != r))
        for r in range(cp)
    ]
    assert moved_rows(plan, window).tolist() == [list(pair) for pair in expected]


@twice_as_many
@given(micro_batches(), st.sampled_from(list(STRATEGIES)), st.sampled_from(KERNELS))
@example((np.array([1] * 64, np.int64), 16), "auto", H100)
@example((np.array([131072], np.int64), 4), "auto", H100)
@example((np.array([70000, 61072], np.int64), 4), "auto", H100)
def test_the_choice_is_as_by_the_reference(case, strategy, kernel):
    assert_equal(divide(*case, strategy, kernel), by_reference(divide, *case, strategy, kernel))


def assert_equal(ours, theirs):
    """To the bit."""
    calls = [[call for shard in plan.shards for call in shard.calls] for plan in (ours, theirs)]
    for mine, its in zip([ours.lengths, *calls[0]], [theirs.lengths, *calls[1]], strict=True):
        np.testing.assert_array_equal(mine, its)
    assert (ours.strategy, ours.time, ours.rounds) == (theirs.strategy, theirs.time, theirs.rounds)


@st.composite
def jobs(draw):
    """Whatever sharding and its rounds depend on."""
    heads, groups = draw(st.sampled_from([(64, 1), (64, 2), (56, 7), (64, 8), (56, 56), (64, 64)]))
    changes = {
        "cp": draw(st.sampled_from([1, 2, 3, 4, 8, 16])),
        "tp": draw(st.sampled_from([1, 4, 8])),
        "model": replace(MODEL, kv_channels=128, num_attention_heads=heads, num_query_groups=groups),
        "profile": draw(st.sampled_from(PROFILES)),
        "cp_sharding": draw(st.sampled_from(list(STRATEGIES))),
        "cp_exchange": draw(st.sampled_from(["shared", "shared", "shared", "latents", "all", "ring"])),
    }
    if changes["cp_exchange"] == "latents":
        changes["model"] = replace(changes["model"], kv_lora_rank=512)
    changes["model"] = replace(changes["model"], window=128, pattern=draw(st.sampled_from("*W")))
    return job(context_length=3 << 16, **changes)


job_lengths = st.lists(
    st.one_of(st.integers(1, 300), st.sampled_from([128, 4096]), st.integers(1, 60_000)), max_size=12
)


@settings(max_examples=300)
@given(job_lengths, jobs())
@example([], job(cp=4, context_length=3 << 16))
def test_a_job_is_sharded_as_by_the_reference(lengths, planned):
    lengths = np.array(lengths, np.int64)
    assert_equal(shard(lengths, planned), by_reference(shard, lengths, planned))


@pytest.mark.parametrize("lengths", [[], [1], [7, 30, 3], [16, 16]])
@pytest.mark.parametrize(("cp", "tp"), [(1, 1), (1, 4), (2, 1), (2, 4), (4, 2)])
def test_a_micro_batch_is_padded_once_at_its_end(lengths, cp, tp):
    planned = job(cp=cp, tp=tp)
    plan = shard(np.array(lengths, np.int64), planned)
    padding = -sum(lengths) % planned.unit_tokens if lengths else planned.unit_tokens
    assert plan.lengths.tolist() == lengths + [padding] * (padding > 0)
    assert [held.tokens for held in plan.shards] == [plan.lengths.sum() // cp] * cp


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"length": [3]}, "has 3 tokens; it must be a multiple of 4"),
        ({"length": []}, "the micro-batch is 0"),
        ({"length": [4, 0]}, "length is 0"),
        ({"length": [4, -4]}, "length is -4"),
        ({"length": [1 << 62, 1 << 62]}, "length is"),
        ({"length": [1 << 26, 1 << 26]}, "the micro-batch is"),
        ({"cp_size": 0}, "cp_size is 0"),
        ({"strategies": ["best"]}, "unknown sharding best"),
        ({"strategies": []}, "nothing is tried"),
        ({"kernel": replace(FLOPS, tile_rows=2)}, "rounds have tiles of another size"),
        ({"costs": replace(COSTS, backward=COARSE)}, "forward and backward have tiles of different sizes"),
        ({"costs": replace(COSTS, key_bounds=((0.0,),))}, "key bounds must be two or more from 0 to 1"),
        ({"costs": replace(COSTS, key_bounds=((0.0, 1.5),))}, "key bounds must be two or more from 0 to 1"),
        ({"costs": replace(COSTS, key_bounds=((0.0, np.nan),))}, "key bounds must be two or more from 0 to 1"),
    ],
)
def test_what_cannot_be_sharded_is_refused(changes, message):
    def chosen(length=(8,), cp_size=2, strategies=("per-sequence",), kernel=FLOPS, costs=COSTS):
        _native.choose_sharding(np.array(length, np.int64), cp_size, strategies, [], kernel, costs)

    chosen()
    with pytest.raises(ValueError, match=message):
        chosen(**changes)


def test_a_window_receives_a_window_for_each_of_its_pieces():
    """Of a document of 128K on all of 8 ranks: 114,688 rows without."""
    plan = per_sequence(np.array([1 << 17], np.int64), 8)
    busiest = {window: int(moved_rows(plan, window)[:, 0].max()) for window in (None, 127, 1023, 4095)}
    assert busiest == {None: 114_688, 127: 254, 1023: 2046, 4095: 8190}
