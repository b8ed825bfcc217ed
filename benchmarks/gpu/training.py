"""Megatron-LM on one GPU, by itself and with `--wlb`, on the same documents: losses, digests, step times, memory.

    python -m benchmarks.gpu.training CHECKOUT/pretrain_gpt.py [--jobs NAME ...] [--kernels] [--quick] [--check]

The script is upstream's, and its layers are TransformerEngine's. On one GPU nobody waits, so nothing is to be gained:
this shows that a step is Megatron's, and how near predictions of time and memory are. Megatron runs with
`--dataloader-inter-document-masking`, by which attention stays inside documents, too. "two windows" is Megatron again
with two windows in a micro-batch: how far its losses move is the measure for ours. Tiny models have steps that are too
short to time. --kernels writes the GPU time of every kernel in the last step that warms up, which no time includes.
"""

import json
import os
import re
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import results
from benchmarks.gpu import machine, script
from benchmarks.lengths import f2
from benchmarks.results import at_least, at_most
from benchmarks.training_cpu import VOCABULARY, write_dataset
from megatron_wlb.cli import compare, run_log

WARM = 3
"""Steps that are left out of times: cuDNN plans in the first ones."""
COMMON = f"""--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --bf16 --use-distributed-optimizer
--micro-batch-size 1 --calculate-per-token-loss --tokenizer-type NullTokenizer
--vocab-size {VOCABULARY} --split 100,0,0 --eval-iters 0 --eval-interval 1000 --lr 1e-4 --lr-decay-style constant
--log-interval 1 --log-memory-interval 1 --wlb-digest"""
LARGE = """--num-layers 4 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention
--num-query-groups 8 --rotary-base 500000 --make-vocab-size-divisible-by 32000"""
TINY = "--num-layers 4 --hidden-size 1024 --ffn-hidden-size 2048 --num-attention-heads 8 --kv-channels 128"
GROUPED = "--group-query-attention --num-query-groups 4"
JOBS = {
    "4 layers of Llama-3-8B": LARGE,
    "tiny": f"{TINY} {GROUPED}",
    "tiny, FP8 tensorwise": f"{TINY} {GROUPED} --fp8-format hybrid --fp8-recipe tensorwise",
    "tiny, FP8 delayed": f"{TINY} {GROUPED} --fp8-format hybrid --fp8-amax-history-len 16 --fp8-amax-compute-algo max",
    "tiny, FP8 blockwise": f"{TINY} {GROUPED} --fp8-format e4m3 --fp8-recipe blockwise",
    "tiny, experts": f"{TINY} {GROUPED} --num-experts 4 --moe-router-topk 2 --moe-grouped-gemm "
    "--moe-ffn-hidden-size 512 --moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 1e-2",
    "tiny, latents": f"{TINY} --multi-latent-attention --qk-layernorm --q-lora-rank 256 --kv-lora-rank 128 "
    "--qk-head-dim 64 --qk-pos-emb-head-dim 32 --v-head-dim 96 --no-rope-fusion",
    "tiny, MTP": f"{TINY} {GROUPED} --mtp-num-layers 1",
    "tiny, sliding windows": f"{TINY} {GROUPED} --window-size 511,0",
    "tiny, all recomputed": f"{TINY} {GROUPED} --recompute-granularity full --recompute-method uniform "
    "--recompute-num-layers 1",
}
SIZES = {"tiny": (4096, 4), "4 layers of Llama-3-8B": (16384, 8)}
"""Context window, and windows of a step, of names that begin so."""
REHEARSED = """--num-layers 2 --hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 4
--make-vocab-size-divisible-by 128"""
"""The shape that stands for LARGE on a CPU, in windows of 256 tokens."""
WAYS = {"megatron": "", "two windows": "--micro-batch-size 2", "wlb": "--wlb"}


def watch(file: Path) -> None:
    """Write the GPU time of kernels in step WARM by name, in us, the longest first; on a CPU, of operators."""
    from megatron.training import training

    step, count = training.train_step, [0]

    def train_step(*args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        if count[0] != WARM or "KERNELS" not in os.environ:
            return step(*args, **kwargs)
        kind = torch.profiler.ProfilerActivity
        on_gpu = torch.cuda.is_available()
        with torch.profiler.profile(activities=[kind.CUDA if on_gpu else kind.CPU], acc_events=True) as profile:
            result = step(*args, **kwargs)
        name = f"self_{'device' if on_gpu else 'cpu'}_time_total"
        taken = {each.key: [getattr(each, name), each.count] for each in profile.key_averages()}
        file.write_text(json.dumps(dict(sorted(taken.items(), key=lambda each: -each[1][0])), indent=1) + "\n")
        return result

    training.train_step = train_step


def row(job: str, way: str, run: script.Run, base: script.Run) -> results.Row:
    """A run beside Megatron's: losses and digests of all steps, peaks of memory, and tokens a second over Megatron."""
    text = run.text()
    losses, norms, digests = (
        [read(each.text()) for each in (run, base)]
        for read in (script.losses, lambda text: map(float, re.findall(r"grad norm: (\S+)", text)), script.digests)
    )
    found: results.Row = {"job": job, "run": way, "steps": len(losses[0])}
    for name, (ours, theirs) in (("loss_difference", losses), ("norm_difference", norms)):
        found[name] = max(abs(a / b - 1) for a, b in zip(ours, theirs, strict=False))
    found["same_digests"] = sum(a == b for a, b in zip(*digests, strict=False))
    peaks = re.findall(r"max allocated: ([\d.]+) \|.* max reserved: ([\d.]+)", text)
    for name, of in zip(("allocated_gib", "reserved_gib"), zip(*peaks, strict=True), strict=False):
        found[name] = max(map(float, of)) / 1024
    if backend := re.search(r"attention backend (\w+)", text):
        found["attention"] = backend[1]
    if job.startswith("tiny"):
        return found
    _, _, numbers = compare.compared(*(run_log.read(str(each.log(0)), WARM) for each in (base, run)))
    found |= {"over_megatron": numbers["ratio"], "error": numbers["error"]}
    found["step_ms"] = [1e3 * seconds for _, _, seconds, *_ in numbers["steps"][1]]
    if way == "wlb":
        steps = [json.loads(line) for line in (run.folder / f"{run.name}.jsonl").read_text().splitlines()][WARM:]
        found["predicted_over_measured"] = [
            step["predicted_ms"] / step["step_ms"] for step in steps if step["predicted_ms"] is not None
        ]  # none on a CPU
    return found


def goals(rows: list[results.Row]) -> list[results.Goal]:
    wanted = []
    for ours in (each for each in rows if each["run"] == "wlb"):
        job = ours["job"]
        wanted.append(at_most(f"{job}: losses, relative difference to Megatron's", ours["loss_difference"], 1e-3))
        wanted.append(at_least(f"{job}: steps with Megatron's digest", ours["same_digests"] / ours["steps"], 1))
        if "over_megatron" in ours:
            wanted.append(at_least(f"{job}: tokens a second over Megatron", ours["over_megatron"], 0.99))
        if ours.get("predicted_over_measured"):
            off = statistics.median(abs(each - 1) for each in ours["predicted_over_measured"])
            wanted.append(at_most(f"{job}: median error of predicted times of steps", off, 0.05))
    return wanted


def main() -> None:
    parser = machine.parser(__doc__, "the tiny model alone")
    parser.add_argument("script", type=Path, help="pretrain_gpt.py of a checkout")
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=[*JOBS], metavar="NAME", help="default: all")
    parser.add_argument("--ways", nargs="+", choices=WAYS, metavar="WAY", help="default: those that the job is for")
    parser.add_argument("--steps", type=int, default=10, help="default: %(default)s")
    parser.add_argument("--name", default="training", help="of the result file; default: %(default)s")
    parser.add_argument("--kernels", action="store_true", help="profile one step")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, at a tiny size")
    parser.add_argument("--profile", help="by which steps are predicted; default: as in training")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.output / "work" / args.name if args.output else Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        rows = list[results.Row]()
        for job in ["tiny"] if args.quick else args.jobs:
            (window, windows), flags = SIZES[job.split(",")[0]], JOBS[job]
            masked = script.ON_GPU
            if args.rehearse:
                window, flags, masked = 256, REHEARSED, script.ON_CPU
            data = Path(temporary) / job.replace(" ", "-")
            lengths = np.maximum(2, f2(10 + args.steps * windows * window // 3000, 0, window))
            words = [*flags.split(), *COMMON.split(), *masked.split(), "--data-path", write_dataset(data, lengths)]
            words += f"--seq-length {window} --max-position-embeddings {window} --train-iters {args.steps}".split()
            words += ["--global-batch-size", str(windows)]
            runs = {}
            for way in args.ways or (WAYS if job == next(iter(JOBS)) else ("megatron", "wlb")):
                log = folder / f"{job}, {way}"
                more = WAYS[way].split()
                if way == "wlb":
                    more += ["--wlb-log", f"{log}.jsonl", *(["--wlb-profile", args.profile] if args.profile else [])]
                runs[way] = script.Run(
                    name=f"{job}, {way}",
                    folder=folder,
                    script=args.script,
                    flags=[*words, *more],
                    watcher="training",
                    env={"KERNELS": "1"} if args.kernels else {},
                )
            for way, run in zip(runs, script.trained([*runs.values()]), strict=True):
                if run.failed:
                    sys.exit(f"{run.name} failed:\n{run.text()[-6000:]}")
                rows.append(row(job, way, run, runs["megatron"]))
                print(rows[-1], flush=True)
    settings = {"command": sys.argv[1:], "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    settings |= {"common": COMMON, "jobs": JOBS, "ways": WAYS}
    gpu = machine.gpu()
    if args.output or not args.quick:
        print(results.write(args.name, settings=settings, rows=rows, goals=goals(rows), **machine.where(args, gpu)))
    results.conclude(goals(rows), args.check)


if __name__ == "__main__":
    main()
