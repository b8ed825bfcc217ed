"""The kernels of the triton backend under triton's interpreter, on the CPU.

Triton must be told to interpret before it is imported, so pytest does not collect this file by itself:
`test_backends_triton.py` runs it in another process, with TRITON_INTERPRET=1.
"""

import pytest
import torch

from megatron_wlb.runtime.backends import triton
from megatron_wlb.runtime.backends.triton import TritonBackend
from tests.runtime.calls import CALLS, FULL, WINDOWS, check

# The interpreter of triton 3.7 multiplies bf16 as integers; fp16 takes the same way through the kernels.
HALF = torch.float16


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("entries", CALLS.values(), ids=CALLS)
def test_calls(entries, window):
    check(TritonBackend(), entries, (2, 1), window=window)


@pytest.mark.parametrize("entries", FULL.values(), ids=FULL)
def test_calls_where_queries_see_all_keys(entries):
    check(TritonBackend(), entries, (2, 1), causal=False)


@pytest.mark.parametrize(
    ("dtype", "heads", "head_size"),
    [
        (HALF, (4, 2), 16),
        (HALF, (2, 2), 64),
        (HALF, (3, 1), 24),
        (HALF, (2, 1), 136),
        (torch.float32, (3, 1), 8),
        (torch.float32, (2, 2), 80),
        (torch.float32, (1, 1), 256),
        (HALF, (2, 2), (192, 128)),
        (torch.float32, (3, 1), (16, 40)),
    ],
)
def test_head_sizes_dtypes_and_groups(dtype, heads, head_size):
    check(TritonBackend(), [(0, 70), (67, 131), (0, 1), (1, 1)], heads, head_size, dtype, scale=0.1)


@pytest.mark.parametrize("window", WINDOWS)
def test_windows(window):
    check(TritonBackend(), [(0, 3), (150, 260), (65, 65), (2, 2)], (2, 1), dtype=HALF, window=window)


@pytest.mark.parametrize(("block_q", "block_k"), [(64, 16), (16, 64)])
@pytest.mark.parametrize("window", [None, 20])
def test_blocks_of_other_sizes(window, block_q, block_k, monkeypatch):
    sizes = triton._sizes
    monkeypatch.setattr(triton, "_sizes", lambda q, k, v: sizes(q, k, v) | {"BLOCK_Q": block_q, "BLOCK_K": block_k})
    check(TritonBackend(), [(0, 3), (80, 130), (33, 33), (2, 2)], (2, 1), dtype=HALF, window=window)


def test_scores_far_apart():
    check(TritonBackend(), CALLS["gaps"], (2, 1), scale=100.0, window=20, tolerance=1e-4)


def test_runs_are_equal_to_the_bit():
    first, second = (check(TritonBackend(), CALLS["gaps"], (2, 1)) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
