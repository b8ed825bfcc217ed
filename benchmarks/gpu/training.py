"""Megatron-LM on one GPU, by itself and with `--wlb`, on the same documents: losses, digests, step times, memory.

    python -m benchmarks.gpu.training CHECKOUT/pretrain_gpt.py [--jobs NAME ...] [--quick] [--check]

The script is upstream's, and its layers are TransformerEngine's. On one GPU nobody waits, so nothing is to be gained:
this shows that a step is Megatron's, and how near predictions of time and memory are. Megatron runs with
`--dataloader-inter-document-masking`, by which attention stays inside documents, too. "two windows" is Megatron again
with two windows in a micro-batch: how far its losses move is the measure for ours. Tiny models have steps that are too
short to time.
"""

import json
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

from benchmarks import results
from benchmarks.lengths import f2
from benchmarks.results import at_least, at_most
from benchmarks.training_cpu import VOCABULARY, write_dataset
from megatron_wlb.cli import compare
from megatron_wlb.hardware.profile import gpu_of

WARM = 3
"""Steps that are left out of times: cuDNN plans in the first ones."""
COMMON = f"""--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --bf16 --use-distributed-optimizer
--micro-batch-size 1 --calculate-per-token-loss --no-gradient-accumulation-fusion --tokenizer-type NullTokenizer
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
MASKED = "--dataloader-inter-document-masking"
WAYS = {"megatron": MASKED, "two windows": f"{MASKED} --micro-batch-size 2", "wlb": f"{MASKED} --wlb"}


def trained(way: str, log: Path, script: Path, flags: list[str], profile: str | None) -> None:
    """Run the script as users do; `log` takes what it prints."""
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", "-m", "megatron_wlb.run"]
    more = WAYS[way].split()
    if way == "wlb":
        more += ["--wlb-log", str(log.with_suffix(".jsonl")), *(["--wlb-profile", profile] if profile else [])]
    with log.open("w") as file:
        done = subprocess.run([*words, str(script), *flags, *more], stdout=file, stderr=subprocess.STDOUT)
    if done.returncode:
        sys.exit(f"{log.stem} failed:\n{text(log)[-6000:]}")


def text(log: Path) -> str:
    return log.read_text(errors="replace")


def row(job: str, way: str, log: Path, base: Path) -> results.Row:
    """A run beside Megatron's: losses and digests of all steps, peaks of memory, and tokens a second over Megatron."""
    losses, norms, digests = (
        [re.findall(pattern, text(each)) for each in (log, base)]
        for pattern in (r"lm loss: (\S+)", r"grad norm: (\S+)", r"\| digest (\w+)")
    )
    found: results.Row = {"job": job, "run": way, "steps": len(losses[0])}
    for name, (ours, theirs) in (("loss_difference", losses), ("norm_difference", norms)):
        found[name] = max(abs(float(a) / float(b) - 1) for a, b in zip(ours, theirs, strict=False))
    found["same_digests"] = sum(a == b for a, b in zip(*digests, strict=False))
    peaks = re.findall(r"max allocated: ([\d.]+) \|.* max reserved: ([\d.]+)", text(log))
    for name, of in zip(("allocated_gib", "reserved_gib"), zip(*peaks, strict=True), strict=False):
        found[name] = max(map(float, of)) / 1024
    if backend := re.search(r"attention backend (\w+)", text(log)):
        found["attention"] = backend[1]
    if job.startswith("tiny"):
        return found
    _, _, numbers = compare.compared(*(compare.read(str(each), WARM) for each in (base, log)))
    found |= {"over_megatron": numbers["ratio"], "error": numbers["error"]}
    found["step_ms"] = [1e3 * seconds for _, _, seconds, *_ in numbers["steps"][1]]
    if way == "wlb":
        steps = [json.loads(line) for line in log.with_suffix(".jsonl").read_text().splitlines()][WARM:]
        found["predicted_over_measured"] = [step["predicted_ms"] / step["step_ms"] for step in steps]
    return found


def goals(rows: list[results.Row]) -> list[results.Goal]:
    wanted = []
    for ours in (each for each in rows if each["run"] == "wlb"):
        job = ours["job"]
        wanted.append(at_most(f"{job}: losses, relative difference to Megatron's", ours["loss_difference"], 1e-3))
        wanted.append(at_least(f"{job}: steps with Megatron's digest", ours["same_digests"] / ours["steps"], 1))
        if "over_megatron" in ours:
            off = statistics.median(abs(each - 1) for each in ours["predicted_over_measured"])
            wanted.append(at_least(f"{job}: tokens a second over Megatron", ours["over_megatron"], 0.99))
            wanted.append(at_most(f"{job}: median error of predicted times of steps", off, 0.05))
    return wanted


def main() -> None:
    parser = results.parser(__doc__, "the tiny model alone")
    parser.add_argument("script", type=Path, help="pretrain_gpt.py of a checkout")
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=[*JOBS], metavar="NAME", help="default: all")
    parser.add_argument("--steps", type=int, default=10, help="default: %(default)s")
    parser.add_argument("--profile", help="by which steps are predicted; default: as in training")
    parser.add_argument("--commit", help="commit that is measured; default: git's, which a copied tree does not know")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder, rows = args.output or Path(temporary), list[results.Row]()
        folder.mkdir(parents=True, exist_ok=True)
        for job in ["tiny"] if args.quick else args.jobs:
            (window, windows), flags = SIZES[job.split(",")[0]], JOBS[job]
            data = Path(temporary) / job.replace(" ", "-")
            lengths = np.maximum(2, f2(args.steps * windows * window // 3000, 0, window))
            words = [*flags.split(), *COMMON.split(), "--data-path", write_dataset(data, lengths)]
            words += f"--seq-length {window} --max-position-embeddings {window} --train-iters {args.steps}".split()
            words += ["--global-batch-size", str(windows)]
            for way in WAYS if job == next(iter(JOBS)) else ("megatron", "wlb"):
                trained(way, folder / f"{job}, {way}.log", args.script, words, args.profile)
                rows.append(row(job, way, folder / f"{job}, {way}.log", folder / f"{job}, megatron.log"))
                print(rows[-1], flush=True)
    settings = {"command": sys.argv[1:], "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    settings |= {"common": COMMON, "jobs": JOBS, "ways": WAYS}
    device = torch.cuda.get_device_name()
    where = {"device": device, "commit": args.commit, "suffix": f"_{gpu_of(device) or 'cuda'}", "folder": args.output}
    if args.output or not args.quick:
        print(results.write("training", settings=settings, rows=rows, goals=goals(rows), **where))
    results.conclude(goals(rows), args.check)


if __name__ == "__main__":
    main()
