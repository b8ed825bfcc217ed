"""Everything that reads what others may have written, fuzzed: nothing crashes, hangs, fills the memory or strays.

    python -m benchmarks.fuzz [--minutes M] [--jobs N] [--executions N] [--resume] [--keep] [--check]

Each reader in Python is fuzzed for --minutes by mutations of its corpus in tests/fuzz/corpus, in a process that may not
write outside of its folder (tests/fuzz/loop.py); then the native cores, under the address and undefined-behaviour
sanitizers and by libFuzzer where clang has it, until all have run --executions together. Writes
benchmarks/results/fuzz.json after every part, and --resume goes on from there. An input that breaks something
is put into the corpus, so that the tests fail until it is mended; --keep adds inputs of new kinds.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from benchmarks import results
from benchmarks.results import Row
from tests.fuzz.loop import fuzz
from tests.fuzz.targets import TARGETS
from tests.plan.test_sanitizers import CORES, FLAGS, MEMORY, STRESS

CORPUS = Path(__file__).parents[1] / "tests" / "fuzz" / "corpus"
NATIVE = "native"
CHUNK = 50_000
"""Executions of the native cores between two writings of the results."""
LONGEST = 1024
"""Bytes of an input of the native cores."""


def corpus_of(name: str) -> list[bytes]:
    """Kept inputs of a target, by name."""
    return [path.read_bytes() for path in sorted((CORPUS / name).glob("*"))]


def keep(name: str, data: bytes, prefix: str = "") -> Path:
    """Put an input into the corpus of a target."""
    path = CORPUS / name / f"{prefix}{hashlib.blake2b(data, digest_size=6).hexdigest()}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def in_python(name: str, seed: int, seconds: float, keep_new: bool) -> Row:
    """A part of fuzzing one reader."""
    outcome = fuzz(TARGETS[name], corpus_of(name), seed=seed, executions=sys.maxsize, seconds=seconds)
    for data, what in outcome.findings:
        print(f"{name}: {keep(name, data, 'finding-')}: {what}", file=sys.stderr)
    for data in outcome.new if keep_new else ():
        keep(name, data)
    return {
        "target": name,
        "engine": "mutation",
        "seed": seed,
        "executions": outcome.executions,
        "seconds": outcome.seconds,
        "accepted": outcome.accepted,
        "kinds": outcome.kinds,
        "findings": len(outcome.findings),
    }


class Native:
    """The native cores, built into a folder; libFuzzer's where clang++ has it, else the driver on random bytes."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._binary = folder, folder / "fuzz"
        self._new = folder / "new"
        self._new.mkdir()
        (CORPUS / NATIVE).mkdir(parents=True, exist_ok=True)
        sources = [*map(str, (STRESS, *CORES)), "-o", str(self._binary)]
        clang = shutil.which("clang++")
        libfuzzer = ["-DWLB_FUZZ", "-fsanitize=fuzzer", *MEMORY, *sources]
        self.guided = bool(
            clang and not subprocess.run([clang, *FLAGS, "-O2", *libfuzzer], capture_output=True).returncode
        )
        if not self.guided:
            subprocess.run(["g++", *FLAGS, *MEMORY, *sources], check=True)

    def run(self, seed: int, executions: int) -> Row:
        """A part of fuzzing, by as many processes as there are cores."""
        jobs, begin = os.cpu_count() or 1, time.monotonic()
        share = -(-executions // jobs)
        commands = [self._command(seed * jobs + job, share) for job in range(jobs)]
        processes = [
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
            for command in commands
        ]
        outputs = [process.communicate()[0] for process in processes]
        ran = [re.search(r"stat::number_of_executed_units:\s*(\d+)", output) for output in outputs]
        for process, output in zip(processes, outputs, strict=True):
            if process.returncode:
                print(output[-6000:], file=sys.stderr)
        for data in (path.read_bytes() for path in self._folder.glob("finding-*")):
            print(f"{NATIVE}: {keep(NATIVE, data, 'finding-')}", file=sys.stderr)
        failed = sum(process.returncode != 0 for process in processes)
        return {
            "target": NATIVE,
            "seed": seed,
            "engine": "libFuzzer" if self.guided else "random bytes",
            "executions": sum(int(match[1]) for match in ran if match) if self.guided else share * (jobs - failed),
            "seconds": time.monotonic() - begin,
            "findings": failed,
        }

    def keep(self) -> None:
        """Add to the corpus what reaches parts of the code that it does not."""
        if self.guided:
            merge = [self._binary, "-set_cover_merge=1", f"-max_len={LONGEST}", CORPUS / NATIVE, self._new]
            subprocess.run(merge, check=True, capture_output=True)

    def _command(self, seed: int, executions: int) -> list[str]:
        if not self.guided:
            return [str(self._binary), str(seed << 32), str(executions), "bytes"]
        limits = [f"-max_len={LONGEST}", "-timeout=60", "-rss_limit_mb=2048", "-print_final_stats=1"]
        places = [f"-artifact_prefix={self._folder}/finding-", str(self._new), str(CORPUS / NATIVE)]
        return [str(self._binary), f"-runs={executions}", f"-seed={seed + 1}", *limits, *places]


class Record:
    """The result file: rows by target, to which parts are added."""

    def __init__(self, goal: int, resume: bool) -> None:
        self._goal, self._rows, self._parts = goal, [], []  # type: ignore[var-annotated]
        path = results.FOLDER / "fuzz.json"
        if resume and path.exists():
            before = json.loads(path.read_text())
            self._rows, self._parts = before["rows"], before["settings"]["parts"]
        self.seed = max((part["seed"] for part in self._parts), default=0) + 1
        """Seed of the next part."""

    @property
    def executions(self) -> int:
        return sum(row["executions"] for row in self._rows)

    @property
    def goals(self) -> list[results.Goal]:
        findings = sum(row["findings"] for row in self._rows)
        return [
            results.at_least("executions", self.executions, self._goal),
            results.at_most("crashes, hangs, strays", findings, 0),
        ]

    def add(self, part: Row) -> None:
        """Count a part, and write the file."""
        row = next((r for r in self._rows if (r["target"], r["engine"]) == (part["target"], part["engine"])), None)
        if row is None:
            self._rows.append({name: value for name, value in part.items() if name != "seed"})
        else:
            for name in ("executions", "seconds", "accepted", "findings"):
                if name in part:
                    row[name] += part[name]
            row |= {name: max(row[name], part[name]) for name in ("kinds",) if name in part}
        self._parts.append({name: part[name] for name in ("target", "seed", "executions")})
        self.seed = max(self.seed, part["seed"] + 1)
        corpus = {path.name: len(list(path.iterdir())) for path in sorted(CORPUS.iterdir()) if path.is_dir()}
        settings = {"corpus_files": corpus, "longest_native_bytes": LONGEST, "parts": self._parts}
        results.write("fuzz", settings=settings, rows=self._rows, goals=self.goals)
        each = part["executions"] / max(part["seconds"], 1e-9)
        rate = f"{part['executions']} in {part['seconds']:.0f} s, {each:.0f} a second"
        print(f"{part['target']}: {rate}; {self.executions} in all", flush=True)


def main(argv: list[str] | None = None) -> None:
    parser = results.parser(__doc__)
    parser.add_argument("--minutes", type=float, default=5.0, help="of each reader in Python; default: %(default)g")
    parser.add_argument("--jobs", type=int, help="readers in Python at once; default: one a core")
    parser.add_argument("--executions", type=int, default=10_000_000, help="in all; default: %(default)s")
    parser.add_argument("--targets", nargs="+", choices=[*TARGETS, NATIVE], default=[*TARGETS, NATIVE])
    parser.add_argument("--resume", action="store_true", help="go on from the result file")
    parser.add_argument("--keep", action="store_true", help="add inputs of new kinds to the corpus")
    args = parser.parse_args(argv)
    record = Record(args.executions, args.resume)
    readers = [name for name in TARGETS if name in args.targets]
    with ProcessPoolExecutor(args.jobs) as pool:
        parts = [
            pool.submit(in_python, n, record.seed + i, 60 * args.minutes, args.keep) for i, n in enumerate(readers)
        ]
        for part in as_completed(parts):
            record.add(part.result())
    if NATIVE in args.targets:
        with tempfile.TemporaryDirectory() as folder:
            native, broken = Native(Path(folder)), False
            while record.executions < args.executions and not broken:
                part = native.run(record.seed, min(CHUNK, args.executions - record.executions))
                record.add(part)
                broken = part["findings"] > 0 or not part["executions"]
            if args.keep:
                native.keep()
    results.conclude(record.goals, args.check)


if __name__ == "__main__":
    main()
