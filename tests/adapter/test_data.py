"""Rows of samples by hand: what follows them, for multi-token prediction, and the sample that a phase begins with."""

from argparse import Namespace

import numpy as np
import pytest
import torch

from megatron_wlb.adapter.data import SampleReader
from megatron_wlb.adapter.layers import mtp
from megatron_wlb.adapter.training import _consumed
from megatron_wlb.documents import DOCUMENT

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
