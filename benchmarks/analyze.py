"""What `megatron-wlb analyze` predicts for the jobs of scripts/slurm, on documents of F2; nothing runs on a GPU.

    python -m benchmarks.analyze [--check]

Megatron as most runs have it (attention across documents), with documents apart (a ring per document, over which
speed-ups are), and --wlb by its defaults, all with --tp-comm-overlap; `overlap_gain` is the time without it over the
time with, `delay` and `layouts` what these would bring.
Writes benchmarks/results/analyze.json, in about two minutes; its only measurement is how long a report takes.
"""

import contextlib
import io
import json
import shlex
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.lengths import WINDOW, f2
from benchmarks.results import Row
from megatron_wlb.cli.main import main as command
from tests.adapter.datasets import write_index

DOCUMENTS, STEPS = 10_000_000, 100
SECONDS = 10
"""CPU time that a report with pictures may take."""
SEVEN = (
    f"--model llama2-7b --seq-length {WINDOW} --tensor-model-parallel-size 8 --context-parallel-size 2 "
    "--pipeline-model-parallel-size 4 --tp-comm-overlap"
)
JOBS = {"7B, one virtual stage": SEVEN} | {
    name: f"scripts/slurm/{name.lower()}.sbatch" for name in ("550M", "7B", "30B", "70B")
}
"""All have a window of 131,072 tokens; the last four have a layer a virtual stage."""


def analysed(job: str, folder: Path, *, overlap: bool = True) -> tuple[dict[str, Any], float]:
    """The report, and the CPU seconds that it took."""
    words = ["--data-path", str(folder / "f2"), *job.split()]
    if job.endswith(".sbatch"):
        dry = subprocess.run(["bash", results.ROOT / job, "--dry-run"], check=True, capture_output=True, text=True)
        launched = [word for word in shlex.split(dry.stdout) if word != "--tp-comm-overlap"]
        words = [*words[:2], "--vocab-size", "32000", "--steps", str(STEPS), "--", *launched]
        words += ["--tp-comm-overlap"] * overlap
    outputs = ["--json", str(folder / "report.json"), "--html", str(folder / "report.html")]
    begin = time.process_time()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        if command(["analyze", *outputs, *words]):
            raise RuntimeError(f"megatron-wlb analyze {job} failed")
    return json.loads((folder / "report.json").read_text()), time.process_time() - begin


def main() -> None:
    args = results.parser(__doc__).parse_args()
    rows: list[Row] = []
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        write_index(Path(folder, "f2.idx"), f2(DOCUMENTS, seed=0))
        for name, job in JOBS.items():
            report, took = analysed(job, Path(folder))
            seconds.append(took)
            layout = {key: report["job"]["parallel"][key] for key in ("tp", "cp", "pp", "vpp", "dp")}
            shared = {"job": name, **layout, "windows": report["job"]["global_batch_size"]}
            shared |= {"limit": report["limit"]["speedup"], "flags": report["flags"], "headline": report["headline"]}
            shared |= {name: report[name] for name in ("readings", "delay", "layouts")}
            without = analysed(job, Path(folder), overlap=False)[0] if job.endswith(".sbatch") else report
            for scheme, numbers in report["schemes"].items():
                gain = without["schemes"][scheme]["us_per_token"] / numbers["us_per_token"]
                rows.append(shared | {"scheme": scheme, "overlap_gain": gain} | numbers)
            speedups = (f"{scheme} {numbers['speedup']:.3f}" for scheme, numbers in report["schemes"].items())
            print(name, *speedups, f"limit {shared['limit']:.3f}")
    goals = [results.at_most(f"report on {DOCUMENTS} documents, CPU seconds", seconds[0], SECONDS)]
    settings = {"lengths": "F2", "documents": DOCUMENTS, "window": WINDOW, "jobs": JOBS}
    results.finish(args, "analyze", settings=settings, rows=rows, goals=goals)


if __name__ == "__main__":
    main()
