"""Torch's varlen FlashAttention with gap entries against float64."""

import numpy as np
import pytest
import torch

from megatron_wlb.plan.sharding import per_document, per_sequence
from megatron_wlb.runtime.attention import attend, attend_backward, context_parallel_attention
from megatron_wlb.runtime.backends import get_backend
from megatron_wlb.runtime.metadata import ShardMetadata
from tests.runtime.oracle import assert_close, dense, inputs, local_rows

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

LENGTHS = {
    "pairs": [2] * 8,
    "short": [3, 7, 1, 2, 5, 6],
    "giant among short": [1, 1000, 2, 5],
    "mixed": [261, 18, 533, 1, 142, 424, 5],
}


def poison():
    """Leave NaN in the allocator's free blocks, where the next outputs are made."""
    blocks = [torch.full((size,), float("nan"), device="cuda") for size in (1 << 8, 1 << 12, 1 << 16, 1 << 20, 1 << 22)]
    del blocks


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("heads", [(8, 2), (4, 4), (4, 1)], ids=["GQA", "MHA", "MQA"])
@pytest.mark.parametrize("cp_size", [1, 2, 4])
@pytest.mark.parametrize("sharding", [per_sequence, per_document])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_every_shard_of_a_plan(lengths, sharding, cp_size, heads, dtype):
    """Each rank's out and dq, and the sum of all ranks' dK and dV."""
    plan = sharding(np.array(lengths, np.int64), cp_size)
    q, k, v, dout = (x.cuda() for x in inputs(sum(lengths), heads, 64, dtype))
    kv, out, dq = torch.stack((k, v), dim=1), torch.empty_like(q), torch.empty_like(q)
    total = torch.zeros(kv.shape, device="cuda")
    backend = get_backend("auto", "cuda")
    for rank in range(cp_size):
        rows, metadata = local_rows(plan, rank).cuda(), ShardMetadata.build(plan, rank, "cuda")
        poison()
        out[rows], lse = attend(q[rows], kv, metadata, backend, 0.2)
        poison()
        dq[rows], dkv = attend_backward(dout[rows], q[rows], kv, out[rows], lse, metadata, backend, 0.2)
        total += dkv
    want = dense(q, k, v, dout, lengths, 0.2)
    assert_close((out, dq, *total.unbind(1)), want, 2**-7 if dtype == torch.bfloat16 else 2**-10)


def test_no_synchronisation_with_the_host():
    lengths = LENGTHS["mixed"]
    plan = per_document(np.array(lengths, np.int64), 1)
    q, k, v, dout = (x.cuda().requires_grad_() for x in inputs(sum(lengths), (8, 2), 64, torch.bfloat16))
    backend = get_backend("auto", "cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        metadata = ShardMetadata.build(plan, 0, "cuda")
        context_parallel_attention(q, k, v, metadata, None, backend).backward(dout.detach())
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_deterministic_on_request():
    lengths = LENGTHS["mixed"]
    metadata = ShardMetadata.build(per_document(np.array(lengths, np.int64), 1), 0, "cuda")
    q, k, v, dout = (x.cuda().requires_grad_() for x in inputs(sum(lengths), (8, 2), 64, torch.bfloat16))
    torch.use_deterministic_algorithms(True)
    try:
        first, second = (
            torch.autograd.grad(
                context_parallel_attention(q, k, v, metadata, None, get_backend("aten", "cuda")), (q, k, v), dout
            )
            for _ in range(2)
        )
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
