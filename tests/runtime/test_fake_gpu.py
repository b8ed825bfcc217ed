"""The path of a GPU on fake tensors: without a GPU they know devices, dtypes and shapes, and refuse to give a value.

So they find what a CPU cannot: an integer left on the host, a result on the wrong device or of the wrong dtype, a value
that the host asks for.
"""

import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_wlb.runtime.attention import AttentionOptions
from megatron_wlb.runtime.backends.flash import AtenBackend
from megatron_wlb.runtime.metadata import ShardMetadata
from tests.runtime.oracle import SHARDINGS, by_hand, in_shares

ROOT = Path(__file__).parents[2]
LENGTHS = np.array([700, 33, 5, 1, 290, 3], np.int64)
HEADS, HEAD_SIZE, CP, CP_RANK = (8, 2), 128, 4, 1


def gpu(rows: int, heads: int) -> torch.Tensor:
    made = torch.empty(rows, heads, HEAD_SIZE, dtype=torch.bfloat16, device="cuda")
    assert made.device.type == "cuda"
    return made


def forward_and_backward() -> None:
    for sharding, window in (*product(SHARDINGS.values(), (None, 64)), (in_shares, None)):
        metadata = ShardMetadata.build(sharding(LENGTHS, CP), CP_RANK, AtenBackend.encode, windows=(window,))
        options = AttentionOptions(backend=AtenBackend(), window=window)
        with FakeTensorMode() as mode:
            metadata = replace(metadata, integers=mode.from_tensor(metadata.integers)).to("cuda")
            q, k, v = (gpu(metadata.num_rows, heads) for heads in (HEADS[0], HEADS[1], HEADS[1]))
            results = by_hand(q, k, v, torch.empty_like(q), metadata, dist.group.WORLD, options)
        for got, like in zip(results, (q, q, k, v), strict=True):
            assert (got.shape, got.dtype, got.device) == (like.shape, like.dtype, like.device)
            assert got.is_contiguous()


def run() -> None:
    """As a rank of four whose collectives return at once."""
    dist.init_process_group("fake", rank=CP_RANK, world_size=CP, store=FakeStore())
    forward_and_backward()
    dist.destroy_process_group()


def test_on_a_fake_gpu():
    """In a process of its own: where other tests ran, "cuda" may be the CPU (`adapter/cpu.py`)."""
    command = [sys.executable, "-W", "ignore", "-c", f"from {__name__} import run; run()"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
