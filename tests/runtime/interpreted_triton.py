"""The kernels of the triton backend under triton's interpreter, on the CPU.

Triton must be told to interpret before it is imported, so pytest does not collect this file by itself:
`test_backends_triton.py` runs it in another process, with TRITON_INTERPRET=1.
"""

import pytest
import torch

from megatron_wlb.runtime.backends import Call, triton
from megatron_wlb.runtime.backends.trial import colour_of
from megatron_wlb.runtime.backends.triton import TritonBackend
from tests.runtime.colours import COLOURS, WINDOWS, assert_close, expected, run, tensors

# The interpreter of triton 3.7 multiplies bf16 as integers; fp16 takes the same way through the kernels.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2**-10}


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("entries", COLOURS.values(), ids=COLOURS)
def test_colours(entries, window):
    colour = colour_of(entries, "cpu")
    given = (*tensors(colour, (2, 1), 16, torch.float32), Call(colour, 0.3, window))
    assert_close(run(TritonBackend(), *given), expected(*given), TOLERANCE[torch.float32])


@pytest.mark.parametrize(
    ("dtype", "heads", "head_size"),
    [
        (torch.float16, (4, 2), 16),
        (torch.float16, (2, 2), 64),
        (torch.float16, (3, 1), 24),
        (torch.float16, (2, 1), 136),
        (torch.float32, (3, 1), 8),
        (torch.float32, (2, 2), 80),
        (torch.float32, (1, 1), 256),
    ],
)
def test_head_sizes_dtypes_and_groups(dtype, heads, head_size):
    colour = colour_of([(0, 70), (67, 131), (0, 1), (1, 1)], "cpu")
    given = (*tensors(colour, heads, head_size, dtype), Call(colour, head_size**-0.5))
    assert_close(run(TritonBackend(), *given), expected(*given), TOLERANCE[dtype])


@pytest.mark.parametrize("window", WINDOWS)
def test_windows(window):
    colour = colour_of([(0, 3), (150, 260), (65, 65), (2, 2)], "cpu")
    given = (*tensors(colour, (2, 1), 16, torch.float16), Call(colour, 0.3, window))
    assert_close(run(TritonBackend(), *given), expected(*given), TOLERANCE[torch.float16])


@pytest.mark.parametrize(("block_q", "block_k"), [(64, 16), (16, 64)])
@pytest.mark.parametrize("window", [None, 20])
def test_blocks_of_other_sizes(window, block_q, block_k, monkeypatch):
    sizes = triton._sizes
    monkeypatch.setattr(triton, "_sizes", lambda q, k: sizes(q, k) | {"BLOCK_Q": block_q, "BLOCK_K": block_k})
    colour = colour_of([(0, 3), (80, 130), (33, 33), (2, 2)], "cpu")
    given = (*tensors(colour, (2, 1), 16, torch.float16), Call(colour, 0.3, window))
    assert_close(run(TritonBackend(), *given), expected(*given), TOLERANCE[torch.float16])


def test_scores_far_apart():
    colour = colour_of(COLOURS["gaps"], "cpu")
    given = (*tensors(colour, (2, 1), 16, torch.float32), Call(colour, 100.0, 20))
    assert_close(run(TritonBackend(), *given), expected(*given), 1e-4)


def test_runs_are_equal_to_the_bit():
    colour = colour_of(COLOURS["gaps"], "cpu")
    given = (*tensors(colour, (2, 1), 16, torch.float32), Call(colour, 0.3))
    first, second = (run(TritonBackend(), *given) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
