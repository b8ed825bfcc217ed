"""Every rank of small micro-batches against float64: ours, and with copies instead of entries without queries."""

from collections.abc import Sequence
from itertools import product

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.ranks import CopyFree, MakeMethod, PrefixCopies, Rank, Rows, both, ranks
from megatron_wlb.runtime.attention import AttentionOptions
from megatron_wlb.runtime.backends import Backend
from tests.runtime.oracle import SHARDINGS, TOLERANCE, dense, inputs, relative_error

LENGTHS = {
    "ones": [1] * 16,
    "pairs": [2] * 8,
    "short": [3, 7, 1, 2, 5, 6],
    "giant among short": [1, 1000, 2, 5],
    "mixed": [261, 18, 533, 1, 142, 424, 5],
}
QUICK_LENGTHS = ("ones", "pairs", "short")
HEADS = {"GQA": (8, 2), "MHA": (4, 4), "MQA": (4, 1)}
HEAD_SIZES = (64, 128, 256)
CPS = (1, 2, 4)
SCALE = 0.2
NAMES = ("out", "dq", "dk", "dv")
METHODS: dict[str, MakeMethod] = {"ours": CopyFree, "prefix copies": PrefixCopies}


def check(
    backend: Backend, device: torch.device, dtype: torch.dtype, *, quick: bool
) -> tuple[dict[str, float], list[str]]:
    """The largest relative error of ours by tensor, and what is wrong, one line a case; a backend may also raise."""
    cases = product(QUICK_LENGTHS, list(HEADS)[:1], HEAD_SIZES[:1]) if quick else product(LENGTHS, HEADS, HEAD_SIZES)
    worst, wrong = dict.fromkeys(NAMES, 0.0), []
    for lengths, heads, head_size in cases:
        tensors = [x.to(device) for x in inputs(sum(LENGTHS[lengths]), HEADS[heads], head_size, dtype)]
        want = dense(*tensors, LENGTHS[lengths], SCALE)
        q, k, v, dout = tensors
        micro_batch = Rows(q, torch.stack((k, v), dim=1), dout)
        for sharding, cp in product(SHARDINGS, CPS):
            members = ranks(SHARDINGS[sharding](np.array(LENGTHS[lengths], np.int64), cp), backend, device)
            errors = {}
            for method, make in METHODS.items():
                got = _together(members, micro_batch, backend, make)
                errors[method] = dict(zip(NAMES, map(relative_error, got, want), strict=True))
            worst = {name: max(error, errors["ours"][name]) for name, error in worst.items()}
            for method, error in errors.items():
                if not all(e <= TOLERANCE[dtype] for e in error.values()):  # NaN, too
                    found = ", ".join(f"{name} {e:.1e}" for name, e in error.items())
                    wrong.append(f"{method}: {lengths}, {heads}, D={head_size}, {sharding}, CP={cp}: {found}")
    return worst, wrong


def _together(members: Sequence[Rank], micro_batch: Rows, backend: Backend, make: MakeMethod) -> tuple[Tensor, ...]:
    """out, dq, dk, dv of the micro-batch, from all of its ranks."""
    q, kv, _ = micro_batch
    out, dq, dkv = torch.empty_like(q), torch.empty_like(q), torch.zeros_like(kv, dtype=torch.float32)
    for rank in members:
        method, local = make(rank, AttentionOptions(backend=backend, scale=SCALE)), rank.local(micro_batch)
        _poison(q.device)
        out[rank.rows], dq[rank.rows], part = both(method, local)
        dkv.index_add_(0, rank.keys, part.float())
    return out, dq, *dkv.unbind(1)


def _poison(device: torch.device) -> None:
    """Leave NaN in the allocator's free blocks, where outputs are made, so that what is not written shows."""
    for size in (1 << 8, 1 << 12, 1 << 16, 1 << 20, 1 << 22):
        torch.full((size,), float("nan"), device=device)
