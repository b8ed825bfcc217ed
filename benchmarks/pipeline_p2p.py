"""What the pipeline saves by knowing the lengths of its micro-batches: our communicator against upstream's handshake.

    python -m benchmarks.pipeline_p2p [--quick] [--check]

Both run upstream's own schedules on gloo, in processes of this machine, over the same micro-batches of varying length,
by turns in the same world. Stages do next to nothing, so that time is communication. Counted are the messages that a
stage sends a step, measured is the wall time of a step (median, minimum, maximum). Writes
benchmarks/results/pipeline_p2p.json.
"""

import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks import pipelines, results
from benchmarks.results import Row
from tests.worlds import run_world

LAYOUTS = {"PP=4": (4, 1), "PP=2 x VPP=2": (2, 2)}
SIZES = ((64, 64), (1024, 256), (4096, 512))
"""Largest micro-batch in tokens, hidden size."""
MICRO_BATCHES = 8


def main() -> None:
    args = results.parser(__doc__, "seconds: few steps, nothing written").parse_args()
    steps = 4 if args.quick else 40
    rows = []
    for layout, (size, num_chunks) in LAYOUTS.items():
        for max_tokens, hidden in SIZES:
            measured = run_world(_measure, size, num_chunks, max_tokens, hidden, steps, timeout=600)
            rows.append({"layout": layout, "max_tokens": max_tokens, "hidden": hidden, **_merge(measured)})
    wanted = []
    for row in rows:
        name = f"{row['layout']}, {row['max_tokens']} x {row['hidden']}"
        halves = row["planned_messages"] / row["handshake_messages"]
        wanted.append(results.at_most(f"{name}: messages, ours / upstream's", halves, 0.5))
        ratio = row["handshake_ms"] / row["planned_ms"]
        wanted.append(results.at_least(f"{name}: time, upstream's / ours", ratio, 1.0))
    columns = ("planned_messages", "handshake_messages", "planned_ms", "handshake_ms")
    results.show(rows, ("layout", "max_tokens", "hidden", *columns))
    settings = {"micro_batches": MICRO_BATCHES, "steps": steps, "backend": "gloo, float32"}
    results.finish(args, "pipeline_p2p", settings=settings, rows=rows, goals=wanted)


def _measure(num_chunks: int, max_tokens: int, hidden: int, steps: int) -> Row:
    """In every process: times and messages of both communicators, by turns."""
    config = pipelines.begin(
        num_chunks, num_layers=num_chunks * dist.get_world_size(), hidden_size=hidden, num_attention_heads=1
    )
    from megatron.core import mpu
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    chunks = [_Chunk(config, first=dist.get_rank() == 0 and chunk == 0) for chunk in range(num_chunks)]
    rng = np.random.default_rng(0)  # the same lengths on every rank
    sent = _count_sends()
    times: dict[str, list[float]] = {"planned": [], "handshake": []}
    messages: dict[str, int] = {}
    for step in range(2 * (steps + 1)):
        if step % 2 == 0:
            tokens = rng.integers(max_tokens // 4, max_tokens + 1, MICRO_BATCHES).tolist()
        kind = ("planned", "handshake")[(step + step // 2) % 2]
        if kind == "planned":
            communicator = pipelines.planned(config, tokens)
        else:
            communicator = P2PCommunicator(pp_group=mpu.get_pipeline_model_parallel_group(), config=config)
        feeds = [[(count,) for count in tokens]] * num_chunks
        dist.barrier()
        sent.clear()
        begin = time.perf_counter()
        pipelines.step(chunks, feeds, communicator, max_tokens)
        dist.barrier()
        if step >= 2:  # the first of each warms up
            times[kind].append((time.perf_counter() - begin) * 1e3)
        messages[kind] = len(sent)
    return {"times": times, "messages": messages}


class _Chunk(pipelines.Chunk):
    """One multiplication."""

    def __init__(self, config: Any, first: bool) -> None:
        super().__init__(config)
        self.first = first
        self.weight = torch.nn.Parameter(torch.ones(config.hidden_size))

    def forward(self, tokens: int) -> torch.Tensor:
        x = torch.ones(tokens, 1, self.config.hidden_size) if self.first else self.input
        assert x is not None and x.shape[0] == tokens
        return x * self.weight


def _count_sends() -> list[str]:
    """Every point-to-point send of this process; batched operations, too, are made of them."""
    sent: list[str] = []
    isend = dist.isend

    def counted(*args: Any, **kwargs: Any) -> Any:
        sent.append("isend")
        return isend(*args, **kwargs)

    dist.isend = dist.distributed_c10d.isend = counted
    return sent


def _merge(measured: list[Row]) -> Row:
    """A step takes as long as on its slowest rank; messages are those of all ranks."""
    row: Row = {}
    for kind in ("planned", "handshake"):
        slowest = np.array([m["times"][kind] for m in measured]).max(0)
        row |= results.spread(f"{kind}_ms", slowest)
        row[f"{kind}_messages"] = sum(m["messages"][kind] for m in measured)
    return row


if __name__ == "__main__":
    main()
