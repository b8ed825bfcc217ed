"""Shard metadata: consistent with the plan, one buffer, at home in a DataLoader worker."""

import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from megatron_wlb.plan.sharding import per_document, per_sequence, shard
from megatron_wlb.plan.sharding.exchange import exchange
from megatron_wlb.plan.sharding.segments import encode
from megatron_wlb.plan.workload import FLOPS_PROFILE
from megatron_wlb.runtime.metadata import ShardMetadata
from tests.runtime.oracle import SHARDINGS, local_rows

LENGTHS = np.array([5, 61, 18, 33, 1, 42, 24], np.int64)


@pytest.mark.parametrize("sharding", SHARDINGS.values(), ids=SHARDINGS)
@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_rows_and_positions_follow_the_plan(sharding, cp_size):
    plan = sharding(LENGTHS, cp_size)
    position = torch.cat([torch.arange(n) for n in LENGTHS])
    for rank in range(cp_size):
        metadata = ShardMetadata.build(plan, rank)
        assert torch.equal(metadata.positions, position[local_rows(plan, rank)])
        assert (metadata.num_rows, metadata.max_length) == (184 // cp_size, 61)
        assert [c.q_start for c in metadata.colours] == [0, *(c.q_stop for c in metadata.colours[:-1])]
        assert metadata.colours[-1].q_stop == metadata.num_rows
        both = torch.cat((metadata.sent_rows, metadata.own_rows))
        assert torch.equal(both.sort().values, torch.arange(metadata.num_rows))


@pytest.mark.parametrize("sharding", SHARDINGS.values(), ids=SHARDINGS)
def test_colours_are_the_varlen_calls(sharding):
    plan = sharding(LENGTHS, 2)
    metadata = ShardMetadata.build(plan, 1)
    for colour, segments in zip(metadata.colours, plan.shards[1].colours, strict=True):
        call = encode(exchange(plan, 1).key_begins, segments)
        assert colour.cu_q.dtype == colour.cu_k.dtype == torch.int32
        assert colour.cu_q.tolist() == call.cu_q.tolist()
        assert colour.cu_k.tolist() == call.cu_k.tolist()
        assert (colour.max_q, colour.max_k) == (call.max_q, call.max_k)
        entries = zip(call.cu_q, call.cu_q[1:], call.cu_k, call.cu_k[1:], strict=False)
        assert colour.segments == tuple(entry for entry in entries if entry[1] > entry[0])


def test_a_colour_without_rows_is_left_out():
    plan = per_document(np.array([1, 1, 1, 1], np.int64), 1)
    assert len(ShardMetadata.build(plan, 0).colours) == 2
    plan = per_document(np.array([1, 1, 2], np.int64), 2)
    assert [len(ShardMetadata.build(plan, rank).colours) for rank in range(2)] == [2, 2]
    plan = per_sequence(np.array([4], np.int64), 2)
    empty = plan.shards[0].colours[0][:0]
    shards = tuple(type(s)(colours=(empty, *s.colours)) for s in plan.shards)
    assert len(ShardMetadata.build(type(plan)(lengths=plan.lengths, shards=shards, strategy=""), 0).colours) == 2


def test_a_single_shard_in_one_piece_copies_no_keys():
    plan = shard(LENGTHS, 1, "adaptive", FLOPS_PROFILE.kernel(heads=1), use_native=False)
    metadata = ShardMetadata.build(plan, 0)
    assert metadata.keys_are_rows
    assert metadata.num_sent == 0
    assert not ShardMetadata.build(per_document(LENGTHS, 1), 0).keys_are_rows
    assert ShardMetadata.build(per_document(np.full(2, 16, np.int64), 2), 0).sends_rows


def test_one_buffer_moves_and_pickles_everything():
    metadata = ShardMetadata.build(per_document(np.full(8, 1000, np.int64), 4), 2)
    assert len(pickle.dumps(metadata)) < metadata.integers.nbytes + 4000
    copy = pickle.loads(pickle.dumps(metadata))
    assert torch.equal(copy.positions, metadata.positions)
    assert all(c.integers is copy.integers for c in copy.colours)
    moved = metadata.to("meta", non_blocking=True)
    tensors = (moved.positions, moved.gather_index, moved.own_keys, *(c.cu_k for c in moved.colours))
    assert all(x.device.type == "meta" for x in tensors)


def _build(lengths: list[np.ndarray]) -> ShardMetadata:
    return ShardMetadata.build(per_document(lengths[0], 2), 1)


def test_a_loader_worker_can_build_it():
    loader = DataLoader([LENGTHS], batch_size=1, collate_fn=_build, num_workers=1, multiprocessing_context="fork")
    (metadata,) = loader
    assert metadata.colours[1].cu_q.tolist() == _build([LENGTHS]).colours[1].cu_q.tolist()


def test_a_rank_outside_the_plan_is_refused():
    with pytest.raises(ValueError, match="rank 2 is not in a plan of 2 shards"):
        ShardMetadata.build(per_document(LENGTHS, 2), 2)
