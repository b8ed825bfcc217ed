"""Rotary embeddings follow positions: rows in any order are rotated as upstream rotates them in theirs."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.models.common.embeddings import RotaryEmbedding, YarnRotaryEmbedding, apply_rotary_pos_emb
from megatron.core.transformer import TransformerConfig

from megatron_wlb.adapter.model import _rotate_by_position

HEAD_SIZE, LENGTH = 16, 64
COMMON = {"kv_channels": HEAD_SIZE, "use_cpu_initialization": True}
SCALED = {"rope_scaling": True, "rope_scaling_factor": 4.0}
YARN = {"rotary_percent": 1.0, "scaling_factor": 4.0, "original_max_position_embeddings": 16}
ROTARY = {
    "rope": lambda: RotaryEmbedding(rotary_percent=1.0, **COMMON),
    "half of the head": lambda: RotaryEmbedding(rotary_percent=0.5, **COMMON),
    "scaled": lambda: RotaryEmbedding(rotary_percent=1.0, **SCALED, **COMMON),
    "yarn": lambda: YarnRotaryEmbedding(**YARN, **COMMON),
}


@pytest.mark.parametrize("rows_only", [False, True])
@pytest.mark.parametrize("name", ROTARY)
def test_a_row_is_rotated_by_its_position(name, rows_only):
    """Rows of multi-latent attention have no dimension of the batch."""
    config = TransformerConfig(num_layers=1, hidden_size=2 * HEAD_SIZE, num_attention_heads=2)
    vector = torch.randn(2, HEAD_SIZE)

    def rotated(embedding):
        table, scale = embedding if isinstance(embedding, tuple) else (embedding, 1.0)
        rows = vector.expand(len(table), *table.shape[1:-2], -1, -1)
        return apply_rotary_pos_emb(rows, table, config, mscale=scale, cp_group=SimpleNamespace(size=lambda: 1))

    rotary = ROTARY[name]()
    in_order = rotated(rotary(LENGTH))
    assert len(in_order.unique(dim=0)) == LENGTH
    positions = torch.randint(LENGTH, (150,))
    _rotate_by_position([rotary], LENGTH, rows_only)
    packed = SimpleNamespace(wlb=SimpleNamespace(positions=positions))
    found = rotated(rotary(rotary.get_rotary_seq_len(None, None, None, config, packed)))
    assert torch.equal(found, in_order[positions].squeeze(1) if rows_only else in_order[positions])
