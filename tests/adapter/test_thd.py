"""Megatron's own attention under `--wlb`, whole training runs against ours.

TransformerEngine needs a GPU, so a module with its signature and its cut of documents stands in for it.
"""

import itertools

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_wlb.adapter import compat, describe
from megatron_wlb.job import Job
from tests.adapter.datasets import write_lengths
from tests.adapter.test_parity import CP2, FULL, PP2, compare
from tests.adapter.training import train

UNIT = 8  # two chunks on up to four ranks


class StandIn(torch.nn.Module):
    """Dense attention over all ranks' rows, of which it knows no more than TransformerEngine is told."""

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
        self.cp_group = pg_collection.cp

    def forward(self, query, key, value, attention_mask, attn_mask_type, attention_bias=None, packed_seq_params=None):
        packed = packed_seq_params
        assert isinstance(packed, PackedSeqParams)
        assert packed.qkv_format == "thd"
        bounds = packed.cu_seqlens_q.tolist()
        assert bounds == packed.cu_seqlens_kv.tolist() == packed.cu_seqlens_q_padded.tolist()
        assert packed.max_seqlen_q == packed.max_seqlen_kv == max(np.diff(bounds))
        size = self.cp_group.size()
        rows = [torch.tensor(_rows(bounds, rank, size)) for rank in range(size)]
        mine = rows[self.cp_group.rank()]
        assert len(query) == len(key) == len(value) == len(mine)
        keys, values = (_Gather.apply(x, self.cp_group) for x in (key, value))
        theirs = torch.cat(rows)
        document = torch.searchsorted(torch.tensor(bounds), torch.arange(bounds[-1]), right=True)
        visible = (document[mine][:, None] == document[theirs]) & (mine[:, None] >= theirs)
        heads = query.shape[1] // keys.shape[1]
        keys, values = (x.repeat_interleave(heads, dim=1) for x in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", query, keys) * query.shape[-1] ** -0.5
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(~visible, float("-inf")).softmax(-1), values).flatten(1)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        pool = x.new_empty(group.size(), *x.shape)
        dist.all_gather(list(pool.unbind()), x.contiguous(), group=group)
        return pool.flatten(0, 1)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(ctx.group.size())[ctx.group.rank()], None


def _rows(bounds, rank, size):
    """What TransformerEngine's `thd_get_partitioned_indices` gives: two chunks of each document, side by side."""
    if size == 1:
        return list(range(bounds[-1]))
    rows = []
    for begin, end in itertools.pairwise(bounds):
        chunk = (end - begin) // (2 * size)
        for i in (rank, 2 * size - 1 - rank):
            rows += range(begin + i * chunk, begin + (i + 1) * chunk)
    return rows


@pytest.fixture(scope="module")
def even(tmp_path_factory):
    """A dataset whose documents have a multiple of UNIT tokens, and one for the last label."""
    lengths = UNIT * np.random.default_rng(0).geometric(0.15, 300) + 1
    return write_lengths(tmp_path_factory.mktemp("even") / "corpus", lengths)


@pytest.fixture
def stand_in(monkeypatch):
    """Its place in upstream's layers, which are local ones."""
    upstream = compat.default_layer_spec

    def default_layer_spec(*args, **kwargs):
        spec = upstream(*args, **kwargs)
        for layer in getattr(spec, "layer_specs", [spec]):
            layer.submodules.self_attention.submodules.core_attention = StandIn
        return spec

    monkeypatch.setattr(compat, "default_layer_spec", default_layer_spec)
    monkeypatch.setattr(describe, "_check_upstream_attention", lambda args: None)
    # One unit in all layouts, so that all have the same padding.
    monkeypatch.setattr(Job, "unit_tokens", UNIT)


@pytest.mark.parametrize(
    ("size", "layout"),
    [(1, ""), (2, CP2), (4, "--context-parallel-size 4"), (4, f"{CP2} {PP2}"), (2, f"{CP2} {FULL}")],
)
def test_trains_as_with_ours(size, layout, even, stand_in, tmp_path):
    flags = "--wlb-cp-sharding per-document --wlb-attention-backend".split()
    ours = train(1, even, *flags, "cpu", log=tmp_path / "ours.jsonl")
    theirs = train(size, even, *layout.split(), *flags, "megatron", log=tmp_path / "theirs.jsonl")
    compare(theirs, ours)


def test_a_document_that_cannot_be_cut(dataset, stand_in, tmp_path):
    with pytest.raises(RuntimeError, match="does not divide into 2 \\* CP = 4 equal chunks; choose another backend"):
        train(2, dataset, *CP2.split(), *"--wlb-cp-sharding per-document --wlb-attention-backend megatron".split())
