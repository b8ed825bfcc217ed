"""How it is measured: on what, by which clock and for how long; and what has been found."""

import re
import sys
import time
import traceback
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron_wlb.plan.workload import KernelModel, load_profile

from benchmarks import results
from benchmarks.gpu.cases import micro_batches, whole
from benchmarks.gpu.clock import Clock
from benchmarks.gpu.ranks import MakeMethod, Rows, both, random_rows, ranks
from megatron_wlb.plan.sharding import rank_work
from megatron_wlb.plan.types import ShardPlan
from megatron_wlb.runtime.attention import AttentionOptions
from megatron_wlb.runtime.backends import get_backend

ALL_OVER_FORWARD = 3.5
"""Forward and backward over forward, where a profile knows the forward pass alone."""
Row = dict[str, Any]
Case = tuple[ShardPlan, MakeMethod]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Sizes."""

    models: dict[str, tuple[int, int]]
    """Query and key heads of a tensor-parallel rank."""
    head_size: int
    windows: tuple[int, ...]
    """Ascending; context windows in tokens."""
    cp_sizes: tuple[int, ...]
    micro_batches: int
    kernel_tokens: tuple[int, ...]
    """That section a packs into equal documents: many, and fewer, for the launch time of the profile."""
    short_queries: tuple[int, int]
    """Of section a: keys that they see, and entries of a call times query heads."""
    most_rounds: int
    case_seconds: float
    """Of section b for a case of CP=4, the paper's; a third of that for others. The least rounds may take longer."""


FULL = Scale(
    models={"7B TP8": (4, 4), "70B TP8": (8, 1), "7B": (32, 32), "70B": (64, 8)},
    head_size=128,
    windows=(65_536, 131_072),
    cp_sizes=(2, 4, 8),
    micro_batches=30,
    kernel_tokens=(131_072, 8_192),
    short_queries=(8_192, 512),
    most_rounds=5,
    case_seconds=30,
)
QUICK = Scale(
    models={"MHA": (2, 2), "GQA": (4, 2)},
    head_size=64,
    windows=(256, 512),
    cp_sizes=(2, 4),
    micro_batches=2,
    kernel_tokens=(512, 64),
    short_queries=(512, 8),
    most_rounds=3,
    case_seconds=60,
)


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
    """One run. The arguments are those of `cp_attention`."""

    name = "cp_attention"

    def __init__(self, args: Namespace) -> None:
        self.args, self._begin = args, time.perf_counter()
        self.scale = QUICK if args.quick else FULL
        self.models = {n: h for n, h in self.scale.models.items() if args.models is None or n in args.models}
        self.device = torch.device(args.device)
        on_gpu = self.device.type == "cuda"
        if not on_gpu:
            torch.set_num_threads(1)  # threads that share cores with others wait for each other
        self.device_name = torch.cuda.get_device_name() if on_gpu else "cpu"
        self.dtype = torch.bfloat16 if on_gpu else torch.float32
        self.backend = get_backend(args.backend or ("aten" if on_gpu else "cpu"), self.device)
        self.options = AttentionOptions(backend=self.backend)
        self.clock = Clock(self.device)
        self.profiles = {args.profile: load_profile(args.profile)}
        """The one that chooses shardings, then perhaps the fitted one."""
        self.settings: dict[str, Any] = {
            "command": sys.argv[1:],
            "profile": args.profile,
            "packing": args.packing,
            "backend": self.backend.name,
            "cuda": torch.version.cuda,
            "scale": asdict(self.scale),
        }
        self.rows: list[Row] = []
        self.goals: list[results.Goal] = []
        self.say(f"{self.device_name}, torch {torch.__version__}, CUDA {torch.version.cuda}, {self.backend.name}")

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.perf_counter() - self._begin

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

    def micro_batches(self, window: int) -> tuple[np.ndarray, ...]:
        return micro_batches(window, self.args.packing, self.scale.micro_batches)

    def inputs(self, lengths: Sequence[np.ndarray], heads: tuple[int, int]) -> Rows:
        """Random tensors that are long enough for each of `lengths`, tail padding included."""
        longest = max(int(x.sum()) for x in lengths) + 2 * max(self.scale.cp_sizes)
        return random_rows(longest, heads, self.scale.head_size, self.dtype, self.device)

    def kernel(self, heads: int, profile: str | None = None) -> KernelModel:
        """By a profile; by default the one that chooses shardings. Without communication, since none is measured."""
        return self.profiles[profile or self.args.profile].kernel(heads=heads)

    def predicted_seconds(self, lengths: Sequence[np.ndarray], heads: int) -> float:
        """Forward and backward of these micro-batches, by the newest profile."""
        *_, profile = self.profiles.values()
        kernel = profile.kernel(heads=heads)
        us = sum(float(rank_work(whole(x), kernel).max()) for x in lengths)
        return us * 1e-6 * (1.0 if profile.backward else ALL_OVER_FORWARD)

    def play(self, cases: Sequence[Case], rows: Rows, rounds: int, turn: int) -> list[np.ndarray]:
        """Forward and backward of all ranks of every plan, plans by turns: ms [rounds, ranks] of each.

        `turn` counts micro-batches: another plan is the first in each round of each. A call before, of every plan in
        turn 0, wakes the device.
        """
        members = [[(make(rank, self.options), rank) for rank in ranks(plan, self.device)] for plan, make in cases]
        for (method, rank), *_ in members[: 1 if turn else None]:
            self.clock.ms(partial(both, method, rank.local(rows)))
        ms = [np.empty((rounds, len(of_plan))) for of_plan in members]
        for i in range(rounds):
            for case in np.roll(np.arange(len(cases)), -turn - i):
                for j, (method, rank) in enumerate(members[case]):
                    ms[case][i, j] = self.clock.ms(partial(both, method, rank.local(rows)))
        return ms


def total_ms(times: Sequence[np.ndarray]) -> float:
    """From ms [rounds, ranks] of micro-batches: slowest ranks, of medians, summed."""
    return sum(float(np.median(ms, axis=0).max()) for ms in times)


def slowest(times: Sequence[np.ndarray]) -> Row:
    """`total_ms`; its like in the least and largest round; and the medians, by micro-batch and rank."""
    by_round = np.sum([ms.max(axis=1) for ms in times], axis=0)
    row: Row = {"total_ms": total_ms(times), "min_ms": float(by_round.min()), "max_ms": float(by_round.max())}
    return row | {"ms": [np.median(ms, axis=0).round(4).tolist() for ms in times]}
