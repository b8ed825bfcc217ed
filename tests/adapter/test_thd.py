"""Megatron's own attention under `--wlb`, whole training runs against ours.

TransformerEngine needs a GPU, so a module with its signature stands in for it.
"""

import numpy as np
import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_wlb.adapter import compat
from megatron_wlb.describe import refusals
from tests.adapter.test_parity import compare
from tests.adapter.training import FULL, PP2, TP2, train


class StandIn(torch.nn.Module):
    """Dense attention over rows in packed order, of which it knows no more than TransformerEngine is told."""

    def __init__(
        self,
        config,
        layer_number,
        attn_mask_type,
        attention_type,
        attention_dropout=None,
        softmax_scale=None,
        cp_comm_type="p2p",
        pg_collection=None,
    ):
        super().__init__()

    def forward(self, query, key, value, attention_mask, attn_mask_type, attention_bias=None, packed_seq_params=None):
        packed = packed_seq_params
        assert isinstance(packed, PackedSeqParams)
        assert packed.qkv_format == "thd"
        bounds = packed.cu_seqlens_q
        for others in (packed.cu_seqlens_kv, packed.cu_seqlens_q_padded, packed.cu_seqlens_kv_padded):
            assert torch.equal(others, bounds)
        assert packed.max_seqlen_q == packed.max_seqlen_kv == max(np.diff(bounds))
        assert len(query) == len(key) == len(value) == bounds[-1]
        rows = torch.arange(len(query))
        document = torch.searchsorted(bounds, rows, right=True)
        visible = (document[:, None] == document) & (rows[:, None] >= rows)
        keys, values = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, keys) * query.shape[-1] ** -0.5
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(~visible, float("-inf")).softmax(-1), values).flatten(1)


@pytest.fixture
def stand_in(monkeypatch):
    """Its place in upstream's layers, which are local ones; these would be refused."""
    upstream = compat.default_layer_spec

    def default_layer_spec(*args, **kwargs):
        spec = upstream(*args, **kwargs)
        for layer in getattr(spec, "layer_specs", [spec]):
            layer.submodules.self_attention.submodules.core_attention = StandIn
        return spec

    monkeypatch.setattr(compat, "default_layer_spec", default_layer_spec)
    monkeypatch.setattr(refusals, "check", lambda args: None)


def test_trains_as_with_ours(dataset, stand_in, tmp_path):
    """With padding, which tensor-parallel ranks need, and recomputation."""
    ours = train(1, dataset, "--wlb-attention-backend", "cpu", log=tmp_path / "ours.jsonl")
    flags = f"{TP2} {PP2} {FULL} --wlb-attention-backend megatron"
    compare(train(4, dataset, *flags.split(), log=tmp_path / "theirs.jsonl"), ours)
