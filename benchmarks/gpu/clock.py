"""Time and memory of calls, on a GPU or, for trying benchmarks out, on the CPU."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

_FLUSHED_BYTES = 1 << 28
"""More than any L2 holds."""
_LEAD_CYCLES = tuple(3_000_000 << i for i in range(6))
"""Under 2 ms in which the host gets ahead, so that launches hide behind kernels as in training; else more, up to 50."""
_HOST_SAMPLES = 5
_RESERVED_BYTES = 24 << 30

Call = Callable[[], Any]


class Clock:
    """Measures calls one by one; nothing else may use the device."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self.behind = 0
        """Measurements in which the host did not get ahead however long it was given."""
        if self._on_gpu:
            self._flushed = torch.empty(_FLUSHED_BYTES, dtype=torch.int8, device=device)
            self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def reserve(self) -> None:
        """Let torch's allocator take device memory now rather than during a measurement."""
        if self._on_gpu:
            free, _ = torch.cuda.mem_get_info()
            torch.empty(min(_RESERVED_BYTES, free // 2), dtype=torch.int8, device=self._flushed.device)

    def ms(self, call: Call) -> float:
        """Device time of a call with cold caches, launches hidden; on the CPU, wall-clock time."""
        if not self._on_gpu:
            begin = time.perf_counter()
            call()
            return (time.perf_counter() - begin) * 1e3
        for lead in _LEAD_CYCLES:
            self._flushed.zero_()
            torch.cuda._sleep(lead)
            self._begin.record()
            call()
            behind = self._begin.query()  # the device waited for launches
            self._end.record()
            self._end.synchronize()
            if not behind:
                break
        self.behind += behind
        return float(self._begin.elapsed_time(self._end))

    def costs(self, forward: Call, backward: Callable[[Any], Any]) -> dict[str, float | None]:
        """Beyond the inputs: MiB that stay after `forward`, MiB at most until `backward` of it is done; and host time.

        The host's is until both have been called, when the device has nothing else to do; a median.
        """
        if not self._on_gpu:
            return {"kept_mib": None, "peak_mib": None, "host_ms": None}
        seconds = []
        for _ in range(_HOST_SAMPLES):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before, begin = torch.cuda.memory_allocated(), time.perf_counter()
            saved = forward()
            kept = torch.cuda.memory_allocated() - before
            backward(saved)
            seconds.append(time.perf_counter() - begin)
            peak = torch.cuda.max_memory_allocated() - before
            del saved
        return {"kept_mib": kept / 2**20, "peak_mib": peak / 2**20, "host_ms": 1e3 * float(np.median(seconds))}
