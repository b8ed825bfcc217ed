"""What the pipeline saves by knowing the lengths of its micro-batches: our communicator against upstream's handshake.

    python -m benchmarks.pipeline_p2p [--quick] [--check]

Both run upstream's own schedules on gloo, in processes of this machine, over the same micro-batches of varying length,
by turns in the same world. Stages do next to nothing, so that time is communication. Counted are the messages that a
stage sends a step, measured is the wall time of a step (median, minimum, maximum). Writes
benchmarks/results/pipeline_p2p.json.
"""

import argparse
import statistics
import sys
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from benchmarks import results
from tests.worlds import run_world

Row = dict[str, Any]
LAYOUTS = {"PP=4": (4, None), "PP=2 x VPP=2": (2, 2)}
SIZES = ((64, 64), (1024, 256), (4096, 512))
"""Largest micro-batch in tokens, hidden size."""
MICRO_BATCHES = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="seconds: few steps, nothing written")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a goal is missed")
    args = parser.parse_args()
    steps = 4 if args.quick else 40
    rows = []
    for layout, (size, chunks) in LAYOUTS.items():
        for max_tokens, hidden in SIZES:
            measured = run_world(_measure, size, chunks, max_tokens, hidden, steps, timeout=600)
            rows.append({"layout": layout, "max_tokens": max_tokens, "hidden": hidden, **_merge(measured)})
    wanted = []
    for row in rows:
        name = f"{row['layout']}, {row['max_tokens']} x {row['hidden']}"
        halves = row["planned_messages"] / row["handshake_messages"]
        wanted.append(results.Goal(name=f"{name}: messages, ours / upstream's", value=halves, goal=0.5, direction="<="))
        ratio = row["handshake_ms"] / row["planned_ms"]
        wanted.append(results.Goal(name=f"{name}: time, upstream's / ours", value=ratio, goal=1.0, direction=">="))
    _show(rows, wanted)
    if not args.quick:
        settings = {"micro_batches": MICRO_BATCHES, "steps": steps, "backend": "gloo, float32"}
        print(results.write("pipeline_p2p", settings=settings, rows=rows, goals=wanted))
    if args.check and not all(g.holds for g in wanted):
        sys.exit(1)


def _measure(chunks: int | None, max_tokens: int, hidden: int, steps: int) -> Row:
    """In every process: times and messages of both communicators, by turns."""
    from megatron_wlb.adapter import cpu

    cpu.install()
    from megatron.core import mpu
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig

    from megatron_wlb.adapter.p2p import PlannedP2PCommunicator

    stages = dist.get_world_size()
    mpu.initialize_model_parallel(
        pipeline_model_parallel_size=stages,
        virtual_pipeline_model_parallel_size=chunks,
        create_gloo_process_groups=True,
    )
    config = TransformerConfig(
        num_layers=stages * (chunks or 1),
        hidden_size=hidden,
        num_attention_heads=1,
        pipeline_model_parallel_size=stages,
        virtual_pipeline_model_parallel_size=chunks,
        pipeline_dtype=torch.float32,
        variable_seq_lengths=True,
        overlap_p2p_comm=chunks is not None,
        batch_p2p_comm=chunks is None,
        calculate_per_token_loss=True,
        moe_token_dispatcher_type="alltoall",  # asked for with variable lengths, experts or not
    )
    models = [_Stage(config, first=dist.get_rank() == 0 and chunk == 0) for chunk in range(chunks or 1)]
    rng = np.random.default_rng(0)  # the same lengths on every rank
    sent = _count_sends()
    run = get_forward_backward_func()
    times: dict[str, list[float]] = {"planned": [], "handshake": []}
    messages: dict[str, int] = {}
    for step in range(2 * (steps + 1)):
        if step % 2 == 0:
            tokens = rng.integers(max_tokens // 4, max_tokens + 1, MICRO_BATCHES).tolist()
        kind = ("planned", "handshake")[(step + step // 2) % 2]
        group = mpu.get_pipeline_model_parallel_group()
        if kind == "planned":
            communicator = PlannedP2PCommunicator(group, config, tokens, 1, False)
        else:
            communicator = P2PCommunicator(pp_group=group, config=config)
        iterators: Any = [iter(tokens) for _ in models]
        dist.barrier()
        sent.clear()
        begin = time.perf_counter()
        run(
            forward_step_func=_forward_step,
            data_iterator=iterators if chunks else iterators[0],
            model=models if chunks else models[0],
            num_microbatches=MICRO_BATCHES,
            seq_length=max_tokens,
            micro_batch_size=1,
            forward_only=False,
            p2p_communicator=communicator,
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        )
        dist.barrier()
        if step >= 2:  # the first of each warms up
            times[kind].append((time.perf_counter() - begin) * 1e3)
        messages[kind] = len(sent)
    return {"times": times, "messages": messages}


class _Stage(torch.nn.Module):
    """One multiplication."""

    def __init__(self, config: Any, first: bool) -> None:
        super().__init__()
        self.config, self.first, self.model_type = config, first, None
        self.weight = torch.nn.Parameter(torch.ones(config.hidden_size))
        self.input: torch.Tensor | None = None

    def set_input_tensor(self, tensor: Any) -> None:
        self.input = tensor[0] if isinstance(tensor, list) else tensor

    def forward(self, tokens: int) -> torch.Tensor:
        x = torch.ones(tokens, 1, self.config.hidden_size) if self.first else self.input
        assert x is not None and x.shape[0] == tokens
        return x * self.weight


def _forward_step(iterator: Any, model: _Stage) -> Any:
    return model(next(iterator)), _loss


def _loss(output: torch.Tensor) -> Any:
    loss = output.sum()
    return loss, torch.tensor(output.shape[0]), {"loss": torch.stack([loss.detach(), torch.tensor(1.0)])}


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
        row |= {
            f"{kind}_ms": statistics.median(slowest.tolist()),
            f"{kind}_ms_min": float(slowest.min()),
            f"{kind}_ms_max": float(slowest.max()),
            f"{kind}_messages": sum(m["messages"][kind] for m in measured),
        }
    return row


def _show(rows: list[Row], wanted: list[results.Goal]) -> None:
    console = Console(width=120)
    table = Table("layout", "tokens", "hidden", "messages", "upstream's", "ms", "upstream's", "ratio")
    for r in rows:
        numbers = (r["max_tokens"], r["hidden"], r["planned_messages"], r["handshake_messages"])
        times = (f"{r['planned_ms']:.2f}", f"{r['handshake_ms']:.2f}", f"{r['handshake_ms'] / r['planned_ms']:.2f}")
        table.add_row(r["layout"], *map(str, numbers), *times)
    console.print(table)
    for g in wanted:
        console.print(f"{'holds ' if g.holds else 'MISSED'} {g.name} = {g.value:.3f} ({g.direction} {g.goal:g})")


if __name__ == "__main__":
    main()
