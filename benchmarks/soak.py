"""Planning for an hour at N = 2048: the memory stays flat, and C++ goes on as the Python reference does.

    python -m benchmarks.soak [--minutes M] [--micro-batches N] [--check]

As in training, a thread plans adaptive steps, of the distribution F2 over shuffled epochs of a million documents.
Now and then a step goes to another process, where the Python reference takes up its state, by way of JSON, and plans
the next two; plans and states must be the same to the bit. What the planning process has allocated is counted after
every step and noted every 30 seconds, or ten times a run if that is more often. Writes benchmarks/results/soak.json.
"""

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

import numpy as np

from benchmarks import results
from benchmarks.lengths import CROSSOVER, WINDOW, f2, job_7b
from benchmarks.results import Row
from megatron_wlb.job import Job, Parallel
from megatron_wlb.packing.adaptive import AdaptivePacking
from megatron_wlb.plan import native
from megatron_wlb.plan.packer import Packer, Snapshot, make_packer
from megatron_wlb.plan.step import Planner, StepPlan, plan_step
from megatron_wlb.plan.stream import DocumentStream, Source

DOCUMENTS = 1_000_000
WARM_UP_STEPS = 100
"""After which the memory must be flat: several epochs at N = 2048, whose queues have had their longest."""
FOLLOWED_STEPS, MOST_COMPARED = 2, 30
ALLOCATED = ("malloc_mib", "python_blocks")
"""What malloc has given out, and the number of small objects that Python keeps apart from that; means over steps."""


def job_of(num_micro_batches: int) -> Job:
    """A job on as many data-parallel ranks that each has up to 8 micro-batches."""
    parallel = Parallel(dp=max(1, num_micro_batches // 8), cp=8, pp=4)
    return job_7b(num_micro_batches, packing=AdaptivePacking(), parallel=parallel)


def packer(num_micro_batches: int) -> Packer:
    """Before its first step."""
    stream = DocumentStream([Source(lengths=f2(DOCUMENTS, 0))], seed=1, context_length=WINDOW)
    return make_packer(stream, job_of(num_micro_batches), fingerprint="")


def digest(plan: StepPlan) -> str:
    """Digest of the plan, the shards of this rank, and the state after the step."""
    snapshot = plan.snapshot
    digested = hashlib.blake2b(json.dumps([plan.digest, snapshot.header]).encode(), digest_size=16)
    for micro_batch in plan.micro_batches:
        digested.update(micro_batch.shards.strategy.encode())
        for shard in micro_batch.shards.shards:
            for call in shard.calls:
                digested.update(np.ascontiguousarray(call))
    for place, rows in snapshot.waiting.items():
        digested.update(place.encode())
        digested.update(np.ascontiguousarray(rows))
    return digested.hexdigest()


def reference(num_micro_batches: int, snapshot: Snapshot) -> list[str]:
    """Digests of the steps after `snapshot`, planned in Python."""
    native.core = None
    packs, job = packer(num_micro_batches), job_of(num_micro_batches)
    packs.load_state(json.loads(json.dumps(snapshot.state())))
    return [digest(plan_step(packs, job)) for _ in range(FOLLOWED_STEPS)]


class _MallocInfo(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    )


def in_use_mib() -> float:
    """What malloc has given out, in all of its arenas and mapped: without what it keeps in reserve (glibc 2.33)."""
    function = ctypes.CDLL("libc.so.6").mallinfo2
    function.restype = _MallocInfo
    info = function()
    return float(info.uordblks + info.hblkhd) / 2**20


def resident_mib() -> float:
    """With what malloc keeps in reserve, which depends on what was freed when."""
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
        self._wanted: list[str] = []
        self.compared: list[int] = []
        """Steps whose states the reference has gone on from."""
        self.differ: list[int] = []

    def see(self, plan: StepPlan) -> None:
        """Every step, in order: its plan is compared if the reference is at it, or taken up if that is idle."""
        if self._begun is not None and len(self._wanted) < FOLLOWED_STEPS:
            self._wanted.append(digest(plan))
        elif self._begun is not None and self._begun[1].done():
            self.finish()
        if self._begun is None and time.monotonic() >= self._last + self._every:
            self._last = time.monotonic()
            future = self._pool.submit(reference, self._num_micro_batches, plan.snapshot)
            self._begun, self._wanted = (plan.step, future), []

    def finish(self) -> None:
        """Wait for what the reference has begun, if its steps have been seen."""
        if self._begun is not None and len(self._wanted) == FOLLOWED_STEPS:
            step, future = self._begun
            (self.compared if future.result() == self._wanted else self.differ).append(step)
            self._begun = None

    def close(self) -> None:
        self.finish()
        self._pool.shutdown(cancel_futures=True)


def soak(minutes: float, num_micro_batches: int) -> tuple[list[Row], Follower]:
    """Plan until the time is over and the reference has said something; what was noted when, and what it said."""
    planner = Planner(packer(num_micro_batches), job_of(num_micro_batches), 0, first_step=0)
    follower = Follower(num_micro_batches, 60 * minutes / MOST_COMPARED)
    begin, noted = time.monotonic(), 0.0
    every = min(30.0, 6.0 * minutes)
    rows: list[Row] = []
    documents = step = 0
    allocated: list[tuple[float, int]] = []
    while not rows or rows[-1]["seconds"] < 60 * minutes or not (follower.compared or follower.differ):
        plan = planner.get(step)
        planner.release(step)
        follower.see(plan)
        documents += len(plan.packing.documents)
        step += 1
        allocated.append((in_use_mib(), sys.getallocatedblocks()))
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
                    **dict(zip(ALLOCATED, map(statistics.fmean, zip(*allocated, strict=True)), strict=True)),
                    "resident_mib": resident_mib(),
                }
            )
            allocated.clear()
    planner.close()
    follower.close()
    return rows, follower


def growth(rows: Sequence[Row], name: str) -> float:
    """Growth of a median, from the first to the last third after warming up or half of a short run."""
    warm = min(WARM_UP_STEPS, rows[-1]["steps"] // 2)
    memory = [row[name] for row in rows if row["steps"] >= warm]
    third = max(1, len(memory) // 3)
    return statistics.median(memory[-third:]) / statistics.median(memory[:third]) - 1


def main(argv: list[str] | None = None) -> None:
    parser = results.parser(__doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help="default: %(default)g")
    parser.add_argument("--micro-batches", type=int, default=2048, help="N; default: %(default)s")
    args = parser.parse_args(argv)
    if native.core is None:
        raise SystemExit(f"soak: error: the native core {native.WHY_NOT}")
    rows, follower = soak(args.minutes, args.micro_batches)
    last = rows[-1]
    goals = [
        *(results.at_most(f"growth of {name} after warm-up", growth(rows, name), 0.05) for name in ALLOCATED),
        results.at_most("states Python went on from otherwise", len(follower.differ), 0),
        results.at_least("states Python went on from alike", len(follower.compared), 1),
        results.at_least("documents", last["documents"], 1e8),
    ]
    settings = {
        "minutes": args.minutes,
        "micro_batches": args.micro_batches,
        "window": WINDOW,
        "crossover": CROSSOVER,
        "documents_an_epoch": DOCUMENTS,
        "compared_after_steps": follower.compared,
        "differ_after_steps": follower.differ,
        "growth_of_resident_mib": growth(rows, "resident_mib"),
        "documents_per_second": last["documents"] / last["seconds"],
        "steps_per_second": last["steps"] / last["seconds"],
    }
    print(f"{settings['documents_per_second']:.0f} documents and {settings['steps_per_second']:.2f} steps a second")
    results.finish(args, "soak", settings=settings, rows=rows, goals=goals)


if __name__ == "__main__":
    main()
