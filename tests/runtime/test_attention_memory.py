"""What attention copies, and what its backward holds at its peak, against what `simulate.memory` predicts."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_wlb.model import ModelShape
from megatron_wlb.runtime import all_to_all
from megatron_wlb.runtime.attention import AttentionOptions, context_parallel_attention
from megatron_wlb.runtime.backends.protocol import varlen
from megatron_wlb.runtime.metadata import ShardMetadata
from megatron_wlb.sharding.routing import moved_rows
from megatron_wlb.sharding.select import shard
from megatron_wlb.simulate.memory import attention_backward_bytes, layer_input_bytes
from tests.jobs import job
from tests.live import LiveBytes

TOKENS, HEAD_SIZE = 512, 64
BF16, FP32 = torch.bfloat16, torch.float32


class FlashAttention2:
    """Takes the memory that FlashAttention-2 takes, and computes nothing."""

    name = "flash-attention-2"
    device_types = ("cpu",)
    dtypes = (BF16, FP32)
    any_value_size = False
    encode = staticmethod(varlen)

    def forward(self, q, k, v, args):
        return torch.zeros(q.shape, dtype=q.dtype), torch.zeros(q.shape[1], q.shape[0])

    def backward(self, dout, q, k, v, out, lse, dkv, args):
        dq, dk, dv = (torch.zeros(x.shape, dtype=x.dtype) for x in (q, k, v))
        held = [torch.zeros(q.shape, dtype=FP32)]
        if q.shape[1] > k.shape[1]:
            held += [torch.zeros((k.shape[0], *q.shape[1:]), dtype=k.dtype) for _ in (dk, dv)]
        del held
        args.store(dkv, dk, dv)
        return dq


def _peak(given, rank, lengths=(TOKENS,)):
    """Bytes that backward holds at the most on a rank, and those predicted for the rows that it exchanges."""
    cp, model = given.parallel.cp, given.model
    group = SimpleNamespace(rank=lambda: rank, size=lambda: cp, wait=lambda: None)
    plan = shard(np.array(lengths, np.int64), given)
    in_fp32 = given.sharding.cp_gradients == "fp32"
    options = AttentionOptions(backend=FlashAttention2(), gradients_in_fp32=in_fp32)
    metadata = ShardMetadata.build(plan, rank, options.backend.encode)
    dtype = {2: BF16, 4: FP32}[given.bytes_per_value]
    q, k, v = (
        torch.zeros(metadata.num_rows, heads, HEAD_SIZE, dtype=dtype, requires_grad=True)
        for heads in (model.num_attention_heads, model.num_query_groups, model.num_query_groups)
    )
    out = context_parallel_attention(q, k, v, metadata, group if cp > 1 else None, options)
    with LiveBytes() as live:
        dout = torch.zeros_like(out)
        torch.autograd.grad(out, (q, k, v), dout)
    moved = tuple(moved_rows(plan)[rank] / metadata.num_rows)
    return live.peak, metadata.num_rows * (attention_backward_bytes(given, moved) - layer_input_bytes(given))


@pytest.mark.parametrize(
    ("cp", "dtype", "key_heads", "settings"),
    [
        (1, BF16, 8, {}),
        (1, BF16, 2, {}),
        (2, BF16, 8, {}),
        (2, BF16, 2, {}),
        (2, FP32, 8, {}),
        (4, BF16, 4, {}),
        (4, BF16, 8, {"cp_gradients": "model"}),
        (8, BF16, 8, {}),
        (8, BF16, 8, {"cp_gradients": "model"}),
    ],
)
def test_backward_of_attention_holds_what_is_predicted(cp, dtype, key_heads, settings, monkeypatch):
    """Of collectives that move nothing: real ones let go of their tensors whenever their thread gets to it."""
    monkeypatch.setattr(all_to_all, "_all_to_all", lambda out, given, *sizes, group, async_op: group)
    model = ModelShape(
        num_layers=1,
        hidden_size=8 * HEAD_SIZE,
        ffn_hidden_size=1,
        num_attention_heads=8,
        num_query_groups=key_heads,
        kv_channels=HEAD_SIZE,
        padded_vocab_size=0,
    )
    given = job(model=model, cp=cp, cp_sharding="per-document", bytes_per_value=dtype.itemsize, **settings)
    # The gradient of the layer's output is not attention's own.
    predicted = (attention_backward_bytes(given) - layer_input_bytes(given)) * TOKENS / cp
    assert max(_peak(given, rank)[0] for rank in range(cp)) == pytest.approx(predicted, rel=0.05)
    for rank in range(cp):
        for lengths in ((TOKENS,), (200, 8, 100, 60, 144), (TOKENS // 16,) * 16):
            held, planned = _peak(given, rank, lengths)
            assert held == pytest.approx(planned, rel=0.06), (rank, lengths)
