"""Megatron-LM on one GPU, by itself and with `--wlb`, on the same documents: losses, step times, memory.

    python -m benchmarks.gpu.training CHECKOUT/pretrain_gpt.py [--quick] [--check]

Four layers of Llama-3-8B, unmodified script, TransformerEngine. On one GPU nobody waits, so nothing is to be gained:
this shows that a step is Megatron's (with `--dataloader-inter-document-masking`, which packs documents into one call of
attention as `--wlb` does), that variable lengths cost nothing, and how near predictions of time and memory are. "two
windows": Megatron again, with two windows in a micro-batch; how far its losses move is the measure for ours. "across
documents": Megatron without a mask.
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

WARM = 3
"""Steps that are left out of times: cuDNN plans in the first ones."""
LAYERS = """--num-layers 4 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention
--num-query-groups 8 --make-vocab-size-divisible-by 32000"""
TINY = "--num-layers 2 --hidden-size 256 --ffn-hidden-size 512 --num-attention-heads 2 --kv-channels 128"
COMMON = f"""--position-embedding-type rope --rotary-base 500000 --normalization RMSNorm --swiglu --disable-bias-linear
--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --bf16 --use-distributed-optimizer
--micro-batch-size 1 --calculate-per-token-loss --no-gradient-accumulation-fusion --tokenizer-type NullTokenizer
--vocab-size {VOCABULARY} --split 100,0,0 --eval-iters 0 --eval-interval 1000 --lr 1e-4 --lr-decay-style constant
--log-interval 1 --log-memory-interval 1 --wlb-digest --global-batch-size 8"""
MASKED = "--dataloader-inter-document-masking"
RUNS = {
    "megatron": MASKED,
    "megatron, two windows": f"{MASKED} --micro-batch-size 2",
    "megatron, across documents": "",
    "wlb": f"{MASKED} --wlb",
    "megatron, again": MASKED,
}


def trained(name: str, folder: Path, script: Path, flags: list[str]) -> Path:
    """Run the script as users do; its log."""
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", "-m", "megatron_wlb.run"]
    log, more = folder / f"{name}.log", RUNS[name].split()
    more += ["--wlb-log", f"{folder}/wlb.jsonl"] if "--wlb" in more else []
    with log.open("w") as file:
        done = subprocess.run([*words, str(script), *flags, *more], stdout=file, stderr=subprocess.STDOUT)
    if done.returncode:
        sys.exit(f"{name} failed:\n{log.read_text(errors='replace')[-6000:]}")
    return log


def row(name: str, log: Path, base: Path, skipped: int) -> results.Row:
    """A run beside Megatron's: tokens a second over its, losses and digests of all steps, peaks of memory."""
    _, _, numbers = compare.compared(*(compare.read(str(each), skipped) for each in (base, log)))
    *_, losses = compare.compared(*(compare.read(str(each), 2) for each in (base, log)))
    found: results.Row = {"run": name, "over_megatron": numbers["ratio"], "error": numbers["error"]}
    found["step_ms"] = [1e3 * seconds for _, _, seconds, *_ in numbers["steps"][1]]
    found["loss_difference"] = losses["loss_difference"]
    ours, theirs = (re.findall(r"\| digest (\w+)", each.read_text(errors="replace")) for each in (log, base))
    found["digests"], found["alike"] = len(ours), sum(one == other for one, other in zip(ours, theirs, strict=True))
    peaks = re.findall(r"max allocated: ([\d.]+) \|.* max reserved: ([\d.]+)", log.read_text(errors="replace"))
    allocated, reserved = (max(float(each) for each in of) / 1024 for of in zip(*peaks, strict=True))
    return found | {"allocated_gib": allocated, "reserved_gib": reserved}


def main() -> None:
    parser = results.parser(__doc__, "a tiny model, to see that everything runs")
    parser.add_argument("script", type=Path, help="pretrain_gpt.py of a checkout")
    parser.add_argument("--steps", type=int, default=14, help="default: %(default)s")
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=[*RUNS], help="the first is compared with")
    parser.add_argument("--commit", help="commit that is measured; default: git's, which a copied tree does not know")
    args, extra = parser.parse_known_args()
    window = 2048 if args.quick else 16384
    sizes = f"--seq-length {window} --max-position-embeddings {window} --train-iters {args.steps}"
    flags = [*f"{TINY if args.quick else LAYERS} {COMMON} {sizes}".split(), *extra]
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.output or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        lengths = np.maximum(2, f2(8 * args.steps * window // 3000, 0, window))
        flags += ["--data-path", write_dataset(Path(temporary) / "data", lengths)]
        rows = []
        for name in args.runs:
            log = trained(name, folder, args.script, flags)
            rows.append(row(name, log, folder / f"{args.runs[0]}.log", WARM))
            print(rows[-1], flush=True)
        steps = [json.loads(line) for line in (folder / "wlb.jsonl").read_text().splitlines()][WARM:]
    off = [step["predicted_ms"] / step["step_ms"] for step in steps]
    ours = next(each for each in rows if each["run"] == "wlb")
    ours["predicted_over_measured"] = off
    goals = [
        at_most("wlb: losses, relative difference", ours["loss_difference"], 1e-3),
        at_least("wlb: digests that are Megatron's", ours["alike"] / ours["digests"], 1),
        at_least("wlb: tokens a second over Megatron", ours["over_megatron"], 0.99),
        at_most("wlb: median error of predicted steps", statistics.median(abs(each - 1) for each in off), 0.05),
    ]
    settings = {"command": sys.argv[1:], "cuda": torch.version.cuda, "flags": flags[:-2], "runs": RUNS}
    where = {"device": torch.cuda.get_device_name(), "commit": args.commit, "folder": args.output}
    if args.output or not args.quick:
        print(results.write("training", settings=settings, rows=rows, goals=goals, suffix=".h100", **where))
    results.conclude(goals, args.check)


if __name__ == "__main__":
    main()
