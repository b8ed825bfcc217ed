"""Readers of input that others may have written, fuzzed: nothing crashes, hangs, fills the memory or strays.

    python -m benchmarks.fuzz [--minutes M] [--targets NAME ...] [--check]

Each reader runs for --minutes on mutations of its corpus in tests/fuzz/corpus, in a process that may not write outside
of its folder (tests/fuzz/loop.py). An input that breaks something is put into the corpus, so that the tests fail until
it is mended. Native cores are fuzzed by tests/plan/test_sanitizers.py. Writes benchmarks/results/fuzz.json.
"""

import hashlib
import sys
import time
from concurrent.futures import ProcessPoolExecutor

from benchmarks import results
from benchmarks.results import ROOT, Row
from tests.fuzz.loop import fuzz
from tests.fuzz.targets import TARGETS

CORPUS = ROOT / "tests" / "fuzz" / "corpus"


def corpus_of(name: str) -> list[bytes]:
    """Kept inputs of a target, by name."""
    return [path.read_bytes() for path in sorted((CORPUS / name).glob("*"))]


def in_python(name: str, seed: int, seconds: float) -> Row:
    """Fuzz one reader, and keep what breaks it."""
    begin = time.monotonic()
    outcome = fuzz(TARGETS[name], corpus_of(name), seed=seed, executions=sys.maxsize, seconds=seconds)
    taken = time.monotonic() - begin
    for data, what in outcome.findings:
        path = CORPUS / name / f"finding-{hashlib.blake2b(data, digest_size=6).hexdigest()}"
        path.write_bytes(data)
        print(f"{path}: {what}", file=sys.stderr)
    row: Row = {"target": name, "engine": "mutation", "executions": outcome.executions, "seconds": taken}
    return row | {"accepted": outcome.accepted, "kinds": len(outcome.kinds), "findings": len(outcome.findings)}


def main(argv: list[str] | None = None) -> None:
    parser = results.parser(__doc__)
    parser.add_argument("--minutes", type=float, default=5.0, help="of each reader; default: %(default)g")
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=TARGETS, help="default: all")
    args = parser.parse_args(argv)
    seed = time.time_ns() >> 32
    with ProcessPoolExecutor() as pool:
        parts = [pool.submit(in_python, name, seed, 60 * args.minutes) for name in args.targets]
        rows = [part.result() for part in parts]
    results.show(rows)
    settings = {"corpus_files": {name: len(corpus_of(name)) for name in args.targets}, "seed": seed}
    goal = results.at_most("crashes, hangs, strays", sum(row["findings"] for row in rows), 0)
    results.finish(args, "fuzz", settings=settings, rows=rows, goals=[goal])


if __name__ == "__main__":
    main()
