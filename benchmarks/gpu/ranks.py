"""Trains on several ranks of one GPU through NCCL, with delays around every exchange, and compares with one rank.

    python -m benchmarks.gpu.ranks [--script CHECKOUT/pretrain_gpt.py] [--library libnccl.so.2] [--layouts NAME ...]

All start with the same weights. So digests and losses do not depend on the layout, and each run is held against
Megatron's own of one rank. Delays on the device, other ones on every rank, and memory as large as all that is sent,
asked for at once and filled with NaN, change what is trained if a stream does not wait, or a tensor is freed before it
has left. With --deterministic-mode the sums of all weights after every step must be the same bits with every seed.
Times mean nothing: ranks take turns.

Without a GPU, Gloo stands for NCCL, and delays are of the host.
"""

import functools
import hashlib
import json
import math
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks import results
from benchmarks.gpu import machine, script, smoke
from benchmarks.gpu.training import COMMON, GROUPED, JOBS, TINY
from benchmarks.lengths import f2
from benchmarks.results import Goal, Row, at_least, at_most
from benchmarks.training_cpu import write_dataset

STEPS, WINDOW, WINDOWS = 6, 16384, 4
"""Documents of windows of 16K are long enough to be shared, in several rounds."""
LATEST_US = 3000.0
CYCLES_PER_US = 1500
DETERMINISTIC = "--deterministic-mode"
BITS = {"NCCL_ALGO": "Ring", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
TRANSPORTS = {
    "shared memory": {"NCCL_P2P_DISABLE": "1"},
    "sockets": {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"},
}
"""How NCCL moves data between ranks of CP2, besides its own choice."""
SEEDS = ("", "1", "2")
"""Of delays; "": none."""
CP2, PP2 = "--context-parallel-size 2 --wlb-cp-sharding auto", "--pipeline-model-parallel-size 2"
VPP2 = "--num-virtual-stages-per-pipeline-rank 2"
DELTA_NETS = f"""{TINY} {GROUPED} --experimental-attention-variant gated_delta_net --linear-attention-freq 2
--linear-num-key-heads 4 --linear-num-value-heads 8"""


class Layout(NamedTuple):
    ranks: int
    flags: str
    model: str = JOBS["tiny"]
    noisy: bool = True
    """Whether it also runs deterministically, with all SEEDS."""


LAYOUTS = {
    "CP2": Layout(2, CP2),
    "PP4 VPP2": Layout(4, f"--pipeline-model-parallel-size 4 {VPP2}", f"{JOBS['tiny']} --num-layers 8"),
    "CP2 PP2": Layout(4, f"{CP2} {PP2}"),
    "PP2 VPP2": Layout(2, f"{PP2} {VPP2}"),
    "DP2": Layout(2, "", noisy=False),
    "TP2": Layout(2, "--tensor-model-parallel-size 2 --sequence-parallel", noisy=False),
    "CP2, gated delta nets": Layout(2, CP2, DELTA_NETS, noisy=False),
    "CP2, all recomputed": Layout(2, CP2, JOBS["tiny, all recomputed"], noisy=False),
    "CP2, latents": Layout(2, CP2, JOBS["tiny, latents"], noisy=False),
}
"""The first show the exchange, both directions of pipelines and their order; from three stages on, each direction has a
group of its own."""
REHEARSED = "--hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 4 --kv-channels 16"
"""Behind the flags of a model, on a CPU."""


def watch(file: Path) -> None:
    """Delay and poison by the seed NOISE, and write a line a step: the sum of all weights of this rank.

    By upstream's seeds, layouts would start with other weights.
    """
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
    from megatron.training import training

    from megatron_wlb.runtime import all_to_all
    from tests.adapter.training import set_parameters

    on_gpu, seed = torch.cuda.is_available(), os.environ.get("NOISE", "")
    draw = random.Random(f"{seed} {os.environ['RANK']}")  # so that ranks drift apart

    def delay() -> None:
        """In half of the cases let all that follows on this stream be late."""
        if not seed or draw.random() < 0.5:
            return
        us = LATEST_US * draw.random() ** 3
        if on_gpu:
            torch.cuda._sleep(int(us * CYCLES_PER_US))
        else:
            time.sleep(us / 1e6)

    def poison(like: torch.Tensor) -> None:
        """Ask for memory of this size and fill it: NaN arrive if it is still being sent."""
        if seed and like.is_floating_point() and like.numel():
            for _ in range(2):
                torch.full(like.shape, math.nan, dtype=like.dtype, device=like.device)

    exchange, communicate, step = all_to_all._all_to_all, P2PCommunicator._communicate, training.train_step

    def exchanged(into: torch.Tensor, given: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        delay()
        work = exchange(into, given, *args, **kwargs)
        like = given.new_empty(given.shape)
        del given  # as the caller may
        poison(like)
        delay()
        return work

    def communicated(self: Any, *args: Any, **kwargs: Any) -> Any:
        delay()
        result = communicate(self, *args, **kwargs)
        for name in ("tensor_send_next", "tensor_send_prev"):
            if kwargs.get(name) is not None:
                poison(kwargs[name])
        delay()
        return result

    def train_step(*args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        total = hashlib.sha256()
        for chunk in args[2] if isinstance(args[2], list) else [args[2]]:
            for weight in chunk.parameters():
                words = weight.detach().contiguous().view(torch.uint8).flatten()
                words = torch.nn.functional.pad(words, (0, -len(words) % 8)).view(torch.int64)
                places = torch.arange(1, len(words) + 1, device=words.device)
                total.update(str(int((words * (2 * places + 1)).sum())).encode())
        with file.open("a") as out:
            out.write(json.dumps(total.hexdigest()[:16]) + "\n")
        return result

    setup = training.setup_model_and_optimizer

    def set_up(*args: Any, **kwargs: Any) -> Any:
        chunks, optimizer, scheduler = setup(*args, **kwargs)
        set_parameters(chunks)
        optimizer.reload_model_params()
        return chunks, optimizer, scheduler

    file.unlink(missing_ok=True)
    training.setup_model_and_optimizer = functools.wraps(setup)(set_up)
    all_to_all._all_to_all, P2PCommunicator._communicate, training.train_step = exchanged, communicated, train_step


def sums(run: script.Run) -> list[str]:
    """Sums of weights after every step, of every rank."""
    return [run.file(rank).read_text() for rank in run.ranks if run.file(rank).exists()]


def judged(name: str, run: script.Run, base: script.Run, still: script.Run) -> Row:
    """A run beside Megatron's of one rank, and beside the same run without delays."""
    text, theirs = run.text(), base.text()
    pairs = list(zip(script.losses(text), script.losses(theirs), strict=False))
    row: Row = {"layout": name, "run": run.name, "ranks": run.world, "failed": run.failed, "steps": len(pairs)}
    row["same_digests"] = sum(a == b for a, b in zip(script.digests(text), script.digests(theirs), strict=False))
    row["loss_difference"] = max((abs(ours / other - 1) for ours, other in pairs), default=math.nan)
    row["finite"] = not run.failed and all(math.isfinite(ours) for ours, _ in pairs)
    row["same_sums"] = not run.failed and sums(run) == sums(still)
    # NCCL opens channels at their first use, which should not be within a step.
    row["channels_in_steps"] = text.partition("training ...")[2].count(" Channel ")
    return row


def goals(rows: Sequence[Row], steps: int, off: float = 1e-3) -> list[Goal]:
    """Those of runs, whose losses may be `off` by so much."""
    wanted = []
    for row in rows:
        name = row["run"]
        wanted.append(at_least(f"{name}: steps with the digest of one rank", row["same_digests"], steps))
        wanted.append(at_most(f"{name}: losses, relative difference", row["loss_difference"], off))
        wanted.append(at_least(f"{name}: nothing but numbers", int(row["finite"]), 1))
        if "delays" in name:
            wanted.append(at_least(f"{name}: weights to the bit as without delays", int(row["same_sums"]), 1))
    return wanted


def main() -> None:
    parser = machine.parser(__doc__)
    parser.add_argument("--script", type=Path, default=script.STAND_IN, help="pretrain_gpt.py of a checkout")
    parser.add_argument("--library", type=Path, help="NCCL's, preloaded; default: torch's")
    parser.add_argument(
        "--layouts", nargs="+", choices=LAYOUTS, default=[*LAYOUTS], metavar="NAME", help="default: all"
    )
    parser.add_argument("--name", default="ranks", help="of the result file; default: %(default)s")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, at a tiny size in fp32")
    args = parser.parse_args()
    steps, off = (3, 1e-5) if args.rehearse else (STEPS, 1e-3)
    gpu = machine.gpu()
    settings = {"command": sys.argv[1:], "cuda": torch.version.cuda, "layouts": {n: LAYOUTS[n] for n in args.layouts}}
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.output / "work" / args.name if args.output else Path(temporary)
        wanted, ended, rows = runs_of(args, folder, steps), dict[str, script.Run](), list[Row]()
        for run in script.trained([run for _, run, *_ in wanted], at_once=2, ahead=2):
            ended[run.name] = run
            print(f"{run.name}: {'failed' if run.failed else 'ended'} {time.monotonic() - run.began:.0f} s", flush=True)
            rows = [
                judged(name, run, ended[base], ended[still])
                for name, run, base, still in wanted
                if {run.name, base, still} <= ended.keys()
            ]
            if args.output or gpu:  # after every run, in case that the machine goes
                where = machine.where(args, gpu)
                results.write(args.name, settings=settings, rows=rows, goals=goals(rows, steps, off), **where)
    results.conclude(goals(rows, steps, off), args.check)
    good = sum(row["same_digests"] == steps and row["finite"] for row in rows)
    print(f"{good} of {len(rows)} runs have the digests of one rank and no NaN")


def runs_of(args: Any, folder: Path, steps: int) -> list[tuple[str, script.Run, str, str]]:
    """Runs with the names of their layouts, of Megatron's run of one rank, and of the same run without delays."""
    on_gpu = torch.cuda.is_available()
    folder.mkdir(parents=True, exist_ok=True)
    window = 256 if args.rehearse else WINDOW
    lengths = np.maximum(2, f2(20 + steps * WINDOWS * window // 2000, 0, window))
    common = [*COMMON.split(), *(script.ON_GPU if on_gpu else script.ON_CPU).split()]
    if args.rehearse:
        common.remove("--bf16")
    common += ["--data-path", write_dataset(folder / "data", lengths), "--distributed-timeout-minutes", "1"]
    common += f"--seq-length {window} --max-position-embeddings {window} --train-iters {steps}".split()
    common += f"--global-batch-size {WINDOWS}".split()
    found: list[tuple[str, script.Run, str, str]] = []

    def add(name: str, title: str, layout: Layout, flags: str, env: dict[str, str], base: str, still: str) -> None:
        ranks = range(layout.ranks)
        shared = smoke.settings_of(layout.ranks, args.library) | works if on_gpu else {}
        shared["TORCH_FR_DUMP_TEMP_FILE"] = str(folder / f"{title}, hang of rank ")
        model = f"{layout.model} {REHEARSED}" if args.rehearse else layout.model
        run = script.Run(
            name=title,
            folder=folder,
            script=args.script,
            flags=[*model.split(), *layout.flags.split(), *common, *flags.split()],
            watcher="ranks",
            ranks=ranks,
            world=layout.ranks,
            env=shared | env,
        )
        found.append((name, run, base, still))

    bases: dict[str, str] = {}
    works, shares = smoked(args.output)
    for name in args.layouts:
        layout = LAYOUTS[name]
        if shares and layout.ranks not in shares:
            continue
        if layout.model not in bases:
            bases[layout.model] = f"one rank of Megatron's, {name}"
            add(name, bases[layout.model], Layout(1, "", layout.model), "", {}, "", "")
        base = bases[layout.model]
        add(name, name, layout, "--wlb", {"NCCL_DEBUG": "INFO"}, base, name)
        if layout.noisy and args.rehearse:
            add(name, f"{name}, delays 1", layout, "--wlb", {"NOISE": "1"}, base, name)
        elif layout.noisy:
            still = f"{name}, deterministic"
            for seed in SEEDS:
                title = f"{still}, delays {seed}" if seed else still
                add(name, title, layout, f"--wlb {DETERMINISTIC}", BITS | {"NOISE": seed}, base, still)
    for transport, env in TRANSPORTS.items() if any(name == "CP2" for name, *_ in found) and on_gpu else ():
        layout = LAYOUTS["CP2"]
        add("CP2", f"CP2, {transport}", layout, "--wlb", env, bases[layout.model], "CP2")
    return found


def smoked(folder: Path | None) -> tuple[dict[str, str], set[int]]:
    """Return NCCL's settings by which the smoke test passed, and numbers of ranks; empty without its result."""
    for file in folder.glob("smoke_*.json") if folder else ():
        found = json.loads(file.read_text())
        return found["settings"]["works"], {row["ranks"] for row in found["rows"] if not row["failed"]}
    return {}, set()


if __name__ == "__main__":
    main()
