"""Shard metadata: consistent with the plan, encoded for its backend, one buffer."""

import pickle

import numpy as np
import pytest
import torch

from megatron_wlb.runtime.backends import BACKENDS
from megatron_wlb.runtime.backends.protocol import varlen
from megatron_wlb.runtime.backends.te import TeBackend
from megatron_wlb.runtime.metadata import ShardMetadata
from megatron_wlb.sharding.select import shard
from tests.covering import covering
from tests.jobs import job
from tests.reference.chunks import per_document
from tests.runtime.oracle import SHARDINGS, local_rows

LENGTHS = np.array([5, 61, 18, 33, 1, 42, 24], np.int64)


@covering(sharding=SHARDINGS, cp=[1, 2, 4])
def test_rows_and_positions_follow_the_plan(sharding, cp):
    """Also in packed order: rows of all ranks, one after the other, and back. Documents without rows do not count."""
    plan = sharding(np.append(LENGTHS, 0), cp)
    position = torch.cat([torch.arange(n) for n in LENGTHS])
    of_ranks = torch.cat([local_rows(plan, rank) for rank in range(cp)])
    for rank, rows in enumerate(of_ranks.split(184 // cp)):
        metadata = ShardMetadata.build(plan, rank, varlen, in_order=True)
        assert torch.equal(metadata.positions, position[rows]) and metadata.num_rows == 184 // cp
        called = [np.arange(184 // cp)[part.rows][call.rows] for part in metadata.rounds for call in part.calls]
        assert np.concatenate(called).tolist() == [*range(184 // cp)]
    packed = metadata.packed
    assert torch.equal(of_ranks[packed.from_ranks], torch.arange(184))
    assert torch.equal(torch.arange(184)[packed.to_ranks], of_ranks)
    assert packed.cu_seqlens.tolist() == [0, *np.cumsum(LENGTHS)]
    assert packed.documents().tolist() == [np.repeat(np.arange(len(LENGTHS)), LENGTHS).tolist()]
    assert ShardMetadata.build(plan, 0, varlen).packed is None
    alone = ShardMetadata.build(shard(LENGTHS, job()), 0, varlen, in_order=True).packed
    assert torch.equal(alone.from_ranks, torch.arange(184))  # a single rank has no all-to-all that could order rows


def test_te_is_given_few_numbers_of_entries():
    """Each is a plan that cuDNN builds."""
    counts = []
    for n in (1, 31, 32, 33, 64, 65, 700):
        plan = per_document(np.full(n, 2, np.int64), 1)
        metadata = ShardMetadata.build(plan, 0, TeBackend.encode)
        counts += {table.shape[1] - 1 for table in metadata.rounds[0].tables}
    assert counts == [32, 32, 32, 64, 64, 128, 1024]


def test_what_is_whole_on_a_rank_copies_no_keys():
    (documents,) = ShardMetadata.build(shard(LENGTHS, job()), 0, varlen).rounds
    assert documents.keys_are_rows and documents.sent == ()
    assert not ShardMetadata.build(SHARDINGS["per-document"](LENGTHS, 1), 0, varlen).rounds[0].keys_are_rows
    whole, shared = ShardMetadata.build(SHARDINGS["in rounds"](LENGTHS, 2), 0, varlen).rounds
    assert whole.keys_are_rows and len(whole.calls) == 1 and not shared.keys_are_rows


def test_one_buffer_moves_and_pickles_everything(monkeypatch):
    metadata = ShardMetadata.build(per_document(np.full(8, 1000, np.int64), 4), 2, varlen)
    assert len(pickle.dumps(metadata)) < metadata.integers.nbytes + 4000
    copy = pickle.loads(pickle.dumps(metadata))
    assert torch.equal(copy.positions, metadata.positions)
    assert torch.equal(copy.rounds[0].tables[1], metadata.rounds[0].tables[1])
    moved = metadata.to("meta", non_blocking=True)
    (documents,) = moved.rounds
    tensors = (moved.positions, documents.gather, documents.own_keys, *documents.tables)
    assert all(x.device.type == "meta" for x in tensors)
    asked = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: asked.append("pinned") or -x)
    monkeypatch.setattr(torch.Tensor, "to", lambda x, *given, **named: asked.append((given, named)) or -x)
    for other in (metadata.pin_memory(), metadata.to("cuda", non_blocking=True), metadata.to("cuda")):
        assert torch.equal(other.positions, -metadata.positions) and other.layouts is metadata.layouts
    assert asked == ["pinned", (("cuda",), {"non_blocking": True}), (("cuda",), {"non_blocking": False})]
    # A DataLoader's worker may be sent what encodes its calls.
    assert all(pickle.loads(pickle.dumps(backend.encode)) is backend.encode for backend in BACKENDS.values())


def test_ranks_and_windows_that_are_not_planned_are_refused():
    for rank in (-1, 2):
        with pytest.raises(ValueError, match=f"context-parallel rank {rank} is not in a plan of 2 shards; plan with"):
            ShardMetadata.build(per_document(LENGTHS, 2), rank, varlen)
    metadata = ShardMetadata.build(per_document(LENGTHS, 2), 1, varlen, windows=(None, 7))
    assert [len(metadata.rounds_of(window)) for window in (None, 7)] == [1, 1] and len(metadata.layouts) == 1
    with pytest.raises(ValueError, match="a layer's window is 8, and the metadata are for None, 7; build them with it"):
        metadata.rounds_of(8)
