"""The native cores under sanitizers, driven by `csrc/tests/stress.cpp`, and without a warning of the compiler."""

import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "csrc"
CORES = [p for p in sorted(CSRC.glob("*.cpp")) if p.name != "bindings.cpp"]
STRESS = CSRC / "tests" / "stress.cpp"
CORPUS = Path(__file__).parents[1] / "fuzz" / "corpus" / "native"
FLAGS = "-std=c++17 -O1 -g1 -ffp-contract=off -pthread".split()
WARNINGS = "-Wall -Wextra -Wconversion -Wshadow -Werror".split()


MEMORY = ["-fsanitize=address,undefined,float-cast-overflow", "-fno-sanitize-recover=all"]


def compile_cpp(*arguments):
    compiler = shutil.which("g++") or pytest.fail("no g++; install a C++17 compiler, e.g. apt-get install g++")
    result = subprocess.run([compiler, *FLAGS, *map(str, arguments)], capture_output=True, text=True)
    if result.returncode:
        remedy = "; install the runtimes libasan, libubsan and libtsan" if "cannot find" in result.stderr else ""
        pytest.fail(f"g++ failed{remedy}:\n{result.stderr[-4000:]}")


@pytest.mark.parametrize("source", [*CORES, STRESS], ids=lambda p: p.name)
def test_no_warnings(source):
    compile_cpp(*WARNINGS, "-fsyntax-only", source)


@pytest.mark.parametrize(
    ("sanitizers", "runs"),
    [
        ([*MEMORY, "-O0"], ["0 200".split(), "0 500 bytes".split(), ["files", *sorted(CORPUS.iterdir())]]),
        (["-fsanitize=thread"], ["1000 40 threads".split()]),
    ],
    ids=["address and undefined", "thread"],
)
def test_stress(tmp_path, sanitizers, runs):
    binary = tmp_path / "stress"
    compile_cpp(*sanitizers, STRESS, *CORES, "-o", binary)
    for arguments in runs:
        result = subprocess.run([binary, *arguments], capture_output=True, text=True, timeout=600)
        assert result.returncode == 0, (result.stdout + result.stderr)[-8000:]
        assert result.stdout == "stress: ok\n"
        assert result.stderr == ""


def test_fuzz(tmp_path):
    """libFuzzer, where there is clang with it; its entry point also takes random bytes in `test_stress`."""
    compiler = shutil.which("clang++") or pytest.skip("no clang++")
    build = [compiler, *FLAGS, "-DWLB_FUZZ", "-fsanitize=fuzzer", *MEMORY, STRESS, *CORES, "-o", "fuzz"]
    built = subprocess.run(build, cwd=tmp_path, capture_output=True, text=True)
    if "libclang_rt" in built.stderr:
        pytest.skip("clang++ without its runtimes")
    assert built.returncode == 0, built.stderr[-4000:]
    (tmp_path / "new").mkdir()
    command = ["./fuzz", "-runs=20000", "-seed=1", "new", CORPUS]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr[-8000:]
    assert "Done 20000 runs" in result.stderr
