"""The path of a GPU on fake tensors: without a GPU they know devices, dtypes and shapes, and refuse to give a value.

So they find what a CPU cannot: an integer left on the host, a result on the wrong device or of the wrong dtype, a value
that the host asks for.
"""

import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_wlb.runtime import attention
from megatron_wlb.runtime.attention import AttentionOptions, _ContextParallelAttention
from megatron_wlb.runtime.backends import KernelArgs
from megatron_wlb.runtime.backends.aten import AtenBackend
from megatron_wlb.runtime.metadata import ShardMetadata
from megatron_wlb.sharding import per_document
from tests.runtime.oracle import SHARDINGS, in_parts

ROOT = Path(__file__).parents[2]
LENGTHS = np.array([700, 33, 5, 1, 290, 3], np.int64)
HEADS, HEAD_SIZE, CP, CP_RANK = (8, 2), 128, 4, 1


def gpu(rows: int, heads: int) -> torch.Tensor:
    made = torch.empty(rows, heads, HEAD_SIZE, dtype=torch.bfloat16, device="cuda")
    assert made.device.type == "cuda"
    return made


def forward_and_backward() -> None:
    cases = [*product(SHARDINGS.values(), (False, True), (None, 64)), (in_parts, False, None), (in_parts, True, None)]
    for sharding, save_gathered, window in cases:
        metadata = ShardMetadata.build(sharding(LENGTHS, CP), CP_RANK, AtenBackend.encode)
        options = AttentionOptions(backend=AtenBackend(), save_gathered=save_gathered, window=window)
        ctx = SimpleNamespace()
        ctx.save_for_backward = lambda *tensors, ctx=ctx: setattr(ctx, "saved_tensors", tensors)
        with FakeTensorMode() as mode:
            metadata = replace(metadata, integers=mode.from_tensor(metadata.integers)).to("cuda")
            q, k, v = (gpu(metadata.num_rows, heads) for heads in (HEADS[0], HEADS[1], HEADS[1]))
            # By hand: autograd asks the driver for the device.
            out = _ContextParallelAttention.forward(ctx, q, k, v, None, metadata, dist.group.WORLD, options)
            gradients = _ContextParallelAttention.backward(ctx, torch.empty_like(out))[:3]
        for got, like in zip((out, *gradients), (q, q, k, v), strict=True):
            assert (got.shape, got.dtype, got.device) == (like.shape, like.dtype, like.device)
            assert got.is_contiguous()


class _Stream:
    """Notes what waits for what."""

    def __init__(self, name: str, notes: list[str]) -> None:
        self.name, self.device, self._notes = name, torch.device("cuda"), notes

    def wait_stream(self, other: "_Stream") -> None:
        self._notes.append(f"{self.name} waits for {other.name}")

    def __enter__(self) -> None:
        self._notes.append(f"on {self.name}")

    def __exit__(self, *error: object) -> None:
        self._notes.append(f"off {self.name}")


def two_streams() -> None:
    """The first call runs on a stream of its own; nobody adds to what it wrote, or reads it, before it has ended."""
    notes: list[str] = []
    main, beside = _Stream("main", notes), _Stream("beside", notes)
    torch.cuda.current_stream, torch.cuda.stream = lambda device: main, lambda stream: stream
    attention._side_stream = lambda device: beside
    metadata = ShardMetadata.build(per_document(LENGTHS, CP), CP_RANK, AtenBackend.encode)
    assert len(metadata.layouts[0].calls) == 2
    store = KernelArgs.store
    KernelArgs.store = lambda self, *given: (store(self, *given), notes.append("stored"))[0]
    began = ["beside waits for main", "on beside"]
    with FakeTensorMode() as mode:
        metadata = replace(metadata, integers=mode.from_tensor(metadata.integers)).to("cuda")
        (documents,) = metadata.parts
        q, kv = gpu(metadata.num_rows, HEADS[0]), gpu(len(documents.gather), 2 * HEADS[1]).unflatten(1, (2, -1))
        out, dq = torch.empty_like(q), torch.empty_like(q)
        for used in (False, True):
            options = AttentionOptions(backend=AtenBackend(), two_streams=used)
            lse = attention.attend(q, kv, out, documents, options)
            assert notes == ([*began, "off beside", "main waits for beside"] if used else [])
            notes.clear()
            attention.attend_backward(out, q, kv, out, lse, dq, documents, options)
            adding = ["main waits for beside", "stored", "main waits for beside"]
            assert notes == ([*began, "stored", "off beside", *adding] if used else ["stored", "stored"])
            notes.clear()


def what_fake_tensors_refuse() -> None:
    """That the other one can fail: integers on the host, and a value that the host asks for."""
    metadata = ShardMetadata.build(per_document(LENGTHS, CP), CP_RANK, AtenBackend.encode)
    options = AttentionOptions(backend=AtenBackend())
    with FakeTensorMode() as mode:
        on_host = replace(metadata, integers=mode.from_tensor(metadata.integers))
        q, k = gpu(metadata.num_rows, HEADS[0]), gpu(metadata.num_rows, HEADS[1])
        with pytest.raises(RuntimeError, match="device"):
            _ContextParallelAttention.forward(SimpleNamespace(), q, k, k, None, on_host, dist.group.WORLD, options)
        with pytest.raises(DataDependentOutputException):
            int(on_host.to("cuda").positions.max())


def run() -> None:
    """All checks, as a rank of four whose collectives return at once."""
    dist.init_process_group("fake", rank=CP_RANK, world_size=CP, store=FakeStore())
    forward_and_backward()
    what_fake_tensors_refuse()
    two_streams()  # last: it replaces functions of torch
    dist.destroy_process_group()


def test_on_a_fake_gpu():
    """In a process of its own: where other tests ran, "cuda" may be the CPU (`adapter/cpu.py`)."""
    command = [sys.executable, "-W", "ignore", "-c", f"from {__name__} import run; run()"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
