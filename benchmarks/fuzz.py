"""Readers of input that others may have written, fuzzed: nothing crashes, hangs, fills the memory or strays.

    python -m benchmarks.fuzz [--minutes M] [--executions N] [--targets NAME ...] [--check]

Each reader in Python runs for --minutes on mutations of its corpus in tests/fuzz/corpus, in a process that may not
write outside of its folder (tests/fuzz/loop.py). The native cores run --executions under the address and
undefined-behaviour sanitizers, by libFuzzer where clang has it, else on random bytes. An input that breaks something
is put into the corpus, so that the tests fail until it is mended. Writes benchmarks/results/fuzz.json.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from benchmarks import results
from benchmarks.results import ROOT, Row
from tests.fuzz.loop import fuzz
from tests.fuzz.targets import TARGETS
from tests.plan.test_sanitizers import CORES, FLAGS, MEMORY, STRESS

CORPUS = ROOT / "tests" / "fuzz" / "corpus"
NATIVE = "native"
LONGEST = 1024
"""Bytes of an input of the native cores."""


def corpus_of(name: str) -> list[bytes]:
    """Kept inputs of a target, by name."""
    return [path.read_bytes() for path in sorted((CORPUS / name).glob("*"))]


def keep(name: str, data: bytes) -> None:
    """Put a finding into the corpus of a target."""
    path = CORPUS / name / f"finding-{hashlib.blake2b(data, digest_size=6).hexdigest()}"
    path.write_bytes(data)
    print(f"{name}: {path}", file=sys.stderr)


def in_python(name: str, seed: int, seconds: float) -> Row:
    """Fuzz one reader."""
    outcome = fuzz(TARGETS[name], corpus_of(name), seed=seed, executions=sys.maxsize, seconds=seconds)
    for data, what in outcome.findings:
        keep(name, data)
        print(f"{name}: {what}", file=sys.stderr)
    row: Row = {"target": name, "engine": "mutation", "executions": outcome.executions, "seconds": outcome.seconds}
    return row | {"accepted": outcome.accepted, "kinds": outcome.kinds, "findings": len(outcome.findings)}


def native(folder: Path, seed: int, executions: int) -> Row:
    """Fuzz the native cores, built into a folder."""
    binary, clang, begin = folder / "fuzz", shutil.which("clang++"), time.monotonic()
    build = [*FLAGS, *MEMORY, str(STRESS), *map(str, CORES), "-o", str(binary)]
    libfuzzer = [clang or "", "-O2", "-DWLB_FUZZ", "-fsanitize=fuzzer", *build]
    guided = bool(clang) and not subprocess.run(libfuzzer, capture_output=True).returncode
    if guided:
        limits = [f"-max_len={LONGEST}", "-timeout=60", "-rss_limit_mb=2048", f"-artifact_prefix={folder}/finding-"]
        (folder / "new").mkdir()
        command = [binary, f"-runs={executions}", f"-seed={seed}", *limits, folder / "new", CORPUS / NATIVE]
    else:
        subprocess.run(["g++", *build], check=True)
        command = [binary, str(seed << 32), str(executions), "bytes"]
    run = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if run.returncode:
        print((run.stdout + run.stderr)[-6000:], file=sys.stderr)
    for path in folder.glob("finding-*"):
        keep(NATIVE, path.read_bytes())
    row: Row = {"target": NATIVE, "engine": "libFuzzer" if guided else "random bytes", "executions": executions}
    return row | {"seconds": time.monotonic() - begin, "findings": int(run.returncode != 0)}


def main(argv: list[str] | None = None) -> None:
    parser = results.parser(__doc__)
    parser.add_argument("--minutes", type=float, default=5.0, help="of each reader in Python; default: %(default)g")
    parser.add_argument("--executions", type=int, default=500_000, help="of the native cores; default: %(default)s")
    parser.add_argument("--targets", nargs="+", choices=[*TARGETS, NATIVE], default=[*TARGETS, NATIVE])
    parser.add_argument("--seed", type=int, default=time.time_ns() >> 32, help="default: by the clock")
    args = parser.parse_args(argv)
    readers = [name for name in TARGETS if name in args.targets]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        parts = [pool.submit(in_python, name, args.seed, 60 * args.minutes) for name in readers]
        rows = [part.result() for part in parts]
    if NATIVE in args.targets:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(native(Path(folder), args.seed, args.executions))
    results.show(rows)
    corpus = {path.name: len(list(path.iterdir())) for path in sorted(CORPUS.iterdir()) if path.is_dir()}
    settings = {"corpus_files": corpus, "longest_native_bytes": LONGEST, "seed": args.seed}
    goal = results.at_most("crashes, hangs, strays", sum(row["findings"] for row in rows), 0)
    results.finish(args, "fuzz", settings=settings, rows=rows, goals=[goal])


if __name__ == "__main__":
    main()
