"""Memory of the jobs of scripts/slurm on H100, predicted and rehearsed, with and without deferred weight gradients.

Nothing of it was measured on a GPU: `megatron-wlb rehearse` runs the first rank of each pipeline stage for three steps
of mock data, over a stand-in for CUDA. Needs the Python of TransformerEngine, and about 10 minutes on two cores.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import results
from benchmarks.results import at_most

JOBS = {"550m": 32, "7b": 64, "30b": 128, "70b": 256}
"""Jobs of scripts/slurm, and their GPUs; all have four stages."""
STEPS, STAGES, CARD = 3, 4, 80


def rehearsed(job: str, *flags: str) -> list[results.Row]:
    """What the first rank of each stage takes."""
    script = results.ROOT / "scripts" / "slurm" / f"{job}.sbatch"
    command = subprocess.run(["bash", script, "--dry-run", *flags], capture_output=True, text=True, check=True).stdout
    ranks = ",".join(str(stage * JOBS[job] // STAGES) for stage in range(STAGES))
    options = ["--gpu", "h100", "--gpu-memory", str(CARD), "--ranks", ranks, "--steps", str(STEPS)]
    given = [*command.split(), "--vocab-size", "32000", "--wlb-attention-backend", "aten"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rehearsal.json")
        whole = [sys.executable, "-m", "megatron_wlb", "rehearse", *options, "--json", str(path), "--", *given]
        subprocess.run(whole, cwd=results.ROOT, check=False)  # its status is the verdict
        ranks_of = json.loads(path.read_text())["ranks"]
    kept = ("predicted_gib", "allocated_gib", "reserved_gib", "retries", "communicators")
    return [{"stage": stage, **{name: rank[name] for name in kept}} for stage, rank in enumerate(ranks_of)]


def goals(rows: list[results.Row]) -> list[results.Goal]:
    wanted = []
    for row in rows:
        where = f"{row['job']}, deferral {row['deferral']}, stage {row['stage']}"
        wanted.append(at_most(f"{where}: reserved / card", row["reserved_gib"] / CARD, 0.95))
        wanted.append(at_most(f"{where}: retries", row["retries"], 0))
        error = abs(row["predicted_gib"] / row["allocated_gib"] - 1)
        wanted.append(at_most(f"{where}: predicted / allocated, off by", error, 0.05))
    return wanted


def main() -> None:
    args = results.parser(__doc__, "the smallest job").parse_args()
    rows = [
        {"job": job, "deferral": way, **row}
        for job in list(JOBS)[: 1 if args.quick else None]
        for way in ("auto", "off")
        for row in rehearsed(job, "--wlb-defer-weight-gradients", way)
    ]
    results.show(rows)
    settings = {
        "gpu_gib": CARD,
        "steps": STEPS,
        "ranks": "first of each stage",
        "attention": "aten",
        "data": "mock, F2",
    }
    results.finish(args, "memory", settings=settings, rows=rows, goals=goals(rows))


if __name__ == "__main__":
    main()
