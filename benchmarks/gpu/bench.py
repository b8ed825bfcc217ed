"""A run on one device: its clock, its rows, and its result file, which is written after every case."""

import re
import sys
import time
import traceback
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks import results
from benchmarks.results import Row
from megatron_wlb.runtime.attention import AttentionOptions
from megatron_wlb.runtime.backends import get_backend

FLUSHED_BYTES = 1 << 28
"""More than any L2 holds."""
LEAD_CYCLES = tuple(3_000_000 << i for i in range(6))
"""2 ms in which the host gets ahead, so that launches overlap kernels as in training; up to 50 ms where it must."""
SAMPLES = 5
Call = Callable[[], Any]


def command_line(doc: str | None) -> ArgumentParser:
    parser = results.parser(doc, "tiny, to see that everything runs")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--backend", default="auto", help="attention backend; default: the one that training chooses")
    parser.add_argument("--minutes", type=float, default=8.5, help="no case begins later; default: %(default)s")
    parser.add_argument("--commit", help="commit that is measured; default: git's, which a copied tree does not know")
    return parser


class Bench:
    """One run of the benchmark `name`."""

    def __init__(self, name: str, args: Namespace) -> None:
        self.name, self.args, self._begin = name, args, time.perf_counter()
        self.device = torch.device(args.device)
        self.on_gpu = self.device.type == "cuda"
        if not self.on_gpu:
            torch.set_num_threads(1)  # threads that share cores with others wait for each other
        self.device_name = torch.cuda.get_device_name() if self.on_gpu else "cpu"
        self.dtype = torch.bfloat16 if self.on_gpu else torch.float32
        self.options = AttentionOptions(backend=get_backend(args.backend, self.device))
        self.settings: Row = {"command": sys.argv[1:], "backend": self.options.backend.name, "cuda": torch.version.cuda}
        self.rows: list[Row] = []
        self.goals: list[results.Goal] = []
        self.say(
            f"{self.device_name}, torch {torch.__version__}, CUDA {torch.version.cuda}, {self.settings['backend']}"
        )

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._begin

    def say(self, text: str) -> None:
        print(f"[{self.seconds:5.0f} s] {text}", flush=True)

    def add(self, row: Row) -> None:
        """Keep a row and print it."""
        self.rows.append(row)
        shown = {key: value for key, value in row.items() if value is not None and not isinstance(value, list)}
        self.say("  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in shown.items()))

    @contextmanager
    def case(self, **case: Any) -> Iterator[None]:
        """An exception becomes a row of this case; then, or if it is interrupted, all rows are written."""
        try:
            yield
        except Exception as error:  # of a kernel, the allocator, a profiler
            traceback.print_exc(file=sys.stdout)
            self.add({**case, "failed": repr(error)})
        finally:
            self.write()

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=self.device, dtype=self.dtype)

    def ms(self, call: Call) -> float:
        """Device time of a call with cold caches; on the CPU, wall-clock time."""
        if not self.on_gpu:
            begin = time.perf_counter()
            call()
            return (time.perf_counter() - begin) * 1e3
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flushed = torch.empty(FLUSHED_BYTES, dtype=torch.int8, device=self.device)
        for lead in LEAD_CYCLES:
            flushed.zero_()
            torch.cuda._sleep(lead)
            start.record()
            call()
            behind = start.query()  # the device waited for launches
            end.record()
            end.synchronize()
            if not behind:
                break
        return float(start.elapsed_time(end))

    def timed(self, name: str, call: Call, samples: int = SAMPLES) -> Row:
        """Median, least and largest `NAME_ms` after a first call that does not count."""
        call()
        return results.spread(f"{name}_ms", [self.ms(call) for _ in range(samples)])

    def write(self) -> None:
        """Write all rows so far; a quick run only where --output says."""
        if self.args.quick and not self.args.output:
            return
        tag = (re.findall(r"[a-z]+\d+", self.device_name.lower()) or [self.device.type])[0]
        results.write(
            self.name,
            settings=self.settings | {"seconds": self.seconds},
            rows=self.rows,
            goals=self.goals,
            device=self.device_name if self.on_gpu else None,
            commit=self.args.commit,
            suffix=f".{tag}",
            folder=self.args.output,
        )

    def conclude(self) -> None:
        """Print which goals hold; exit with 1 if a case has failed or, with --check, a goal is missed."""
        results.conclude(self.goals, self.args.check)
        if failed := sum("failed" in row for row in self.rows):
            sys.exit(f"{failed} cases have failed")
