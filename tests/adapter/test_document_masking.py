"""What upstream's `--dataloader-inter-document-masking` attends to under context parallelism, by its own slicing.

TransformerEngine needs a GPU; here is which rows its ring for packed sequences (THD) multiplies, after `cu_seqlens`
over the ranks and halves of documents (dot_product_attention/context_parallel.py, p2p).
"""

import itertools

import numpy as np
import pytest
import torch
from megatron.core import utils

CP = 2
LENGTHS = (8, 24, 4, 28)
"""Of documents; all divide by twice the ranks, as TransformerEngine asks."""


def per_sequence(rank, monkeypatch):
    """The places in the sequence that a rank gets from upstream."""
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: CP)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: rank)
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self, **_: self)
    batch = {"tokens": torch.arange(sum(LENGTHS))[None], "cu_seqlens": torch.tensor([[0]]), "attention_mask": None}
    batch = utils.get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, use_per_sequence_balancing=True)
    return batch["tokens"][0].numpy()


def per_document(rank, _):
    """The places that `thd_get_partitioned_indices` gives a rank: two chunks of every document."""
    begins = np.cumsum((0, *LENGTHS))
    chunks = [np.split(np.arange(*edges), 2 * CP) for edges in itertools.pairwise(begins)]
    return np.concatenate([each for of in chunks for each in (of[rank], of[2 * CP - 1 - rank])])


def attended(rows):
    """Pairs of places (query, key) that the ring attends to, given the places that the ranks hold."""
    begins, held = np.cumsum((0, *LENGTHS)) // CP, []  # document, number among its chunks, row of the chunk, place
    for rank, (document, (begin, end)) in itertools.product(range(CP), enumerate(itertools.pairwise(begins))):
        size = (end - begin) // 2
        for chunk, first in ((rank, begin), (2 * CP - 1 - rank, begin + size)):
            held += [(document, chunk, i, int(rows[rank][first + i])) for i in range(size)]
    pairs = itertools.product(held, repeat=2)
    return {(query[-1], key[-1]) for query, key in pairs if query[0] == key[0] and key[1:3] <= query[1:3]}


@pytest.mark.parametrize(("division", "right"), [(per_sequence, False), (per_document, True)])
def test_upstreams_masks_hold_only_if_every_document_is_divided(monkeypatch, division, right):
    """Divided as a sequence, tokens attend to other documents, to later tokens, and not to all of their own."""
    rows = [division(rank, monkeypatch) for rank in range(CP)]
    assert sorted(np.concatenate(rows)) == list(range(sum(LENGTHS)))
    of = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    asked = {(q, k) for q in range(len(of)) for k in range(q + 1) if of[q] == of[k]}
    found = attended(rows)
    assert (found == asked) == right
    if not right:
        assert any(of[q] != of[k] for q, k in found) and any(k > q for q, k in found) and asked - found
