"""Three questions about a GPU on which predictions rest, in half a minute.

    python -m benchmarks.gpu.probes [--rehearse]

1. What does a receive cost that waits? NCCL's kernels spin on multiprocessors until the other side sends. A product and
   attention beside a kernel of so many blocks that spin in another stream.
2. Does what leaves after a round leave at once? Two attentions in one stream, and a small kernel in another one, of
   default and of high priority, that waits for the first: how long after that it has ended.
3. Does backward of a mask to the bottom right take the time of tiles that it hides? Queries at the end of a document in
   one call, against two: their own square, and the keys before it without a mask.

On a CPU nothing spins, and the second question is left out.
"""

import contextlib
import statistics
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from benchmarks import results
from benchmarks.gpu import machine
from benchmarks.results import Row
from megatron_wlb.documents import SEGMENT
from megatron_wlb.runtime.backends import get_backend
from megatron_wlb.runtime.backends.protocol import Backend, KernelArgs, keys_and_values, side_by_side
from megatron_wlb.runtime.measure import stopwatch_of

HEADS, HEAD_SIZE = 4, 128
"""Of a tensor-parallel rank of 7B."""
BLOCKS = (0, 2, 4, 8, 16, 32)
CHUNKS = ((16384, 32768), (16384, 65536), (8192, 131_072))
"""Queries, and the keys that they end."""
ROWS = 32768
Calls = tuple[Callable[[], Any], Callable[[], Any]]


def attention(backend: Backend, rows: int, keys: int, *, causal: bool, tensors: dict[str, Any]) -> Calls:
    """Forward and backward of `rows` queries, the last of `keys` keys if causal."""
    segments = np.array([(0, keys - rows, keys)], SEGMENT)
    table, max_q, max_k = backend.encode(np.array([0, keys]), segments)
    given = KernelArgs(
        torch.from_numpy(table).to(tensors["device"]), max_q, max_k, HEAD_SIZE**-0.5, None, causal, False
    )
    q, dout = torch.randn(2, rows, HEADS, HEAD_SIZE, **tensors)
    kv = side_by_side(*torch.randn(2, keys, HEADS, HEAD_SIZE, **tensors))
    k, v = keys_and_values(kv, HEAD_SIZE)
    dkv = torch.empty_like(kv, dtype=torch.float32)
    out, lse = backend.forward(q, k, v, given)
    return lambda: backend.forward(q, k, v, given), lambda: backend.backward(dout, q, k, v, out, lse, dkv, given)


@contextlib.contextmanager
def spinning(blocks: int) -> Iterator[None]:
    """Keep so many blocks of 512 threads spinning in another stream; nothing on a CPU."""
    if not blocks or not torch.cuda.is_available():
        yield
        return
    flag, side, other = torch.zeros(1, dtype=torch.int32, device="cuda"), torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        _spin[(blocks,)](flag, num_warps=16)
    try:
        yield
    finally:
        with torch.cuda.stream(other):
            flag.fill_(1)
        torch.cuda.synchronize()


@triton.jit
def _spin(flag):  # type: ignore[no-untyped-def]
    while tl.atomic_add(flag, 0) == 0:
        pass


def leaving(call: Callable[[], Any], priority: int) -> list[float]:
    """Median ms after the first of two calls until a small kernel behind it has run, and the second has."""
    side, events = torch.cuda.Stream(priority=priority), [torch.cuda.Event(enable_timing=True) for _ in range(3)]
    small, found = torch.empty(8 * 512 * 64, device="cuda"), []
    for _ in range(8):
        call()
        events[0].record()
        with torch.cuda.stream(side):
            side.wait_event(events[0])
            small.normal_()
            events[1].record()
        call()
        events[2].record()
        torch.cuda.synchronize()
        found.append([events[0].elapsed_time(each) for each in events[1:]])
    return [statistics.median(each) for each in zip(*found, strict=True)]


def rows_of(device: str, divisor: int) -> Iterator[Row]:
    """The answers; sizes are divided by `divisor`."""
    backend = get_backend("auto", device)
    dtype = torch.bfloat16 if torch.bfloat16 in backend.dtypes and device == "cuda" else torch.float32
    tensors, timed = {"device": device, "dtype": dtype}, stopwatch_of(device, seconds=0)
    for rows, keys in ((rows // divisor, keys // divisor) for rows, keys in CHUNKS):
        shapes = {"to the bottom right": (keys, True), "own square": (rows, True), "keys before": (keys - rows, False)}
        for shape, (seen, causal) in shapes.items():
            calls = attention(backend, rows, seen, causal=causal, tensors=tensors)
            forward, backward = map(timed, calls)
            yield {"probe": shape, "queries": rows, "keys": keys, "forward_us": forward, "backward_us": backward}
    size = ROWS // divisor
    x, w = torch.randn(size // 2, size // 8, **tensors), torch.randn(size // 8, size // 8, **tensors)
    whole = attention(backend, size, size, causal=True, tensors=tensors)[0]
    for name, call in {"product": lambda: x @ w, "attention": whole}.items():
        for blocks in BLOCKS:
            with spinning(blocks):
                yield {"probe": f"{name} beside a receive", "blocks": blocks, "us": timed(call)}
    for priority in (0, -1) if device == "cuda" else ():
        after, of_next = leaving(whole, priority)
        yield {"probe": "leaves after a round", "priority": priority, "ms": after, "next_round_ms": of_next}


def main() -> None:
    parser = machine.parser(__doc__)
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, at a tiny size")
    args = parser.parse_args()
    rows: list[Row] = []
    for row in rows_of("cpu" if args.rehearse else "cuda", 256 if args.rehearse else 1):
        rows.append(row)
        print(row, flush=True)
    gpu = None if args.rehearse else torch.cuda.get_device_name()
    settings = {"command": sys.argv[1:], "cuda": torch.version.cuda, "heads": HEADS, "head_size": HEAD_SIZE}
    if args.output or gpu:
        print(results.write("probes", settings=settings, rows=rows, **machine.where(args, gpu)))


if __name__ == "__main__":
    main()
