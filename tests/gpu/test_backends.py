"""Every GPU backend against float64: hand-made calls with gap entries, and all shards of plans."""

import numpy as np
import pytest
import torch

from megatron_wlb.runtime.attention import AttentionOptions, context_parallel_attention
from megatron_wlb.runtime.backends import BACKENDS, get_backend
from megatron_wlb.runtime.metadata import ShardMetadata
from megatron_wlb.runtime.reference import expected, kernel_args
from tests.covering import covering
from tests.reference.chunks import per_document
from tests.runtime.calls import ALL, WINDOWS, check, run
from tests.runtime.oracle import SHARDINGS, TOLERANCE, all_ranks, assert_close, dense, in_shares, inputs

pytestmark = pytest.mark.gpu

LENGTHS = {
    "pairs": [2] * 8,
    "short": [3, 7, 1, 2, 5, 6],
    "giant among short": [1, 1000, 2, 5],
    "mixed": [261, 18, 533, 1, 142, 424, 5],
}


ON_GPU = [name for name, cls in BACKENDS.items() if cls.device_types == ("cuda",)]
HEADS = {"GQA": (8, 2), "MHA": (4, 4), "MQA": (4, 1)}


@pytest.fixture(params=ON_GPU)
def backend(request):
    """Skips, with the reason, where the package is not installed, has another interface, or not this GPU's kernels."""
    capability = torch.cuda.get_device_capability()
    if (request.param == "te" and capability < (9, 0)) or (request.param == "flash_attn_3" and capability[0] != 9):
        pytest.skip(f"{request.param} needs compute capability 9.0, not {capability}")
    try:
        return get_backend(request.param, "cuda")
    except ValueError as error:
        pytest.skip(str(error))


def poison():
    """Leave NaN in the allocator's free blocks, where the next outputs are made."""
    blocks = [torch.full((size,), float("nan"), device="cuda") for size in (1 << 8, 1 << 12, 1 << 16, 1 << 20, 1 << 22)]
    del blocks


def single(backend, lengths):
    """One shard: metadata on the GPU, and its q, k, v, dout in bf16, with gradients wanted."""
    metadata = ShardMetadata.build(per_document(np.array(lengths, np.int64), 1), 0, backend.encode).to("cuda")
    return metadata, [x.cuda().requires_grad_() for x in inputs(sum(lengths), (8, 2), 64, torch.bfloat16)]


@covering(indirect=("backend",), backend=ON_GPU, call=ALL, heads=HEADS, window=WINDOWS)
def test_calls(backend, call, heads, window):
    entries, causal = call
    for dtype in backend.dtypes:
        poison()
        check(backend, entries, heads, 64, dtype, scale=0.2, window=window, causal=causal, device="cuda")


@covering(indirect=("backend",), backend=ON_GPU, head_size=[8, 24, 80, 96, 128, 192, 256, (192, 128)])
def test_head_sizes(backend, head_size):
    if isinstance(head_size, tuple) and not backend.any_value_size:
        pytest.skip(f"{backend.name} refuses values of another head size than keys")
    if head_size in (192, 256) and backend.name == "te":
        with pytest.raises(ValueError, match="gave NaN in gradients"):
            check(backend, [(1, 1)], (4, 2), head_size, torch.bfloat16, device="cuda")
        return
    entries = [(0, 70), (300, 500), (0, 1), (1, 1), (129, 129)]
    for dtype in backend.dtypes:
        check(backend, entries, (4, 2), head_size, dtype, scale=0.1, device="cuda")


def test_rows_further_apart_than_32_bits_count(backend):
    """The last row of an entry lies 2 ** 31 numbers behind its first, as in long documents of many heads."""
    entries, dtype = [(3, 3)], torch.bfloat16
    q, k, v, dout = inputs(3, (2, 2), 64, dtype, device="cuda")
    far = torch.empty((1 << 31) + 2 * 64, dtype=dtype, device="cuda").as_strided((3, 2, 64), (1 << 30, 64, 1))
    given = q, far.copy_(k), v, dout
    got = run(backend, *given, kernel_args(backend, entries, "cuda", 0.2))
    assert_close(got, expected(entries, *given, 0.2), TOLERANCE[dtype])


@covering(
    indirect=("backend",),
    backend=ON_GPU,
    lengths=LENGTHS,
    sharding=SHARDINGS | {"in shares": in_shares},
    cp=[1, 2, 4],
    heads=HEADS,
)
def test_all_shards_of_a_plan(backend, lengths, sharding, cp, heads):
    plan = sharding(np.array(lengths, np.int64), cp)
    tensors = [x.cuda() for x in inputs(sum(lengths), heads, 64, torch.bfloat16)]
    for window in (None,) if sharding is in_shares else (None, 100):
        poison()
        got = all_ranks(*tensors, plan, AttentionOptions(backend=backend, scale=0.2, window=window))
        assert_close(got, dense(*tensors, lengths, 0.2, window), TOLERANCE[torch.bfloat16])


def test_no_synchronisation_with_the_host(backend):
    """From the second call on: the first may build plans or compile."""
    lengths = LENGTHS["mixed"]
    options = AttentionOptions(backend=backend)
    for mode in ("default", "error"):
        metadata, (q, k, v, dout) = single(backend, lengths)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode(mode)
        try:
            context_parallel_attention(q, k, v, metadata, None, options).backward(dout.detach())
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_deterministic_on_request(backend):
    metadata, (q, k, v, dout) = single(backend, LENGTHS["mixed"])
    options = AttentionOptions(backend=backend)
    torch.use_deterministic_algorithms(True)
    try:
        first, second = (
            torch.autograd.grad(context_parallel_attention(q, k, v, metadata, None, options), (q, k, v), dout)
            for _ in range(2)
        )
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
