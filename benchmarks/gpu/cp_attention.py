"""Attention of context-parallel ranks on one GPU, one rank after the other, with K and V of all ranks at hand.

    python -m benchmarks.gpu.cp_attention [--sections ab] [--backends aten te] [--quick] [--check]

a  Which kernel: latency and TFLOP/s of every backend that works here, over the length of equal documents, and of a few
   queries with many keys (Figure 10 of the paper).
b  The slowest rank (Figure 15): shardings of F2 micro-batches by `--backend`, over the limit, which is the micro-batch
   whole on one GPU, divided by the ranks; and the profile's prediction of each.

Tensors are random. Times are of the device with cold caches, forward and backward. In section b they are of the slowest
rank, medians of rounds in which shardings take turns, summed over micro-batches; it takes what is left of --minutes.
"""

import re
import sys
import time
import traceback
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch

from benchmarks import results
from benchmarks.lengths import WINDOW, attention_job, micro_batches
from benchmarks.results import Row
from megatron_wlb.cost.attention import attention_kernels
from megatron_wlb.documents import SEGMENT, Shard, ShardPlan
from megatron_wlb.hardware.profile import load_profile
from megatron_wlb.packing.adaptive import AdaptivePacking
from megatron_wlb.runtime.attention import AttentionOptions, attend, attend_backward
from megatron_wlb.runtime.backends import BACKENDS, get_backend
from megatron_wlb.runtime.metadata import ShardMetadata
from megatron_wlb.runtime.reference import try_backend
from megatron_wlb.sharding.select import shard

MODELS = {"7B TP8": (4, 4), "70B TP8": (8, 1)}
"""Query and key heads of a tensor-parallel rank."""
HEAD_SIZE = 128
CPS = (2, 4, 8)
STRATEGIES = ("per-sequence", "per-document", "paper", "auto")
ROUNDS, SAMPLES = 3, 5
OVER_LIMIT = 1.08
"""Goal for `auto`."""
FLUSHED_BYTES = 1 << 28
"""More than any L2 holds."""
LEAD_CYCLES = tuple(3_000_000 << i for i in range(6))
"""2 ms in which the host gets ahead, so that launches overlap kernels as in training; up to 50 ms where it must."""
Call = Callable[[], Any]


class Bench:
    """A run on one device: its clock, and its rows, which are written after every case."""

    def __init__(self, args: Namespace) -> None:
        self.args, self._begin, self.device = args, time.perf_counter(), torch.device(args.device)
        self.on_gpu = self.device.type == "cuda"
        if not self.on_gpu:
            torch.set_num_threads(1)  # threads that share cores with others wait for each other
        self.options = AttentionOptions(backend=get_backend(args.backend, self.device))
        self.settings: Row = {"command": sys.argv[1:], "backend": self.options.backend.name, "cuda": torch.version.cuda}
        self.settings |= {"profile": args.profile, "models": MODELS, "head_size": HEAD_SIZE}
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
            self.write()

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

    def write(self) -> None:
        """Write all rows so far; a quick run only where --output says."""
        if self.args.quick and not self.args.output:
            return
        name = torch.cuda.get_device_name() if self.on_gpu else None
        tag = (re.findall(r"[a-z]+\d+", (name or "").lower()) or [self.device.type])[0]
        given = {"settings": self.settings | {"seconds": self.seconds}, "rows": self.rows, "goals": self.goals}
        where = {"device": name, "commit": self.args.commit, "suffix": f".{tag}", "folder": self.args.output}
        results.write("cp_attention", **given, **where)


def main() -> None:
    parser = results.parser(__doc__, "tiny, to see that everything runs")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--backend", default="auto", help="attention backend; default: the one that training chooses")
    parser.add_argument("--minutes", type=float, default=8.5, help="no case begins later; default: %(default)s")
    parser.add_argument("--commit", help="commit that is measured; default: git's, which a copied tree does not know")
    parser.add_argument("--sections", default="ab")
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, help="of section a; default: all that work")
    parser.add_argument("--profile", default="h100-fa2", help="profile that chooses shardings; default: %(default)s")
    bench = Bench(parser.parse_args())
    for section, run in (("a", kernels), ("b", shardings)):
        if section in bench.args.sections:
            run(bench)
    results.conclude(bench.goals, bench.args.check)
    if failed := sum("failed" in row for row in bench.rows):
        sys.exit(f"{failed} cases have failed")


def working(bench: Bench) -> Iterator[AttentionOptions]:
    """The backends that compute the right thing here; why others don't is a setting."""
    names = bench.args.backends or [name for name in BACKENDS if name != "reference"]
    refused = bench.settings["refused"] = {}
    for name in names:
        try:
            backend = get_backend(name, bench.device)
            try_backend(backend, bench.device)
        except Exception as error:  # what a broken installation raises is anyone's guess
            refused[name] = str(error)
        else:
            yield AttentionOptions(backend=backend)


def kernels(bench: Bench) -> None:
    """Section a."""
    tokens = 512 if bench.args.quick else WINDOW
    lengths = [1 << i for i in range(4 if bench.args.quick else 7, tokens.bit_length())]
    shapes = [(n, n, tokens // n) for n in lengths] + [(n, tokens // 16, 128) for n in lengths if n < tokens // 64]
    for options, (model, heads) in product(working(bench), MODELS.items()):
        for queries, keys, entries in shapes:
            row = {"section": "a", "backend": options.backend.name, "model": model, "queries": queries, "keys": keys}
            with bench.case(**row):
                documents = np.zeros(entries, SEGMENT)
                documents["document"], documents["stop"] = np.arange(entries), keys
                documents["start"] = keys - queries
                plan = ShardPlan(lengths=np.full(entries, keys), shards=(Shard(calls=(documents,)),), strategy="")
                row["entries"] = entries
                for name, call in zip(("forward", "backward"), attention(bench, plan, 0, heads, options), strict=True):
                    call()  # which does not count
                    row |= results.spread(f"{name}_ms", [bench.ms(call) for _ in range(SAMPLES)])
                pairs = entries * (queries * (keys - queries) + queries * (queries + 1) // 2)
                for direction, factor in (("forward", 1), ("backward", 2.5)):
                    flops = 4 * HEAD_SIZE * heads[0] * pairs * factor
                    row[f"{direction}_tflops"] = flops / row[f"{direction}_ms"] * 1e-9
                bench.add(row)


def attention(
    bench: Bench, plan: ShardPlan, rank: int, heads: tuple[int, int], options: AttentionOptions
) -> tuple[Call, Call]:
    """Forward and backward of a rank's attention, as they run when all keys have arrived."""
    metadata = ShardMetadata.build(plan, rank, options.backend.encode).to(bench.device)
    (part,) = metadata.parts
    rows, dtype = metadata.num_rows, torch.bfloat16 if bench.on_gpu else torch.float32
    shapes = (rows, heads[0], HEAD_SIZE), (rows, heads[0], HEAD_SIZE), (len(part.gather), 2, heads[1], HEAD_SIZE)
    q, dout, kv = (torch.randn(shape, device=bench.device, dtype=dtype) for shape in shapes)
    out, dq = torch.empty_like(q), torch.empty_like(q)
    lse = attend(q, kv, out, part, options)
    return (
        partial(attend, q, kv, out, part, options),
        partial(attend_backward, dout, q, kv, out, lse, dq, part, options),
    )


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
            job = attention_job(window, heads, cp, profile=profile, packing=AdaptivePacking())
            jobs = {s: replace(job.sharded(cp_sharding=s), reorder=s == "auto") for s in STRATEGIES}
            jobs["whole"] = replace(job, parallel=replace(job.parallel, cp=1))
            forward, backward = attention_kernels(job)
            kernel = forward + backward
            measured: dict[str, list[float]] = defaultdict(list)
            predicted: dict[str, list[float]] = defaultdict(list)
            for lengths in made:
                plans = {name: shard(lengths, given) for name, given in jobs.items()}
                for name, ms in slowest(bench, plans, heads).items():
                    measured[name].append(ms)
                    counts = np.array([kernel.count_shard(each.calls) for each in plans[name].shards])
                    predicted[name].append(float(kernel.time(*counts.T).max()) / 1e3)
            limit = sum(measured["whole"]) / cp
            for name, ms in measured.items():
                row: Row = {**case, "sharding": name, "total_ms": sum(ms), "predicted_ms": sum(predicted[name])}
                bench.add(row | {"over_limit": sum(ms) / limit, "ms": ms})
            if not bench.args.quick:
                over = sum(measured["auto"]) / limit
                bench.goals.append(results.at_most(f"b: {model}, CP={cp}: auto over the limit", over, OVER_LIMIT))


def slowest(bench: Bench, plans: dict[str, ShardPlan], heads: tuple[int, int]) -> dict[str, float]:
    """Time of the slowest rank of every plan, ms: medians over rounds in which plans take turns."""
    calls = {
        (name, rank): attention(bench, plan, rank, heads, bench.options)
        for name, plan in plans.items()
        for rank in range(len(plan.shards))
    }
    ms: dict[tuple[str, int], list[float]] = defaultdict(list)
    for count in range(1 + ROUNDS):
        for key, both in calls.items():
            took = sum(bench.ms(call) for call in both)
            if count:  # the first call warms up
                ms[key].append(took)
    return {name: max(float(np.median(ms[key])) for key in calls if key[0] == name) for name in plans}


if __name__ == "__main__":
    main()
