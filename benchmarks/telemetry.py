"""What telemetry costs a step: CPU time of all that is measured and written for TensorBoard, over that of the step.

    python -m benchmarks.telemetry [--steps S] [--check]

Real training on two processes (DP=2), each pinned to a core, TensorBoard on in every step; of the rank that writes.
And the writing of one step alone at N = 2048, of which every data-parallel rank has 8. CPU time of the thread that
trains is no wait for messages and little disturbed by what else runs. Writes benchmarks/results/telemetry.json.
"""

import argparse
import contextlib
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.lengths import f2, job_7b, packer
from benchmarks.results import Row
from benchmarks.training_cpu import arguments, document_lengths, train, warm, write_dataset
from megatron_wlb.hardware.profile import load_profile
from megatron_wlb.job import Parallel
from megatron_wlb.plan.step import plan_step
from tests.worlds import run_world

WINDOW, FIRST = 8192, 20
NUM_MICRO_BATCHES, WRITTEN_STEPS = 2048, 20
GOAL = 0.001


def training(argv: list[str]) -> tuple[list[float], list[float]]:
    """In every process: CPU ms of each step, and of what telemetry did in it."""
    from megatron_wlb.adapter.clock import Clock
    from megatron_wlb.adapter.telemetry import Telemetry

    span, shares, write = Clock.span, Clock.shares, Telemetry.write
    spent, of_steps = [0.0], list[float]()

    @contextlib.contextmanager
    def adding() -> Iterator[None]:
        begin = time.thread_time()
        yield
        spent[0] += 1e3 * (time.thread_time() - begin)

    @contextlib.contextmanager
    def timed_span(self: Clock, what: str) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            with adding():
                stack.enter_context(span(self, what))
            yield
            with adding():
                stack.close()

    def timed_shares(self: Clock, step_seconds: float | None) -> dict[str, float | None] | None:
        with adding():
            return shares(self, step_seconds)

    def timed_write(self: Telemetry, *args: Any) -> None:
        with adding():
            write(self, *args)
        of_steps.append(spent[0])
        spent[0] = 0.0

    Clock.span, Clock.shares, Telemetry.write = timed_span, timed_shares, timed_write  # type: ignore[method-assign]
    steps = train(argv, FIRST)
    return [1e3 * (sum(step["busy"]) + step["other"]) for step in steps], of_steps[1:]


def writing(folder: Path) -> tuple[list[float], list[float]]:
    """CPU ms to summarise and write a step of `NUM_MICRO_BATCHES` micro-batches, and to predict its shares."""
    from torch.utils.tensorboard import SummaryWriter

    from megatron_wlb.adapter import log, report, telemetry

    telemetry.get_tensorboard_writer = lambda: board
    telemetry.get_wandb_writer = lambda: None
    board = SummaryWriter(str(folder))
    writer = telemetry.Telemetry(
        argparse.Namespace(tensorboard_log_interval=1, tensorboard_dir=str(folder), wandb_project=None)
    )
    layout = Parallel(cp=8, pp=4, dp=NUM_MICRO_BATCHES // 8)
    job = job_7b(NUM_MICRO_BATCHES, parallel=layout, profile=load_profile("h100-fa2"))
    steps = packer(f2(100_000, 0), job)
    times, simulated = [], []
    for iteration in range(1, WRITTEN_STEPS + 1):
        plan = plan_step(steps, job)
        begin = time.thread_time()
        writer.write(iteration, plan, log.summary(plan, 1.0, 1.0, 0.0))
        times.append(1e3 * (time.thread_time() - begin))
        begin = time.thread_time()
        report.predicted_shares(job, plan.packing)
        simulated.append(1e3 * (time.thread_time() - begin))
    return times, simulated


def main() -> None:
    parser = results.parser(__doc__)
    parser.add_argument("--steps", type=int, default=40, help="of training; default: %(default)d")
    args = parser.parse_args()
    warm()
    with tempfile.TemporaryDirectory() as folder:
        dataset = write_dataset(Path(folder), document_lengths("f2", WINDOW))
        flags = f"--wlb --tensorboard-dir {folder}/board"
        _, (steps, telemetry) = run_world(
            training, 2, arguments(dataset, WINDOW, 2, FIRST + args.steps, flags), timeout=1800
        )
        written, simulated = writing(Path(folder, "written"))
    medians = {"step_ms": statistics.median(steps), "telemetry_ms": statistics.median(telemetry)}
    rows: list[Row] = [
        {"what": f"training, DP=2, window {WINDOW}", **medians, "telemetry_max_ms": max(telemetry)},
        {"what": f"writing a step, N={NUM_MICRO_BATCHES}", "telemetry_ms": statistics.median(written)},
        {"what": f"simulating it, in a thread of its own, N={NUM_MICRO_BATCHES}", "ms": statistics.median(simulated)},
    ]
    goals = [results.at_most("telemetry over the step", sum(telemetry) / sum(steps), GOAL)]
    for row in rows:
        print(row)
    results.finish(args, "telemetry", settings={"steps": args.steps, "window": WINDOW}, rows=rows, goals=goals)


if __name__ == "__main__":
    main()
