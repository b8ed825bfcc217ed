"""Sharding over context-parallel ranks: exact partitions, equal shares, and encodings that say the same."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_wlb.plan import native
from megatron_wlb.plan.sharding import (
    hybrid,
    mirrored_order,
    per_document,
    per_sequence,
    predicted_time,
    rank_work,
    shard,
)
from megatron_wlb.plan.sharding.exchange import exchange
from megatron_wlb.plan.sharding.segments import document_begins, encode, positions, ranges, rows
from megatron_wlb.plan.sharding.select import STRATEGIES, candidates
from megatron_wlb.plan.workload import FLOPS_PROFILE, KernelModel, load_profile

patient = settings(deadline=None)

FLOPS = FLOPS_PROFILE.kernel(heads=2)
H100 = load_profile("h100-fa2").kernel(heads=4, row_bytes=2048, head_groups=2)
KERNELS = [FLOPS, H100, KernelModel(tile_rows=8, launch=3.0, tile=1.0, query_tile=0.5, exchange=0.25)]


def hybrids(lengths, cp_size):
    """The best of several hybrids; of tiles so large, too."""
    return shard(lengths, cp_size, "hybrid", KERNELS[2], use_native=False)


SHARDINGS = [per_sequence, per_document, hybrids]


@st.composite
def micro_batches(draw, max_length=10**6):
    """(lengths, cp_size), the last document padding the sum to a multiple of 2 * cp_size."""
    cp_size = draw(st.integers(1, 16))
    length = st.one_of(st.integers(1, 40), st.integers(1, max_length))
    lengths = draw(st.lists(length, min_size=1, max_size=24))
    padding = -sum(lengths) % (2 * cp_size)
    return np.array(lengths + [padding] * (padding > 0), np.int64), cp_size


small = micro_batches(max_length=60)


def segments_of(shard):
    return [tuple(map(int, row)) for colour in shard.colours for row in colour]


@pytest.mark.parametrize("sharding", SHARDINGS)
@patient
@given(micro_batches())
@example((np.array([32], np.int64), 16))
@example((np.array([10**6] * 24, np.int64), 1))
def test_shards_partition_the_micro_batch(sharding, case):
    lengths, cp_size = case
    plan = sharding(lengths, cp_size)
    assert len(plan.shards) == cp_size
    left = dict.fromkeys(range(len(lengths)), 0)
    for document, start, stop in sorted(s for held in plan.shards for s in segments_of(held)):
        assert left[document] == start < stop
        left[document] = stop
    assert list(left.values()) == lengths.tolist()


@pytest.mark.parametrize("sharding", SHARDINGS)
@patient
@given(micro_batches())
@example((np.array([1] * 32, np.int64), 16))
def test_ranks_hold_equally_many_tokens(sharding, case):
    lengths, cp_size = case
    assert {held.tokens for held in sharding(lengths, cp_size).shards} == {lengths.sum() // cp_size}


@pytest.mark.parametrize("sharding", SHARDINGS)
@patient
@given(micro_batches())
def test_a_colour_holds_each_document_once_and_in_order(sharding, case):
    for held in sharding(*case).shards:
        assert len(held.colours) <= 2
        for colour in held.colours:
            assert (np.diff(colour["document"]) > 0).all()
            assert (colour["stop"] > colour["start"]).all()


@patient
@given(small)
def test_per_sequence_ranks_hold_mirrored_chunks(case):
    lengths, cp_size = case
    chunks = np.arange(lengths.sum()).reshape(2 * cp_size, -1)
    for i, held in enumerate(per_sequence(lengths, cp_size).shards):
        expected = np.concatenate((chunks[i], chunks[2 * cp_size - 1 - i]))
        assert np.array_equal(rows(lengths, held), expected)


@patient
@given(micro_batches())
def test_per_document_chunks_differ_by_one_token_at_most(case):
    lengths, cp_size = case
    cuts = {document: [] for document in range(len(lengths))}
    for held in per_document(lengths, cp_size).shards:
        documents = [document for document, _, _ in segments_of(held)]
        assert all(documents.count(document) <= 2 for document in documents)
        for document, start, stop in segments_of(held):
            cuts[document].append(stop - start)
    for document, sizes in cuts.items():
        sizes += [0] * (2 * cp_size - len(sizes))
        assert len(sizes) == 2 * cp_size
        assert max(sizes) - min(sizes) <= (lengths[document] % (2 * cp_size) > 0)


@patient
@given(st.integers(1, 16), st.lists(st.integers(1, 30_000), min_size=1, max_size=24))
def test_per_document_work_is_equal_when_lengths_divide(cp_size, multiples):
    lengths = 2 * cp_size * np.array(multiples, np.int64)

    def multiplies(shard):
        return sum(stop * (stop + 1) // 2 - start * (start + 1) // 2 for _, start, stop in segments_of(shard))

    assert {cp_size * multiplies(held) for held in per_document(lengths, cp_size).shards} == {
        int((lengths * (lengths + 1) // 2).sum())
    }


@pytest.mark.parametrize("sharding", SHARDINGS)
@patient
@given(micro_batches())
@example((np.array([1, 1], np.int64), 1))
@example((np.array([32], np.int64), 16))
def test_encoding_spans_all_keys_and_holds_the_segments(sharding, case):
    plan = sharding(*case)
    for rank in range(case[1]):
        begins = exchange(plan, rank).key_begins
        for colour in plan.shards[rank].colours:
            call = encode(begins, colour)
            q, k = np.diff(call.cu_q), np.diff(call.cu_k)
            assert call.cu_q.dtype == call.cu_k.dtype == np.int32
            assert (call.cu_q[0], call.cu_k[0], call.cu_k[-1]) == (0, 0, begins[-1])
            assert (q >= 0).all() and (k > 0).all()
            assert (call.max_q, call.max_k) == (q.max(), k.max())
            entries = q > 0
            assert q[entries].tolist() == (colour["stop"] - colour["start"]).tolist()
            assert call.cu_k[:-1][entries].tolist() == begins[colour["document"]].tolist()
            assert k[entries].tolist() == colour["stop"].tolist()


@pytest.mark.parametrize("sharding", SHARDINGS)
@patient
@given(small)
def test_rows_and_positions(sharding, case):
    lengths, cp_size = case
    begins = document_begins(lengths)
    for held in sharding(lengths, cp_size).shards:
        expected = [(d, i) for d, start, stop in segments_of(held) for i in range(start, stop)]
        assert rows(lengths, held).tolist() == [begins[d] + i for d, i in expected]
        assert positions(held).tolist() == [i for _, i in expected]


@pytest.mark.parametrize("sharding", SHARDINGS)
@patient
@given(small)
@example((np.array([4] * 8, np.int64), 2))
def test_the_exchange_brings_every_key_and_takes_every_gradient_home(sharding, case):
    lengths, cp_size = case
    plan = sharding(lengths, cp_size)
    moved = [exchange(plan, rank) for rank in range(cp_size)]
    local = [rows(lengths, held) for held in plan.shards]
    nothing = -1
    pool = np.concatenate(
        [
            np.pad(r[m.sent_rows], (0, m.num_sent - len(m.sent_rows)), constant_values=nothing)
            for r, m in zip(local, moved, strict=True)
        ]
    )
    begins = document_begins(lengths)
    for r, m, held in zip(local, moved, plan.shards, strict=True):
        seen = {}
        for document, _, stop in segments_of(held):
            seen[document] = max(seen.get(document, 0), stop)
        expected = [begins[d] + i for d in sorted(seen) for i in range(seen[d])]
        keys = np.concatenate((pool, r))[m.gather]
        assert keys.tolist() == expected
        # What arrives goes back along the same way, and what nobody here has a key for counts as nothing.
        back = np.append(keys, nothing)[m.scatter]
        assert ((back == pool) | (back == nothing)).all()
        assert sorted(np.concatenate((m.sent_rows, m.own_rows)).tolist()) == list(range(len(r)))
        assert keys[m.own_keys].tolist() == r[m.own_rows].tolist()
        homes = {d for other in plan.shards if other is not held for d, _, _ in segments_of(other)}
        alone = [begins[d] + i for d, start, stop in segments_of(held) if d not in homes for i in range(start, stop)]
        assert r[m.own_rows].tolist() == alone


@patient
@given(micro_batches(), st.integers(0, 30), st.sampled_from(KERNELS))
def test_hybrid_cuts_few_short_documents_and_long_ones_in_tiles(case, num_long, kernel):
    lengths, cp_size = case
    num_long = min(num_long, len(lengths))
    plan = hybrid(lengths, cp_size, num_long, kernel)
    if plan is None:
        assert num_long >= 2
        return
    order = np.argsort(-lengths, kind="stable")
    pieces = {d: [] for d in range(len(lengths))}
    for rank, held in enumerate(plan.shards):
        for document, start, stop in segments_of(held):
            pieces[document].append((start, stop, rank))
    cut = [d for d in order[num_long:].tolist() if len(pieces[d]) > 1]
    assert len(cut) <= max(0, cp_size - 1)
    for d in cut:
        ranks = [rank for *_, rank in pieces[d]]
        assert len(set(ranks)) == len(ranks)
    for d in order[: max(0, num_long - 1)].tolist():
        partial = [stop - start for start, stop, _ in pieces[d] if (stop - start) % kernel.tile_rows]
        assert len(partial) <= 1
        assert len(pieces[d]) <= 2 * cp_size


@pytest.mark.parametrize("strategy", STRATEGIES)
@patient
@given(micro_batches(), st.sampled_from(KERNELS))
@example((np.array([1] * 64, np.int64), 16), H100)
@example((np.array([131072], np.int64), 4), H100)
@example((np.array([70000, 61072], np.int64), 4), H100)
def test_native_and_python_choose_the_same(strategy, case, kernel):
    lengths, cp_size = case
    ours, theirs = (shard(lengths, cp_size, strategy, kernel, use_native=native) for native in (True, False))
    assert ours.strategy == theirs.strategy
    assert ours.time == theirs.time or cp_size == 1
    for x, y in zip(ours.shards, theirs.shards, strict=True):
        assert all(np.array_equal(c, d) for c, d in zip(x.colours, y.colours, strict=True))


@patient
@given(micro_batches(), st.sampled_from(KERNELS))
def test_the_choice_is_the_fastest_by_the_model(case, kernel):
    lengths, cp_size = case
    if cp_size == 1:
        assert shard(lengths, 1, "adaptive", kernel, use_native=True).strategy == "whole"
        return
    chosen = shard(lengths, cp_size, "adaptive", kernel, use_native=True)
    times = [predicted_time(plan, kernel) for plan in candidates(lengths, cp_size, STRATEGIES["adaptive"], kernel)]
    assert chosen.time == predicted_time(chosen, kernel) == min(times)


def test_exchange_counts_where_attention_is_even():
    """Two documents per rank, whole or cut: cut, every key would travel."""
    lengths = np.full(4, 256, np.int64)
    kernel = KernelModel(tile_rows=1, launch=0.0, tile=1.0, query_tile=0.0, exchange=1.0)
    assert exchange(shard(lengths, 2, "adaptive", kernel, use_native=True), 0).num_sent == 0
    assert exchange(per_document(lengths, 2), 0).num_sent == 512


@patient
@given(st.lists(st.integers(1, 1000), min_size=1, max_size=30))
def test_mirrored_order_has_the_longest_in_the_middle(lengths):
    lengths = np.array(lengths, np.int64)
    order = mirrored_order(lengths)
    assert sorted(order.tolist()) == list(range(len(lengths)))
    middle = len(lengths) // 2
    assert (np.diff(lengths[order][: middle + 1]) >= 0).all()
    assert (np.diff(lengths[order][middle:]) <= 0).all()


def test_mirrored_order_evens_out_per_sequence_shards():
    lengths = np.array([100, 1000, 100, 4000, 100, 2000, 892], np.int64)
    given_order, mirrored = (
        rank_work(per_sequence(x, 4), FLOPS).max() for x in (lengths, lengths[mirrored_order(lengths)])
    )
    assert mirrored < given_order


@pytest.mark.parametrize(
    ("lengths", "cp_size", "strategies", "message"),
    [
        ([3], 2, ["per-sequence"], "has 3 tokens; it must be a multiple of 4"),
        ([], 2, ["per-sequence"], "the micro-batch is 0"),
        ([4, 0], 2, ["per-sequence"], "length is 0"),
        ([4, -4], 2, ["per-sequence"], "length is -4"),
        ([1 << 62, 1 << 62], 2, ["hybrid"], "length is"),
        ([1 << 26, 1 << 26], 2, ["hybrid"], "the micro-batch is"),
        ([4], 0, ["per-sequence"], "cp_size is 0"),
        ([4], 2, ["best"], "unknown sharding best"),
        ([4], 2, [], "none of the 0 strategies"),
    ],
)
def test_the_native_core_refuses(lengths, cp_size, strategies, message):
    with pytest.raises(ValueError, match=message):
        native.shard(np.array(lengths, np.int64), cp_size, strategies, [1], FLOPS)


@patient
@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 9))))
def test_ranges_concatenate(pairs):
    starts, counts = np.array(pairs, np.int64).reshape(-1, 2).T
    assert ranges(starts, starts + counts).tolist() == [i for start, n in pairs for i in range(start, start + n)]
