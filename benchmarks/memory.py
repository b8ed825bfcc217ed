"""Jobs rehearsed for an H100: their memory beside the predicted one, and whether the NCCL calls of all ranks match.

Nothing of it was measured on a GPU: `megatron-rehearse` runs three steps of mock data over a stand-in for CUDA.
Needs TransformerEngine with its extension of torch, flash-linear-attention, and about an hour of two cores. What
--folder already has is not run again.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import results
from benchmarks.results import at_most
from megatron_wlb.cli.launch import read_command

STEPS, CARD = 3, 80
GIVEN = "--vocab-size 32000 --attention-backend flash"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
LOCAL = "--transformer-impl local --no-rope-fusion --no-persist-layer-norm --no-masked-softmax-fusion"
SMALL = f"""pretrain_gpt.py --wlb --mock-data --wlb-mock-lengths F2 --hidden-size 1024 --num-attention-heads 32
--seq-length 32768 --max-position-embeddings 32768 --position-embedding-type rope --normalization RMSNorm --swiglu
--disable-bias-linear --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 --bf16
--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --micro-batch-size 1
--calculate-per-token-loss --lr 1e-4 --train-iters 100 --log-interval 1 {GIVEN}"""
"""Of little width: the order of calls does not go by it."""
JOBS = {
    **{f"{size}.sbatch": (f"{size} {GIVEN}", "all") for size in ("550m", "7b", "30b", "70b")},
    "7b.sbatch, all recomputed": (f"7b {GIVEN} {FULL}", "stages"),
    "550m.sbatch, upstream's layers": (f"550m {GIVEN} {LOCAL}", "stages"),
    "550m.sbatch, upstream's layers, all recomputed": (f"550m {GIVEN} {LOCAL} {FULL}", "stages"),
    "experts on 4 of 8 ranks": (
        f"torchrun --nproc-per-node 8 {SMALL} --num-layers 4 --num-experts 8 --expert-model-parallel-size 4 "
        "--moe-router-topk 2 --moe-token-dispatcher-type alltoall --ffn-hidden-size 1024 --global-batch-size 8",
        "all",
    ),
    "latent attention, TP 2, CP 2, PP 2": (
        f"torchrun --nproc-per-node 8 {SMALL} --num-layers 16 --tensor-model-parallel-size 2 --sequence-parallel "
        "--context-parallel-size 2 --pipeline-model-parallel-size 2 --global-batch-size 4 --multi-latent-attention "
        "--qk-layernorm --q-lora-rank 256 --kv-lora-rank 128 --qk-head-dim 64 --qk-pos-emb-head-dim 32 --v-head-dim 96",
        "all",
    ),
    "gated delta nets by a pattern, TP 2, CP 4": (
        f"torchrun --nproc-per-node 8 {SMALL} --hybrid-layer-pattern G-G-G-*-G-G-G-*- --ffn-hidden-size 2816 "
        "--linear-num-key-heads 16 --linear-num-value-heads 32 --tensor-model-parallel-size 2 --sequence-parallel "
        "--context-parallel-size 4 --global-batch-size 8",
        "all",
    ),
    "CP 32": (
        f"torchrun --nnodes 4 --nproc-per-node 8 {SMALL} --num-layers 4 --context-parallel-size 32 "
        "--global-batch-size 4",
        "all",
    ),
    "405B's 126 layers, TP 2, CP 2, PP 14, VPP 9": (
        f"torchrun --nnodes 7 --nproc-per-node 8 {SMALL} --num-layers 126 --tensor-model-parallel-size 2 "
        "--sequence-parallel --context-parallel-size 2 --pipeline-model-parallel-size 14 "
        "--num-virtual-stages-per-pipeline-rank 9 --global-batch-size 14",
        "all",
    ),
}
"""Command, or script of scripts/slurm with further flags, and ranks; "stages": the first rank of each."""


def rehearsed(name: str, folder: Path) -> list[results.Row]:
    """What the ranks of each stage take, and the verdict."""
    command, ranks = JOBS[name]
    words = command.split()
    if words[0] != "torchrun":
        script = results.ROOT / "scripts" / "slurm" / f"{words[0]}.sbatch"
        run = subprocess.run(["bash", script, "--dry-run", *words[1:]], capture_output=True, text=True, check=True)
        words = run.stdout.split()
    launched = read_command(words)
    world, stages = launched.world_size, launched.stated.get("pipeline_model_parallel_size", 1)
    if ranks == "stages":
        ranks = ",".join(str(stage * world // stages) for stage in range(stages))
    path = folder / f"{name}.json"
    if not path.exists():
        options = ["--gpu", "h100", "--gpu-memory", str(CARD), "--ranks", ranks, "--steps", str(STEPS)]
        whole = [sys.executable, "-m", "megatron_rehearsal", *options, "--json", str(path), "--", *words]
        subprocess.run(whole, cwd=results.ROOT, check=False)  # its status is the verdict
        if not path.exists():
            sys.exit(f"{name} was not rehearsed, see above")
    found = json.loads(path.read_text())
    rows = []
    for stage in range(stages):
        of_stage = [rank for rank in found["ranks"] if rank["rank"] * stages // world == stage]
        row: results.Row = {"job": name, "stage": stage, "ranks": world, "run": len(of_stage)}
        row |= {"nccl": found["verdict"] if found["nccl"] else "match" if ranks == "all" else "not matched"}
        row["nccl_calls"] = sum(calls["calls"] for rank in of_stage for calls in rank["nccl"].values())
        off = max(of_stage, key=lambda rank: abs(rank["predicted_gib"] / rank["allocated_gib"] - 1))
        row |= {key: off[key] for key in ("predicted_gib", "allocated_gib")}
        row |= {key: max(rank[key] for rank in of_stage) for key in ("reserved_gib", "retries", "communicators")}
        rows.append(row | {"made_in_steps": sum(sum(rank["made_in_steps"].values()) for rank in of_stage)})
    return rows


def goals(rows: list[results.Row]) -> list[results.Goal]:
    wanted = []
    for job in dict.fromkeys(row["job"] for row in rows):
        stages = [row for row in rows if row["job"] == job]
        errors = [abs(row["predicted_gib"] / row["allocated_gib"] - 1) for row in stages]
        wanted.append(at_most(f"{job}: predicted / allocated, off by", max(errors), 0.05))
        wanted.append(at_most(f"{job}: reserved / card", max(row["reserved_gib"] for row in stages) / CARD, 0.95))
        for name in ("retries", "made_in_steps"):
            wanted.append(at_most(f"{job}: {name}", sum(row[name] for row in stages), 0))
        if stages[0]["nccl"] != "not matched":
            wanted.append(at_most(f"{job}: NCCL calls hang", stages[0]["nccl"] == "hangs", 0))
    return wanted


def main() -> None:
    parser = results.parser(__doc__, "the job of experts")
    parser.add_argument("--folder", type=Path, help="of rehearsals, which are kept there")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        jobs = [name for name in JOBS if name.startswith("experts") or not args.quick]
        rows = [row for job in jobs for row in rehearsed(job, folder)]
    results.show(rows)
    ran = "ranks of a stage that ran; calls of all that ran were played together, others taken to be alike"
    settings = {"gpu_gib": CARD, "steps": STEPS, "attention": "aten", "data": "mock, F2", "run": ran}
    settings["nccl_calls"] = "of the last step"
    results.finish(args, "memory", settings=settings, rows=rows, goals=goals(rows))


if __name__ == "__main__":
    main()
