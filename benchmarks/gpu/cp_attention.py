"""Context-parallel attention on one GPU: every rank of a micro-batch one after the other, all of K and V at hand.

    python -m benchmarks.gpu.cp_attention [--sections 0adcb] [--models "7B TP8,70B TP8"] [--quick] [--check]
    python -m benchmarks.gpu.cp_attention --draw benchmarks/results/cp_attention.h100.json

Needs torch and numpy, and matplotlib to draw. Sections, in the order they run:

0  Entries without queries, and all else, against float64 on small micro-batches. If that is wrong, nothing else runs.
a  Figure 10 of the paper: latency and TFLOP/s over the length of equal documents, and a profile fitted to it.
d  The slowest rank over the limit: the micro-batch whole on one GPU, divided by the ranks.
c  Our calls against copies of key prefixes, with and without padded documents: time, memory, launches.
b  Figure 15: shardings, and how well they are chosen. Takes what is left of --minutes, the paper's CP=4 and few heads
   first; what there is no time for is listed.

Micro-batches are F2, packed by --packing; tensors are random. Times are of the device with cold caches, of the slowest
rank, summed over micro-batches: medians over rounds in which all that is compared takes turns, and the least and the
largest round. Results are written after every section. Build the native core before, or planning takes a minute of it.
"""

import sys
from collections import Counter, defaultdict
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import torch

from benchmarks.gpu.bench import FULL, QUICK, Bench, Case, Row, command_line, slowest
from benchmarks.gpu.cases import CHOSEN, PACKINGS, STATIC, Choices, ours, whole
from benchmarks.gpu.correctness import check
from benchmarks.gpu.fit import count, fit
from benchmarks.gpu.ranks import CopyFree, MakeMethod, PrefixCopies, Rows, both, random_rows, ranks
from benchmarks.lengths import padded
from benchmarks.results import conclude
from megatron_wlb.plan.sharding import per_document

SECTIONS = "0adcb"
FEW_HEADS, MOST_HEADS = 8, 32
"""Query heads up to which sections c and d, and section a, measure a model: more take longer and show nothing new."""
SHORT_DOCUMENT = 1021
PAPER_CP_SIZE = 4
SETUP_SECONDS, BESIDE_SECONDS = 0.005, 0.003
"""About what a rank of a plan takes to set up, and each of its measurements beside the attention."""


def main() -> None:
    parser = command_line(__doc__, SECTIONS, last="section b begins no case that would end later")
    parser.add_argument("--models", type=lambda names: names.split(","), help="by name; default: all")
    parser.add_argument("--profile", default="h100-fa2", help="kernel profile that chooses shardings")
    parser.add_argument("--packing", choices=PACKINGS, default="adaptive")
    parser.add_argument("--draw", metavar="FILE", help="draw a result file and measure nothing")
    args = parser.parse_args()
    if args.draw:
        from benchmarks.gpu.picture import draw

        print(draw(Path(args.draw)))
        return
    models = (QUICK if args.quick else FULL).models
    if unknown := set(args.models or ()) - models.keys():
        parser.error(f"--models {', '.join(sorted(unknown))}: choose from {', '.join(models)}")
    bench = Bench(args)
    run = {"0": correctness, "a": kernels, "d": limit, "c": copies, "b": shardings}
    for section in (s for s in SECTIONS if s in args.sections):
        bench.say(f"section {section}")
        if section != "0":  # which leaves NaN in free memory, to see what is not written
            bench.clock.reserve()
        run[section](bench)
        bench.write()
    conclude(bench.goals, args.check)


def correctness(bench: Bench) -> None:
    """Section 0. Exits with 2 if anything is wrong."""
    try:
        worst, wrong = check(bench.backend, bench.device, bench.dtype, quick=bench.args.quick)
    except RuntimeError as error:  # a kernel refuses or crashes; after an illegal access nothing runs any more
        worst, wrong = {}, [f"raised {error!r}"]
    bench.add({"section": "0", "wrong": len(wrong), **{f"error_{name}": e for name, e in worst.items()}})
    if wrong:
        bench.settings["wrong"] = wrong
        bench.write()
        ours_alone = sum(line.startswith("ours") for line in wrong)
        print(*wrong[:40], f"wrong: {ours_alone} cases of ours, {len(wrong) - ours_alone} others", sep="\n")
        print("Where prefix copies are right and ours is not, entries without queries are to blame.")
        sys.exit(2)


def kernels(bench: Bench) -> None:
    """Section a."""
    counts, us = [], []
    models = {name: heads for name, heads in bench.models.items() if heads[0] <= MOST_HEADS}
    for (model, heads), tokens in product(models.items(), bench.scale.kernel_tokens):
        local = random_rows(tokens, heads, bench.scale.head_size, bench.dtype, bench.device)
        for length in query_lengths(tokens, heads[0], bench.scale.head_size):
            plan = whole(np.full(tokens // length, length))
            method = CopyFree(ranks(plan, bench.device)[0], bench.options)
            saved = method.forward(local)
            calls = {"forward": partial(method.forward, local), "backward": partial(method.backward, local, saved)}
            samples = 3 if heads[0] * length > 1 << 19 else 7
            row = {"section": "a", "model": model, "heads": heads, "tokens": tokens, "query_length": length}
            flops = 2 * bench.scale.head_size * heads[0] * tokens * (length + 1)
            for direction, call in calls.items():
                call()
                ms = [bench.clock.ms(call) for _ in range(samples)]
                median = float(np.median(ms))
                row |= {f"{direction}_ms": median, f"{direction}_min_ms": min(ms), f"{direction}_max_ms": max(ms)}
                row[f"{direction}_tflops"] = flops * (2.5 if direction == "backward" else 1) / median * 1e-9
            bench.add(row)
            counts.append(count(plan.shards[0], heads[0]))
            us.append([1e3 * row[f"{direction}_ms"] for direction in calls])
    if us:
        bench.profiles["fitted"], bench.settings["fitted_profile"] = fit(np.array(counts, np.float64), np.array(us))
        bench.say(f"fitted profile: {bench.settings['fitted_profile']}")


def query_lengths(tokens: int, heads: int, head_size: int) -> list[int]:
    """Powers of two from 16 on, but for those that come in such numbers that 32 bits do not count what dQ is summed in.

    Backward of flash-attn before 2.8 (Dao-AILab/flash-attention#1500) then accesses memory that is not there, which
    ends the process.
    """
    lengths = (1 << i for i in range(4, tokens.bit_length()))
    return [n for n in lengths if heads * head_size * (tokens + 128 * (tokens // n)) < 1 << 31]


def limit(bench: Bench) -> None:
    """Section d."""
    window = bench.scale.windows[-1]
    made = bench.micro_batches(window)
    for model, heads in few_heads(bench).items():
        rows, kernel = bench.inputs(made, heads), bench.kernel(heads[0])
        times = defaultdict(list)
        for i, lengths in enumerate(made):
            plans = {1: whole(lengths)} | {cp: ours(lengths, cp, kernel) for cp in bench.scale.cp_sizes}
            cases = [(plan, CopyFree) for plan in plans.values()]
            if i == 0:
                bench.play(cases, rows, 1)
            for cp_size, ms in zip(plans, bench.play(cases, rows, min(3, bench.scale.most_rounds)), strict=True):
                times[cp_size].append(ms)
        total = {cp_size: slowest(ms) for cp_size, ms in times.items()}
        for cp_size, found in total.items():
            row = {"section": "d", "model": model, "window": window, "cp_size": cp_size, **found}
            row["over_limit"] = found["total_ms"] / (total[1]["total_ms"] / cp_size)
            bench.add(row)
            if cp_size > 1:
                bench.goal(f"d: {model}, {window}, CP={cp_size}: over the limit", row["over_limit"], "<=", 1.08)


def copies(bench: Bench) -> None:
    """Section c."""
    cp_size, window = PAPER_CP_SIZE, bench.scale.windows[-1]
    unit, short = 2 * cp_size, min(SHORT_DOCUMENT, window // 16)
    methods: dict[str, tuple[MakeMethod, int]] = {
        "ours": (CopyFree, 1),
        "prefix copies": (PrefixCopies, 1),
        "prefix copies, fp32 sums": (partial(PrefixCopies, dtype=torch.float32), 1),
        "prefix copies, padded documents": (PrefixCopies, unit),
    }
    data = {
        "F2": bench.micro_batches(window)[: bench.scale.copied_micro_batches],
        f"documents of {short}": [np.full(window // short, short)],
    }
    for (model, heads), (name, made) in product(few_heads(bench).items(), data.items()):
        rows = bench.inputs([-(-x // unit) * unit for x in made], heads)
        times = defaultdict(list)
        for i, lengths in enumerate(made):
            tokens = padded(lengths, unit)
            cases = [(per_document(-(-tokens // m) * m, cp_size), make) for make, m in methods.values()]
            if i == 0:
                bench.play(cases, rows, 1)
                costs = {method: cost(bench, case, rows) for method, case in zip(methods, cases, strict=True)}
                difference = largest_difference(bench, cases[0], cases[2], rows)
            for method, ms in zip(methods, bench.play(cases, rows, bench.scale.most_rounds), strict=True):
                times[method].append(ms)
        found = {method: slowest(ms) | costs[method] for method, ms in times.items()}
        for method, row in found.items():
            case = {"section": "c", "model": model, "window": window, "data": name, "cp_size": cp_size}
            bench.add({**case, "method": method, **row})
        for other in ("prefix copies", "prefix copies, fp32 sums"):
            what = f"c: {model}, {name}, ours against {other}"
            bench.goal(f"{what}: speed", found[other]["total_ms"] / found["ours"]["total_ms"], ">=", 1.15)
            if found[other]["peak_mib"]:
                bench.goal(f"{what}: extra memory", found["ours"]["peak_mib"] / found[other]["peak_mib"], "<=", 0.6)
        bench.goal(f"c: {model}, {name}: difference of ours and prefix copies", difference, "<=", 2**-6)


def cost(bench: Bench, case: Case, rows: Rows) -> Row:
    """Memory and host time of the rank that takes most, and launches of the last one."""
    plan, make = case
    found = []
    for rank in ranks(plan, bench.device):
        method, local = make(rank, bench.options), rank.local(rows)
        found.append(bench.clock.costs(partial(method.forward, local), partial(method.backward, local)))
    most = {key: max((each[key] for each in found), key=lambda x: x or 0) for key in found[0]}
    return most | {"launches": bench.clock.launches(partial(both, method, local))}


def largest_difference(bench: Bench, case: Case, other: Case, rows: Rows) -> float:
    """Of out, dq, dK and dV of all ranks, relative, as norms."""
    found = [0.0]
    for rank in ranks(case[0], bench.device):
        local = rank.local(rows)
        results = (both(make(rank, bench.options), local) for _, make in (case, other))
        found += [float((x.float() - y.float()).norm() / y.float().norm()) for x, y in zip(*results, strict=True)]
    return max(found)


def shardings(bench: Bench) -> None:
    """Section b."""
    scale = bench.scale
    cases = list(product(bench.models.items(), scale.windows, scale.cp_sizes))
    cases.sort(key=lambda c: c[0][1][0] * c[1] * (1 if c[2] == PAPER_CP_SIZE else 4))
    for (model, heads), window, cp_size in cases:
        case = {"section": "b", "model": model, "window": window, "cp_size": cp_size}
        made = bench.micro_batches(window)
        left = 60 * bench.args.minutes - bench.seconds
        share = min(left, scale.case_seconds / (1 if cp_size == PAPER_CP_SIZE else 3))
        attention = bench.predicted_seconds(made, heads[0])
        with_oracle = cp_size == PAPER_CP_SIZE and 10 * attention < share
        chosen = [choose(bench, lengths, cp_size, heads[0], with_oracle) for lengths in made]
        plans = sum(len(choices.plans) for choices in chosen)
        setup = plans * cp_size * SETUP_SECONDS
        round_ = plans * (attention / len(made) + cp_size * BESIDE_SECONDS)
        if setup + round_ > left:
            bench.add(case | {"left_out": f"would take {setup + round_:.0f} s, with {left:.0f} s left"})
            continue
        rounds = max(1, min(scale.most_rounds, int((share - setup) / round_)))
        compare(bench, case, chosen, rounds, with_oracle)
        bench.write()


def choose(bench: Bench, lengths: np.ndarray, cp_size: int, heads: int, with_oracle: bool) -> Choices:
    """Plans of all strategies, by each profile; for an oracle also those that nobody chose."""
    choices = Choices(lengths, cp_size)
    choices.choose(STATIC + CHOSEN, bench.kernel(heads))
    for name in list(bench.profiles)[1:]:
        choices.choose(CHOSEN, bench.kernel(heads, name), f", {name} profile")
    if with_oracle:
        choices.add_candidates(bench.kernel(heads))
    return choices


def compare(bench: Bench, case: Row, chosen: list[Choices], rounds: int, with_oracle: bool) -> None:
    """Measure a case, its rows and its goals."""
    heads = bench.models[case["model"]]
    rows = bench.inputs(bench.micro_batches(case["window"]), heads)
    times, picked = defaultdict(list), defaultdict(Counter)
    for i, choices in enumerate(chosen):
        cases = [(plan, CopyFree) for plan in choices.plans.values()]
        if i == 0:
            bench.play(cases, rows, 1)
        ms = dict(zip(choices.plans, bench.play(cases, rows, rounds), strict=True))
        picks = dict(choices.by_strategy)
        if with_oracle:
            picks["oracle"] = min(ms, key=lambda plan: slowest([ms[plan]])["total_ms"])
        for strategy, plan in picks.items():
            times[strategy].append(ms[plan])
            picked[strategy][choices.plans[plan].strategy] += 1
    found = {strategy: slowest(ms) for strategy, ms in times.items()}
    for strategy, row in found.items():
        speedup = found["per-sequence"]["total_ms"] / row["total_ms"]
        counts = {"micro_batches": len(chosen), "rounds": rounds}
        bench.add({**case, "strategy": strategy, **counts, **row, "speedup": speedup, "plans": dict(picked[strategy])})
    if case["cp_size"] == PAPER_CP_SIZE:
        what, ours_ms = f"b: {case['model']}, {case['window']}, CP=4", found["adaptive"]["total_ms"]
        for other, least in (("per-sequence", 1.075), ("per-document", 1.034)):
            bench.goal(f"{what}: speed over {other}", found[other]["total_ms"] / ours_ms, ">=", least)
        if with_oracle:
            bench.goal(f"{what}: regret", ours_ms / found["oracle"]["total_ms"] - 1, "<=", 0.01)


def few_heads(bench: Bench) -> dict[str, tuple[int, int]]:
    return {name: heads for name, heads in bench.models.items() if heads[0] <= FEW_HEADS}


if __name__ == "__main__":
    main()
