"""Attention of context-parallel ranks on one GPU, one rank after the other, with K and V of all ranks at hand.

    python -m benchmarks.gpu.cp_attention [--backends aten te] [--quick] [--check]

a  Which kernel: latency and TFLOP/s of every backend that works here, over the length of equal documents, and of a few
   queries with many keys (Figure 10 of the paper).
b  The slowest rank (Figure 15): shardings of F2 micro-batches by the backend that training chooses, over the limit,
   which is the micro-batch whole on one GPU, divided by the ranks; and the profile's prediction of each.

Tensors are random. Times are of the device with cold caches (`runtime.measure`), forward and backward. In section b
they are of the slowest rank, summed over micro-batches; it takes what is left of --minutes.
"""

import re
import sys
import time
import traceback
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import torch

from benchmarks import results
from benchmarks.lengths import WINDOW, attention_job, micro_batches
from benchmarks.results import Row
from megatron_wlb.cost.attention import sharding_kernel
from megatron_wlb.documents import SEGMENT, Shard, ShardPlan
from megatron_wlb.hardware.profile import load_profile
from megatron_wlb.model import shape
from megatron_wlb.packing.adaptive import AdaptivePacking
from megatron_wlb.runtime import measure
from megatron_wlb.runtime.backends import BACKENDS, get_backend
from megatron_wlb.runtime.reference import try_backend
from megatron_wlb.sharding.select import shard

MODELS = {"7B TP8": (4, 4), "70B TP8": (8, 1)}
"""Query and key heads of a tensor-parallel rank."""
HEAD_SIZE = 128
CPS = (2, 4, 8)
STRATEGIES = ("per-sequence", "per-document", "paper", "auto")
OVER_LIMIT = 1.08
"""Goal for `auto`."""


class Bench:
    """A run on one device, and its rows, which are written after every case."""

    def __init__(self, args: Namespace) -> None:
        self.args, self._begin = args, time.perf_counter()
        if args.device == "cpu":
            torch.set_num_threads(1)  # threads that share cores with others wait for each other
        self._stopwatch = measure.stopwatch_of(args.device, seconds=0)
        self.settings: Row = {"command": sys.argv[1:], "cuda": torch.version.cuda, "profile": args.profile}
        self.settings |= {"models": MODELS, "head_size": HEAD_SIZE}
        self.rows: list[Row] = []
        self.goals: list[results.Goal] = []

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._begin

    def add(self, row: Row) -> None:
        """Keep a row and print it."""
        self.rows.append(row)
        shown = (f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items() if k != "ms")
        print(f"[{self.seconds:5.0f} s]", *shown, flush=True)

    @contextmanager
    def case(self, **case: Any) -> Iterator[None]:
        """An exception becomes a row of this case; then, or if it is interrupted, all rows are written."""
        try:
            yield
        except Exception as error:  # of a kernel, the allocator, a profiler
            traceback.print_exc(file=sys.stdout)
            self.add({**case, "failed": repr(error)})
        finally:
            self._write()

    def target(self, model: str, backend: str = "auto") -> measure.Target:
        return measure.target_of(shape(1, 1, 1, *MODELS[model], 0), self.args.device, backend, None)

    def ms(self, plan: ShardPlan, rank: int, target: measure.Target) -> tuple[float, float]:
        """Forward and backward of a rank's attention, as they run when all keys have arrived."""
        forward, backward = measure.attention_times(plan, rank, target, self._stopwatch)
        return forward / 1e3, backward / 1e3

    def _write(self) -> None:
        """Write all rows so far; a quick run only where --output says."""
        if self.args.quick and not self.args.output:
            return
        name = torch.cuda.get_device_name() if self.args.device == "cuda" else None
        tag = (re.findall(r"[a-z]+\d+", (name or "").lower()) or [self.args.device])[0]
        given = {"settings": self.settings | {"seconds": self.seconds}, "rows": self.rows, "goals": self.goals}
        where = {"device": name, "commit": self.args.commit, "suffix": f".{tag}", "folder": self.args.output}
        results.write("cp_attention", **given, **where)


def main() -> None:
    parser = results.parser(__doc__, "tiny, to see that everything runs")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--minutes", type=float, default=8.5, help="no case begins later; default: %(default)s")
    parser.add_argument("--commit", help="commit that is measured; default: git's, which a copied tree does not know")
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, help="of section a; default: all that work")
    parser.add_argument("--profile", default="h100-fa2", help="profile that chooses shardings; default: %(default)s")
    bench = Bench(parser.parse_args())
    kernels(bench)
    shardings(bench)
    results.conclude(bench.goals, bench.args.check)
    if failed := sum("failed" in row for row in bench.rows):
        sys.exit(f"{failed} cases have failed")


def working(bench: Bench) -> Iterator[str]:
    """The backends that compute the right thing here; why others don't is a setting."""
    names = bench.args.backends or [name for name in BACKENDS if name != "reference"]
    refused = bench.settings["refused"] = {}
    for name in names:
        try:
            try_backend(get_backend(name, bench.args.device), torch.device(bench.args.device))
        except Exception as error:  # what a broken installation raises is anyone's guess
            refused[name] = str(error)
        else:
            yield name


def kernels(bench: Bench) -> None:
    """Section a."""
    tokens = 512 if bench.args.quick else WINDOW
    lengths = [1 << i for i in range(4 if bench.args.quick else 7, tokens.bit_length())]
    shapes = [(n, n, tokens // n) for n in lengths] + [(n, tokens // 16, 128) for n in lengths if n < tokens // 64]
    for backend, model in product(working(bench), MODELS):
        for queries, keys, entries in shapes:
            row = {"section": "a", "backend": backend, "model": model, "queries": queries, "keys": keys}
            with bench.case(**row):
                documents = np.zeros(entries, SEGMENT)
                documents["document"], documents["stop"] = np.arange(entries), keys
                documents["start"] = keys - queries
                plan = ShardPlan(lengths=np.full(entries, keys), shards=(Shard(calls=(documents,)),), strategy="")
                row["entries"] = entries
                pairs = entries * (queries * (keys - queries) + queries * (queries + 1) // 2)
                flops = 4 * HEAD_SIZE * MODELS[model][0] * pairs
                forward, backward = bench.ms(plan, 0, bench.target(model, backend))
                row |= {"forward_ms": forward, "backward_ms": backward}
                row |= {"forward_tflops": 1e-9 * flops / forward, "backward_tflops": 2.5e-9 * flops / backward}
                bench.add(row)


def shardings(bench: Bench) -> None:
    """Section b."""
    window = 512 if bench.args.quick else WINDOW
    made = micro_batches(window, AdaptivePacking(), 2 if bench.args.quick else 30)
    profile = load_profile(bench.args.profile)
    for (model, heads), cp in product(MODELS.items(), CPS):
        if bench.seconds > 60 * bench.args.minutes:
            break
        case = {"section": "b", "model": model, "window": window, "cp": cp}
        with bench.case(**case):
            target = bench.target(model)
            bench.settings["backend"] = target.backend.name
            job = attention_job(window, heads, cp, profile=profile, packing=AdaptivePacking())
            jobs = {s: replace(job.sharded(cp_sharding=s), reorder=s == "auto") for s in STRATEGIES}
            jobs["whole"] = replace(job, parallel=replace(job.parallel, cp=1))
            kernel = sharding_kernel(job)
            measured: dict[str, list[float]] = defaultdict(list)
            predicted: dict[str, list[float]] = defaultdict(list)
            for lengths in made:
                for name, given in jobs.items():
                    plan = shard(lengths, given)
                    measured[name].append(max(sum(bench.ms(plan, r, target)) for r in range(len(plan.shards))))
                    counts = np.array([kernel.count_shard(each.calls) for each in plan.shards])
                    predicted[name].append(float(kernel.time(*counts.T).max()) / 1e3)
            limit = sum(measured["whole"]) / cp
            for name, ms in measured.items():
                row: Row = {**case, "sharding": name, "total_ms": sum(ms), "predicted_ms": sum(predicted[name])}
                bench.add(row | {"over_limit": sum(ms) / limit, "ms": ms})
            if not bench.args.quick:
                over = sum(measured["auto"]) / limit
                bench.goals.append(results.at_most(f"b: {model}, CP={cp}: auto over the limit", over, OVER_LIMIT))


if __name__ == "__main__":
    main()
