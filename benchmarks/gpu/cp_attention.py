"""Context-parallel attention on one GPU: every rank of a micro-batch one after the other, all of K and V at hand.

    python -m benchmarks.gpu.cp_attention [--sections 0adcb] [--models "7B TP8,70B TP8"] [--quick] [--check]

Needs torch, numpy and scipy. Sections, in the order they run:

0  Entries without queries, and all else, against float64 on small micro-batches. If that is wrong, nothing else runs.
a  Latency and TFLOP/s of the kernel over the length of equal documents and, Figure 10 of the paper, of a few queries
   with many keys; and a profile fitted to both.
d  The slowest rank over the limit: the micro-batch whole on one GPU, divided by the ranks.
c  Our calls against copies of key prefixes, with and without padded documents: time and memory.
b  Figure 15: shardings, and how well they are chosen: regret is over the best of all plans, chosen by half of the
   rounds and measured by the other. Takes what is left of --minutes, the paper's CP=4 and few heads first, each case
   as many micro-batches as there is time for. Regret, and choices by the fitted profile, are of few heads alone.

Micro-batches are F2, packed by --packing; tensors are random. Times are of the device with cold caches, of the slowest
rank, summed over micro-batches: medians over rounds in which all that is compared takes turns, and the least and the
largest round. A case that fails is a row of the results, which are written after every case; the exit status is then 1.
Build the native core before, or planning takes a minute of it.
"""

import sys
from argparse import Namespace
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import product

import numpy as np
import torch

from benchmarks.gpu.bench import Bench, Row, command_line
from benchmarks.gpu.cases import FULL, QUICK, Choices, attention_job, micro_batches
from benchmarks.gpu.correctness import check
from benchmarks.gpu.ranks import CopyFree, MakeMethod, PrefixCopies, Rows, both, gradients_of, random_rows, ranks
from benchmarks.lengths import padded
from benchmarks.results import spread
from megatron_wlb.cli.calibration import count, fit
from megatron_wlb.hardware.profile import Profile, load_profile
from megatron_wlb.job import STRATEGIES, Job
from megatron_wlb.packing import DEFAULT_POLICY, POLICIES
from megatron_wlb.runtime.backends.trial import kernel_args
from megatron_wlb.sharding import per_document, shard
from megatron_wlb.types import SEGMENT, Shard, ShardPlan

SECTIONS = "0adcb"
FEW_HEADS, MOST_HEADS = 8, 32
"""Query heads up to which sections c and d and b's regret, and section a, measure a model: more take longer."""
SHORT_DOCUMENT = 1021
PAPER_CP = 4
COPIES_UNIT = 2 * PAPER_CP
"""Section c pads micro-batches, or documents, to a multiple of this."""
CHOSEN = ("wlb", "hybrid", "auto")
"""Strategies that go by a profile."""
ROUNDS = 3
HALVES = slice(0, None, 2), slice(1, None, 2)
"""Which rounds choose, and which measure."""
TILE_ROWS = 128
Case = tuple[ShardPlan, MakeMethod]


class AttentionBench(Bench):
    """One run of this benchmark."""

    def __init__(self, args: Namespace) -> None:
        super().__init__("cp_attention", args)
        self.scale = QUICK if args.quick else FULL
        self.models = {n: h for n, h in self.scale.models.items() if args.models is None or n in args.models}
        self.profiles = {args.profile: load_profile(args.profile)}
        """The one that chooses shardings, then perhaps the fitted one."""
        self.settings |= {"profile": args.profile, "packing": args.packing, "scale": asdict(self.scale)}

    def micro_batches(self, window: int) -> tuple[np.ndarray, ...]:
        return micro_batches(window, self.args.packing, self.scale.micro_batches)

    def inputs(self, lengths: Sequence[np.ndarray], heads: tuple[int, int]) -> Rows:
        """Random tensors that are long enough for each of `lengths`, tail padding included."""
        longest = max(int(x.sum()) for x in lengths) + 2 * max(self.scale.cps)
        return random_rows(longest, heads, self.scale.head_size, self.dtype, self.device)

    def job(self, window: int, heads: tuple[int, int], cp: int) -> Job:
        """What is planned for, by the profile that chooses shardings."""
        return attention_job(window, heads, cp, packing=self.args.packing, profile=self.profiles[self.args.profile])

    def play(self, cases: Sequence[Case], rows: Rows, turn: int) -> list[np.ndarray]:
        """Forward and backward of all ranks of every plan, plans by turns: ms [ROUNDS, ranks] of each.

        `turn` counts micro-batches: another plan is the first in each round of each. A call before, of every plan in
        turn 0, wakes the device.
        """
        members = [
            [(make(rank, self.options), rank) for rank in ranks(plan, self.backend, self.device)]
            for plan, make in cases
        ]
        for (method, rank), *_ in members[: 1 if turn else None]:
            self.clock.ms(partial(both, method, rank.local(rows)))
        ms = [np.empty((ROUNDS, len(of_plan))) for of_plan in members]
        for i in range(ROUNDS):
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


def main() -> None:
    parser = command_line(__doc__, SECTIONS, last="section b begins no case that would end later")
    parser.add_argument("--models", type=lambda names: names.split(","), help="by name; default: all")
    parser.add_argument("--profile", default="h100-fa2", help="kernel profile that chooses shardings")
    parser.add_argument("--packing", choices=POLICIES, default=DEFAULT_POLICY)
    args = parser.parse_args()
    models = (QUICK if args.quick else FULL).models
    if unknown := set(args.models or ()) - models.keys():
        parser.error(f"--models {', '.join(sorted(unknown))}: choose from {', '.join(models)}")
    bench = AttentionBench(args)
    run = {"0": correctness, "a": kernels, "d": limit, "c": copies, "b": shardings}
    for section in (s for s in SECTIONS if s in args.sections):
        bench.say(f"section {section}")
        with bench.case(section=section):
            if section != "0":  # which leaves NaN in free memory, to see what is not written
                bench.clock.reserve()
            run[section](bench)
    bench.conclude()


def correctness(bench: AttentionBench) -> None:
    """Section 0. Exits with 2 if anything is wrong."""
    try:
        worst, wrong = check(bench.backend, bench.device, bench.dtype, quick=bench.args.quick)
    except Exception as error:  # a kernel refuses or crashes; after an illegal access nothing runs any more
        worst, wrong = {}, [f"raised {error!r}"]
    bench.add({"section": "0", "wrong": len(wrong), **{f"error_{name}": e for name, e in worst.items()}})
    if wrong:
        bench.settings["wrong"] = wrong
        print(*wrong[:40], f"wrong: {len(wrong)} cases", sep="\n")
        sys.exit(2)


def kernels(bench: AttentionBench) -> None:
    """Section a."""
    scale = bench.scale
    counts, us = [], []
    for model, heads in of_few_heads(bench, MOST_HEADS).items():
        lengths = partial(query_lengths, heads=heads[0], head_size=scale.head_size)
        shapes = [(n, n, tokens // n) for tokens in scale.kernel_tokens for n in lengths(tokens)]
        keys, entries = scale.short_queries
        shapes += [(n, keys, entries // heads[0]) for n in lengths(keys // 16)]
        for queries, keys, entries in shapes:
            case = {"section": "a", "model": model, "heads": heads, "query_length": queries, "keys": keys}
            with bench.case(**case):
                times = kernel_times(bench, heads, queries, keys, entries)
                bench.add({**case, "entries": entries, **times})
                segments = np.array([(0, keys - queries, keys)] * entries, SEGMENT)
                counts.append(count(Shard(calls=(segments,)), heads[0], TILE_ROWS))
                us.append([1e3 * times[f"{direction}_ms"] for direction in ("forward", "backward")])
    if us:
        forward, backward = (fit(np.array(counts, np.float64), measured) for measured in np.transpose(us))
        bench.profiles["fitted"] = Profile(name="fitted", tile_rows=TILE_ROWS, forward=forward, backward=backward)
        bench.settings["fitted_profile"] = {"forward": asdict(forward), "backward": asdict(backward)}
        bench.say(f"fitted profile: {bench.settings['fitted_profile']}")


def kernel_times(bench: AttentionBench, heads: tuple[int, int], queries: int, keys: int, entries: int) -> Row:
    """Times of a call for the last `queries` of each of `entries` documents of `keys` tokens."""
    backend, head_size = bench.backend, bench.scale.head_size
    q, kv, dout = random_rows(entries * keys, heads, head_size, bench.dtype, bench.device)
    q, dout, (k, v) = q[: entries * queries], dout[: entries * queries], kv.unbind(1)
    args = kernel_args(backend, [(queries, keys)] * entries, bench.device, head_size**-0.5)
    out, lse = backend.forward(q, k, v, args)
    calls = {
        "forward": partial(backend.forward, q, k, v, args),
        "backward": partial(gradients_of, backend, dout, q, k, v, out, lse, args),
    }
    pairs = entries * (queries * (keys - queries) + queries * (queries + 1) // 2)
    row: Row = {}
    for direction, timed in calls.items():
        timed()
        samples = 3 if heads[0] * queries > 1 << 19 else 7
        row |= spread(f"{direction}_ms", [bench.clock.ms(timed) for _ in range(samples)])
        flops = 4 * head_size * heads[0] * pairs * (2.5 if direction == "backward" else 1)
        row[f"{direction}_tflops"] = flops / row[f"{direction}_ms"] * 1e-9
    return row


def query_lengths(tokens: int, heads: int, head_size: int) -> list[int]:
    """Powers of two from 16 on, but for those that come in such numbers that 32 bits do not count what dQ is summed in.

    Backward of flash-attn before 2.8 (Dao-AILab/flash-attention#1500) then accesses memory that is not there, which
    ends the process.
    """
    lengths = (1 << i for i in range(4, tokens.bit_length()))
    return [n for n in lengths if heads * head_size * (tokens + 128 * (tokens // n)) < 1 << 31]


def limit(bench: AttentionBench) -> None:
    """Section d."""
    window = bench.scale.windows[-1]
    made = bench.micro_batches(window)
    for model, heads in of_few_heads(bench).items():
        with bench.case(section="d", model=model, window=window):
            rows, times = bench.inputs(made, heads), defaultdict(list)
            for i, lengths in enumerate(made):
                plans = {cp: shard(lengths, bench.job(window, heads, cp))[1] for cp in (1, *bench.scale.cps)}
                played = bench.play([(plan, CopyFree) for plan in plans.values()], rows, i)
                for cp, ms in zip(plans, played, strict=True):
                    times[cp].append(ms)
            total = {cp: slowest(ms) for cp, ms in times.items()}
            for cp, found in total.items():
                row = {"section": "d", "model": model, "window": window, "cp": cp, **found}
                row["over_limit"] = found["total_ms"] / (total[1]["total_ms"] / cp)
                bench.add(row)
                if cp > 1:
                    bench.goal(f"d: {model}, {window}, CP={cp}: over the limit", row["over_limit"], "<=", 1.08)


def copies(bench: AttentionBench) -> None:
    """Section c."""
    for (model, heads), window in product(of_few_heads(bench).items(), bench.scale.windows):
        short = min(SHORT_DOCUMENT, window // 16)
        equal = (np.full(window // short, short),)
        for data, made in {"F2": bench.micro_batches(window), f"documents of {short}": equal}.items():
            case = {"section": "c", "model": model, "window": window, "data": data, "cp": PAPER_CP}
            with bench.case(**case):
                compare_copies(bench, case, made, bench.inputs([rounded_up(lengths) for lengths in made], heads))


def copies_cases(lengths: np.ndarray) -> dict[str, Case]:
    """By method, per-document sharding."""
    tokens = padded(lengths, COPIES_UNIT)
    plan = per_document(tokens, PAPER_CP)
    return {
        "ours": (plan, CopyFree),
        "prefix copies": (plan, PrefixCopies),
        "prefix copies, fp32 sums": (plan, partial(PrefixCopies, dtype=torch.float32)),
        "prefix copies, padded documents": (per_document(rounded_up(tokens), PAPER_CP), PrefixCopies),
    }


def rounded_up(lengths: np.ndarray) -> np.ndarray:
    return -(-lengths // COPIES_UNIT) * COPIES_UNIT


def compare_copies(bench: AttentionBench, case: Row, made: Sequence[np.ndarray], rows: Rows) -> None:
    """Measure a case of section c, its rows and its goals."""
    times = defaultdict(list)
    for i, lengths in enumerate(made):
        cases = copies_cases(lengths)
        for method, ms in zip(cases, bench.play(list(cases.values()), rows, i), strict=True):
            times[method].append(ms)
        if i == 0:
            costs = {method: cost(bench, of_method, rows) for method, of_method in cases.items()}
            difference = largest_difference(bench, cases["ours"], cases["prefix copies, fp32 sums"], rows)
    found = {method: slowest(ms) | costs[method] for method, ms in times.items()}
    for method, row in found.items():
        bench.add({**case, "method": method, **row})
    what, mine = f"c: {case['model']}, {case['window']}, {case['data']}", found["ours"]
    for name in ("prefix copies", "prefix copies, fp32 sums"):
        other = found[name]
        bench.goal(f"{what}, ours against {name}: speed", other["total_ms"] / mine["total_ms"], ">=", 1.15)
        for key, memory in (("peak_mib", "peak memory"), ("kept_mib", "memory kept until backward")):
            if other[key]:
                bench.goal(f"{what}, ours against {name}: {memory}", mine[key] / other[key], "<=", 0.6)
    bench.goal(f"{what}: difference of ours and prefix copies", difference, "<=", 2**-6)


def cost(bench: AttentionBench, case: Case, rows: Rows) -> Row:
    """Memory and host time of the rank that takes most."""
    plan, make = case
    found = []
    for rank in ranks(plan, bench.backend, bench.device):
        method, local = make(rank, bench.options), rank.local(rows)
        found.append(bench.clock.costs(partial(method.forward, local), partial(method.backward, local)))
    return {key: max((each[key] for each in found), key=lambda x: x or 0) for key in found[0]}


def largest_difference(bench: AttentionBench, case: Case, other: Case, rows: Rows) -> float:
    """The largest relative difference, by norms, of out, dq, dK and dV over all ranks."""
    found = [0.0]
    for rank in ranks(case[0], bench.backend, bench.device):
        local = rank.local(rows)
        results = (both(make(rank, bench.options), local) for _, make in (case, other))
        found += [float((x.float() - y.float()).norm() / y.float().norm()) for x, y in zip(*results, strict=True)]
    return max(found)


def shardings(bench: AttentionBench) -> None:
    """Section b."""
    cases = list(product(bench.models.items(), bench.scale.windows, bench.scale.cps))
    cases.sort(key=lambda c: (c[2] != PAPER_CP, c[0][1][0] * c[1]))
    for (model, heads), window, cp in cases:
        case = {"section": "b", "model": model, "window": window, "cp": cp}
        with bench.case(**case):
            seconds = min(bench.scale.case_seconds / (1 if cp == PAPER_CP else 3), bench.seconds_left)
            if seconds > 0:
                compare(bench, case, bench.job(window, heads, cp), bench.seconds + seconds)
            else:
                bench.add(case | {"left_out": "no time is left"})


def compare(bench: AttentionBench, case: Row, job: Job, until: float) -> None:
    """Measure a case of section b, its rows and its goals; no micro-batch but the first begins after `until`."""
    made, heads = bench.micro_batches(job.context_length), bench.models[case["model"]]
    with_oracle = job.parallel.cp == PAPER_CP and heads[0] <= FEW_HEADS
    rows, times, picked, best = bench.inputs(made, heads), defaultdict(list), defaultdict(Counter), []
    for i, lengths in enumerate(made):
        if i and bench.seconds > until:
            break
        choices = choose(bench, lengths, job, with_oracle)
        played = bench.play([(plan, CopyFree) for plan in choices.plans.values()], rows, i)
        ms = dict(zip(choices.plans, played, strict=True))
        picks = dict(choices.by_strategy)
        if with_oracle:
            picks["oracle"] = min(ms, key=lambda plan: total_ms([ms[plan]]))
            best += crossed(ms)
        for strategy, plan in picks.items():
            times[strategy].append(ms[plan])
            picked[strategy][choices.plans[plan].strategy] += 1
    found = {strategy: slowest(ms) for strategy, ms in times.items()}
    for strategy, row in found.items():
        row["speedup"] = found["per-sequence"]["total_ms"] / row["total_ms"]
        if with_oracle:
            row["regret"] = total_ms([ms[half] for ms in times[strategy] for half in HALVES]) / total_ms(best) - 1
        counts = {"micro_batches": len(times[strategy]), "plans": dict(picked[strategy])}
        bench.add({**case, "strategy": strategy, **counts, **row})
    if job.parallel.cp == PAPER_CP:
        what, mine = f"b: {case['model']}, {case['window']}, CP=4", found["auto"]
        for other, least in (("per-sequence", 1.075), ("per-document", 1.034)):
            bench.goal(f"{what}: speed over {other}", found[other]["total_ms"] / mine["total_ms"], ">=", least)
        if with_oracle:
            bench.goal(f"{what}: regret", mine["regret"], "<=", 0.01)


def choose(bench: AttentionBench, lengths: np.ndarray, job: Job, with_oracle: bool) -> Choices:
    """Plans of all strategies, of few heads by each profile; for an oracle also those that nobody chose."""
    choices, heads = Choices(lengths), job.model.heads_per_rank(1)
    choices.choose(job, tuple(STRATEGIES))
    for name, profile in list(bench.profiles.items())[1:] if heads[0] <= FEW_HEADS else ():
        choices.choose(replace(job, profile=profile), CHOSEN, f", {name} profile")
    if with_oracle:
        choices.add_candidates(job)
    return choices


def crossed(ms: dict[bytes, np.ndarray]) -> list[np.ndarray]:
    """ms [rounds, ranks] of a micro-batch by plan -> those of one half of the rounds, of the plan that was fastest in
    the other half; both ways.

    A plan that is chosen and measured by the same rounds looks faster than it is.
    """
    fastest = [min(ms, key=lambda plan: total_ms([ms[plan][half]])) for half in HALVES]
    return [ms[plan][half] for plan, half in zip(fastest[::-1], HALVES, strict=True)]


def of_few_heads(bench: AttentionBench, most: int = FEW_HEADS) -> dict[str, tuple[int, int]]:
    return {name: heads for name, heads in bench.models.items() if heads[0] <= most}


if __name__ == "__main__":
    main()
