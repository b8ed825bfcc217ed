"""Attention of context-parallel ranks on one GPU, one rank after the other, with K and V of all ranks at hand.

    python -m benchmarks.gpu.cp_attention [--sections ab] [--backends aten te] [--quick] [--check]

a  Which kernel: latency and TFLOP/s of every backend that works here, over the length of equal documents, and of a few
   queries with many keys (Figure 10 of the paper).
b  The slowest rank (Figure 15): shardings of F2 micro-batches by `--backend`, over the limit, which is the micro-batch
   whole on one GPU, divided by the ranks; and the profile's prediction of each.

Tensors are random. Times are of the device with cold caches, forward and backward. In section b they are of the slowest
rank, medians of rounds in which shardings take turns, summed over micro-batches; it takes what is left of --minutes.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import torch

from benchmarks import results
from benchmarks.gpu.bench import Bench, Call, command_line
from benchmarks.lengths import WINDOW, attention_job, micro_batches
from benchmarks.results import Row
from megatron_wlb.cost.attention import attention_kernels
from megatron_wlb.hardware.profile import load_profile
from megatron_wlb.packing.adaptive import AdaptivePacking
from megatron_wlb.runtime.attention import AttentionOptions, attend, attend_backward
from megatron_wlb.runtime.backends import BACKENDS, get_backend
from megatron_wlb.runtime.backends.trial import try_backend
from megatron_wlb.runtime.metadata import ShardMetadata
from megatron_wlb.sharding.select import shard
from megatron_wlb.types import SEGMENT, Shard, ShardPlan

MODELS = {"7B TP8": (4, 4), "70B TP8": (8, 1)}
"""Query and key heads of a tensor-parallel rank."""
HEAD_SIZE = 128
CPS = (2, 4, 8)
STRATEGIES = ("per-sequence", "per-document", "wlb", "auto")
ROUNDS = 3
OVER_LIMIT = 1.08
"""Goal for `auto`."""


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--sections", default="ab")
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, help="of section a; default: all that work")
    parser.add_argument("--profile", default="h100-fa2", help="profile that chooses shardings; default: %(default)s")
    bench = Bench("cp_attention", parser.parse_args())
    bench.settings |= {"profile": bench.args.profile, "models": MODELS, "head_size": HEAD_SIZE}
    for section, run in (("a", kernels), ("b", shardings)):
        if section in bench.args.sections:
            run(bench)
    bench.conclude()


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
                plan = ShardPlan(
                    lengths=np.full(entries, keys), shards=(Shard(calls=(documents,)),), strategy="", call_sets=(0,)
                )
                forward, backward = attention(bench, plan, 0, heads, options)
                row |= {"entries": entries, **bench.timed("forward", forward), **bench.timed("backward", backward)}
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
    q, dout = (bench.random(metadata.num_rows, heads[0], HEAD_SIZE) for _ in range(2))
    kv = bench.random(len(part.gather), 2, heads[1], HEAD_SIZE)
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
                plans = {name: shard(lengths, given)[1] for name, given in jobs.items()}
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
