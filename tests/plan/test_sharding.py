"""Sharding over context-parallel ranks: exact partitions, equal shares, and encodings that say the same."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_wlb.plan.sharding import per_document, per_sequence
from megatron_wlb.plan.sharding.segments import encode, gather_index, positions, ranges, rows

patient = settings(deadline=None)

SHARDINGS = [per_sequence, per_document]


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
    for document, start, stop in sorted(s for shard in plan.shards for s in segments_of(shard)):
        assert left[document] == start < stop
        left[document] = stop
    assert list(left.values()) == lengths.tolist()


@pytest.mark.parametrize("sharding", SHARDINGS)
@patient
@given(micro_batches())
@example((np.array([1] * 32, np.int64), 16))
def test_ranks_hold_equally_many_tokens(sharding, case):
    lengths, cp_size = case
    assert {shard.tokens for shard in sharding(lengths, cp_size).shards} == {lengths.sum() // cp_size}


@pytest.mark.parametrize("sharding", SHARDINGS)
@patient
@given(micro_batches())
def test_a_colour_holds_each_document_once_and_in_order(sharding, case):
    for shard in sharding(*case).shards:
        assert len(shard.colours) == 2
        for colour in shard.colours:
            assert (np.diff(colour["document"]) > 0).all()
            assert (colour["stop"] > colour["start"]).all()


@patient
@given(small)
def test_per_sequence_ranks_hold_mirrored_chunks(case):
    lengths, cp_size = case
    chunks = np.arange(lengths.sum()).reshape(2 * cp_size, -1)
    for i, shard in enumerate(per_sequence(lengths, cp_size).shards):
        expected = np.concatenate((chunks[i], chunks[2 * cp_size - 1 - i]))
        assert np.array_equal(rows(lengths, shard), expected)


@patient
@given(micro_batches())
def test_per_document_chunks_differ_by_one_token_at_most(case):
    lengths, cp_size = case
    cuts = {document: [] for document in range(len(lengths))}
    for shard in per_document(lengths, cp_size).shards:
        held = [document for document, _, _ in segments_of(shard)]
        assert all(held.count(document) <= 2 for document in held)
        for document, start, stop in segments_of(shard):
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

    assert {cp_size * multiplies(shard) for shard in per_document(lengths, cp_size).shards} == {
        int((lengths * (lengths + 1) // 2).sum())
    }


@pytest.mark.parametrize("sharding", SHARDINGS)
@patient
@given(micro_batches())
@example((np.array([1, 1], np.int64), 1))
@example((np.array([32], np.int64), 16))
def test_encoding_spans_all_keys_and_holds_the_segments(sharding, case):
    lengths, cp_size = case
    begins = np.concatenate(([0], np.cumsum(lengths)))
    for shard in sharding(lengths, cp_size).shards:
        for colour in shard.colours:
            call = encode(lengths, colour)
            q, k = np.diff(call.cu_q), np.diff(call.cu_k)
            assert call.cu_q.dtype == call.cu_k.dtype == np.int32
            assert (call.cu_q[0], call.cu_k[0], call.cu_k[-1]) == (0, 0, lengths.sum())
            assert (q >= 0).all() and (k > 0).all()
            assert (call.max_q, call.max_k) == (q.max(), k.max())
            entries = q > 0
            assert q[entries].tolist() == (colour["stop"] - colour["start"]).tolist()
            assert call.cu_k[:-1][entries].tolist() == begins[colour["document"]].tolist()
            assert k[entries].tolist() == colour["stop"].tolist()


@pytest.mark.parametrize("sharding", SHARDINGS)
@patient
@given(small)
def test_rows_positions_and_the_gather_index(sharding, case):
    lengths, cp_size = case
    plan = sharding(lengths, cp_size)
    begins = np.concatenate(([0], np.cumsum(lengths)))
    gathered = []
    for shard in plan.shards:
        held = [(d, i) for d, start, stop in segments_of(shard) for i in range(start, stop)]
        assert rows(lengths, shard).tolist() == [begins[d] + i for d, i in held]
        assert positions(shard).tolist() == [i for _, i in held]
        gathered += [begins[d] + i for d, i in held]
    assert np.array_equal(np.array(gathered)[gather_index(plan)], np.arange(lengths.sum()))


@patient
@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 9))))
def test_ranges_concatenate(pairs):
    starts, counts = np.array(pairs, np.int64).reshape(-1, 2).T
    assert ranges(starts, starts + counts).tolist() == [i for start, n in pairs for i in range(start, start + n)]
