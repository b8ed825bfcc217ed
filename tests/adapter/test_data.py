"""Rows of samples by hand: what follows them, for multi-token prediction, and where pieces end and phases begin."""

from argparse import Namespace
from dataclasses import fields

import numpy as np
import pytest
import torch

from megatron_wlb.adapter.data import BatchDataset, SampleReader
from megatron_wlb.adapter.layers import mtp
from megatron_wlb.adapter.sources import eod
from megatron_wlb.adapter.training import _consumed
from megatron_wlb.documents import DOCUMENT
from megatron_wlb.packing.adaptive import AdaptivePacking
from megatron_wlb.plan.step import plan_step
from megatron_wlb.runtime.backends import get_backend
from tests.jobs import job, packer

C, DEPTHS = 16, 2


class Places:
    """A window whose tokens count from 1; the one behind it is a target only."""

    masks, size = True, 0

    def read(self, piece, start, count):
        place = int(piece["index"]) % C + start + np.arange(count)
        inside = place < C
        return (place + 1) * inside, (place + 2) * inside, inside


@pytest.mark.parametrize("in_document", [True, False])
def test_tokens_further_ahead_end_with_the_document_or_the_window(in_document):
    documents = np.zeros(4, DOCUMENT)
    documents["length"], documents["index"] = (1, 2, 5, 8), C + np.array((0, 1, 3, 8))
    sizes = {"context_length": C, "samples_per_micro_batch": 1, "vocabulary": 99, "depths": DEPTHS}
    reader = SampleReader(split="train", datasets=[Places()], ahead_in_document=in_document, **sizes)
    for document in documents:
        length, place = int(document["length"]), int(document["index"]) % C
        row, depth = np.arange(length), np.arange(1 + DEPTHS)[:, None]
        there = row + depth < (length if in_document else C - place)
        token = place + row + depth + 1
        for start, stop in ((0, length), (length // 2, length), (0, length // 2)):
            found = np.stack(reader.rows(document, start, stop))
            assert (found == np.stack((token * there, (token + 1) * there, there))[..., start:stop]).all()
    assert (reader.targets(documents, read=False) == reader.targets(documents, read=True)).all()


ROWS = ("tokens", "labels", "loss_mask", "upstream_micro_batch", "positions")


def batches(cp_rank=1, is_first=True, is_last=True, padded=True, order=None, **of_reader):
    """The micro-batches of the second step of a rank; windows of 16, two a micro-batch upstream, padded to 4 tokens."""
    sizes = {"context_length": C, "cp": 2, "num_micro_batches": 3, "global_batch_size": 4, "max_tokens": 28}
    given = job(**sizes, packing=AdaptivePacking(), cp_sharding="per-document")
    packs = packer(given, [30, 5, 61, 9, 64, 3, 3, 47])
    packs.next()
    how = {"context_length": C, "samples_per_micro_batch": 2, "vocabulary": 99, "depths": DEPTHS} | of_reader
    dataset = BatchDataset(
        reader=SampleReader(split="train", datasets=[Places()], **how),
        **{"cp_rank": cp_rank, "is_first": is_first, "is_last": is_last, "padded": padded, "order": order},
        **{"in_order": False, "encode": get_backend("cpu", "cpu").encode, "attention_windows": [None]},
    )
    return dataset, [(plan, dataset[plan]) for plan in plan_step(packs, given).micro_batches]


@pytest.mark.parametrize("in_window", [False, True])
@pytest.mark.parametrize("order", [None, lambda rows: torch.arange(rows).flip(0)])
@pytest.mark.parametrize("cp_rank", [0, 1])
def test_a_batch_has_the_rows_of_its_shard(cp_rank, order, in_window):
    """Read one by one; in the order of the model's; rows of no document are 0, not trained, and padding."""
    dataset, found = batches(cp_rank, order=order, in_window=in_window)
    for plan, batch in found:
        expected = []
        for number, start, stop in np.concatenate(plan.shards.shards[cp_rank].calls).tolist():
            for i in range(start, stop):
                if number == len(plan.documents):
                    expected.append((*np.zeros((3, 1 + DEPTHS), int).tolist(), 0, 0, True))
                    continue
                document = plan.documents[number]
                index, parts = int(document["index"]), dataset.reader.rows(document, i, i + 1)
                position = i + index % C * in_window
                expected.append((*(part[:, 0].tolist() for part in parts), (index // C - 4) // 2, position, False))
        assert (batch.split, batch.step, batch.padded_tokens) == ("train", 1, sum(plan.shards.lengths))
        for rows, name in zip(zip(*expected, strict=True), (*ROWS, "padding"), strict=True):
            wanted, given = torch.tensor(rows).T, getattr(batch, name)
            assert torch.equal(given, (wanted if order is None else wanted.flip(-1)).to(given.dtype)), name
    whole = torch.cat([torch.stack((batch.upstream_micro_batch, batch.padding)) for _, batch in found], dim=1)
    assert whole.amax(dim=1).tolist() == [1, 1]


@pytest.mark.parametrize(
    ("changes", "absent"),
    [
        ({}, ""),
        ({"is_first": False}, ""),  # further tokens are inputs of layers for multi-token prediction
        ({"is_first": False, "depths": 0}, "tokens"),
        ({"is_first": False, "depths": 0, "digest": True, "padded": False}, ""),
        ({"is_last": False, "padded": False}, "labels loss_mask upstream_micro_batch padding"),
        ({"is_last": False, "is_first": False}, " ".join(ROWS)),
    ],
)
def test_a_stage_gets_what_it_reads(changes, absent):
    _, ((_, batch), *_) = batches(**changes)
    assert {field.name for field in fields(batch) if getattr(batch, field.name) is None} == {*absent.split()}


def test_all_of_a_batch_is_moved():
    _, ((_, batch), *_) = batches()
    moved = batch.to(torch.device("meta"))
    parts = [moved.metadata.integers, *(getattr(moved, name) for name in (*ROWS, "padding"))]
    assert {part.device.type for part in parts} == {"meta"}
    assert (moved.split, moved.step, moved.padded_tokens) == (batch.split, batch.step, batch.padded_tokens)


@pytest.mark.parametrize("weights", [None, torch.arange(12.0).view(3, 4)])
def test_layers_of_mtp_ask_for_inputs_then_for_targets(weights):
    tokens, labels = torch.arange(24).view(2, 1 + DEPTHS, 4)
    mask = torch.tensor([[1.0, 1, 1, 0], [1, 1, 0, 0], [1, 0, 0, 0]])
    batch = Namespace(tokens=tokens, labels=labels, loss_mask=mask)
    found = [(each.tolist(), total) for each, total in mtp.rolled(batch, torch.tensor([5, 6, 7, 0]), weights, 8)]
    weighed = mask if weights is None else mask * weights
    assert found == [
        *(([tokens[1].tolist()], None), ([[6, 7, 7, 1]], None), ([tokens[2].tolist()], None), ([[7, 7, 7, 2]], None)),
        *(([labels[1].tolist()], None), ([weighed[1].tolist()], 3)),
        *(([labels[2].tolist()], None), ([weighed[2].tolist()], 3)),
    ]


@pytest.mark.parametrize(("iteration", "first"), [(0, 0), (4, 32), (5, 0), (7, 16), (9, 0), (12, 24)])
def test_a_phase_begins_with_its_own_first_sample(iteration, first):
    args = Namespace(iteration=iteration, global_batch_size=8, consumed_train_samples=99)
    assert _consumed(Namespace(phase_transition_iterations=[5, 9], **vars(args))) == first
    assert _consumed(Namespace(phase_transition_iterations=None, **vars(args))) == 99


@pytest.mark.parametrize("flag", ["reset_attention_mask", "reset_position_ids"])
def test_eod_ends_pieces_unless_masks_are_of_documents(flag):
    args = Namespace(**{name: name == flag for name in ("reset_attention_mask", "reset_position_ids")})
    for masks_documents in (False, True):
        args.dataloader_inter_document_masking = masks_documents
        assert eod.resets(args) != masks_documents
    assert not eod.resets(Namespace(**dict.fromkeys(vars(args), False)))
