"""How evenly each sharding spreads attention over context-parallel ranks, and what it moves: predicted, not measured.

    python -m benchmarks.cp_balance [--quick] [--check]

Micro-batches of N = 4 by `megatron` and `adaptive` packing, documents in the order of the stream; a LLaMA2-7B layer at
TP = 8 (4 query heads a rank) and the shipped H100 profile, one forward launch a call, no communication. The limit is
the attention of whole documents, without a wasted tile, divided by the ranks. `rows_in` are the rows of K and V that
come to a rank from others, over all rows, in the mean. Choices go by attention alone; "auto, exchange" counts the rows
as a job does.

`settings.exchange` has a whole layer, forward and backward: attention, everything linear in tokens, and the exposed
exchange as a share of that time; and the share of its limit, in which attention of whole documents and linear work are
spread evenly and nothing waits. Tensor-parallel communication does not count. `cp_peers` has the peers; dynamic CP gets
the documents of a whole step at once and weighs their linear work, too. `step_time` has the exchange that whole steps
expose.

`settings.hidden` has the share of backward attention in tiles that masks hide, in jobs of `step_time`: planned as if
these took no time (`ignored`), and as jobs are (`counted`). Writes benchmarks/results/cp_balance.json and
docs/cp_balance.png.
"""

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import numpy as np

from benchmarks import cp_peers, results, step_time
from benchmarks.lengths import CROSSOVER, S_MAX, attention_job, distca, f2, packed, padded
from benchmarks.results import Row
from megatron_wlb.cost.attention import attention_kernels
from megatron_wlb.describe.make import make_job
from megatron_wlb.documents import SEGMENT, ShardPlan
from megatron_wlb.hardware.profile import DEFAULT_PROFILE, load_profile
from megatron_wlb.job import STRATEGIES, Job, Parallel
from megatron_wlb.model import MODELS, ModelShape
from megatron_wlb.packing import POLICIES
from megatron_wlb.plan.micro_batches import predictions
from megatron_wlb.plan.packer import Packer
from megatron_wlb.plan.step import shard_step
from megatron_wlb.sharding.routing import moved_rows
from megatron_wlb.sharding.select import attention_times, divide, shard
from megatron_wlb.simulate.passes import pass_times

PROFILE = load_profile(DEFAULT_PROFILE)
KERNEL, _ = PROFILE.kernels(heads=4)
PACKINGS = ("megatron", "adaptive")
CPS = (2, 4, 8, 16, 32)
CASE = ("data", "window", "packing", "cp")
LIMIT = "limit"
RING = "per-document, ring"
OURS = "auto, exchange"
PER_STEP, TIMED = 4, 32
"""Micro-batches of a step, and those of a case whose layers are timed."""
SHAPES = {
    "7B": (MODELS["llama2-7b"], 4),
    "30B": (MODELS["30b"], 8),
    "8B": (MODELS["llama3-8b"], 8),
    "34B": (MODELS["codellama-34b"], 8),
}
"""Model and TP, with 8, 7, 1 and 1 key heads a rank."""


@cache
def job_of(window: int, cp: int, model: ModelShape = MODELS["llama2-7b"], tp: int = 8) -> Job:
    """A job whose sharding goes by both directions and the exchange."""
    shape = {"model": model, "context_length": window, "global_batch_size": PER_STEP, "profile": PROFILE}
    return make_job(**shape, parallel=Parallel(cp=cp, tp=tp, sequence_parallel=False))


def predicted(lengths: np.ndarray, cp: int, window: int) -> dict[str, np.ndarray]:
    """Time of the slowest rank, us, and rows that come to a rank, in the mean: float64 [2], by strategy."""

    def figures(plan: ShardPlan) -> np.ndarray:
        counts = np.array([KERNEL.count_shard(shard.calls) for shard in plan.shards])
        return np.array([KERNEL.time(*counts.T).max(), moved_rows(plan)[:, 0].mean()])

    straight = padded(lengths, 2 * cp)
    plans = {strategy: divide(straight, cp, strategy, KERNEL) for strategy in STRATEGIES}
    plans[OURS] = shard(lengths, job_of(window, cp))
    plans |= {"MagiAttention's dispatch": cp_peers.magi(straight, cp), "dynamic CP": cp_peers.dynamic(straight, cp)}
    plans["FlashCP"] = cp_peers.flash(straight, job_of(window, cp))
    measured = {name: figures(plan) for name, plan in plans.items()}
    # Every rank sees K and V of all others pass, whatever it needs.
    measured[RING] = np.array([measured["per-document"][0], straight.sum() * (cp - 1) // cp])
    tiles, query_tiles = KERNEL.count(whole(lengths))
    return measured | {LIMIT: np.array([KERNEL.time(1, tiles / cp, query_tiles / cp), np.nan])}


def whole(lengths: np.ndarray) -> np.ndarray:
    """Documents of `lengths` (int64 [n]) in one piece each, SEGMENT [n]."""
    segments = np.zeros(len(lengths), SEGMENT)
    segments["document"], segments["stop"] = np.arange(len(lengths)), lengths
    return segments


def cases(quick: bool) -> list[tuple[Row, list[np.ndarray]]]:
    """What is sharded: values of `CASE`, and document lengths of micro-batches, int64 [documents] each."""
    found = []
    names, windows, cps = (("F2",), (1 << 17,), (4,)) if quick else (("F2", "dist_wlbllm"), (1 << 17, 1 << 19), CPS)
    for name, window, packing in itertools.product(names, windows, PACKINGS):
        drawn = f2(200_000, 0, window) if name == "F2" else distca()
        job = attention_job(window, (4, 4), packing=POLICIES[packing]())
        made = packed(np.minimum(drawn, window), job, 20 if quick else 100)
        found += [(dict(zip(CASE, (name, window, packing, cp), strict=True)), made) for cp in cps]
    return found


def balance(found: list[tuple[Row, list[np.ndarray]]]) -> list[Row]:
    rows = []
    for case, made in results.track(found, "sharding"):
        measured = [predicted(lengths, case["cp"], case["window"]) for lengths in made]
        total = {strategy: sum(each[strategy] for each in measured) for strategy in measured[0]}
        tokens = sum(padded(lengths, 2 * case["cp"]).sum() for lengths in made)
        plain, limit = total["per-sequence"][0], total[LIMIT][0]
        for strategy, (us, rows_in) in total.items():
            row = case | {"strategy": strategy, "predicted_us": us / len(made), "speedup": plain / us}
            row["share_of_gain"] = (plain - us) / (plain - limit) if plain != limit else 1.0
            rows.append(row if strategy == LIMIT else row | {"rows_in": rows_in / tokens})
    return rows


def layers(made: Sequence[np.ndarray], job: Job) -> dict[str, tuple[float, float]]:
    """Time of a layer, forward and backward, of all micro-batches, and the exposed exchange in it, us each."""
    cp, kernels = job.parallel.cp, attention_kernels(job)

    def peer(cp_sharding: str, cp_exchange: str) -> Job:
        return replace(job.sharded(cp_sharding=cp_sharding), cp_exchange=cp_exchange, reorder=False)

    jobs = {OURS: job, "wlb, all-gather": peer("paper", "all")}
    jobs |= {"per-sequence, ring": peer("per-sequence", "ring"), RING: peer("per-document", "ring")}
    passes = {name: pass_times(given, [shard(lengths, given) for lengths in made]) for name, given in jobs.items()}
    timed = {
        name: (sum((each.total - each.tensor).sum() for each in both), sum(each.exchange.sum() for each in both))
        for name, both in ((name, of.layers) for name, of in passes.items())
    }
    linear = np.array([[each.linear.sum() / passes[OURS].rows.sum()] for each in passes[OURS].layers])

    def add(name: str, times: Callable[..., tuple[np.ndarray, np.ndarray]], plans: Iterable[ShardPlan]) -> None:
        each = [(plan, *times(plan, job)) for plan in plans]
        busy = np.array([linear * [shard.tokens for shard in plan.shards] + attention for plan, attention, _ in each])
        took = (busy + [added for _, _, added in each]).max(axis=2)
        timed[name] = took.sum(), (took - busy.max(axis=2)).sum()

    add("FlashCP", cp_peers.flash_times, (cp_peers.flash(lengths, job) for lengths in made))
    add("MagiAttention", cp_peers.magi_times, (cp_peers.magi(lengths, cp) for lengths in made))
    steps = (np.concatenate(step) for step in itertools.batched(made, PER_STEP))
    dynamic = (cp_peers.dynamic(step, cp, job.context_length, job.crossover_tokens) for step in steps)
    add("dynamic CP", cp_peers.ring_times, dynamic)
    tiles, query_tiles = np.sum([kernels[0].count(whole(lengths)) for lengths in made], axis=0) / cp
    attention = sum(kernel.time(len(made), tiles, query_tiles) for kernel in kernels)
    timed[LIMIT] = float(attention + linear.sum() * sum(lengths.sum() for lengths in made) / cp), 0.0
    return timed


def exchange(found: list[tuple[Row, list[np.ndarray]]]) -> list[Row]:
    """The limit's share of a layer, by strategy, and that of the exposed exchange."""
    rows = []
    for (case, made), (name, (model, tp)) in results.track(list(itertools.product(found, SHAPES.items())), "exchange"):
        timed = layers(made[:TIMED], job_of(case["window"], case["cp"], model, tp))
        limit, _ = timed.pop(LIMIT)
        row = case | {"model": name, "tp": tp, "key_heads": model.heads_per_rank(tp)[1]}
        row |= {strategy: limit / took for strategy, (took, _) in timed.items()}
        rows.append(row | {f"{strategy}, exposed": waits / took for strategy, (took, waits) in timed.items()})
    return rows


def hidden(case: step_time.Case) -> Row:
    """Share of backward attention in hidden tiles, of all ranks in `PER_STEP` steps."""
    profiles = {"ignored": replace(PROFILE, backward=replace(PROFILE.backward, hidden=0.0)), "counted": PROFILE}
    row, data = Row(job=case.title), step_time.samples_of(case)
    for name, profile in profiles.items():
        make = partial(step_time.job_of, case, profile=profile)
        planned, _ = predictions(make(), make, data, memory_known=True)
        timed, took = [replace(planned, profile=each) for each in profiles.values()], np.zeros(2)
        packer = Packer(data, planned)
        for batch in (packer.next().batch for _ in range(PER_STEP)):
            for plan in itertools.chain(*shard_step(planned, batch.lengths, batch.ranks)):
                took += [attention_times(plan, job)[0][1].sum() for job in timed]
        row[name] = 1 - took[0] / took[1]
    return row


def selection(job: Job, documents: int = 1000) -> Row:
    """CPU time to choose and make a job's plan for so many documents, and its stages."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(4.3, 1.2, documents), 1, 60_000).astype(np.int64)
    times = []
    for _ in range(300):
        begin = time.process_time()
        shard(lengths, job)
        times.append((time.process_time() - begin) * 1e3)
    return {"documents": documents, "cp": job.parallel.cp, "native_ms": float(np.median(times))}


def goals(rows: list[Row], selected: Row) -> list[results.Goal]:
    wanted = []
    for row in rows:
        if (row["window"], row["cp"], row["strategy"]) == (1 << 17, 4, "auto"):
            name = f"{row['data']}, {row['packing']} packing, 128K, CP=4: share of the gain of the limit"
            wanted.append(results.at_least(name, row["share_of_gain"], 0.85))
    name = f"sharding and stages of {selected['documents']:,} documents on {selected['cp']} ranks, ms"
    return [*wanted, results.at_most(name, selected["native_ms"], 0.5)]


def hidden_goals(rows: list[Row]) -> list[results.Goal]:
    name = "hidden tiles, share of backward attention"
    return [results.at_most(f"{row['job']}: {name}", row["counted"], 0.01) for row in rows]


def exchange_goals(rows: list[Row]) -> list[results.Goal]:
    """Of the worst of all data, windows and packings."""
    wanted = []
    for name, (cps, most) in itertools.product(SHAPES, (((2, 4, 8), 0.02), ((32,), 0.04))):
        some = [row for row in rows if row["model"] == name and row["cp"] in cps]
        what = f"{name}, CP {'=' if len(cps) == 1 else '<='} {cps[-1]}"
        if some:
            worst = max(row[f"{OURS}, exposed"] for row in some)
            wanted.append(results.at_most(f"{what}: exposed exchange, share of a layer", worst, most))
        if some and name in ("8B", "34B"):
            wanted.append(results.at_least(f"{what}: share of the limit", min(row[OURS] for row in some), 0.97))
    return wanted


def draw(rows: list[Row], folder: Path) -> Path:
    """Share of the attainable gain over CP ranks, F2 at 128K."""
    figure = results.figure(10, 3.6)
    axes = figure.subplots(1, 2, sharey=True)
    styles = {"paper": ("#d55e00", "o"), "auto": ("#0072b2", "s")}
    for axis, packing in zip(axes, PACKINGS, strict=True):
        for strategy, (color, marker) in styles.items():
            here = [r for r in rows if (r["data"], r["window"], r["packing"]) == ("F2", 1 << 17, packing)]
            points = [(r["cp"], 100 * r["share_of_gain"]) for r in here if r["strategy"] == strategy]
            axis.plot(*zip(*points, strict=True), color=color, marker=marker, label=strategy)
        axis.set_xscale("log", base=2)
        axis.set(xticks=CPS, xticklabels=CPS, xlabel="context-parallel ranks", ylim=(0, 102))
        axis.set_title(f"{packing} packing", loc="left", fontsize=10)
    axes[0].set_ylabel("gain over per-sequence, % of the limit's")
    axes[0].legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 0.3))
    return results.save(figure, "cp_balance", folder)


def main() -> None:
    args = results.parser(__doc__, "half a minute: F2, 128K, CP=4").parse_args()
    found = cases(args.quick)
    rows, exchanged = balance(found), exchange(found)
    paid = [hidden(case) for case in step_time.REMEMBERED[: 1 if args.quick else None]]
    selected = selection(job_of(1 << 17, 16))
    results.show(rows)
    results.show(exchanged, [column for column in exchanged[0] if not column.endswith(", exposed")])
    results.show(paid)
    print(selected)
    settings = {"heads": 4, "profile": DEFAULT_PROFILE, "crossover": CROSSOVER, "S_max": S_MAX}
    settings |= {"selection": selected, "exchange": exchanged, "hidden": paid}
    draw_rows, wanted = partial(draw, rows), goals(rows, selected) + exchange_goals(exchanged) + hidden_goals(paid)
    results.finish(args, "cp_balance", settings=settings, rows=rows, goals=wanted, draw=draw_rows)


if __name__ == "__main__":
    main()
