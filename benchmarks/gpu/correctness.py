"""All ranks of small micro-batches against float64."""

from itertools import product

import numpy as np
import torch

from megatron_wlb.runtime.attention import AttentionOptions
from megatron_wlb.runtime.backends import Backend
from tests.runtime.oracle import SHARDINGS, TOLERANCE, all_ranks, dense, inputs, relative_error

LENGTHS = ([1] * 16, [2] * 8, [3, 7, 1, 2, 5, 6], [1, 1000, 2, 5], [261, 18, 533, 1, 142, 424, 5])
HEADS = ((8, 2), (4, 4), (4, 1))
HEAD_SIZES = (64, 128, 256)
CPS = (1, 2, 4)
SCALE = 0.2


def check(
    backend: Backend, device: torch.device, dtype: torch.dtype, *, quick: bool
) -> tuple[dict[str, float], list[str]]:
    """The largest relative error by tensor, and what is wrong, one line a case; a backend may also raise."""
    cases = product(LENGTHS[:3], HEADS[:1], HEAD_SIZES[:1]) if quick else product(LENGTHS, HEADS, HEAD_SIZES)
    worst, wrong = dict.fromkeys(("out", "dq", "dk", "dv"), 0.0), []
    options = AttentionOptions(backend=backend, scale=SCALE)
    for lengths, heads, head_size in cases:
        tensors = [x.to(device) for x in inputs(sum(lengths), heads, head_size, dtype)]
        want = dense(*tensors, lengths, SCALE)
        for sharding, cp in product(SHARDINGS, CPS):
            _poison(device)
            got = all_ranks(*tensors, SHARDINGS[sharding](np.array(lengths, np.int64), cp), options)
            errors = dict(zip(worst, map(relative_error, got, want), strict=True))
            worst = {name: max(error, errors[name]) for name, error in worst.items()}
            if not all(error <= TOLERANCE[dtype] for error in errors.values()):  # NaN, too
                wrong.append(f"{lengths}, heads {heads}, D={head_size}, {sharding}, CP={cp}: {errors}")
    return worst, wrong


def _poison(device: torch.device) -> None:
    """Leave NaN in the allocator's free blocks, where outputs are made, so that what is not written shows."""
    for size in (1 << 8, 1 << 12, 1 << 16, 1 << 20, 1 << 22):
        torch.full((size,), float("nan"), device=device)
