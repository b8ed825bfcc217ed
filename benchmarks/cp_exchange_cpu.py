"""The exchange between context-parallel ranks: cost and savings of gradients in bf16, and how much of it overlaps.

    python -m benchmarks.cp_exchange_cpu [--quick] [--check]

Accuracy: errors of dK and dV against float64 where ranks send their shares in fp32, and in bf16 as the activations are;
random activations, every document on all ranks. Savings: simulated steps of jobs on H100s with either dtype, of the
same packings of F2. Overlap: two gloo processes of one thread run attention in fp32 and in rounds, every document on
both, by turns with the exchange, without it (nothing moves), and the exchange alone. gloo is fast within a machine, so
its all-to-alls also *wait*, one after the other, for the time of a link of LINK_GB_PER_S. Hidden is
1 - (with - without) / alone. It is predicted by kernel times and the link, which both processes measure before, and by
kernel times scaled to the time without the exchange. Writes benchmarks/results/cp_exchange_cpu.json in about four
minutes; anything else that runs meanwhile spoils the overlap.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from rich.progress import track
from torch import Tensor

from benchmarks import results
from benchmarks.lengths import WINDOW, attention_job, f2, micro_batches, packings, padded
from benchmarks.results import Row
from benchmarks.step_time import job_of
from megatron_wlb.calibration import Shape, fit_directions, rounded, shapes
from megatron_wlb.cli.profile import TILE_ROWS
from megatron_wlb.hardware.network import H100_NETWORK, Collective, Group, fit
from megatron_wlb.hardware.profile import Profile
from megatron_wlb.job import Job, Recompute
from megatron_wlb.model import MODELS
from megatron_wlb.packing.wlb import WlbPacking
from megatron_wlb.plan.step import shard_step
from megatron_wlb.runtime import all_to_all
from megatron_wlb.runtime.attention import AttentionOptions, context_parallel_attention
from megatron_wlb.runtime.backends import get_backend
from megatron_wlb.runtime.measure import Target, attention_times
from megatron_wlb.runtime.metadata import ShardMetadata
from megatron_wlb.sharding import per_document, rounds, shard
from megatron_wlb.sharding.volume import Held
from megatron_wlb.simulate.step import breakdown, simulate_step
from megatron_wlb.types import ShardPlan
from tests.reference.rounds import regrouped
from tests.runtime.oracle import all_ranks, inputs
from tests.worlds import run_world

HEADS, HEAD_SIZE = (2, 2), 128
LINK_GB_PER_S = 0.03
"""The exchange of one long document then takes a third to a half of its attention."""
MESSAGE_BYTES = tuple(4**i << 16 for i in range(4))
"""Messages that networks are measured with."""
WARM_UP = 30
"""Steps of a simulated job that fill queues and are not counted."""
JOBS: dict[str, tuple[str, int, Row]] = {
    "550M": ("550M PP4", WINDOW, {}),
    # Megatron pads vocabularies to a multiple of 128 tokens a tensor-parallel rank.
    **{
        name: (f"{name} PP4", WINDOW, {"model": replace(MODELS[model], padded_vocab_size=32_768)})
        for name, model in (("7B", "llama2-7b"), ("30B", "30b"), ("70B", "llama2-70b"))
    },
    "Llama 3 8B, 512K, CP=8": ("8B, 8 nodes", 4 * WINDOW, {}),
    "Llama 3 8B, 512K, CP=32": ("8B, 32 nodes, CP32", 4 * WINDOW, {"global_batch_size": 4}),
}
"""Jobs of scripts/slurm and two without a pipeline: arguments of `step_time.job_of`."""
Moves = Callable[..., Any]
"""An all-to-all, as `torch.distributed.all_to_all_single`."""
ALONE = Recompute(granularity="selective", modules=("core_attn",))
"""Attention alone: nothing before its backward overlaps the first exchange."""


class Size(NamedTuple):
    accuracy_tokens: int = 2048
    micro_batches: int = 4
    steps: int = 50
    tokens: int = 8192
    """Of the micro-batches that two processes run."""
    rounds: int = 5


QUICK = Size(accuracy_tokens=512, micro_batches=1, steps=2, tokens=1024, rounds=3)


COLUMNS = (
    *("case", "network", "rounds", "count", "mib", "with_ms", "without_ms", "alone_ms", "hidden"),
    *("predicted_hidden", "predicted_hidden_by_profile", "predicted_over_with", "predicted_over_with_by_profile"),
)


def main() -> None:
    args = results.parser(__doc__, "half a minute: short micro-batches").parse_args()
    size = QUICK if args.quick else Size()
    torch.set_num_threads(1)
    exact, saved = accuracy(size), savings(size)
    profile, error = measure_machine(size)
    rows = overlap(size, profile)
    for table in (exact, saved):
        results.show(table)
    results.show(rows, COLUMNS)
    settings = {"heads": HEADS, "head_size": HEAD_SIZE, "backend": "gloo, float32, one thread a process"}
    (latency,), (gb_per_s,) = profile.network.all_gather[1:]
    nodes = {"link": {"all_gather": {2: [latency, gb_per_s]}}}
    jobs = {name: job[:2] for name, job in JOBS.items()}
    settings |= {"networks": nodes, "kernel_error": error, "jobs": jobs}
    settings |= {"link_gb_per_s": LINK_GB_PER_S, "accuracy": exact, "savings": saved}
    results.finish(args, "cp_exchange_cpu", settings=settings, rows=rows, goals=goals(exact, rows))


def goals(exact: list[Row], rows: list[Row]) -> list[results.Goal]:
    worst = max(row["added"] / row["fp32"] for row in exact)
    wanted = [results.at_most("error that bf16 on the wire adds / error with fp32, largest", worst, 1.0)]
    for row in rows:
        off = abs(row["predicted_hidden"] - row["hidden"])
        wanted.append(results.at_most(f"{row['case']}, {row['rounds']}: share hidden, predicted off by", off, 0.1))
    return wanted


def accuracy(size: Size) -> list[Row]:
    tokens = size.accuracy_tokens
    kinds = {"F2": micro_batches(tokens, WlbPacking(), size.micro_batches), "one document": (np.array([tokens]),)}
    rows = []
    for kind, cp in track([(kind, cp) for kind in kinds for cp in (2, 4, 8)], "accuracy"):
        each = [errors(padded(lengths, 2 * cp), cp) for lengths in kinds[kind]]
        means = {name: float(np.mean([e[name] for e in each])) for name in each[0]}
        rows.append({"documents": kind, "CP": cp, **means})
    return rows


def errors(lengths: np.ndarray, cp: int) -> dict[str, float]:
    """Relative errors of dK and dV: of bf16 inputs, of shares in fp32 or bf16, and the (quadratic) difference of the
    last two."""
    plan, given = per_document(lengths, cp), inputs(int(lengths.sum()), HEADS, HEAD_SIZE, torch.float32)
    low = [x.bfloat16() for x in given]

    def gradients(tensors: Sequence[Tensor], backend: str, in_fp32: bool = True) -> Tensor:
        options = AttentionOptions(backend=get_backend(backend, "cpu"), gradients_in_fp32=in_fp32)
        return torch.stack(all_ranks(*tensors, plan, options)[2:]).double()

    exact = gradients([x.double() for x in low], "reference")
    found = {
        "inputs": gradients([x.double() for x in given], "reference"),
        "fp32": gradients(low, "cpu"),
        "bf16": gradients(low, "cpu", in_fp32=False),
    }
    off = {name: float((got - exact).norm() / exact.norm()) for name, got in found.items()}
    return off | {"added": max(0.0, off["bf16"] ** 2 - off["fp32"] ** 2) ** 0.5}


def savings(size: Size) -> list[Row]:
    jobs = {name: job_of(layout, window, **changes) for name, (layout, window, changes) in JOBS.items()}
    return [
        {"job": name, "window": job.context_length, **simulated(job, size.steps)}
        for name, job in track(jobs.items(), "simulating")
    ]


def simulated(job: Job, steps: int) -> Row:
    """Share of the time of the same steps that gradients in the model's dtype save, and shares of the exchange."""
    lengths = [each.lengths for each in packings(f2(300_000, 0, job.context_length), job, steps, WARM_UP)]
    times, shares = {}, {}
    for dtype in ("fp32", "model"):
        changed = job.sharded(cp_gradients=dtype)
        run = [simulate_step(changed, shard_step(changed, each)) for each in lengths]
        times[dtype] = sum(step.time for step in run)
        shares[f"exchange, {dtype}"] = sum(breakdown(step).exchange for step in run) / times[dtype]
    return {"saved": 1 - times["model"] / times["fp32"], **shares}


def link(output: Tensor, given: Tensor, *sizes: Any, group: Any, async_op: bool) -> Any:
    """An all-to-all that also waits for as long as its bytes take, after those before it."""
    work = dist.all_to_all_single(output, given, *sizes, group=group, async_op=True)
    return SimpleNamespace(wait=_link.submit(_pass, work, max(output.nbytes, given.nbytes)).result)


def _pass(work: dist.Work, num_bytes: int) -> None:
    work.wait()
    time.sleep(num_bytes / LINK_GB_PER_S / 1e9)


_link = ThreadPoolExecutor(max_workers=1)  # its thread starts with the first message, in the process that sends it


def nothing(output: Tensor, given: Tensor, *sizes: Any, group: Any, async_op: bool) -> Any:
    """In place of an all-to-all. Zeros, since fresh memory may hold numbers that are slow to compute with."""
    output.zero_()
    return SimpleNamespace(wait=lambda: None)


def measure_machine(size: Size) -> tuple[Profile, Row]:
    """Kernel times and the link of two processes that run at once, and the error of the kernel times."""
    chosen = shapes(size.tokens)
    times, ((latency, gb_per_s), _) = zip(*run_world(_measure, 2, chosen), strict=True)
    shards = [plan.shards[rank] for plan, rank in chosen]
    kernel, error = fit_directions(shards, np.mean(times, axis=0), HEADS[0], TILE_ROWS["cpu"])
    of_link = Collective((2,), (rounded(latency),), (rounded(gb_per_s),))
    network = replace(H100_NETWORK, all_gather=of_link, reduce_scatter=of_link, all_reduce=of_link)
    return Profile(name="measured", **kernel, network=network), error


def _measure(chosen: list[Shape]) -> tuple[np.ndarray, tuple[float, float]]:
    """In both processes: attention of the shapes, float64 [shapes, 2] us; latency (us) and GB/s of the link."""

    def stopwatch(call: Callable[[], Any]) -> float:
        return float(np.median([_seconds(call) for _ in range(4)][1:])) * 1e6

    model, backend = attention_job(512, HEADS).model, get_backend("auto", "cpu")
    target = Target(model, "cpu", backend, "fp32", {"device": "cpu", "dtype": torch.float32})
    times = [attention_times(*shape, target, stopwatch) for shape in chosen]
    us = []
    for num_bytes in MESSAGE_BYTES:
        given = torch.ones(num_bytes // 4)
        other = [len(given), 0] if dist.get_rank() else [0, len(given)]
        us.append(stopwatch(partial(_move, torch.empty_like(given), given, other, other)))
    return np.array(times), fit(np.array(MESSAGE_BYTES, np.float64), np.array(us))


def _move(*message: Any) -> None:
    link(*message, group=dist.group.WORLD, async_op=True).wait()


def _seconds(call: Callable[[], Any]) -> float:
    """From when all processes are here."""
    dist.barrier()
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def overlap(size: Size, profile: Profile) -> list[Row]:
    cases = {
        "one document": np.array([size.tokens]),
        "F2": padded(micro_batches(size.tokens, WlbPacking(), 1)[0], 4),
        "16 documents": np.full(16, size.tokens // 16),
    }
    sizes = {"cp_exchange": "shared", "bytes_per_value": 4, "recompute": ALONE, "profile": profile}
    job = attention_job(size.tokens, HEADS, 2, **sizes).sharded(cp_sharding="per-document")
    plans, rows = [], []
    for case, lengths in cases.items():
        _, planned = shard(lengths, job)
        at_once = regrouped(planned, Held(planned).is_shared.astype(np.int64))
        for how, plan in (("at once", at_once), ("planned", planned)):
            rows.append({"case": case, "network": "link", "rounds": how, "count": len(plan.rounds)})
            plans.append(plan)
    measured = run_world(_run, 2, plans, size.rounds, timeout=1800)
    for row, plan, ranks in zip(rows, plans, zip(*measured, strict=True), strict=True):
        row |= compared(ranks[0][0], np.max([seconds for _, seconds in ranks], axis=0), plan, job)
    return rows


def compared(sizes: list[int], seconds: np.ndarray, plan: ShardPlan, job: Job) -> Row:
    """The measurement of `measure`, for the slower rank of each direction, beside its prediction."""
    with_it, without, alone = 1e3 * seconds.sum(axis=2).T
    row: Row = {"mib": sum(sizes) / 2**20, "messages": len(sizes)}
    row |= results.spread("hidden", 1 - (with_it - without) / alone)
    for name, ms in (("with_ms", with_it), ("without_ms", without), ("alone_ms", alone)):
        row |= results.spread(name, ms)
    latency, us_per_byte = job.profile.network.all_to_all(Group(size=2, stride=1))
    alone_us = sum(latency + us_per_byte * size for size in sizes)
    row["predicted_over_alone"] = alone_us / 1e3 / row["alone_ms"]
    busy, _ = rounds.attention_times(plan, job)
    factors = 1e6 * np.median(seconds[:, 1], axis=0) / [each.max() for each in busy]
    profile = job.profile
    forward, backward = (times.scaled(f) for times, f in zip((profile.forward, profile.backward), factors, strict=True))
    scaled = replace(job, profile=replace(profile, forward=forward, backward=backward))
    for by, of in (("", scaled), ("_by_profile", job)):
        busy, added = rounds.attention_times(plan, of)
        row[f"predicted_hidden{by}"] = 1 - sum(added) / alone_us
        predicted = (sum(float(each.max()) for each in busy) + sum(added)) / 1e3
        row |= results.spread(f"predicted_over_with{by}", predicted / with_it)
    return row


def _run(plans: list[ShardPlan], repeats: int) -> list[tuple[list[int], np.ndarray]]:
    """In both processes: `measure` of every plan."""
    return [measure(plan, repeats) for plan in plans]


def measure(plan: ShardPlan, repeats: int) -> tuple[list[int], np.ndarray]:
    """Bytes of the messages, and seconds, float64 [repeats, 3, 2]: with the exchange, without, and the exchange alone
    (once); forward and backward."""
    options = AttentionOptions(backend=get_backend("auto", "cpu"))
    metadata = ShardMetadata.build(plan, dist.get_rank(), options.backend.encode)
    q, k, v, dout = inputs(metadata.num_rows, HEADS, HEAD_SIZE, torch.float32)
    leaves, messages = [x.requires_grad_() for x in (q, k, v)], []

    def step(moves: Moves) -> tuple[float, float]:
        all_to_all._all_to_all = moves
        outs: list[Tensor] = []
        forward = _seconds(
            lambda: outs.append(context_parallel_attention(*leaves, metadata, dist.group.WORLD, options))
        )
        return forward, _seconds(lambda: torch.autograd.grad(outs[0], leaves, dout))

    def noted(*message: Any, **rest: Any) -> Any:
        messages.append(message)
        return link(*message, **rest)

    def alone() -> None:
        for message in messages:
            _move(*message)

    step(noted)
    seconds = [(step(link), step(nothing), (_seconds(alone), 0.0)) for _ in range(repeats)]
    return [max(output.nbytes, given.nbytes) for output, given, *_ in messages], np.array(seconds)


if __name__ == "__main__":
    main()
