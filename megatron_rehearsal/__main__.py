"""`megatron-rehearse`: run ranks of a GPU job on a machine without a GPU.

Runs torch's build for CUDA and Megatron as the job would, with --wlb or without, over a stand-in for CUDA and NCCL:
memory is address space up to the card's size, kernels do nothing, and calls of NCCL are written down. Nothing is
computed and no time is measured; neither losses nor checkpoints are written. Says how much each rank allocates
and reserves, whether that fits, and where the host waits for the device. With --ranks all, NCCL calls of all ranks are
matched.

    megatron-rehearse --gpu h100 -- torchrun --nproc-per-node 8 pretrain_gpt.py --wlb --num-layers 32 ...
    megatron-rehearse --gpu h100 --ranks 0,32 --json rehearsal.json --html rehearsal.html train.log

Needs torch's wheel for CUDA, Megatron, g++, and for layers of TransformerEngine that, with its extension of torch.
Where the job's data are not here, it trains mock data, with --wlb of --wlb-mock-lengths F2 unless the job has others.
"""

import argparse
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from megatron_rehearsal.build import transformer_engine
from megatron_rehearsal.run import chosen, rehearse, verdict
from megatron_rehearsal.task import GPUS, Task
from megatron_wlb import files
from megatron_wlb.cli.common import console, integer, progress, render, table, write_json, writer
from megatron_wlb.cli.data import data_of, names_of
from megatron_wlb.cli.job import vocabulary, wlb_values
from megatron_wlb.cli.launch import Launched, read_command, read_log
from megatron_wlb.cli.main import Parser, in_one_line
from megatron_wlb.describe.arguments import MegatronArguments
from megatron_wlb.describe.flags import RunSettings
from megatron_wlb.describe.megatron import parallel_of
from megatron_wlb.describe.refusals import refusal
from megatron_wlb.job import Parallel
from megatron_wlb.settings import printable

LEAST_GIB, MOST_GIB = 0.125, 1024
"""Bounds on the memory of a card."""
TITLES = ("rank", "predicted", "allocated", "reserved", "retries", "syncs", "copies", "launches", "NCCL calls")


@files.ending()
def main(argv: Sequence[str] | None = None) -> int:
    """Rehearse the command in the words (default: the arguments of the process). Returns the exit code."""
    parser = Parser(
        prog="megatron-rehearse",
        usage="%(prog)s [LOG] --gpu GPU [--ranks auto|all|0,17] [--steps 6] [--json FILE] [--html FILE] [-- COMMAND]",
        description=(__doc__ or "").partition("\n\n")[2],
    )
    parser.add_argument("log", nargs="?", metavar="LOG", help="output of a run with --wlb; - for standard input")
    parser.add_argument("--gpu", choices=GPUS, required=True)
    parser.add_argument("--gpu-memory", type=_gib, metavar="GIB", help="memory of the card; default: its profile's")
    parser.add_argument("--ranks", default="auto", help="to run: all, or some as 0,17; default: one of every kind")
    parser.add_argument("--steps", type=integer(1, 1 << 14), default=6, metavar="K", help="steps to run; default: 6")
    parser.add_argument("--json", metavar="FILE", help="numbers to write; - for standard output")
    parser.add_argument("--html", metavar="FILE", help="memory over time to write, in pictures")
    words = list(sys.argv[1:] if argv is None else argv)
    end = words.index("--") if "--" in words else len(words)
    args = parser.parse_args(words[:end])
    return in_one_line(parser.prog, lambda: run(args, words[end + 1 :]))


def run(args: argparse.Namespace, command: list[str]) -> int:
    """Rehearse, print and write. Returns 0 if the job fits, else 1. Raises ValueError on wrong input."""
    if (args.log is None) == (not command):
        raise ValueError("no job, or two; give the log of a run, or its command behind --")
    terminal = console(args.json, args.html, width=120)
    notes: list[str] = []
    task, parallel, modelled = task_of(args, command, notes)
    gpu, ranks = task.gpu, _ranks(args.ranks, parallel)
    with (
        writer(args.json, "--json") as file,
        writer(args.html, "--html") as page,
        progress(len(ranks), args.json, "rehearsing") as advance,
    ):
        seen, wrong = rehearse(task, ranks, advance, args.ranks == "all")
        said, remedy = verdict(seen, task, wrong, modelled=modelled)
        of_all = {"verdict": said, "remedy": remedy, "nccl": wrong, "gpu": gpu.name, "gpu_gib": gpu.gib}
        write_json(file, of_all | {"ranks": [{k: v for k, v in rank.items() if k != "passes"} for rank in seen]})
        if left_out := sorted({name for rank in seen for name in rank["left_out"]}):
            notes.append(
                f"Not taken from the log: {', '.join(left_out)}. Give the run's command if one of them matters."
            )
        rows, waits = [_row(rank) for rank in seen], [*_waits(seen)]
        notes.append("GiB, and counts of the last step. Nothing was computed, and no time was measured.")
        if page is not None:
            from megatron_rehearsal.pictures import sections

            values = {"verdict": _sentence(said), "remedy": _sentence(remedy), "fits": said == "fits"}
            values |= {"gpu": gpu.name, "gib": gpu.gib, "world_size": task.world_size}
            values |= {"titles": TITLES, "rows": rows, "waits": waits, "notes": notes}
            template = Path(__file__).with_name("rehearsal.html")
            page.write(render(template, sections=sections(seen, gpu.gib), **values))
    terminal.print(f"{_sentence(said)} {_sentence(remedy)}".rstrip(), style="bold", soft_wrap=True)
    for each in (table(TITLES, rows), *waits):
        terminal.print(each)
    for note in notes:
        print(f"- {note}", file=sys.stderr)
    return 0 if said == "fits" else 1


def task_of(args: argparse.Namespace, command: list[str], notes: list[str]) -> tuple[Task, Parallel, bool]:
    """Return the task, its layout, and whether its memory is predicted. Raises ValueError on wrong input."""
    launched = read_command(command, any_model="--wlb" not in command) if command else read_log(args.log)
    stated = launched.stated
    if launched.is_log:  # of the last release, maybe
        stated = stated | {name: value for name, value in wlb_values(launched).items() if value is not None}
    wlb = bool(stated.get("wlb"))
    if why := refusal("log_interval", stated.get("log_interval")):
        raise ValueError(why)
    arguments = MegatronArguments.of({"world_size": launched.world_size} | stated)
    parallel = parallel_of(arguments)
    script, flags = _script(command, wlb)
    if arguments.transformer_impl == "transformer_engine" and not transformer_engine():
        raise ValueError(
            "the job's layers are TransformerEngine's, which is not installed with its extension of torch; "
            "docs/rehearse.md says how; or add --transformer-impl local"
        )
    modelled = wlb and not (arguments.fp8 or arguments.fp4)
    if wlb and not modelled:
        notes.append("Predicted is the memory of bf16, not of FP8 or FP4.")
    gpu = msgspec.structs.replace(
        GPUS[args.gpu], gib=GPUS[args.gpu].gib if args.gpu_memory is None else args.gpu_memory
    )
    mocks = _mocks(arguments, launched, notes)
    if wlb and mocks and not stated.get("mock_data") and stated.get("wlb_mock_lengths") is None:
        stated, flags = stated | {"wlb_mock_lengths": "F2"}, [*flags, "--wlb-mock-lengths", "F2"]
    task = Task(
        world_size=parallel.num_gpus,
        steps=args.steps,
        gpu=gpu,
        script=script,
        flags=flags,
        wlb=wlb,
        stated={} if command else stated,
        vocab_size=arguments.padded_vocab_size or arguments.vocab_size or vocabulary(arguments, notes),
        mock_data=mocks,
    )
    return task, parallel, modelled


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}{'.' * bool(text)}"


def _waits(seen: list[dict[str, Any]]) -> Iterator[str]:
    """Say where the host waits and reads, on the rank that does it most."""
    for title, key in (("The host waits", "syncs"), ("It reads values", "copies_to_host")):
        lines = [f"{count} at {line}" for line, count in max(seen, key=lambda r: sum(r[key].values()))[key].items()]
        if lines:
            yield f"{title}, a step: {', '.join(lines[:6])}{', ...' * (len(lines) > 6)}"


def _row(rank: dict[str, Any]) -> list[str]:
    sizes = [rank[f"{name}_gib"] for name in ("predicted", "allocated", "reserved")]
    counts = (rank["retries"], rank["syncs_per_step"], rank["copies_per_step"], rank["launches"])
    failed = " out of memory" if rank["out_of_memory"] else ""
    shown = ("-" if size is None else f"{size:.2f}" for size in sizes)
    return [str(rank["rank"]), *shown, *map(str, counts), f"{sum(c['calls'] for c in rank['nccl'].values())}{failed}"]


def _script(words: list[str], wlb: bool) -> tuple[list[str], list[str]]:
    """Return script and flags; `megatron_wlb.run` comes first where it runs the script from a checkout here.

    Raises ValueError for a run without `--wlb` whose script is not here.
    """
    at = next((i for i, word in enumerate(words) if word.endswith(".py")), None)
    found = at is not None and os.path.isfile(words[at])
    if not wlb and not found:
        raise ValueError(
            f"{'a log' if at is None else words[at]} is no script, and without --wlb the job's own runs; give its "
            "command behind --, with the path of the script here"
        )
    if at is None:
        return ["pretrain_gpt.py"], ["--wlb"]
    runner = ["megatron_wlb.run"] if "megatron_wlb.run" in words and found else []
    return [*runner, words[at]], words[at + 1 :]


def _mocks(arguments: MegatronArguments, launched: Launched, notes: list[str]) -> bool:
    """Whether the job's data are not here, or not to be read; says why."""
    if arguments.mock_data:
        return True
    why = ""
    try:
        if not arguments.sft:
            data_of(arguments, [], RunSettings())
        elif launched.is_log:
            why = "conversations that a log names are not tokenized"
        elif missing := [name for name in names_of(arguments) if not os.path.exists(name)]:  # ranks tokenize them
            why = f"{missing[0]} does not exist"
    except (ValueError, OSError) as error:
        why = str(error).split(";")[0]
    if why:
        notes.append(f"Mock data, since the job's are not read here: {printable(why)}.")
    return bool(why)


def _ranks(text: str, parallel: Parallel) -> list[int]:
    if text in ("all", "auto"):
        return chosen(parallel, every=text == "all")
    ranks = [*map(int, text.split(","))] if re.fullmatch(r"[0-9]{1,9}(,[0-9]{1,9})*", text) else []
    if not ranks or max(ranks) >= parallel.num_gpus or len({*ranks}) < len(ranks):
        raise ValueError(
            f"--ranks {text[:40]} must be auto, all, or different ranks below {parallel.num_gpus}, as 0,17"
        )
    return sorted(ranks)


def _gib(text: str) -> float:
    if not re.fullmatch(r"[0-9]{1,4}(\.[0-9]{1,9})?", text) or not LEAST_GIB <= float(text) <= MOST_GIB:
        raise argparse.ArgumentTypeError(f"{text!r} must be GiB from {LEAST_GIB} to {MOST_GIB}")
    return float(text)


if __name__ == "__main__":
    sys.exit(main())
