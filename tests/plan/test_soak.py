"""Planning for thousands of steps takes no more memory than planning for hundreds."""

import ctypes
import statistics
import sys

import pytest

from benchmarks.lengths import f2, job_7b, stream
from megatron_wlb.job import Parallel
from megatron_wlb.plan.packer import make_packer
from megatron_wlb.plan.step import Planner

WINDOW, MICRO_BATCHES = 131_072, 256
WARM_UP, STEPS = 200, 1000
"""Several epochs of the documents, after which queues have had their longest."""
FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()


class MallocInfo(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in FIELDS)


def allocated():
    """Bytes that malloc has handed out, without its reserve (glibc 2.33), and Python's small objects."""
    function = ctypes.CDLL("libc.so.6").mallinfo2
    function.restype = MallocInfo
    info = function()
    return info.uordblks + info.hblkhd, sys.getallocatedblocks()


@pytest.mark.full
def test_memory_stays_flat():
    """As in training: a thread plans adaptive steps of shuffled documents, and the plans are released in turn."""
    job = job_7b(MICRO_BATCHES, parallel=Parallel(dp=MICRO_BATCHES // 8, cp=8, pp=4))
    packer = make_packer(stream(f2(100_000, 0), WINDOW, shuffle=True), job)
    planner, memory = Planner(packer, job, 0, first_step=0), []
    for step in range(STEPS):
        planner.get(step)
        planner.release(step)
        memory.append(allocated())
    planner.close()
    third = (STEPS - WARM_UP) // 3
    for of_step in zip(*memory, strict=True):
        first, last = (statistics.median(part) for part in (of_step[WARM_UP : WARM_UP + third], of_step[-third:]))
        assert last / first - 1 < 0.05
