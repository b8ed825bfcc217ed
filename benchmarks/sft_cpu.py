"""How much faster `--sft --wlb` trains conversations than upstream: measured on two cores, predicted for 64 GPUs.

    python -m benchmarks.sft_cpu [--quick] [--check] [--rounds N]

Upstream's `--sft` makes a context window of every line of its file: the line's conversations, then padding, which the
last of them attends over. It is timed with a conversation a line, as most files have it, where nearly everything is
padding (`settings.padding`), and with lines as full as whole conversations in file order make them. TransformerEngine's
attention over several conversations runs on no CPU: upstream's rows are trained by this project's runtime, sharded by
heads and tails of every conversation, without deferral. `--sft --wlb` reads the same conversations from chats.jsonl, by
default packing. All train them in file order, by turns; a conversation a line in the first round alone.

Lengths: one conversation in ten is long, log-uniform over the 8K to 64K tokens that LongAlign-10k's page gives as its
range; the others stand for UltraChat's, log-normal with a median of 1,000. Neither histogram was published in text: the
shapes are made up. The window is 128K, on two cores a sixteenth of it, with conversations as much shorter.

Rates are conversations' tokens per second: of the clock, and of computing time alone (the critical path of CPU times
and what else the thread computes), which other programs on the machine change less. Writes
benchmarks/results/sft_cpu.json in about a quarter of an hour.
"""

import tempfile
from argparse import Namespace
from functools import partial, partialmethod
from pathlib import Path

import numpy as np

from benchmarks import cp_balance, results, step_time
from benchmarks.critical_path import critical_path
from benchmarks.end_to_end_cpu import measure_profile
from benchmarks.lengths import WINDOW, packings, stream
from benchmarks.peers import as_megatron
from benchmarks.results import Row
from benchmarks.training_cpu import Steps, arguments, train, warm, write_dataset
from megatron_wlb.micro_batches import predictions
from megatron_wlb.plan.step import shard_step
from megatron_wlb.plan.stream import DocumentStream
from megatron_wlb.simulate.step import simulate_step
from tests.adapter.chats import conversation, write_chats, write_tokenizer
from tests.worlds import run_world

SHORTER = 16
"""Windows and conversations on two cores are shorter by this."""
LONG_SHARE, LONG, MEDIAN, SIGMA = 0.1, (8192, 65_536), 1000, 0.8
WINDOWS = 4
"""Of a step, on two cores."""
WARM_STEPS, STEPS, ROUNDS = 6, 3, 2
LAYOUTS = {"DP=2": "", "CP=2": "--context-parallel-size 2", "PP=2": "--pipeline-model-parallel-size 2"}
UPSTREAM = "--wlb-packing original --wlb-cp-sharding per-document --wlb-defer-weight-gradients off"
FORMAT = "nemotron-nano-v2"
GPUS = "8B, 8 nodes", "8B, 8 nodes, PP2"
"""Layouts of `step_time` that are predicted."""
FULL, SINGLE, OURS = "upstream, full lines", "upstream, a conversation a line", "--sft --wlb"
GOAL = 1.5


def mix(count: int) -> np.ndarray:
    """Lengths of conversations, int64 [count]."""
    rng = np.random.default_rng(0)
    short = rng.lognormal(np.log(MEDIAN), SIGMA, count)
    long = np.exp(rng.uniform(np.log(LONG[0]), np.log(LONG[1]), count))
    return np.where(rng.random(count) < LONG_SHARE, long, np.clip(short, 64, LONG[0])).astype(np.int64)


def rows_of(lengths: np.ndarray, window: int) -> tuple[np.ndarray, np.ndarray]:
    """Upstream's rows: lengths with the padding in the last of every row, and the conversations' tokens of each row."""
    padded, kept, used = lengths.copy(), [], 0
    for i, length in enumerate(lengths.tolist()):
        if used + length > window:
            padded[i - 1] += window - used
            kept.append(used)
            used = 0
        used += length
    return padded, np.array(kept)


def train_in_order(argv: list[str], first: int) -> Steps:
    """`train`, of documents in the order of their file."""
    DocumentStream.__init__ = partialmethod(DocumentStream.__init__, shuffle=False)  # type: ignore[assignment]
    return train(argv, first)


def measured(folder: Path, size: Namespace) -> list[Row]:
    """A row for every layout and method."""
    warm()
    from megatron_wlb import conversations

    window, profile = size.window, measure_profile(folder, quick=True)
    letters = mix(size.steps_in_all * WINDOWS * 640) // SHORTER
    chats = write_chats(folder / "chats.jsonl", [conversation([int(n)], i) for i, n in enumerate(letters)])
    tokenizer = write_tokenizer(folder / "tokenizer")
    given: Row = {"tokenizer_type": "SFTTokenizer", "tokenizer_model": tokenizer, "sft_tokenizer_prompt_format": FORMAT}
    given |= {"wlb_sft_broken": "error", "wlb_sft_too_long": "drop", "data_cache_path": None, "seq_length": window}
    lengths = conversations.read(chats, Namespace(**given)).lengths.astype(np.int64)
    padded, full = rows_of(lengths, window)
    rows = np.full(size.steps_in_all * WINDOWS, window)
    kept = {FULL: full, SINGLE: np.full(len(rows), lengths.mean())}  # every row of its own takes as long
    sft = f"--sft --tokenizer-type SFTTokenizer --tokenizer-model {tokenizer} --sft-tokenizer-prompt-format {FORMAT}"
    methods = {
        FULL: (write_dataset(folder / "full", padded + 1), UPSTREAM),
        SINGLE: (write_dataset(folder / "single", rows + 1), UPSTREAM),
        OURS: (chats, sft),
    }
    found = []
    for layout, flags in LAYOUTS.items():
        rounds: dict[str, list[Row]] = {method: [] for method in methods}
        for number in range(size.rounds):
            for method in [name for name in methods if not (name == SINGLE and number)][:: -1 if number % 2 else 1]:
                first = 1 if method == SINGLE else WARM_STEPS + number * size.steps
                dataset, own = methods[method]
                every = (
                    f"--wlb --wlb-profile {profile} --wlb-max-tokens {2 * window} --make-vocab-size-divisible-by 512"
                )
                argv = arguments(dataset, window, WINDOWS, first + size.steps, f"{every} {flags} {own}")
                sums = totals(layout, run_world(train_in_order, 2, argv, first, timeout=600))
                if method in kept:
                    sums["tokens"] = int(kept[method][first * WINDOWS : (first + size.steps) * WINDOWS].sum())
                rounds[method].append(sums)
                print(layout, method, sums, flush=True)
        found += compared(layout, rounds)
    return found


def totals(layout: str, ranks: list[Steps]) -> Row:
    """Tokens, time by the clock, and time of computing of a round."""
    sums = {"tokens": 0, "seconds": 0.0, "computing": 0.0}
    for of_ranks in zip(*ranks, strict=True):
        busy, weights = (np.array([step[key] for step in of_ranks]) for key in ("busy", "weights"))
        sums["tokens"] += of_ranks[0]["tokens"]
        sums["seconds"] += float(np.mean([step["seconds"] for step in of_ranks]))
        sums["computing"] += critical_path(layout, busy, weights, of_ranks[0]["group"])
        sums["computing"] += float(np.mean([step["other"] for step in of_ranks]))
    return sums


def compared(layout: str, rounds: dict[str, list[Row]]) -> list[Row]:
    """A row for each way of upstream's: our rate over its rate, of all rounds together, and the spread of rounds."""

    def rate(some: list[Row], clock: str) -> float:
        return sum(each["tokens"] for each in some) / sum(each[clock] for each in some)

    ours, found = rounds[OURS], []
    for method in (FULL, SINGLE):
        row: Row = {"layout": layout, "over": method}
        for clock in ("seconds", "computing"):
            theirs = rounds[method]
            row |= {f"tokens / {clock}": rate(ours, clock), f"theirs, tokens / {clock}": rate(theirs, clock)}
            row[f"over theirs, {clock}"] = rate(ours, clock) / rate(theirs, clock)
            single = [rate([a], clock) / rate([b], clock) for a, b in zip(ours[: len(theirs)], theirs, strict=True)]
            row |= results.spread(f"over theirs, {clock}, rounds", single)
        found.append(row)
    return found


def predicted(steps: int) -> list[Row]:
    """Speed-ups of Llama 3 8B at 128K on 64 H100 over upstream's rows: a row for each layout.

    Memory is taken to be enough for what `--wlb-micro-batches auto` chooses. Dynamic CP is compared with `--wlb` by a
    layer (`cp_balance`), without a pipeline; it packs whole steps without padding, too.
    """
    lengths, found = mix(4000 * steps), []
    padded, kept = rows_of(lengths, WINDOW)
    for name in GPUS:
        make = partial(step_time.job_of, name, WINDOW)
        ours = make()
        upstream, count = as_megatron(ours, cp_sharding="per-document"), steps * ours.global_batch_size
        packs = packings(padded, upstream, steps)
        base = kept[:count].sum() / sum(simulate_step(upstream, shard_step(upstream, p.lengths)).time for p in packs)
        auto, _ = predictions(ours, make, lambda: stream(lengths, WINDOW), memory_known=True)
        row: Row = {"layout": name, "micro-batches by auto": auto.num_micro_batches}
        for method, job in (("--wlb", ours), ("--wlb-micro-batches auto", auto)):
            packs = packings(lengths, job, steps, step_time.WARM_UP)
            took = sum(simulate_step(job, shard_step(job, pack.lengths)).time for pack in packs)
            row[method] = float(sum(pack.documents["length"].sum() for pack in packs) / took / base)
            if job is ours and job.parallel.pp == 1:
                made = [each for pack in packs for each in pack.lengths]
                sizes = {"window": WINDOW, "cp": job.parallel.cp, "model": job.model, "tp": job.parallel.tp}
                timed = cp_balance.layers(made, cp_balance.job_of(**sizes))
                row["dynamic CP"] = row[method] * float(timed[cp_balance.OURS][0] / timed["dynamic CP"][0])
        found.append(row)
    return found


def main() -> None:
    parser = results.parser(__doc__, "one round of two steps, a shorter window")
    parser.add_argument("--rounds", type=int, help=f"default: {ROUNDS}")
    args = parser.parse_args()
    rounds, steps = (1, 2) if args.quick else (args.rounds or ROUNDS, STEPS)
    size = Namespace(window=WINDOW // SHORTER, rounds=rounds, steps=steps, steps_in_all=WARM_STEPS + rounds * steps)
    with tempfile.TemporaryDirectory() as folder:
        rows = measured(Path(folder), size)
    forecast = predicted(2 if args.quick else 12)
    lengths = mix(100_000)
    settings = {**vars(size), "windows": WINDOWS, "long_share": LONG_SHARE, "long": LONG, "median": MEDIAN}
    settings["padding"] = {
        FULL: 1 - float(rows_of(lengths, WINDOW)[1].mean()) / WINDOW,
        SINGLE: 1 - float(lengths.mean()) / WINDOW,
    }
    settings["predicted"] = forecast
    results.show(rows)
    results.show(forecast)
    rows = sorted(rows, key=lambda row: row["over"] != FULL)
    name = "tokens per second of computing, over"
    wanted = [
        results.at_least(f"{row['layout']}: {name} {row['over']}", row["over theirs, computing"], GOAL) for row in rows
    ]
    results.finish(args, "sft_cpu", settings=settings, rows=rows, goals=wanted)


if __name__ == "__main__":
    main()
