"""How much faster `--sft --wlb` trains conversations than upstream: measured on two cores, predicted for 64 GPUs.

    python -m benchmarks.sft_cpu [--quick] [--check] [--rounds N]

Upstream's `--sft` makes a context window of every line of its file: the line's conversations, then padding, which the
last of them attends over. `--sft --wlb` trains the same lines in the same steps, without the padding. Both are timed
with a conversation a line, as most files have it, where nearly everything is padding (`settings.padding`), and with
lines as full as whole conversations in file order make them. TransformerEngine's attention over several conversations
runs on no CPU: upstream's windows are trained by this project's runtime, sharded by heads and tails of every
conversation. Methods run by turns; upstream's of a conversation a line in the first round alone.

Lengths: one conversation in ten is long, log-uniform over the 8K to 64K tokens that LongAlign-10k's page gives as its
range; the others stand for UltraChat's, log-normal with a median of 1,000. Neither histogram was published in text: the
shapes are made up. The window is 128K, on two cores a sixteenth of it, with conversations as much shorter.

Speed-ups are ratios of times, of the clock, and of computing time alone (the critical path of CPU times and what else
the thread computes), which other programs on the machine change less. Writes benchmarks/results/sft_cpu.json in about a
quarter of an hour.
"""

import itertools
import tempfile
from argparse import Namespace
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import cp_balance, results, step_time
from benchmarks.critical_path import critical_path
from benchmarks.end_to_end_cpu import measure_profile
from benchmarks.lengths import WINDOW
from benchmarks.peers import as_megatron
from benchmarks.results import Row
from benchmarks.step_time import Case
from benchmarks.training_cpu import Steps, arguments, train, warm
from megatron_wlb.documents import PackedBatch
from megatron_wlb.job import Job
from megatron_wlb.plan.micro_batches import predictions
from megatron_wlb.plan.packer import Packer
from megatron_wlb.plan.samples import Rows, Samples
from megatron_wlb.plan.step import shard_step
from megatron_wlb.simulate.step import simulate_step
from tests.adapter.chats import conversation, write_chats, write_tokenizer
from tests.worlds import run_world

SHORTER = 16
"""Windows and conversations on two cores are shorter by this."""
LONG_SHARE, LONG, MEDIAN, SIGMA = 0.1, (8192, 65_536), 1000, 0.8
WINDOWS = 4
"""Of a step, on two cores."""
STEPS, ROUNDS = 3, 2
LAYOUTS = {"DP=2": "", "CP=2": "--context-parallel-size 2", "PP=2": "--pipeline-model-parallel-size 2"}
AS_UPSTREAM = "--wlb-packing megatron --wlb-cp-sharding per-document"
FORMAT, FORMAT_TOKENS = "nemotron-nano-v2", 30
"""Its name, and its tokens around a question and its answer, whose letters are tokens."""
GPUS = Case("8B CP8", WINDOW, 16, 1), Case("8B CP4 PP2", WINDOW, 16, 1)
"""Cases of `step_time` that are predicted."""
FULL, SINGLE = "full lines", "a conversation a line"
UPSTREAM, OURS = "upstream", "--sft --wlb"
GOAL = 1.5


def mix(count: int) -> np.ndarray:
    """Lengths of conversations, int64 [count]."""
    rng = np.random.default_rng(0)
    short = rng.lognormal(np.log(MEDIAN), SIGMA, count)
    long = np.exp(rng.uniform(np.log(LONG[0]), np.log(LONG[1]), count))
    return np.where(rng.random(count) < LONG_SHARE, long, np.clip(short, 64, LONG[0])).astype(np.int64)


def lines(lengths: np.ndarray, window: int) -> dict[str, np.ndarray]:
    """The first conversation of every line and the number of all, int64 [lines + 1], by the kind of file."""
    begins, used = [0], 0
    for i, length in enumerate(lengths.tolist()):
        if used + length > window:
            begins.append(i)
            used = 0
        used += length
    return {FULL: np.array([*begins, len(lengths)]), SINGLE: np.arange(len(lengths) + 1)}


def padded(lengths: np.ndarray, begins: np.ndarray, window: int) -> np.ndarray:
    """Lengths with the padding of every line in its last conversation."""
    found = lengths.copy()
    found[begins[1:] - 1] += (window - np.add.reduceat(lengths, begins[:-1])).astype(found.dtype)
    return found


def train_padded(argv: list[str], first: int) -> Steps:
    """`train`, of lines that are padded to the window."""
    from megatron_wlb.adapter import conversations

    read = conversations.read

    def read_padded(path: str, args: Namespace) -> Any:
        found = read(path, args)
        return replace(found, lengths=padded(found.lengths, found.begins, args.seq_length))

    conversations.read = read_padded
    return train(argv, first)


def measured(folder: Path, size: Namespace) -> list[Row]:
    """A row for every layout and kind of file."""
    warm()
    window, profile = size.window, measure_profile(folder, quick=True)
    tokenizer = write_tokenizer(folder / "tokenizer")
    made = [conversation([int(letters)], i) for i, letters in enumerate(mix(100 * size.lines) // SHORTER)]
    lengths = np.array([FORMAT_TOKENS + sum(len(message["content"]) for message in each) for each in made])
    flags = f"--sft --tokenizer-type SFTTokenizer --tokenizer-model {tokenizer} --sft-tokenizer-prompt-format {FORMAT}"
    flags += f" --make-vocab-size-divisible-by 512 --wlb --wlb-profile {profile} --wlb-max-tokens {2 * window}"
    found = []
    for kind, begins in lines(lengths, window).items():
        rows = [
            list(itertools.chain(*made[first:stop])) for first, stop in itertools.pairwise(begins[: size.lines + 1])
        ]
        chats = write_chats(folder / f"{kind}.jsonl", rows)
        for layout, of_layout in LAYOUTS.items():
            rounds: dict[str, list[Row]] = {UPSTREAM: [], OURS: []}
            for number in range(size.rounds):
                for method in list(rounds)[:: -1 if number % 2 else 1]:
                    if method == UPSTREAM and kind == SINGLE and number:
                        continue
                    first = 1 + number * size.steps
                    how = f"{of_layout} {AS_UPSTREAM}" if method == UPSTREAM else of_layout
                    argv = arguments(chats, window, WINDOWS, first + size.steps, f"{flags} {how}")
                    trains = train_padded if method == UPSTREAM else train
                    rounds[method].append(totals(layout, run_world(trains, 2, argv, first, timeout=600)))
                    print(layout, kind, method, rounds[method][-1], flush=True)
            found.append({"layout": layout, "over": f"{UPSTREAM}, {kind}", **compared(rounds)})
    return found


def totals(layout: str, ranks: list[Steps]) -> Row:
    """Time by the clock, and time of computing of a round."""
    sums = {"seconds": 0.0, "computing": 0.0}
    for of_ranks in zip(*ranks, strict=True):
        busy = np.array([step["busy"] for step in of_ranks])
        sums["seconds"] += float(np.mean([step["seconds"] for step in of_ranks]))
        sums["computing"] += critical_path(layout, busy, of_ranks[0]["group"])
        sums["computing"] += float(np.mean([step["other"] for step in of_ranks]))
    return sums


def compared(rounds: dict[str, list[Row]]) -> Row:
    """Upstream's time over ours, of the rounds of both together, and the spread of rounds."""
    row: Row = {}
    pairs = list(zip(rounds[UPSTREAM], rounds[OURS], strict=False))
    for clock in ("seconds", "computing"):
        theirs, ours = (sum(pair[i][clock] for pair in pairs) for i in range(2))
        row[f"over theirs, {clock}"] = theirs / ours
        row |= results.spread(f"over theirs, {clock}, rounds", [one[clock] / other[clock] for one, other in pairs])
    return row


def predicted(steps: int) -> list[Row]:
    """Speed-ups of Llama 3 8B at 128K on 64 H100 over upstream: a row for each layout and kind of file.

    Memory is taken to be enough for what `--wlb-micro-batches auto` chooses. Dynamic CP is compared with `--wlb` by a
    layer (`cp_balance`), without a pipeline; it packs whole steps without padding, too.
    """
    lengths, found = mix(4000 * steps), []

    def steps_of(job: Job, data: Samples) -> tuple[list[PackedBatch], float]:
        packer = Packer(data, job)
        batches = [packer.next().batch for _ in range(steps)]
        return batches, sum(simulate_step(job, shard_step(job, each.lengths, each.ranks)).time for each in batches)

    for (kind, begins), case in itertools.product(lines(lengths, WINDOW).items(), GPUS):
        given = Samples(parts=[rows_of(lengths, begins)], context_length=WINDOW)
        windows = Samples(parts=[rows_of(padded(lengths, begins, WINDOW), begins)], context_length=WINDOW)
        make = partial(step_time.job_of, case)
        ours = make()
        _, theirs = steps_of(as_megatron(ours, cp_sharding="per-document"), windows)
        auto, _ = predictions(ours, make, given, memory_known=True)
        row: Row = {"layout": case.layout, "over": f"{UPSTREAM}, {kind}"}
        row["micro-batches by auto"] = auto.num_micro_batches
        for method, job in (("--wlb", ours), ("--wlb-micro-batches auto", auto)):
            batches, took = steps_of(job, given)
            row[method] = theirs / took
            if job is ours and job.parallel.pp == 1:
                made = [each for batch in batches for each in batch.lengths if len(each)]
                sizes = {"window": WINDOW, "cp": job.parallel.cp, "model": job.model, "tp": job.parallel.tp}
                timed = cp_balance.layers(made, cp_balance.job_of(**sizes))
                row["dynamic CP"] = row[method] * float(timed[cp_balance.OURS][0] / timed["dynamic CP"][0])
        found.append(row)
    return found


def rows_of(lengths: np.ndarray, begins: np.ndarray) -> Rows:
    """Samples of lines."""
    count = len(begins) - 1
    sizes = {"context_length": WINDOW, "num_samples": count}
    return Rows(rows=np.arange(count), begins=begins, lengths=lengths, **sizes)


def main() -> None:
    parser = results.parser(__doc__, "one round of two steps, a shorter window")
    parser.add_argument("--rounds", type=int, help=f"default: {ROUNDS}")
    args = parser.parse_args()
    rounds, steps = (1, 2) if args.quick else (args.rounds or ROUNDS, STEPS)
    size = Namespace(window=WINDOW // SHORTER, rounds=rounds, steps=steps, lines=(1 + rounds * steps) * WINDOWS)
    with tempfile.TemporaryDirectory() as folder:
        rows = measured(Path(folder), size)
    forecast = predicted(2 if args.quick else 12)
    lengths = mix(100_000)
    settings = {**vars(size), "windows": WINDOWS, "long_share": LONG_SHARE, "long": LONG, "median": MEDIAN}
    settings["padding"] = {
        kind: 1 - float(lengths.sum() / (len(begins) - 1) / WINDOW) for kind, begins in lines(lengths, WINDOW).items()
    }
    settings["predicted"] = forecast
    results.show(rows)
    results.show(forecast)
    name = "time of computing, over"
    wanted = [
        results.at_least(f"{row['layout']}: {name} {row['over']}", row["over theirs, computing"], GOAL) for row in rows
    ]
    results.finish(args, "sft_cpu", settings=settings, rows=rows, goals=wanted)


if __name__ == "__main__":
    main()
