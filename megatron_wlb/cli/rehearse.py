"""`megatron-wlb rehearse`: run ranks of a GPU job on a machine without a GPU.

Runs torch's build for CUDA, Megatron and --wlb as the job would, over a stand-in for CUDA and NCCL: memory is address
space up to the card's size, kernels do nothing, and calls of NCCL are written down. Nothing is computed and no time is
measured; losses are not printed and checkpoints refused. Says what each rank allocates and reserves, whether that fits,
and where the host waits for the device. With --ranks all, NCCL calls of all ranks are matched.

    megatron-wlb rehearse --gpu h100 -- torchrun --nproc-per-node 8 pretrain_gpt.py --wlb --num-layers 32 ...
    megatron-wlb rehearse --gpu h100 --ranks 0,32 --json rehearsal.json --html rehearsal.html train.log

Needs torch's wheel for CUDA, Megatron, g++, and for layers of TransformerEngine its Python. Where the job's data are
not here, it trains mock data, of --wlb-mock-lengths F2 unless the job has others.
"""

import argparse
import os
import re
import sys
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

from megatron_wlb.cli.common import Words, console, integer, printable, progress, render, table, write_json, writer
from megatron_wlb.cli.data import data_of
from megatron_wlb.cli.job import Run, add_job_flags, run_of

USAGE = "[LOG] --gpu {a100,h100,h200} [--ranks auto|all|0,17] [--steps 6] [--json FILE] [--html FILE] [-- COMMAND]"
MOST_PICTURES = 8
TITLES = ("rank", "predicted", "allocated", "reserved", "retries", "syncs", "copies", "launches", "NCCL calls")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("log", nargs="?", metavar="LOG", help="what a run printed; - for standard input")
    parser.add_argument("--gpu", choices=("a100", "h100", "h200"), required=True)
    parser.add_argument("--gpu-memory", type=float, metavar="GIB", help="memory of the card; default: as it is sold")
    parser.add_argument(
        "--ranks", default="auto", help="which to run: all, or some as 0,17; default: one of every kind"
    )
    parser.add_argument("--steps", type=integer(1, 1 << 14), default=6, metavar="K", help="steps to run; default: 6")
    parser.add_argument("--json", metavar="FILE", help="numbers to write; - for standard output")
    parser.add_argument("--html", metavar="FILE", help="memory over time to write, in pictures")


def run(args: argparse.Namespace, words: Words) -> int:
    """Rehearse, print and write. Returns 0 if the job fits, else 1. Raises ValueError on wrong input."""
    from megatron_wlb.rehearse.run import chosen, matched, rehearse, verdict
    from megatron_wlb.rehearse.task import GPUS, Task

    if args.html == "-":
        raise ValueError("--html - is no file; name one")
    terminal = console(args.json, width=None if sys.stdout.isatty() else 120)
    parser = argparse.ArgumentParser()
    add_job_flags(parser)
    job = run_of(parser.parse_args([] if args.log is None else [args.log]), words.launched)
    stated, arguments = job.launched.stated, job.arguments
    notes: list[str] = []
    if not words.launched and args.log is None:
        raise ValueError("no job; give the log of a run, or its command behind --")
    if not stated.get("wlb"):
        raise ValueError("the job is without --wlb; add it and what it needs: megatron-wlb analyze says which flags")
    if arguments.transformer_impl == "transformer_engine" and find_spec("transformer_engine") is None:
        raise ValueError(
            "the job's layers are TransformerEngine's, whose Python is not installed; docs/rehearse.md says how; or "
            "add --transformer-impl local"
        )
    if narrow := bool(arguments.fp8 or arguments.fp4):
        notes.append("Predicted is the memory of bf16, not of FP8 or FP4.")
    gpu = GPUS[args.gpu]
    if args.gpu_memory is not None:
        gpu = type(gpu)(**{f: getattr(gpu, f) for f in gpu.__struct_fields__} | {"gib": args.gpu_memory})
    script, flags = _script(words.launched)
    mocks = _mocks(job, notes)
    if mocks and not stated.get("mock_data") and job.run_settings.mock_lengths is None:
        stated, flags = stated | {"wlb_mock_lengths": "F2"}, [*flags, "--wlb-mock-lengths", "F2"]
    task = Task(
        world_size=arguments.world_size or 1,
        steps=args.steps,
        gpu=gpu,
        script=script,
        flags=flags,
        stated={} if words.launched else stated,
        vocab_size=arguments.padded_vocab_size or arguments.vocab_size or 0,
        mock_data=mocks,
    )
    parallel = job.job().parallel
    whole = args.ranks == "all"
    ranks = matched(parallel) if whole else chosen(parallel)
    if args.ranks not in ("all", "auto"):
        ranks = _ranks(args.ranks, task.world_size)
    with (
        writer(args.json, "--json") as file,
        writer(args.html, "--html") as page,
        progress(len(ranks) * args.steps, args.json, "rehearsing") as advance,
    ):
        seen, wrong = rehearse(task, ranks, advance, whole)
        said, remedy = verdict(seen, gpu.gib, wrong, modelled=not narrow)
        of_all = {"verdict": said, "remedy": remedy, "nccl": wrong, "gpu": gpu.name, "gpu_gib": gpu.gib}
        write_json(file, of_all | {"ranks": [{k: v for k, v in rank.items() if k != "passes"} for rank in seen]})
        rows, waits = [_row(rank) for rank in seen], [*_waits(seen)]
        notes.append("GiB, and counts of the last step. Nothing was computed, and no time was measured.")
        if page is not None:
            values = {"verdict": said, "remedy": remedy, "gpu": gpu.name, "gib": gpu.gib, "world_size": task.world_size}
            values |= {"titles": TITLES, "rows": rows, "waits": waits, "notes": notes}
            page.write(render("rehearse.html", sections=_pictures(seen, gpu.gib), **values))
    terminal.print(table(TITLES, rows))
    for line in waits:
        terminal.print(line)
    terminal.print(f"[bold]{said}[/bold]{': ' * bool(remedy)}{remedy}", soft_wrap=True)
    for note in notes:
        print(f"- {note}", file=sys.stderr)
    return 0 if said == "fits" else 1


def _waits(seen: list[dict[str, Any]]) -> Iterator[str]:
    """Say where the host waits and reads, on the rank that does it most."""
    for title, key in (("The host waits", "syncs"), ("It reads values", "copies_to_host")):
        lines = [f"{count} at {line}" for line, count in max(seen, key=lambda r: sum(r[key].values()))[key].items()]
        if lines:
            yield f"{title}, a step: {', '.join(lines[:6])}{', ...' * (len(lines) > 6)}"


def _pictures(seen: list[dict[str, Any]], gpu_gib: float) -> list[Any]:
    """Draw the memory of the ranks that reserve most."""
    from megatron_wlb.cli import pictures

    fullest = sorted(seen, key=lambda rank: -rank["reserved_gib"])[:MOST_PICTURES]
    text = (
        "Peak in each pass. Exchange: received K and V; held: reserved, and free or fragmented. The line is the card."
    )
    return [
        pictures.section(f"Rank {rank['rank']}", text, partial(pictures.memory, rank, gpu_gib), 3.4)
        for rank in sorted(fullest, key=lambda rank: int(rank["rank"]))
        if rank["passes"]
    ]


def _row(rank: dict[str, Any]) -> list[str]:
    sizes = [f"{rank[f'{name}_gib']:.2f}" for name in ("predicted", "allocated", "reserved")]
    counts = (rank["retries"], rank["syncs_per_step"], rank["copies_per_step"], rank["launches"])
    failed = " out of memory" if rank["out_of_memory"] else ""
    return [str(rank["rank"]), *sizes, *map(str, counts), f"{sum(c['calls'] for c in rank['nccl'].values())}{failed}"]


def _script(words: list[str]) -> tuple[list[str], list[str]]:
    """Return script and flags; `megatron_wlb.run` comes first where it runs the script from a checkout here."""
    at = next((i for i, word in enumerate(words) if word.endswith(".py")), None)
    if at is None:
        return ["pretrain_gpt.py"], ["--wlb"]
    runner = ["megatron_wlb.run"] if "megatron_wlb.run" in words and os.path.isfile(words[at]) else []
    return [*runner, words[at]], words[at + 1 :]


def _mocks(job: Run, notes: list[str]) -> bool:
    """Whether the job's data are not here; says why."""
    if job.launched.stated.get("mock_data"):
        return True
    try:
        data_of(job.arguments, [], job.run_settings)
    except (ValueError, OSError) as error:
        notes.append(f"Mock data, since the job's are not here: {printable(str(error).split(';')[0])}.")
        return True
    return False


def _ranks(text: str, world_size: int) -> list[int]:
    if not re.fullmatch(r"\d{1,9}(,\d{1,9})*", text) or not all(int(r) < world_size for r in text.split(",")):
        raise ValueError(f"--ranks {text[:40]} must be auto, all, or ranks below {world_size}, as 0,17")
    return sorted({int(r) for r in text.split(",")})
