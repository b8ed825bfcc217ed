"""A run on one device: its clock, what it has found, and what it writes."""

import re
import sys
import time
import traceback
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks import results
from benchmarks.gpu.clock import Clock
from benchmarks.results import Row
from megatron_wlb.runtime.attention import AttentionOptions
from megatron_wlb.runtime.backends import get_backend


def command_line(doc: str | None, sections: str, last: str) -> ArgumentParser:
    """What `Bench` takes of every benchmark; `last` says what --minutes ends."""
    parser = results.parser(doc, "tiny, to see that everything runs")
    parser.add_argument("--sections", default=sections, help=f"some of {sections}, which then name the file, too")
    parser.set_defaults(every=sections)
    parser.add_argument("--backend", help="attention backend; default: aten on cuda, cpu on cpu")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--minutes", type=float, default=8.5, help=last)
    parser.add_argument("--output", metavar="FOLDER", help="default: benchmarks/results, and nowhere with --quick")
    parser.add_argument("--commit", help="what is measured; default: what git says, which a copied tree does not know")
    return parser


class Bench:
    """One run of the benchmark `name`."""

    def __init__(self, name: str, args: Namespace) -> None:
        self.name, self.args, self._begin = name, args, time.perf_counter()
        self.device = torch.device(args.device)
        on_gpu = self.device.type == "cuda"
        if not on_gpu:
            torch.set_num_threads(1)  # threads that share cores with others wait for each other
        self.device_name = torch.cuda.get_device_name() if on_gpu else "cpu"
        self.dtype = torch.bfloat16 if on_gpu else torch.float32
        self.backend = get_backend(args.backend or ("aten" if on_gpu else "cpu"), self.device)
        self.options = AttentionOptions(backend=self.backend)
        self.clock = Clock(self.device)
        self.settings: Row = {"command": sys.argv[1:], "backend": self.backend.name, "cuda": torch.version.cuda}
        self.rows: list[Row] = []
        self.goals: list[results.Goal] = []
        self.say(f"{self.device_name}, torch {torch.__version__}, CUDA {torch.version.cuda}, {self.backend.name}")

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.perf_counter() - self._begin

    @property
    def seconds_left(self) -> float:
        return 60 * self.args.minutes - self.seconds

    def say(self, text: str) -> None:
        print(f"[{self.seconds:5.0f} s] {text}", flush=True)

    def add(self, row: Row) -> None:
        """Keep a row, and print it but for lists."""
        self.rows.append(row)
        shown = {key: value for key, value in row.items() if value is not None and not isinstance(value, list)}
        self.say("  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in shown.items()))

    @contextmanager
    def case(self, **case: Any) -> Iterator[None]:
        """What it raises becomes a row of this case; then, or if it is interrupted, all that was found is written."""
        try:
            yield
        except Exception as error:  # of a kernel, the allocator, a profiler
            traceback.print_exc(file=sys.stdout)
            self.add({**case, "failed": repr(error)})
        finally:
            self.write()

    def conclude(self) -> None:
        """Print which goals hold; exit with 1 if a case has failed or, with --check, a goal is missed."""
        results.conclude(self.goals, self.args.check)
        if failed := sum("failed" in row for row in self.rows):
            sys.exit(f"{failed} cases have failed")

    def goal(self, name: str, value: float, direction: str, goal: float) -> None:
        self.goals.append(results.Goal(name=name, value=value, goal=goal, direction=direction))

    def write(self) -> None:
        """What has been found so far; a quick run only where it is told to."""
        if self.args.output is None and self.args.quick:
            return
        if self.args.output is not None:
            results.FOLDER = Path(self.args.output)
        if self.args.commit is not None:
            results._commit = lambda: self.args.commit
        tag = (re.findall(r"[a-z]+\d+", self.device_name.lower()) or [self.device.type])[0]
        results.write(
            self.name if set(self.args.sections) >= set(self.args.every) else f"{self.name}_{self.args.sections}",
            settings=self.settings | {"seconds": self.seconds, "host_behind": self.clock.behind},
            rows=self.rows,
            goals=self.goals,
            device=self.device_name if self.device.type == "cuda" else None,
            suffix=f".{tag}",
        )
