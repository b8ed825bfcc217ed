"""Planning for an hour at N = 2048: the memory stays flat, and C++ goes on as the Python reference does.

    python -m benchmarks.soak [--minutes M] [--micro-batches N] [--check]

As in training, a thread plans adaptive steps, of the distribution F2 over shuffled epochs of a million documents.
Now and then a step goes to another process, where the Python reference takes up its state, by way of JSON, and plans
the next two; plans and states must be the same to the bit. The memory of the planning process is noted every 30
seconds, or ten times a run if that is more often. Writes benchmarks/results/soak.json.
"""

import argparse
import ctypes
import hashlib
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.lengths import f2
from megatron_wlb.plan import native
from megatron_wlb.plan.packer import Packer, Snapshot, make_packer
from megatron_wlb.plan.step import Layout, Planner, StepPlan, plan_step
from megatron_wlb.plan.stream import DocumentStream, Source

WINDOW, CROSSOVER, DOCUMENTS = 131_072, 51_200, 1_000_000
CP_SIZE, PP_SIZE = 8, 4
WARM_UP_STEPS = 100
"""After which the memory must be flat: several epochs at N = 2048, whose queues have had their longest."""
FOLLOWED_STEPS, MOST_COMPARED = 2, 30
Row = dict[str, Any]


def packer(num_micro_batches: int, use_native: bool) -> Packer:
    """Before its first step."""
    stream = DocumentStream([Source(pairs=f2(DOCUMENTS, 0))], seed=1, context_length=WINDOW)
    return make_packer(
        stream, num_micro_batches=num_micro_batches, crossover_tokens=CROSSOVER, fingerprint="", use_native=use_native
    )


def layout(num_micro_batches: int, use_native: bool) -> Layout:
    """Of the first of so many data-parallel ranks that each has up to 8 micro-batches."""
    return Layout(
        dp_size=max(1, num_micro_batches // 8),
        dp_rank=0,
        cp_size=CP_SIZE,
        pp_size=PP_SIZE,
        unit_tokens=2 * CP_SIZE,
        crossover_tokens=CROSSOVER,
        use_native=use_native,
    )


def digest(plan: StepPlan) -> str:
    """Of the plan, the shards of this rank, and the state after the step."""
    shards = [(m.shards.strategy, [c.tolist() for s in m.shards.shards for c in s.colours]) for m in plan.micro_batches]
    text = json.dumps([plan.digest, shards, plan.state])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def reference(num_micro_batches: int, snapshot: Snapshot) -> list[str]:
    """Digests of the steps after `snapshot`, planned in Python."""
    made = packer(num_micro_batches, use_native=False)
    made.load_state(json.loads(json.dumps(snapshot.state())))
    return [digest(plan_step(made, layout(num_micro_batches, use_native=False))) for _ in range(FOLLOWED_STEPS)]


def live_mib() -> float:
    """Resident memory after malloc has given back what it can: without what it keeps in reserve."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return resident_mib()


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


class Follower:
    """The Python reference in a process of its own, one state at a time.

    States become JSON there, too, whose millions of small objects would leave holes in the memory that is watched.
    """

    def __init__(self, num_micro_batches: int, every_seconds: float = 0.0) -> None:
        # Spawned, since the planner's thread runs here.
        self._pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
        self._num_micro_batches, self._every = num_micro_batches, every_seconds
        self._last = -math.inf  # when it began
        self._begun: tuple[int, Future[list[str]]] | None = None
        self._wanted: list[Future[str]] = []
        self.compared: list[int] = []
        """Steps whose states the reference has gone on from."""
        self.differ: list[int] = []

    def see(self, plan: StepPlan) -> None:
        """Every step, in order: its plan is compared if the reference is at it, or taken up if that is idle."""
        if self._begun is not None and len(self._wanted) < FOLLOWED_STEPS:
            self._wanted.append(self._pool.submit(digest, plan))
        elif self._begun is not None and self._wanted[-1].done():
            self.finish()
        if self._begun is None and time.monotonic() >= self._last + self._every:
            self._last = time.monotonic()
            future = self._pool.submit(reference, self._num_micro_batches, plan.snapshot)
            self._begun, self._wanted = (plan.step, future), []

    def finish(self) -> None:
        """Wait for what the reference has begun, if its steps have been seen."""
        if self._begun is not None and len(self._wanted) == FOLLOWED_STEPS:
            step, future = self._begun
            wanted = [each.result() for each in self._wanted]
            (self.compared if future.result() == wanted else self.differ).append(step)
            self._begun = None

    def close(self) -> None:
        self.finish()
        self._pool.shutdown(cancel_futures=True)


def soak(minutes: float, num_micro_batches: int) -> tuple[list[Row], Follower, tuple[float, float]]:
    """Plan until the time is over; what was noted when, what the reference said, and live memory, warm and at the end.

    It is looked at no oftener, since malloc then begins anew with its reserve.
    """
    planner = Planner(packer(num_micro_batches, True), layout(num_micro_batches, True), first_step=0, ahead=4)
    follower = Follower(num_micro_batches, 60 * minutes / MOST_COMPARED)
    begin, noted = time.monotonic(), 0.0
    every = min(30.0, 6.0 * minutes)
    rows: list[Row] = []
    documents = step = 0
    warm_mib = None
    while not rows or rows[-1]["seconds"] < 60 * minutes:
        plan = planner.get(step)
        planner.release(step)
        follower.see(plan)
        documents += len(plan.packing.documents)
        step += 1
        if warm_mib is None and step >= WARM_UP_STEPS:
            warm_mib = live_mib()
        now = time.monotonic() - begin
        if now >= noted + every:
            noted = now
            rows.append(
                {
                    "seconds": now,
                    "steps": step,
                    "documents": documents,
                    "streamed": plan.snapshot.header["stream"]["index"],
                    "waiting": plan.num_waiting,
                    "resident_mib": resident_mib(),
                }
            )
    planner.close()
    follower.close()
    last_mib = live_mib()
    return rows, follower, (warm_mib or last_mib, last_mib)


def growth(rows: Sequence[Row]) -> float:
    """Of the median resident memory, from the first to the last third after warming up or half of a short run."""
    warm = min(WARM_UP_STEPS, rows[-1]["steps"] // 2)
    memory = [row["resident_mib"] for row in rows if row["steps"] >= warm]
    third = max(1, len(memory) // 3)
    return statistics.median(memory[-third:]) / statistics.median(memory[:third]) - 1


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0, help="default: %(default)g")
    parser.add_argument("--micro-batches", type=int, default=2048, help="N; default: %(default)s")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a goal is missed")
    args = parser.parse_args(argv)
    if not native.AVAILABLE:
        raise SystemExit(f"soak: error: the native core {native.WHY_NOT}")
    rows, follower, (warm_mib, last_mib) = soak(args.minutes, args.micro_batches)
    last = rows[-1]
    goals = [
        results.at_most("growth of live memory after warm-up", last_mib / warm_mib - 1, 0.05),
        results.at_most("growth of resident memory after warm-up", growth(rows), 0.05),
        results.Goal(name="states Python went on from otherwise", value=len(follower.differ), goal=0, direction="<="),
        results.Goal(name="states Python went on from alike", value=len(follower.compared), goal=1, direction=">="),
        results.Goal(name="documents", value=last["documents"], goal=1e8, direction=">="),
    ]
    settings = {
        "minutes": args.minutes,
        "micro_batches": args.micro_batches,
        "window": WINDOW,
        "crossover": CROSSOVER,
        "documents_an_epoch": DOCUMENTS,
        "compared_after_steps": follower.compared,
        "differ_after_steps": follower.differ,
        "live_mib_warm": warm_mib,
        "live_mib_at_the_end": last_mib,
        "documents_per_second": last["documents"] / last["seconds"],
        "steps_per_second": last["steps"] / last["seconds"],
    }
    print(results.write("soak", settings=settings, rows=rows, goals=goals))
    for goal in goals:
        print(f"{'holds ' if goal.holds else 'MISSED'} {goal.name} = {goal.value:.6g} ({goal.direction} {goal.goal:g})")
    print(f"{settings['documents_per_second']:.0f} documents and {settings['steps_per_second']:.2f} steps a second")
    if args.check and not all(goal.holds for goal in goals):
        sys.exit(1)


if __name__ == "__main__":
    main()
