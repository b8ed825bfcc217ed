"""Attention of context-parallel ranks on one GPU, one rank after the other, with K and V of all ranks at hand.

    python -m benchmarks.gpu.cp_attention [--quick] [--check]

The slowest rank (Figure 15 of the paper): shardings of F2 micro-batches, over the limit, which is the micro-batch whole
on one GPU, divided by the ranks; and the profile's prediction of each. Tensors are random. Times are of the device with
cold caches (`runtime.measure`), forward and backward of the backend that training chooses, of the slowest rank, summed
over micro-batches.
"""

import itertools
import sys
import time
from collections import defaultdict
from dataclasses import replace

import numpy as np
import torch

from benchmarks import results
from benchmarks.gpu import machine
from benchmarks.lengths import WINDOW, attention_job, f2, packed
from benchmarks.results import Row
from megatron_wlb.hardware.profile import DEFAULT_PROFILE, load_profile
from megatron_wlb.job import Job
from megatron_wlb.packing.adaptive import AdaptivePacking
from megatron_wlb.runtime import measure
from megatron_wlb.sharding.select import attention_times, shard

MODELS = {"7B TP8": (4, 4), "70B TP8": (8, 1)}
"""Query and key heads of a tensor-parallel rank."""
CPS = (2, 4, 8)
STRATEGIES = ("per-sequence", "per-document", "paper", "auto")
OVER_LIMIT = 1.08
"""Goal for `auto`."""


def main() -> None:
    parser = machine.parser(__doc__, "tiny, to see that everything runs")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--minutes", type=float, default=8.5, help="no case begins later; default: %(default)s")
    args, begin = parser.parse_args(), time.perf_counter()
    gpu = torch.cuda.get_device_name() if args.device == "cuda" else None
    window = 512 if args.quick else WINDOW
    given = {"profile": load_profile(DEFAULT_PROFILE), "packing": AdaptivePacking()}
    lengths = np.maximum(1, f2(20_000, 0) * window // WINDOW)
    made = packed(lengths, attention_job(window, (1, 1), **given), 2 if args.quick else 12)
    settings: Row = {"command": sys.argv[1:], "cuda": torch.version.cuda, "profile": DEFAULT_PROFILE, "models": MODELS}
    rows: list[Row] = []
    goals: list[results.Goal] = []
    for (model, heads), cp in itertools.product(MODELS.items(), CPS):
        if time.perf_counter() - begin > 60 * args.minutes:
            break
        found, settings["backend"] = shardings(made, attention_job(window, heads, cp, **given), args.device)
        rows += [{"model": model, "window": window, "cp": cp, **row} for row in found]
        print(*rows[-len(found) :], sep="\n", flush=True)
        if not args.quick:
            over = next(row["over_limit"] for row in found if row["sharding"] == "auto")
            goals.append(results.at_most(f"{model}, CP={cp}: auto over the limit", over, OVER_LIMIT))
        if args.output or not args.quick:  # after every case, in case that the machine goes
            results.write("cp_attention", settings=settings, rows=rows, goals=goals, **machine.where(args, gpu))
    results.conclude(goals, args.check)


def shardings(made: list[np.ndarray], job: Job, device: str) -> tuple[list[Row], str]:
    """A row for every sharding of the micro-batches, and the name of the backend."""
    jobs = {s: replace(job.sharded(cp_sharding=s), reorder=s == "auto") for s in STRATEGIES}
    jobs["auto"] = replace(jobs["auto"], cp_exchange="shared")  # in rounds, as training runs it
    jobs["whole"] = replace(job, parallel=replace(job.parallel, cp=1))
    target = measure.target_of(job.model, device, "auto", None)
    # All masks of cuDNN that hide tiles are paid for, whoever's sharding has them.
    forward, backward = job.profile.kernels(heads=job.model.num_attention_heads, head_size=job.model.head_size)
    stopwatch = measure.stopwatch_of(device, seconds=0)
    measured, predicted = defaultdict[str, float](float), defaultdict[str, float](float)
    with measure.one_thread():
        for lengths, (name, given) in itertools.product(made, jobs.items()):
            plan = shard(lengths, given)
            ranks = range(len(plan.shards))
            measured[name] += max(sum(measure.attention_times(plan, rank, target, stopwatch)) for rank in ranks) / 1e3
            counts = np.array([backward.count_shard(each.calls) for each in plan.shards]).T
            busy = attention_times(plan, given)[0] if name == "auto" else [k.time(*counts) for k in (forward, backward)]
            predicted[name] += float(sum(busy).max()) / 1e3
    limit = measured["whole"] / job.parallel.cp
    rows = [
        {"sharding": name, "total_ms": ms, "predicted_ms": predicted[name], "over_limit": ms / limit}
        for name, ms in measured.items()
    ]
    return rows, target.backend.name


if __name__ == "__main__":
    main()
