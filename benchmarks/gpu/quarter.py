"""All that a quarter of an hour on one GPU can show, in one command, the most valuable first.

    python -m benchmarks.gpu.quarter --out FOLDER --minutes 9.2 [--travel FOLDER] [--script CHECKOUT/pretrain_gpt.py]
    python -m benchmarks.gpu.quarter --out FOLDER --rehearse

Every step is a process group that is ended at its limit, and does not begin with less time left than it takes. Called
again with the same folder, it goes on behind the last step that ended; a step that failed is not repeated. After each
step it prints the table so far, and the folder has state.json, the result files, and all logs in logs.tar.xz.
--rehearse runs every step at a tiny size on a CPU, so that none is started for the first time on a GPU.
"""

import argparse
import contextlib
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import results
from benchmarks.results import ROOT
from megatron_wlb.hardware.profile import gpu_of

PYTHON = sys.executable


class Step(NamedTuple):
    name: str
    seconds: float
    """What it takes on an H100, by the last run or a guess."""
    limit: float
    words: str
    """Module and arguments; GPU fills in {script}, {library} and {out}."""
    rehearsed: str = ""
    """The same at a tiny size; "" where another step is the same module, or tests run it."""
    after: str = ""
    """A step without which this one is in vain."""


LARGE = '--jobs "4 layers of Llama-3-8B" --ways megatron wlb --kernels'
FIRST = '"CP2" "PP4 VPP2" "CP2 PP2" "PP2 VPP2" "DP2"'
REST = '"TP2" "CP2, gated delta nets" "CP2, all recomputed" "CP2, latents"'
FP8 = '"tiny, FP8 tensorwise" "tiny, FP8 delayed" "tiny, FP8 blockwise"'
RANKS = "benchmarks.gpu.ranks --script {script} {library} --output {out}"
TRAINING = "benchmarks.gpu.training {script} --output {out}"
STEPS = (
    Step(
        "smoke",
        20,
        90,
        "benchmarks.gpu.smoke {library} --limit 20 --output {out}",
        "benchmarks.gpu.smoke --ranks 2 --output {out}",
    ),
    Step("large", 75, 110, f"{TRAINING} {LARGE}", f"{TRAINING} {LARGE} --rehearse --steps 6"),
    Step(
        "7b",
        120,
        170,
        "benchmarks.gpu.composed 7b --script {script} --output {out}",
        "benchmarks.gpu.composed rehearsed --script {script} --output {out}",
    ),
    Step("ranks", 90, 130, f"{RANKS} --layouts {FIRST}", f"{RANKS} --rehearse --layouts CP2 --check", after="smoke"),
    Step("8b", 50, 80, "benchmarks.gpu.composed 8b --script {script} --output {out}"),
    Step("probes", 15, 40, "benchmarks.gpu.probes --output {out}", "benchmarks.gpu.probes --rehearse --output {out}"),
    Step("more ranks", 80, 120, f"{RANKS} --name ranks_rest --layouts {REST}", after="smoke"),
    Step("profile", 35, 50, "megatron_wlb profile --model llama2-7b --output {out}/profile.json"),
    Step("tests", 25, 45, "pytest tests/gpu -n 8 -q -rfEs"),
    Step("cp_attention", 20, 60, "benchmarks.gpu.cp_attention --minutes 0.5 --output {out}"),
    Step("FP8", 60, 100, f"{TRAINING} --name training_fp8 --steps 6 --jobs {FP8}"),
)
"""By value for their time: first what README says without evidence from a GPU, the exchange and the gain."""
REHEARSED_LIMIT = 600.0
"""Of a step on a CPU, however busy; what takes longer hangs."""
DONE, FAILED, OVER, BEGUN, NO_TIME, IN_VAIN = "done", "failed", "over its limit", "begun", "no time left", "in vain"
ENDED = (DONE, FAILED, OVER)
"""States of steps that are not repeated."""


class Quarter:
    """The steps in a folder, until a time."""

    def __init__(self, out: Path, minutes: float, known: dict[str, str], *, rehearse: bool, commit: str = "") -> None:
        self._out, self._known, self._rehearse, self._commit = out, known, rehearse, commit
        self._end = time.monotonic() + 60 * minutes
        self._logs = out / "work" / "logs"
        self._logs.mkdir(parents=True, exist_ok=True)
        self._file = out / "state.json"
        self.state: dict[str, dict[str, Any]] = json.loads(self._file.read_text()) if self._file.exists() else {}

    def run(self, steps: tuple[Step, ...] = STEPS) -> None:
        for step in steps:
            if self.state.get(step.name, {}).get("state") in ENDED or (self._rehearse and not step.rehearsed):
                continue
            left = self._end - time.monotonic()
            if step.after and self.state.get(step.after, {}).get("state") != DONE:
                self._note(step, IN_VAIN, 0.0, f"without {step.after}")
            elif left < step.seconds and not self._rehearse:
                self._note(step, NO_TIME, 0.0, f"{left:.0f} s")
            else:
                self._one(step, min(REHEARSED_LIMIT if self._rehearse else step.limit, left))
            self._pack()
            print(self.table(steps), flush=True)

    def _one(self, step: Step, limit: float) -> None:
        self._note(step, BEGUN, 0.0, "")
        module, *words = shlex.split((step.rehearsed if self._rehearse else step.words).format(**self._known))
        if self._commit and module.startswith("benchmarks."):
            words += ["--commit", self._commit]
        begin, log = time.monotonic(), self._logs / f"{step.name}.log"
        with log.open("w") as file:
            process = subprocess.Popen(
                [PYTHON, "-m", module, *words], cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                state = FAILED if process.wait(limit) else DONE
            except subprocess.TimeoutExpired:
                state = OVER
            finally:  # with whatever it has started
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        self._note(step, state, time.monotonic() - begin, lines[-1] if lines else "")

    def _note(self, step: Step, state: str, seconds: float, said: str) -> None:
        self.state[step.name] = {"state": state, "seconds": round(seconds, 1), "said": said}
        results.write_whole(self._file, json.dumps(self.state, indent=1) + "\n")

    def _pack(self) -> None:
        """Put all logs into one archive: of steps, and of the runs that they started."""
        with tarfile.open(self._out / "logs.tar.xz", "w:xz", preset=1) as archive:
            for path in sorted((self._out / "work").rglob("*")):
                if path.suffix in (".log", ".jsonl") or ", hang of rank " in path.name:
                    archive.add(path, str(path.relative_to(self._out / "work")))

    def table(self, steps: tuple[Step, ...] = STEPS) -> str:
        rows = [f"{'step':14}{'state':16}{'s':>6} {'limit':>6}  last line"]
        for step in steps:
            of = self.state.get(step.name, {"state": "", "seconds": 0.0, "said": ""})
            said = of["said"][:100]
            rows.append(f"{step.name:14}{of['state']:16}{of['seconds']:6.0f} {step.limit:6.0f}  {said}")
        return "\n".join(["", *rows])


def keep(out: Path) -> list[Path]:
    """Copy the result files of a GPU into benchmarks/results."""
    kept = []
    for path in sorted(out.glob("*.json")):
        if gpu := gpu_of(json.loads(path.read_text()).get("device") or ""):
            name = path.name if path.stem.endswith(gpu) else f"{path.stem}_{gpu}.json"  # a profile has no suffix
            kept.append(results.write_whole(results.FOLDER / name, path.read_text()))
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--minutes", type=float, default=9.2, help="default: %(default)s")
    parser.add_argument("--travel", type=Path, metavar="FOLDER", help="what benchmarks.gpu.travel made")
    parser.add_argument("--script", type=Path, help="pretrain_gpt.py of a checkout; default: that of --travel")
    parser.add_argument("--commit", default="", help="that is measured; default: git's, which a copied tree lacks")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, at tiny sizes")
    parser.add_argument("--keep", action="store_true", help="copy the result files into benchmarks/results, and end")
    args = parser.parse_args()
    if args.keep:
        print(*keep(args.out), sep="\n")
        return
    out = args.out.resolve()
    caches = {name: str(out / "work" / name.lower()) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
    os.environ.update(caches, TEARDOWN_CUPTI="1")
    known = {"out": str(out), "library": "", "script": str(args.script or "")}
    if args.travel:
        from benchmarks.gpu import travel

        there = travel.unpack(args.travel, out / "work" / "unpacked")
        os.environ["PYTHONPATH"] = os.pathsep.join([str(there.site), os.environ.get("PYTHONPATH", "")])
        known["library"] = f"--library {shlex.quote(str(there.nccl))}"
        known["script"] = known["script"] or str(there.script)
    if args.rehearse:
        known |= {"script": "tests/adapter/upstream_script.py", "library": ""}
        os.environ["OMP_NUM_THREADS"] = "1"
    if not known["script"]:
        parser.error("no script; give --script CHECKOUT/pretrain_gpt.py, or --travel")
    minutes = math.inf if args.rehearse else args.minutes
    quarter = Quarter(out, minutes, known, rehearse=args.rehearse, commit=args.commit)
    quarter.run()
    if args.rehearse and any(of["state"] != DONE for of in quarter.state.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
