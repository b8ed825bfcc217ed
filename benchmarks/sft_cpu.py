"""How much faster `--sft --wlb` trains conversations than upstream, on two cores.

    python -m benchmarks.sft_cpu [--lengths agents] [--quick] [--check]

Upstream's `--sft` makes a context window of every line of its file: the line's conversations, then padding, which the
last of them attends over. `--sft --wlb` trains the same lines in the same steps, without the padding. Both are timed
with a conversation a line, as most files have it, where nearly everything is padding (`settings.padding`), and with
lines as full as whole conversations in file order make them. TransformerEngine's attention over several conversations
runs on no CPU: upstream's windows are trained by this project's runtime, sharded by heads and tails of every
conversation. Methods train step by step by turns; a conversation a line, two steps.

Lengths: one conversation in ten is long, log-uniform over the 8K to 64K tokens that LongAlign-10k's page gives as its
range; the others stand for UltraChat's, log-normal with a median of 1,000. Neither histogram was published in text: the
shapes are made up. Those of agents are trajectories (`plan.mock.PROFILES`); longer ones than the window are left out.
The window is 128K, on two cores a sixteenth of it, with conversations as much shorter.

Speed-ups are ratios of times, of the clock, and of computing time alone (the critical path of CPU times and what else
the thread computes), which other programs on the machine change less. Writes benchmarks/results/sft_cpu.json, or
sft_cpu_agents.json, in about a quarter of an hour.
"""

import itertools
import tempfile
from argparse import Namespace
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import results
from benchmarks.critical_path import critical_path, ratio_error
from benchmarks.end_to_end_cpu import measure_profile
from benchmarks.lengths import WINDOW
from benchmarks.results import Row
from benchmarks.training_cpu import Steps, Turns, arguments, by_turns, train, warm
from megatron_wlb.plan.mock import PROFILES
from tests.adapter.chats import conversation, write_chats, write_tokenizer

SHORTER = 16
"""Windows and conversations on two cores are shorter by this."""
LONG_SHARE, LONG, MEDIAN, SIGMA = 0.1, (8192, 65_536), 1000, 0.8
WINDOWS = 4
"""Of a step, on two cores."""
STEPS, SINGLE_STEPS = 6, 2
"""Of full lines, and of a conversation a line, which are nearly all padding."""
LAYOUTS = {"DP=2": "", "CP=2": "--context-parallel-size 2", "PP=2": "--pipeline-model-parallel-size 2"}
AS_UPSTREAM = "--wlb-packing megatron --wlb-cp-sharding per-document"
FORMAT, FORMAT_TOKENS = "nemotron-nano-v2", 30
"""Its name, and its tokens around a question and its answer, whose letters are tokens."""
FULL, SINGLE = "full lines", "a conversation a line"
UPSTREAM, OURS = "upstream", "--sft --wlb"
GOAL = 1.5


def mix(count: int) -> np.ndarray:
    """Lengths of conversations, int64 [count]."""
    rng = np.random.default_rng(0)
    short = rng.lognormal(np.log(MEDIAN), SIGMA, count)
    long = np.exp(rng.uniform(np.log(LONG[0]), np.log(LONG[1]), count))
    return np.where(rng.random(count) < LONG_SHARE, long, np.clip(short, 64, LONG[0])).astype(np.int64)


def agents(count: int) -> np.ndarray:
    """The same of agents."""
    drawn = PROFILES["agents"].lengths.draw(2 * count, 0)
    return drawn[drawn <= WINDOW][:count]


LENGTHS = {"chats": mix, "agents": agents}


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


def train_padded(turns: Turns, way: int, argv: list[str], first: int) -> Steps:
    """`train`, of lines that are padded to the window."""
    from megatron_wlb.adapter.sources import conversations

    read = conversations.read

    def read_padded(path: str, args: Namespace) -> Any:
        found = read(path, args)
        return replace(found, lengths=padded(found.lengths, found.begins, args.seq_length))

    conversations.read = read_padded
    return train(turns, way, argv, first)


def measured(folder: Path, size: Namespace, drawn: np.ndarray) -> list[Row]:
    """A row for every layout and kind of file."""
    warm()
    window, profile = size.window, measure_profile(folder, quick=True)
    tokenizer = write_tokenizer(folder / "tokenizer")
    made = [conversation([int(letters)], i) for i, letters in enumerate(drawn // SHORTER)]
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
            steps = size.steps if kind == FULL else SINGLE_STEPS
            argv = arguments(chats, window, WINDOWS, 1 + steps, f"{flags} {of_layout}")
            methods = {
                UPSTREAM: partial(train_padded, argv=[*argv, *AS_UPSTREAM.split()], first=1),
                OURS: partial(train, argv=argv, first=1),
            }
            found.append({"layout": layout, "over": f"{UPSTREAM}, {kind}", **compared(layout, by_turns(methods))})
            print(found[-1], flush=True)
    return found


def compared(layout: str, measured: dict[str, list[Steps]]) -> Row:
    """Upstream's time over ours, by the clock and of computing, and standard errors."""
    row: Row = {}
    steps = [list(zip(*ranks, strict=True)) for ranks in measured.values()]
    for clock in ("seconds", "computing"):
        theirs, ours = (np.array([time_of(layout, step, clock) for step in of]) for of in steps)
        row[f"over theirs, {clock}"] = float(theirs.sum() / ours.sum())
        row[f"over theirs, {clock}, error"] = ratio_error(theirs, ours)
    return row


def time_of(layout: str, step: Steps, clock: str) -> float:
    """Time of a step of all ranks."""
    if clock == "seconds":
        return float(np.mean([rank["seconds"] for rank in step]))
    path = critical_path(layout, np.array([rank["busy"] for rank in step]), step[0]["group"])
    return path + float(np.mean([rank["other"] for rank in step]))


def main() -> None:
    parser = results.parser(__doc__, "two steps")
    parser.add_argument("--lengths", choices=LENGTHS, default="chats", help="default: chats")
    args = parser.parse_args()
    draw = LENGTHS[args.lengths]
    steps = 2 if args.quick else STEPS
    size = Namespace(window=WINDOW // SHORTER, steps=steps, lines=(1 + steps) * WINDOWS)
    with tempfile.TemporaryDirectory() as folder:
        rows = measured(Path(folder), size, draw(100 * size.lines))
    lengths = draw(100_000)
    settings = {**vars(size), "windows": WINDOWS}
    if draw is mix:
        settings |= {"long_share": LONG_SHARE, "long": LONG, "median": MEDIAN}
    settings["padding"] = {
        kind: 1 - float(lengths.sum() / (len(begins) - 1) / WINDOW) for kind, begins in lines(lengths, WINDOW).items()
    }
    results.show(rows)
    name = "time of computing, over"
    wanted = [
        results.at_least(f"{row['layout']}: {name} {row['over']}", row["over theirs, computing"], GOAL) for row in rows
    ]
    results.finish(args, "sft_cpu" + "_agents" * (draw is agents), settings=settings, rows=rows, goals=wanted)


if __name__ == "__main__":
    main()
